"""What goes wrong in use at stages 1 to 3: other options on other ranks, copies, edits between steps, overlap."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from programs_zero import Odd, made, odd_input
from torch import nn

from labkit import device, trace, tricks
from labkit.data_parallel import DistributedDataParallel
from labkit.memory import MemoryMeter
from labkit.zero import DistributedOptimizer, FullyShardedDataParallel, ShardedOptimizer, latest, load, save

AdamW = torch.optim.AdamW
TINY = 1e-6


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.ModuleDict({"inner": nn.Linear(5, 5)})["inner"], nn.Linear(5, 2)).to(
        device.current()
    )


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def every(tell: Callable[[str], str], kinds: list[str]) -> dict[str, str]:
    """What is said of each kind, in one run."""
    return {kind: tell(kind) for kind in kinds}


def refused(kind: str) -> str:
    """What an argument that cannot be used says, or one that differs on rank 1."""
    of, me = net(), dist.get_rank()
    params = list(of.parameters())
    calls: dict[str, Callable[[], Any]] = {
        "stage": lambda: ShardedOptimizer(of, AdamW, stage=True),
        "overlap": lambda: ShardedOptimizer(of, AdamW, stage=1, overlap=True),
        "unused": lambda: ShardedOptimizer(of, AdamW, find_unused_parameters="no"),
        "mixture": lambda: ShardedOptimizer([{"params": params[:1]}, params[1]], AdamW),
        "number": lambda: ShardedOptimizer([{"params": 3}], AdamW),
        "names": lambda: ShardedOptimizer([("w", params[0]), ("w", params[1])], AdamW),
        "no name": lambda: ShardedOptimizer([(1, params[0])], AdamW),
        "lazy": lambda: ShardedOptimizer(nn.LazyLinear(2), AdamW),
        "pieces": lambda: ShardedOptimizer(FullyShardedDataParallel(of), AdamW),
        "grad_dtype": lambda: DistributedOptimizer(of, AdamW, grad_dtype=torch.float8_e4m3fn),
        "torch's state": lambda: ShardedOptimizer(of, AdamW).load_state_dict(AdamW(params).state_dict()),
        "no state": lambda: ShardedOptimizer(of, AdamW).load_state_dict(None),
        "hook": lambda: ShardedOptimizer(of, AdamW).register_gradient_hook(3),
        "other cap": lambda: ShardedOptimizer(of, AdamW, bucket_cap_mb=25 if me else 1),
        "other class": lambda: ShardedOptimizer(of, torch.optim.Adam if me else AdamW),
        "other rate": lambda: ShardedOptimizer(of, AdamW, lr=0.1 * (1 + me)),
        "blocks": lambda: FullyShardedDataParallel(of, blocks=of[0]),
        "keep": lambda: FullyShardedDataParallel(of, keep_after_forward="yes"),
        "param_dtype": lambda: FullyShardedDataParallel(of, param_dtype=torch.float8_e4m3fn),
        "init": lambda: FullyShardedDataParallel(of, init=lambda module: None),
        "lazy module": lambda: FullyShardedDataParallel(nn.LazyLinear(2)),
        "complex": lambda: FullyShardedDataParallel(nn.Linear(2, 2, dtype=torch.complex64)),
        "one memory": lambda: (setattr(of[2].bias, "data", of[0].bias.data[:2]), FullyShardedDataParallel(of)),
        "other prefetch": lambda: FullyShardedDataParallel(of, prefetch=me),
        "other blocks": lambda: FullyShardedDataParallel(of, blocks=[of[me]]),
    }
    return said(calls[kind])


def later(kind: str) -> str:
    """What a later use says, of a module that was sharded or given to an optimizer."""
    of = net()
    x = torch.ones(2, 3, device=device.current())
    if kind.startswith("stage 3"):
        sharded = FullyShardedDataParallel(of)
        calls = {
            "copy": lambda: copy.deepcopy(sharded),
            "copy of a part": lambda: copy.deepcopy(sharded.module)(x),
            "added": lambda: (of.append(nn.Linear(2, 2)), sharded(x)),
            "of gradients": lambda: torch.autograd.grad(sharded(x.requires_grad_()).sum(), x, create_graph=True),
        }
        told = said(calls[kind.removeprefix("stage 3 ")])
        if kind.endswith("gradients"):
            sharded(x).sum().backward()  # goes on
        return told
    optimizer = made(1, of, lr=0.1)
    if kind == "copy":
        return said(lambda: copy.deepcopy(optimizer))
    if kind == "torch's scaler":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(of(x).sum()).backward()
        return said(lambda: scaler.step(optimizer))
    if kind == "another layer":
        of[1] = nn.Linear(5, 5)
    wrapped = DistributedDataParallel(of) if kind == "wrapped" else of
    wrapped(x).sum().backward()
    return said(optimizer.step)


def edits_reach_masters(kind: int | str) -> list[float]:
    """bf16 weights are set to 1 between two steps of SGD: what the master is then, and what was saved of it."""
    of = net().bfloat16()
    optimizer = made(kind, of, torch.optim.SGD, lr=2**-12)
    before = optimizer.shards()[0].tensor.clone()
    with torch.no_grad():
        for param in of.parameters():
            param.fill_(1.0)
    saved = [shard.tensor.clone() for shard in optimizer.shards()]
    for param in of.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    expected = 1 - 2**-12  # not a bf16 number: the master keeps it
    off = [(shard.tensor - expected).abs().max().item() for shard in optimizer.shards() if shard.length]
    assert before.numel() == 0 or not torch.equal(before, saved[0])
    return [*off, *((values - 1).abs().max().item() for values in saved if values.numel())]


def buffers_of_rank_0() -> list[float]:
    of = net()
    of.register_buffer("table", torch.full((2,), float(dist.get_rank()), device=device.current()))
    return FullyShardedDataParallel(of).module.table.tolist()


def units_of_a_generator() -> int:
    of = net()
    return len(FullyShardedDataParallel(of, blocks=(part for part in of)).units)


def inf_on_one_rank(kind: int | str) -> list[float]:
    """Four scaled steps, an inf on rank 1 in the second: the scale after each, on every rank."""
    of: nn.Module = net()
    if kind == 3:
        of = FullyShardedDataParallel(of)
        optimizer = AdamW(of.parameters())
    else:
        optimizer = made(kind, of, lr=0.1)
    scaler, scales = tricks.GradScaler(init_scale=1024.0), []
    for step in range(4):
        total = of(torch.ones(2, 3, device=device.current())).sum()
        scaler.scale(total * float("inf") if (step, dist.get_rank()) == (1, 1) else total).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert all(p.isfinite().all() for p in of.parameters())
    return scales


# Overlap at stage 2


class Slow(torch.autograd.Function):
    """In backward, rank 1 is late, and the recorder gets a span."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, seconds: float) -> torch.Tensor:
        ctx.name, ctx.seconds = name, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with trace.span(ctx.name):
            time.sleep(ctx.seconds)
        return grad, None, None


