"""Break it: four implementations that look alike, each with one real fault. From the symptoms to the diagnosis.

line = labkit.impostors("02")
line                    # the symptoms of A to D: values, bytes, messages, memory
line.ask("A")           # a form: what is wrong with A?
line.open("A")          # its source, after a diagnosis
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import labkit
from labkit.checks.exercise import Case, Cost, Exercise, differing, nothing
from labkit.checks.judge import costs
from labkit.checks.look import look
from labkit.progress import note_answer
from labkit.show.figure import style
from labkit.show.guesses import Question, Revealed, guess, predict
from labkit.show.svg import el, escape
from labkit.show.words import say

#: Chapter → the module that holds its line-up.
LINEUPS = {
    "02": "labkit.checks.lineups.collectives",
    "03": "labkit.checks.lineups.data_parallel",
    "04": "labkit.checks.lineups.tensor_parallel",
    "05": "labkit.checks.lineups.sequence_parallel",
    "06": "labkit.checks.lineups.pipeline",
    "07": "labkit.checks.lineups.zero",
    "08": "labkit.checks.lineups.tricks",
}


@dataclass(frozen=True, slots=True)
class Impostor:
    """An implementation with one fault. `fault`: gives the fault in words; it is one of the answers to choose from."""

    fn: Callable[..., Any]
    fault: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Fact:
    """A column of symptoms: its head, and what stands in it; ``cell(case, values, expected)``."""

    head: Callable[[], str]
    cell: Callable[[Case, list[Any], list[Any]], str]


def training(
    name: str, case: Case, train: Callable[..., Any], call: Callable[..., Any],
    expected: Callable[[Case], list[Any]], budget: Callable[[Case], list[Cost]],
    compare: Callable[[Case, list[Any], list[Any]], list[int]], allowed: tuple[str, ...] = (),
) -> Exercise:  # fmt: skip
    """What the impostors of a chapter claim to do: to train as `train` does. Nobody is asked to write it."""
    return Exercise(
        name=name, number="", cases=(case,), call=call, expected=expected, budget=budget, solution=train,
        hints=lambda: ("", "", ""), wrong=(), legal=nothing, compare=compare, allowed=allowed, theirs=frozenset(),
    )  # fmt: skip


def right_or_wrong(case: Case, values: list[Any], expected: list[Any]) -> str:
    bad = differing(case, values, expected)
    return say("impostor.wrong", ranks=", ".join(map(str, bad))) if bad else say("verdict.right")


@dataclass(frozen=True)
class Lineup:
    """The impostors of a chapter, all of which claim to do one exercise.

    Attributes:
        chapter: Such as ``"02"``.
        exercise: What they claim to do.
        case: On what their symptoms are taken.
        members: Letter → impostor.
        facts: What is told of the values; by default whether they are right.
        units: What is told of the costs, as in `Cost`.
        where: The case in words.
    """

    chapter: str
    exercise: Exercise
    case: Case
    members: dict[str, Impostor]
    facts: tuple[Fact, ...] = (Fact(lambda: say("impostor.values"), right_or_wrong),)
    units: tuple[str, ...] = ("nbytes", "messages", "rounds", "peak")
    where: Callable[[Case], str] | None = None

    @cached_property
    def symptoms(self) -> list[tuple[str, ...]]:
        """A row a member, and one for what is allowed: values, and the most of any rank in bytes, messages, memory."""
        rows = [(letter, *self._taken(member.fn)) for letter, member in self.members.items()]
        allowed = self.exercise.budget(self.case)
        limits = [[getattr(c, unit) for c in allowed] for unit in self.units]
        told = ["–" if None in of_unit else f"{max(of_unit):,}" for of_unit in limits]
        return [*rows, (say("impostor.budget"), *("" for _ in self.facts), *told)]

    def _taken(self, fn: Callable[..., Any]) -> tuple[str, ...]:
        """What is told of its values, then its costs; of one that hangs, only that it does."""
        nothing = ("",) * (len(self.columns) - 2)
        outcome = look(self.exercise, fn, self.case)  # with patience: a busy host is no deadlock
        if isinstance(outcome.failure, labkit.RunTimeout):
            return (say("verdict.deadlocked"), *nothing)
        if isinstance(outcome.failure, labkit.Disagreement):
            return (say("impostor.disagree"), *nothing)
        if (run := outcome.run) is None:
            return (say("verdict.crashed"), *nothing)
        values, expected = [t.value for t in run.values], self.exercise.expected(self.case)
        told = [fact.cell(self.case, values, expected) for fact in self.facts]
        spent = costs(run)
        return (*told, *(f"{max(getattr(c, unit) for c in spent):,}" for unit in self.units))

    def ask(self, letter: str) -> Question:
        """A form with the faults to choose from; the guess is kept like any other.

        Raises:
            ValueError: There is no such member.
        """
        self._member(letter)
        faults = sorted({m.fault() for m in self.members.values()})
        return predict(self._key(letter), say("impostor.ask", letter=letter), choices=faults)

    def open(self, letter: str) -> Revealed:
        """What the fault is, and the source, once a diagnosis was noted.

        Raises:
            ValueError: There is no such member.
        """
        member = self._member(letter)
        noted = guess(self._key(letter))
        if noted is None:
            return Revealed(say("impostor.first", letter=letter))
        note_answer(self._key(letter), member.fault())
        verdict = say("impostor.met" if noted == member.fault() else "impostor.missed", fault=member.fault())
        return Revealed(f"{verdict}\n\n{inspect.getsource(member.fn)}")

    def _member(self, letter: str) -> Impostor:
        if letter not in self.members:
            raise ValueError(f"there is no impostor {letter!r}: expected one of {', '.join(self.members)}")
        return self.members[letter]

    def _key(self, letter: str) -> str:
        return f"impostor.{self.chapter}.{letter}"

    @property
    def columns(self) -> tuple[str, ...]:
        heads = {
            "nbytes": lambda: say("impostor.bytes"),
            "messages": lambda: say("impostor.messages"),
            "rounds": lambda: say("impostor.rounds"),
            "peak": lambda: say("impostor.memory"),
            "calls": lambda: say("impostor.calls"),
            "handed": lambda: say("impostor.handed"),
        }
        return (say("impostor.name"), *(fact.head() for fact in self.facts), *(heads[unit]() for unit in self.units))

    def __str__(self) -> str:
        table = [self.columns, *self.symptoms]
        widths = [max(len(row[n]) for row in table) for n in range(len(self.columns))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        head = el("tr", *(el("th", escape(c), scope="col") for c in self.columns))
        named = [zip(self.columns, row, strict=True) for row in self.symptoms]  # heads again, for a narrow page
        body = [el("tr", *(el("td", escape(c), data_head=name) for name, c in row)) for row in named]
        table = el("div", el("table", el("thead", head), el("tbody", *body)), class_="lk-lineup")
        told = say("impostor.title", exercise=self.exercise.name)
        title = el("p", escape(say("impostor.on", title=told, case=self.where(self.case)) if self.where else told),
                   class_="lk-title")  # fmt: skip
        return {
            "text/html": el("div", el("style", style("impostors")), title, table, class_="lk"),
            "text/plain": str(self),
        }


def impostors(chapter: str) -> Lineup:
    """The line-up of a chapter.

    Raises:
        ValueError: The chapter has none.
    """
    if chapter not in LINEUPS:
        raise ValueError(f"chapter {chapter!r} has no impostors: expected one of {', '.join(LINEUPS)}")
    return importlib.import_module(LINEUPS[chapter]).LINEUP
