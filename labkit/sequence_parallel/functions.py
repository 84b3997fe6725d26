"""ḡ and its mirror image: activations that lie on s/t of the sequence between the layers' split parts.

    gather_from_sequence        forward: all-gather        backward: reduce-scatter
    reduce_scatter_to_sequence  forward: reduce-scatter    backward: all-gather

Where tensor parallelism has f and g, these two stand. An all-reduce is a reduce-scatter and an all-gather (chapter 02),
so as many bytes travel; but between the two halves norms, dropout and residuals work on 1/t of the tokens.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2 (g, ḡ).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.collectives import again, asked, check

Group = dist.ProcessGroup | None


def gather_from_sequence(x: torch.Tensor, group: Group = None, partial: bool = True) -> torch.Tensor:
    """All tokens, from every rank's share of the sequence.

    Args:
        x: (b, s/N, …).
        group: The tensor-parallel group; ``None`` is the world.
        partial: What follows is split among the ranks: each knows a part of the gradient's sum. ``False``: all ranks do
            the same with it, and each takes its own share of the gradient.

    Returns:
        (b, s, …), the same on every rank.
    """
    return _Gather.apply(_usable(x, group), group, partial)


def reduce_scatter_to_sequence(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Add up what the ranks have made of all tokens, and keep this rank's share of the sequence.

    Args:
        x: (b, s, …), each rank's part of a sum.

    Returns:
        (b, s/N, …).

    Raises:
        ValueError: The ranks do not divide the sequence.
    """
    return _ReduceScatter.apply(_usable(x, group), group)


def scatter_to_sequence(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Keep this rank's share of the sequence.

    Args:
        x: (b, s, …), the same on every rank.

    Returns:
        (b, s/N, …). In backward the shares are put together again.

    Raises:
        ValueError: The ranks do not divide the sequence.
    """
    return _Scatter.apply(_usable(x, group), group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, partial: bool) -> torch.Tensor:
        ctx.group, ctx.algorithm, ctx.partial = group, asked(), partial
        return Gathering(x, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        with again(ctx.algorithm):
            return (_ReduceScatter if ctx.partial else _Scatter).apply(grad, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.algorithm = group, asked()
        return Scattering(x, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        with again(ctx.algorithm):
            return _Gather.apply(grad, ctx.group, True), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.algorithm = group, asked()
        share = by_rank(x, group)[:, dist.get_rank(group)]
        return share.clone(memory_format=torch.contiguous_format)  # a view would keep all of x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        with again(ctx.algorithm):
            return _Gather.apply(grad, ctx.group, False), None


class Gathering:
    """An all-gather along the sequence under way."""

    def __init__(self, x: torch.Tensor, group: Group, async_op: bool = False) -> None:
        self._parts = x.new_empty(dist.get_world_size(group), *x.shape)  # (N, b, s/N, …)
        self._handle = collectives.all_gather(self._parts, x.contiguous(), group=group, async_op=async_op)

    def wait(self) -> torch.Tensor:
        """(b, s, …)."""
        if self._handle is not None:
            self._handle.wait()
        return self._parts.movedim(0, 1).flatten(1, 2)


class Scattering:
    """A reduce-scatter along the sequence under way."""

    def __init__(self, x: torch.Tensor, group: Group, async_op: bool = False) -> None:
        self._parts = by_rank(x, group).movedim(1, 0).contiguous()  # (N, b, s/N, …)
        self._share = torch.empty_like(self._parts[0])
        self._handle = collectives.reduce_scatter(self._share, self._parts, group=group, async_op=async_op)

    def wait(self) -> torch.Tensor:
        """(b, s/N, …)."""
        if self._handle is not None:
            self._handle.wait()
        return self._share


def _usable(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x` itself, if this rank is a member of the group and `x` has a sequence."""
    check.member(group)
    check.tensor("x", x, written=False)
    if x.dim() < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected (b, s, …)")
    return x


def by_rank(x: torch.Tensor, group: Group) -> torch.Tensor:
    """(b, s, …) as (b, N, s/N, …).

    Raises:
        ValueError: The ranks do not divide the sequence.
    """
    ranks = dist.get_world_size(group)
    if x.shape[1] % ranks:
        raise ValueError(f"a sequence of {x.shape[1]} tokens on {ranks} ranks: expected a multiple; pad it to "
                         f"{-(-x.shape[1] // ranks) * ranks}, with targets of ignore_index")  # fmt: skip
    return x.unflatten(1, (ranks, -1))
