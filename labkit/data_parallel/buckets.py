"""Buckets: which gradients travel together, and the flat buffers that they lie in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch


def assign(
    sizes: Sequence[int], cap: int, kinds: Sequence[Hashable] | None = None, first: int | None = None
) -> list[list[int]]:
    """Put tensors into buckets, in the given order: a bucket is closed once it holds `cap` bytes or more.

    So a bucket is larger than `cap` by less than its last tensor, and a tensor is never cut. Tensors of different kinds
    (element type, device) cannot share a buffer: each kind fills buckets of its own. Buckets are ordered by their first
    tensor.

    Args:
        sizes: Bytes of each tensor, in the order in which gradients are expected: the last layer's first.
        cap: Bytes.
        kinds: Of each tensor; ``None``: all alike.
        first: Bytes at which the first bucket of a kind is closed; ``None``: `cap`. A small one leaves early.

    Returns:
        Indices into `sizes`, a list a bucket.

    Raises:
        ValueError: `cap` or `first` is not positive.

    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2.3.

    >>> assign([4, 4, 10, 1, 1], cap=8)
    [[0, 1], [2], [3, 4]]
    """
    for name, limit in (("cap", cap), ("first", first)):
        if limit is not None and limit <= 0:
            raise ValueError(f"{name}={limit}: expected a positive number of bytes")
    buckets: list[list[int]] = []
    limits: dict[Hashable, int] = {}
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for index, size in enumerate(sizes):
        kind = kinds[index] if kinds is not None else None
        bucket, held = filling.get(kind, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        filling[kind] = (bucket, held + size)
        if held + size >= limits.get(kind, cap if first is None else first):
            del filling[kind]
            limits[kind] = cap
    return buckets


class Bucket:
    """A flat buffer, and a view into it for each parameter's gradient.

    Attributes:
        flat: (elements of all its parameters), no padding.
        members: Indices of the parameters, in the order in which they lie in `flat`.
        views: Parameter index → its gradient's place in `flat`, in the parameter's shape and order in memory.
        waits_for: Members whose gradient has not arrived in this backward.
    """

    def __init__(self, members: Sequence[int], params: Sequence[torch.nn.Parameter]) -> None:
        first = params[members[0]]
        self.members = list(members)
        self.flat = torch.zeros(sum(params[i].numel() for i in members), dtype=first.dtype, device=first.device)
        pieces = self.flat.split([params[i].numel() for i in members])
        self.views = {i: _like(piece, params[i]) for i, piece in zip(members, pieces, strict=True)}
        self.waits_for: set[int] = set()

    @property
    def is_full(self) -> bool:
        return not self.waits_for

    def take(self, index: int, param: torch.nn.Parameter) -> None:
        """From now on the parameter's gradient lies here; what it holds is kept."""
        if param.grad is not None and param.grad is not self.views[index]:
            self.views[index].copy_(param.grad)
        param.grad = self.views[index]


def _like(piece: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A flat piece as `param` lies in memory, such as channels last: fused optimizers go through both side by side."""
    expected = 1
    for size, stride in sorted(zip(param.shape, param.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != expected:  # it has gaps
            return piece.view(param.shape)
        expected *= size
    return piece.as_strided(param.shape, param.stride()) if param.numel() else piece.view(param.shape)
