"""Exercises: `check` tries a learner's function on real ranks, `hint` helps a little, `solution` shows one way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from labkit import progress
from labkit.checks import exercises
from labkit.checks.verdict import Verdict
from labkit.show.guesses import Revealed
from labkit.show.words import say

__all__ = ["Verdict", "check", "hint", "solution"]

#: Exercise → hints given, and whether a written attempt was checked, in this kernel; `progress` knows of others.
_given: dict[str, int] = {}
_tried: set[str] = set()


def check(name: str, fn: Callable[..., Any]) -> Verdict:
    """Try `fn` on real ranks, in worlds of several sizes, and say what was seen.

    A wrong answer is no error: nothing is raised, and a cell with a stub reports "not attempted".

    Args:
        name: Of the exercise, such as ``"ring_reduce_scatter"``.
        fn: The learner's function.

    Returns:
        A `Verdict`.

    Raises:
        TypeError, ValueError: There is no such exercise, or `fn` is no function.
    """
    from labkit.checks.borrow import is_ours
    from labkit.checks.judge import judge

    exercise = exercises.get(name)
    if not callable(fn):
        raise TypeError(f"check was given {fn!r}: expected the function itself, without ()")
    ours = Verdict(name, "borrowed", "", (say("check.ours"),)) if is_ours(fn) else None
    verdict = ours or judge(exercise, fn)
    if verdict.kind != "not_attempted" and not exercise.is_shipped(fn):
        _tried.add(name)
        progress.note_check(name, verdict.kind)
    return verdict


def hint(name: str) -> Revealed:
    """The next hint of an exercise: a question; the state after step 1; pseudo-code with blanks.

    Raises:
        TypeError, ValueError: There is no such exercise.
    """
    hints = exercises.get(name).hints()
    number = min(max(_given.get(name, 0), _kept(name, "hints")) + 1, len(hints))
    _given[name] = number
    progress.note_hint(name, number)
    return Revealed(f"{say('hint.head', number=number, all=len(hints))}\n{hints[number - 1]}")


def solution(name: str) -> Revealed:
    """One way to do it; after an attempt was checked.

    Raises:
        TypeError, ValueError: There is no such exercise.
    """
    exercise = exercises.get(name)
    if name not in _tried and not _kept(name, "tries"):
        return Revealed(say("hint.first", name=name))
    return Revealed(inspect.getsource(exercise.solution))


def _kept(name: str, what: str) -> int:
    """Tries or hints of an exercise, in all kernels."""
    return progress.read()["exercises"].get(name, {}).get(what, 0)
