"""What the tests of ZeRO's stages 1 and 2 run on ranks. A reference is one process with the whole batch, in float64."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit import device
from labkit.memory import MemoryMeter
from labkit.model import Transformer, loss, preset
from labkit.trace import label
from labkit.zero import DistributedOptimizer, ShardedOptimizer

SIZE = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 33, "positions": 16}  # 33 rows: nothing divides by 2 or 4


def model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    torch.manual_seed(7)
    return Transformer(preset(name, **{**SIZE, **changes}), dtype=dtype, device=device.current())


def tokens(batch: int, seed: int = 3) -> torch.Tensor:
    drawn = torch.randint(SIZE["vocab"], (batch, 13), generator=torch.Generator().manual_seed(seed))
    return drawn.to(device.current())


def mean_loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    total, count = loss(net(batch[:, :-1]), batch[:, 1:])
    return total / count


def made(kind: int | str, given: Any, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> ShardedOptimizer:
    """Stage 1, stage 2, or the distributed optimizer."""
    if kind == "distributed":
        options.pop("bucket_cap_mb", None)
        return DistributedOptimizer(given, optimizer_class, **options)
    return ShardedOptimizer(given, optimizer_class, stage=kind, **options)


def distance(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of two modules' parameters, relative to the largest of each parameter."""
    return max(
        ((p - q).abs().max() / q.abs().max().clamp(min=1e-30)).item()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def groups_of(net: nn.Module) -> list[dict]:
    """Matrices decay, vectors do not and learn faster."""
    named = list(net.named_parameters())
    return [{"params": [np for np in named if np[1].dim() > 1], "weight_decay": 0.3},
            {"params": [np for np in named if np[1].dim() <= 1], "weight_decay": 0.0, "lr": 1e-2}]  # fmt: skip


def against_one_process(
    kind: int | str, name: str, changes: dict, cap: float = 0.005, micro_steps: int = 1, grouped: bool = False,
    frozen: str = "", clip: float = 0.0, optimizer: str = "AdamW", steps: int = 10, options: dict | None = None,
    scheduled: bool = False,
) -> tuple[float, list]:  # fmt: skip
    """How far the parameters are from those of one process, after `steps` steps; and the parameters."""
    n, me = dist.get_world_size(), dist.get_rank()
    net = model(name, **changes)
    for key, param in net.named_parameters():
        param.requires_grad_(not (frozen and frozen in key))
    reference = copy.deepcopy(net)
    if me:  # what rank 0 has is what counts
        with torch.no_grad():
            next(net.parameters()).fill_(1)
    optimizer_class, options = getattr(torch.optim, optimizer), {"lr": 3e-3, **(options or {})}
    ours = made(kind, groups_of(net) if grouped else net, optimizer_class, bucket_cap_mb=cap, **options)
    params = groups_of(reference) if grouped else reference.parameters()
    theirs = optimizer_class(params, **options)
    both = [(ours, net, me), (theirs, reference, None)]
    plans = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o, _, _ in both] if scheduled else []
    worst = 0.0
    for step in range(steps):
        batch = tokens(2 * n * micro_steps, seed=step)
        for opt, net_, rank in both:
            opt.zero_grad()
            pieces = batch.tensor_split(n)[rank].tensor_split(micro_steps) if rank is not None else [batch]
            for piece in pieces:
                (mean_loss(net_, piece) / len(pieces)).backward()
        if clip:
            norm = ours.clip_grad_norm_(clip).item()
            reference_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip).item()
            worst = max(worst, abs(norm / reference_norm - 1))
        for opt, _, _ in both:
            opt.step()
        for plan in plans:
            plan.step()
    return max(worst, distance(net, reference)), [p.detach().cpu() for p in net.parameters()]


class Odd(nn.Module):
    """Sizes that nothing divides: 13·11 + 11, 11·7 + 7, 7·29."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        on = {"dtype": dtype, "device": device.current()}
        self.layers = nn.Sequential(nn.Linear(13, 11, **on), nn.Linear(11, 7, **on), nn.Linear(7, 29, bias=False, **on))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def odd_input(dtype: torch.dtype, seed: int) -> torch.Tensor:
    drawn = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(device.current(), dtype)


def memory(kind: int | str, cap: float, dtype: torch.dtype, micro_steps: int = 1) -> dict[str, dict]:
    """Bytes by category: before, after backward, after the reduction, after the step; and each phase's most."""
    net = Odd(dtype)
    optimizer = made(kind, net, bucket_cap_mb=cap, lr=1e-3)
    meter = MemoryMeter(net, optimizer=optimizer)
    found = {"before": meter.held()}
    with meter:
        with meter.phase("backward"):
            for micro_step in range(micro_steps):
                net(odd_input(dtype, micro_step)).square().mean().backward()
        found["backward"] = meter.held()
        with meter.phase("reduce"):
            optimizer.reduce_gradients()
        found["reduced"] = meter.held()
        with meter.phase("step"):
            optimizer.step()
        found["stepped"] = meter.held()
        optimizer.zero_grad()
        found["after"] = meter.held()
    most = {
        phase: max(held["gradients"] for _, p, held in meter.samples if p == phase) for phase in ("backward", "reduce")
    }
    return {**found, "most gradients": most}


def volume(kind: int | str, cap: float, micro_steps: int, quiet: bool = False) -> None:
    """A step after `micro_steps` backwards; its messages have the label ``counted``."""
    net = Odd()
    optimizer = made(kind, net, torch.optim.SGD, bucket_cap_mb=cap, lr=1e-3)
    with label(counted=True):
        for micro_step in range(micro_steps):
            with optimizer.no_sync() if quiet and micro_step < micro_steps - 1 else contextlib.nullcontext():
                net(odd_input(torch.float32, micro_step)).square().mean().backward()
        optimizer.reduce_gradients()
        optimizer.reduce_gradients()  # nothing is left
        optimizer.step()
