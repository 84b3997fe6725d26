"""6.5 · repair a schedule that never ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.exercises.one_f_one_b_order import THEIRS
from labkit.checks.orders import held, illegal, over_stash, plan_of, size, text_of, unread_text
from labkit.pipeline import gpipe, one_f_one_b, simulate
from labkit.show.words import say

RANKS, MICRO_BATCHES, HELD = 3, 4, 3
#: Each rank warms up with as many forwards as there are ranks *before* it.
BROKEN = """
r0: F0 B0 F1 B1 F2 B2 F3 B3
r1: F0 F1 B0 F2 B1 F3 B2 B3
r2: F0 F1 F2 B0 F3 B1 B2 B3
"""


def repair(schedule):
    return """
    r0: F0 F1 F2 B0 F3 B1 B2 B3
    r1: F0 F1 B0 F2 B1 F3 B2 B3
    r2: F0 B0 F1 B1 F2 B2 F3 B3
    """


def leaves_it(schedule: str) -> str:
    return schedule


def repairs_one_rank(schedule: str) -> str:
    return schedule.replace("r2: F0 F1 F2 B0 F3 B1 B2 B3", "r2: F0 B0 F1 B1 F2 B2 F3 B3")


def goes_back_at_once(schedule: str) -> str:
    return "\n".join(f"r{rank}: F0 B0 F1 B1 F2 B2 F3 B3" for rank in range(RANKS))


def does_all_forwards_first(schedule: str) -> str:
    return "\n".join(f"r{rank}: F0 F1 F2 F3 B0 B1 B2 B3" for rank in range(RANKS))


def leaves_the_last_out(schedule: str) -> str:
    return repair(schedule).replace(" F3", "").replace(" B3", "")


def takes_backward_apart(schedule: str) -> str:
    return repair(schedule).replace("B3", "B3 W0 W1 W2 W3")


def does_an_action_twice(schedule: str) -> str:
    return repair(schedule).replace("F0", "F0 F0")


def warms_up_with_too_few(schedule: str) -> str:
    return repair(schedule).replace("r0: F0 F1 F2 B0 F3 B1 B2 B3", "r0: F0 F1 B0 F2 B1 F3 B2 B3")


def leaves_a_rank_out(schedule: str) -> str:
    return "\n".join(repair(schedule).strip().splitlines()[:2])


def writes_commas(schedule: str) -> str:
    return repair(schedule).replace(" F", ", F").replace(" B", ", B")


def returns_nothing(schedule: str) -> None:
    repair(schedule)


def calls_labkits(schedule: str) -> str:
    return one_f_one_b(RANKS, MICRO_BATCHES).text()


def call(fn: Callable[[str], Any], case: Case) -> str:
    return text_of(fn(BROKEN))


def expected(case: Case) -> list[str]:
    return [one_f_one_b(RANKS, MICRO_BATCHES).text()]


def fault(text: str) -> str:
    return unread_text(text, RANKS, MICRO_BATCHES, "FB") or illegal(plan_of(text, RANKS, MICRO_BATCHES))


def excess(case: Case, values: list[str]) -> str:
    """Holds too much, or ends later than any that holds no more need."""
    schedule = plan_of(values[0], RANKS, MICRO_BATCHES)
    if over := over_stash(schedule, [HELD] * RANKS):
        return over
    have, limit = (simulate(s).makespan for s in (schedule, gpipe(RANKS, MICRO_BATCHES)))
    return say("repair.slow", have=f"{have:g}", limit=f"{limit:g}") if have > limit else ""


def score(case: Case, values: list[str]) -> str:
    schedule = plan_of(values[0], RANKS, MICRO_BATCHES)
    return say("repair.score", makespan=f"{simulate(schedule).makespan:g}", held=held(schedule))


EXERCISE = Exercise(
    name="repair",
    number="6.5",
    cases=(Case(1, 1),),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=repair,
    hints=lambda: (say("repair.question"), say("repair.state"), say("repair.code")),
    wrong=(
        Wrong(leaves_it, "wrong", "B0 on rank 0, at place 1, can never run"),
        Wrong(repairs_one_rank, "wrong", "can never run"),
        Wrong(goes_back_at_once, "wasteful", "ends at 36; budget 18"),
        Wrong(does_all_forwards_first, "wasteful", "4 micro-batches at its peak; budget 3"),
        Wrong(leaves_the_last_out, "wrong", "F3 of stage 0 is missing"),
        Wrong(takes_backward_apart, "wrong", "'W0' is no action"),
        Wrong(does_an_action_twice, "wrong", "F0"),
        Wrong(warms_up_with_too_few, "wasteful", "budget 18"),
        Wrong(leaves_a_rank_out, "wrong", "expected a text of 3 lines"),
        Wrong(writes_commas, "wrong", "is no action"),
        Wrong(returns_nothing, "wrong", "returned None"),
        Wrong(calls_labkits, "borrowed", "pipeline.orders.one_f_one_b"),
    ),
    legal=nothing,
    compare=lambda case, values, wanted: [0] if fault(values[0]) else [],
    tells=lambda case, values, bad: fault(values[0]),
    excess=excess,
    score=score,
    where=lambda case: size(RANKS, MICRO_BATCHES),
    theirs=THEIRS,
)  # fmt: skip
