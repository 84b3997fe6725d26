"""What ranks run in the tests of labkit.memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from labkit import device
from labkit.memory import MemoryMeter


def metered_step(mode):
    """A step of a linear layer whose width is the rank's, and an all-reduce of a tracked bucket in its midst."""
    on = device.current()
    model = nn.Linear(10, 10 * (dist.get_rank() + 1), bias=False, device=on)
    bucket = torch.ones(1000, device=on)
    meter = MemoryMeter(model, mode=mode)
    meter.track("buffers", bucket)
    with meter:
        with meter.phase("forward"):
            loss = model(torch.ones(8, 10, device=on)).sum()
        with meter.phase("backward"):
            dist.all_reduce(bucket)
            loss.backward()
    return meter.held(), meter.highest["activations"]


def on_cuda(mode):
    """(held after backward, the allocator's figures, activations before)."""
    on = device.current()
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 256, bias=False)).to(on)
    meter = MemoryMeter(model, mode=mode)
    with meter:
        loss = model(torch.ones(64, 256, device=on)).sum()
        before = meter.held()["activations"]
        loss.backward()
    return meter.held(), meter.allocator, before
