"""3.4 · gradients of k micro-batches, averaged once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.checks import given
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.given import WIDTH, Scored, uncounted
from labkit.checks.gradients import Backward, differing, gradients, mean, told
from labkit.data_parallel import DistributedDataParallel
from labkit.show.words import say


def accumulation(model, batches: list[torch.Tensor]) -> None:
    with model.no_sync():
        for batch in batches[:-1]:
            (model(batch) / len(batches)).backward()
    (model(batches[-1]) / len(batches)).backward()


def forgets_to_divide(model, batches: list[torch.Tensor]) -> None:
    with model.no_sync():
        for batch in batches[:-1]:
            model(batch).backward()
    model(batches[-1]).backward()


def divides_the_last_only(model, batches: list[torch.Tensor]) -> None:
    with model.no_sync():
        for batch in batches[:-1]:
            model(batch).backward()
    (model(batches[-1]) / len(batches)).backward()


def averages_every_time(model, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        (model(batch) / len(batches)).backward()


def forward_outside(model, batches: list[torch.Tensor]) -> None:
    for number, batch in enumerate(batches, 1):
        loss = model(batch) / len(batches)
        if number < len(batches):
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()


def never_averages(model, batches: list[torch.Tensor]) -> None:
    with model.no_sync():
        for batch in batches:
            (model(batch) / len(batches)).backward()


def averages_past_the_wrapper(model, batches: list[torch.Tensor]) -> None:
    """The hooks are on the parameters, whoever calls forward."""
    for batch in batches:
        (model.module(batch) / len(batches)).backward()


def only_the_last(model, batches: list[torch.Tensor]) -> None:
    for batch in batches[:-1]:
        with model.no_sync():
            (model(batch) / len(batches)).backward()
        model.zero_grad()
    (model(batches[-1]) / len(batches)).backward()


def last_batch_only(model, batches: list[torch.Tensor]) -> None:
    model(batches[-1]).backward()


def one_large_batch(model, batches: list[torch.Tensor]) -> None:
    model(torch.cat(batches)).backward()


def adds_losses_up(model, batches: list[torch.Tensor]) -> None:
    """One backward of the sum: all micro-batches' activations are held at once."""
    with model.no_sync():
        losses = [model(batch) for batch in batches[:-1]]
    sum([*losses, model(batches[-1])]).div(len(batches)).backward()


def averages_each_parameter(model, batches: list[torch.Tensor]) -> None:
    never_averages(model, batches)
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def syncs_on_rank_0(model, batches: list[torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        accumulation(model, batches)
    else:
        never_averages(model, batches)


def _batches(case: Case, rank: int) -> list[torch.Tensor]:
    """Rows enough that activations outweigh the parameters, where that is what the case is about."""
    return [given.batch(rank, step, case.more or 2) for step in range(case.elements)]


def call(fn: Callable[..., None], case: Case) -> list[Backward]:
    with uncounted():
        model = DistributedDataParallel(Scored())
    fn(model, _batches(case, dist.get_rank()))
    return [gradients(model.module)]


def own(case: Case) -> list[list[Backward]]:
    """What each rank would have alone, in float64."""
    found = []
    for rank in range(case.ranks):
        module = Scored().double()
        module(torch.cat(_batches(case, rank)).double()).backward()
        found.append([gradients(module)])
    return found


def expected(case: Case) -> list[list[Backward]]:
    return [mean(own(case))] * case.ranks


def budget(case: Case) -> list[Cost]:
    """One bucket holds all of this module; the activations of two micro-batches are room for one."""
    size = sum(p.nbytes for p in Scored().parameters())
    room = 2 * Scored.HELD * 4 * WIDTH * case.more + 4 * size
    return [Cost(calls=1, handed=size, peak=room)] * case.ranks


def where(case: Case) -> str:
    return f"{say('check.world', ranks=case.ranks)}, k = {case.elements}"


EXERCISE = Exercise(
    name="accumulation",
    number="3.4",
    cases=(Case(2, 2), Case(2, 1), Case(3, 4), Case(1, 3), Case(2, 8, more=1024)),
    call=call,
    expected=expected,
    budget=budget,
    solution=accumulation,
    hints=lambda: (say("accumulation.question"), say("accumulation.state"), say("accumulation.code")),
    wrong=(
        Wrong(forgets_to_divide, "wrong", "2 × as much"),
        Wrong(divides_the_last_only, "wrong"),
        Wrong(averages_every_time, "wasteful", "; budget 1 "),
        Wrong(forward_outside, "wasteful", "; budget 1 "),
        Wrong(never_averages, "wrong", "rank 0's own"),
        Wrong(averages_past_the_wrapper, "wasteful", "collectives of a rank: 8; budget 1"),
        Wrong(only_the_last, "wrong"),
        Wrong(last_batch_only, "wrong"),
        Wrong(one_large_batch, "wasteful", "held by a rank"),
        Wrong(adds_losses_up, "wasteful", "held by a rank"),
        Wrong(averages_each_parameter, "wasteful", "budget 1"),
        Wrong(syncs_on_rank_0, "crashed"),
    ),
    legal=nothing,
    compare=differing,
    tells=lambda case, values, bad: told(values, expected(case), own(case), bad[0]),
    where=where,
    allowed=COLLECTIVES,
    theirs=frozenset(),
)  # fmt: skip
