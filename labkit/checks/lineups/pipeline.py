"""Chapter 06: four that claim to train with a pipeline.

Two ranks share five small layers, two stages each, by interleaved 1F1B. Every neighbour is the other rank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.checks.exercise import Case, Cost
from labkit.checks.gradients import Backward, near, taken
from labkit.checks.impostors import Fact, Impostor, Lineup, training
from labkit.pipeline import Action, interleaved
from labkit.show.words import say

RANKS, STAGES, LAYERS, WIDTH = 2, 4, 5, 3
MICRO_BATCHES, ROWS, STEPS, RATE = 4, 2, 2, 0.2
ORDER = interleaved(RANKS, MICRO_BATCHES, STAGES // RANKS)
T = torch.Tensor
Batch = tuple[T, T]


class Net(nn.Module):
    """The layers, of which a rank uses its own, and what is under way. It keeps what its training is told by.

    Attributes:
        stages: Stage → the numbers of its layers.
        scale: What the last stage multiplies its loss with before it goes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        generator = torch.Generator().manual_seed(6)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)
        self.stages: list[range] = []
        self.scale = 1.0
        self.held: dict[tuple[int, int], tuple[T, T]] = {}
        self.losses: list[float] = []
        self.first: Backward = {}

    def do(self, action: Action, batch: Batch, given: T | None) -> T:
        """One action: what its stage makes of what it is given, or of its micro-batch's rows."""
        kind, micro_batch, stage = action
        if kind == "B":
            x, y = self.held.pop((micro_batch, stage))
            y.backward(given)
            return x.grad  # type: ignore[return-value]
        inputs, targets = (whole.chunk(MICRO_BATCHES)[micro_batch] for whole in batch)
        x = (inputs if given is None else given).clone().requires_grad_()
        y = x
        for n in self.stages[stage]:
            y = torch.tanh(self.layers[n](y))
        if stage == STAGES - 1:
            loss = (y - targets).square().mean()
            self.losses[-1] += loss.item() / MICRO_BATCHES
            y = loss * self.scale
        self.held[micro_batch, stage] = x, y
        return y.detach()

    def step(self) -> None:
        """Plain SGD; gradients are forgotten."""
        self.first = self.first or self.gradients()
        for param in self.parameters():
            if param.grad is not None:
                param.data -= RATE * param.grad
            param.grad = None

    def gradients(self) -> Backward:
        """Of each layer that has one, weight and bias in one."""
        grads = [[p.grad.flatten() for p in layer.parameters() if p.grad is not None] for layer in self.layers]
        return taken((str(n), torch.cat(of_layer)) for n, of_layer in enumerate(grads) if of_layer)


def comes(action: Action) -> bool:
    """Whether it needs what the other rank made."""
    return action.stage > 0 if action.kind == "F" else action.stage < STAGES - 1


def goes(action: Action) -> bool:
    """Whether the other rank needs what it makes."""
    return action.stage < STAGES - 1 if action.kind == "F" else action.stage > 0


def evenly() -> list[range]:
    """The layers of each stage; the first stages get one more."""
    return [range(n[0], n[-1] + 1) for n in torch.arange(LAYERS).tensor_split(STAGES)]


def train(net: Net, batches: list[Batch]) -> None:
    """What the four claim to do."""
    other = 1 - dist.get_rank()
    net.stages, net.scale = evenly(), 1 / MICRO_BATCHES
    for batch in batches:
        net.losses.append(0.0)
        sent = []
        for action in ORDER.actions[dist.get_rank()]:
            given = None
            if comes(action):
                given = torch.empty(ROWS, WIDTH)
                dist.recv(given, other)
            made = net.do(action, batch, given)
            if goes(action):
                sent.append(dist.isend(made, other))
        for work in sent:
            work.wait()
        net.step()


def a(net: Net, batches: list[Batch]) -> None:
    other = 1 - dist.get_rank()
    net.stages, net.scale = evenly(), 1 / MICRO_BATCHES
    for batch in batches:
        net.losses.append(0.0)
        for action in ORDER.actions[dist.get_rank()]:
            given = None
            if comes(action):
                given = torch.empty(ROWS, WIDTH)
                dist.recv(given, other)
            made = net.do(action, batch, given)
            if goes(action):
                dist.send(made, other)
        net.step()


def b(net: Net, batches: list[Batch]) -> None:
    other = 1 - dist.get_rank()
    net.stages, net.scale = evenly(), 1 / MICRO_BATCHES
    for batch in batches:
        net.losses.append(0.0)
        sent = []
        arriving: dict[Action, tuple[T, Any]] = {}
        coming = [action for action in ORDER.actions[dist.get_rank()] if comes(action)]
        for pair in zip(coming[::2], coming[1::2], strict=True):
            for action in sorted(pair):  # B before F: the gradient from the stage after, the input from the one before
                room = torch.empty(ROWS, WIDTH)
                arriving[action] = room, dist.irecv(room, other)
        for action in ORDER.actions[dist.get_rank()]:
            if comes(action):
                arriving[action][1].wait()
            made = net.do(action, batch, arriving[action][0] if comes(action) else None)
            if goes(action):
                sent.append(dist.isend(made, other))
        for work in sent:
            work.wait()
        net.step()


