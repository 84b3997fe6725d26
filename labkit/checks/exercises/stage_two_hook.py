"""7.3 · a hook of ZeRO's second stage: a bucket's gradients leave as soon as they are there, and are freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit.checks import alone
from labkit.checks.alone import Made, in_short
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import Backward, differing, taken
from labkit.checks.shards import SHARDED, Stack, in_shard, mean, rows, shard_of
from labkit.checks.trial import Meter
from labkit.checks.wire import sent_by_a_ring
from labkit.show.words import say
from labkit.trace import Trace

Params = list[torch.nn.Parameter]
Hook = Callable[[Any], None]
HELD = "held"  #: beside the shards: the most bytes of gradients, and copies of them, that a rank held at once
ROOM = 6  #: buckets' bytes that may be held at once, where there are more


@dataclass(frozen=True, slots=True)
class Situation:
    """Layers, how wide each is, how many a bucket takes, and how many backwards there are."""

    layers: int
    per_bucket: int = 1
    backwards: int = 1
    width: int = 5


SITUATIONS = (
    Situation(1), Situation(3), Situation(2, backwards=3), Situation(4, per_bucket=2, backwards=2),
    Situation(8, width=8), Situation(8, width=8, backwards=2),
)  # fmt: skip


def stage_two_hook(params, shard):
    ranks, arrived = dist.get_world_size(), []

    def ready(param):
        arrived.append(param)
        if len(arrived) == len(params):
            flat = torch.cat([p.grad.flatten() for p in params])
            flat = torch.nn.functional.pad(flat, (0, len(shard) * ranks - len(flat)))
            for p in params:
                p.grad = None
            mine = torch.empty_like(shard)
            dist.reduce_scatter(mine, list(flat.chunk(ranks)))
            shard.add_(mine / ranks)
            arrived.clear()

    return ready


def _when_full(params: Params, do: Callable[[], Any], count: int | None = None) -> Hook:
    """A hook that calls `do` each time that so many of the gradients are there, by default all."""
    arrived: Params = []

    def ready(param: Any) -> None:
        arrived.append(param)
        if len(arrived) == (count or len(params)):
            do()
        if len(arrived) == len(params):
            arrived.clear()

    return ready


def _flat(params: Params, shard: torch.Tensor) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in params])  # type: ignore[union-attr]
    return F.pad(flat, (0, shard.numel() * dist.get_world_size() - flat.numel()))


def _free(params: Params) -> None:
    for param in params:
        param.grad = None


def _mean(flat: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the mean over ranks."""
    mine = torch.empty_like(shard)
    dist.reduce_scatter(mine, list(flat.chunk(dist.get_world_size())))
    return mine / dist.get_world_size()


def all_reduces(params: Params, shard: torch.Tensor) -> Hook:
    def do() -> None:
        flat = _flat(params, shard)
        _free(params)
        dist.all_reduce(flat)
        shard.add_(flat.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size())

    return _when_full(params, do)


def never_frees(params: Params, shard: torch.Tensor) -> Hook:
    return _when_full(params, lambda: shard.add_(_mean(_flat(params, shard), shard)))


def fills_with_zeros(params: Params, shard: torch.Tensor) -> Hook:
    """As ``optimizer.zero_grad(set_to_none=False)`` does: nothing is freed."""

    def do() -> None:
        shard.add_(_mean(_flat(params, shard), shard))
        for param in params:
            param.grad.zero_()  # type: ignore[union-attr]

    return _when_full(params, do)


def keeps_a_buffer(params: Params, shard: torch.Tensor) -> Hook:
    """A flat buffer for each bucket, made once: together they are as large as all gradients."""
    buffer = torch.zeros(shard.numel() * dist.get_world_size())

    def do() -> None:
        buffer[: sum(p.numel() for p in params)] = torch.cat([p.grad.flatten() for p in params])  # type: ignore[union-attr]
        _free(params)
        shard.add_(_mean(buffer, shard))

    return _when_full(params, do)


def overwrites_the_shard(params: Params, shard: torch.Tensor) -> Hook:
    def do() -> None:
        shard.copy_(_mean(_flat(params, shard), shard))
        _free(params)

    return _when_full(params, do)


def rebinds_the_shard(params: Params, shard: torch.Tensor) -> Hook:
    def do() -> None:
        nonlocal shard
        shard = shard + _mean(_flat(params, shard), shard)
        _free(params)

    return _when_full(params, do)


def sums(params: Params, shard: torch.Tensor) -> Hook:
    def do() -> None:
        shard.add_(_mean(_flat(params, shard), shard) * dist.get_world_size())
        _free(params)

    return _when_full(params, do)


def divides_the_shard(params: Params, shard: torch.Tensor) -> Hook:
    """What has been added up before is divided again."""

    def do() -> None:
        shard.add_(_mean(_flat(params, shard), shard) * dist.get_world_size()).div_(dist.get_world_size())
        _free(params)

    return _when_full(params, do)


