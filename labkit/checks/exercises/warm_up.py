"""6.3 · how many forwards come before the first backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.checks.alone import in_short
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.exercises.one_f_one_b_order import THEIRS
from labkit.pipeline import interleaved, one_f_one_b
from labkit.show.words import say

#: (rank, ranks, micro-batches, chunks); the smallest first.
SITUATIONS = (
    (0, 1, 1, 1), (0, 2, 4, 1), (1, 2, 4, 1), (0, 4, 8, 1), (1, 4, 8, 1), (3, 4, 8, 1), (0, 4, 2, 1), (1, 4, 1, 1),
    (0, 2, 4, 2), (1, 2, 4, 2), (0, 4, 8, 2), (1, 4, 8, 2), (3, 4, 8, 2), (1, 4, 8, 3), (0, 2, 2, 2), (0, 4, 4, 2),
    (2, 4, 4, 2), (0, 1, 3, 2), (3, 8, 32, 4),
)  # fmt: skip


def warm_up(rank, ranks, micro_batches, chunks):
    after = ranks - 1 - rank
    if chunks == 1:
        return min(micro_batches, after + 1)
    return min(micro_batches * chunks, (chunks - 1) * ranks + 2 * after + 1)


def counts_those_before_the_pairs(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return warm_up(rank, ranks, micro_batches, chunks) - 1


def counts_from_the_first_rank(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return warm_up(ranks - 1 - rank, ranks, micro_batches, chunks)


def forgets_that_there_may_be_few(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return warm_up(rank, ranks, 10**6, chunks)


def forgets_the_chunks(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return warm_up(rank, ranks, micro_batches, 1)


def multiplies_by_the_chunks(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return chunks * warm_up(rank, ranks, micro_batches, 1)


def takes_one_step_a_rank_when_interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return min(micro_batches * chunks, (chunks - 1) * ranks + ranks - rank)


def takes_two_steps_a_rank_always(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return min(micro_batches * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1)


def caps_by_micro_batches(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return min(micro_batches, warm_up(rank, ranks, micro_batches, chunks))


def takes_all_micro_batches_through_a_chunk(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return min(micro_batches * chunks, (chunks - 1) * micro_batches + 2 * (ranks - 1 - rank) + 1) if chunks > 1 else (
        warm_up(rank, ranks, micro_batches, 1))  # fmt: skip


def is_gpipes(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return micro_batches * chunks


def returns_words(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[str]:
    return [f"F{i}" for i in range(warm_up(rank, ranks, micro_batches, chunks))]


def asks_labkits(rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
    return _of(interleaved(ranks, micro_batches, chunks).actions[rank])


def _of(row: Any) -> int:
    """Forwards before the first backward."""
    return [action.kind for action in row].index("B")


def call(fn: Callable[[int, int, int, int], Any], case: Case) -> int | str:
    made = fn(*SITUATIONS[case.more])
    return made if type(made) is int else in_short(made)


def expected(case: Case) -> list[int]:
    rank, ranks, micro_batches, chunks = SITUATIONS[case.more]
    schedule = one_f_one_b(ranks, micro_batches) if chunks == 1 else interleaved(ranks, micro_batches, chunks)
    return [_of(schedule.actions[rank])]


def told(case: Case, values: list[Any], _: list[int]) -> str:
    return say("warm_up.number", have=values[0], want=expected(case)[0])


def where(case: Case) -> str:
    rank, ranks, micro_batches, chunks = SITUATIONS[case.more]
    return say("warm_up.case", rank=rank, ranks=ranks, micro_batches=micro_batches, chunks=chunks)


EXERCISE = Exercise(
    name="warm_up",
    number="6.3",
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=warm_up,
    hints=lambda: (say("warm_up.question"), say("warm_up.state"), say("warm_up.code")),
    wrong=(
        Wrong(counts_those_before_the_pairs, "wrong", "expected 1, got 0"),
        Wrong(counts_from_the_first_rank, "wrong", "rank 0, p = 2"),
        Wrong(forgets_that_there_may_be_few, "wrong", "m = 2"),
        Wrong(forgets_the_chunks, "wrong", "v = 2"),
        Wrong(multiplies_by_the_chunks, "wrong", "v = 2"),
        Wrong(takes_one_step_a_rank_when_interleaved, "wrong", "v = 2"),
        Wrong(takes_two_steps_a_rank_always, "wrong", "expected 2, got 3"),
        Wrong(caps_by_micro_batches, "wrong", "v = 2"),
        Wrong(takes_all_micro_batches_through_a_chunk, "wrong", "v = 2"),
        Wrong(is_gpipes, "wrong", "rank 0, p = 2"),
        Wrong(returns_words, "wrong", "got ['F0']"),
        Wrong(asks_labkits, "borrowed", "pipeline.interleaving.interleaved"),
    ),
    legal=nothing,
    tells=told,
    where=where,
    theirs=THEIRS,
)  # fmt: skip
