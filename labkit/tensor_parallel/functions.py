"""f and g: where a layer splits into ranks, and where it comes together.

    f  copy_to_group      forward: nothing        backward: all-reduce
    g  reduce_from_group  forward: all-reduce     backward: nothing

They are each other's mirror image. Between f and g each rank works on its own part of a layer. What enters is the same
on all ranks, so forward need not send it; but each rank then knows only its own part's share of the gradient, and the
shares add up: without f the loss is right, and every gradient before f is wrong.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (f, g); Korthikanti et al. 2022, section 4.2.1 (f, f̄).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.collectives import again, asked, check

Group = dist.ProcessGroup | None


def copy_to_group(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """f: hand the same `x` to every rank's part of a layer.

    Args:
        x: Any shape, the same on every rank of the group.
        group: The tensor-parallel group; ``None`` is the world.

    Returns:
        `x`. In backward the ranks' gradients are added up.
    """
    return _Copy.apply(_usable(x, group), group)


def reduce_from_group(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """g: add up what the ranks' parts of a layer have made.

    Args:
        x: Any shape, each rank's share.
        group: The tensor-parallel group.

    Returns:
        The sum, the same bits on every rank. In backward each rank takes the gradient as it is.
    """
    return _Reduce.apply(_usable(x, group), group)


def gather_from_group(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Put the ranks' parts side by side along the last dimension.

    Args:
        x: (…, n), each rank's part.

    Returns:
        (…, N·n), the same on every rank. In backward each rank takes its own part of the gradient.
    """
    return _Gather.apply(_usable(x, group), group)


def split_to_group(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Take this rank's part along the last dimension.

    Args:
        x: (…, N·n), the same on every rank.

    Returns:
        (…, n). In backward the parts' gradients are put side by side.
    """
    return _Split.apply(_usable(x, group), group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.algorithm = group, asked()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        with again(ctx.algorithm):
            return _Reduce.apply(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.algorithm = group, asked()
        total = x.clone(memory_format=torch.contiguous_format)  # x may be needed by others
        collectives.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        with again(ctx.algorithm):
            return _Copy.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.algorithm = group, asked()
        parts = x.new_empty(dist.get_world_size(group), *x.shape)
        collectives.all_gather(parts, x, group=group)
        return torch.cat(parts.unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        with again(ctx.algorithm):
            return _Split.apply(grad, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.algorithm = group, asked()
        return shard(x, -1, group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        with again(ctx.algorithm):
            return _Gather.apply(grad, ctx.group), None


def _usable(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x` itself, if this rank is a member of the group and `x` something that a collective can take."""
    check.member(group)
    check.tensor("x", x, written=False)
    return x


def shard(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's equal part of `x` along `dim`, a view.

    Raises:
        TypeError, ValueError: The ranks do not divide the dimension, or this one is no member.
    """
    check.member(group)
    ranks = dist.get_world_size(group)
    if x.shape[dim] % ranks:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} elements: expected a multiple of the "
                         f"{ranks} ranks that share it")  # fmt: skip
    return x.chunk(ranks, dim)[dist.get_rank(group)]
