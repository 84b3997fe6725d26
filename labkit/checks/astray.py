"""Where a wrong function first went astray, told from its messages and from what its tensor held after each."""

from __future__ import annotations

from typing import Any

import labkit
from labkit.checks.exercise import Case, Exercise
from labkit.checks.trial import attempt
from labkit.show import ring
from labkit.show.steps import Steps, counts, read
from labkit.show.words import say


def story(
    exercise: Exercise, case: Case, run: labkit.Run, expected: list[Any], bad: list[int]
) -> tuple[list[str], Any]:
    """Lines, and the learner's own run as a picture where it can be drawn."""
    lines = [_result(case, rank := bad[0], run.values[rank].value, expected[rank])]
    if exercise.tells is not None:
        lines = [exercise.tells(case, [t.value for t in run.values], bad)]
    if not exercise.ring or case.kind != "parts":
        return lines, None
    try:
        mine = read(run.trace, "ring")
        picture = ring(run.trace)
    except ValueError:  # nothing was sent, or something else than the tensor was reduced
        return lines, None
    reference = labkit.run(attempt, exercise, exercise.solution, case, ranks=case.ranks, device="cpu")
    return [*_first_difference(mine, read(reference.trace, "ring")), *lines], picture


def _first_difference(mine: Steps, theirs: Steps) -> list[str]:
    """The first step after which a rank holds something else than it should, if the two go by the same steps."""
    for step in range(1, min(mine.total, theirs.total) + 1):
        for rank in range(mine.ranks):
            for chunk in range(mine.chunks):
                have, want = mine.parts(step, rank, chunk), theirs.parts(step, rank, chunk)
                if have != want:
                    told = say("check.astray", step=step, rank=rank, chunk=chunk, want=_set(want), have=_set(have))
                    return [told, *_twice(have)]
    if mine.total != theirs.total:
        return [say("check.steps", have=mine.total, want=theirs.total)]
    return []


def _twice(parts: tuple[int, ...]) -> list[str]:
    return [say("check.twice", rank=rank) for rank, n in enumerate(parts) if n > 1][:1]


def _set(parts: tuple[int, ...]) -> str:
    return "{" + ",".join(str(rank) for rank, n in enumerate(parts) for _ in range(n)) + "}"


def _result(case: Case, rank: int, have: Any, want: Any) -> str:
    """The first number of the result that is wrong; as parts, where the numbers tell them."""
    if not isinstance(have, list) or len(have) != len(want):
        return say("check.result", rank=rank, want=_short(want), have=_short(have))
    at = next(n for n, (h, w) in enumerate(zip(have, want, strict=True)) if h != w)
    if case.kind == "parts" and all(isinstance(x, int) for x in (have[at], want[at])):
        told = {"want": _set(counts(want[at], case.ranks)), "have": _set(counts(have[at], case.ranks))}
    else:
        told = {"want": want[at], "have": have[at]}
    return say("check.element", rank=rank, element=at, **told)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
