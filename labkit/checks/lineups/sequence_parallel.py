"""Chapter 05: four that claim to train with sequence parallelism.

Three ranks share a small layer: each holds a third of the tokens outside the MLP, and a third of the columns and rows
inside. Dropout stands where the tokens are split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labkit.checks.exercise import COLLECTIVES, Case, Cost
from labkit.checks.gradients import Backward, differing, near, taken
from labkit.checks.impostors import Fact, Impostor, Lineup, training
from labkit.show.words import say

VOCAB, WIDTH, FFN, BATCH, TOKENS, STEPS, SEED = 11, 4, 12, 2, 6, 2, 20
RATE, DROPPED = 0.5, 0.25
#: What every rank holds whole, and sees with its own tokens only.
PARTIAL = ("words", "places", "norm", "bias", "head")


class Layer(nn.Module):
    """A layer whole, or a rank's share of it. It keeps what its training is told by."""

    words: nn.Parameter
    places: nn.Parameter
    norm: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    bias: nn.Parameter
    head: nn.Parameter

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {"words": (VOCAB, WIDTH), "places": (TOKENS, WIDTH), "norm": (WIDTH,), "up": (FFN, WIDTH),
                  "down": (WIDTH, FFN), "bias": (WIDTH,), "head": (1, WIDTH)}  # fmt: skip
        for name, shape in shapes.items():
            whole = torch.randn(shape, generator=generator)
            cut = {"up": 0, "down": 1}.get(name)
            setattr(self, name, nn.Parameter(whole if cut is None else whole.chunk(ranks, cut)[rank].clone()))
        self.masks: list[torch.Tensor] = []
        self.losses: list[float] = []
        self.first: Backward = {}

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (WIDTH,), self.norm)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.up.T) @ self.down.T

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        """Dropout, by torch's own stream of random numbers."""
        self.masks.append(torch.rand(x.shape) >= DROPPED)
        return x * self.masks[-1] / (1 - DROPPED)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """These tokens' part of the mean over all."""
        return (x @ self.head.T - y).square().sum() / (BATCH * TOKENS)

    def partial(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in PARTIAL]

    def step(self, loss: float) -> None:
        """Plain SGD; gradients are forgotten."""
        self.losses.append(loss)
        self.first = self.first or taken((name, p.grad) for name, p in self.named_parameters())
        for param in self.parameters():
            param.data -= RATE * param.grad  # type: ignore[operator]
            param.grad = None


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=1)


def scattered(x: torch.Tensor) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), dim=1)]
    total = torch.empty_like(parts[0])
    dist.reduce_scatter(total, parts)
    return total


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return backward(grad)

    return Both.apply


