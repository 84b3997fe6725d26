"""`show.loss_scale` in one layout: the scale as a line of steps, and a lane a rank below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log2

from labkit.show.figure import WIDE, Drawing
from labkit.show.lanes import runs
from labkit.show.svg import el, num, text, text_width
from labkit.show.words import say

HEIGHT = 150
LANE = 26  #: from one rank to the next
DASHES = ("", "6 3", "2 3", "8 3 2 3")
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Step:
    """A step.

    Attributes:
        scales: Of each rank.
        over: Ranks whose gradients overflowed.
        skipped: Ranks that left their parameters as they were.
    """

    scales: tuple[float, ...]
    over: tuple[int, ...]
    skipped: tuple[int, ...]


def power(scale: float) -> str:
    """A scale as a power of 2, where it is one.

    >>> power(65536.0), power(0.5), power(1000)
    ('2¹⁶', '2⁻¹', '1,000')
    """
    exponent = log2(scale)
    return f"2{str(int(exponent)).translate(SUPERSCRIPT)}" if exponent % 1 == 0 else f"{scale:,.6g}"


def named(ranks: tuple[int, ...]) -> str:
    """Ranks in words.

    >>> named((1,)), named((0, 1, 3))
    ('rank 1', 'ranks 0–1, 3')
    """
    if not ranks:
        return say("loss_scale.nobody")
    if len(ranks) == 1:
        return say("loss_scale.rank", rank=ranks[0])
    return say("loss_scale.ranks", ranks=", ".join(f"{a}–{b}" if b > a else str(a) for a, b in runs(ranks)))


class View:
    """A column a step, all of one width."""

    def __init__(self, steps: Sequence[Step], width: float) -> None:
        self.steps, self.width, self.wide = steps, width, width >= WIDE
        self.size = 13 if self.wide else 12
        self.ranks = len(steps[0].scales)
        every = [scale for step in steps for scale in step.scales]
        self.low, self.high = floor(log2(min(every))) - 1, ceil(log2(max(every))) + 1
        lanes = [say("loss_scale.rank", rank=r) for r in range(self.ranks)]
        self.left = 12 + max(text_width(words, self.size) for words in lanes)
        #: The scale over all steps → the ranks that have it.
        self.series: dict[tuple[float, ...], tuple[int, ...]] = {}
        for r in range(self.ranks):
            scales = tuple(step.scales[r] for step in steps)
            self.series[scales] = (*self.series.get(scales, ()), r)
        names = max(text_width(named(ranks), 12) for ranks in self.series.values())
        self.right = width - (8 if len(self.series) == 1 else names + 14)
        self.column = (self.right - self.left) / len(steps)
        self.top, self.floor = 22.0, 22.0 + HEIGHT
        self.lanes = self.floor + 36

    def at(self, step: float) -> float:
        return self.left + step * self.column

    def level(self, scale: float) -> float:
        return self.floor - (log2(scale) - self.low) / (self.high - self.low) * HEIGHT

    def draw(self) -> Drawing:
        bottom = self.lanes + LANE * self.ranks
        key, end = self._key(bottom + 8)
        parts = [*self._grid(), *self._bands(bottom), *self._lines(), *self._changes(), *self._ranks(), *key]
        parts.sort(key=lambda part: part.startswith("<text"))  # words last, so that no line strikes them through
        return Drawing(self.width, end, tuple(parts))

    def _grid(self) -> Iterator[str]:
        apart = max(1, ceil((self.high - self.low) / 7))
        levels = range(self.low + 1, self.high, apart)
        yield el("g", *(el("line", x1=self.left, y1=self.level(2.0**k), x2=self.right, y2=self.level(2.0**k))
                        for k in levels), class_="lk-marks")  # fmt: skip
        for k in levels:
            yield text(self.left - 6, self.level(2.0**k) + 4, power(2.0**k), 12, "end", "lk-soft")
        yield text(4, 13, say("loss_scale.axis"), 12, None, "lk-soft")
        n = len(self.steps)
        apart = next(s for k in range(9) for s in (10**k, 2 * 10**k, 5 * 10**k) if n / s <= (10 if self.wide else 5))
        words = say("loss_scale.steps")
        free = self.right - text_width(words, 12) - 8
        for k in range(0, n, apart):
            if self.at(k + 0.5) + text_width(str(k), 12) / 2 < free:
                yield text(self.at(k + 0.5), self.floor + 16, f"{k:,}", 12, "middle", "lk-soft")
        yield text(self.right, self.floor + 16, words, 12, "end", "lk-soft")

    def _bands(self, bottom: float) -> Iterator[str]:
        """Through all lanes, where a step is skipped."""
        for n, step in enumerate(self.steps):
            if step.over or step.skipped:
                width = max(self.column, 2.0)
                yield el("rect", x=min(self.at(n), self.right - width), y=self.top, width=width,
                         height=bottom - self.top, class_="lk-skip")  # fmt: skip

    def _lines(self) -> Iterator[str]:
        """A line for the ranks that have one scale; named where there are several."""
        ends: list[float] = []
        for (scales, ranks), dash in zip(self.series.items(), DASHES * self.ranks, strict=False):
            path, last = [f"M{num(self.left)} {num(self.level(scales[0]))}"], scales[0]
            for n, scale in enumerate(scales):
                if scale != last:
                    path.append(f"H{num(self.at(n))}V{num(self.level(scale))}")
                    last = scale
            yield el(
                "path", d="".join([*path, f"H{num(self.right)}"]), class_="lk-scale", stroke_dasharray=dash or None
            )
            if len(self.series) > 1:
                y = self.level(last) + 4
                y = next(y + k for k in range(0, 400, 16) if all(abs(y + k - other) >= 16 for other in ends))
                ends.append(y)
                yield text(self.right + 6, y, named(ranks), 12)

    def _changes(self) -> Iterator[str]:
        """×2 and ÷2 where the first line has them, as far as there is room."""
        free = {True: 0.0, False: 0.0}
        for n, (a, b) in enumerate(pairwise(step.scales[0] for step in self.steps), 1):
            if a == b or len(self.series) > 1:
                continue
            up = b > a
            words = say("loss_scale.doubled" if up else "loss_scale.halved", factor=f"{max(a / b, b / a):.3g}")
            half = text_width(words, 12) / 2
            x = max(self.left - 4 + half, min(self.at(n), self.right - half))
            if x - half > free[up]:
                free[up] = x + half + 2
                y = self.level(b) - 7 if up else min(self.level(b) + 17, self.floor - 1)
                yield text(x, y, words, 12, "middle", "lk-soft")

    def _ranks(self) -> Iterator[str]:
        size = max(4.0, min(self.column / 2 - 1, 6.0))
        for rank in range(self.ranks):
            y = self.lanes + LANE * rank + LANE / 2
            yield text(4, y + 4.5, say("loss_scale.rank", rank=rank), self.size)
            yield el("line", x1=self.left, y1=y, x2=self.right, y2=y, class_="lk-lane")
            for n, step in enumerate(self.steps):
                if step.over or step.skipped:
                    yield mark(step, rank, self.at(n + 0.5), y, size)

    def _key(self, y: float) -> tuple[list[str], float]:
        """Which mark is what; only those that are there."""
        seen = {look(step, r) for step in self.steps if step.over or step.skipped for r in range(self.ranks)}
        names = {"over": say("loss_scale.key_overflow"), "skips": say("loss_scale.key_skips"),
                 "steps": say("loss_scale.key_steps")}  # fmt: skip
        parts, x, y = [], 4.0, y + 10
        for kind, words in names.items():
            if kind in seen:
                if x > 4 and x + 24 + text_width(words, 12) > self.width:
                    x, y = 4.0, y + 22
                parts += [drawn(kind, x + 8, y, 6.0), text(x + 22, y + 4.5, words, 12, None, "lk-soft")]
                x += 40 + text_width(words, 12)
        return parts, y + 16 if seen else y - 6


def look(step: Step, rank: int) -> str:
    """What a rank did with a step that some rank skipped or should have."""
    return "over" if rank in step.over else "skips" if rank in step.skipped else "steps"


def mark(step: Step, rank: int, x: float, y: float, size: float) -> str:
    """A cross for an overflow, a ring for a step that is skipped with it, a point for one that is made nevertheless."""
    kind = look(step, rank)
    ring = drawn("steps", x, y, size) if kind == "over" and rank not in step.skipped else ""
    return ring + drawn(kind, x, y, size)


def drawn(kind: str, x: float, y: float, size: float) -> str:
    if kind == "over":
        left, wide = num(x - size), num(2 * size)
        d = f"M{left} {num(y - size)}l{wide} {wide}M{left} {num(y + size)}l{wide} -{wide}"
        return el("path", d=d, class_="lk-cross")
    return el("circle", cx=x, cy=y, r=size * 0.9, class_="lk-ring" if kind == "skips" else "lk-dot lk-no")
