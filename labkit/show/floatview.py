"""`show.floats` in one layout: the reach of each format on a logarithmic line, and neighbours on a linear one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, inf, log10

from labkit.show.figure import WIDE, Drawing
from labkit.show.floatformats import FORMATS, Format, Sizes
from labkit.show.memorybars import hatch
from labkit.show.svg import el, num, text, text_width, wrap
from labkit.show.words import say

LOW, HIGH = -12, 7  #: decades drawn at the least, so that pictures of usual gradients share their line
LINE = 17
BAR, PITCH = 28, 38  #: height of a format's bar, and from one to the next
HISTOGRAM = 84
MOST = 80  #: ticks of a format in the lower part; more lie closer than can be seen


@dataclass(frozen=True, slots=True)
class Chart:
    """All that the picture shows.

    Attributes:
        near, add: The number whose neighbours are drawn, and what is added to it.
        values: Marked on the line.
        sizes: Of gradients.
        scale: A loss scale.
    """

    near: float | None
    add: float
    values: tuple[float, ...]
    sizes: Sizes | None
    scale: float | None


def plain(value: float, digits: int = 6) -> str:
    """A number as people write it: with commas, exponents without zeros in front.

    >>> plain(1e-08), plain(65504.0), plain(1.0009765625), plain(float("inf"))
    ('1e-8', '65,504', '1.00098', 'inf')
    """
    if value == inf:
        return say("floats.inf")
    if value % 1 == 0 and abs(value) < 1e7 and digits >= 6:
        return f"{int(value):,}"
    told = f"{value:.{digits}g}" if not 0 < abs(value) < 1e-4 else _scientific(value, digits)
    return told.replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def _scientific(value: float, digits: int) -> str:
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{exponent}"


def percent(part: int, whole: int) -> str:
    """A share in percent; never "0 %" of what is there.

    >>> percent(1, 3), percent(0, 3), percent(1, 100_000)
    ('33.3 %', '0 %', '<0.1 %')
    """
    share = 100 * part / whole
    return say("floats.tiny") if 0 < share < 0.1 else say("floats.percent", share=f"{share:.3g}")


class View:
    """From top to bottom: gradients, the line with its formats, neighbours."""

    def __init__(self, chart: Chart, width: float) -> None:
        self.chart, self.width, self.wide = chart, width, width >= WIDE
        self.size = 13 if self.wide else 12
        self.left = 4 + max(text_width(f.name, self.size + 1) for f in FORMATS) + 6
        self.right = width - 8
        self.low, self.high = self._decades()
        self.scale = (self.right - self.left) / (self.high - self.low)

    def _decades(self) -> tuple[int, int]:
        """The line holds all values, and all gradients but the smallest ones."""
        seen = [10.0**LOW, 10.0**HIGH, *self.chart.values]
        if self.chart.sizes is not None:
            every = self.chart.sizes.values
            seen += [every[len(every) // 1000], every[-1], every[-1] * (self.chart.scale or 1)]
        return max(-24, floor(log10(min(seen)) + 1e-9)), min(24, ceil(log10(max(seen)) - 1e-9))

    def at(self, value: float) -> float:
        place = self.left + (log10(value) - self.low) * self.scale
        return max(self.left, min(place, self.right))

    def draw(self) -> Drawing:
        parts, y = [], 2.0
        if self.chart.sizes is not None:
            drawn, y = self._gradients(self.chart.sizes, y)
            parts += drawn
        drawn, y = self._reach(y)
        parts += drawn
        if self.chart.near is not None:
            drawn, y = self._neighbours(self.chart.near, y + 22)
            parts += drawn
        parts.sort(key=lambda part: part.startswith("<text"))  # words last, so that no line strikes them through
        return Drawing(self.width, y, tuple(parts))

    # Gradients

    def _gradients(self, sizes: Sizes, y: float) -> tuple[list[str], float]:
        """The histogram; what fp16 makes 0 is hatched. Multiplied by a scale it is a dashed outline."""
        head = 2 * LINE if self.wide or self.chart.scale is None else 3 * LINE
        floor_, bins = y + head + HISTOGRAM, sizes.bins()
        tall, half = max(bins.values()), FORMATS[2]
        line = half.smallest / 2
        parts, lost = [], []
        for k, n in bins.items():
            x, end, high = self.at(2.0**k), self.at(2.0 ** (k + 1)), max(1.0, n / tall * HISTOGRAM)
            if end <= self.left + 0.1:
                continue
            gone = 2.0**k < line
            look = "lk-gone0" if gone else "lk-gradient"
            lost += [hatch(x, floor_ - high, end - x, high, 6)] if gone else []
            parts.append(el("rect", x=x, y=floor_ - high, width=end - x, height=high, class_=look))
        parts = [el("g", *parts, el("path", d="".join(lost), class_="lk-burst") if lost else "", class_="lk-part")]
        if self.chart.scale is not None:
            outline = self._outline(bins, tall, floor_, self.chart.scale)
            parts.append(el("path", d=outline, class_="lk-shifted"))
        x = self.at(line)
        parts.append(el("path", d=f"M{num(x)} {num(y + head - LINE)}V{num(floor_)}", class_="lk-wrong"))
        words = say("floats.lost", share=percent(sizes.lost(half), len(sizes)))
        side = x - 6 > text_width(words, self.size)
        parts.append(text(x - 6 if side else 4, y + 13, words, self.size, "end" if side else None, "lk-wrong"))
        if self.chart.scale is not None:
            share = percent(sizes.lost(half, self.chart.scale), len(sizes))
            words = say("floats.lost_scaled", scale=plain(self.chart.scale), share=share)
            parts.append(text(self.right, y + 13 + (0 if self.wide else LINE), words, self.size, "end", "lk-big"))
        return parts, floor_ + 8

    def _outline(self, bins: dict[int, int], tall: int, floor_: float, scale: float) -> str:
        steps, last = [f"M{num(self.at(2.0 ** min(bins) * scale))} {num(floor_)}"], min(bins)
        for k, n in bins.items():
            if k > last:  # nothing in between
                steps.append(f"V{num(floor_)}H{num(self.at(2.0**k * scale))}")
            steps.append(f"V{num(floor_ - max(1.0, n / tall * HISTOGRAM))}H{num(self.at(2.0 ** (k + 1) * scale))}")
            last = k + 1
        return "".join([*steps, f"V{num(floor_)}"])

    # The logarithmic line

    def _reach(self, y: float) -> tuple[list[str], float]:
        labels = list(self._labels())
        top = y + 4 + LINE * (1 + max((row for *_, row in labels), default=-1))
        bottom = top + 6 + PITCH * len(FORMATS)
        parts = list(self._decade_marks(top, bottom))
        for n, f in enumerate(FORMATS):
            parts += self._format(f, top + 8 + PITCH * n)
        for value, words, middle, row in labels:
            x, base = self.at(value), y + 4 + LINE * row
            parts.append(el("path", d=f"M{num(x)} {num(base + LINE)}V{num(bottom - 2)}", class_="lk-value"))
            parts.append(text(middle, base + 12, words, self.size, "middle", "lk-big"))
            parts += [self._fate(f, value, top + 8 + PITCH * n + BAR / 2) for n, f in enumerate(FORMATS)]
        return parts, bottom + 20

    def _labels(self) -> Iterator[tuple[float, str, float, int]]:
        """The marked values: words, their middle, and a row in which they touch no others."""
        free: list[float] = []
        for value in self.chart.values:
            words = plain(value)
            half = text_width(words, self.size) / 2
            middle = max(self.left + half, min(self.at(value), self.right - half))
            row = next((n for n, end in enumerate(free) if middle - half > end + 8), len(free))
            free[row : row + 1] = [middle + half]
            yield value, words, middle, row

    def _decade_marks(self, top: float, bottom: float) -> Iterator[str]:
        step = next(s for s in (2, 4, 6, 8, 12, 24) if s * self.scale > text_width("1e-24", 12) + 8)
        shown = range(self.low, self.high + 1)
        places = [(self.at(10.0**k), k) for k in shown]
        yield el("g", *(el("line", x1=x, y1=top, x2=x, y2=bottom) for x, _ in places), class_="lk-marks")
        for x, k in places:
            words = plain(10.0**k) if -3 <= k <= 3 else f"1e{k}"
            half = text_width(words, 12) / 2
            if k % step == 0 and x + half <= self.width and x - half > self.left - 30:
                yield text(x, bottom + 15, words, 12, "middle", "lk-soft")

    def _format(self, f: Format, y: float) -> Iterator[str]:
        """What is normal, what subnormal, and beyond both ends what is lost."""
        yield text(4, y + BAR / 2 + 5, f.name, self.size + 1, None, "lk-big")
        lost, subnormal, end = self.at(f.smallest / 2), self.at(f.normal), self.at(f.largest)
        body = [el("rect", x=subnormal, y=y, width=end - subnormal, height=BAR, class_=f"lk-{f.name}")]
        if subnormal > lost:
            body.append(el("rect", x=lost, y=y, width=subnormal - lost, height=BAR, class_=f"lk-{f.name} lk-thin"))
        yield el("g", *body, class_="lk-part")
        if lost > self.left:
            yield el("rect", x=self.left, y=y, width=lost - self.left, height=BAR, class_="lk-lost")
            yield from self._inside((self.left + lost) / 2, lost - self.left, y, say("floats.zero"), "lk-wrong")
            yield from self._inside((lost + subnormal) / 2, subnormal - lost, y, say("floats.subnormal"), "lk-in")
        if end < self.right:
            yield el("rect", x=end, y=y, width=self.right - end, height=BAR, class_="lk-lost")
            yield from self._inside((end + self.right) / 2, self.right - end, y, say("floats.inf"), "lk-wrong")
        yield from self._from_to(f, y)

    def _from_to(self, f: Format, y: float) -> Iterator[str]:
        """The ends in numbers, in the widest stretch between marked values."""
        start, end = self.at(f.normal), self.at(f.largest)
        stops = [start, *(x for x in map(self.at, self.chart.values) if start < x < end), end]
        left, right = max(pairwise(stops), key=lambda pair: pair[1] - pair[0])
        low, high = plain(f.normal, 2), plain(f.largest, 2 if f.largest > 1e9 else 6)
        beyond = start <= self.left
        tries = [say("floats.reach_beyond", low=low, high=high), say("floats.end_beyond", high=high)] if beyond else (
            [say("floats.reach", low=low, high=high), high])  # fmt: skip
        for words in tries:
            if text_width(words, self.size) < right - left - 12:
                yield text((left + right) / 2, y + BAR / 2 + 5, words, self.size, "middle", "lk-in")
                return

    def _inside(self, middle: float, room: float, y: float, words: str, cls: str) -> Iterator[str]:
        if text_width(words, self.size) < room - 6:
            yield text(middle, y + BAR / 2 + 5, words, self.size, "middle", cls)

    def _fate(self, f: Format, value: float, y: float) -> str:
        """A point where a value is kept, a cross where it becomes 0 or inf."""
        x = self.at(value)
        if 0 < f.nearest(value) < inf:
            return el("circle", cx=x, cy=y, r=4.5, class_="lk-dot")
        return el("path", d=f"M{num(x - 5)} {num(y - 5)}l10 10M{num(x - 5)} {num(y + 5)}l10 -10", class_="lk-cross")

    # Neighbours

    def _neighbours(self, near: float, y: float) -> tuple[list[str], float]:
        """Ticks are the numbers of a format; a line at the true sum, a point at what it becomes."""
        told = [(*self._becomes(f, near), say("floats.step", step=plain(f.step(near), 2))) for f in FORMATS]
        need = 1.08 * max(text_width(words, self.size) for row in told for words in (row[0], row[-1]))
        right = self.width - (need + 22 if self.wide else 8)
        high = PITCH if self.wide else PITCH + LINE
        base, window = FORMATS[0].nearest(near), 1.7 * FORMATS[1].step(near)
        scale = (right - self.left) / (2 * window)

        def at(value: float) -> float:
            return self.left + (value - base + window) * scale

        key = "floats.neighbours_sum" if self.chart.add else "floats.neighbours"
        added = {"add": plain(self.chart.add)} if self.chart.add else {}
        lines = wrap(say(key, near=plain(near), **added), self.width - 8, self.size)
        parts = [text(4, y + 12 + LINE * n, line, self.size) for n, line in enumerate(lines)]
        head = y + LINE * len(lines) + 4
        top = head + LINE + 8
        bottom = top + high * len(FORMATS) - (high - BAR)
        parts += self._heads(at, near, base + self.chart.add, right, head, bottom)
        for n, (f, (words, lost, step)) in enumerate(zip(FORMATS, told, strict=True)):
            row = top + high * n
            parts.append(text(4, row + BAR / 2 + 5, f.name, self.size + 1, None, "lk-big"))
            parts += self._ticks(f, at, base, window, row, right)
            x = at(f.add(near, self.chart.add))
            if self.left <= x <= right:
                parts.append(el("circle", cx=x, cy=row + BAR / 2, r=6, class_=f"lk-dot{' lk-no' if lost else ''}"))
            cls = "lk-wrong lk-big" if lost else "lk-big"
            if self.wide:
                parts.append(text(right + 12, row + 11, words, self.size, None, cls))
                parts.append(text(right + 12, row + 27, step, 12, None, "lk-soft"))
            else:
                parts.append(text(self.left, row + BAR + 14, words, self.size, None, cls))
                parts.append(text(self.right, row + BAR + 14, step, 12, "end", "lk-soft"))
        return parts, top + high * len(FORMATS)

    def _becomes(self, f: Format, near: float) -> tuple[str, bool]:
        """What the sum becomes, and whether what was added is lost."""
        result = f.add(near, self.chart.add)
        lost = bool(self.chart.add) and result == f.nearest(near)
        return say("floats.sum_lost" if lost else "floats.sum", result=plain(result)), lost

    def _heads(self, at, near: float, true: float, right: float, y: float, bottom: float) -> Iterator[str]:
        places = [(near, plain(near), "lk-phase", "lk-big")]
        if self.chart.add and self.left <= at(true) <= right:
            places.append((true, plain(true), "lk-true", "lk-big"))
        left = min(at(v) for v, *_ in places)
        for value, words, look, cls in places:
            x = at(value)
            yield el("path", d=f"M{num(x)} {num(y + LINE)}V{num(bottom)}", class_=look)
            anchor = "middle" if len(places) == 1 else "end" if x == left else None
            yield text(x + {"end": -1, "middle": 0, None: 1}[anchor], y + 13, words, self.size, anchor, cls)

    def _ticks(self, f: Format, at, base: float, window: float, y: float, right: float) -> Iterator[str]:
        ticks = f.between(max(base - window, f.smallest), base + window, MOST)
        frame = el("rect", x=self.left, y=y, width=right - self.left, height=BAR,
                   class_="lk-lane-of" if ticks else f"lk-{f.name}")  # fmt: skip
        yield el("g", frame, class_="lk-part")
        if ticks:
            yield el("path", d="".join(f"M{num(at(v))} {num(y)}v{BAR}" for v in ticks), class_=f"lk-tick-{f.name}")
        else:
            words = say("floats.close")
            if text_width(words, self.size) < at(base) - self.left - 16:
                yield text(self.left + 8, y + BAR / 2 + 5, words, self.size, None, "lk-in")
