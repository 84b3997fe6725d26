"""`show.buckets` in one layout: two lanes a variant on one axis of time, and beside them time against bucket size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log10

from labkit.show.buckettimes import Bucket, Times
from labkit.show.figure import WIDE, Drawing
from labkit.show.quantity import marks
from labkit.show.svg import el, escape, fit, num, size_of, text, text_width
from labkit.show.words import count, say

LANE = 26
MANY = 7  #: pixels; lanes whose boxes are narrower on average have thin outlines
WIRES = 30  #: lines drawn of a variant; of more buckets every second, third … has one
SIDE, HIGH = 196, 190  #: width and height of the curve


@dataclass(frozen=True, slots=True)
class Chart:
    """All that the picture shows.

    Attributes:
        variants: Label → times.
        sizes: Label → bytes of a bucket, of the variants that are points of the curve.
        top: Seconds at which the axis ends.
        guess: The learner's own, in seconds, across all variants.
        guesses: Label → the learner's own, in seconds.
        tips: Label → bucket number → what is said of it.
    """

    variants: Mapping[str, Times]
    sizes: Mapping[str, float]
    top: float
    guess: float | None
    guesses: Mapping[str, float]
    tips: Mapping[str, Mapping[int, str]]


class View:
    """A chart in one layout: the curve stands to the right of the lanes, or below them where it is narrow."""

    def __init__(self, chart: Chart, width: float) -> None:
        self.chart, self.width, self.wide = chart, width, width >= WIDE
        self.size = 13 if self.wide else 12
        self.curved = len(chart.sizes) > 1
        lanes = (say("buckets.backward"), say("buckets.reduce"))
        self.left = 10 + max(text_width(name, 12) for name in lanes) if self.wide else 4.0
        self.right = width - 8 - (SIDE + 24 if self.wide and self.curved else 0)
        self.scale = (self.right - self.left) / (chart.top or 1.0)
        self.gap = 30 if len(chart.variants) <= 4 else 18
        self.high = 22 + (0 if self.wide else 32) + 2 * LANE + self.gap + 32
        self.top = 26.0 + (18 if chart.guess is not None else 0)
        self._picture: Drawing | None = None

    def at(self, seconds: float) -> float:
        return self.left + min(seconds, self.chart.top) * self.scale

    def draw(self, chosen: tuple[str, Bucket] | None = None) -> Drawing:
        """The picture; a `chosen` bucket is outlined and named."""
        whole = self._whole()
        return whole if chosen is None else Drawing(whole.width, whole.height, (*whole.parts, self._chosen(*chosen)))

    def _whole(self) -> Drawing:
        if self._picture is None:
            parts: list[str] = []
            words: list[str] = []
            y = self.top
            for name, times in self.chart.variants.items():
                for part in self._variant(name, times, y):
                    (words if part.startswith("<text") else parts).append(part)
                y += self.high
            grid = list(self._axis(y))
            over = list(self._across(y))
            bottom = y + 24
            if self.curved:
                x, top, wide = (self.right + 32, self.top, SIDE) if self.wide else (4, bottom + 16, self.width - 8)
                over += self._curve(x, top, wide)
                bottom = max(bottom, top + HIGH + 44)
            self._picture = Drawing(self.width, bottom, (*grid, *parts, *over, *words))
        return self._picture

    # One variant

    def _lanes(self, y: float) -> tuple[float, float]:
        """The tops of the two lanes of a variant that begins at `y`."""
        backward = y + 22 + (0 if self.wide else 14)
        return backward, backward + LANE + self.gap + (0 if self.wide else 4)

    def _variant(self, name: str, times: Times, y: float) -> Iterator[str]:
        upper, lower = self._lanes(y)
        told = f"{ms(times.whole)} · {count('buckets.count', len(times.buckets))}"
        room = self.right - self.left - text_width(told, self.size)
        yield text(4, y + 14, fit(name, room if not self.wide else room + self.left - 12, self.size + 1), self.size + 1,
                   cls="lk-big")  # fmt: skip
        yield text(self.right, y + 14, told, self.size, "end")
        names = (say("buckets.backward"), say("buckets.reduce"))
        for lane, word in zip((upper, lower), names, strict=True):
            place = lane + LANE / 2 + 4 if self.wide else lane - 4 if lane == upper else lane + LANE + 16
            yield text(4, place, word, 12, None, "lk-soft")
            yield el("line", x1=self.left, y1=lane + LANE, x2=self.right, y2=lane + LANE, class_="lk-lane")
        yield from self._cost(times, upper, lower)
        yield self._sections(times, upper)
        yield self._buckets(name, times, upper, lower)
        if name in self.chart.guesses:
            x = self.at(self.chart.guesses[name])
            yield el("path", d=f"M{num(x)} {num(upper - 4)}V{num(lower + LANE + 4)}", class_="lk-line lk-guess")

    def _cost(self, times: Times, upper: float, lower: float) -> Iterator[str]:
        """Where backward ends, and the bracket over what comes after."""
        x, end, under = self.at(times.backward), self.at(times.whole), lower + LANE
        if times.exposed > 0:
            yield el("rect", x=x, y=upper, width=end - x, height=under - upper, class_="lk-exposed")
            yield el("path", d=f"M{num(x)} {num(under + 3)}v7H{num(end)}v-7", class_="lk-bracket")
        yield el("path", d=f"M{num(x)} {num(upper - 4)}V{num(under + 6)}", class_="lk-ends")
        words = say("buckets.exposed", time=ms(times.exposed)) if times.exposed > 0 else say("buckets.hidden")
        size, cls = (self.size + 1, "lk-cost") if times.exposed > 0 else (self.size, "lk-soft")
        half = text_width(words, size) / 2 * 1.06
        left = self.left if self.wide else 12 + text_width(say("buckets.reduce"), 12)
        middle = max(left + half, min((x + end) / 2, self.right - half))
        yield text(middle, under + 25, words, size, "middle", cls)

    def _sections(self, times: Times, y: float) -> str:
        boxes = []
        for s in times.sections:
            x, wide = self.at(s.start), self.at(s.end) - self.at(s.start)
            boxes.append(el("rect", x=x, y=y, width=max(wide, 0.8), height=LANE))
            words = next((w for w in (f"B {s.layer}", str(s.layer)) if text_width(w, 12) < wide - 3), "")
            if words:
                boxes.append(text(x + wide / 2, y + LANE / 2 + 4.5, words, 12, "middle", "lk-in"))
        return el(
            "g", el("g", *boxes, class_="lk-B"), class_="lk-box" + self._many(times.backward, len(times.sections))
        )

    def _buckets(self, name: str, times: Times, upper: float, lower: float) -> str:
        """The reductions, each with the line from its last gradient, and its number where there is room."""
        wires, boxes = [], []
        busy = sum(b.end - b.start for b in times.buckets)
        many = self._many(busy, len(times.buckets))
        every = -(-len(times.buckets) // WIRES)
        for n, b in enumerate(times.buckets):
            x, wide = self.at(b.start), self.at(b.end) - self.at(b.start)
            if b.ready is not None and n % every == 0:
                d = f"M{num(self.at(b.ready))} {num(upper + LANE)}L{num(x)} {num(lower)}"
                wires.append(el("path", d=d, class_="lk-wire"))
            tip = el("title", escape(self.chart.tips[name][b.number])) if not many else ""
            inside = [tip, el("rect", x=x, y=lower, width=max(wide, 0.8), height=LANE)]
            if words := self._inside(b, wide):
                inside.append(text(x + wide / 2, lower + LANE / 2 + 4.5, words, 12, "middle", "lk-in"))
            boxes.append(el("g", *inside))
        return el("g", *wires, el("g", *boxes, class_="lk-collective"), class_=many.strip() or None)

    def _many(self, seconds: float, boxes: int) -> str:
        return " lk-many" if seconds * self.scale < MANY * boxes else ""

    def _inside(self, bucket: Bucket, wide: float) -> str:
        number = say("buckets.number", n=bucket.number)
        both = f"{number} {size_of(bucket.nbytes)}"
        return next((w for w in (both, number) if text_width(w, 12) < wide - 3), "")

    def unnamed(self, times: Times) -> int:
        """How many buckets have no room for their number."""
        return sum(not self._inside(b, (b.end - b.start) * self.scale) for b in times.buckets)

    def _chosen(self, name: str, bucket: Bucket) -> str:
        upper, lower = self._lanes(self.top + self.high * list(self.chart.variants).index(name))
        x, end = self.at(bucket.start), self.at(bucket.end)
        parts = [el("rect", x=x, y=lower, width=max(end - x, 1), height=LANE, class_="lk-here")]
        if bucket.ready is not None:
            d = f"M{num(self.at(bucket.ready))} {num(upper)}v{LANE}L{num(x)} {num(lower)}"
            parts.append(el("path", d=d, class_="lk-here"))
        words = f"{say('buckets.number', n=bucket.number)} {size_of(bucket.nbytes)}"
        half = text_width(words, self.size) / 2
        middle = max(self.left + half, min((x + end) / 2, self.right - half))
        parts.append(text(middle, lower - 6, words, self.size, "middle", "lk-here"))
        return el("g", *parts)

    # Lines across, and the axis

    def _across(self, bottom: float) -> Iterator[str]:
        first = next(iter(self.chart.variants.values()))
        words = say("buckets.ends")
        half = text_width(words, self.size) / 2 + 2
        x = self.at(first.backward)
        yield text(max(half, min(x, self.right - half)), self.top - 8, words, self.size, "middle")
        if self.chart.guess is not None:
            x = self.at(self.chart.guess)
            key = "bars.guess" if self.chart.guess <= self.chart.top else "bars.guess_beyond"
            words = say(key, value=ms(self.chart.guess))
            half = text_width(words, self.size) / 2 + 2
            yield el("path", d=f"M{num(x)} {num(18)}V{num(bottom)}", class_="lk-line lk-guess")
            yield text(max(half, min(x, self.right - half)), 14, words, self.size, "middle", "lk-guess")

    def _axis(self, y: float) -> Iterator[str]:
        found = marks(self.chart.top * 1e3, "", 6 if self.wide else 4)
        yield el("g", *(el("line", x1=self.at(m / 1e3), y1=self.top, x2=self.at(m / 1e3), y2=y) for m in found),
                 class_="lk-marks")  # fmt: skip
        for mark in found:
            words = f"{mark:,.6g} ms" if mark == found[-1] else f"{mark:,.6g}"
            half = text_width(words, 12) / 2
            yield text(
                max(half + 2, min(self.at(mark / 1e3), self.right + 8 - half)), y + 16, words, 12, "middle", "lk-soft"
            )

    # Time against size

    def _curve(self, x: float, y: float, wide: float) -> Iterator[str]:
        sizes, left, right = self.chart.sizes, x + 26, x + wide - 26
        low, high = log10(min(sizes.values())), log10(max(sizes.values()))
        yield text(x, y + 14, fit(say("buckets.curve"), wide, self.size), self.size, cls="lk-big")
        top, floor = y + 44, y + HIGH
        whole = {name: self.chart.variants[name].whole for name in sizes}
        most, best = max(whole.values()), min(whole, key=lambda name: whole[name])
        places = {
            name: (
                left + (log10(n) - low) / ((high - low) or 1) * (right - left),
                floor - whole[name] / most * (floor - top),
            )
            for name, n in sorted(sizes.items(), key=lambda pair: pair[1])
        }
        yield el("line", x1=x, y1=floor, x2=x + wide, y2=floor, class_="lk-lane")
        line = "".join(f"{'L' if n else 'M'}{num(a)} {num(b)}" for n, (a, b) in enumerate(places.values()))
        yield el("path", d=line, class_="lk-curve")
        for name, (a, b) in places.items():
            yield el("circle", cx=a, cy=b, r=5, class_="lk-point lk-best" if name == best else "lk-point")
        first = sorted(places, key=lambda name: (name != best, places[name][0] not in (left, right)))
        above: list[tuple[float, float]] = []
        below: list[tuple[float, float]] = []
        for name in first:  # the best and the ends before what has no room
            a, b = places[name]
            under = name == best and b + 24 < floor
            if under or clear(above, a, ms(whole[name])):
                cls = "lk-big" if name == best else None
                yield text(a, b + 20 if under else b - 11, ms(whole[name]), 12, "middle", cls)
            if clear(below, a, size_of(round(sizes[name]))):
                yield text(a, floor + 17, size_of(round(sizes[name])), 12, "middle", "lk-soft")
        yield text(x + wide, floor + 35, say("buckets.size"), 12, "end", "lk-soft")


def clear(taken: list[tuple[float, float]], middle: float, words: str) -> bool:
    """Whether `words` have room around `middle`; then they take it."""
    half = text_width(words, 12) / 2 + 3
    free = all(middle + half <= left or middle - half >= right for left, right in taken)
    if free:
        taken.append((middle - half, middle + half))
    return free


def ms(seconds: float) -> str:
    """Milliseconds to a tenth; from 100 on without.

    >>> ms(0.003), ms(0.0705), ms(1.2)
    ('3.0 ms', '70.5 ms', '1,200 ms')
    """
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
