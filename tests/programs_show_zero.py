"""Steps of real sharded training, whose traces `show.zero` draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from labkit import collectives, device, trace
from labkit.data_parallel import DistributedDataParallel
from labkit.zero import FullyShardedDataParallel, ShardedOptimizer

WIDTH, BLOCKS = 16, 3


class Blocks(nn.Module):
    """Three equal blocks and, around them, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def step(stage: int, micro_batches: int = 1, native: bool = False, **options: Any) -> None:
    """Forward, backward and step of one stage, every collective a ring."""
    module = Blocks().to(device.current())
    with collectives.using("native" if native else "ring"):
        optimizer, model = None, module
        if stage == 0:
            model = DistributedDataParallel(module, bucket_cap_mb=0.001)
        elif stage == 3:
            model = FullyShardedDataParallel(module, **options)
        else:
            optimizer = ShardedOptimizer(module, torch.optim.AdamW, stage=stage, bucket_cap_mb=0.001)
        for _ in range(micro_batches):
            loss = model(torch.ones(2, WIDTH, device=device.current())).square().mean()
            with trace.span("backward", phase="backward"):
                loss.backward()
        if optimizer is not None:
            optimizer.step()
