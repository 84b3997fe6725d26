"""The bars of `show.memory` in one layout: parts with their letters, the line of the card, the setting before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from labkit.show.figure import WIDE, Drawing
from labkit.show.held import LETTERS, Part, Row, Unit, deltas, meaning, name_of, total
from labkit.show.lanes import solid
from labkit.show.quantity import marks
from labkit.show.svg import el, fit, num, text, text_width, wrap
from labkit.show.words import say

LINE = 16  #: from one line of text to the next
SMALL = 20  #: from one bar to the next where all settings are shown small
TALL, LOW = 40, 28  #: heights of a bar: of few rows, of many
FEW = 4


@dataclass(frozen=True, slots=True)
class Chart:
    """All that one picture shows; of several settings each has one, with the same `axis`.

    Attributes:
        rows: Label → what is held.
        ghost: What the rows held in the setting before.
        predicted: What they were to hold.
        name: Of the setting; empty when there is only one.
    """

    rows: Mapping[str, Row]
    ghost: Mapping[str, Row]
    predicted: Mapping[str, Row]
    name: str = ""

    @property
    def every(self) -> list[Row]:
        return [*self.rows.values(), *self.ghost.values(), *self.predicted.values()]


@dataclass(frozen=True, slots=True)
class Axis:
    """What all charts of a picture share: where the axis ends, its unit, and the lines across all bars.

    Attributes:
        top: In bytes; longer bars are torn off there.
        capacity: Of a card, in bytes.
        guess: The learner's own, in bytes.
    """

    top: float
    unit: Unit
    capacity: float | None = None
    guess: float | None = None


class View:
    """The charts of a picture in one layout: labels stand before their bars, or above them where it is narrow."""

    def __init__(self, charts: list[Chart], axis: Axis, width: float) -> None:
        self.charts, self.axis, self.width, self.wide = charts, axis, width, width >= WIDE
        self.size = 13 if self.wide else 12
        rows = [row for chart in charts for row in chart.rows.values()]
        most = max(len(chart.rows) for chart in charts)
        self.high = TALL if most <= FEW else LOW
        labels = [label for c in charts for label in (*c.rows, c.name)]
        self.label = min(max(text_width(label, self.size) for label in labels), 150) + 14 if self.wide else 0
        behind = max(text_width(w, 15 if n == 0 else self.size) for r in rows for n, w in enumerate(self._behind(r)))
        self.left, self.right = 4 + self.label, width - (behind + 22 if self.wide else 8)
        self.scale = (self.right - self.left) / (axis.top or 1.0)
        self.feet = [{label: self._foot(chart, label) for label in chart.rows} for chart in charts]
        letters = {part.letter for chart in charts for row in chart.every for part in row}
        self.letters = [letter for letter in LETTERS if letter in letters]
        #: So that no frame is higher than another.
        self.floor = max(self._rows_end(n) for n in range(len(charts)))

    def at(self, nbytes: float) -> float:
        return self.left + min(nbytes, self.axis.top) * self.scale

    def draw(self, frame: int) -> Drawing:
        chart, top = self.charts[frame], self._top()
        parts: list[str] = []
        if chart.name:
            where = say("memory.setting", name=chart.name, n=frame + 1, all=len(self.charts))
            parts.append(text(4, 16, fit(where, self.width - 8, 15), 15, cls="lk-big"))
        y = top + 10
        for label, row in chart.rows.items():
            drawn, y = self._row(chart, label, row, self.feet[frame][label], y)
            parts += drawn
        bottom = self.floor
        if len(self.charts) > 1:
            parts += self._overview(frame, bottom)
            bottom += self._overview_height()
        key, height = self._key(bottom + 30)
        under = self._axis_marks(top, bottom)
        over = [*self._heads(top, bottom), *key]
        every = [*under, *parts, *over]
        every.sort(key=lambda part: part.startswith("<text"))  # words last, so that no line strikes them through
        return Drawing(self.width, height, tuple(part for part in every if part))

    # Heights

    def _top(self) -> float:
        named = 24 if any(chart.name for chart in self.charts) else 0
        lines = (self.axis.capacity is not None) + (self.axis.guess is not None)
        return 4 + named + LINE * lines

    def _rows_end(self, n: int) -> float:
        heights = (self._row_height(self.feet[n][label]) for label in self.charts[n].rows)
        return self._top() + 10 + sum(heights)

    def _row_height(self, foot: list[str]) -> float:
        return self.high + LINE * len(foot) + (16 if self.wide else 24 + LINE)

    # One row

    def _behind(self, row: Row) -> list[str]:
        """What stands behind a bar: what it holds, and how much of the card that leaves."""
        unit, full, capacity = self.axis.unit, total(row), self.axis.capacity
        beyond = [say("memory.torn")] if full > self.axis.top else []
        whole = " ".join([unit.told(full), *beyond])
        if capacity is None:
            return [whole]
        if full > capacity:
            return [whole, say("memory.too_much", size=unit.tell(full - capacity))]
        return [whole, say("memory.free", size=unit.tell(capacity - full))]

    def _row(self, chart: Chart, label: str, row: Row, foot: list[str], y: float) -> tuple[list[str], float]:
        parts, start, behind = [], y, self._behind(row)
        if not self.wide:
            words = " · ".join(behind)
            parts.append(text(self.width - 4, y + 12, words, self.size, "end", "lk-big"))
            parts.append(
                text(4, y + 12, fit(label, self.width - 16 - text_width(words, self.size), self.size), self.size)
            )
            y += LINE + 6
        else:
            middle = y + self.high / 2 + 4.5
            parts.append(text(4, middle, fit(label, self.label - 8, self.size), self.size))
            first = middle if len(behind) == 1 else middle - 8
            parts.append(text(self.right + 14, first, behind[0], 15, cls="lk-big"))
            parts += [text(self.right + 14, first + 17, line, self.size) for line in behind[1:]]
        parts += self._card(y)
        parts += self._ghost(chart.ghost.get(label, ()), row, y)
        parts += self._bar(row, y)
        parts += self._ticks(row, chart.predicted.get(label), y)
        if self.axis.capacity is not None and self.axis.capacity <= self.axis.top:
            x = num(self.at(self.axis.capacity))
            parts.append(el("path", d=f"M{x} {num(y - 6)}v{num(self.high + 12)}", class_="lk-cap"))
        parts += [text(self.left, y + self.high + 20 + LINE * n, line, self.size, cls="lk-soft")
                  for n, line in enumerate(foot)]  # fmt: skip
        return parts, start + self._row_height(foot)

    def _bar(self, row: Row, y: float) -> Iterator[str]:
        end = 0.0
        for part in row:
            yield from self._part(part, end, y)
            end += part.nbytes
        capacity = self.axis.capacity
        if capacity is not None and end > capacity < self.axis.top:
            place = self.at(capacity), y, self.at(end) - self.at(capacity), self.high
            yield el("path", d=hatch(*place, 7), class_="lk-burst")
            yield el("rect", x=place[0], y=y, width=place[2], height=self.high, class_="lk-beyond")
        if end > self.axis.top:
            teeth = "".join(f"l{6 if n % 2 == 0 else -6} {num(self.high / 6)}" for n in range(6))
            yield el("path", d=f"M{num(self.right)} {num(y)}{teeth}h7V{num(y)}z", class_="lk-torn")
        yield from self._letters(row, y)

    def _part(self, part: Part, start: float, y: float) -> Iterator[str]:
        """The fill of a part, its outline, and the outlines of what it is made of."""
        x, end = self.at(start), self.at(start + part.nbytes)
        width = max(end - x, 0.8)
        if start >= self.axis.top:
            return
        body = [el("rect", x=x, y=y, width=width, height=self.high, class_=f"lk-m{part.letter}")]
        if part.letter == "b":
            body.append(el("path", d=hatch(x, y, width, self.high, 5), class_="lk-hatch"))
        if len(part.pieces) > 1:
            for place, width in self._pieces(part, start):
                if width > 5:
                    top, high = (y + 19, self.high - 22) if self.high == TALL else (y + 3, self.high - 6)
                    body.append(el("rect", x=place + 2, y=top, width=width - 4, height=high, class_="lk-sub"))
        yield el("g", *body, class_="lk-part")

    def _pieces(self, part: Part, start: float) -> Iterator[tuple[float, float]]:
        for _, n in part.pieces:
            x, start = self.at(start), start + n
            yield x, self.at(start) - x

    def _letters(self, row: Row, y: float) -> Iterator[str]:
        start = 0.0
        for part in row:
            left, width = self._clear(start, part.nbytes)
            words = self._inside(part, width)
            split = len(part.pieces) > 1 and self.high == TALL
            base = y + (15 if split else self.high / 2 + 5 - 8 * (len(words) - 1))
            inside = "lk-in lk-big" if not self._beyond(left) else "lk-big"
            for n, line in enumerate(words):
                yield text(left + width / 2, base + 16 * n, line, self.size + 1 - n, "middle", inside)
            for middle, told in self._told_pieces(part, start) if split else ():
                yield text(middle, y + self.high - 7, told, 12, "middle", "lk-in")
            start += part.nbytes

    def _beyond(self, x: float) -> bool:
        """Whether words here stand on the hatching beyond the card, where they need a halo."""
        return self.axis.capacity is not None and x >= self.at(self.axis.capacity)

    def _told_pieces(self, part: Part, start: float) -> Iterator[tuple[float, str]]:
        """The pieces of the optimizer that have room for their name: (middle, words)."""
        card = self.right if self.axis.capacity is None else self.at(self.axis.capacity)
        for (category, n), (x, width) in zip(part.pieces, self._pieces(part, start), strict=True):
            room = min(x + width, card) - x  # nothing so small is written over the hatching
            words = f"{name_of(category)} {self.axis.unit.tell(n)}"
            if text_width(words, 12) < room - 8:
                yield x + room / 2, words

    def _clear(self, start: float, nbytes: float) -> tuple[float, float]:
        """Where a part's letter stands: on the wider side of the line of the card."""
        return self._clear_between(self.at(start), self.at(start + nbytes))

    def _clear_between(self, x: float, end: float) -> tuple[float, float]:
        capacity = self.axis.capacity
        if capacity is not None and x < self.at(capacity) < end:
            line = self.at(capacity)
            x, end = (x, line) if line - x >= end - line else (line, end)
        return x, end - x

    def _inside(self, part: Part, width: float) -> list[str]:
        """A part's letter and number as they fit into it: side by side, below each other, or the letter alone."""
        size, number = self.size + 1, self.axis.unit.tell(part.nbytes)
        for words in (f"{part.letter} {self.axis.unit.told(part.nbytes)}", f"{part.letter} {number}"):
            if text_width(words, size) * 1.04 < width - 6:
                return [words]
        plain = len(part.pieces) == 1 or self.high < TALL
        if plain and self.high == TALL and text_width(number, size - 1) < width - 3:
            return [part.letter, number]
        return [part.letter] if text_width(part.letter, size) < width - 2 else []

    def _foot(self, chart: Chart, label: str) -> list[str]:
        """Under a bar: numbers that had no room in it, the setting before, and how far off the prediction was."""
        told, start = [], 0.0
        for part in chart.rows[label]:
            inside = self._inside(part, self._clear(start, part.nbytes)[1])
            start += part.nbytes
            if not any(char.isdigit() for char in "".join(inside)):
                told.append(f"{part.letter} {self.axis.unit.told(part.nbytes)}")
        if label in chart.ghost:
            told.append(say("memory.before", size=self.axis.unit.told(total(chart.ghost[label]))))
        if label in chart.predicted:
            off = deltas(chart.rows[label], chart.predicted[label])
            told += [f"{name_of(c)} {d}" for c, d in off] or [say("memory.exact")]
        room = (self.right if self.wide else self.width - 4) - self.left
        return wrap(" · ".join(map(solid, told)), room, self.size) if told else []

    # What was predicted, and what was before

    def _ticks(self, row: Row, predicted: Row | None, y: float) -> Iterator[str]:
        """A mark where each part was to end, counted from where it begins."""
        want = {part.letter: part.nbytes for part in predicted or ()}
        start = 0.0
        have = {part.letter: part.nbytes for part in row}
        for letter in LETTERS if predicted is not None else ():
            if letter in want and start + want[letter] <= self.axis.top:
                x = self.at(start + want[letter])
                stubs = (
                    f"M{num(x)} {num(y - 6)}v12M{num(x)} {num(y + self.high - 6)}v12"  # between them stands the number
                )
                yield el("path", d=stubs, class_="lk-predicted")
            start += have.get(letter, 0)

    def _ghost(self, before: Row, row: Row, y: float) -> Iterator[str]:
        """The outline of what was held before, with the letters of what is gone."""
        if not before:
            return
        end, now, start = self.at(total(before)), self.at(total(row)), 0.0
        yield el("rect", x=self.left, y=y - 4, width=max(end - self.left, 1), height=self.high + 8, class_="lk-ghost")
        for part in before:
            x, start = max(self.at(start), now), start + part.nbytes
            here = self.at(start)
            if here > now and here < end - 1:
                yield el("path", d=f"M{num(here)} {num(y - 4)}v{num(self.high + 8)}", class_="lk-ghost")
            left, width = self._clear_between(x, here)
            if width > 22:
                yield text(left + width / 2, y + self.high / 2 + 5, part.letter, self.size + 1, "middle", "lk-was")

    # Lines across, the axis, the key

    def _card(self, y: float) -> Iterator[str]:
        """Behind a bar: what lies beyond the card."""
        capacity = self.axis.capacity
        if capacity is None or capacity > self.axis.top:
            return
        x, end = self.at(capacity), self.right
        yield el("path", d=hatch(x, y - 6, end - x, self.high + 12, 7), class_="lk-zone")

    def _heads(self, top: float, bottom: float) -> Iterator[str]:
        lines = []
        if self.axis.capacity is not None:
            words = say("memory.capacity", size=self.axis.unit.told(self.axis.capacity))
            words = words if self.axis.capacity <= self.axis.top else f"{words} {say('memory.torn')}"
            lines.append((self.axis.capacity, words, "lk-card", "lk-big"))
        if self.axis.guess is not None:
            key = "bars.guess" if self.axis.guess <= self.axis.top else "bars.guess_beyond"
            words = say(key, value=self.axis.unit.told(self.axis.guess))
            lines.append((self.axis.guess, words, "lk-line lk-guess", "lk-guess"))
        for n, (value, words, look, cls) in enumerate(lines):
            x, y = self.at(value), top - LINE * (len(lines) - n)
            half = text_width(words, self.size) / 2 + 2
            yield el("path", d=f"M{num(x)} {num(y + LINE)}V{num(bottom)}", class_=look)
            yield text(max(half + 2, min(x, self.width - half - 2)), y + 12, words, self.size, "middle", cls)

    def _axis_marks(self, top: float, bottom: float) -> Iterator[str]:
        unit = self.axis.unit
        values = [m * unit.scale for m in marks(self.axis.top / unit.scale, "", 6 if self.wide else 3)]
        yield el("g", *(el("line", x1=self.at(v), y1=top, x2=self.at(v), y2=bottom) for v in values), class_="lk-marks")
        for value in values:
            words = f"{value / unit.scale:,.6g}"
            words = f"{words} {unit.name}" if value == values[-1] else words
            half = text_width(words, 12) / 2 + 2
            yield text(max(half, min(self.at(value), self.width - half)), bottom + 16, words, 12, "middle", "lk-soft")

    def _overview_height(self) -> float:
        return SMALL * len(self.charts) + 18 + (0 if self.wide else LINE * len(self.charts))

    def _overview(self, frame: int, y: float) -> Iterator[str]:
        """All settings small, each by its fullest row."""
        y += 12
        for n, chart in enumerate(self.charts):
            full = max(map(total, chart.rows.values()))
            cls = "lk-big" if n == frame else "lk-soft"
            if not self.wide:
                yield text(4, y + 12, fit(chart.name, self.width / 2, 12), 12, cls=cls)
                yield text(self.width - 4, y + 12, self.axis.unit.told(full), 12, "end", cls)
                y += LINE
            else:
                yield text(4, y + 14, fit(chart.name, self.label - 8, 12), 12, cls=cls)
                yield text(self.right + 14, y + 14, self.axis.unit.told(full), 12, cls=cls)
            bar = el("rect", x=self.left, y=y + 4, width=max(self.at(full) - self.left, 1), height=SMALL - 8)
            yield el("g", bar, class_=f"lk-small {'lk-strong' if n == frame else ''}".strip())
            y += SMALL

    def _key(self, y: float) -> tuple[list[str], float]:
        """What the letters stand for; and where the picture ends."""
        return key(self.letters, 4, y, self.width - 8)


