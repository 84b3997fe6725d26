"""Horizontal bars on one axis, with lines across them: a ceiling, a guess. What lies beyond the ceiling is marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.show.figure import WIDE, Drawing
from labkit.show.quantity import marks, told
from labkit.show.svg import el, fit, num, text, text_width, wrap
from labkit.show.words import say

LINE = 16  #: from one line of text to the next


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        value: Its length.
        name: What stands before it, such as a rank's number; may be empty.
        words: What stands behind it; may be empty.
        tick: Where a mark crosses it (the prediction), or ``None``.
        strong: Whether it is the one to look at.
    """

    value: float
    name: str = ""
    words: str = ""
    tick: float | None = None
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """The bars under one label, and the guess that belongs to them alone."""

    label: str
    bars: tuple[Bar, ...]
    guess: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """All that the picture shows.

    Attributes:
        groups: From top to bottom.
        unit: Of all numbers.
        top: Where the axis ends.
        ceiling: A named line across all bars.
        guess: The learner's own line across all bars.
        pitch: From one bar to the next.
    """

    groups: tuple[Group, ...]
    unit: str
    top: float
    ceiling: tuple[str, float] | None
    guess: float | None
    pitch: float

    @property
    def words(self) -> list[str]:
        return [bar.words for group in self.groups for bar in group.bars]


