"""What the tests of loss scaling and mixed precision run on ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import programs_pipeline
import programs_tensor_parallel
import torch
import torch.distributed as dist
from programs_norm import said
from torch import nn

from labkit import device, pipeline, tensor_parallel, zero
from labkit.data_parallel import DistributedDataParallel
from labkit.memory import MemoryMeter
from labkit.model import loss as whole_loss
from labkit.pipeline.parts import cut
from labkit.tricks import GradScaler, MixedPrecision, accumulate, clip_grad_norm_


def linear(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(*sizes, device=device.current(), dtype=dtype)


def rows(seed: int, count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(device.current(), dtype)


# Loss scaling


def overflow_on(where: int, group_of: int | None = None) -> tuple[list[bool], list[float], int]:
    """Four steps, in the second of which one rank's gradient is inf: whether parameters changed, the scales, skipped.

    Args:
        where: The rank.
        group_of: Size of the groups that decide together; ``None``: the world.
    """
    world, group = dist.get_world_size(), None
    if group_of is not None:
        groups = [dist.new_group(list(range(n, n + group_of))) for n in range(0, world, group_of)]
        group = groups[dist.get_rank() // group_of]
    model = linear(3, 2, seed=dist.get_rank())  # each rank another part of a model
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 0.1), GradScaler(1024.0, growth_interval=2, group=group)
    changed, scales = [], []
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(rows(step, 4, 3)).square().sum()).backward()
        if step == 1 and dist.get_rank() == where:
            model.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        changed.append(not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        scales.append(scaler.get_scale())
    return changed, scales, scaler.skipped_steps


def a_rank_without_parameters() -> tuple[float, int]:
    """Rank 0 has a gradient of nan, rank 1 none, rank 2 no gradient at all."""
    rank = dist.get_rank()
    param = nn.Parameter(torch.zeros(2, device=device.current()))
    if rank < 2:
        param.grad = torch.full_like(param, math.nan if rank == 0 else 1.0)
    scaler, optimizer = GradScaler(), torch.optim.SGD([param], 1.0)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), scaler.skipped_steps


def overflow_in_a_pipeline(where: int | None, overflow_step: int = 1) -> dict[str, Any]:
    """fp16 on two stages; in one step the gradients of one of them hold an inf. Fault 48."""
    rank, layers = dist.get_rank(), 2
    whole = programs_pipeline.transformer("tiny_gpt", layers).float()
    reference = copy.deepcopy(whole)
    part = cut(whole, [range(1), range(1, 2)])[rank]
    scaler = GradScaler(init_scale=2.0**10)
    mixed = MixedPrecision(part, torch.optim.SGD(part.parameters(), 0.1), torch.float16, scaler)
    schedule = pipeline.one_f_one_b(2, 2)

    def scaled(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = whole_loss(logits, targets)
        return scaler.scale(total), count

    engine = pipeline.PipelineEngine({rank: part}, schedule, scaled)
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    found: dict[str, Any] = {"stepped": [], "scale": [], "norm": [], "same": []}
    for step in range(3):
        before = [m.detach().clone() for m in (*mixed.masters, *part.parameters())]
        mixed.zero_grad()
        engine.step(*programs_pipeline.batch(4, seed=step))
        if step == overflow_step and rank == where:
            next(part.parameters()).grad.view(-1)[0] = math.inf
        norm = mixed.clip_grad_norm_(1.0, pipeline_group=dist.group.WORLD).item()
        found["stepped"].append(mixed.step())
        found["scale"].append(scaler.get_scale())
        after = (*mixed.masters, *part.parameters())
        found["same"].append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        if step != overflow_step or where is None:
            plain.zero_grad()
            total, count = whole_loss(*_fed(reference, programs_pipeline.batch(4, seed=step)))
            (total / count).backward()
            want = nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
            plain.step()
            found["norm"].append((norm, want))
    own = dict(programs_pipeline._by_part(reference, schedule, layers))
    pairs = [(p.detach().float(), own[rank, n].detach()) for n, p in part.named_parameters()]
    return {**found, "off": programs_pipeline.worst(pairs), "skipped": scaler.skipped_steps}


def _fed(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[0]), batch[1]


def with_zero(stage: int, where: int | None) -> tuple[list[float], list[float], int, bool]:
    """Two steps of ZeRO with and without a scaler, clipped; one gradient may be inf in a third."""
    rank, weights = dist.get_rank(), []
    for scaler in (GradScaler(1024.0), GradScaler(enabled=False)):
        model: Any = nn.Sequential(linear(5, 7), linear(7, 3))
        if stage == 3:
            model = zero.FullyShardedDataParallel(model)
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        else:
            optimizer = zero.ShardedOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(model(rows(10 * step + rank, 4, 5)).square().mean()).backward()
            scaler.unscale_(optimizer)
            if stage == 3:
                clip_grad_norm_(model.parameters(), 0.1)
            else:
                optimizer.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
        weights.append(torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist())
        if scaler.enabled:
            kept, kept_model, kept_optimizer = scaler, model, optimizer
    if where is None:
        return *weights, kept.skipped_steps, True
    kept_optimizer.zero_grad()
    factor = math.inf if rank == where else 1.0
    kept.scale(kept_model(rows(50, 4, 5)).mean() * factor).backward()
    kept.step(kept_optimizer)
    kept.update()
    after = torch.cat([p.detach().view(-1) for p in kept_model.parameters()]).tolist()
    return *weights, kept.skipped_steps, after == weights[0] and kept.get_scale() == 512.0


# Mixed precision


def mean_of_40000(how: str) -> tuple[float, float]:
    """Two ranks, each with an fp16 gradient of 40000, whose sum fp16 does not hold (fault 16)."""
    module = nn.Linear(1, 1, bias=False, device=device.current())
    nn.init.ones_(module.weight)
    group = dist.group.WORLD if how == "group" else None
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 1.0), torch.float16, data_parallel_group=group)
    model = DistributedDataParallel(module) if how == "wrapped" else module
    mixed.backward(model(torch.full((1, 1), 40000.0, dtype=torch.float16, device=device.current())).sum())
    norm = mixed.clip_grad_norm_(1e9).item()
    return norm, mixed.masters[0].grad.item()


def windows(how: str, k: int, dtype: torch.dtype) -> float:
    """Two windows of k micro-batches on each rank against fp32 on all of them: the largest difference of masters.

    Args:
        how: ``"wrapped"``: every backward is averaged; ``"no_sync"``: the last of a window; ``"group"``: no wrapper.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = nn.Sequential(linear(6, 8), nn.Tanh(), linear(8, 2))
    reference = copy.deepcopy(module)
    group = None if how == "wrapped" else dist.group.WORLD
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 0.1), dtype, data_parallel_group=group)
    model = module if how == "group" else DistributedDataParallel(module)
    batches = [rows(100 * step + rank, 4, 6) for step in range(2 * k)]
    for micro in accumulate(batches, k, model=model if how == "no_sync" else mixed):
        with micro:
            loss = model(micro.batch.to(dtype)).float().square().mean()
            mixed.backward(loss * micro.weight)
        if micro.last:
            mixed.step()
            mixed.zero_grad()
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    for window in range(2):
        plain.zero_grad()
        for step in range(window * k, window * k + k):
            for other in range(ranks):
                (reference(rows(100 * step + other, 4, 6)).square().mean() / (k * ranks)).backward()
        plain.step()
    return programs_pipeline.worst(
        (a.detach(), b.detach()) for a, b in zip(mixed.masters, reference.parameters(), strict=True)
    )


