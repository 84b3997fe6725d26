"""A run of a tensor's elements, as `torch.distributed.checkpoint` wants to be told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # a second to import, which is for who saves to pay
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Run(torch.Tensor):
    """(length,), a view: this rank's elements of a tensor that lies flat, and of which other ranks have the rest.

    torch's checkpoints know tensors that are whole, and DTensors, cut along a dimension into equal parts. A shard of
    ZeRO ends anywhere. What has these three methods is asked where it lies: they are torch's protocol for DTensor.

    Attributes:
        offset: Elements of the whole before this run.
        whole: Elements of the whole.

    >>> part = Run.of(torch.tensor([3.0, 4.0]), offset=3, whole=5)
    >>> part.offset, part.whole, part.numel()
    (3, 5, 2)
    """

    offset: int
    whole: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # its operations give plain tensors

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int, whole: int) -> Run:
        """`tensor` (length,), where it begins in the whole, and how many elements that has."""
        run = tensor.detach().as_subclass(cls)
        run.offset, run.whole = offset, whole
        return run

    def size(self, *_: object) -> torch.Size:  # type: ignore[override]
        """The whole's, as a DTensor's is: torch compares it with what was saved."""
        return torch.Size([self.whole])

    def _chunk(self) -> ChunkStorageMetadata:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(offsets=torch.Size([self.offset]), sizes=torch.Size([self.numel()]))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        data = TensorWriteData(chunk=self._chunk(), properties=properties, size=torch.Size([self.whole]))
        return [WriteItem(MetadataIndex(fqn, torch.Size([self.offset])), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)
