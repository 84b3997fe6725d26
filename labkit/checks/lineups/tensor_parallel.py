"""Chapter 04: four that claim to train a tensor-parallel MLP, two steps of it.

All ranks read the same tokens. A norm and the second bias are whole on every rank, and should stay the same there; of
the two matrices each rank has a part. Behind the MLP there is a dropout, on what all ranks hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labkit.checks.exercise import COLLECTIVES, Case, Cost
from labkit.checks.gradients import Backward, differing, near, taken
from labkit.checks.impostors import Fact, Impostor, Lineup, training
from labkit.show.words import say
from labkit.tensor_parallel import copy_to_group, reduce_from_group

TOKENS, WIDTH, INNER, STEPS = 6, 8, 12, 2
Batches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Trained:
    """Losses, one a step; a norm; and a rank's part of the two matrices, with their biases."""

    losses: list[torch.Tensor]
    norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear


def train(batches: Batches) -> Trained:
    """What the four claim to do."""
    torch.manual_seed(0)
    norm, up, down = nn.LayerNorm(WIDTH), *cut(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH))
    torch.manual_seed(1)
    losses = []
    for x, y in batches:
        share = F.linear(F.gelu(up(copy_to_group(norm(x)))), down.weight)
        z = x + F.dropout(reduce_from_group(share) + down.bias, 0.25)
        losses.append((z - y).square().mean())
        descend(losses[-1], norm, up, down)
    return Trained(losses, norm, up, down)


def a(batches: Batches) -> Trained:
    torch.manual_seed(0)
    norm, up, down = nn.LayerNorm(WIDTH), *cut(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH))
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for x, y in batches:
        share = F.linear(F.gelu(up(copy_to_group(norm(x)))), down.weight)
        z = x + F.dropout(reduce_from_group(share) + down.bias, 0.25)
        losses.append((z - y).square().mean())
        descend(losses[-1], norm, up, down)
    return Trained(losses, norm, up, down)


def b(batches: Batches) -> Trained:
    torch.manual_seed(0)
    norm, up, down = nn.LayerNorm(WIDTH), *cut(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH))
    torch.manual_seed(1)
    losses = []
    for x, y in batches:
        share = F.linear(F.gelu(up(copy_to_group(norm(x)))), down.weight, down.bias)
        z = x + F.dropout(reduce_from_group(share), 0.25)
        losses.append((z - y).square().mean())
        descend(losses[-1], norm, up, down)
    return Trained(losses, norm, up, down)


def c(batches: Batches) -> Trained:
    torch.manual_seed(0)
    norm, up, down = nn.LayerNorm(WIDTH), *cut(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH))
    torch.manual_seed(1)
    losses = []
    for x, y in batches:
        share = F.linear(F.gelu(up(norm(x))), down.weight)
        z = x + F.dropout(reduce_from_group(share) + down.bias, 0.25)
        losses.append((z - y).square().mean())
        descend(losses[-1], norm, up, down)
    return Trained(losses, norm, up, down)


def d(batches: Batches) -> Trained:
    torch.manual_seed(0)
    t = dist.get_world_size()
    norm, up, down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER // t), nn.Linear(INNER // t, WIDTH)
    nn.init.zeros_(up.bias)
    nn.init.zeros_(down.bias)
    torch.manual_seed(1)
    losses = []
    for x, y in batches:
        share = F.linear(F.gelu(up(copy_to_group(norm(x)))), down.weight)
        z = x + F.dropout(reduce_from_group(share) + down.bias, 0.25)
        losses.append((z - y).square().mean())
        descend(losses[-1], norm, up, down)
    return Trained(losses, norm, up, down)


