"""A flat buffer whose memory comes and goes, while the tensors that lie in it stay the same objects."""

from __future__ import annotations

import torch


class Room:
    """Memory for a unit's gathered parameters, or for its full gradients: there when needed, 0 bytes otherwise.

    Autograd's graph remembers the tensors that a forward has used. If the memory *under* them may go and come back,
    with the same values, backward need not know. The version counters of tensors that lie here do not move when the
    room is filled: to autograd nothing was changed.

    Args:
        numel: Elements of the buffer.
        like: A tensor of its device.
        dtype: Of its elements.

    >>> room = Room(6, torch.zeros(0), torch.float32)
    >>> seen = room.place(2, torch.Size([2, 2]))
    >>> room.free()
    >>> room.nbytes, seen.shape
    (0, torch.Size([2, 2]))
    >>> room.open().copy_(torch.arange(6)); seen.tolist()
    tensor([0., 1., 2., 3., 4., 5.])
    [[2.0, 3.0], [4.0, 5.0]]

    Source: PyTorch's FSDP (Zhao et al. 2023, "PyTorch FSDP", section 4.2), which resizes storages in the same way.
    """

    def __init__(self, numel: int, like: torch.Tensor, dtype: torch.dtype) -> None:
        self._numel = numel
        self._flat = torch.empty(numel, dtype=dtype, device=like.device)

    def place(self, start: int, shape: torch.Size) -> torch.Tensor:
        """A tensor of this shape that lies here from element `start` on; made while there is memory."""
        return self._flat[start : start + shape.numel()].view(shape).data

    @property
    def nbytes(self) -> int:
        return self._flat.untyped_storage().nbytes()

    @property
    def flat(self) -> torch.Tensor:
        """(elements), or empty while there is no memory."""
        return self._flat

    def open(self) -> torch.Tensor:
        """Have memory, with any values in it; returns the whole buffer."""
        return self._flat.resize_(self._numel)  # an operation, which a memory meter sees; storage.resize_ is none

    def free(self) -> None:
        """Have none. Whoever reads a tensor that lies here now gets an error from torch, not old values."""
        self._flat.untyped_storage().resize_(0)
        self._flat.resize_(0)
