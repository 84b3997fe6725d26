"""Data parallelism in ten lines: wait for the whole backward, then average one gradient after the other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.trace import label


@torch.no_grad()
def average_gradients(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average every gradient over the group, an all-reduce each, in place; call it after ``backward()``.

    What it costs is why `DistributedDataParallel` exists: nothing overlaps, and each parameter, however small, pays the
    latency of a message.

    Args:
        module: The same on every rank. A parameter without a gradient brings zeros, so that all ranks make the same
            calls.
        group: Members; ``None`` is the world.
    """
    for number, param in enumerate(reversed([p for p in module.parameters() if p.requires_grad])):
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        with label(bucket=number):
            collectives.all_reduce(param.grad, op="avg", group=group)
