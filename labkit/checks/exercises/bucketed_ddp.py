"""3.3 · data parallelism with buckets that are averaged while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks.borrow import DATA_PARALLEL
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.given import Branches, Layers, batch, others_wait_for_rank_0, uncounted
from labkit.checks.gradients import Backward, differing, gradients, mean, told, which
from labkit.checks.judge import collectives
from labkit.checks.trial import GIVEN
from labkit.data_parallel import DistributedDataParallel, assign
from labkit.show.words import say
from labkit.trace import Trace, label

BACKWARDS = 2
LAYER = 4 * (8 * 8 + 8)  #: bytes of a layer


@dataclass(frozen=True, slots=True)
class Situation:
    """A module and a cap. `shape`: "plain", "tied", "branches" (gradients arrive in other orders on other ranks), or
    "late" (the other ranks begin their backward when rank 0 is at the end of its own)."""

    cap: int
    shape: str = "plain"


SITUATIONS = (
    Situation(LAYER), Situation(2 * LAYER), Situation(LAYER, "tied"), Situation(10**9), Situation(LAYER, "late"),
    Situation(484, "branches"),
)  # fmt: skip


def bucketed_ddp(module: torch.nn.Module, cap: int):
    buckets: list[list] = [[]]
    for param in reversed(list(module.parameters())):
        if sum(p.nbytes for p in buckets[-1]) >= cap:
            buckets.append([])
        buckets[-1].append(param)
    arrived: set = set()
    started: list = []  # (flat tensor, handle) of each bucket that has left

    def ready(param):
        arrived.add(param)
        while len(started) < len(buckets) and arrived.issuperset(buckets[len(started)]):
            flat = torch.cat([p.grad.flatten() for p in buckets[len(started)]])
            started.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish():
        for bucket, (flat, work) in zip(buckets, started, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for param, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                param.grad.copy_(piece.view_as(param))
        arrived.clear()
        started.clear()

    for bucket in buckets:
        for param in bucket:
            param.register_post_accumulate_grad_hook(ready)
    return finish


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong in a solution that is otherwise right."""

    cap: int | None = None
    overlap: bool = True
    waits: bool = True
    waits_at_once: bool = False
    any_order: bool = False
    divides: bool = True
    again: bool = True
    open_stays: bool = False
    tied_twice: bool = False


def _ddp(module: torch.nn.Module, cap: int, fault: Fault) -> Callable[[], None]:
    """Counts gradients, where `bucketed_ddp` keeps a set of them."""
    params = [p for _, p in module.named_parameters(remove_duplicate=not fault.tied_twice)]
    if fault.tied_twice and isinstance(module, Layers) and module.tied:
        params += list(module.layers[0].parameters())
    buckets = [[params[-1 - i] for i in b] for b in assign([p.nbytes for p in params[::-1]], fault.cap or cap)]
    if fault.open_stays and sum(p.nbytes for p in buckets[-1]) < cap:
        buckets.pop()
    home = {p: number for number, bucket in enumerate(buckets) for p in bucket}
    missing = [len(bucket) for bucket in buckets]
    started: dict[int, tuple[torch.Tensor, Any]] = {}

    def start(number: int) -> None:
        flat = torch.cat([p.grad.flatten() for p in buckets[number]])  # type: ignore[union-attr]
        started[number] = (flat, dist.all_reduce(flat, async_op=not fault.waits_at_once))

    def ready(param: torch.Tensor) -> None:
        number = home.get(param)  # type: ignore[call-overload]
        if number is None:
            return
        missing[number] -= 1
        full = [number] if fault.any_order else [n for n in range(len(buckets)) if not any(missing[: n + 1])]
        for n in full:
            if not missing[n] and n not in started and fault.overlap:
                start(n)

    def finish() -> None:
        for number, bucket in enumerate(buckets):
            if not fault.overlap:
                start(number)
            if number not in started:
                continue
            flat, work = started[number]
            if work is not None and fault.waits:
                work.wait()
            if fault.divides:
                flat /= dist.get_world_size()
            for param, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                param.grad.copy_(piece.view_as(param))  # type: ignore[union-attr]
        if fault.again:
            started.clear()
            missing[:] = [len(bucket) for bucket in buckets]

    for param in home:
        param.register_post_accumulate_grad_hook(ready)
    return finish


def no_overlap(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(overlap=False))


def one_bucket(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(cap=10**9))


def a_message_a_parameter(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(cap=1))


def waits_at_once(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(waits_at_once=True))


def never_waits(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(waits=False))


def starts_in_the_order_of_arrival(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(any_order=True))


def sums(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(divides=False))


def works_once(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(again=False))


def forgets_the_last_bucket(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(open_stays=True))


