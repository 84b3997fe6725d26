"""1.1 · bytes of a model's states on one of N cards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.show.words import say
from labkit.theory import memory

#: (Ψ, N, ZeRO stage). The last are the 7.5B model of the ZeRO paper, and Llama-3 8B on cards that do not divide it.
SITUATIONS = (
    (10, 1, 0), (10, 4, 0), (8, 4, 1), (10, 4, 1), (10, 4, 2), (10, 4, 3), (3, 8, 3), (3, 8, 1), (10, 1, 3), (10, 3, 2),
    (7_500_000_000, 64, 0), (7_500_000_000, 64, 1), (7_500_000_000, 64, 2), (7_500_000_000, 64, 3),
    (8_030_261_248, 12, 1), (8_030_261_248, 12, 3),
)  # fmt: skip


def model_bytes(params: int, cards: int, stage: int) -> int:
    shard = -(-params // cards)
    weights = shard if stage >= 3 else params
    gradients = shard if stage >= 2 else params
    optimizer = shard if stage >= 1 else params
    return 2 * weights + 2 * gradients + 12 * optimizer


def forgets_the_master_copy(params: int, cards: int, stage: int) -> int:
    shard = -(-params // cards)
    weights, gradients = shard if stage >= 3 else params, shard if stage >= 2 else params
    return 2 * weights + 2 * gradients + 8 * (shard if stage >= 1 else params)


def counts_gib(params: int, cards: int, stage: int) -> float:
    return model_bytes(params, cards, stage) / 2**30


def divides_everything(params: int, cards: int, stage: int) -> int:
    return model_bytes(params, cards, 3 if stage else 0)


def shards_gradients_at_stage_1(params: int, cards: int, stage: int) -> int:
    return model_bytes(params, cards, 2 if stage == 1 else stage)


def keeps_whole_parameters_at_stage_3(params: int, cards: int, stage: int) -> int:
    return model_bytes(params, cards, min(stage, 2))


def cuts_the_rest_off(params: int, cards: int, stage: int) -> int:
    return model_bytes(params // cards * cards if stage else params, cards, stage)


def rounds_the_sum_only(params: int, cards: int, stage: int) -> int:
    sharded = (0, 12, 14, 16)[stage]
    return (16 - sharded) * params + -(-sharded * params // cards)


def divides_without_rounding(params: int, cards: int, stage: int) -> float:
    shard = params / cards
    weights, gradients = shard if stage >= 3 else params, shard if stage >= 2 else params
    return 2 * weights + 2 * gradients + 12 * (shard if stage >= 1 else params)


def counts_all_cards(params: int, cards: int, stage: int) -> int:
    return cards * model_bytes(params, cards, stage)


def calls_the_theory(params: int, cards: int, stage: int) -> int:
    return sum(memory.model_states(params, stage=stage, ranks=cards).values())


def call(fn: Callable[[int, int, int], int], case: Case) -> Any:
    """A number, or what else was returned."""
    made = fn(*SITUATIONS[case.more])
    return made if type(made) in (int, float) else repr(made)


def expected(case: Case) -> list[int]:
    params, cards, stage = SITUATIONS[case.more]
    return [sum(memory.model_states(params, stage=stage, ranks=cards).values())]


def told(case: Case, values: list[Any], _: list[int]) -> str:
    have, (want,) = values[0], expected(case)
    if isinstance(have, str):
        return say("model_bytes.returned", have=have[:60], want=f"{want:,}")
    return say("model_bytes.bytes", have=f"{have:,}", want=f"{want:,}")


def where(case: Case) -> str:
    params, cards, stage = SITUATIONS[case.more]
    return f"Ψ = {params:,}, N = {cards}, {say('model_bytes.stage', stage=stage)}"


EXERCISE = Exercise(
    name="model_bytes",
    number="1.1",
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=model_bytes,
    hints=lambda: (say("model_bytes.question"), say("model_bytes.state"), say("model_bytes.code")),
    wrong=(
        Wrong(forgets_the_master_copy, "wrong", "expected 160, got 120"),
        Wrong(counts_gib, "wrong", "expected 160, got"),
        Wrong(divides_everything, "wrong", "stage 1"),
        Wrong(shards_gradients_at_stage_1, "wrong", "expected 56, got 44"),
        Wrong(keeps_whole_parameters_at_stage_3, "wrong", "stage 3"),
        Wrong(cuts_the_rest_off, "wrong", "Ψ = 10"),
        Wrong(rounds_the_sum_only, "wrong", "expected 76, got 70"),
        Wrong(divides_without_rounding, "wrong", "expected 76, got 70"),
        Wrong(counts_all_cards, "wrong", "expected 160, got 640"),
        Wrong(calls_the_theory, "borrowed", "theory.memory.states.model_states"),
    ),
    legal=nothing,
    tells=told,
    where=where,
    theirs=frozenset({str(PACKAGE / "theory" / "memory" / "states.py")}),
)  # fmt: skip