def cut(up: nn.Linear, down: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    """This rank's columns of the first matrix (rows of torch's weight), and the same rows of the second. Biases are 0,
    as at the beginning of a training."""
    t, rank = dist.get_world_size(), dist.get_rank()
    up.weight = nn.Parameter(up.weight.detach().chunk(t, 0)[rank].clone())
    up.bias = nn.Parameter(torch.zeros(INNER // t))
    down.weight = nn.Parameter(down.weight.detach().chunk(t, 1)[rank].clone())
    nn.init.zeros_(down.bias)
    return up, down


def descend(loss: torch.Tensor, *layers: nn.Module) -> None:
    """A step of plain gradient descent."""
    params = [param for layer in layers for param in layer.parameters()]
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.data -= 0.2 * grad


def batches() -> Batches:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(TOKENS, WIDTH, generator=generator), torch.randn(TOKENS, WIDTH, generator=generator))
            for _ in range(STEPS)]  # fmt: skip


def call(fn: Any, case: Case) -> list[Backward]:
    """Losses and, after training, what all ranks hold, and a rank's own part."""
    done = fn(batches())
    return [_named(done.losses, done.norm, done.up, done.down)]


def _named(losses: list[torch.Tensor], norm: nn.Module, up: nn.Linear, down: nn.Linear) -> Backward:
    of_steps = [(f"loss {step}", loss) for step, loss in enumerate(losses, 1)]
    held = [(f"norm.{name}", param) for name, param in norm.named_parameters()]
    return taken([*of_steps, *held, ("down.bias", down.bias), ("up.weight", up.weight), ("up.bias", up.bias),
                  ("down.weight", down.weight)])  # fmt: skip


def expected(case: Case) -> list[list[Backward]]:
    """One process, in float64, which drops the same elements; of the matrices each rank's part."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        norm, up, down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        torch.manual_seed(1)
        masks = [F.dropout(torch.ones(TOKENS, WIDTH), 0.25).double() for _ in range(STEPS)]
    whole = nn.ModuleDict({"norm": norm, "up": up, "down": down}).double()
    nn.init.zeros_(up.bias)
    nn.init.zeros_(down.bias)
    optimizer, losses = torch.optim.SGD(whole.parameters(), lr=0.2), []
    for (x, y), mask in zip(batches(), masks, strict=True):
        losses.append((x + mask * down(F.gelu(up(norm(x.double())))) - y).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [[_part(_named(losses, norm, up, down), down.weight, rank, case.ranks)] for rank in range(case.ranks)]


def _part(whole: Backward, down: torch.Tensor, rank: int, ranks: int) -> Backward:
    mine = {name: torch.tensor(whole[name]).chunk(ranks)[rank] for name in ("up.weight", "up.bias")}
    return whole | taken([*mine.items(), ("down.weight", down.chunk(ranks, 1)[rank])])


def budget(case: Case) -> list[Cost]:
    """g in forward and f in backward, at each step."""
    return [Cost(calls=2 * STEPS, handed=2 * STEPS * 4 * TOKENS * WIDTH)] * case.ranks


def loss_of(step: int, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    name = f"loss {step}"
    off = [str(r) for r, (have, want) in enumerate(zip(values, wanted, strict=True))
           if not near(have[0][name] or [], want[0][name])]  # fmt: skip
    if not off:
        return say("lineup_04.right")
    return say("lineup_04.all_off") if len(off) == len(values) else say("lineup_04.off", ranks=", ".join(off))


def held_by_all(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    """How many of the tensors that all ranks hold are no longer the same on all of them."""
    names = ("norm.weight", "norm.bias", "down.bias")
    differ = [name for name in names if any(not near(v[0][name] or [], values[0][0][name]) for v in values)]
    return say("lineup_04.differ", n=len(differ), all=len(names)) if differ else say("lineup_04.alike")


def parts(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    """Whether ranks have the same part of the first matrix."""
    different = {tuple(rank[0]["up.weight"] or []) for rank in values}
    return say("lineup_04.alike") if len(different) == 1 else say("lineup_04.different", n=len(different))


LINEUP = Lineup(
    "04",
    training("tensor_parallel", Case(3, 1), train, call, expected, budget, differing, COLLECTIVES),
    Case(3, 1),
    {
        "A": Impostor(a, lambda: say("lineup_04.masks")),
        "B": Impostor(b, lambda: say("lineup_04.bias")),
        "C": Impostor(c, lambda: say("lineup_04.f")),
        "D": Impostor(d, lambda: say("lineup_04.seed")),
    },
    facts=(
        Fact(lambda: say("lineup_04.first"), lambda case, values, wanted: loss_of(1, values, wanted)),
        Fact(lambda: say("lineup_04.second"), lambda case, values, wanted: loss_of(2, values, wanted)),
        Fact(lambda: say("lineup_04.held"), held_by_all),
        Fact(lambda: say("lineup_04.parts"), parts),
    ),
    units=("calls", "handed"),
)
