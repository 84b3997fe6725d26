"""8.3 · a loss scaler, whose verdict all ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.checks.alone import in_short
from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import near
from labkit.checks.stepped import Stepped
from labkit.show.words import say
from labkit.tricks import GradScaler

Grads = list[torch.Tensor]
Step = Callable[[], None]
INF, NAN = math.inf, math.nan
FIRST_SCALE = 1024.0
#: Steps one after the other, the smallest first: step → the rank whose gradients hold an inf, or a nan.
OVERFLOWS: tuple[dict[int, dict[int, float]], ...] = (
    {}, {1: {0: INF}}, {0: {1: -INF}, 4: {0: NAN}}, {2: {0: INF, 1: INF}, 3: {1: NAN}}, {1: {2: INF}, 5: {1: NAN}},
)  # fmt: skip
BARE = 1  #: `Case.more`, in the ones: rank 0 has no gradients


class Seen(NamedTuple):
    """What a rank saw of a step.

    Attributes:
        steps: How often it stepped.
        grads: What its gradients were then, one after the other.
        scale, streak: What the function returned; or what else it did, in words, as the scale.
    """

    steps: int
    grads: list[float]
    scale: float | str
    streak: int


def loss_scaler(grads, scale, streak, interval, step):
    overflow = torch.tensor([float(any(not grad.isfinite().all() for grad in grads))])
    dist.all_reduce(overflow, dist.ReduceOp.MAX)
    if overflow.item():
        return scale / 2, 0
    for grad in grads:
        grad /= scale
    step()
    streak += 1
    return (scale * 2, 0) if streak == interval else (scale, streak)


def _overflows(grads: Grads) -> bool:
    return any(not grad.isfinite().all() for grad in grads)


def _shared(found: bool) -> bool:
    flag = torch.tensor([float(found)])
    dist.all_reduce(flag)
    return flag.item() > 0


def _after(scale: float, streak: int, interval: int) -> tuple[float, int]:
    """Scale and streak after a step that was taken."""
    return (scale * 2, 0) if streak + 1 == interval else (scale, streak + 1)


def _unscale(grads: Grads, scale: float) -> None:
    for grad in grads:
        grad /= scale


def keeps_its_verdict(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    _shared(False)
    if _overflows(grads):
        return scale / 2, 0
    _unscale(grads, scale)
    step()
    return _after(scale, streak, interval)


def shares_the_step_but_not_the_scale(
    grads: Grads, scale: float, streak: int, interval: int, step: Step
) -> tuple[float, int]:
    mine = _overflows(grads)
    if _shared(mine):
        return (scale / 2, 0) if mine else (scale, streak)
    _unscale(grads, scale)
    step()
    return _after(scale, streak, interval)


def steps_all_the_same(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    overflow = _shared(_overflows(grads))
    _unscale(grads, scale)
    step()
    return (scale / 2, 0) if overflow else _after(scale, streak, interval)


def steps_before_it_unscales(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    if _shared(_overflows(grads)):
        return scale / 2, 0
    step()
    _unscale(grads, scale)
    return _after(scale, streak, interval)


def forgets_to_unscale(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    return loss_scaler([grad.clone() for grad in grads], scale, streak, interval, step)


def unscales_by_the_new_scale(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    if _shared(_overflows(grads)):
        return scale / 2, 0
    new, streak = _after(scale, streak, interval)
    _unscale(grads, new)
    step()
    return new, streak


def never_grows(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    return loss_scaler(grads, scale, streak, -1, step)


def grows_every_step(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    return loss_scaler(grads, scale, 0, 1, step)


def grows_a_step_late(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    return loss_scaler(grads, scale, streak, interval + 1, step)


def keeps_the_streak_as_it_grows(
    grads: Grads, scale: float, streak: int, interval: int, step: Step
) -> tuple[float, int]:
    if _shared(_overflows(grads)):
        return scale / 2, 0
    _unscale(grads, scale)
    step()
    return (scale * 2 if streak + 1 >= interval else scale), streak + 1


def keeps_the_streak_as_it_skips(
    grads: Grads, scale: float, streak: int, interval: int, step: Step
) -> tuple[float, int]:
    new, after = loss_scaler(grads, scale, streak, interval, step)
    return new, streak if new < scale else after


def counts_what_it_skips(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    new, after = loss_scaler(grads, scale, streak, interval, step)
    return new, streak + 1 if new < scale else after


def never_backs_off(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    new, streak = loss_scaler(grads, scale, streak, interval, step)
    return max(new, scale), streak


def halves_for_each_rank(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    flag = torch.tensor([float(_overflows(grads))])
    dist.all_reduce(flag)
    if flag.item():
        return scale / 2 ** flag.item(), 0
    _unscale(grads, scale)
    step()
    return _after(scale, streak, interval)


def looks_for_nan_only(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    if _shared(any(bool(grad.isnan().any()) for grad in grads)):
        return scale / 2, 0
    _unscale(grads, scale)
    step()
    return _after(scale, streak, interval)


def looks_for_inf_only(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    if _shared(any(bool(grad.isinf().any()) for grad in grads)):
        return scale / 2, 0
    _unscale(grads, scale)
    step()
    return _after(scale, streak, interval)


def skips_if_all_overflow(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    flag = torch.tensor([float(_overflows(grads))])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    if flag.item():
        return scale / 2, 0
    _unscale(grads, scale)
    step()
    return _after(scale, streak, interval)


def tells_the_others_only_of_an_overflow(
    grads: Grads, scale: float, streak: int, interval: int, step: Step
) -> tuple[float, int]:
    if _overflows(grads) and _shared(True):
        return scale / 2, 0
    _unscale(grads, scale)
    step()
    return _after(scale, streak, interval)


def takes_part_only_with_gradients(
    grads: Grads, scale: float, streak: int, interval: int, step: Step
) -> tuple[float, int]:
    if grads:
        return loss_scaler(grads, scale, streak, interval, step)
    step()
    return _after(scale, streak, interval)


def asks_twice(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    _shared(any(bool(grad.isnan().any()) for grad in grads))
    return loss_scaler(grads, scale, streak, interval, step)


def adds_the_gradients_up(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    for grad in grads:
        dist.all_reduce(grad)
    return loss_scaler(grads, scale, streak, interval, step)


def returns_the_scale_only(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> float:
    return loss_scaler(grads, scale, streak, interval, step)[0]


class Optimizer:
    """As much of one as a scaler looks at."""

    def __init__(self, grads: Grads, step: Step) -> None:
        params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        self.param_groups, self.step = [{"params": params}], step


def calls_labkits(grads: Grads, scale: float, streak: int, interval: int, step: Step) -> tuple[float, int]:
    scaler = GradScaler(scale, growth_interval=interval)
    scaler.load_state_dict({"scale": scale, "good_steps": streak, "skipped_steps": 0})
    scaler.step(Optimizer(grads, step))
    scaler.update()
    return scaler.get_scale(), scaler.state_dict()["good_steps"]


def _overflowing(case: Case) -> dict[int, dict[int, float]]:
    return OVERFLOWS[case.more // 2]


def _bare(case: Case, rank: int) -> bool:
    return case.more % 2 == BARE and rank == 0


def _gradients(case: Case, rank: int, number: int) -> Grads:
    """What a rank's gradients of a step are, without a scale: exact in fp32."""
    if _bare(case, rank):
        return []
    return [torch.tensor([1.0 + rank, -2.0, number]), torch.full((2, 2), 0.5 + number)]