def counts_a_tied_parameter_twice(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    return _ddp(module, cap, Fault(tied_twice=True))


def hooks_modules(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    """A layer's backward is over before its parameters' gradients are there, and a tied layer has two."""
    works: list[tuple[Any, Any]] = []

    def average(part: torch.nn.Module, _: Any, __: Any) -> None:
        for param in part.parameters():
            if param.grad is not None:
                works.append((param, dist.all_reduce(param.grad, async_op=True)))

    def finish() -> None:
        for param, work in works:
            work.wait()
            param.grad /= dist.get_world_size()
        works.clear()

    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_full_backward_hook(average)
    return finish


def returns_nothing(module: torch.nn.Module, cap: int) -> None:
    bucketed_ddp(module, cap)


def wraps_in_torchs(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)
    return lambda: None


def wraps_in_labkits(module: torch.nn.Module, cap: int) -> Callable[[], None]:
    DistributedDataParallel(module)
    return lambda: None


def made(case: Case, rank: int) -> Layers | Branches:
    shape = SITUATIONS[case.more].shape
    return Branches(turned=rank % 2 == 1) if shape == "branches" else Layers(case.elements, tied=shape == "tied")


def call(fn: Callable[..., Callable[[], None]], case: Case) -> Any:
    """The gradients after each backward."""
    rank, situation = dist.get_rank(), SITUATIONS[case.more]
    module = made(case, rank)
    with uncounted():
        finish: Any = fn(module, situation.cap)
    if not callable(finish):
        return say("bucketed_ddp.returned", have=repr(finish)[:60])
    if situation.shape == "late" and isinstance(module, Layers):
        others_wait_for_rank_0(module.layers[0], module.layers[-1])
    seen = []
    for step in range(BACKWARDS):
        module.zero_grad()
        with label(backward=step):
            module(batch(rank, step)).square().sum().backward()
            finish()
        seen.append(gradients(module))
    return seen


def own(case: Case) -> list[list[Backward]]:
    """What each rank would have alone, in float64."""
    found = []
    for rank in range(case.ranks):
        module, seen = made(case, rank).double(), []
        for step in range(BACKWARDS):
            module.zero_grad()
            module(batch(rank, step).double()).square().sum().backward()
            seen.append(gradients(module))
        found.append(seen)
    return found


def expected(case: Case) -> list[list[Backward]]:
    return [mean(own(case))] * case.ranks


def _buckets(case: Case) -> list[list[int]]:
    sizes = [p.nbytes for p in made(case, 0).parameters()]
    return assign(sizes[::-1], SITUATIONS[case.more].cap)


def budget(case: Case) -> list[Cost]:
    size = sum(p.nbytes for p in made(case, 0).parameters())
    return [Cost(calls=BACKWARDS * len(_buckets(case)), handed=BACKWARDS * size)] * case.ranks


def stands_still(case: Case, trace: Trace) -> str:
    """Whether a rank averages nothing, or waits for what it averages, until its backward is over."""
    if len(_buckets(case)) == 1 or SITUATIONS[case.more].shape == "branches":
        return ""
    for rank in range(case.ranks):
        mine = [e for e in trace.of(rank) if GIVEN not in e.labels and "backward" in e.labels]
        calls = collectives(mine)
        for step in range(BACKWARDS):
            last = [e for e in mine if e.phase == "backward" and e.labels["backward"] == step][-1]
            before = [e for e in calls if e.labels["backward"] == step and e.index < last.index]
            if not before:
                return say("bucketed_ddp.late", rank=rank, backward=which(step))
            over = all(e.end is not None and e.end <= last.start for e in before)
            if over and rank == 0 and SITUATIONS[case.more].shape == "late":
                return say("bucketed_ddp.still", rank=rank, backward=which(step))
    return ""


def where(case: Case) -> str:
    situation = SITUATIONS[case.more]
    told = {
        "plain": lambda: say("bucketed_ddp.plain", layers=case.elements),
        "tied": lambda: say("bucketed_ddp.tied", layers=case.elements),
        "late": lambda: say("bucketed_ddp.others", layers=case.elements),
        "branches": lambda: say("bucketed_ddp.branches"),
    }[situation.shape]()
    return f"{say('check.world', ranks=case.ranks)}, {told}, {say('bucketed_ddp.cap', cap=f'{situation.cap:,}')}"


EXERCISE = Exercise(
    name="bucketed_ddp",
    number="3.3",
    cases=(Case(2, 4), Case(3, 3, more=1), Case(2, 3, more=2), Case(2, 2, more=3), Case(2, 4, more=4),
           Case(2, 2, more=5), Case(1, 2), Case(4, 5)),
    call=call,
    expected=expected,
    budget=budget,
    solution=bucketed_ddp,
    hints=lambda: (say("bucketed_ddp.question"), say("bucketed_ddp.state"), say("bucketed_ddp.code")),
    wrong=(
        Wrong(no_overlap, "wasteful", "the first all-reduce was started only when backward had reached layer 0"),
        Wrong(one_bucket, "wasteful", "the first all-reduce was started only when"),
        Wrong(a_message_a_parameter, "wasteful", "collectives of a rank"),
        Wrong(waits_at_once, "wasteful", "was over before backward went on"),
        Wrong(never_waits, "wrong"),
        Wrong(starts_in_the_order_of_arrival, "crashed", "disagree"),
        Wrong(sums, "wrong", "2 × as much"),
        Wrong(works_once, "wrong", "the second backward"),
        Wrong(forgets_the_last_bucket, "wrong", "layers.0"),
        Wrong(counts_a_tied_parameter_twice, "wrong", "used twice"),
        Wrong(hooks_modules, "wrong"),
        Wrong(returns_nothing, "wrong", "returned None"),
        Wrong(wraps_in_torchs, "borrowed", "torch.nn.parallel.distributed"),
        Wrong(wraps_in_labkits, "borrowed", "data_parallel.wrapper"),
    ),
    legal=nothing,
    compare=differing,
    tells=lambda case, values, bad: told(values, expected(case), own(case), bad[0]),
    where=where,
    allowed=COLLECTIVES,
    theirs=DATA_PARALLEL,
    order=stands_still,
)  # fmt: skip
