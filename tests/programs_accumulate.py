"""What the tests of labkit.tricks.accumulate run, in one process and on ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit import device
from labkit.data_parallel import DistributedDataParallel
from labkit.tricks import accumulate


def rows(sizes: list[int], seed: int = 0) -> list[torch.Tensor]:
    drawn = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(drawn.to(device.current()).split(sizes))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(device.current())


def step(model: nn.Module) -> torch.Tensor:
    """The window's gradient, which is then taken away; a step would make later differences grow."""
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return grads


def of_whole(windows: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Of each window's rows at once: the mean over all of them."""
    model, found = net(), []
    for window in windows:
        model(torch.cat(window)).square().mean().backward()
        found.append(step(model))
    return found


def off(have: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(have, want, strict=True))


def windows_against_whole(sizes: list[int], weights: str) -> float:
    batches, model, found = rows(sizes), net(), []
    for micro in accumulate(batches, 2, tokens=len if weights == "tokens" else None):
        with micro:
            each = model(micro.batch).square()
            ((each.sum() if weights == "tokens" else each.mean()) * micro.weight).backward()
        if micro.last:
            found.append(step(model))
    return off(found, of_whole([batches[n : n + 2] for n in range(0, len(batches), 2)]))


SIZES = [[2, 10, 10, 2, 5], [3, 1, 7, 7, 1]]


def ranks_against_whole(wrapper: str) -> tuple[float, list[int]]:
    """The largest relative difference; after each micro-batch, whether gradients were averaged in it."""
    every = [rows(sizes, seed) for seed, sizes in enumerate(SIZES)]
    wrap: Any = DistributedDataParallel if wrapper == "labkit" else nn.parallel.DistributedDataParallel
    model, found, averaged = wrap(net()), [], []
    for micro in accumulate(every[dist.get_rank()], 2, model, tokens=len):
        with micro:
            (model(micro.batch).square().sum() * micro.weight).backward()
        averaged.append(int(_is_same(model)))
        if micro.last:
            found.append(step(model))
    windows = [[batch for mine in every for batch in mine[n : n + 2]] for n in range(0, 5, 2)]
    return off(found, of_whole(windows)), averaged


def _is_same(model: nn.Module) -> bool:
    """Whether all ranks hold the same gradient."""
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    all_ = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_, mine)
    return all(torch.equal(mine, other) for other in all_)


def other_numbers_of_windows(tokens: Any) -> None:
    model = DistributedDataParallel(net())
    for micro in accumulate(rows([2] * (5 - 2 * dist.get_rank())), 2, model, tokens):
        with micro:
            model(micro.batch).sum().backward()


def with_a_sharded_optimizer() -> float:
    """ZeRO-1 owns the reduction: parameters after three windows against one process with the same optimizer."""
    from labkit.zero import ShardedOptimizer

    every, model, alone = [rows(sizes, seed) for seed, sizes in enumerate(SIZES)], net(), net()
    alone = copy.deepcopy(model)
    sharded = ShardedOptimizer(model, torch.optim.SGD, stage=1, lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for micro in accumulate(every[dist.get_rank()], 2, sharded, tokens=len):
        with micro:
            (model(micro.batch).square().sum() * micro.weight).backward()
        if micro.last:
            sharded.step()
            sharded.zero_grad()
    for n in range(0, 5, 2):
        alone(torch.cat([batch for mine in every for batch in mine[n : n + 2]])).square().mean().backward()
        reference.step()
        reference.zero_grad()
    return off([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model,)],
               [torch.cat([p.detach().flatten() for p in alone.parameters()])])  # fmt: skip