def call(fn: Any, case: Case) -> list[Seen]:
    """Steps one after the other; each begins with what the one before returned."""
    rank, (scale, streak) = dist.get_rank(), (FIRST_SCALE, 0)
    found: list[Seen] = []
    for number in range(case.elements):
        grads = [grad * scale for grad in _gradients(case, rank, number)]
        if bad := _overflowing(case).get(number, {}).get(rank):
            grads[-1][-1, 0] = bad
        step = Stepped(grads)
        made = fn(list(grads), scale, streak, _interval(case), step)
        pair = _pair(made)
        if pair is None:
            return [*found, Seen(step.calls, step.first, in_short(made), 0)]
        scale, streak = pair
        found.append(Seen(step.calls, step.first, scale, streak))
    return found


def _interval(case: Case) -> int:
    return 3 if case.elements > 4 else 2


def _pair(made: Any) -> tuple[float, int] | None:
    """Scale and streak, if that is what was returned."""
    try:
        scale, streak = made
        return float(scale), int(streak)
    except (TypeError, ValueError):
        return None


def expected(case: Case) -> list[list[Seen]]:
    found: list[list[Seen]] = [[] for _ in range(case.ranks)]
    scale, streak = FIRST_SCALE, 0
    for number in range(case.elements):
        skips = bool(_overflowing(case).get(number))
        streak = 0 if skips else streak + 1
        scale = scale / 2 if skips else scale * (2 if streak == _interval(case) else 1)
        streak %= _interval(case)
        for rank, each in enumerate(found):
            grads = [x for grad in _gradients(case, rank, number) for x in grad.flatten().tolist()]
            each.append(Seen(0, [], scale, streak) if skips else Seen(1, grads, scale, streak))
    return found


def differing(case: Case, values: list[Any], wanted: list[Any]) -> list[int]:
    return [
        rank for rank, (have, want) in enumerate(zip(values, wanted, strict=True)) if _first(have, want) is not None
    ]


def _first(have: list[Seen], want: list[Seen]) -> int | None:
    """The first step that is wrong."""
    pairs = zip(have, want, strict=False)
    return next((n for n, (mine, right) in enumerate(pairs) if not _is(mine, right)), None)


