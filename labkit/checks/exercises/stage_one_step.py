"""7.2 · a step of ZeRO's first stage: each rank updates its shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit.checks import alone
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import Backward, differing, taken
from labkit.checks.shards import SHARDED, Adam, in_shard, mean
from labkit.checks.wire import sent_by_a_ring
from labkit.show.words import say
from labkit.trace import Trace

Update = Callable[[torch.Tensor, torch.Tensor], None]
STEPS = 2
STATE = "state"  #: beside the parameters: bytes of the optimizer's state


def stage_one_step(params, grads, update):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    padding = (0, -len(params) % ranks)
    flat, grads = (torch.nn.functional.pad(t, padding) for t in (params, grads))
    shard = flat.chunk(ranks)[rank].clone()
    grad = torch.empty_like(shard)
    dist.reduce_scatter(grad, list(grads.chunk(ranks)))
    update(shard, grad / ranks)
    dist.all_gather(list(flat.chunk(ranks)), shard)
    params.copy_(flat[: len(params)])


def _padded(flat: torch.Tensor) -> torch.Tensor:
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def _mine(flat: torch.Tensor) -> torch.Tensor:
    return _padded(flat).chunk(dist.get_world_size())[dist.get_rank()].clone()


def _scattered(grads: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the sum."""
    parts = [part.contiguous() for part in _padded(grads).chunk(dist.get_world_size())]
    total = torch.empty_like(parts[0])
    dist.reduce_scatter(total, parts)
    return total


