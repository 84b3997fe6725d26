"""Chapter 03: four that claim to train data-parallel.

Each rank has built the model from its own seed and reads documents of its own, of different lengths; the model is given
a new head, the same on every rank, before it is trained; and a part of it is used for long documents only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, nothing
from labkit.checks.gradients import Backward, differing, near, taken
from labkit.checks.impostors import Fact, Impostor, Lineup
from labkit.show.words import say

WIDTH, LONG = 8, 6
#: Tokens of a rank's documents, one a step: on rank 0 both are long, on the others the second is short.
LENGTHS = ((7, 9), (8, 3), (12, 4))


class Reader(torch.nn.Module):
    """(tokens, WIDTH) → (tokens, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
        self.for_long = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h + torch.tanh(self.for_long(h)) if len(x) > LONG else h)


def new_head() -> torch.nn.Linear:
    """The same on every rank."""
    torch.manual_seed(1)
    return torch.nn.Linear(WIDTH, 1)


def train(model: Any, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """What the four claim to do."""
    model.head = new_head()
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    for x, y in documents:
        model.zero_grad()
        tokens = torch.tensor(float(len(x)))
        dist.all_reduce(tokens)
        ((model(x) - y).square().sum() / tokens).backward()
        for param in model.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.data -= 0.1 * grad


def a(model: Any, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    model.head = new_head()
    for x, y in documents:
        model.zero_grad()
        tokens = torch.tensor(float(len(x)))
        dist.all_reduce(tokens)
        ((model(x) - y).square().sum() / tokens).backward()
        for param in model.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.data -= 0.1 * grad


def b(model: Any, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    model.head = new_head()
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    for x, y in documents:
        model.zero_grad()
        tokens = torch.tensor(float(len(x)))
        dist.all_reduce(tokens)
        ((model(x) - y).square().sum() / tokens).backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.data -= 0.1 * param.grad


def c(model: Any, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    model.head = new_head()
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    for x, y in documents:
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        for param in model.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.data -= 0.1 * grad / dist.get_world_size()


def d(model: Any, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    wrapped = list(model.parameters())
    for param in wrapped:
        dist.broadcast(param.data, 0)
    model.head = new_head()
    for x, y in documents:
        model.zero_grad()
        tokens = torch.tensor(float(len(x)))
        dist.all_reduce(tokens)
        ((model(x) - y).square().sum() / tokens).backward()
        for param in wrapped:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.grad = grad
        for param in model.parameters():
            param.data -= 0.1 * param.grad


def documents(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    sizes = LENGTHS[rank]
    return [(torch.randn(n, WIDTH, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]


def call(fn: Any, case: Case) -> list[Backward]:
    """The weights after training."""
    torch.manual_seed(dist.get_rank())
    model = Reader()
    fn(model, documents(dist.get_rank()))
    return [taken(model.named_parameters())]


def expected(case: Case) -> list[list[Backward]]:
    """One process, on the mean over all tokens of all ranks, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Reader()
        model.head = new_head()
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in zip(*(documents(rank) for rank in range(case.ranks)), strict=True):
        optimizer.zero_grad()
        errors = torch.cat([(model(x.double()) - y.double()).square() for x, y in batch])
        errors.mean().backward()
        optimizer.step()
    return [[taken(model.named_parameters())]] * case.ranks


def budget(case: Case) -> list[Cost]:
    """A broadcast a tensor; at each step the tokens, and a mean a tensor."""
    sizes, steps = [p.nbytes for p in Reader().parameters()], len(LENGTHS[0])
    calls = len(sizes) + steps * (1 + len(sizes))
    return [Cost(calls=calls, handed=sum(sizes) + steps * (4 + sum(sizes)))] * case.ranks


def against_one_process(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    return _apart([(rank[0], want[0]) for rank, want in zip(values, wanted, strict=True)])


def among_ranks(case: Case, values: list[list[Backward]], wanted: list[list[Backward]]) -> str:
    return _apart([(rank[0], values[0][0]) for rank in values])


def _apart(pairs: list[tuple[Backward, Backward]]) -> str:
    """How many of the tensors differ in one pair or another."""
    names = list(pairs[0][1])
    differ = sum(any(not near(one[name] or [], other[name]) for one, other in pairs) for name in names)
    return say("lineup_03.differ", n=differ, all=len(names)) if differ else say("lineup_03.alike")


LINEUP = Lineup(
    "03",
    Exercise(
        name="data_parallel",
        number="",
        cases=(Case(3, 1),),
        call=call,
        expected=expected,
        budget=budget,
        solution=train,
        hints=lambda: ("", "", ""),
        wrong=(),
        legal=nothing,
        compare=differing,
        allowed=COLLECTIVES,
    ),
    Case(3, 1),
    {
        "A": Impostor(a, lambda: say("lineup_03.start")),
        "B": Impostor(b, lambda: say("lineup_03.branch")),
        "C": Impostor(c, lambda: say("lineup_03.means")),
        "D": Impostor(d, lambda: say("lineup_03.replaced")),
    },
    facts=(
        Fact(lambda: say("lineup_03.against"), against_one_process),
        Fact(lambda: say("lineup_03.among"), among_ranks),
    ),
    units=("calls", "handed"),
)
