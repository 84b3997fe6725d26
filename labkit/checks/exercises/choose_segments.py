"""8.2 · into how many segments to cut the layers, so that a step fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from labkit.checks.alone import in_short
from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.show.words import count, say
from labkit.theory.memory import segmented

#: (layers, kept, inside, budget); the smallest first. The first is a transformer's, in sbh; the last GPT-3's in bytes.
SITUATIONS: tuple[tuple[int, int, int, int], ...] = (
    (64, 2, 34, 288), (64, 2, 34, 287), (64, 2, 34, 150), (64, 2, 34, 132), (64, 2, 34, 131), (64, 2, 34, 2176),
    (64, 2, 34, 2175), (4, 2, 34, 42), (4, 2, 34, 41), (10, 2, 34, 80), (10, 2, 34, 78), (1, 2, 34, 34), (1, 2, 34, 33),
    (1, 2, 34, 36), (16, 10, 10, 80), (16, 10, 10, 79), (12, 30, 10, 119), (12, 30, 10, 100), (100, 2, 34, 270),
    (96, 50_331_648, 855_638_016, 8_000_000_000), (96, 50_331_648, 855_638_016, 6_000_000_000),
)  # fmt: skip


def choose_segments(layers, kept, inside, budget):
    if layers * inside <= budget:
        return 0
    for segments in range(1, layers + 1):
        longest = -(-layers // segments)
        if segments * kept + longest * inside <= budget:
            return segments
    return None


Answer = int | None


def _first(layers: int, fits: Callable[[int], bool]) -> Answer:
    return next((c for c in range(1, layers + 1) if fits(c)), None)


def _held(layers: int, c: int, kept: int, inside: int) -> int:
    return c * kept + -(-layers // c) * inside


def takes_the_square_root(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    c = round(math.sqrt(layers))
    return c if _held(layers, c, kept, inside) <= budget else None


def takes_the_best_by_formula(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    c = min(layers, max(1, round(math.sqrt(layers * inside / kept))))
    return c if _held(layers, c, kept, inside) <= budget else None


def takes_what_holds_least(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    least = min(range(1, layers + 1), key=lambda c: _held(layers, c, kept, inside))
    return least if _held(layers, least, kept, inside) <= budget else None


def cuts_the_rest_off(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    return _first(layers, lambda c: c * kept + layers // c * inside <= budget)


def divides_without_rounding(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    return _first(layers, lambda c: c * kept + layers / c * inside <= budget)


def forgets_the_inputs(layers: int, kept: int, inside: int, budget: int) -> Answer:
    return choose_segments(layers, 0, inside, budget)


def forgets_the_inside(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    return _first(layers, lambda c: c * kept <= budget)


def holds_all_insides(layers: int, kept: int, inside: int, budget: int) -> Answer:
    """As if nothing were recomputed."""
    if layers * inside <= budget:
        return 0
    return _first(layers, lambda c: c * kept + layers * inside <= budget)


def only_what_divides(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    return _first(layers, lambda c: layers % c == 0 and _held(layers, c, kept, inside) <= budget)


def only_powers_of_two(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    return _first(layers, lambda c: c & (c - 1) == 0 and _held(layers, c, kept, inside) <= budget)


def searches_by_halving(layers: int, kept: int, inside: int, budget: int) -> Answer:
    """As if more segments always held less."""
    if layers * inside <= budget:
        return 0
    low, high = 1, layers
    while low < high:
        middle = (low + high) // 2
        if _held(layers, middle, kept, inside) <= budget:
            high = middle
        else:
            low = middle + 1
    return low if _held(layers, low, kept, inside) <= budget else None


def stops_where_it_grows(layers: int, kept: int, inside: int, budget: int) -> Answer:
    """As if there were one valley; whole segments make many."""
    if layers * inside <= budget:
        return 0
    c = 1
    while c < layers and _held(layers, c + 1, kept, inside) < _held(layers, c, kept, inside):
        if _held(layers, c, kept, inside) <= budget:
            return c
        c += 1
    return c if _held(layers, c, kept, inside) <= budget else None


def takes_the_most_that_fit(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    fitting = [c for c in range(1, layers + 1) if _held(layers, c, kept, inside) <= budget]
    return fitting[-1] if fitting else None


def checkpoints_every_layer(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    return layers if _held(layers, layers, kept, inside) <= budget else None


def never_every_layer(layers: int, kept: int, inside: int, budget: int) -> Answer:
    made = choose_segments(layers, kept, inside, budget)
    return None if made == layers else made


def must_be_below(layers: int, kept: int, inside: int, budget: int) -> Answer:
    return choose_segments(layers, kept, inside, budget - 1)


def always_recomputes(layers: int, kept: int, inside: int, budget: int) -> Answer:
    return _first(layers, lambda c: _held(layers, c, kept, inside) <= budget)


def returns_all_layers_where_nothing_fits(layers: int, kept: int, inside: int, budget: int) -> int:
    made = choose_segments(layers, kept, inside, budget)
    return layers if made is None else made


def expects_that_something_fits(layers: int, kept: int, inside: int, budget: int) -> int:
    if layers * inside <= budget:
        return 0
    return min(c for c in range(1, layers + 1) if _held(layers, c, kept, inside) <= budget)


def returns_layers_a_segment(layers: int, kept: int, inside: int, budget: int) -> Answer:
    made = choose_segments(layers, kept, inside, budget)
    return -(-layers // made) if made else made


def calls_the_theory(layers: int, kept: int, inside: int, budget: int) -> Answer:
    if layers * inside <= budget:
        return 0
    return _first(layers, lambda c: segmented(layers, c, kept, inside) <= budget)


def call(fn: Callable[..., Any], case: Case) -> int | str | None:
    made = fn(*SITUATIONS[case.more])
    return made if made is None or type(made) is int else in_short(made)


def expected(case: Case) -> list[Answer]:
    layers, kept, inside, budget = SITUATIONS[case.more]
    if layers * inside <= budget:
        return [0]
    fitting = {c for c in range(1, layers + 1) if segmented(layers, c, kept, inside) <= budget}
    return [min(fitting, default=None)]


def told(case: Case, values: list[Any], _: list[int]) -> str:
    """What was wanted and made, and what each of them would hold."""
    have, (want,) = values[0], expected(case)
    if isinstance(have, str):
        return say("choose_segments.returned", have=have)
    line = say("choose_segments.number", want=str(want), have=str(have))
    holds = [_holding(case, c) for c in (want, have) if c is not None]
    return "; ".join([line, *(text for text in holds if text)])


def _holding(case: Case, c: int) -> str:
    layers, kept, inside, _ = SITUATIONS[case.more]
    if not 0 <= c <= layers:
        return say("choose_segments.strange", c=c, layers=count("choose_segments.layers", layers))
    if c == 0:
        return say("choose_segments.whole", nbytes=f"{layers * inside:,}")
    return count("choose_segments.holds", c, nbytes=f"{segmented(layers, c, kept, inside):,.0f}")


def where(case: Case) -> str:
    layers, *numbers = SITUATIONS[case.more]
    kept, inside, budget = (f"{n:,}" for n in numbers)
    told = say("choose_segments.case", kept=kept, inside=inside, budget=budget)
    return f"{count('choose_segments.layers', layers)}, {told}"


EXERCISE = Exercise(
    name="choose_segments",
    number="8.2",
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=choose_segments,
    hints=lambda: (say("choose_segments.question"), say("choose_segments.state"), say("choose_segments.code")),
    wrong=(
        Wrong(takes_the_square_root, "wrong", "expected 10, got None"),
        Wrong(takes_the_best_by_formula, "wrong", "expected 8, got 33"),
        Wrong(takes_what_holds_least, "wrong", "expected 8, got 32"),
        Wrong(cuts_the_rest_off, "wrong", "expected 10, got 9; 10 segments hold 258; 9 segments hold 290"),
        Wrong(divides_without_rounding, "wrong", "expected 10, got 9"),
        Wrong(forgets_the_inputs, "wrong", "expected 10, got 8"),
        Wrong(forgets_the_inside, "wrong", "expected 8, got 1"),
        Wrong(holds_all_insides, "wrong", "expected 8, got None"),
        Wrong(only_what_divides, "wrong", "expected 10, got 16"),
        Wrong(only_powers_of_two, "wrong", "expected 10, got 16"),
        Wrong(searches_by_halving, "wrong", "expected 4, got None"),
        Wrong(stops_where_it_grows, "wrong", "expected 10, got None"),
        Wrong(takes_the_most_that_fit, "wrong", "expected 8, got 64"),
        Wrong(checkpoints_every_layer, "wrong", "expected 8, got 64"),
        Wrong(never_every_layer, "wrong", "4 layers"),
        Wrong(must_be_below, "wrong", "expected 8, got 10"),
        Wrong(always_recomputes, "wrong", "expected 0, got"),
        Wrong(returns_all_layers_where_nothing_fits, "wrong", "expected None, got 64"),
        Wrong(expects_that_something_fits, "crashed", "ValueError"),
        Wrong(returns_layers_a_segment, "wrong", "expected 10, got 7"),
        Wrong(calls_the_theory, "borrowed", "theory.memory.recompute.segmented"),
    ),
    legal=nothing,
    tells=told,
    where=where,
    theirs=frozenset({str(PACKAGE / "theory" / "memory" / "recompute.py")}),
)  # fmt: skip