class View:
    """A chart in one layout: in the wide one labels stand before their bars, in the narrow one above them."""

    def __init__(self, chart: Chart, width: float) -> None:
        self.chart, self.width, self.wide = chart, width, width >= WIDE
        self.size = 13 if self.wide else 12
        names = max((text_width(b.name, 12) for g in chart.groups for b in g.bars), default=0)
        names = names + 8 if names else 0
        label = max(text_width(g.label, self.size) for g in chart.groups)
        self.label = min(label, 200) + 14 if self.wide else 0
        behind = max(text_width(w, self.size) for w in chart.words) + 12
        #: Whether words stand behind their bars, or above them with the label.
        self.behind = self.wide or behind < 0.45 * width
        self.left = 4 + self.label + names
        self.right = width - (behind if self.behind else 0) - 8
        self.scale = (self.right - self.left) / (chart.top or 1.0)
        self.spans: list[tuple[float, float]] = []  #: of the bars that have been drawn, from top to bottom

    def at(self, value: float) -> float:
        return self.left + value * self.scale

    def draw(self) -> Drawing:
        c, y = self.chart, 4.0
        heads = [line for line in self._lines() if line[1]]
        top = y + LINE * len(heads) + 4
        parts, y = [], top + 4
        for group in c.groups:
            drawn, y = self._group(group, y)
            parts += drawn
            y += 12
        bottom = y - 4
        grid = [el("path", d=self._across(self.at(m), top, bottom)) for m in marks(c.top, c.unit, self._most())]
        under = [el("g", *grid, class_="lk-marks"), *self._axis(bottom)]
        parts = [*under, *parts, *self._heads(heads, bottom)]
        parts.sort(key=lambda part: part.startswith("<text"))  # words last, so that no line strikes them through
        return Drawing(self.width, bottom + 22, tuple(parts))

    def _most(self) -> int:
        return 6 if self.wide else 3

    def _axis(self, bottom: float) -> Iterator[str]:
        for mark in marks(self.chart.top, self.chart.unit, self._most()):
            words = told(mark, self.chart.unit)
            half = text_width(words, 12) / 2
            x = max(half, min(self.at(mark), self.width - half))
            yield text(x, bottom + 16, words, 12, "middle", "lk-soft")

    # Lines across

    def _lines(self) -> list[tuple[float, str, str]]:
        """Where, what is written, and how it looks."""
        c, lines = self.chart, []
        if c.ceiling is not None:
            name, value = c.ceiling
            lines.append((value, say("bars.ceiling", name=name, value=told(value, c.unit)), "lk-ceiling"))
        if c.guess is not None:
            key = "bars.guess" if c.guess <= c.top else "bars.guess_beyond"
            lines.append((min(c.guess, c.top), say(key, value=told(c.guess, c.unit)), "lk-guess"))
        return lines

    def _across(self, x: float, top: float, bottom: float) -> str:
        """A line from top to bottom; where words stand above their bars it leaves them out."""
        ends = [(top, bottom)] if self.wide else [(a - 4, b + 1) for a, b in self.spans]
        return "".join(f"M{num(x)} {num(a)}V{num(b)}" for a, b in ends)

    def _heads(self, lines: list[tuple[float, str, str]], bottom: float) -> Iterator[str]:
        for n, (value, words, cls) in enumerate(lines):
            x, y = self.at(value), 4 + LINE * n
            half = text_width(words, self.size) / 2
            yield el("path", d=self._across(x, y + LINE, bottom), class_=f"lk-line {cls}")
            middle = max(half + 2, min(x, self.width - half - 2))
            yield text(middle, y + 12, words, self.size, "middle", cls)

    # Bars

    def _group(self, group: Group, y: float) -> tuple[list[str], float]:
        pitch, parts, start = self.chart.pitch, [], y
        words = [bar.words for bar in group.bars if bar.words]
        above = words if not self.behind and len(words) == 1 else []
        if not self.wide:
            for line in wrap(" · ".join([group.label, *above]), self.width - 8, self.size):
                parts.append(text(4, y + 12, line, self.size))
                y += LINE
            y += 3
        else:
            middle = y + pitch * len(group.bars) / 2 + 4.5
            parts.append(text(4, max(middle, y + 12), fit(group.label, self.label - 8, self.size), self.size))
        for bar in group.bars:
            parts += self._bar(bar, y)
            self.spans.append((y, y + pitch))
            y += pitch
            if bar.words and not self.behind and not above:
                parts.append(text(self.left, y + 11, bar.words, self.size))
                y += LINE
        y = max(y, start + LINE)
        if group.guess is not None:
            x = self.at(min(group.guess, self.chart.top))
            parts.append(el("path", d=f"M{num(x)} {num(start if self.wide else y - pitch - 4)}V{num(y + 4)}",
                            class_="lk-line lk-guess"))  # fmt: skip
        return parts, y

    def _bar(self, bar: Bar, y: float) -> Iterator[str]:
        thick = self.chart.pitch - (2 if self.chart.pitch < 12 else 5)
        limit = self.chart.ceiling[1] if self.chart.ceiling else bar.value
        within, end = self.at(min(bar.value, limit)), self.at(bar.value)
        middle = y + self.chart.pitch / 2
        cls = "lk-bar lk-strong" if bar.strong else "lk-bar"
        body = [el("rect", x=self.left, y=middle - thick / 2, width=max(within - self.left, 1), height=thick)]
        if end > within:
            body.append(el("rect", x=within, y=middle - thick / 2, width=end - within, height=thick, class_="lk-over"))
        yield el("g", *body, class_=cls)
        if bar.name:
            yield text(self.left - 6, middle + 4.5, bar.name, 12, "end", "lk-soft")
        if bar.tick is not None:
            x = self.at(bar.tick)
            yield el("path", d=f"M{num(x)} {num(middle - thick / 2 - 4)}v{num(thick + 8)}", class_="lk-predicted")
        if bar.words and self.behind:
            yield text(self.right + 12, middle + 4.5, bar.words, self.size)


def axis_top(values: Sequence[float], ceiling: float | None, guess: float | None, axis_max: float | None) -> float:
    """Where the axis ends: it holds all values and the ceiling, and the guess unless that is far off.

    Raises:
        ValueError: `axis_max` would cut something.
    """
    top = max([*values, ceiling or 0.0])
    if axis_max is not None:
        if axis_max < top:
            raise ValueError(f"axis_max is {axis_max:g}, but there is {top:g} to show: expected at least that")
        return axis_max
    return max(top, guess) if guess is not None and guess <= 2 * top else top