def overlapped(overlap: bool) -> float:
    """A bucket a layer; rank 1 is late in front of the last one's backward, rank 0 then in the middle one's."""
    torch.manual_seed(3)
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3)).to(device.current())
    reference = copy.deepcopy(layers)
    optimizer = ShardedOptimizer(layers, torch.optim.SGD, stage=2, bucket_cap_mb=TINY, overlap=overlap, lr=0.1)
    n, me = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(device.current())
        out = layers[1](Slow.apply(layers[0](x[2 * me : 2 * me + 2]), "first layer", 0.0))
        out = layers[2](Slow.apply(out, "middle layer", 0.05))
        Slow.apply(out, "last layer", 0.3 * me).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        out = reference[2](reference[1](reference[0](x[: 2 * n])))
        grads = torch.autograd.grad(out.square().mean(), list(reference.parameters()))
        for param, grad in zip(reference.parameters(), grads, strict=True):
            param.data.sub_(grad, alpha=0.1)
    return max((p - q).abs().max().item() for p, q in zip(layers.parameters(), reference.parameters(), strict=True))


# Saving


def failing_save(directory: str, what: str) -> str:
    """What each rank is told; then a save works."""
    of, me = net(), dist.get_rank()
    optimizer = made(1, of, lr=0.1)
    calls: dict[str, Callable[[], Any]] = {
        "a file": lambda: save(f"{directory}/file/runs", 0, of, optimizer),
        "one rank": lambda: save(directory, 0 if me else -1, of, optimizer),
        "no module": lambda: save(directory, 0, None, optimizer),
        "no optimizer": lambda: save(directory, 0, of, AdamW),
        "extra": lambda: save(directory, 0, of, optimizer, extra=lambda: 3),
        "load on one": lambda: load(f"{directory}/none" if not me else save_of(directory, of), of),
        "another class": lambda: load(save(directory, 0, of, optimizer), of, torch.optim.SGD(of.parameters(), 0.1)),
    }
    told = said(calls[what])
    path = save(directory, 5, of, optimizer, extra=me)
    assert latest(directory) == path
    assert load(path, of, optimizer) == 0  # the first rank's
    return told


def save_of(directory: str, of: nn.Module) -> str:
    return f"{directory}/{type(of).__name__}"


# Bytes beside theory


def stage_bytes(stage: int, cap: float, micro_steps: int) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes after backward and at its worst, by category, and tensors that the optimizer has a counter for."""
    of = Odd()
    optimizer = made(stage, of, bucket_cap_mb=cap, lr=1e-3)
    meter = MemoryMeter(of, optimizer=optimizer)
    with meter:
        for step in range(2):
            with meter.phase(f"backward {step}"):
                for micro_step in range(micro_steps):
                    of(odd_input(torch.float32, micro_step)).square().mean().backward()
            live = meter.held()
            with meter.phase(f"reduce {step}"):
                optimizer.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
    second = [held for _, phase, held in meter.samples if phase in ("backward 1", "reduce 1")]
    worst = max(second, key=lambda held: held["gradients"])
    return live, worst, sum(len(bucket.pieces) for bucket in optimizer.buckets)