def _is(have: Seen, want: Seen) -> bool:
    same = (have.steps, have.scale, have.streak) == (want.steps, want.scale, want.streak)
    return same and len(have.grads) == len(want.grads) and near(have.grads, want.grads)


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    """The first step that is wrong on any rank."""
    wanted = expected(case)
    number, rank = min((_first(values[r], wanted[r]) or 0, r) for r in bad)
    have, want = values[rank][number], wanted[rank][number]
    said = {"rank": rank, "number": number}
    if isinstance(have.scale, str):
        return say("loss_scaler.returned", **said, have=have.scale)
    if have.steps != want.steps:
        return say("loss_scaler.stepped", **said, want=want.steps, have=have.steps) + _whose(case, number)
    if len(have.grads) != len(want.grads) or not near(have.grads, want.grads):
        return _gradient(have.grads, want.grads, said)
    if have.scale != want.scale:
        told = {"want": f"{want.scale:g}", "have": f"{have.scale:g}"}
        return say("loss_scaler.scale", **said, **told) + _whose(case, number)
    return say("loss_scaler.streak", **said, want=want.streak, have=have.streak) + _whose(case, number)


def _gradient(have: list[float], want: list[float], said: dict[str, Any]) -> str:
    line = say("loss_scaler.gradient", **said, want=f"{want[0]:.4g}", have=f"{have[0]:.4g}")
    ratio = have[0] / want[0]
    return line + say("gradients.ratio", ratio=f"{ratio:.4g}") if near(have, [ratio * x for x in want]) else line


def _whose(case: Case, number: int) -> str:
    """Who has no number in a step."""
    bad = _overflowing(case).get(number, {})
    told = {"inf": say("loss_scaler.inf"), "nan": say("loss_scaler.nan")}
    of = ", ".join(say("loss_scaler.of", rank=r, what=told["nan" if x != x else "inf"]) for r, x in bad.items())
    return say("loss_scaler.whose", of=of or say("loss_scaler.nobody"))


def budget(case: Case) -> list[Cost]:
    """A number from each rank a step, which may be gathered too."""
    return [Cost(calls=case.elements, handed=8 * case.ranks * case.elements)] * case.ranks


def where(case: Case) -> str:
    told = say("loss_scaler.case", steps=case.elements, interval=_interval(case))
    bare = [say("loss_scaler.bare")] if case.more % 2 == BARE else []
    return ", ".join([say("check.world", ranks=case.ranks), told, *bare])


EXERCISE = Exercise(
    name="loss_scaler",
    number="8.3",
    cases=(
        Case(2, 2, more=0), Case(1, 3, more=2), Case(2, 3, more=2), Case(2, 6, more=4), Case(2, 7, more=6),
        Case(3, 9, more=8), Case(3, 4, more=8 + BARE),
    ),
    call=call,
    expected=expected,
    budget=budget,
    solution=loss_scaler,
    hints=lambda: (say("loss_scaler.question"), say("loss_scaler.state"), say("loss_scaler.code")),
    wrong=(
        Wrong(keeps_its_verdict, "wrong", "step 1, rank 1: calls of step: expected 0, got 1; inf on rank 0"),
        Wrong(shares_the_step_but_not_the_scale, "wrong", "rank 1: scale"),
        Wrong(steps_all_the_same, "wrong", "calls of step: expected 0, got 1"),
        Wrong(steps_before_it_unscales, "wrong", "1024 × as much"),
        Wrong(forgets_to_unscale, "wrong", "1024 × as much"),
        Wrong(unscales_by_the_new_scale, "wrong", "0.5 × as much"),
        Wrong(never_grows, "wrong", "expected 2048, got 1024"),
        Wrong(grows_every_step, "wrong", "expected 1024, got 2048"),
        Wrong(grows_a_step_late, "wrong", "expected 2048, got 1024"),
        Wrong(keeps_the_streak_as_it_grows, "wrong", "streak"),
        Wrong(keeps_the_streak_as_it_skips, "wrong", "streak"),
        Wrong(counts_what_it_skips, "wrong", "streak"),
        Wrong(never_backs_off, "wrong", "expected 512, got 1024"),
        Wrong(halves_for_each_rank, "wrong", "expected 512, got 256; inf on rank 0, inf on rank 1"),
        Wrong(looks_for_nan_only, "wrong", "calls of step: expected 0, got 1; inf on rank 0"),
        Wrong(looks_for_inf_only, "wrong", "calls of step: expected 0, got 1; nan on rank 0"),
        Wrong(skips_if_all_overflow, "wrong", "world 2, 3 steps"),
        Wrong(tells_the_others_only_of_an_overflow, "wrong", "no rank has sent anything"),
        Wrong(takes_part_only_with_gradients, "crashed", "rank 0 has no gradients"),
        Wrong(asks_twice, "wasteful", "budget"),
        Wrong(adds_the_gradients_up, "wrong", "expected 1, …, got 3"),
        Wrong(returns_the_scale_only, "wrong", "expected scale and streak"),
        Wrong(calls_labkits, "borrowed", "tricks.scaler."),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=where,
    allowed=COLLECTIVES,
    theirs=frozenset({str(PACKAGE / "tricks" / "scaler.py")}),
)  # fmt: skip
