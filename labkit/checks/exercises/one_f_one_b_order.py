"""6.1 · 1F1B: what one rank does, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.checks import orders
from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.orders import Row, first_difference, illegal, late, row_of, schedule_of, size, unread, words
from labkit.pipeline import one_f_one_b
from labkit.show.words import say

#: (ranks, micro-batches); the smallest first, and one rank last.
SITUATIONS = ((2, 1), (2, 2), (2, 4), (3, 4), (4, 8), (4, 3), (4, 4), (5, 2), (8, 12), (1, 1), (1, 3))
THEIRS = frozenset(str(PACKAGE / "pipeline" / f"{name}.py") for name in ("orders", "interleaving", "zero_bubble"))


def one_f_one_b_order(rank, ranks, micro_batches):
    warm_up = min(micro_batches, ranks - 1 - rank)
    order = [f"F{i}" for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        order += [f"F{warm_up + i}", f"B{i}"]
    return order + [f"B{i}" for i in range(micro_batches - warm_up, micro_batches)]


def _order(micro_batches: int, warm_up: int) -> list[str]:
    """One forward, one backward after so many forwards."""
    ahead = min(micro_batches, max(0, warm_up))
    pairs = [word for i in range(micro_batches - ahead) for word in (f"F{ahead + i}", f"B{i}")]
    return [f"F{i}" for i in range(ahead)] + pairs + [f"B{i}" for i in range(micro_batches - ahead, micro_batches)]


def warms_up_with_one_more(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return _order(micro_batches, ranks - rank)


def warms_up_with_one_less(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return _order(micro_batches, ranks - 2 - rank)


def warms_up_on_the_last_rank_too(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return _order(micro_batches, max(1, ranks - 1 - rank))


def warms_up_by_its_rank(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return _order(micro_batches, rank)


def warms_up_alike_on_all(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return _order(micro_batches, ranks - 1)


def has_no_warm_up(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return _order(micro_batches, 0)


def forgets_the_cool_down(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return one_f_one_b_order(rank, ranks, micro_batches)[: 2 * micro_batches - max(0, ranks - 1 - rank)]


def takes_the_latest_first(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """Backwards as from a stack."""
    order, held = [], []
    for word in one_f_one_b_order(rank, ranks, micro_batches):
        if word[0] == "F":
            held.append(word[1:])
        order.append(word if word[0] == "F" else f"B{held.pop()}")
    return order


def takes_more_micro_batches_for_granted(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """More than ranks; a list of forwards that are popped is empty otherwise."""
    forwards = [f"F{i}" for i in range(micro_batches)]
    order = [forwards.pop(0) for _ in range(ranks - 1 - rank)]
    for i in range(micro_batches):
        order += [forwards.pop(0)] if forwards else []
        order.append(f"B{i}")
    return order


def numbers_past_the_last(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """The same, with a warm-up as long as there are ranks."""
    warm_up = ranks - 1 - rank
    order = [f"F{i}" for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        order += [f"F{warm_up + i}", f"B{i}"]
    return order + [f"B{i}" for i in range(max(0, micro_batches - warm_up), micro_batches)]


def does_all_forwards_first(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return _order(micro_batches, micro_batches)


def puts_the_backward_first(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """One backward, one forward: on the last rank there is nothing yet to go back."""
    warm_up = min(micro_batches, ranks - 1 - rank)
    pairs = [word for i in range(micro_batches - warm_up) for word in (f"B{i}", f"F{warm_up + i}")]
    return [f"F{i}" for i in range(warm_up)] + pairs + [f"B{i}" for i in range(micro_batches - warm_up, micro_batches)]


def counts_from_one(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return [f"{word[0]}{int(word[1:]) + 1}" for word in one_f_one_b_order(rank, ranks, micro_batches)]


def returns_a_text(rank: int, ranks: int, micro_batches: int) -> str:
    return " ".join(one_f_one_b_order(rank, ranks, micro_batches))


def calls_labkits(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return words(one_f_one_b(ranks, micro_batches))[rank]


def call(fn: Callable[[int, int, int], Any], case: Case) -> list[Row]:
    """The orders of all ranks: they run together, or not at all."""
    ranks, micro_batches = SITUATIONS[case.more]
    return [row_of(fn(rank, ranks, micro_batches)) for rank in range(ranks)]


def expected(case: Case) -> list[list[list[str]]]:
    return [words(one_f_one_b(*SITUATIONS[case.more]))]


def differing(case: Case, values: list[list[Row]], wanted: list[list[Row]]) -> list[int]:
    """Wrong, unless it is the order; or another that ends as early, but holds more: that is wasteful."""
    (rows,), (ranks, micro_batches) = values, SITUATIONS[case.more]
    if rows == wanted[0]:
        return []
    if unread(rows, micro_batches):
        return [0]
    schedule, right = schedule_of(rows, micro_batches), one_f_one_b(ranks, micro_batches)
    return [0] if illegal(schedule) or late(schedule, right) or not holds_more(case, values) else []


def holds_more(case: Case, values: list[list[Row]]) -> str:
    """What a rank holds beyond 1F1B, and where its order is another."""
    (rows,), (ranks, micro_batches) = values, SITUATIONS[case.more]
    limits = [min(micro_batches, ranks - rank) for rank in range(ranks)]
    over = orders.over_stash(schedule_of(rows, micro_batches), limits)
    return f"{over}; {first_difference(rows, expected(case)[0])}" if over else ""


def told(case: Case, values: list[list[Row]], _: list[int]) -> str:
    """The first action that differs, and what comes of it."""
    (rows,), (ranks, micro_batches) = values, SITUATIONS[case.more]
    if text := unread(rows, micro_batches):
        return text
    schedule, right = schedule_of(rows, micro_batches), one_f_one_b(ranks, micro_batches)
    reason = illegal(schedule)
    effect = say("orders.never", reason=reason) if reason else late(schedule, right) or say("orders.alike")
    return f"{first_difference(rows, words(right))}\n{effect}"


EXERCISE = Exercise(
    name="one_f_one_b_order",
    number="6.1",
    core=True,
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=one_f_one_b_order,
    hints=lambda: (say("one_f_one_b_order.question"), say("one_f_one_b_order.state"), say("one_f_one_b_order.code")),
    wrong=(
        Wrong(warms_up_with_one_more, "wasteful", "budget 1 (2.0×); rank 1, place 1: expected B0, got F1"),
        Wrong(warms_up_with_one_less, "wrong", "expected F1, got B0"),
        Wrong(warms_up_on_the_last_rank_too, "wrong", "it ends at 21, not at 15"),
        Wrong(warms_up_by_its_rank, "wrong", "can never run"),
        Wrong(warms_up_alike_on_all, "wrong", "rank 1, place 1: expected B0, got F1"),
        Wrong(has_no_warm_up, "wrong", "comes late first"),
        Wrong(forgets_the_cool_down, "wrong", "got nothing"),
        Wrong(takes_the_latest_first, "wrong", "expected B0, got B1"),
        Wrong(takes_more_micro_batches_for_granted, "crashed", "pop from empty list"),
        Wrong(numbers_past_the_last, "wrong", "F2, but the micro-batches are 0 to 1"),
        Wrong(does_all_forwards_first, "wasteful", "rank 1: 2 micro-batches at its peak; budget 1 (2.0×)"),
        Wrong(puts_the_backward_first, "wrong", "can never run"),
        Wrong(counts_from_one, "wrong", "place 0"),
        Wrong(returns_a_text, "wrong", "expected a list of words"),
        Wrong(calls_labkits, "borrowed", "pipeline.orders.one_f_one_b"),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    excess=holds_more,
    where=lambda case: size(*SITUATIONS[case.more]),
    theirs=THEIRS,
)  # fmt: skip
