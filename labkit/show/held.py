"""What a row of `show.memory` holds: bytes by category, gathered into the parts that have a letter.

>>> row = read("rows", {"plain": {"parameters": 14e9, "master": 28e9, "optimizer": 56e9}})["plain"]
>>> [(part.letter, part.nbytes) for part in row]
[('P', 14000000000.0), ('O', 84000000000.0)]
>>> Unit.of(112e9).told(84e9)
'84 GB'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from labkit.show.words import say

#: Letter → the categories of `labkit.memory` in it, and its colour's class. The order of both is that of the bar.
LETTERS = {
    "P": ("parameters",),
    "G": ("gradients",),
    "O": ("master", "optimizer", "steps"),
    "A": ("activations",),
    "b": ("buffers",),
    "x": ("other",),
}
LETTER_OF = {category: letter for letter, categories in LETTERS.items() for category in categories}
NAMES = {
    "parameters": "memory.parameters",
    "gradients": "memory.gradients",
    "master": "memory.master",
    "optimizer": "memory.optimizer",
    "steps": "memory.steps",
    "activations": "memory.activations",
    "buffers": "memory.buffers",
    "other": "memory.other",
}
IN_KEY = {"P": "memory.parameters", "G": "memory.gradients", "O": "memory.key_optimizer",
          "A": "memory.activations", "b": "memory.buffers", "x": "memory.other"}  # fmt: skip

Rows = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Part:
    """A letter of a row, and the bytes of its categories; those that hold nothing are left out."""

    letter: str
    pieces: tuple[tuple[str, float], ...]

    @property
    def nbytes(self) -> float:
        return sum(n for _, n in self.pieces)


Row = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """The one unit of a picture, a power of 1000."""

    scale: float
    name: str

    @classmethod
    def of(cls, largest: float) -> Unit:
        """The largest in which `largest` is 1 or more; of MB and KB 10 or more, so that few parts are 0.01 of one."""
        scales = ((1e9, 1e9, "GB"), (1e7, 1e6, "MB"), (1e4, 1e3, "KB"))
        return next((cls(scale, name) for least, scale, name in scales if largest >= least), cls(1, "B"))

    def tell(self, nbytes: float) -> str:
        """Three digits, without the unit."""
        value = nbytes / self.scale
        if 0 < value < 0.01:
            return "<0.01"
        return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"

    def told(self, nbytes: float) -> str:
        """Three digits and the unit."""
        return f"{self.tell(nbytes)} {self.name}"


def read(name: str, rows: Any) -> dict[str, Row]:
    """The rows as parts, in the order of `LETTERS`.

    Raises:
        TypeError: `rows` is no mapping of mappings of numbers.
        ValueError: it is empty, a category is unknown, or a number is negative or not finite.
    """
    if not isinstance(rows, Mapping) or not all(isinstance(k, str) for k in rows):
        raise TypeError(f"{name} is {rows!r}: expected label → bytes by category, such as {{'rank 0': meter.held()}}")
    if not rows:
        raise ValueError(f"{name} is empty: expected at least one label with its bytes by category")
    return {label: _row(name, label, held) for label, held in rows.items()}


def held_of(name: str, label: object, held: Any) -> dict[str, float]:
    """Bytes by category, all checked, in the order of `LETTERS`; what holds nothing is left out."""
    if not isinstance(held, Mapping):
        raise TypeError(f"{name} has {held!r} for {label!r}: expected category → bytes, such as {{'parameters': 8}}")
    for category, n in held.items():
        if category not in LETTER_OF:
            raise ValueError(f"{name} has {category!r} for {label!r}: expected one of {', '.join(LETTER_OF)}")
        if isinstance(n, (bool, str)) or not hasattr(n, "__float__"):
            raise TypeError(f"{name} has {n!r} as {category} of {label!r}: expected a number of bytes")
        if not isfinite(n) or n < 0:
            raise ValueError(f"{name} has {n!r} as {category} of {label!r}: expected a finite number, 0 or more")
    return {category: held[category] for category in LETTER_OF if held.get(category)}


def _row(name: str, label: str, held: Any) -> Row:
    found = held_of(name, label, held)
    parts = ((letter, tuple((c, found[c]) for c in categories if c in found)) for letter, categories in LETTERS.items())
    return tuple(Part(letter, pieces) for letter, pieces in parts if pieces)


def total(row: Row) -> float:
    return sum(part.nbytes for part in row)


def pieces(row: Row) -> dict[str, float]:
    """Category → bytes."""
    return {category: n for part in row for category, n in part.pieces}


def largest(rows: Iterable[Row]) -> float:
    return max(map(total, rows), default=0)


def matching(name: str, given: Any, rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows that go with `rows`, label by label; a single one may stand for all.

    Raises:
        TypeError, ValueError: As `read`; or a label is none of the rows'.
    """
    if given is None:
        return {}
    found = read(name, given)
    if odd := [label for label in found if label not in rows]:
        if len(found) == 1:
            return dict.fromkeys(rows, found[odd[0]])
        raise ValueError(f"{name} has {odd[0]!r}, but the rows are {', '.join(rows)}: expected labels of the rows")
    return found


# What is written


def delta(measured: float, predicted: float) -> str:
    """The difference, to the byte."""
    apart = measured - predicted
    sign = "+" if apart > 0 else "−" if apart < 0 else ""
    size = f"{abs(apart):,.1f}".removesuffix(".0")
    return say("memory.delta", delta=f"{sign}{size}")


def deltas(row: Row, predicted: Row) -> list[tuple[str, str]]:
    """(category, difference) of each category that is not as predicted."""
    have, want = pieces(row), pieces(predicted)
    return [(c, delta(have.get(c, 0), want.get(c, 0))) for c in LETTER_OF if have.get(c, 0) != want.get(c, 0)]


def sentence(rows: Mapping[str, Row], capacity: float | None, unit: Unit) -> str:
    """Whether it fits, and which letter is the most: "112 of 80 GB: does not fit; the optimizer is 84"."""
    label = max(rows, key=lambda name: total(rows[name]))
    full = total(rows[label])
    if not full:
        return say("memory.nothing")
    one = len({total(row) for row in rows.values()}) == 1
    whole = unit.told(full) if capacity is None else say("memory.of", part=unit.tell(full), whole=unit.told(capacity))
    told = whole if one else say("memory.fullest", label=label, size=whole)
    if capacity is None:
        return say("memory.holds", size=told, most=most(rows[label], unit))
    fitting = sum(total(row) <= capacity for row in rows.values())
    said = say("memory.fits" if fitting == len(rows) else "memory.over", size=told, most=most(rows[label], unit))
    return said if fitting in (0, len(rows)) else say("memory.some_fit", said=said, n=fitting, rows=len(rows))


def name_of(category: str) -> str:
    key = NAMES[category]
    return say(key)


def meaning(letter: str) -> str:
    """What a letter stands for."""
    key = IN_KEY[letter]
    return say(key)


def most(row: Row, unit: Unit) -> str:
    """The largest part of a row, as a clause."""
    part = max(row, key=lambda p: p.nbytes)
    size = unit.tell(part.nbytes)
    if part.letter == "O":
        return say("memory.most_optimizer", size=size)
    return say("memory.most", part=meaning(part.letter), size=size)
