"""6.7 · end before 1F1B does, and hold no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.exercises.one_f_one_b_order import THEIRS
from labkit.checks.orders import held, illegal, over_stash, plan_of, size, text_of, unread_text
from labkit.pipeline import Schedule, one_f_one_b, simulate, zero_bubble_h1
from labkit.show.words import say

#: (ranks, micro-batches); the smallest first.
SITUATIONS = ((2, 2), (2, 4), (3, 4), (4, 4), (4, 8))


def beat_1f1b(ranks, micro_batches):
    lines = []
    for rank in range(ranks):
        warm_up = ranks - 1 - rank
        order = [f"F{i}" for i in range(warm_up)]
        for i in range(micro_batches):
            if warm_up + i < micro_batches:
                order.append(f"F{warm_up + i}")
            order.append(f"B{i}")
            if i >= rank:
                order.append(f"W{i - rank}")
        order += [f"W{i}" for i in range(micro_batches - rank, micro_batches)]
        lines.append(f"r{rank}: {' '.join(order)}")
    return "\n".join(lines)


def _lines(ranks: int, micro_batches: int, ahead: Callable[[int], int], lag: Callable[[int], int]) -> str:
    """1F1B after some forwards, and each W so many B's late."""
    lines = []
    for rank in range(ranks):
        order, begun = [], min(micro_batches, ahead(rank))
        order += [f"F{i}" for i in range(begun)]
        for i in range(micro_batches):
            order += [f"F{begun + i}"] if begun + i < micro_batches else []
            order += [f"B{i}"] + ([f"W{i - lag(rank)}"] if i >= lag(rank) else [])
        order += [f"W{i}" for i in range(max(0, micro_batches - lag(rank)), micro_batches)]
        lines.append(f"r{rank}: {' '.join(order)}")
    return "\n".join(lines)


def takes_nothing_apart(ranks: int, micro_batches: int) -> str:
    return "\n".join(_without(beat_1f1b(ranks, micro_batches), "W"))


def _without(text: str, kind: str) -> list[str]:
    return [" ".join(word for word in line.split() if word[0] != kind) for line in text.splitlines()]


def leaves_all_weights_to_the_end(ranks: int, micro_batches: int) -> str:
    return _lines(ranks, micro_batches, lambda rank: ranks - 1 - rank, lambda rank: micro_batches)


def warms_up_twice_as_long(ranks: int, micro_batches: int) -> str:
    return _lines(ranks, micro_batches, lambda rank: 2 * (ranks - 1 - rank), lambda rank: 2 * rank)


def puts_weights_before_their_backward(ranks: int, micro_batches: int) -> str:
    lines = [line.replace(" W0", "").replace("B0", "W0 B0") for line in beat_1f1b(ranks, micro_batches).splitlines()]
    return "\n".join(lines)


def forgets_the_last_weights(ranks: int, micro_batches: int) -> str:
    last = f" W{micro_batches - 1}"
    return "\n".join(line.removesuffix(last) for line in beat_1f1b(ranks, micro_batches).splitlines())


def does_one_micro_batch_at_a_time(ranks: int, micro_batches: int) -> str:
    return _lines(ranks, micro_batches, lambda rank: 0, lambda rank: 0)


def does_all_forwards_first(ranks: int, micro_batches: int) -> str:
    return _lines(ranks, micro_batches, lambda rank: micro_batches, lambda rank: 0)


def gives_weights_to_the_next_rank(ranks: int, micro_batches: int) -> str:
    """No rank has a stage's saved tensors but its own."""
    lines = beat_1f1b(ranks, micro_batches).splitlines()
    return "\n".join([*(_without(line, "W")[0] for line in lines[:1]), *lines[1:]])


def returns_lists(ranks: int, micro_batches: int) -> list[list[str]]:
    return [line.split()[1:] for line in beat_1f1b(ranks, micro_batches).splitlines()]


def calls_labkits(ranks: int, micro_batches: int) -> str:
    return zero_bubble_h1(ranks, micro_batches).text()


def call(fn: Callable[[int, int], Any], case: Case) -> str:
    return text_of(fn(*SITUATIONS[case.more]))


def expected(case: Case) -> list[str]:
    """Par: ZB-H1."""
    return [zero_bubble_h1(*SITUATIONS[case.more]).text()]


def fault(case: Case, text: str) -> str:
    """Why it is none, cannot run, or ends no earlier than 1F1B; in words."""
    ranks, micro_batches = SITUATIONS[case.more]
    if said := unread_text(text, ranks, micro_batches, "FBW"):
        return said
    schedule = plan_of(text, ranks, micro_batches)
    if said := illegal(schedule):
        return said
    have, limit = _ends(schedule), _ends(one_f_one_b(ranks, micro_batches))
    return "" if have < limit else say("beat_1f1b.late", have=f"{have:g}", limit=f"{limit:g}")


def _ends(schedule: Schedule) -> float:
    return simulate(schedule).makespan


def excess(case: Case, values: list[str]) -> str:
    ranks, micro_batches = SITUATIONS[case.more]
    most = min(ranks, micro_batches)
    return over_stash(plan_of(values[0], ranks, micro_batches), [most] * ranks)


def score(case: Case, values: list[str]) -> str:
    ranks, micro_batches = SITUATIONS[case.more]
    schedule = plan_of(values[0], ranks, micro_batches)
    ends = [_ends(s) for s in (schedule, one_f_one_b(ranks, micro_batches), zero_bubble_h1(ranks, micro_batches))]
    have, limit, par = (f"{end:g}" for end in ends)
    return say("beat_1f1b.score", have=have, limit=limit, par=par, held=held(schedule))


EXERCISE = Exercise(
    name="beat_1f1b",
    number="6.7",
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=beat_1f1b,
    hints=lambda: (say("beat_1f1b.question"), say("beat_1f1b.state"), say("beat_1f1b.code")),
    wrong=(
        Wrong(leaves_all_weights_to_the_end, "wasteful", "held by rank 0: 4 micro-batches at its peak; budget 2"),
        Wrong(takes_nothing_apart, "wrong", "ends at 9, 1F1B at 9"),
        Wrong(warms_up_twice_as_long, "wasteful", "budget 2"),
        Wrong(puts_weights_before_their_backward, "wrong", "can never run"),
        Wrong(forgets_the_last_weights, "wrong", "W1 of stage 0 is missing"),
        Wrong(does_one_micro_batch_at_a_time, "wrong", "1F1B at 9"),
        Wrong(does_all_forwards_first, "wasteful", "budget 2"),
        Wrong(gives_weights_to_the_next_rank, "wrong", "is missing"),
        Wrong(returns_lists, "wrong", "expected a text"),
        Wrong(calls_labkits, "borrowed", "pipeline.zero_bubble.zero_bubble_h1"),
    ),
    legal=nothing,
    compare=lambda case, values, wanted: [0] if fault(case, values[0]) else [],
    tells=lambda case, values, bad: fault(case, values[0]),
    excess=excess,
    score=score,
    where=lambda case: size(*SITUATIONS[case.more]),
    theirs=THEIRS,
)  # fmt: skip
