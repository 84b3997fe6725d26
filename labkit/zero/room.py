"""A flat buffer whose memory comes and goes, while the tensors that lie in it stay the same objects."""

from __future__ import annotations

import torch


class Room:
    """Memory for a unit's gathered parameters, or for its full gradients: there when needed, 0 bytes otherwise.

    Autograd's graph remembers the tensors that a forward has used. If the memory *under* them goes, and is back with
    the same values when backward needs it, the graph need not know. The version counters of tensors that lie here do
    not move when the room is filled: to autograd nothing was changed.

    Args:
        numel: Elements of the buffer.
        dtype, device: Of its elements.

    >>> room = Room(6, torch.float32, torch.device("cpu"))
    >>> room.nbytes, room.open().numel()
    (0, 6)
    >>> seen = room.place(2, torch.Size([2, 2]))
    >>> room.free()
    >>> room.nbytes, seen.shape
    (0, torch.Size([2, 2]))
    >>> _ = room.open().copy_(torch.arange(6))
    >>> seen.tolist()
    [[2.0, 3.0], [4.0, 5.0]]

    Source: Zhao et al. 2023, "PyTorch FSDP", section 4.2: torch resizes storages in the same way.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel = numel
        self.flat = torch.empty(0, dtype=dtype, device=device)  # all of it, or nothing

    def place(self, start: int, shape: torch.Size) -> torch.Tensor:
        """A tensor that lies here from element `start` on; to be made while there is memory."""
        return self.flat[start : start + shape.numel()].view(shape).data  # with a version counter of its own

    @property
    def nbytes(self) -> int:
        return self.flat.untyped_storage().nbytes()

    def open(self) -> torch.Tensor:
        """Have memory, with any values in it; returns the whole buffer, (numel)."""
        return self.flat.resize_(self._numel)  # an operation, so that a memory meter sees it

    def free(self) -> None:
        """Have none. Who reads a tensor that lies here then gets an error from torch, not old values."""
        self.flat.untyped_storage().resize_(0)
        self.flat.resize_(0)