def in_the_order_of_arrival(params: Params, shard: torch.Tensor) -> Hook:
    arrived: Params = []

    def ready(param: Any) -> None:
        arrived.append(param)
        if len(arrived) == len(params):
            shard.add_(_mean(_flat(arrived, shard), shard))
            _free(arrived)
            arrived.clear()

    return ready


def works_once(params: Params, shard: torch.Tensor) -> Hook:
    arrived: Params = []

    def ready(param: Any) -> None:
        arrived.append(param)
        if len(arrived) == len(params):
            shard.add_(_mean(_flat(params, shard), shard))
            _free(params)

    return ready


def leaves_at_the_first_gradient(params: Params, shard: torch.Tensor) -> Hook:
    def do() -> None:
        shard.add_(_mean(_flat(params, shard), shard))
        _free(params)

    return _when_full(params, do, count=1)


def frees_before_it_copies(params: Params, shard: torch.Tensor) -> Hook:
    def do() -> None:
        _free(params)
        shard.add_(_mean(_flat(params, shard), shard))

    return _when_full(params, do)


def reduces_each_parameter(params: Params, shard: torch.Tensor) -> Hook:
    """Every parameter in shards of its own, one after the other: not the bucket's shards."""
    at = 0

    def ready(param: Any) -> None:
        nonlocal at
        padded = F.pad(param.grad.flatten(), (0, -param.numel() % dist.get_world_size()))
        part = shard[at : at + padded.numel() // dist.get_world_size()]
        mine = torch.empty(padded.numel() // dist.get_world_size())
        dist.reduce_scatter(mine, list(padded.chunk(dist.get_world_size())))
        part.add_(mine[: len(part)] / dist.get_world_size())
        at = (at + len(part)) % len(shard)
        param.grad = None

    return ready


def takes_its_own_slice(params: Params, shard: torch.Tensor) -> Hook:
    def do() -> None:
        shard.add_(_flat(params, shard).chunk(dist.get_world_size())[dist.get_rank()])
        _free(params)

    return _when_full(params, do)


def returns_nothing(params: Params, shard: torch.Tensor) -> Any:
    """It registers the hook itself."""
    for param in params:
        param.register_post_accumulate_grad_hook(stage_two_hook(params, shard))


def averages_as_ddp_does(params: Params, shard: torch.Tensor) -> Hook:
    """The whole gradients, where they are; and what is the shard for?"""

    def ready(param: Any) -> None:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()

    return ready


def calls_labkits(params: Params, shard: torch.Tensor) -> Any:
    from labkit.zero import ShardedOptimizer

    ShardedOptimizer(params, torch.optim.SGD, stage=2, lr=1.0)
    return lambda param: None


def _buckets(module: Stack, case: Case) -> list[Params]:
    per_bucket = SITUATIONS[case.more].per_bucket
    layers = list(module.layers)
    groups = [layers[at : at + per_bucket] for at in range(0, len(layers), per_bucket)]
    return [[p for layer in group for p in layer.parameters()] for group in groups]


def _numel(params: Params) -> int:
    return sum(p.numel() for p in params)


def call(fn: Callable[..., Any], case: Case) -> Made:
    """The shards after each backward, and what was held meanwhile."""
    rank, situation = dist.get_rank(), SITUATIONS[case.more]
    module = Stack(situation.layers, situation.width)
    buckets = _buckets(module, case)
    shards = [torch.zeros(in_shard(_numel(params), case.ranks)) for params in buckets]
    meter, seen = Meter(), []
    for params, shard in zip(buckets, shards, strict=True):
        with meter:
            ready: Any = fn(params, shard)
        if not callable(ready):
            return say("stage_two_hook.returned", have=in_short(ready))
        for param in params:
            param.register_post_accumulate_grad_hook(partial(_metered, ready, meter))
    for step in range(situation.backwards):
        module(rows(case, rank, step, situation.width)).square().sum().backward()
        seen += [(say("stage_two_hook.shard", bucket=n, step=step + 1), s.clone()) for n, s in enumerate(shards)]
    return [{**taken(seen), HELD: [meter.peak]}]


def _metered(ready: Hook, meter: Meter, param: torch.Tensor) -> None:
    """The learner's hook. The meter sees the gradient even if the hook never looks at it."""
    with meter:
        _ = param.grad
        ready(param)


def _gradients(case: Case, rank: int) -> list[list[torch.Tensor]]:
    """A rank's own gradients of each bucket, flat, backward by backward, in float64."""
    situation = SITUATIONS[case.more]
    module, found = Stack(situation.layers, situation.width).double(), []
    buckets = _buckets(module, case)
    for step in range(situation.backwards):
        loss = module(rows(case, rank, step, situation.width).double()).square().sum()
        grads = iter(torch.autograd.grad(loss, [p for params in buckets for p in params]))
        found.append([torch.cat([next(grads).flatten() for _ in params]) for params in buckets])
    return found


def _told(case: Case, rank: int, grads: list[list[torch.Tensor]]) -> list[Backward]:
    """A rank's shards of these gradients, added up."""
    sums, seen = [torch.zeros_like(grad) for grad in grads[0]], []
    for step, by_bucket in enumerate(grads, 1):
        for n, grad in enumerate(by_bucket):
            sums[n] += grad
            seen.append((say("stage_two_hook.shard", bucket=n, step=step), shard_of(sums[n], rank, case.ranks)))
    return [taken(seen)]


def expected(case: Case) -> list[list[Backward]]:
    steps = zip(*(_gradients(case, rank) for rank in range(case.ranks)), strict=True)
    means = [[mean(of_ranks) for of_ranks in zip(*by_rank, strict=True)] for by_rank in steps]
    return [_told(case, rank, means) for rank in range(case.ranks)]


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    alone_on = [_told(case, rank, _gradients(case, rank))[0] for rank in range(case.ranks)]
    return alone.told(values, expected(case), bad, alone_on)


def _sizes(case: Case) -> list[int]:
    """Bytes of each bucket, padding included."""
    situation = SITUATIONS[case.more]
    buckets = _buckets(Stack(situation.layers, situation.width), case)
    return [4 * case.ranks * in_shard(_numel(params), case.ranks) for params in buckets]


def budget(case: Case) -> list[Cost]:
    """A reduce-scatter a bucket and backward."""
    sizes, backwards = _sizes(case), SITUATIONS[case.more].backwards
    return [Cost(calls=backwards * len(sizes), handed=backwards * sum(sizes))] * case.ranks


def sends_too_much(case: Case, trace: Trace) -> str:
    """Whether a ring would send more for these collectives than for a reduce-scatter of each bucket."""
    limit = SITUATIONS[case.more].backwards * sum(_sizes(case)) * (case.ranks - 1) // case.ranks
    have = max(sent_by_a_ring(trace, rank) for rank in range(case.ranks))
    if have <= limit:
        return ""
    return say("stage_two_hook.sent", have=f"{have:,}", limit=f"{limit:,}", ratio=f"{have / limit:.1f}")


def holds_too_much(case: Case, values: list[Any]) -> str:
    """Whether gradients of many buckets were held at once; judged where there are many."""
    sizes = _sizes(case)
    limit, have = ROOM * max(sizes), max(int(rank[0][HELD][0]) for rank in values)
    if len(sizes) <= ROOM or have <= limit:
        return ""
    return say("stage_two_hook.held", have=f"{have:,}", limit=f"{limit:,}", ratio=f"{have / limit:.1f}")


def where(case: Case) -> str:
    situation, sizes = SITUATIONS[case.more], _sizes(case)
    told = say("stage_two_hook.case", buckets=len(sizes), nbytes=f"{max(sizes):,}", backwards=situation.backwards)
    return f"{say('check.world', ranks=case.ranks)}, {told}"


EXERCISE = Exercise(
    name="stage_two_hook",
    number="7.3",
    cases=(Case(2, 1), Case(4, 1), Case(2, 1, more=1), Case(2, 1, more=2), Case(4, 1, more=3), Case(1, 1, more=2),
           Case(2, 1, more=4), Case(3, 1, more=5)),
    call=call,
    expected=expected,
    budget=budget,
    solution=stage_two_hook,
    hints=lambda: (say("stage_two_hook.question"), say("stage_two_hook.state"), say("stage_two_hook.code")),
    wrong=(
        Wrong(all_reduces, "wasteful", "(2.0×)"),
        Wrong(fills_with_zeros, "wasteful", "gradients, and copies of them"),
        Wrong(keeps_a_buffer, "wasteful", "gradients, and copies of them"),
        Wrong(never_frees, "wrong", "after backward 2"),
        Wrong(overwrites_the_shard, "wrong", "after backward 2"),
        Wrong(rebinds_the_shard, "wrong", "got 0"),
        Wrong(sums, "wrong", "2 × as much"),
        Wrong(divides_the_shard, "wrong", "after backward 2"),
        Wrong(in_the_order_of_arrival, "wrong", "after backward 1"),
        Wrong(works_once, "wrong", "after backward 2"),
        Wrong(leaves_at_the_first_gradient, "crashed", "NoneType"),
        Wrong(frees_before_it_copies, "crashed", "NoneType"),
        Wrong(reduces_each_parameter, "wrong", "after backward 1"),
        Wrong(takes_its_own_slice, "wrong", "rank 0's own part"),
        Wrong(averages_as_ddp_does, "wrong", "got 0"),
        Wrong(returns_nothing, "wrong", "returned None; expected a function"),
        Wrong(calls_labkits, "borrowed", "zero."),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=where,
    allowed=COLLECTIVES,
    theirs=SHARDED,
    order=sends_too_much,
    excess=holds_too_much,
)  # fmt: skip
