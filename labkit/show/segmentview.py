"""`show.segments` in one layout: the curve, the two parts of the chosen c, and the layers in their segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import sqrt

from labkit.show.figure import WIDE, Drawing
from labkit.show.held import Unit
from labkit.show.quantity import marks
from labkit.show.svg import el, fit, num, text, text_width, wrap
from labkit.show.words import count, say

LINE = 17
HEIGHT = 230  #: of the curve
STRIP = 26  #: height of the layers


@dataclass(frozen=True, slots=True)
class Chart:
    """All that the picture shows; numbers in bytes, or in what `unit` says.

    Attributes:
        held: c → what c segments hold, for every c from 1 to L.
        kept, inside: A_in and A_int of one layer.
        best: Where the least is if c may be any number.
        least: The c that holds least.
        measured: c → what was measured.
        top: Where the axis ends.
        capacity, guess: Lines across; the guess is a c.
    """

    held: Mapping[int, float]
    kept: float
    inside: float
    best: float
    least: int
    measured: Mapping[int, float]
    top: float
    unit: Unit
    capacity: float | None
    guess: float | None

    @property
    def layers(self) -> int:
        return len(self.held)

    @property
    def unit_of_one(self) -> str:
        """The unit of a number that is written in full."""
        return self.unit.name if self.unit.scale == 1 else "B"

    def inputs(self, c: int) -> float:
        return c * self.kept

    def longest(self, c: int) -> int:
        """Layers of the longest segment."""
        return -(-self.layers // c)

    def segments_words(self, c: int) -> str:
        return count("segments.segments", c)

    def layers_words(self, c: int) -> str:
        return count("segments.layers", self.longest(c))

    def sizes(self, c: int) -> list[int]:
        """Layers of each segment, as `labkit.tricks.checkpoint_sequential` cuts: longer ones last."""
        short, longer = divmod(self.layers, c)
        return [short] * (c - longer) + [short + 1] * longer


class View:
    """A column for each c; the parts that all frames share are made once."""

    def __init__(self, chart: Chart, width: float) -> None:
        self.chart, self.width, self.wide = chart, width, width >= WIDE
        self.size = 13 if self.wide else 12
        unit = chart.unit
        values = marks(chart.top / unit.scale, "", 4)
        self.marks = [(v * unit.scale, f"{v:,.6g} {unit.name}" if v == values[-1] else f"{v:,.6g}") for v in values]
        self.left = 10 + max(text_width(words, 12) for _, words in self.marks)
        self.right = width - (196 if self.wide else 68)
        self.bar, self.thick = self.right + (34 if self.wide else 24), 52 if self.wide else 36
        self.column = (self.right - self.left) / chart.layers
        self.heads = list(self._heads())
        self.ceiling = 10.0 + LINE * len(self.heads)
        self.floor = self.ceiling + HEIGHT
        self.strip = self.floor + (62 if self.wide else 94)

    def at(self, c: float) -> float:
        """The middle of a column."""
        return self.left + (c - 0.5) * self.column

    def level(self, held: float) -> float:
        return self.floor - min(held, self.chart.top) * HEIGHT / self.chart.top

    def draw(self, c: int) -> Drawing:
        shapes, words = self._still
        own = [*self._chosen(c), *self._beside(c), *self._layers(c)]
        own.sort(key=lambda part: part.startswith("<text"))  # words last, so that no line strikes them through
        return Drawing(self.width, self._bottom, (shapes, *own, words))

    # What all frames share

    @cached_property
    def _still(self) -> tuple[str, str]:
        """Shapes, and words."""
        parts = [*self._grid(), *self._areas(), *self._lines(), *self._points(), *self._key[0], self._cells()]
        words = [part for part in parts if part.startswith("<text")]
        return "".join(part for part in parts if part not in words), "".join(words)

    def _cells(self) -> str:
        """All layers, empty."""
        n, pitch = self.chart.layers, (self.width - 8) / self.chart.layers
        joints = "".join(f"M{num(4 + k * pitch)} {num(self.strip)}v{STRIP}" for k in range(1, n))
        frame = el("rect", x=4, y=self.strip, width=self.width - 8, height=STRIP, class_="lk-cells")
        return frame + el("path", d=joints, class_="lk-joint")

    def _grid(self) -> Iterator[str]:
        lines = (el("line", x1=self.left, y1=self.level(v), x2=self.right, y2=self.level(v)) for v, _ in self.marks)
        yield el("g", *lines, class_="lk-marks")
        for value, words in self.marks:
            yield text(self.left - 6, self.level(value) + 4, words, 12, "end", "lk-soft")
        named = [1, *(int(m) for m in marks(self.chart.layers, "", 8 if self.wide else 4) if m > 1 and m % 1 == 0)]
        for c in named:
            yield text(self.at(c), self.floor + 16, str(c), 12, "middle", "lk-soft")
        yield text(self.right, self.floor + 33, say("segments.axis"), 12, "end", "lk-soft")

    def _areas(self) -> Iterator[str]:
        """K from the floor, R on top of it; what is beyond the axis is torn off."""
        chart, n = self.chart, self.chart.layers
        inputs = [self.level(chart.inputs(c)) for c in chart.held]
        full = [self.level(held) for held in chart.held.values()]
        back = "".join(f"L{num(self._edge(c))} {num(y)}H{num(self._edge(c - 1))}"
                       for c, y in zip(range(n, 0, -1), reversed(inputs), strict=True))  # fmt: skip
        foot = f"L{num(self.right)} {num(self.floor)}H{num(self.left)}z"
        k = f"M{num(self.left)} {num(inputs[0])}{self._steps(inputs)}{foot}"
        r = f"M{num(self.left)} {num(full[0])}{self._steps(full)}{back}z"
        yield el("g", el("path", d=r, class_="lk-mR"), el("path", d=k, class_="lk-mK"), class_="lk-part")
        torn = sum(held > chart.top for held in chart.held.values())
        if torn:
            teeth = max(1, round(torn * self.column / 10))
            half = torn * self.column / teeth / 2
            zigzag = "".join(f"l{num(half)} 5l{num(half)} -5" for _ in range(teeth))
            yield el("path", d=f"M{num(self.left)} {num(self.ceiling)}{zigzag}v-4H{num(self.left)}z", class_="lk-torn")
        yield from self._letters(inputs, full)

    def _letters(self, inputs: list[float], full: list[float]) -> Iterator[str]:
        """Each where its part is thick, R to the left of √(17L) and K to the right."""
        n = self.chart.layers
        for letter, c, low, high in (("R", max(1, round(0.28 * n)), inputs, full), ("K", max(1, round(0.9 * n)), None,
                                                                                  inputs)):  # fmt: skip
            bottom = self.floor if low is None else low[c - 1]
            if bottom - high[c - 1] > self.size + 4:
                middle = (bottom + high[c - 1]) / 2
                yield text(self.at(c), middle + 5, letter, self.size + 2, "middle", "lk-in lk-big")

    def _edge(self, c: int) -> float:
        return self.left + c * self.column

    def _steps(self, levels: list[float]) -> str:
        return "".join(f"V{num(y)}H{num(self._edge(c))}" for c, y in enumerate(levels, 1))

    def _heads(self) -> Iterator[tuple[float, float, str, str, str]]:
        """Lines down to the curve: at which c, what is held there, words, and the looks of both."""
        chart, unit = self.chart, self.chart.unit
        n, root = chart.layers, sqrt(chart.layers)
        nearest = chart.held[round(root)]
        mark = "" if chart.least == round(root) else say("segments.wrong")
        words = say("segments.root", c=f"{root:.3g}", size=unit.told(nearest), mark=mark).rstrip()
        yield root, nearest, words, "lk-wrong", "lk-wrong"
        ratio = f"{chart.inside / chart.kept:.3g}"
        if chart.best < n:
            there = chart.held[min(n, round(chart.best))]
            words = say("segments.best", ratio=ratio, c=f"{chart.best:.3g}", size=unit.told(there))
            yield chart.best, there, words, "lk-best", "lk-big"
        words = say("segments.every" if chart.best < n else "segments.every_best", size=unit.told(chart.held[n]))
        yield n, chart.held[n], words, "lk-phase" if chart.best < n else "lk-best", "" if chart.best < n else "lk-big"
        if chart.guess is not None and 1 <= chart.guess <= n:
            words = say("bars.guess", value=f"{chart.guess:.4g}")
            yield chart.guess, 0.0, words, "lk-line lk-guess", "lk-guess"

    def _lines(self) -> Iterator[str]:
        for row, (c, held, words, look, cls) in enumerate(self.heads):
            x, y = self.at(c), 4.0 + LINE * row
            yield el("path", d=f"M{num(x)} {num(y + LINE)}V{num(self.level(held))}", class_=look)
            half = text_width(words, self.size) / 2 + 2
            middle = max(half + 2, min(x, (self.right + 30 if self.wide else self.width) - half))
            yield text(middle, y + 12, words, self.size, "middle", cls or None)
        if self.chart.capacity is not None and self.chart.capacity <= self.chart.top:
            y = self.level(self.chart.capacity)
            yield el("path", d=f"M{num(self.left)} {num(y)}H{num(self.right)}", class_="lk-cap")
            words = say("memory.capacity", size=self.chart.unit.told(self.chart.capacity))
            yield text(self.right - 4, y - 6, words, self.size, "end", "lk-big")

    def _points(self) -> Iterator[str]:
        for c, held in self.chart.measured.items():
            yield el("circle", cx=self.at(c), cy=self.level(held), r=4, class_="lk-dot")

    @cached_property
    def _key(self) -> tuple[list[str], float]:
        """What the letters stand for, and where the picture ends."""
        entries = [("K", say("segments.key_kept")), ("R", say("segments.key_inside")), ("", say("segments.key_none"))]
        entries += [("●", say("figure.measured"))] if self.chart.measured else []
        parts, x, y = [], 4.0, self.strip + STRIP + 14
        for letter, words in entries:
            lines = wrap(words, self.width - 34, 12)
            need = 30 + max(text_width(line, 12) for line in lines)
            if x > 4 and x + need > self.width - 4:
                x, y = 4.0, y + 24
            if letter == "●":
                parts.append(el("circle", cx=x + 10, cy=y + 9, r=4, class_="lk-dot"))
            else:
                box = el("rect", x=x, y=y, width=20, height=18, class_=f"lk-m{letter or 'x'}")
                parts += [el("g", box, class_="lk-part"), text(x + 10, y + 13.5, letter, 12, "middle", "lk-in lk-big")]
            for n, line in enumerate(lines):
                parts.append(text(x + 26, y + 13.5 + 15 * n, line, 12, None, "lk-soft"))
            y += 15 * (len(lines) - 1)
            x += need + 14
        return [part for part in parts if "></text>" not in part], y + 26

    @property
    def _bottom(self) -> float:
        return self._key[1]

    # What a frame has of its own

    def _chosen(self, c: int) -> Iterator[str]:
        """The column of c, and lines from it to the bar beside."""
        chart = self.chart
        x, width = self._edge(c - 1), max(self.column, 3.0)
        low, high = self.level(chart.inputs(c)), self.level(chart.held[c])
        yield el("path", d=f"M{num(x + width)} {num(high)}H{num(self.bar)}M{num(x + width)} {num(low)}H{num(self.bar)}",
                 class_="lk-ghost")  # fmt: skip
        yield el("g", el("rect", x=x, y=high, width=width, height=low - high),
                 el("rect", x=x, y=low, width=width, height=self.floor - low), class_="lk-chosen")  # fmt: skip

    def _beside(self, c: int) -> Iterator[str]:
        """The two parts of c on the same axis."""
        chart, unit, x = self.chart, self.chart.unit, self.bar
        low, high = self.level(chart.inputs(c)), self.level(chart.held[c])
        yield el("g", el("rect", x=x, y=high, width=self.thick, height=low - high, class_="lk-mR"),
                 el("rect", x=x, y=low, width=self.thick, height=self.floor - low, class_="lk-mK"),
                 class_="lk-part lk-stack")  # fmt: skip
        beyond = chart.held[c] > chart.top
        if beyond:
            tooth = self.thick / 8
            teeth = "".join(f"l{num(tooth)} 5l{num(tooth)} -5" for _ in range(4))
            yield el("path", d=f"M{num(x)} {num(high)}{teeth}v-4H{num(x)}z", class_="lk-torn")
        middle = x + self.thick / 2
        kmiddle, rmiddle = (low + self.floor) / 2, (low + high) / 2
        for letter, y, room in (("R", rmiddle, low - high), ("K", kmiddle, self.floor - low)):
            if room > self.size + 3:
                yield text(middle, y + 5, letter, self.size + 1, "middle", "lk-in lk-big")
        whole = " ".join([unit.told(chart.held[c]), *([say("segments.torn")] if beyond else [])])
        inside = unit.told(chart.held[c] - chart.inputs(c))
        if not self.wide:
            yield from self._below(c, whole, inside)
            return
        yield text(x, high - 8, whole, 15, None, "lk-big")
        kmiddle = min(kmiddle, self.floor - 14)
        rmiddle = min(rmiddle, kmiddle - 40)
        for y, words, size in ((rmiddle, chart.layers_words(c), inside),
                               (kmiddle, count("segments.inputs", c), unit.told(chart.inputs(c)))):  # fmt: skip
            yield text(x + self.thick + 8, y - 3, words, self.size)
            yield text(x + self.thick + 8, y + 14, size, self.size, None, "lk-big")

    def _below(self, c: int, whole: str, inside: str) -> Iterator[str]:
        """Where it is narrow the numbers stand under the curve."""
        chart = self.chart
        words = say("segments.sum", inputs=count("segments.inputs", c), kept=chart.unit.told(chart.inputs(c)),
                    layers=chart.layers_words(c), inside=inside)  # fmt: skip
        yield text(4, self.floor + 52, say("segments.now", c=c, size=whole), 13, None, "lk-big")
        yield text(4, self.floor + 68, words, 12)

    def _layers(self, c: int) -> Iterator[str]:
        """The layers in their segments: K at the start of each, R where backward is."""
        chart, y = self.chart, self.strip
        pitch = (self.width - 8) / chart.layers
        sizes = chart.sizes(c)
        starts = [0, *accumulate(sizes)][:-1]
        x, wide = 4 + starts[-1] * pitch, sizes[-1] * pitch
        thick = max(0.8, min(pitch * 0.6, 8))
        kept = "".join(f"M{num(4 + s * pitch)} {num(y)}v{STRIP}h{num(thick)}v{-STRIP}z" for s in starts)
        yield el("g", el("rect", x=x, y=y, width=wide, height=STRIP, class_="lk-mR"),
                 el("path", d=kept, class_="lk-mK"), class_="lk-part")  # fmt: skip
        if wide - thick > self.size + 4:
            yield text(x + thick + (wide - thick) / 2, y + 18, "R", self.size, "middle", "lk-big")
        words = say("segments.strip", layers=chart.layers, segments=chart.segments_words(c))
        yield text(4, y - 7, fit(words, self.width - 8, self.size), self.size)
