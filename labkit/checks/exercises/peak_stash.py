"""6.4 · how many micro-batches a rank holds at its peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.checks.alone import in_short
from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.orders import schedule_of, words
from labkit.pipeline import gpipe, one_f_one_b, zero_bubble_h1, zero_bubble_h2
from labkit.show.words import count, say

#: What a rank does; the smallest first.
SITUATIONS: tuple[list[str], ...] = (
    [], ["F0", "B0"], ["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"], ["F0", "B0", "F1", "F2", "B2", "B1"],
    ["F0", "F1", "B0", "F2", "B1", "B2"], ["F0", "B0", "W0"], ["F0", "B0", "F1", "B1", "W0", "W1"],
    ["F0", "B0", "W0", "F1", "B1", "W1"], words(one_f_one_b(4, 8))[1], words(zero_bubble_h1(4, 8))[0],
    words(zero_bubble_h1(4, 8))[3], words(zero_bubble_h2(4, 12))[0], words(gpipe(2, 12))[0],
)  # fmt: skip


def peak_stash(words):
    free = "W" if any(word[0] == "W" for word in words) else "B"
    held = peak = 0
    for word in words:
        if word[0] == "F":
            held += 1
        elif word[0] == free:
            held -= 1
        peak = max(peak, held)
    return peak


def frees_at_its_backward(words: list[str]) -> int:
    return peak_stash([word for word in words if word[0] != "W"])


def frees_at_both(words: list[str]) -> int:
    held = peak = 0
    for word in words:
        held += 1 if word[0] == "F" else -1
        peak = max(peak, held)
    return peak


def frees_at_weights_only(words: list[str]) -> int:
    """Where nothing is taken apart, nothing is freed."""
    return peak_stash([word for word in words if word[0] != "B"] + ["W"])


def counts_all_forwards(words: list[str]) -> int:
    return sum(word[0] == "F" for word in words)


def counts_before_the_first_backward(words: list[str]) -> int:
    return [*(word[0] for word in words), "B"].index("B")


def counts_the_longest_run(words: list[str]) -> int:
    kinds = "".join(word[0] for word in words)
    return max(map(len, kinds.replace("W", "B").split("B")))


def counts_what_is_left(words: list[str]) -> int:
    return sum(word[0] == "F" for word in words) - sum(word[0] == "B" for word in words)


def takes_the_largest_number(words: list[str]) -> int:
    return max((int(word[1:]) + 1 for word in words), default=0)


def needs_a_word(words: list[str]) -> int:
    held = [sum({"F": 1, "B": -1}.get(word[0], 0) for word in words[: n + 1]) for n in range(len(words))]
    return max(held)


def returns_each_moment(words: list[str]) -> list[int]:
    return [peak_stash(words[: n + 1]) for n in range(len(words))]


def asks_labkits(words: list[str]) -> int:
    return schedule_of([words], 99).stash()[0]


def call(fn: Callable[[list[str]], Any], case: Case) -> int | str:
    made = fn(list(SITUATIONS[case.more]))
    return made if type(made) is int else in_short(made)


def expected(case: Case) -> list[int]:
    return [schedule_of([SITUATIONS[case.more]], 99).stash()[0]]


def told(case: Case, values: list[Any], _: list[int]) -> str:
    return say("peak_stash.number", have=values[0], want=expected(case)[0])


def where(case: Case) -> str:
    shown = SITUATIONS[case.more]
    return " ".join(shown) if 0 < len(shown) <= 24 else count("peak_stash.words", len(shown))


EXERCISE = Exercise(
    name="peak_stash",
    number="6.4",
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=peak_stash,
    hints=lambda: (say("peak_stash.question"), say("peak_stash.state"), say("peak_stash.code")),
    wrong=(
        Wrong(frees_at_its_backward, "wrong", "expected 2, got 1"),
        Wrong(frees_at_both, "wrong", "F0 B0 F1 B1 W0 W1"),
        Wrong(frees_at_weights_only, "wrong", "expected 1, got 2"),
        Wrong(counts_all_forwards, "wrong", "expected 1, got 2"),
        Wrong(counts_before_the_first_backward, "wrong", "F0 B0 F1 F2 B2 B1"),
        Wrong(counts_the_longest_run, "wrong", "F0 B0 F1 B1 W0 W1"),
        Wrong(counts_what_is_left, "wrong", "expected 1, got 0"),
        Wrong(takes_the_largest_number, "wrong", "expected 1, got 2"),
        Wrong(needs_a_word, "crashed", "0 words"),
        Wrong(returns_each_moment, "wrong", "got []"),
        Wrong(asks_labkits, "borrowed", "pipeline.schedule"),
    ),
    legal=nothing,
    tells=told,
    where=where,
    theirs=frozenset({str(PACKAGE / "pipeline" / "schedule.py"), str(PACKAGE / "pipeline" / "timeline.py")}),
)  # fmt: skip
