"""`show.memory_timeline`: what a rank holds from one event to the next, its parts stacked, and where the peak is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from labkit.show.figure import WIDE, Drawing, Figure, Table
from labkit.show.held import LETTERS, Row, Unit, held_of, meaning, most, read, total
from labkit.show.memorybars import hatch, key
from labkit.show.memoryfigure import MARGIN, MemoryFigure, check_where, number
from labkit.show.quantity import marks
from labkit.show.svg import el, fit, num, text, text_width
from labkit.show.words import say

MOST = 500  #: points drawn; of more, the highest of neighbours stands for them
HEIGHT = 230
HEADROOM = 26  #: above the highest point, for its words


@dataclass(frozen=True, slots=True)
class Point:
    """What is held after an event: in which training step and phase, by part, and its number among all."""

    step: int
    phase: str
    row: Row
    number: int

    @property
    def total(self) -> float:
        return total(self.row)

    def of(self, letter: str) -> float:
        return next((part.nbytes for part in self.row if part.letter == letter), 0)


def memory_timeline(
    samples: Sequence[tuple[int, str, Any]],
    *,
    capacity: float | None = None,
    at: str | None = None,
    axis_to: float | None = None,
    title: str | None = None,
    where: str = "measured",
) -> Figure:
    """Draw what a rank holds over a step, P G O A stacked, with its phases and its peak.

    Along the picture runs the order of events, not time: each change is as wide as any other.

    Args:
        samples: (training step, phase, bytes by category) after each event, as `MemoryMeter.samples` gives them.
            Phases are drawn as they are called: "forward", "backward", "step"; ``None``: outside all of them.
        at: What happened at the peak, such as a layer's name; drawn beside it.
        capacity: Bytes of a card, drawn as a line.
        axis_to: Bytes at which the axis ends, to compare pictures; left out, it holds everything.
        title: The finding; left out, it says where the peak is and what it is made of.
        where: ``"measured"`` or ``"computed"``.

    Raises:
        TypeError: `samples` is no list of (step, phase, bytes by category).
        ValueError: it is empty, a category is unknown, or `axis_to` would cut the peak off.

    >>> held = [{"parameters": 4}, {"parameters": 4, "activations": 6}, {"parameters": 4, "gradients": 4}]
    >>> print(memory_timeline([(0, "forward", held[0]), (0, "forward", held[1]), (0, "backward", held[2])]))
    The peak is in forward: 10 B; most is activations, 6 [measured]
      step 0, forward: 4 B at first, at most 10 B, 10 B at the end
      step 0, backward: 8 B at first, at most 8 B, 8 B at the end
    """
    check_where(where)
    points = _points(samples)
    peak = max(points, key=lambda p: p.total)
    card = None if capacity is None else number("capacity", capacity)
    top = max(peak.total, MARGIN * (card or 0)) or 1.0
    if axis_to is not None:
        if number("axis_to", axis_to) < peak.total:
            raise ValueError(f"axis_to is {axis_to:g}, but the peak is {peak.total:g}: expected at least that")
        top = float(axis_to)
    unit = Unit.of(max(top, card or 0))
    drawn = _thin(points)

    def draw(width: int, frame: int | None) -> Drawing:
        return View(drawn, peak, at, top, unit, card, width).draw()

    notes = [say("memory.thinned", shown=len(drawn), all=f"{len(points):,}")] if len(drawn) < len(points) else []
    found = _finding(peak, card, unit) if title is None else title
    figure = MemoryFigure(found, draw, _twin(points, unit), notes=notes, sheets=("bars", "memory"))
    figure.computed = where == "computed"
    return figure


def _points(samples: Any) -> list[Point]:
    """The samples, checked; equal neighbours once."""
    if not isinstance(samples, (list, tuple)):
        raise TypeError(f"samples is {samples!r}: expected a list of (step, phase, bytes by category)")
    if not samples:
        raise ValueError("samples is empty: expected (step, phase, bytes by category) of at least one event")
    points: list[Point] = []
    for n, sample in enumerate(samples):
        if not isinstance(sample, (list, tuple)) or len(sample) != 3:
            raise TypeError(f"samples[{n}] is {sample!r}: expected (step, phase, bytes by category)")
        step, phase, held = sample[0], sample[1] or "", sample[2]
        row = read("samples", {str(n): held_of("samples", n, held)})[str(n)]
        if not points or (points[-1].step, points[-1].phase, points[-1].row) != (step, phase, row):
            points.append(Point(step, phase, row, len(points) + 1))
    return points


def _thin(points: list[Point]) -> list[Point]:
    """At most `MOST` points: the highest of neighbours that share their phase."""
    size = -(-len(points) // MOST)
    if size == 1:
        return points
    spans = (list(group) for _, group in groupby(points, key=lambda p: (p.step, p.phase)))
    return [max(span[n : n + size], key=lambda p: p.total) for span in spans for n in range(0, len(span), size)]


# What is written


def _finding(peak: Point, capacity: float | None, unit: Unit) -> str:
    if not peak.total:
        return say("memory.nothing")
    phase = peak.phase or say("memory.no_phase")
    if capacity is None:
        return say("memory.peak_title", phase=phase, size=unit.told(peak.total), most=most(peak.row, unit))
    size = say("memory.of", part=unit.tell(peak.total), whole=unit.told(capacity))
    verdict = say("memory.verdict_fits" if peak.total <= capacity else "memory.verdict_over")
    return say("memory.peak_of", phase=phase, size=size, verdict=verdict, most=most(peak.row, unit))


def _twin(points: list[Point], unit: Unit) -> Table:
    letters = [letter for letter in LETTERS if any(p.of(letter) for p in points)]
    names = [say("memory.part", letter=letter, name=meaning(letter)) for letter in letters]
    head = say("memory.column_point"), say("memory.column_step"), say("memory.column_phase")
    rows = [
        (str(p.number), str(p.step), p.phase, *(unit.told(p.of(letter)) for letter in letters), unit.told(p.total))
        for p in points
    ]
    lines = []
    for (step, phase), group in groupby(points, key=lambda p: (p.step, p.phase)):
        span = [p.total for p in group]
        first, highest, last = (unit.told(n) for n in (span[0], max(span), span[-1]))
        name = phase or say("memory.no_phase")
        lines.append(say("memory.line_phase", step=step, phase=name, first=first, most=highest, last=last))
    return Table((*head, *names, say("memory.all")), rows, lines=lines)


class View:
    """The stack in one layout: a column a point, parts from the bottom up in the order of their letters."""

    def __init__(
        self, points: list[Point], peak: Point, at: str | None, top: float, unit: Unit, capacity: float | None,
        width: float,
    ) -> None:  # fmt: skip
        self.points, self.peak, self.top, self.unit, self.capacity = points, peak, top, unit, capacity
        named = [word for word in (peak.phase, at) if word]
        self.words = ", ".join([say("memory.peak", size=unit.told(peak.total)), *named])
        self.width, self.wide = width, width >= WIDE
        self.size = 13 if self.wide else 12
        values = marks(top / unit.scale, "", 5)
        self.marks = [(v * unit.scale, f"{v:,.6g} {unit.name}" if v == values[-1] else f"{v:,.6g}") for v in values]
        self.left = 10 + max(text_width(words, 12) for _, words in self.marks)
        self.column = (width - 8 - self.left) / len(points)
        self.phases = self._spans(lambda p: (p.step, p.phase))
        self.steps = self._spans(lambda p: p.step) if len({p.step for p in points}) > 1 else []
        self.ceiling = 26.0 + (18 if self.steps else 0)
        self.floor = self.ceiling + HEADROOM + HEIGHT
        self.scale = HEIGHT / top

    def at(self, n: float) -> float:
        return self.left + n * self.column

    def height(self, nbytes: float) -> float:
        return self.floor - nbytes * self.scale

    def draw(self) -> Drawing:
        parts = [*self._grid(), *self._areas(), *self._phases(), *self._peak(), *self._card()]
        words = say("memory.order")
        parts.append(text(self.width - 8, self.floor + 16, words, 12, "end", "lk-soft"))
        letters = [letter for letter in LETTERS if any(p.of(letter) for p in self.points)]
        drawn, bottom = key(letters, 4, self.floor + 30, self.width - 8)
        parts += drawn
        parts.sort(key=lambda part: part.startswith("<text"))  # words last, so that no line strikes them through
        return Drawing(self.width, bottom, tuple(parts))

    def _spans(self, of: Any) -> list[tuple[Any, int, int]]:
        """Neighbours that share something: (what, first column, end)."""
        spans, start = [], 0
        for what, group in groupby(self.points, key=of):
            length = len(list(group))
            spans.append((what, start, start + length))
            start += length
        return spans

    def _grid(self) -> Iterator[str]:
        yield el("g", *(el("line", x1=self.left, y1=self.height(v), x2=self.width - 8, y2=self.height(v))
                        for v, _ in self.marks), class_="lk-marks")  # fmt: skip
        for value, words in self.marks:
            yield text(self.left - 6, self.height(value) + 4, words, 12, "end", "lk-soft")

    def _areas(self) -> Iterator[str]:
        low = [0.0] * len(self.points)
        for letter in LETTERS:
            high = [under + p.of(letter) for under, p in zip(low, self.points, strict=True)]
            if high != low:
                outline = f"M{num(self.left)} {num(self.height(low[0]))}{self._edge(high)}{self._edge(low, back=True)}z"
                yield el("g", el("path", d=outline, class_=f"lk-m{letter}"), class_="lk-part")
                if letter == "b":
                    yield el("g", el("path", d=self._hatching(low, high), class_="lk-hatch"), class_="lk-part")
                yield from self._letter(letter, low, high)
            low = high

    def _hatching(self, low: list[float], high: list[float]) -> str:
        """A box for each stretch that is level above and below."""
        lines, start = [], 0
        for (under, over), group in groupby(zip(low, high, strict=True)):
            length, y = len(list(group)), self.height(over)
            lines.append(hatch(self.at(start), y, length * self.column, self.height(under) - y, 5))
            start += length
        return "".join(lines) or f"M{num(self.left)} {num(self.floor)}"

    def _edge(self, values: list[float], back: bool = False) -> str:
        """Along the tops of the columns, or back along them."""
        places = [(n, v) for n, v in enumerate(values) if n == 0 or v != values[n - 1]]
        ends = [n for n, _ in places[1:]] + [len(values)]
        runs = [(self.at(n), self.at(end), self.height(v)) for (n, v), end in zip(places, ends, strict=True)]
        if back:
            return "".join(f"L{num(end)} {num(y)}H{num(start)}" for start, end, y in reversed(runs))
        return "".join(f"L{num(start)} {num(y)}H{num(end)}" for start, end, y in runs)

    def _letter(self, letter: str, low: list[float], high: list[float]) -> Iterator[str]:
        """In the longest stretch that is thick enough for it."""
        thick = [(b - a) * self.scale >= self.size + 3 for a, b in zip(low, high, strict=True)]
        runs, start = [], 0
        for fits, group in groupby(thick):
            length = len(list(group))
            runs += [(length, start)] if fits else []
            start += length
        length, start = max(runs, key=lambda run: run[0], default=(0, 0))
        if length * self.column < self.size + 3:
            return
        n = start + length // 2
        middle = self.height((low[n] + high[n]) / 2)
        yield text(self.at(start + length / 2 if length % 2 else n + 0.5), middle + 5, letter, self.size + 1, "middle",
                   "lk-in lk-big")  # fmt: skip

    def _phases(self) -> Iterator[str]:
        for n, (spans, y) in enumerate(((self.steps, 14.0), (self.phases, self.ceiling - 12))):
            for what, start, end in spans:
                x, room = self.at(start), (end - start) * self.column
                words = say("memory.step", step=what) if n == 0 else what[1]
                if start:
                    yield el("path", d=f"M{num(x)} {num(y - 12)}V{num(self.floor)}", class_="lk-phase")
                words = words if text_width(words, self.size) <= room - 4 else words[:1] if n else ""
                if words and text_width(words, self.size) <= room:
                    yield text(x + room / 2, y, words, self.size, "middle", "lk-soft")

    def _peak(self) -> Iterator[str]:
        n = next(n for n, p in enumerate(self.points) if p.number == self.peak.number)
        x, y = self.at(n + 0.5), self.height(self.peak.total)
        words = fit(self.words, self.width - 12 - self.left, self.size + 1)
        half = text_width(words, self.size + 1) / 2 + 2
        yield el("line", x1=x, y1=y, x2=x, y2=y - 8, class_="lk-peak")
        yield el("circle", cx=x, cy=y, r=4, class_="lk-dot")
        middle = max(self.left + half, min(x, self.width - 4 - half))
        yield text(middle, y - 12, words, self.size + 1, "middle", "lk-big")

    def _card(self) -> Iterator[str]:
        if self.capacity is None or self.capacity > self.top:
            return
        y = self.height(self.capacity)
        yield el("path", d=f"M{num(self.left)} {num(y)}H{num(self.width - 8)}", class_="lk-cap")
        words = say("memory.capacity", size=self.unit.told(self.capacity))
        yield text(self.left + 4, y - 6, words, self.size, None, "lk-big")
