"""A verdict: what was seen, in a few lines. Never how to repair it, and never anything that depends on time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.progress import ORDER
from labkit.show.figure import style
from labkit.show.svg import el, escape
from labkit.show.words import say

#: Kind → its sign, in the order in which progress is made.
SIGNS = dict(zip(ORDER, "·✗∞✗✗△✓", strict=True))


@dataclass(frozen=True, eq=False)
class Verdict:
    """What `labkit.check` found.

    Attributes:
        exercise: Name of the exercise.
        kind: ``"not_attempted"``, ``"crashed"``, ``"deadlocked"``, ``"wrong"``, ``"borrowed"``, ``"wasteful"`` (right,
            but over the budget) or ``"right"``.
        where: The case, such as "world 3, 5 elements".
        lines: What was seen.
        picture: The learner's own run, a `labkit.show.Figure`, or ``None``.
        named: What the kind is called, where its own name would say too much: of ranks that did not finish, but of
            which no one waited in vain.
    """

    exercise: str
    kind: str
    where: str = ""
    lines: tuple[str, ...] = ()
    picture: Any = None
    named: str = ""

    def __post_init__(self) -> None:
        assert self.kind in SIGNS

    @property
    def right(self) -> bool:
        return self.kind == "right"

    @property
    def head(self) -> str:
        named = self.named or kind_in_words(self.kind)
        return " · ".join(part for part in (f"{SIGNS[self.kind]} {named}", self.exercise, self.where) if part)

    def __str__(self) -> str:
        return "\n".join([self.head, *(f"  {line}" for line in self.lines)])

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        picture = self.picture._repr_mimebundle_()["text/html"] if self.picture is not None else ""
        body = el("pre", escape("\n".join(self.lines)), style="margin:2px 0 6px") if self.lines else ""
        html = el("div", el("style", style()), el("p", escape(self.head), class_="lk-title"), body, class_="lk")
        return {"text/html": html + picture, "text/plain": str(self)}


def kind_in_words(kind: str) -> str:
    """A kind of verdict as the learner reads it."""
    return {
        "not_attempted": lambda: say("verdict.not_attempted"),
        "crashed": lambda: say("verdict.crashed"),
        "deadlocked": lambda: say("verdict.deadlocked"),
        "wrong": lambda: say("verdict.wrong"),
        "borrowed": lambda: say("verdict.borrowed"),
        "wasteful": lambda: say("verdict.wasteful"),
        "right": lambda: say("verdict.right"),
    }[kind]()