def unused_on_some(ranks_that_use: tuple[int, ...]) -> float | None:
    """The averaged gradient of a parameter that only some ranks use."""
    module = nn.ParameterDict({n: nn.Parameter(torch.ones(1, device=device.current())) for n in ("a", "b")})
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 1.0), data_parallel_group=dist.group.WORLD)
    both = dist.get_rank() in ranks_that_use
    mixed.backward((module["a"] + module["b"] if both else module["a"]).sum())
    mixed.clip_grad_norm_(1e9)
    grad = mixed.masters[1].grad
    return None if grad is None else grad.item()


def beside_tensor_parallelism() -> tuple[float, float, float]:
    """bf16 on tp 2: the norm of the masters' gradients, that of one process in bf16, and by the masters' own marks."""
    reference = programs_tensor_parallel.transformer("tiny_gpt", torch.float32)
    model = tensor_parallel.parallelize(copy.deepcopy(reference))
    mixed = MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1))
    batch = programs_tensor_parallel.tokens()
    total, count = tensor_parallel.loss(model(batch[:, :-1]), batch[:, 1:], programs_tensor_parallel.VOCAB)
    mixed.backward(total / count)
    norm = mixed.clip_grad_norm_(1e9).item()
    total, count = whole_loss(reference(batch[:, :-1]), batch[:, 1:])
    (total / count).backward()
    return (
        norm,
        nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item(),
        clip_grad_norm_(mixed.masters, 1e9).item(),
    )


def held(dtype: torch.dtype) -> list[dict[str, int]]:
    """What is held once made, after a backward, in the midst of a second, after a step, after zero_grad."""
    module = nn.Sequential(linear(100, 40), linear(40, 100))
    mixed = MixedPrecision(module, torch.optim.AdamW(module.parameters()), dtype, GradScaler(16.0))
    meter = MemoryMeter(module, optimizer=mixed.optimizer)
    x = torch.ones(1, 100, dtype=dtype, device=device.current())
    with meter:
        found = [meter.held()]
        mixed.backward(module(x).sum())
        found.append(meter.held())
        mixed.scaler.scale(module(x).sum()).backward()
        found.append(meter.held())
        mixed.step()
        found.append(meter.held())
        mixed.zero_grad()
        found.append(meter.held())
    return found


def clipped_too_early() -> str:
    """Fault 49 with ZeRO: gradients clipped while they are scaled."""
    model = linear(4, 4)
    optimizer, scaler = zero.ShardedOptimizer(model, torch.optim.SGD, lr=0.1), GradScaler(1024.0)
    scaler.scale(model(rows(0, 2, 4)).square().sum()).backward()
    optimizer.clip_grad_norm_(1.0)
    return said(lambda: scaler.step(optimizer))


def wrapped_with_other_parameters(wrapper: str) -> str:
    """Each rank draws its own parameters; the wrapper spreads rank 0's working copy."""
    module = nn.Sequential(linear(4, 8, seed=dist.get_rank()), linear(8, 1, seed=dist.get_rank()))
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 0.1))
    wrap: Any = DistributedDataParallel if wrapper == "labkit" else nn.parallel.DistributedDataParallel
    rows = torch.ones(2, 4, dtype=torch.bfloat16, device=device.current())
    loss = wrap(module)(rows).sum()
    return said(lambda: mixed.backward(loss))


def unfrozen() -> float:
    """The averaged gradient of a parameter that was frozen when its master was made; 1 and 2 on the ranks."""
    module = nn.ParameterDict({"a": nn.Parameter(torch.ones(1, device=device.current()), requires_grad=False)})
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 1.0), data_parallel_group=dist.group.WORLD)
    module["a"].requires_grad_(True)
    mixed.backward((module["a"] * (1 + dist.get_rank())).sum())
    mixed.step()
    return mixed.masters[0].grad.item()