def train(layer: Layer, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """What the four claim to do."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gather, scatter = function(gathered, scattered), function(scattered, gathered)
    mine = torch.arange(TOKENS).chunk(world)[rank]
    torch.manual_seed(SEED + rank)
    for tokens, targets in batches:
        x = layer.drop(layer.words[tokens[:, mine]] + layer.places[mine])
        x = x + layer.drop(scatter(layer.mlp(gather(layer.normed(x)))) + layer.bias)
        loss = layer.loss(x, targets[:, mine])
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in layer.partial()])
        dist.all_reduce(flat)
        for p, piece in zip(layer.partial(), flat.split([p.numel() for p in layer.partial()]), strict=True):
            p.grad = piece.view_as(p)
        dist.all_reduce(loss.detach())
        layer.step(loss.item())


def a(layer: Layer, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    gather, scatter = function(gathered, scattered), function(scattered, gathered)
    mine = torch.arange(TOKENS).chunk(world)[rank]
    torch.manual_seed(SEED + rank)
    for tokens, targets in batches:
        x = layer.drop(layer.words[tokens[:, mine]] + layer.places[mine])
        x = x + layer.drop(scatter(layer.mlp(gather(layer.normed(x)))) + layer.bias)
        loss = layer.loss(x, targets[:, mine])
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in layer.partial()])
        dist.all_reduce(flat)
        flat /= world
        for p, piece in zip(layer.partial(), flat.split([p.numel() for p in layer.partial()]), strict=True):
            p.grad = piece.view_as(p)
        dist.all_reduce(loss.detach())
        layer.step(loss.item())


def b(layer: Layer, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    gather, scatter = function(gathered, scattered), function(scattered, gathered)
    mine = torch.arange(TOKENS).chunk(world)[rank]
    torch.manual_seed(SEED)
    for tokens, targets in batches:
        x = layer.drop(layer.words[tokens[:, mine]] + layer.places[mine])
        x = x + layer.drop(scatter(layer.mlp(gather(layer.normed(x)))) + layer.bias)
        loss = layer.loss(x, targets[:, mine])
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in layer.partial()])
        dist.all_reduce(flat)
        for p, piece in zip(layer.partial(), flat.split([p.numel() for p in layer.partial()]), strict=True):
            p.grad = piece.view_as(p)
        dist.all_reduce(loss.detach())
        layer.step(loss.item())


def c(layer: Layer, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    gather = function(gathered, lambda grad: grad.chunk(world, dim=1)[rank])
    scatter = function(scattered, gathered)
    mine = torch.arange(TOKENS).chunk(world)[rank]
    torch.manual_seed(SEED + rank)
    for tokens, targets in batches:
        x = layer.drop(layer.words[tokens[:, mine]] + layer.places[mine])
        x = x + layer.drop(scatter(layer.mlp(gather(layer.normed(x)))) + layer.bias)
        loss = layer.loss(x, targets[:, mine])
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in layer.partial()])
        dist.all_reduce(flat)
        for p, piece in zip(layer.partial(), flat.split([p.numel() for p in layer.partial()]), strict=True):
            p.grad = piece.view_as(p)
        dist.all_reduce(loss.detach())
        layer.step(loss.item())


def d(layer: Layer, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    gather, scatter = function(gathered, scattered), function(scattered, gathered)
    mine = torch.arange(TOKENS).chunk(world)[rank]
    torch.manual_seed(SEED + rank)
    for tokens, targets in batches:
        x = layer.words[tokens[:, mine]]
        x = layer.drop(x + layer.places[: x.shape[1]])
        x = x + layer.drop(scatter(layer.mlp(gather(layer.normed(x)))) + layer.bias)
        loss = layer.loss(x, targets[:, mine])
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in layer.partial()])
        dist.all_reduce(flat)
        for p, piece in zip(layer.partial(), flat.split([p.numel() for p in layer.partial()]), strict=True):
            p.grad = piece.view_as(p)
        dist.all_reduce(loss.detach())
        layer.step(loss.item())


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens, (b, s), and targets, (b, s, 1), of each step."""
    generator = torch.Generator().manual_seed(2)
    shape = (BATCH, TOKENS)
    return [(torch.randint(VOCAB, shape, generator=generator), torch.randn(*shape, 1, generator=generator))
            for _ in range(STEPS)]  # fmt: skip


def call(fn: Any, case: Case) -> list[Backward]:
    """Losses; gradients of the first step, whole; weights after the last; and this rank's masks."""
    layer = Layer(dist.get_rank(), case.ranks)
    fn(layer, data())
    return [_told(layer)]


def _told(layer: Layer) -> Backward:
    grads = {f"{name}.grad": numbers for name, numbers in layer.first.items()}
    masks = [float(kept) for mask in layer.masks for kept in mask.flatten().tolist()]
    return {"losses": layer.losses, **grads, **taken(layer.named_parameters()), "masks": masks}


class Whole(Layer):
    """In one process, float64; dropout as the ranks draw it, each for its own tokens."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.double()
        self.streams = [torch.Generator().manual_seed(SEED + rank) for rank in range(ranks)]
        self.of_ranks: list[list[torch.Tensor]] = []

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        shape = (BATCH, TOKENS // len(self.streams), WIDTH)
        self.of_ranks.append([torch.rand(shape, generator=stream) >= DROPPED for stream in self.streams])
        return x * torch.cat(self.of_ranks[-1], dim=1) / (1 - DROPPED)


def expected(case: Case) -> list[list[Backward]]:
    whole = Whole(case.ranks)
    for tokens, targets in data():
        x = whole.drop(whole.words[tokens] + whole.places)
        x = x + whole.drop(whole.mlp(whole.normed(x)) + whole.bias)
        loss = whole.loss(x, targets.double())
        loss.backward()
        whole.step(loss.item())
    found: list[list[Backward]] = []
    for rank in range(case.ranks):
        whole.masks = [masks[rank] for masks in whole.of_ranks]
        found.append([{name: _share(name, numbers or [], rank, case.ranks) for name, numbers in _told(whole).items()}])
    return found


def _share(name: str, numbers: list[float], rank: int, ranks: int) -> list[float]:
    """What a rank holds of a tensor."""
    cut = {"up": 0, "down": 1}.get(name.removesuffix(".grad"))
    if cut is None:
        return numbers
    whole = torch.tensor(numbers, dtype=torch.float64).view((FFN, WIDTH) if cut == 0 else (WIDTH, FFN))
    return whole.chunk(ranks, cut)[rank].flatten().tolist()


def budget(case: Case) -> list[Cost]:
    """A step: two gathers, two reduce-scatters, the partial gradients, the loss."""
    sizes = sum(p.nbytes for p in Layer().partial())
    return [Cost(calls=STEPS * 6, handed=STEPS * (4 * 4 * BATCH * TOKENS * WIDTH + sizes + 4))] * case.ranks


# What is told: each of the values by rank, and of the expected


def first_loss(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    have, want = ((of[0][0]["losses"] or [0.0])[:1] for of in (values, wanted))
    if near(have, want):
        return say("lineup_05.loss", have=f"{have[0]:.3f}")
    return say("lineup_05.loss_differs", have=f"{have[0]:.3f}", want=f"{want[0]:.3f}")


def first_gradients(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    """Which differ; and by how much, where all do by the same."""
    names = [name for name in wanted[0][0] if name.endswith(".grad")]
    off = {n: _ratio(values, wanted, n) for n in names if _differ(values, wanted, n)}
    if not off:
        return say("lineup_05.right")
    if len(off) == len(names):
        return say("lineup_05.all", all=len(names))
    told = ", ".join(name.removesuffix(".grad") for name in off)
    ratios = {f"{ratio:.2g}" if ratio else "" for ratio in off.values()}
    return say("lineup_05.each", names=told, ratio=ratios.pop()) if len(ratios) == 1 and "" not in ratios else told


def _differ(values: list[list[Backward]], wanted: list[list[Backward]], name: str) -> bool:
    return any(not near(have[0][name] or [], want[0][name]) for have, want in zip(values, wanted, strict=True))


def _ratio(values: list[list[Backward]], wanted: list[list[Backward]], name: str) -> float:
    have, want = values[0][0][name] or [], wanted[0][0][name] or []
    largest = max(range(len(want)), key=lambda n: abs(want[n]))
    ratio = have[largest] / want[largest]
    return ratio if near(have, [ratio * number for number in want]) else 0.0


def last_weights(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    """Of those that all ranks hold: rank against rank, and against one process."""
    apart = sum(any(not near(rank[0][n] or [], values[0][0][n]) for rank in values) for n in PARTIAL)
    among = say("lineup_05.apart", n=apart, all=len(PARTIAL)) if apart else say("lineup_05.alike")
    return say("lineup_05.both", among=among, n=sum(_differ(values, wanted, n) for n in PARTIAL), all=len(PARTIAL))


def masks(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    alike = all(rank[0]["masks"] == values[0][0]["masks"] for rank in values)
    return say("lineup_05.alike") if alike else say("lineup_05.different")


LINEUP = Lineup(
    "05",
    training("sequence_parallel", Case(3, 1), train, call, expected, budget, differing, COLLECTIVES),
    Case(3, 1),
    {
        "A": Impostor(a, lambda: say("lineup_05.mean")),
        "B": Impostor(b, lambda: say("lineup_05.seed")),
        "C": Impostor(c, lambda: say("lineup_05.slice")),
        "D": Impostor(d, lambda: say("lineup_05.places")),
    },
    facts=(
        Fact(lambda: say("lineup_05.first_loss"), first_loss),
        Fact(lambda: say("lineup_05.gradients"), first_gradients),
        Fact(lambda: say("lineup_05.weights"), last_weights),
        Fact(lambda: say("lineup_05.masks"), masks),
    ),
    units=("calls", "handed"),
    where=lambda case: say("lineup_05.case", ranks=case.ranks, batch=BATCH, tokens=TOKENS, width=WIDTH),
)