def c(net: Net, batches: list[Batch]) -> None:
    other = 1 - dist.get_rank()
    net.stages, net.scale = evenly(), 1 / MICRO_BATCHES
    for batch in batches:
        net.losses.append(0.0)
        sent = []
        for action in ORDER.actions[dist.get_rank()]:
            given = None
            if comes(action):
                given = torch.empty(ROWS, WIDTH)
                dist.recv(given, other)
            made = net.do(action, batch, given)
            if goes(action):
                sent.append(dist.isend(made, other))
        for work in sent:
            work.wait()
        for param in net.parameters():
            if param.grad is not None:
                param.grad /= MICRO_BATCHES
        net.step()


def d(net: Net, batches: list[Batch]) -> None:
    other = 1 - dist.get_rank()
    each = LAYERS // STAGES
    net.stages, net.scale = [range(s * each, (s + 1) * each) for s in range(STAGES)], 1 / MICRO_BATCHES
    for batch in batches:
        net.losses.append(0.0)
        sent = []
        for action in ORDER.actions[dist.get_rank()]:
            given = None
            if comes(action):
                given = torch.empty(ROWS, WIDTH)
                dist.recv(given, other)
            made = net.do(action, batch, given)
            if goes(action):
                sent.append(dist.isend(made, other))
        for work in sent:
            work.wait()
        net.step()


def data() -> list[Batch]:
    """Inputs and targets, (b, h), of each step."""
    generator = torch.Generator().manual_seed(3)
    shape = (MICRO_BATCHES * ROWS, WIDTH)
    return [(torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)) for _ in range(STEPS)]


def call(fn: Any, case: Case) -> Backward:
    """Losses, which the last stage's rank knows, and the first step's gradients, each on its rank."""
    net = Net()
    fn(net, data())
    return {"losses": net.losses, **net.first}


@cache
def in_one_process() -> Backward:
    """The whole batch at once, in float64."""
    net = Net().double()
    for inputs, targets in data():
        x = inputs.double()
        for layer in net.layers:
            x = torch.tanh(layer(x))
        loss = (x - targets.double()).square().mean()
        loss.backward()
        net.losses.append(loss.item())
        net.step()
    return {"losses": net.losses, **net.first}


def expected(case: Case) -> list[Backward]:
    whole, stages = in_one_process(), evenly()
    found: list[Backward] = []
    for rank in range(RANKS):
        own = [str(n) for stage in range(rank, STAGES, RANKS) for n in stages[stage]]
        last = rank == (STAGES - 1) % RANKS
        found.append({"losses": whole["losses"] if last else [0.0] * STEPS, **{n: whole[n] for n in own}})
    return found


def differing(case: Case, values: list[Backward], wanted: list[Backward]) -> list[int]:
    return [
        rank for rank, (have, want) in enumerate(zip(values, wanted, strict=True))
        if have.keys() != want.keys() or not all(near(have[name] or [], want[name]) for name in want)
    ]  # fmt: skip


def budget(case: Case) -> list[Cost]:
    """Each boundary between stages, forward and back: of three, rank 0 sends two on and one back, rank 1 the rest."""
    each = STEPS * MICRO_BATCHES * (STAGES - 1)
    return [Cost(nbytes=each * 4 * ROWS * WIDTH, messages=each)] * case.ranks


def losses(case: Case, values: list[Backward], wanted: list[Backward]) -> str:
    have, want = (of[-1]["losses"] or [] for of in (values, wanted))
    told = [" → ".join(f"{loss:.3f}" for loss in some) for some in (have, want)]
    if near(have, want):
        return say("lineup_06.losses", have=told[0])
    return say("lineup_06.losses_differ", have=told[0], want=told[1])


def first_gradients(case: Case, values: list[Backward], wanted: list[Backward]) -> str:
    """Of each layer, wherever it is: those that differ, by which factor; and those that have none."""
    whole, off, none = in_one_process(), {}, []
    for n in map(str, range(LAYERS)):
        have = next((of_rank[n] for of_rank in values if n in of_rank), None)
        want = whole[n] or []
        if have is None:
            none.append(n)
        elif not near(have, want):
            off[n] = _ratio(have, want)
    if not off and not none:
        return say("lineup_06.right")
    factors = {f"{ratio:.2g}" for ratio in off.values()}
    told = say("lineup_06.off", n=len(off), all=LAYERS)
    told += say("lineup_06.ratio", ratio=factors.pop()) if len(factors) == 1 and all(off.values()) else ""
    return told + (say("lineup_06.none", layers=", ".join(none)) if none else "")


def _ratio(have: list[float], want: list[float]) -> float:
    largest = max(range(len(want)), key=lambda n: abs(want[n]))
    ratio = have[largest] / want[largest]
    return ratio if near(have, [ratio * number for number in want]) else 0.0


LINEUP = Lineup(
    "06",
    training("pipeline", Case(RANKS, 1), train, call, expected, budget, differing),
    Case(RANKS, 1),
    {
        "A": Impostor(a, lambda: say("lineup_06.sends")),
        "B": Impostor(b, lambda: say("lineup_06.swapped")),
        "C": Impostor(c, lambda: say("lineup_06.twice")),
        "D": Impostor(d, lambda: say("lineup_06.dropped")),
    },
    facts=(
        Fact(lambda: say("lineup_06.head_losses"), losses),
        Fact(lambda: say("lineup_06.head_gradients"), first_gradients),
    ),
    units=("messages", "nbytes"),
    where=lambda case: say("lineup_06.case", ranks=RANKS, stages=STAGES, layers=LAYERS, micro_batches=MICRO_BATCHES),
)
