"""Chapter 07: four that claim to train with ZeRO's second stage.

Three ranks train a small language model, each on sequences of its own; the head's weight is the words' weight. All
parameters lie in one flat buffer; a rank keeps the momentum, and the parameters to update, of its shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labkit.checks.exercise import COLLECTIVES, Case, Cost
from labkit.checks.gradients import Backward, differing, near, taken
from labkit.checks.impostors import Fact, Impostor, Lineup, training
from labkit.checks.shards import in_shard
from labkit.collectives import all_gather, all_reduce, reduce_scatter
from labkit.show.words import say

VOCAB, WIDTH, FFN, BATCH, TOKENS, STEPS = 7, 4, 6, 2, 5, 3
RATE, MOMENTUM, MOST = 2.0, 0.5, 0.25
#: What stands in memory that is handed out again, as `torch.empty` may find it.
LEFT = 3.0


class Model(nn.Module):
    """A layer between words and head. It keeps what its training is told by."""

    words: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    bias: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        shapes = {"words": (VOCAB, WIDTH), "up": (FFN, WIDTH), "down": (WIDTH, FFN), "bias": (WIDTH,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.head = self.words
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.first: Backward = {}
        self.held = 0

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean over this rank's next tokens, ()."""
        x = self.words[tokens[:, :-1]]
        x = x + torch.tanh(x @ self.up.T) @ self.down.T + self.bias
        loss = F.cross_entropy((x @ self.head.T).flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def note(self, norm: float, *held: torch.Tensor) -> None:
        """A step is over: the norm of its gradients, and what the rank keeps for the next."""
        self.norms.append(norm)
        self.first = self.first or taken(self.named_parameters())
        self.held = sum(t.nbytes for t in held)


def flat(tensors: Iterable[Any]) -> torch.Tensor:
    """One after the other, and zeros up to a multiple of N."""
    joined = torch.cat([t.detach().flatten() for t in tensors])
    return F.pad(joined, (0, -len(joined) % dist.get_world_size()))


def pieces(whole: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What lies in a flat buffer, without its padding."""
    sizes = [t.numel() for t in like]
    return [piece.view_as(t) for piece, t in zip(whole[: sum(sizes)].split(sizes), like, strict=True)]


def memory(count: int) -> torch.Tensor:
    """Room for so many numbers; as `torch.empty` gives it, with what somebody left there."""
    return torch.full((count,), LEFT)


def train(model: Model, batches: list[torch.Tensor]) -> None:
    """What the four claim to do."""
    rank, world = dist.get_rank(), dist.get_world_size()
    params = list(model.parameters())
    shard = flat(params).chunk(world)[rank].clone()
    momentum, grad, whole = torch.zeros_like(shard), torch.zeros_like(shard), flat(params)
    for tokens in batches:
        model.loss(tokens).backward()
        reduce_scatter(grad, flat([p.grad for p in params]), op="avg", algorithm="ring")
        square = grad.square().sum()
        all_reduce(square, algorithm="ring")
        norm = square.sqrt().item()
        momentum.mul_(MOMENTUM).add_(grad * min(1, MOST / norm))
        shard -= RATE * momentum
        all_gather(whole, shard, algorithm="ring")
        for p, piece in zip(params, pieces(whole, params), strict=True):
            p.data, p.grad = piece.clone(), None
        model.note(norm, shard, momentum)


def a(model: Model, batches: list[torch.Tensor]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in ("words", "up", "down", "bias", "head"):
        setattr(model, name, nn.Parameter(getattr(model, name).detach().clone()))
    params = list(model.parameters())
    shard = flat(params).chunk(world)[rank].clone()
    momentum, grad, whole = torch.zeros_like(shard), torch.zeros_like(shard), flat(params)
    for tokens in batches:
        model.loss(tokens).backward()
        reduce_scatter(grad, flat([p.grad for p in params]), op="avg", algorithm="ring")
        square = grad.square().sum()
        all_reduce(square, algorithm="ring")
        norm = square.sqrt().item()
        momentum.mul_(MOMENTUM).add_(grad * min(1, MOST / norm))
        shard -= RATE * momentum
        all_gather(whole, shard, algorithm="ring")
        for p, piece in zip(params, pieces(whole, params), strict=True):
            p.data, p.grad = piece.clone(), None
        model.note(norm, shard, momentum)


def b(model: Model, batches: list[torch.Tensor]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    params = list(model.parameters())
    arrived: list[Any] = []
    for p in params:
        p.register_post_accumulate_grad_hook(arrived.append)
    shard = flat(params).chunk(world)[rank].clone()
    momentum, grad, whole = torch.zeros_like(shard), torch.zeros_like(shard), flat(params)
    for tokens in batches:
        model.loss(tokens).backward()
        reduce_scatter(grad, flat([p.grad for p in arrived]), op="avg", algorithm="ring")
        arrived.clear()
        square = grad.square().sum()
        all_reduce(square, algorithm="ring")
        norm = square.sqrt().item()
        momentum.mul_(MOMENTUM).add_(grad * min(1, MOST / norm))
        shard -= RATE * momentum
        all_gather(whole, shard, algorithm="ring")
        for p, piece in zip(params, pieces(whole, params), strict=True):
            p.data, p.grad = piece.clone(), None
        model.note(norm, shard, momentum)


def c(model: Model, batches: list[torch.Tensor]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    params = list(model.parameters())
    shard = flat(params).chunk(world)[rank].clone()
    momentum, grad, whole = torch.zeros_like(shard), torch.zeros_like(shard), flat(params)
    for tokens in batches:
        model.loss(tokens).backward()
        grads = flat([p.grad for p in params])
        all_reduce(grads, op="avg", algorithm="ring")
        grad = grads.chunk(world)[rank]
        square = grad.square().sum()
        all_reduce(square, algorithm="ring")
        norm = square.sqrt().item()
        momentum.mul_(MOMENTUM).add_(grad * min(1, MOST / norm))
        shard -= RATE * momentum
        all_gather(whole, shard, algorithm="ring")
        for p, piece in zip(params, pieces(whole, params), strict=True):
            p.data, p.grad = piece.clone(), None
        model.note(norm, shard, momentum)


def d(model: Model, batches: list[torch.Tensor]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    params = list(model.parameters())
    shard = flat(params).chunk(world)[rank].clone()
    momentum, grad, whole = torch.zeros_like(shard), torch.zeros_like(shard), flat(params)
    buffer = memory(len(whole))
    for tokens in batches:
        model.loss(tokens).backward()
        for p, piece in zip(params, pieces(buffer, params), strict=True):
            piece.copy_(p.grad)  # type: ignore[arg-type]
        reduce_scatter(grad, buffer, op="avg", algorithm="ring")
        square = grad.square().sum()
        all_reduce(square, algorithm="ring")
        norm = square.sqrt().item()
        momentum.mul_(MOMENTUM).add_(grad * min(1, MOST / norm))
        shard -= RATE * momentum
        all_gather(whole, shard, algorithm="ring")
        for p, piece in zip(params, pieces(whole, params), strict=True):
            p.data, p.grad = piece.clone(), None
        model.note(norm, shard, momentum)


def batches(rank: int) -> list[torch.Tensor]:
    """Tokens of each step, (b, s + 1)."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=generator) for _ in range(STEPS)]


def call(fn: Any, case: Case) -> list[Backward]:
    """Losses of this rank, norms, parameters after the first step and in the end, and the bytes that it keeps."""
    model = Model()
    fn(model, batches(dist.get_rank()))
    return [_told(model)]


def _told(model: Model) -> Backward:
    first = {f"{name}, 1": numbers for name, numbers in model.first.items() if name != "head"}
    last = taken([(name, getattr(model, name)) for name in ("words", "up", "down", "bias", "head")])
    return {"losses": model.losses, "norms": model.norms, **first, **last, "held": [float(model.held)]}


def expected(case: Case) -> list[list[Backward]]:
    """One process that trains on all sequences, by torch's own SGD and clipping, in float64."""
    model = Model().double()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses: list[list[float]] = [[] for _ in range(case.ranks)]
    for of_ranks in zip(*(batches(rank) for rank in range(case.ranks)), strict=True):
        sgd.zero_grad()
        for rank, tokens in enumerate(of_ranks):
            (model.loss(tokens) / case.ranks).backward()
            losses[rank].append(model.losses.pop())
        norm = nn.utils.clip_grad_norm_(model.parameters(), MOST, foreach=False)
        sgd.step()
        model.note(norm.item())
    shard = 2 * 4 * in_shard(_numel(), case.ranks)
    return [[{**_told(model), "losses": mine, "held": [float(shard)]}] for mine in losses]


def _numel() -> int:
    return sum(p.numel() for p in Model().parameters())


def budget(case: Case) -> list[Cost]:
    """A step: N−1 shards to scatter, as many to gather, and twice the square of the norm."""
    shards = 2 * (case.ranks - 1) * 4 * in_shard(_numel(), case.ranks)
    return [Cost(nbytes=STEPS * (shards + 2 * 4))] * case.ranks


# What is told: each of the values by rank, and of the expected


def losses(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    have, want = ([_mean_loss(of, step) for step in range(STEPS)] for of in (values, wanted))
    return _beside(have, want)


def _mean_loss(of_ranks: list[list[Backward]], step: int) -> float:
    return sum((rank[0]["losses"] or [])[step] for rank in of_ranks) / len(of_ranks)


def first_norm(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    have, want = ((of[0][0]["norms"] or [])[:1] for of in (values, wanted))
    return _beside(have, want)


def _beside(have: list[float], want: list[float]) -> str:
    told, right = (" → ".join(f"{number:.3f}" for number in of) for of in (have, want))
    return say("lineup_07.same", have=told) if near(have, want) else say("lineup_07.differs", have=told, want=right)


def first_step(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    """Which parameters differ; and by how much they have moved, where all have by the same."""
    start = taken(Model().named_parameters())
    have, want = values[0][0], wanted[0][0]
    names = [name for name in start if name != "head"]
    off = {n: _ratio(*(_moved(of[f"{n}, 1"], start[n]) for of in (have, want)))
           for n in names if not near(have[f"{n}, 1"] or [], want[f"{n}, 1"])}  # fmt: skip
    if not off:
        return say("lineup_07.right")
    told = say("lineup_07.all", all=len(names)) if len(off) == len(names) else ", ".join(off)
    ratios = {f"{ratio:.2g}" if ratio else "" for ratio in off.values()}
    return say("lineup_07.each", names=told, ratio=ratios.pop()) if len(ratios) == 1 and "" not in ratios else told


def _moved(after: list[float] | None, before: list[float] | None) -> list[float]:
    return [a - b for a, b in zip(after or [], before or [], strict=True)]


def _ratio(have: list[float], want: list[float]) -> float:
    """By which factor one change is the other; 0: by none."""
    largest = max(range(len(want)), key=lambda n: abs(want[n]))
    ratio = have[largest] / want[largest]
    return ratio if all(abs(h - ratio * w) < 1e-3 for h, w in zip(have, want, strict=True)) else 0.0


def words_and_head(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    alike = all(near(rank[0]["head"] or [], rank[0]["words"]) for rank in values)
    return say("lineup_07.one_tensor") if alike else say("lineup_07.two_tensors")


def held(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    """Bytes of shard and momentum, of the rank that keeps most."""
    have, (want,) = max((rank[0]["held"] or [])[0] for rank in values), wanted[0][0]["held"] or []
    both = {"have": f"{have:.0f}", "want": f"{want:.0f}"}
    return both["have"] if have == want else say("lineup_07.allowed", **both)


LINEUP = Lineup(
    "07",
    training("ZeRO", Case(3, 1), train, call, expected, budget, differing, COLLECTIVES),
    Case(3, 1),
    {
        "A": Impostor(a, lambda: say("lineup_07.untied")),
        "B": Impostor(b, lambda: say("lineup_07.shifted")),
        "C": Impostor(c, lambda: say("lineup_07.reduced")),
        "D": Impostor(d, lambda: say("lineup_07.padding")),
    },
    facts=(
        Fact(lambda: say("lineup_07.losses"), losses),
        Fact(lambda: say("lineup_07.norm"), first_norm),
        Fact(lambda: say("lineup_07.first"), first_step),
        Fact(lambda: say("lineup_07.tied"), words_and_head),
        Fact(lambda: say("lineup_07.memory"), held),
    ),
    units=("nbytes",),
    where=lambda case: say("lineup_07.case", ranks=case.ranks, numel=_numel(), steps=STEPS),
)