def _gathered(shard: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return torch.cat(parts)


def sums(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    update(shard := _mine(params), _scattered(grads))
    params.copy_(_gathered(shard)[: len(params)])


def divides_twice(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    stage_one_step(params, grads / dist.get_world_size(), update)


def reduces_by_an_all_reduce(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    """As a first stage that somebody adds to DDP."""
    dist.all_reduce(grads)
    update(shard := _mine(params), _mine(grads) / dist.get_world_size())
    params.copy_(_gathered(shard)[: len(params)])


def gathers_by_an_all_reduce(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    update(shard := _mine(params), _scattered(grads) / dist.get_world_size())
    flat = torch.zeros_like(_padded(params))
    flat.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)
    dist.all_reduce(flat)
    params.copy_(flat[: len(params)])


def keeps_the_whole_state(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    """Data parallelism: as many bytes, N times the state."""
    dist.all_reduce(grads)
    update(params, grads / dist.get_world_size())


def gathers_the_gradients(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    """Reduces to shards, and then makes them whole again, where the parameters should travel."""
    grads = _gathered(_scattered(grads))[: len(params)]
    update(params, grads / dist.get_world_size())


def gathers_everybodys_gradients(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    all_grads = _gathered(_padded(grads)).view(dist.get_world_size(), -1)
    update(shard := _mine(params), _mine(all_grads.mean(0)))
    params.copy_(_gathered(shard)[: len(params)])


def takes_its_own_gradient(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    update(shard := _mine(params), _mine(grads))
    params.copy_(_gathered(shard)[: len(params)])


def gathers_nothing(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    flat = _padded(params)
    update(flat.chunk(dist.get_world_size())[dist.get_rank()], _scattered(grads) / dist.get_world_size())
    params.copy_(flat[: len(params)])


def gathers_what_was_before(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    update(_mine(params), _scattered(grads) / dist.get_world_size())  # a copy, which is forgotten
    params.copy_(_gathered(_mine(params))[: len(params)])


def rebinds_the_name(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    update(shard := _mine(params), _scattered(grads) / dist.get_world_size())
    params = _gathered(shard)[: len(params)]  # the caller's tensor is another one


def averages_the_parameters(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    flat = _padded(params)
    update(flat.chunk(dist.get_world_size())[dist.get_rank()], _scattered(grads) / dist.get_world_size())
    dist.all_reduce(flat)
    params.copy_(flat[: len(params)] / dist.get_world_size())


def leaves_the_rest_out(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    """What does not divide is never updated."""
    whole = len(params) - len(params) % dist.get_world_size()
    if whole:
        stage_one_step(params[:whole], grads[:whole], update)


def does_not_pad(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    grad = torch.empty(len(params) // ranks)
    dist.reduce_scatter_tensor(grad, grads)
    shard = params.chunk(ranks)[rank]
    update(shard, grad / ranks)
    dist.all_gather_into_tensor(params, shard.clone())


def updates_on_rank_0(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    grad = _scattered(grads) / dist.get_world_size()
    shard = _mine(params)
    if dist.get_rank() == 0:
        update(shard, grad)
    params.copy_(_gathered(shard)[: len(params)])


def broadcasts_each_shard(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    flat, ranks = _padded(params), dist.get_world_size()
    update(flat.chunk(ranks)[dist.get_rank()], _scattered(grads) / ranks)
    for rank, shard in enumerate(flat.chunk(ranks)):
        dist.broadcast(shard, rank)
    params.copy_(flat[: len(params)])


def wraps_in_labkits(params: torch.Tensor, grads: torch.Tensor, update: Update) -> None:
    from labkit.zero import FullyShardedDataParallel

    module = torch.nn.Linear(len(params), 1)
    module.weight.data.copy_(params)
    FullyShardedDataParallel(module)


def _params(case: Case) -> torch.Tensor:
    return torch.arange(1, case.elements + 1).float()


def _grads(case: Case, rank: int, step: int) -> torch.Tensor:
    return torch.randn(case.elements, generator=torch.Generator().manual_seed(10 * rank + step))


def call(fn: Callable[..., Any], case: Case) -> list[Backward]:
    """Parameters after each step, and the bytes of the optimizer's state."""
    params, adam, seen = _params(case), Adam(), []
    for step in range(1, STEPS + 1):
        adam.step = step
        fn(params, _grads(case, dist.get_rank(), step), adam.update)
        seen.append((say("stage_one_step.after", step=step), params.clone()))
    return [{**taken(seen), STATE: [adam.nbytes]}]


def by_one_process(grads: list[torch.Tensor], case: Case) -> list[Backward]:
    """All parameters are updated at once, with these gradients, in float64."""
    params, adam, seen = _params(case).double(), Adam(), []
    for step, grad in enumerate(grads, 1):
        adam.step = step
        adam.update(params, grad.double())
        seen.append((say("stage_one_step.after", step=step), params.clone()))
    return [taken(seen)]


def own(case: Case) -> list[list[Backward]]:
    """What each rank would have alone."""
    steps = range(1, STEPS + 1)
    return [by_one_process([_grads(case, rank, step) for step in steps], case) for rank in range(case.ranks)]


def expected(case: Case) -> list[list[Backward]]:
    ranks = range(case.ranks)
    grads = [mean([_grads(case, rank, step) for rank in ranks]) for step in range(1, STEPS + 1)]
    return [by_one_process(grads, case)] * case.ranks


def _padded_bytes(case: Case) -> int:
    return 4 * case.ranks * in_shard(case.elements, case.ranks)


def budget(case: Case) -> list[Cost]:
    """A reduce-scatter and an all-gather a step."""
    return [Cost(calls=STEPS * 2, handed=STEPS * 2 * _padded_bytes(case))] * case.ranks


def sends_too_much(case: Case, trace: Trace) -> str:
    """Whether a ring would send more for these collectives than for the two halves of an all-reduce."""
    limit = STEPS * 2 * _padded_bytes(case) * (case.ranks - 1) // case.ranks
    have = max(sent_by_a_ring(trace, rank) for rank in range(case.ranks))
    if have <= limit:
        return ""
    return say("stage_one_step.sent", have=f"{have:,}", limit=f"{limit:,}", ratio=f"{have / limit:.1f}")


def holds_too_much(case: Case, values: list[Any]) -> str:
    """Whether a rank holds more of the optimizer's state than that of its shard: two tensors."""
    limit, have = 2 * 4 * in_shard(case.elements, case.ranks), max(rank[0][STATE][0] for rank in values)
    if have <= limit:
        return ""
    return say("stage_one_step.held", have=f"{have:,}", limit=f"{limit:,}", ratio=f"{have / limit:.1f}")


EXERCISE = Exercise(
    name="stage_one_step",
    number="7.2",
    core=True,
    cases=(Case(2, 4), Case(2, 5), Case(3, 7), Case(4, 2), Case(1, 3), Case(4, 1001)),
    call=call,
    expected=expected,
    budget=budget,
    solution=stage_one_step,
    hints=lambda: (say("stage_one_step.question"), say("stage_one_step.state"), say("stage_one_step.code")),
    wrong=(
        Wrong(sums, "wrong", "params after step 1"),
        Wrong(divides_twice, "wrong", "params after step 1"),
        Wrong(reduces_by_an_all_reduce, "wasteful", "(1.5×)"),
        Wrong(gathers_by_an_all_reduce, "wasteful", "(1.5×)"),
        Wrong(keeps_the_whole_state, "wasteful", "optimizer state of a rank: 32 B; budget 16 (2.0×)"),
        Wrong(gathers_the_gradients, "wasteful", "optimizer state of a rank"),
        Wrong(gathers_everybodys_gradients, "wasteful", "handed"),
        Wrong(takes_its_own_gradient, "wrong", "params after step 1"),
        Wrong(gathers_nothing, "wrong", "element 2: expected"),
        Wrong(gathers_what_was_before, "wrong", "got 1"),
        Wrong(rebinds_the_name, "wrong", "got 1"),
        Wrong(averages_the_parameters, "wrong", "params after step 1"),
        Wrong(leaves_the_rest_out, "wrong", "element 4: expected"),
        Wrong(does_not_pad, "crashed"),
        Wrong(updates_on_rank_0, "wrong", "element 2: expected"),
        Wrong(broadcasts_each_shard, "wasteful", "collectives of a rank: 10; budget 4"),
        Wrong(wraps_in_labkits, "borrowed", "zero.fully_sharded"),
    ),
    legal=nothing,
    compare=differing,
    tells=lambda case, values, bad: alone.told(values, expected(case), bad, [rank[0] for rank in own(case)]),
    allowed=COLLECTIVES,
    theirs=SHARDED,
    order=sends_too_much,
    excess=holds_too_much,
)  # fmt: skip
