"""`show.timeline` in one layout: a row of blocks a rank, its stash below it, all variants on one axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from labkit.show.figure import WIDE, Drawing
from labkit.show.memorybars import hatch
from labkit.show.quantity import marks
from labkit.show.svg import el, fit, num, text, text_width, wrap
from labkit.show.timelinerows import Row, Variant
from labkit.show.words import say

if TYPE_CHECKING:
    from labkit.pipeline.timeline import TimedAction

LIFT = 4  #: F stands so much higher than B and W, so that they differ without colour
SAME = 0.005  #: makespans that differ by less end at the same time
THIN = 7  #: pixels; rows whose blocks are narrower on average have thin outlines
STRIP = 16  #: height of the labels above blocks that are too narrow for their own
BOLD = 1.12  #: how much wider bold text is
FRACTIONS = {2: "½", 3: "⅓", 4: "¼"}


@dataclass(frozen=True, slots=True)
class Chart:
    """All that the picture shows.

    Attributes:
        variants: From the top.
        unit: Of time.
        top: Where the axis ends.
        guess: The learner's own makespan, across all variants.
        guesses: Name → the learner's own.
        transfers: Whether messages are drawn.
        path: Whether the critical path is outlined.
    """

    variants: Sequence[Variant]
    unit: str
    top: float
    guess: float | None
    guesses: dict[str, float]
    transfers: bool
    path: bool

    @property
    def same(self) -> bool:
        """Whether all end at the same time."""
        spans = [variant.timeline.makespan for variant in self.variants]
        return max(spans) <= min(spans) * (1 + SAME)

    def time(self, value: float) -> str:
        """A time with its unit."""
        return f"{told(value)} {self.unit}".rstrip()


class View:
    """A chart in one layout: names and shares stand beside their rows, or above them where it is narrow."""

    def __init__(self, chart: Chart, width: float) -> None:
        self.chart, self.width, self.wide = chart, width, width >= WIDE
        self.size = 13 if self.wide else 12
        most = max(v.timeline.ranks for v in chart.variants)
        self.block = 22 if most <= 4 else 20
        self.stash = 24 if most <= 4 else 14
        rows = [(v, row) for v in chart.variants for row in v.rows]
        self.left = 12 + max(text_width(rank(r), self.size) for _, r in rows) if self.wide else 4.0
        behind = max(text_width(w, self.size) * BOLD for v, r in rows for w in (idle(v, r), peak(v, r)))
        self.right = width - (behind + 14 if self.wide else 8)
        self.scale = (self.right - self.left) / (chart.top or 1.0)
        #: The most that a row holds, as a share of what a rank does for one micro-batch.
        self.most = max(v.peak / v.chunks for v in chart.variants) or 1
        self.labels = {(v.name, r.rank): [self._label(r, e) for e in r.events] for v, r in rows}
        self.strips = [any("" in self.labels[v.name, r.rank] for r in v.rows) for v in chart.variants]
        self.tops: list[list[float]] = []  #: variant → rank → the top of its blocks
        self.bottom = self._place()

    def _place(self) -> float:
        y = 4.0 + (20 if self.chart.guess is not None else 0)
        for variant, strip in zip(self.chart.variants, self.strips, strict=True):
            y += 8 + 17 * len(self._head(variant))
            above = (STRIP if strip else 0) + (0 if self.wide else 18)
            high = above + self.block + LIFT + 3 + self.stash + 9
            self.tops.append([y + n * high + above for n in range(variant.timeline.ranks)])
            y += high * variant.timeline.ranks + 6
        return y

    def at(self, time: float) -> float:
        return self.left + time * self.scale

    def _label(self, row: Row, event: TimedAction) -> str:
        """The longest label that a block has room for; empty if there is none."""
        room = (event.end - event.start) * self.scale - 1.5
        if room < 7:
            return ""
        room -= 4 if row.chunk(event) else 0
        words = (f"{event.kind}{event.micro_batch}", str(event.micro_batch))
        return next((w for w in words if text_width(w, 12) <= room), "")

    def draw(self) -> Drawing:
        parts: list[str] = list(self._axis())
        for n, variant in enumerate(self.chart.variants):
            parts += self._variant(n, variant)
        return Drawing(self.width, self.bottom + 24, (*parts, *self._guess()))

    # One variant

    def _head(self, variant: Variant) -> list[str]:
        """The lines above its rows; the first one is its name."""
        line = variant.timeline
        said = say("timeline.head", makespan=self.chart.time(line.makespan), ideal=f"{line.bubble * 100:.1f}",
                   total=f"{line.bubble_of_total * 100:.1f}")  # fmt: skip
        if self.wide and text_width(variant.name, self.size + 1) + text_width(said, self.size) < self.width - 40:
            return [said]
        return ["", *wrap(said, self.width - 8, self.size)]

    def _variant(self, n: int, variant: Variant) -> Iterator[str]:
        tops, head = self.tops[n], self._head(variant)
        y = tops[0] - (STRIP if self.strips[n] else 0) - (0 if self.wide else 18) - 17 * len(head) + 9
        yield text(4, y, fit(variant.name, self.width * 0.9, self.size + 1), self.size + 1, cls="lk-big")
        for k, line in enumerate(head):
            yield text(4 if k else self.width - 4, y + 17 * k, line, self.size, None if k else "end")
        end = self.at(variant.timeline.makespan)
        foot = self.bottom - 6 if self.chart.same else tops[-1] + self.block + LIFT + 3 + self.stash + 4
        yield el("path", d=f"M{num(end)} {num(tops[0] - 4)}V{num(foot)}", class_="lk-end")
        for row, top in zip(variant.rows, tops, strict=True):
            yield from self._row(variant, row, top)
            if self.strips[n]:
                yield from self._strip(row, self.labels[variant.name, row.rank], top)
        if self.chart.transfers and variant.timeline.transfers:
            yield self._transfers(variant, tops)
        if self.chart.path:
            yield self._path(variant, tops)
        if variant.name in self.chart.guesses:
            x = self.at(min(self.chart.guesses[variant.name], self.chart.top))
            yield el("path", d=f"M{num(x)} {num(tops[0] - 4)}V{num(foot)}", class_="lk-line lk-guess")

    def _row(self, variant: Variant, row: Row, top: float) -> Iterator[str]:
        middle, under = top + (self.block + LIFT) / 2 + 4.5, top + self.block + LIFT + 3
        if self.wide:
            yield text(4, middle, rank(row), self.size)
            yield text(self.right + 8, middle, idle(variant, row), self.size)
            yield text(self.right + 8, under + self.stash / 2 + 4.5, peak(variant, row), self.size, cls="lk-peak")
        else:
            y = top - (STRIP if self._stripped(variant) else 0) - 6
            yield text(4, y, f"{rank(row)} · {idle(variant, row)}", 12)
            yield text(self.right, y, peak(variant, row), 12, "end", "lk-peak")
        yield self._gaps(variant, row, top)
        yield self._held(variant, row, under)
        yield self._blocks(row, self.labels[variant.name, row.rank], top)

    def _stripped(self, variant: Variant) -> bool:
        return self.strips[list(self.chart.variants).index(variant)]

    def _gaps(self, variant: Variant, row: Row, top: float) -> str:
        """Idle time: dotted."""
        edges = [0.0, *(t for e in row.events for t in (e.start, e.end)), variant.timeline.makespan]
        middle = num(top + (self.block + LIFT) / 2)
        gaps = [(self.at(a), self.at(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        d = "".join(f"M{num(a + 2)} {middle}H{num(b - 2)}" for a, b in gaps if b - a > 5)
        return el("path", d=d, class_="lk-gap") if d else ""

    def _held(self, variant: Variant, row: Row, y: float) -> str:
        """The stash as a step curve: filled, from the row's start to where it is empty again."""
        floor, unit = y + self.stash, self.stash / (self.most * variant.chunks)
        steps = [f"M{num(self.at(0))} {num(floor)}"]
        for time, held in row.stash:
            steps.append(f"H{num(self.at(time))}V{num(floor - held * unit)}")
        return el("path", d="".join(steps) + f"H{num(self.at(variant.timeline.makespan))}", class_="lk-stash")

    def _blocks(self, row: Row, labels: list[str], top: float) -> str:
        boxes: dict[str, list[str]] = defaultdict(list)
        notches: list[str] = []
        words: list[str] = []
        for event, label in zip(row.events, labels, strict=True):
            x, end = self.at(event.start), self.at(event.end)
            y, wide = top + (0 if event.kind == "F" else LIFT), max(end - x, 0.6)
            boxes[event.kind].append(f"M{num(x)} {num(y)}h{num(wide)}v{self.block}h{num(-wide)}z")
            if event.kind == "W":
                boxes["hatch"].append(hatch(x, y, wide, self.block, 5))
            for k in range(row.chunk(event)):
                notch = min(4, wide * 0.45)
                notches.append(f"M{num(x)} {num(y + 3 + 6 * k)}h{num(notch)}v4h{num(-notch)}z")
            if label:
                shift = 2 if row.chunk(event) else 0
                cls = None if event.kind == "W" else "lk-in"  # on hatching, words need their halo
                words.append(text((x + end) / 2 + shift, y + self.block / 2 + 4.3, label, 12, "middle", cls))
        busy = sum(e.end - e.start for e in row.events) * self.scale
        body = [el("path", d="".join(d), class_=f"lk-t{kind}") for kind, d in boxes.items()]
        if notches:
            body.append(el("path", d="".join(notches), class_="lk-notch"))
        return el("g", *body, *words, class_="lk-work lk-thin" if busy < THIN * len(row.events) else "lk-work")

    def _strip(self, row: Row, labels: list[str], top: float) -> Iterator[str]:
        """Labels above the blocks that have none: of every micro-batch, or of each second, fourth …, as fit."""
        bare = [event for event, label in zip(row.events, labels, strict=True) if not label]
        room, step = (self.right - self.left) / (text_width("F0", 12) + 8), 1
        while sum(event.micro_batch % step == 0 for event in bare) > room:
            step *= 2
        taken = -1.0
        for event in bare:
            word, x = f"{event.kind}{event.micro_batch}", self.at(event.start)
            if event.micro_batch % step or x < taken or x + text_width(word, 12) > self.width - 2:
                continue
            taken = x + text_width(word, 12) + 8
            foot = top + (0 if event.kind == "F" else LIFT)
            yield el("path", d=f"M{num(x + 0.7)} {num(top - STRIP + 2)}V{num(foot)}", class_="lk-flag")
            yield text(x + 3.5, top - 4, word, 12)

    # Across the rows

    def _transfers(self, variant: Variant, tops: Sequence[float]) -> str:
        lines = []
        for transfer in variant.timeline.transfers:
            message = transfer.message
            down = message.source < message.target
            y = tops[message.source] + (self.block + LIFT if down else 0)
            to = tops[message.target] + (0 if down else self.block + LIFT)
            lines.append(f"M{num(self.at(transfer.start))} {num(y)}L{num(self.at(transfer.end))} {num(to)}")
        return el("path", d="".join(lines), class_="lk-sent")

    def _path(self, variant: Variant, tops: Sequence[float]) -> str:
        """The critical path: its blocks outlined, and a line from each to the next one."""
        from labkit.pipeline.timeline import TimedAction

        steps = [step for step in variant.timeline.critical_path if isinstance(step, TimedAction)]
        boxes, middle = [], self.block / 2
        y = {step: tops[step.rank] + (0 if step.kind == "F" else LIFT) for step in steps}
        for step in steps:
            x, wide = self.at(step.start), (step.end - step.start) * self.scale
            boxes.append(f"M{num(x)} {num(y[step])}h{num(wide)}v{self.block}h{num(-wide)}z")
        for one, after in pairwise(steps):
            if one.rank != after.rank:
                boxes.append(f"M{num(self.at(one.end))} {num(y[one] + middle)}"
                             f"L{num(self.at(after.start))} {num(y[after] + middle)}")  # fmt: skip
        return el("path", d="".join(boxes), class_="lk-critical")

    def _guess(self) -> Iterator[str]:
        guess = self.chart.guess
        if guess is None:
            return
        x = self.at(min(guess, self.chart.top))
        words = say("bars.guess" if guess <= self.chart.top else "bars.guess_beyond", value=self.chart.time(guess))
        half = text_width(words, self.size) / 2 + 2
        yield el("path", d=f"M{num(x)} 18V{num(self.bottom)}", class_="lk-line lk-guess")
        yield text(max(half, min(x, self.width - half)), 14, words, self.size, "middle", "lk-guess")

    def _axis(self) -> Iterator[str]:
        found = marks(self.chart.top, "", 6 if self.wide else 4)
        lines = (el("line", x1=self.at(m), y1=self.tops[0][0] - 4, x2=self.at(m), y2=self.bottom) for m in found)
        yield el("g", *lines, class_="lk-marks")
        for mark in found:
            words = self.chart.time(mark) if mark == found[-1] else told(mark)
            half = text_width(words, 12) / 2
            x = max(half + 2, min(self.at(mark), self.width - 2 - half))
            yield text(x, self.bottom + 16, words, 12, "middle", "lk-soft")


def rank(row: Row) -> str:
    return say("trace.rank", rank=row.rank)


def idle(variant: Variant, row: Row) -> str:
    """The share of the makespan in which the rank does nothing."""
    return say("timeline.idle", percent=f"{100 * variant.idle[row.rank]:.0f}")


def peak(variant: Variant, row: Row) -> str:
    """The most that the rank holds: micro-batches, or, where it has several chunks, parts of them."""
    held, chunks = variant.peaks[row.rank], variant.chunks
    if chunks == 1:
        return say("timeline.peak", held=held)
    return say("timeline.peak", held=f"{held}×{FRACTIONS.get(chunks, f'1/{chunks}')}")


def told(value: float) -> str:
    """A time as people read it: four digits, or all before the point.

    >>> told(660.0), told(1234.5), told(23.56789)
    ('660', '1,234', '23.57')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
