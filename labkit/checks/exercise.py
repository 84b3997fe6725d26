"""What an exercise is: a description from which the check, the hints and the notebook's text are made.

A new exercise is a page in `labkit/checks/exercises/`: what the function must do, on what it is tried, what it may
cost, three hints, a solution, and wrong ones. It needs no machinery of its own.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.collectives.choose import ALGORITHMS
from labkit.show.words import count, say
from labkit.trace import Trace

#: What the tensors of a case hold. "parts": rank r brings 16**r, so that a wrong sum tells whose part is missing or
#: twice. "numbers": small whole numbers, all different, so that a wrong place shows.
KINDS = ("parts", "numbers")
#: Collectives by name, for an exercise that lets its learner call any of them.
COLLECTIVES = tuple(ALGORITHMS)


@dataclass(frozen=True, slots=True)
class Case:
    """One call of the learner's function in a world of its own size.

    Attributes:
        ranks: Size of the world.
        elements: Of the tensor; what that means, the exercise says.
        kind: See `KINDS`.
        dtype: Name of the elements' type, as torch has it.
        more: What else the exercise wants to know, such as the root.
    """

    ranks: int
    elements: int
    kind: str = "parts"
    dtype: str = "int64"
    more: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one rank spends, or may spend, in a case. ``None``: not counted.

    Attributes:
        nbytes, messages: That it sends.
        rounds: Of the whole world: the longest chain of messages each of which had to wait for the one before.
        peak: Most bytes held at once in tensors and NumPy arrays that the function made. Told of large tensors only: a
            scalar more is no fault.
        calls, handed: Collectives that it takes part in, and the bytes that it hands to them.
    """

    nbytes: int | None = None
    messages: int | None = None
    rounds: int | None = None
    peak: int | None = None
    calls: int | None = None
    handed: int | None = None


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong solution that people write, the verdict that it must get, and words that the verdict must hold."""

    fn: Callable[..., Any]
    kind: str
    says: str = ""


def anything(case: Case) -> bool:
    return True


def nothing(case: Case) -> bool:
    """For an exercise whose cases are the smallest already."""
    return False


def in_words(case: Case) -> str:
    """A case as a verdict names it."""
    told = [say("check.world", ranks=case.ranks), count("check.elements", case.elements)]
    return ", ".join(told if case.dtype == "int64" else [*told, case.dtype])


def full_chunks(case: Case) -> bool:
    """Whether every rank's chunk holds something, so that a picture shows all that happens."""
    return case.elements >= case.ranks


def differing(case: Case, values: list[Any], expected: list[Any]) -> list[int]:
    """The ranks whose value is not the expected one."""
    return [rank for rank, value in enumerate(values) if value != expected[rank]]


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """The description of an exercise.

    Attributes:
        name: Of the function, and what `labkit.check` is given.
        number, core: Its number in the chapter, and whether the chapter is not done without it.
        cases: Smallest first. Of the first that fails, a smaller one that fails as well is what the learner is shown.
        call: ``call(fn, case)``, on every rank: make the tensors, call the learner's function, return what it made, as
            plain lists.
        expected: ``expected(case)``: what `call` should return on rank 0, 1, …; computed without any rank.
        budget: ``budget(case)``: what rank 0, 1, … may spend.
        solution: A function that does it. Its source is the last hint.
        hints: Gives three: a question; the state expected after step 1; pseudo-code with a blank.
        wrong: Solutions that a test proves to be rejected.
        ring: Whether messages must go from rank r to r + 1. The case's tensor is watched, so that `labkit.show.ring`
            can draw what went wrong.
        legal: ``legal(case)``: whether a case that is smaller than one of `cases` may be shown.
        compare: ``compare(case, values, expected)``: the ranks that are wrong; by default those that differ.
        tells: ``tells(case, values, wrong ranks)``: what is wrong, where "expected … got …" would not say it.
        where: ``where(case)``: the case in words.
        allowed: Collectives, of torch's or labkit's, that may be called; any other is borrowed.
        theirs: Files of which no function may be called, since it does the exercise; ``None``: labkit's algorithms.
        shipped: What stands in the notebook at first, where it is no stub: seeing it fail is no attempt yet.
        order: ``order(case, trace)``: what is wasteful in the order of events, in words; nothing, if nothing is.
        excess: ``excess(case, values)``: what is wasteful in what was made, in words; nothing, if nothing is.
        score: ``score(case, values)``: how good what was made is, in words; told of the last case, if all are right.
    """

    name: str
    number: str
    core: bool = False
    cases: tuple[Case, ...]
    call: Callable[[Callable[..., Any], Case], Any]
    expected: Callable[[Case], list[Any]]
    budget: Callable[[Case], list[Cost]]
    solution: Callable[..., Any]
    hints: Callable[[], tuple[str, str, str]]
    wrong: tuple[Wrong, ...]
    ring: bool = False
    legal: Callable[[Case], bool] = anything
    compare: Callable[[Case, list[Any], list[Any]], list[int]] = differing
    tells: Callable[[Case, list[Any], list[int]], str] | None = None
    where: Callable[[Case], str] = in_words
    allowed: tuple[str, ...] = ()
    theirs: frozenset[str] | None = None
    shipped: Callable[..., Any] | None = None
    order: Callable[[Case, Trace], str] | None = None
    excess: Callable[[Case, list[Any]], str] | None = None
    score: Callable[[Case, list[Any]], str] | None = None

    def is_shipped(self, fn: Callable[..., Any]) -> bool:
        """Whether a function is still as it stood in the notebook; comments and spaces do not count."""
        if self.shipped is None or not hasattr(fn, "__code__"):
            return False
        return _instructions(fn) == _instructions(self.shipped)


def _instructions(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """What a function does. How a call on a module is compiled depends on where the module was imported."""
    found = [("LOAD_ATTR" if i.opname == "LOAD_METHOD" else i.opname, i.argval) for i in dis.get_instructions(fn)]
    return [(name, value) for name, value in found if name not in ("PUSH_NULL", "PRECALL", "RESUME", "NOP")]
