"""`show.memory`: who holds which bytes, against what a card has; `show.memory_settings`: one setting after another."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.guesses import guess as noted
from labkit.show.guesses import guessed
from labkit.show.held import (
    LETTER_OF,
    Row,
    Rows,
    Unit,
    delta,
    largest,
    matching,
    name_of,
    pieces,
    read,
    sentence,
    total,
)
from labkit.show.memorybars import Axis, Chart, View
from labkit.show.words import say

WHERE = ("measured", "computed")
MARGIN = 1.15  #: how far the axis reaches beyond the line of the card, where no bar is longer


class MemoryFigure(Figure):
    """A figure whose numbers may be `computed`: by a formula, without a run."""

    computed = False

    @property
    def origin(self) -> str:
        return say("memory.computed") if self.computed else super().origin


def memory(
    rows: Rows,
    *,
    capacity: float | None = None,
    ghost: Rows | None = None,
    predicted: Rows | None = None,
    guess: str | None = None,
    axis_to: float | None = None,
    title: str | None = None,
    where: str = "measured",
) -> Figure:
    """Draw what each rank holds as a bar of parts: P parameters, G gradients, O optimizer, A activations, b buffers.

    O is the master copy, the moments and the step counters together. Numbers are in one unit, a power of 1000, chosen
    once for the picture.

    Args:
        rows: Label ("rank 0", or a setting: "plain", "ZeRO-1") → bytes by category, as `MemoryMeter.held` gives them.
            Categories: parameters, gradients, master, optimizer, steps, activations, buffers, other.
        capacity: Bytes of a card, drawn as a line; what lies beyond is hatched.
        ghost: What the rows held in the setting before, drawn as an outline; a single row may stand for all.
        predicted: What they were to hold: a tick where each part was to end, and the difference to the byte.
        guess: The key of a `show.predict`, drawn as a dashed line.
        axis_to: Bytes at which the axis ends. Give the same to pictures that are compared: then a better setting looks
            better. A bar that is longer is torn off there. Left out, the axis holds everything in this picture.
        title: The finding; left out, it says whether all fits, and which part is the most.
        where: ``"measured"``, or ``"computed"`` by a formula.

    Raises:
        TypeError: something is no mapping, or no number.
        ValueError: a category or label is unknown, a number is negative or not finite, or `where` is unknown.

    >>> seven = {"plain": {"parameters": 14e9, "gradients": 14e9, "master": 28e9, "optimizer": 56e9}}
    >>> print(memory(seven, capacity=80e9, where="computed"))
    112 of 80 GB: does not fit; the optimizer is 84 [computed]
      plain · P parameters 14 GB · G gradients 14 GB · O master copy 28 GB · O moments 56 GB · in all 112 GB

    Source: the 16 bytes a parameter of mixed-precision Adam: Rajbhandari et al., "ZeRO" (2020), section 3.1.
    """
    found = read("rows", rows)
    chart = Chart(found, matching("ghost", ghost, found), matching("predicted", predicted, found))
    axis = _axis([chart], capacity, axis_to, guess)
    finding = sentence(found, axis.capacity, axis.unit) if title is None else title
    return _figure([chart], axis, finding, where, guess, says=())


def memory_settings(
    settings: Mapping[str, Rows],
    *,
    capacity: float | None = None,
    guess: str | None = None,
    axis_to: float | None = None,
    title: str | None = None,
    where: str = "measured",
) -> Figure:
    """Step through settings on one axis, each with the one before as its ghost, and all of them small below.

    Args:
        settings: Name → rows, as `memory` takes them.
        capacity, guess, axis_to, title, where: As in `memory`.

    Returns:
        A figure that steps with the arrow keys; without a kernel it shows the last setting.

    Raises:
        TypeError, ValueError: As `memory`; or there is no setting.

    >>> rows = {"plain": {"rank 0": {"parameters": 8}}, "half": {"rank 0": {"parameters": 4}}}
    >>> print(memory_settings(rows, capacity=6))
    half is the first of 2 settings to fit in 6 B: it holds 4 B [measured]
      Dashed outline: the setting before.
      plain · rank 0 · P parameters 8 B · in all 8 B
      half · rank 0 · P parameters 4 B · in all 4 B · before 8 B
    """
    if not isinstance(settings, Mapping) or not settings:
        raise TypeError(f"settings is {settings!r}: expected name → rows, at least one")
    charts: list[Chart] = []
    for name, rows in settings.items():
        found = read(f"settings[{name!r}]", rows)
        before = charts[-1].rows if charts else {}
        charts.append(Chart(found, {k: v for k, v in before.items() if k in found}, {}, str(name)))
    axis = _axis(charts, capacity, axis_to, guess)
    says = [say("memory.named", name=c.name, said=sentence(c.rows, axis.capacity, axis.unit)) for c in charts]
    return _figure(charts, axis, title or _settings_finding(charts, axis), where, guess, says)


def _figure(
    charts: list[Chart], axis: Axis, title: str, where: str, guess: str | None, says: list[str] | tuple[str, ...]
) -> Figure:
    check_where(where)
    views: dict[int, View] = {}

    def draw(width: int, frame: int | None) -> Drawing:
        if width not in views:
            views[width] = View(charts, axis, width)
        return views[width].draw(len(charts) - 1 if frame is None else frame)

    notes = _notes(charts, guess)
    figure = MemoryFigure(title, draw, _twin(charts, axis), notes=notes, says=says, sheets=("bars", "memory"))
    figure.computed = where == "computed"
    return figure


def _axis(charts: list[Chart], capacity: Any, axis_to: Any, guess: str | None) -> Axis:
    card = None if capacity is None else number("capacity", capacity)
    longest = largest(row for chart in charts for row in chart.every)
    own = guessed(guess, "B") if guess is not None else None
    end = number("axis_to", axis_to) if axis_to is not None else max(longest, MARGIN * (card or 0)) or 1.0
    if axis_to is None and own is not None and own <= 2 * end:
        end = max(end, own)
    return Axis(end, Unit.of(max(end, card or 0)), card, own)


def check_where(where: object) -> None:
    """
    Raises:
        ValueError: `where` is unknown.
    """
    if where not in WHERE:
        raise ValueError(f"where is {where!r}: expected one of {', '.join(WHERE)}")


def number(name: str, value: Any) -> float:
    """
    Raises:
        TypeError, ValueError: it is no number of bytes above 0.
    """
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {value!r}: expected a number of bytes, such as 80e9")
    if not isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}: expected a finite number of bytes above 0, such as 80e9")
    return float(value)


# What is written


def _settings_finding(charts: list[Chart], axis: Axis) -> str:
    """Which setting fits, or which holds least."""
    full = [largest(chart.rows.values()) for chart in charts]
    if axis.capacity is None:
        least = min(range(len(full)), key=lambda n: full[n])
        return say("memory.least", name=charts[least].name, size=axis.unit.told(full[least]),
                   most=axis.unit.told(max(full)))  # fmt: skip
    fitting = [n for n, size in enumerate(full) if size <= axis.capacity]
    card = axis.unit.told(axis.capacity)
    if not fitting:
        return say("memory.none_fits", n=len(full), capacity=card, size=axis.unit.told(min(full)))
    if len(fitting) == len(full):
        return say("memory.all_fit", n=len(full), capacity=card, size=axis.unit.told(max(full)))
    first = fitting[0]
    return say("memory.first_fits", name=charts[first].name, n=len(full), capacity=card,
               size=axis.unit.told(full[first]))  # fmt: skip


def _notes(charts: list[Chart], guess: str | None) -> list[str]:
    notes = []
    if any(chart.ghost for chart in charts):
        notes.append(say("memory.legend_ghost"))
    if any(chart.predicted for chart in charts):
        notes.append(say("memory.legend_predicted"))
    words = noted(guess) if guess is not None else None
    return [*notes, say("bars.word_guess", guess=words)] if isinstance(words, str) else notes


COLUMNS = ("memory.column_setting", "memory.column_row", "memory.column_part", "memory.column_size",
           "memory.column_predicted", "memory.column_delta", "memory.column_before")  # fmt: skip


def _twin(charts: list[Chart], axis: Axis) -> Table:
    rows: list[tuple[str, ...]] = []
    lines = []
    for chart in charts:
        for label, row in chart.rows.items():
            before, wanted = chart.ghost.get(label), chart.predicted.get(label)
            told = list(_told(row, before, wanted, axis.unit))
            rows += [(chart.name, label, *cells) for cells in told]
            lines.append(" · ".join([*([chart.name] if chart.name else []), label, *map(_line, told)]))
    return Table(tuple(say(key) for key in COLUMNS), rows, lines=lines)


def _told(row: Row, before: Row | None, wanted: Row | None, unit: Unit):
    """Cells of each category, and of the sum: part, size, predicted, difference, before."""
    have, was, want = pieces(row), pieces(before or ()), pieces(wanted or ())
    for category, letter in LETTER_OF.items():
        if category in have or category in was or category in want:
            name = say("memory.part", letter=letter, name=name_of(category))
            yield _cells(name, have.get(category, 0), before is not None and was.get(category, 0),
                         wanted is not None and want.get(category, 0), unit)  # fmt: skip
    yield _cells(say("memory.all"), total(row), before is not None and total(before),
                 wanted is not None and total(wanted), unit)  # fmt: skip


def _cells(name: str, n: float, before: float | bool, wanted: float | bool, unit: Unit) -> tuple[str, ...]:
    """``False`` where there is nothing to compare with."""
    told, apart = ("", "") if wanted is False else (unit.told(wanted), delta(n, wanted))
    return name, unit.told(n), told, apart, "" if before is False else unit.told(before)


def _line(cells: tuple[str, ...]) -> str:
    name, size, wanted, apart, before = cells
    words = f"{name} {size}"
    if wanted:
        words = f"{words} {apart}"
    if before and name == say("memory.all"):
        words = f"{words} · {say('memory.before', size=before)}"
    return words
