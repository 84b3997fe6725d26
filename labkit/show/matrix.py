"""Whose parts are in which chunk of which rank: a matrix of cells, a tick a part; and small ones, one a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from math import ceil

from labkit.show.lanes import runs
from labkit.show.steps import Steps
from labkit.show.svg import el, num, text, text_width
from labkit.show.words import say

SLOT = 8.4  #: the least room of a tick, so that a digit of 12 px fits in it
HEAD = 26  #: above the cells


@dataclass(frozen=True)
class Matrix:
    """Ranks × chunks at (x, y).

    Attributes:
        x, y: The top left corner, headings included.
        label: How wide the names of the ranks are.
        cell: Width and height of a cell.
        grid: Columns and rows of ticks in a cell.
        size: Of its text.
    """

    steps: Steps
    x: float
    y: float
    label: float
    cell: tuple[float, float]
    grid: tuple[int, int]
    size: float

    @classmethod
    def within(cls, steps: Steps, x: float, y: float, room: float, size: float, short: bool) -> Matrix:
        """As wide as `room`, or as it must be; `short` writes ranks as numbers."""
        head = [] if short or steps.whole else [say("steps.chunk_head")]
        names = [_name(rank, short) for rank in range(steps.ranks)] + head
        label = ceil(max(text_width(n, size) for n in names)) + (5 if short else 10)
        least = min(steps.ranks, 3 if steps.ranks <= 9 else 4) * SLOT + 8
        width = max(ceil(least), min((room - label) // steps.chunks, 200 if steps.whole else 84))
        across = min(steps.ranks, int((width - 8 + 0.01) / SLOT))
        down = ceil(steps.ranks / across)
        across = ceil(steps.ranks / down)
        height = max(30 if steps.ranks > 4 else 38 if short else 52, ceil(down * 10.5) + 8)
        return cls(steps, x, y, label, (width, height), (across, down), size)

    @property
    def width(self) -> float:
        return self.label + self.cell[0] * self.steps.chunks

    @property
    def height(self) -> float:
        return HEAD + self.cell[1] * self.steps.ranks

    def at(self, rank: int, chunk: int) -> tuple[float, float]:
        """The top left corner of a cell."""
        return self.x + self.label + self.cell[0] * chunk, self.y + HEAD + self.cell[1] * rank

    def tick(self, rank: int, chunk: int, part: int) -> tuple[float, float, float]:
        """Left end, middle height and length of a tick."""
        x, y = self.at(rank, chunk)
        across, down = self.grid
        row, column = divmod(part, across)
        pitch, rise = self._pitch, self._rise
        left = x + (self.cell[0] - pitch * across) / 2 + pitch * column
        return left + 0.8, y + (self.cell[1] - rise * down) / 2 + rise * (row + 0.5), pitch - 1.6

    @property
    def _pitch(self) -> float:
        """From one tick to the next, in tenths of a pixel: so many dashes must add up."""
        return int(5 * min((self.cell[0] - 8) / self.grid[0], 24)) / 5

    @property
    def _rise(self) -> float:
        """From one row of ticks to the next."""
        return min((self.cell[1] - 8) / self.grid[1], 18)

    @property
    def style(self) -> str:
        """How long and how thick a tick is: said once for all."""
        return f"--lk-dash:{num(self._pitch - 1.6)} 1.6;--lk-thick:{num(self._rise - 1.6)}px"

    def frame(self, short: bool) -> list[str]:
        """What stays: names, cells, and the places of all ticks."""
        s, (w, h) = self.steps, self.cell
        cells = [(r, c) for r in range(s.ranks) for c in range(s.chunks)]
        boxes = "".join(_box(*self.at(r, c), w, h) for r, c in cells)
        slots = "".join(self._dashes(r, c, range(s.ranks)) for r, c in cells)
        middle = [self.at(0, c)[0] + w / 2 for c in range(s.chunks)]
        heads = [
            el("g", text(x, self.y + 17, str(c), self.size, "middle", "lk-column"), data_chunk=str(c))
            for c, x in enumerate(middle)
        ]
        under = el("path", d=slots, class_="lk-tick lk-slots"), el("path", d=boxes, class_="lk-cells")
        if s.whole:
            return [self.names(short), *under]
        word = "" if short else text(self.x, self.y + 17, say("steps.chunk_head"), self.size, None, "lk-soft")
        return [word, *heads, self.names(short), *under]

    def names(self, short: bool) -> str:
        rows = range(self.steps.ranks)
        middle = self.cell[1] / 2 + 5
        return "".join(text(self.x, self.at(r, 0)[1] + middle, _name(r, short), self.size) for r in rows)

    def state(self, step: int) -> Iterator[str]:
        """The cells after a step, and on top what it changed."""
        s = self.steps
        for rank in range(s.ranks):
            for chunk in range(s.chunks):
                yield self._cell(step, rank, chunk)
        changed = [(r, c) for r in range(s.ranks) for c in s.changed(step, r)]
        if changed:
            fresh = "".join(self._fresh(step, r, c) for r, c in changed)
            yield el("path", d=fresh, class_="lk-tick lk-fresh") if fresh else ""
            boxes = "".join(_box(*self.at(r, c), *self.cell) for r, c in changed)
            yield el("path", d=boxes, class_="lk-changed")

    def _cell(self, step: int, rank: int, chunk: int) -> str:
        s, (x, y), (w, h) = self.steps, self.at(rank, chunk), self.cell
        parts, done = s.parts(step, rank, chunk), s.done(step, rank, chunk)
        ticks = self._dashes(rank, chunk, [p for p, n in enumerate(parts) if n == 1])
        if not done and max(parts) <= 1:
            return el("path", d=ticks, class_="lk-tick", data_chunk=str(chunk)) if ticks else ""
        body = [el("path", d=ticks, class_="lk-tick")] if ticks else []
        body += [self._digit(rank, chunk, p, n) for p, n in enumerate(parts) if n > 1]
        if done:
            body = [
                el("path", d=_box(x + 1, y + 1, w - 2, h - 2), class_="lk-full"),
                *body,
                tick_off(x + w / 2, y + h / 2),
            ]
        return el("g", *body, data_chunk=str(chunk))

    def _dashes(self, rank: int, chunk: int, parts: Sequence[int]) -> str:
        """Ticks as a dashed line, as few pieces as they need: the dashes begin anew with each piece."""
        d = ""
        for _, row in groupby(parts, key=lambda p: p // self.grid[0]):
            for first, last in runs(tuple(row)):
                x, y, _ = self.tick(rank, chunk, first)
                d += f"M{num(x)} {num(y)}h{num(self._pitch * (last - first + 1) - 1.6)}"
        return d

    def _fresh(self, step: int, rank: int, chunk: int) -> str:
        """The ticks that were not there before."""
        if self.steps.done(step, rank, chunk):
            return ""
        pairs = zip(self.steps.parts(step - 1, rank, chunk), self.steps.parts(step, rank, chunk), strict=True)
        return self._dashes(rank, chunk, [p for p, (old, new) in enumerate(pairs) if new == 1 and old != 1])

    def _digit(self, rank: int, chunk: int, part: int, n: int) -> str:
        x, y, length = self.tick(rank, chunk, part)
        size = 12 if length < 10 else 14
        return text(x + length / 2, y + size * 0.36, str(n) if n < 10 else "+", size, "middle", "lk-twice")


def _name(rank: int, short: bool) -> str:
    return str(rank) if short else say("trace.rank", rank=rank)


def _box(x: float, y: float, w: float, h: float) -> str:
    return f"M{num(x)} {num(y)}h{num(w)}v{num(h)}h{num(-w)}z"


def tick_off(x: float, y: float) -> str:
    """A ✓ that no font has to know."""
    return el("path", d=f"M{num(x - 8)} {num(y)}l3-3l4 4.4l7-8.4l3 2.6l-10 12z", class_="lk-check")


@dataclass(frozen=True)
class Film:
    """Every step as a matrix of dots: at a glance, where the finished chunks are and which way they move."""

    steps: Steps
    x: float
    y: float
    dot: float
    pitch: float
    across: int

    @classmethod
    def within(cls, steps: Steps, x: float, y: float, room: float) -> Film:
        dot = min(9.0, 32 // max(steps.chunks, steps.ranks))
        pitch = max(dot * steps.chunks, 15) + 10
        across = max(1, int((room + 10) / pitch))
        return cls(steps, x, y, dot, pitch, min(across, steps.total + 1))

    @property
    def tall(self) -> float:
        """One row of matrices, its numbers included."""
        return self.dot * self.steps.ranks + 26

    @property
    def height(self) -> float:
        return self.tall * ceil((self.steps.total + 1) / self.across)

    def at(self, step: int) -> tuple[float, float]:
        row, column = divmod(step, self.across)
        return self.x + self.pitch * column, self.y + self.tall * row + 18

    @cached_property
    def pictures(self) -> list[str]:
        """All steps, the same in every frame."""
        s, (w, h) = self.steps, self._size
        kinds = {"lk-some": "", "lk-more": "", "lk-most": "", "lk-done": "", "lk-wrong": ""}
        for step, rank, chunk in product(range(s.total + 1), range(s.ranks), range(s.chunks)):
            if kind := self._kind(step, rank, chunk):
                x, y = self.at(step)
                left, middle = x + self.dot * chunk, y + self.dot * (rank + 0.5)
                kinds[kind] += f"M{num(left)} {num(middle)}h{num(self.dot - 1)}"
        found = [el("path", d=d, class_=kind, stroke_width=self.dot - 1) for kind, d in kinds.items() if d]
        places = [self.at(step) for step in range(s.total + 1)]
        found.append(el("path", d="".join(_box(x, y, w, h) for x, y in places), class_="lk-cells"))
        names = [text(x + w / 2, y - 6, str(step), 12, "middle", "lk-soft") for step, (x, y) in enumerate(places)]
        return [*found, "".join(names)]

    def here(self, step: int) -> str:
        """A frame around one step."""
        (x, y), (w, h) = self.at(step), self._size
        return el("rect", x=x - 3, y=y - 3, width=w + 6, height=h + 6, rx=2, class_="lk-here")

    @property
    def _size(self) -> tuple[float, float]:
        return self.dot * self.steps.chunks, self.dot * self.steps.ranks

    def _kind(self, step: int, rank: int, chunk: int) -> str:
        parts = self.steps.parts(step, rank, chunk)
        if max(parts) > 1:
            return "lk-wrong"
        if self.steps.done(step, rank, chunk):
            return "lk-done"
        return ("", "lk-some", "lk-more", "lk-most")[ceil(3 * sum(parts) / len(parts))]
