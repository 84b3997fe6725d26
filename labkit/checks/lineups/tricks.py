"""Chapter 08: four that claim to train with recomputation, loss scaling and clipping.

Two ranks share an MLP, a half of its inside each; a bias and a head are whole on both. Dropout stands behind it, where
the ranks have the same, so they draw the same. What is inside is computed again for backward. Of fp16 only its largest
number is taken over, so that the rest is exact: a scaled gradient beyond it is inf.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.checks.exercise import COLLECTIVES, Case, Cost
from labkit.checks.gradients import Backward, differing, near, taken
from labkit.checks.impostors import Fact, Impostor, Lineup, training
from labkit.show.words import say

WIDTH, FFN, BATCH, SEED = 4, 8, 6, 20
RATE, MOMENTUM, DROPPED, MAX_NORM, SCALE, LARGEST = 0.05, 0.9, 0.25, 1.0, 2.0**8, 65504.0
SHARDED, REPLICATED = ("up", "down"), ("bias", "head")
#: Of each step, how large the targets are: in the second some gradient is beyond fp16.
TARGETS = (1.0, 4.0, 1.0)


class Layer(nn.Module):
    """A layer whole, or a rank's share of it, and its optimizer. It keeps what its training is told by."""

    up: nn.Parameter
    down: nn.Parameter
    bias: nn.Parameter
    head: nn.Parameter

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(12)
        shapes = {"up": (FFN, WIDTH), "down": (WIDTH, FFN), "bias": (WIDTH,), "head": (1, WIDTH)}
        sizes = {"up": 1.0, "down": 0.3, "bias": 1.0, "head": 2.0}
        for name, shape in shapes.items():
            whole = sizes[name] * torch.randn(shape, generator=generator)
            if name == "up":
                whole[FFN // 2 :] *= 2  # the second half has larger activations, so larger gradients
            cut = {"up": 0, "down": 1}.get(name)
            setattr(self, name, nn.Parameter(whole if cut is None else whole.chunk(ranks, cut)[rank].clone()))
        self.scale = SCALE
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.first: Backward = {}
        self.steps = 0
        self.moments: dict[str, torch.Tensor] = {}

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP and dropout, by torch's own stream of random numbers."""
        y = self.total(torch.relu(x @ self.up.T) @ self.down.T) + self.bias
        return y * (torch.rand(y.shape) >= DROPPED) / (1 - DROPPED)

    def again(self, x: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Backward through the block, of which nothing was kept: its forward once more, and its own gradients."""
        (self.block(x) * grad).sum().backward()  # type: ignore[operator]

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; in backward each of them has its gradient already."""
        total = part.detach().clone()
        dist.all_reduce(total)
        return part + (total - part.detach())

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ self.head.T - y).square().mean()

    def grads(self, names: tuple[str, ...] = SHARDED + REPLICATED) -> list[torch.Tensor]:
        return [getattr(self, name).grad for name in names]

    def to_half(self) -> None:
        """What fp16 does to what is too large for it."""
        for grad in self.grads():
            grad.masked_fill_(grad.abs() > LARGEST, math.inf)

    def multiply(self, factor: float) -> None:
        for grad in self.grads():
            grad *= factor

    def step(self, loss: float, norm: float, overflow: bool) -> None:
        """SGD with momentum, unless there was an overflow; gradients are forgotten."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.first = self.first or taken((name, p.grad) for name, p in self.named_parameters())
        for name, param in self.named_parameters():
            if not overflow:
                self.moments[name] = MOMENTUM * self.moments.get(name, torch.zeros(())) + param.grad  # type: ignore[operator]
                param.data -= RATE * self.moments[name]
            param.grad = None
        self.steps += not overflow
        self.scale /= 1 + overflow


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def squares(grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([grad.square().sum() for grad in grads]).sum()


def overflows(grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(float(not all(grad.isfinite().all() for grad in grads)))


def train(layer: Layer, batches: Batches) -> None:
    """What the four claim to do."""
    for x, y in batches:
        drawn = torch.get_rng_state()
        with torch.no_grad():
            out = layer.block(x)
        loss = layer.loss(out.requires_grad_(), y)
        (layer.scale * loss).backward()
        torch.set_rng_state(drawn)
        layer.again(x, out.grad)
        layer.to_half()
        overflow = overflows(layer.grads())
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        layer.multiply(1 / layer.scale)
        total = squares(layer.grads(SHARDED))
        dist.all_reduce(total)
        norm = (total + squares(layer.grads(REPLICATED))).sqrt().item()
        layer.multiply(min(1.0, MAX_NORM / norm))
        layer.step(loss.item(), norm, bool(overflow))


def a(layer: Layer, batches: Batches) -> None:
    for x, y in batches:
        drawn = torch.get_rng_state()
        with torch.no_grad():
            out = layer.block(x)
        loss = layer.loss(out.requires_grad_(), y)
        (layer.scale * loss).backward()
        torch.set_rng_state(drawn)
        layer.again(x, out.grad)
        layer.to_half()
        overflow = overflows(layer.grads())
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        layer.multiply(1 / layer.scale)
        total = squares(layer.grads())
        dist.all_reduce(total)
        norm = total.sqrt().item()
        layer.multiply(min(1.0, MAX_NORM / norm))
        layer.step(loss.item(), norm, bool(overflow))


def b(layer: Layer, batches: Batches) -> None:
    for x, y in batches:
        with torch.no_grad():
            out = layer.block(x)
        loss = layer.loss(out.requires_grad_(), y)
        (layer.scale * loss).backward()
        layer.again(x, out.grad)
        layer.to_half()
        overflow = overflows(layer.grads())
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        layer.multiply(1 / layer.scale)
        total = squares(layer.grads(SHARDED))
        dist.all_reduce(total)
        norm = (total + squares(layer.grads(REPLICATED))).sqrt().item()
        layer.multiply(min(1.0, MAX_NORM / norm))
        layer.step(loss.item(), norm, bool(overflow))


def c(layer: Layer, batches: Batches) -> None:
    for x, y in batches:
        drawn = torch.get_rng_state()
        with torch.no_grad():
            out = layer.block(x)
        loss = layer.loss(out.requires_grad_(), y)
        (layer.scale * loss).backward()
        torch.set_rng_state(drawn)
        layer.again(x, out.grad)
        layer.to_half()
        overflow = overflows(layer.grads())
        layer.multiply(1 / layer.scale)
        total = squares(layer.grads(SHARDED))
        dist.all_reduce(total)
        norm = (total + squares(layer.grads(REPLICATED))).sqrt().item()
        layer.multiply(min(1.0, MAX_NORM / norm))
        layer.step(loss.item(), norm, bool(overflow))


def d(layer: Layer, batches: Batches) -> None:
    for x, y in batches:
        drawn = torch.get_rng_state()
        with torch.no_grad():
            out = layer.block(x)
        loss = layer.loss(out.requires_grad_(), y)
        (layer.scale * loss).backward()
        torch.set_rng_state(drawn)
        layer.again(x, out.grad)
        layer.to_half()
        overflow = overflows(layer.grads())
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        total = squares(layer.grads(SHARDED))
        dist.all_reduce(total)
        norm = (total + squares(layer.grads(REPLICATED))).sqrt().item()
        layer.multiply(min(1.0, MAX_NORM / norm))
        layer.multiply(1 / layer.scale)
        layer.step(loss.item(), norm, bool(overflow))


def data() -> Batches:
    """Inputs, (rows, width), and targets, (rows, 1), of each step."""
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(BATCH, WIDTH, generator=generator), size * torch.randn(BATCH, 1, generator=generator))
            for size in TARGETS]  # fmt: skip


def call(fn: Any, case: Case) -> list[Backward]:
    """Losses, norms, steps and scale; gradients that the first step was made with; weights after the last."""
    layer = Layer(dist.get_rank(), case.ranks)
    torch.manual_seed(SEED)
    fn(layer, data())
    return [_told(layer)]


def _told(layer: Layer) -> Backward:
    grads = {f"{name}.grad": numbers for name, numbers in layer.first.items()}
    counts = {"steps": [float(layer.steps)], "scale": [layer.scale]}
    norms = [norm for norm in layer.norms if math.isfinite(norm)]
    return {"losses": layer.losses, "norms": norms, **counts, **grads, **taken(layer.named_parameters())}


class Whole(Layer):
    """In one process, float64; everything is kept for backward."""

    def total(self, part: torch.Tensor) -> torch.Tensor:
        return part


def expected(case: Case) -> list[list[Backward]]:
    whole = Whole().double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        for x, y in data():
            loss = whole.loss(whole.block(x.double()), y.double())
            (whole.scale * loss).backward()
            whole.to_half()
            overflow = bool(overflows(whole.grads()))
            whole.multiply(1 / whole.scale)
            norm = squares(whole.grads()).sqrt().item()
            whole.multiply(min(1.0, MAX_NORM / norm))
            whole.step(loss.item(), norm, overflow)
    return [[{name: _share(name, numbers or [], rank, case.ranks) for name, numbers in _told(whole).items()}]
            for rank in range(case.ranks)]  # fmt: skip


def _share(name: str, numbers: list[float], rank: int, ranks: int) -> list[float]:
    """What a rank holds of a tensor."""
    cut = {"up": 0, "down": 1}.get(name.removesuffix(".grad"))
    if cut is None:
        return numbers
    whole = torch.tensor(numbers, dtype=torch.float64).view((FFN, WIDTH) if cut == 0 else (WIDTH, FFN))
    return whole.chunk(ranks, cut)[rank].flatten().tolist()


def budget(case: Case) -> list[Cost]:
    """A step: the block's sum, twice; the overflow, the norm."""
    return [Cost(calls=len(TARGETS) * 4, handed=len(TARGETS) * (2 * 4 * BATCH * WIDTH + 8))] * case.ranks


# What is told: each of the values by rank, and of the expected

Values = list[list[Backward]]


def first_loss(case: Case, values: Values, wanted: Values) -> str:
    return _first("losses", values, wanted)


def first_norm(case: Case, values: Values, wanted: Values) -> str:
    return _first("norms", values, wanted)


def _first(name: str, values: Values, wanted: Values) -> str:
    have, want = ((of[0][0][name] or [math.nan])[:1] for of in (values, wanted))
    if near(have, want):
        return say("lineup_08.same", have=f"{have[0]:,.3f}")
    return say("lineup_08.differs", have=f"{have[0]:,.3f}", want=f"{want[0]:,.3f}")


def first_gradients(case: Case, values: Values, wanted: Values) -> str:
    """Which differ from what the first step should have been made with; and by how much, where all do by the same."""
    names = [name for name in wanted[0][0] if name.endswith(".grad")]
    off = [n for n in names if any(not near(v[0][n] or [], w[0][n]) for v, w in zip(values, wanted, strict=True))]
    if not off:
        return say("lineup_08.none")
    ratios = {_ratio(values, wanted, name) for name in off}
    told = say("lineup_08.of", n=len(off), all=len(names))
    return told + say("lineup_08.each", ratio=ratios.pop()) if len(ratios) == 1 and "" not in ratios else told


def _ratio(values: Values, wanted: Values, name: str) -> str:
    have, want = values[0][0][name] or [], wanted[0][0][name] or []
    largest = max(range(len(want)), key=lambda n: abs(want[n]))
    ratio = have[largest] / want[largest]
    return f"{ratio:.2g}" if near(have, [ratio * number for number in want]) else ""


def steps(case: Case, values: Values, wanted: Values) -> str:
    return ", ".join(f"{(v[0]['steps'] or [0])[0]:.0f}" for v in values)


def scales(case: Case, values: Values, wanted: Values) -> str:
    return ", ".join(f"{(v[0]['scale'] or [0])[0]:,.0f}" for v in values)


def last_weights(case: Case, values: Values, wanted: Values) -> str:
    """Of those that both ranks hold: rank against rank."""
    apart = sum(any(not near(v[0][n] or [], values[0][0][n]) for v in values) for n in REPLICATED)
    return say("lineup_08.apart", n=apart, all=len(REPLICATED)) if apart else say("lineup_08.alike")


LINEUP = Lineup(
    "08",
    training("tricks", Case(2, 1), train, call, expected, budget, differing, COLLECTIVES),
    Case(2, 1),
    {
        "A": Impostor(a, lambda: say("lineup_08.times")),
        "B": Impostor(b, lambda: say("lineup_08.mask")),
        "C": Impostor(c, lambda: say("lineup_08.overflow")),
        "D": Impostor(d, lambda: say("lineup_08.order")),
    },
    facts=(
        Fact(lambda: say("lineup_08.first_loss"), first_loss),
        Fact(lambda: say("lineup_08.norm"), first_norm),
        Fact(lambda: say("lineup_08.gradients"), first_gradients),
        Fact(lambda: say("lineup_08.steps"), steps),
        Fact(lambda: say("lineup_08.scale"), scales),
        Fact(lambda: say("lineup_08.weights"), last_weights),
    ),
    units=("calls", "handed"),
    where=lambda case: say("lineup_08.case", ranks=case.ranks, steps=len(TARGETS), scale=f"{SCALE:,.0f}"),
)