def key(letters: list[str], left: float, y: float, room: float) -> tuple[list[str], float]:
    """A box a letter with what it stands for, in as many lines as needed; and where they end."""
    parts, x = [], left
    for letter in letters:
        words = meaning(letter)
        need = 30 + text_width(words, 12)
        if x > left and x + need > left + room:
            x, y = left, y + 24
        body = [el("rect", x=x, y=y, width=20, height=18, class_=f"lk-m{letter}")]
        if letter == "b":
            body.append(el("path", d=hatch(x, y, 20, 18, 5), class_="lk-hatch"))
        parts.append(el("g", *body, class_="lk-part"))
        parts.append(text(x + 10, y + 13.5, letter, 12, "middle", "lk-in lk-big"))
        parts.append(text(x + 26, y + 13.5, words, 12, None, "lk-soft"))
        x += need + 14
    return parts, y + 24


def hatch(x: float, y: float, width: float, height: float, apart: float) -> str:
    """Lines that rise to the right, over a box: a path, since patterns need ids.

    >>> hatch(0, 0, 4, 4, 4)
    'M0 4L4 0'
    """
    first = int((x + y) // apart) + 1
    lines = []
    for n in range(first, int((x + y + width + height - 1e-6) // apart) + 1):
        c = n * apart
        a, b = max(x, c - y - height), min(x + width, c - y)
        lines.append(f"M{num(a)} {num(c - a)}L{num(b)} {num(c - b)}")
    return "".join(lines)
