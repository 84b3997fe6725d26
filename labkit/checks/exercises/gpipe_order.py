"""6.2 · GPipe: what one rank does, in order."""

from __future__ import annotations

from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.exercises.one_f_one_b_order import SITUATIONS, THEIRS, call
from labkit.checks.orders import Row, first_difference, illegal, late, schedule_of, size, unread, words
from labkit.pipeline import gpipe
from labkit.show.words import say


def gpipe_order(rank, ranks, micro_batches):
    forwards = [f"F{i}" for i in range(micro_batches)]
    backwards = [f"B{i}" for i in range(micro_batches)]
    return forwards + backwards


def goes_back_at_once(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return [word for i in range(micro_batches) for word in (f"F{i}", f"B{i}")]


def does_one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[str]:
    ahead = min(micro_batches, ranks - 1 - rank)
    pairs = [word for i in range(micro_batches - ahead) for word in (f"F{ahead + i}", f"B{i}")]
    return [f"F{i}" for i in range(ahead)] + pairs + [f"B{i}" for i in range(micro_batches - ahead, micro_batches)]


def forgets_the_backwards(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return [f"F{i}" for i in range(micro_batches)]


def shares_the_micro_batches(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """As data parallelism does."""
    own = range(rank, micro_batches, ranks)
    return [f"{kind}{i}" for kind in "FB" for i in own]


def turns_round_on_every_other_rank(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """Backwards from the last micro-batch on some ranks, from the first on others."""
    back = range(micro_batches) if rank % 2 else reversed(range(micro_batches))
    return [f"F{i}" for i in range(micro_batches)] + [f"B{i}" for i in back]


def begins_with_the_backwards(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return [f"{kind}{i}" for kind in "BF" for i in range(micro_batches)]


def counts_stages(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return [f"{kind}{i}" for kind in "FB" for i in range(ranks)]


def returns_all_ranks(rank: int, ranks: int, micro_batches: int) -> list[list[str]]:
    return [gpipe_order(r, ranks, micro_batches) for r in range(ranks)]


def calls_labkits(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return words(gpipe(ranks, micro_batches))[rank]


def expected(case: Case) -> list[list[list[str]]]:
    return [words(gpipe(*SITUATIONS[case.more]))]


def differing(case: Case, values: list[list[Row]], wanted: list[list[Row]]) -> list[int]:
    """Forwards first, then backwards, from the first micro-batch or from the last: GPipe's paper has the latter."""
    (rows,), (ranks, micro_batches) = values, SITUATIONS[case.more]
    if unread(rows, micro_batches):
        return [0]
    schedule = schedule_of(rows, micro_batches)
    wrong = _early(rows, micro_batches) or illegal(schedule) or late(schedule, gpipe(ranks, micro_batches))
    return [0] if wrong else []


def _early(rows: list[Row], micro_batches: int) -> str:
    """The first backward that has not all forwards before it, in words."""
    for rank, row in enumerate(rows):
        for place, word in enumerate(row[:micro_batches]):
            if word[0] == "B":
                return say("gpipe_order.early", rank=rank, place=place, word=word, forwards=place, all=micro_batches)
    return ""


def told(case: Case, values: list[list[Row]], _: list[int]) -> str:
    (rows,), (ranks, micro_batches) = values, SITUATIONS[case.more]
    if text := unread(rows, micro_batches) or _early(rows, micro_batches):
        return text
    schedule = schedule_of(rows, micro_batches)
    reason = illegal(schedule)
    return reason or f"{first_difference(rows, expected(case)[0])}\n{late(schedule, gpipe(ranks, micro_batches))}"


EXERCISE = Exercise(
    name="gpipe_order",
    number="6.2",
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=gpipe_order,
    hints=lambda: (say("gpipe_order.question"), say("gpipe_order.state"), say("gpipe_order.code")),
    wrong=(
        Wrong(goes_back_at_once, "wrong", "B0 after 1 of 2 forwards"),
        Wrong(does_one_forward_one_backward, "wrong", "B0 after 1 of 2 forwards"),
        Wrong(forgets_the_backwards, "wrong", "is missing"),
        Wrong(shares_the_micro_batches, "wrong", "is missing"),
        Wrong(begins_with_the_backwards, "wrong", "B0 after 0 of 1 forwards"),
        Wrong(turns_round_on_every_other_rank, "wrong", "p = 2, m = 2"),
        Wrong(counts_stages, "wrong", "F1, but the micro-batches are 0 to 0"),
        Wrong(returns_all_ranks, "wrong", "expected a list of words"),
        Wrong(calls_labkits, "borrowed", "pipeline.orders.gpipe"),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=lambda case: size(*SITUATIONS[case.more]),
    theirs=THEIRS,
)  # fmt: skip
