"""Gradients that are marked as partial: their shards are added up over the groups of the mark, besides the mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.collectives import Placement


def sum_partial(pieces: Iterable[tuple[torch.Tensor, Placement]]) -> None:
    """Add up, in place, what each rank of a ``partial`` group has a part of (sequence parallelism's norms).

    Sums over two groups may change places, so this need not wait for the whole gradient: 1/N of it travels. In fp32 or
    wider.

    Args:
        pieces: (gradient, placement), in one order on the ranks of each group.
    """
    waiting: dict[Any, list[torch.Tensor]] = {}
    for grad, where in pieces:
        for group in where.partial:
            if dist.get_world_size(group) > 1:
                waiting.setdefault(group, []).append(grad)
    for group, grads in waiting.items():
        flat = torch.cat(grads)
        total = flat.to(torch.promote_types(flat.dtype, torch.float32))
        collectives.all_reduce(total, group=group)
        for grad, part in zip(grads, total.to(flat.dtype).split([g.numel() for g in grads]), strict=True):
            grad.copy_(part)
