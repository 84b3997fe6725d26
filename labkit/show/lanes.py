"""A lane a rank, drawn from `order`'s items: arrows for messages, boxes for collectives and computation.

In the wide layout time runs to the right and lanes lie below each other; in the narrow one it runs downwards and
lanes stand side by side, so that nothing is scaled down on a phone. One set of functions draws both: they think
in *along* (the way time runs) and *across* (from lane to lane), and `Paper` turns those into x and y.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import hypot

from labkit.show.axis import OrderAxis, TimeAxis
from labkit.show.figure import WIDE, Drawing
from labkit.show.order import Item
from labkit.show.svg import el, escape, fit, num, size_of, text, text_width, wrap
from labkit.show.words import say

LINE = 15  #: from one line of text to the next
TALLEST = 560  #: a narrow picture higher than this scrolls


@dataclass(frozen=True, slots=True)
class Paper:
    """One layout: where lanes are, how large text is, and which way time runs."""

    upright: bool
    size: float
    pitch: float
    first: float  # where lanes begin, across
    start: float  # where time begins, along

    @classmethod
    def of(cls, width: float, ranks: int, spans: bool) -> Paper:
        if width < WIDE:
            return cls(True, 12, max(16.0, (width - 34) / max(1, ranks)), 34, 28)
        label = text_width(say("trace.rank", rank=max(0, ranks - 1)), 13)
        pitch = 58 if ranks <= 4 else 46 if ranks <= 8 else 32
        return cls(False, 13, pitch + (14 if spans else 0), 26, label + 20)

    def lane(self, rank: int) -> float:
        return self.first + self.pitch * (rank + 0.5)

    def xy(self, along: float, across: float) -> tuple[float, float]:
        return (across, along) if self.upright else (along, across)

    def rect(self, along: tuple[float, float], across: tuple[float, float], cls: str | None = None, rx=4) -> str:
        (x, y), (x2, y2) = self.xy(along[0], across[0]), self.xy(along[1], across[1])
        return el("rect", x=x, y=y, width=x2 - x, height=y2 - y, rx=rx, class_=cls)

    def line(self, a: tuple[float, float], b: tuple[float, float], cls: str | None = None) -> str:
        (x, y), (x2, y2) = self.xy(*a), self.xy(*b)
        return el("line", x1=x, y1=y, x2=x2, y2=y2, class_=cls)


class Lanes:
    """The picture of one layout; `draw(frame)` gives it up to a step."""

    def __init__(self, items: list[Item], ranks: int, steps: range, width: float, axis: str, tips: dict[int, str]):
        self.items, self.ranks, self.steps, self.tips = items, ranks, steps, tips
        self.paper = p = Paper.of(width, ranks, any(i.kind == "span" for i in items))
        self.width = max(width, p.first + p.pitch * ranks if p.upright else 0)
        if axis == "time":
            events = [e for item in items for e in item.events]
            self.axis: OrderAxis | TimeAxis = TimeAxis(events, p.start + 8, 380 if p.upright else width - p.start - 48)
        else:
            room = 0 if p.upright else width - p.start - 12
            least, most = (38, 38) if p.upright else (44, 160)
            self.axis = OrderAxis(steps, self._needs(), p.start, room, least, most)
        self._done: dict[tuple[tuple[str, str], int, str], str] = {}
        self.sent = sum(i.send.nbytes for i in items if i.send)

    # Words and the room they need

    def lines(self, item: Item) -> list[str]:
        """What is written at an item, in the lines that this layout has room for."""
        p, words = self.paper, caption(item)
        if item.kind == "collective":
            shortest = min(b - a + 1 for a, b in runs(item.ranks))
            if p.upright:
                room, told = shortest * p.pitch - 14, " · ".join(words)
                alone = text_width(told, p.size) <= room
                return [told] if alone else [line for part in words for line in wrap(part, room, p.size)]
            return words if shortest > 1 else [" · ".join(words)]
        if not p.upright:
            return [fit(" · ".join(words), 220, p.size)]
        return [line for part in words for line in wrap(part, p.pitch - 8, p.size)]

    def _needs(self) -> dict[int, float]:
        """How long each step's column must be for the words in it."""
        need: dict[int, float] = {}
        for item in self.items:
            if item.kind == "span":
                continue
            lines = self.lines(item)
            if self.paper.upright:
                length = 38.0 + LINE * (len(lines) - 1)
            else:
                length = max(text_width(line, self.paper.size) for line in lines) + 24
            need[item.first] = max(need.get(item.first, 0), length)
        return need

    def fits(self, item: Item) -> bool:
        """Whether the words of a message have room beside it (narrow lanes of many ranks have none)."""
        if not self.paper.upright:
            return True
        return all(text_width(line, self.paper.size) <= self.paper.pitch - 4 for line in self.lines(item))

    # The whole

    def draw(self, step: int | None) -> Drawing:
        """Everything up to `step`, the newest drawn heavier; ``None`` draws all, nothing heavier."""
        p, end = self.paper, self.axis.end
        across = p.first + p.pitch * self.ranks
        parts = [self._lanes(), self._heads(), self._ticks(), *self._band(step)]
        for layer in LAYERS:
            parts += [self._part(layer, i, s) for i in self.items if i.kind == layer[0] and (s := self._state(i, step))]
        if not self.items:
            parts.append(text(*self._middle(), say("trace.empty"), p.size, "middle", "lk-soft"))
        width, height = (self.width, end + 8) if p.upright else (max(self.width, end + 12), across + 4)
        scrolls = height > TALLEST if p.upright else width > WIDE + 1
        if scrolls or (p.upright and width > 300):
            strip = (width, p.start - 4) if p.upright else (p.start - 8, height)
            return Drawing(width, height, tuple(parts), (*strip, (self._heads(),)))
        foot = wrap(told, width - 12, p.size) if (told := self._foot(step)) else []
        parts += [text(8, height + 8 + LINE * n, line, p.size, cls="lk-soft") for n, line in enumerate(foot, 1)]
        return Drawing(width, height + 14 + LINE * len(foot), tuple(parts))

    def _middle(self) -> tuple[float, float]:
        p = self.paper
        return (self.width / 2, p.start + 20) if p.upright else (self.width / 2, p.lane(0) - 8)

    def _lanes(self) -> str:
        p, far = self.paper, self.axis.end if self.paper.upright else max(self.axis.end, self.width - 12)
        return "".join(p.line((p.start - 4, p.lane(r)), (far, p.lane(r)), "lk-lane") for r in range(self.ranks))

    def _heads(self) -> str:
        """The name of each lane; where lanes stand close, its number."""
        p = self.paper
        names = [say("trace.rank", rank=r) for r in range(self.ranks)]
        if p.upright and max(text_width(n, p.size) for n in names or [""]) > p.pitch - 4:
            every = 1 if p.pitch > text_width(str(self.ranks - 1), p.size) + 3 else 2
            names = [str(r) if r % every == 0 else "" for r in range(self.ranks)]
        if p.upright:
            return "".join(text(p.lane(r), 16, name, p.size, "middle") for r, name in enumerate(names) if name)
        return "".join(text(4, p.lane(r) + 4, name, p.size) for r, name in enumerate(names))

    def _ticks(self) -> str:
        p = self.paper
        word = say("trace.time") if isinstance(self.axis, TimeAxis) else say("trace.step")
        if p.upright:
            marks = [text(p.first - 4, at + 4, label.removesuffix(" ms"), p.size, "end", "lk-soft")
                     for at, label in self.axis.ticks()]  # fmt: skip
            return text(2, 16, fit(word, 32, p.size), p.size, None, "lk-soft") + "".join(marks)
        marks = [text(at, 16, label, p.size, "middle", "lk-soft") for at, label in self.axis.ticks()]
        return text(4, 16, fit(word, p.start - 10, p.size), p.size, None, "lk-soft") + "".join(marks)

    def _band(self, step: int | None) -> list[str]:
        column = None if step is None else self.axis.band(step)
        if column is None:
            return []
        p = self.paper
        return [p.rect(column, (p.first + 1, p.first + p.pitch * self.ranks), "lk-band", rx=2)]

    def _foot(self, step: int | None) -> str:
        upto = self.steps.stop - 1 if step is None else step
        words = []
        if len(self.steps) > 1 and isinstance(self.axis, OrderAxis):
            words.append(say("trace.foot", step=f"{upto:,}", steps=f"{self.steps.stop - 1:,}"))
        if self.sent:
            done = sum(i.send.nbytes for i in self.items if i.send and i.first <= upto)
            words.append(say("trace.sent", done=size_of(done), all=size_of(self.sent)))
        mute = [i for i in self.items if i.kind == "message" and not self.fits(i)]
        if sizes := {i.send.nbytes for i in mute if i.send}:
            low, high = size_of(min(sizes)), size_of(max(sizes))
            words.append(say("trace.each", size=low) if low == high else say("trace.between", low=low, high=high))
        if any(i.unfinished for i in mute):
            words.append(say("trace.dashed"))
        return " · ".join(words)

    # One item

    def _state(self, item: Item, step: int | None) -> str:
        """Nothing yet, ``"fly"`` (sent, not received), ``"done"``; with a + when it is the newest."""
        if step is None:
            return "done"
        if item.first > step:
            return ""
        new = "+" if step in (item.first, item.last) and item.kind != "span" else ""
        return ("fly" if item.kind == "message" and item.last > step else "done") + new

    def _part(self, layer: tuple[str, str], item: Item, state: str) -> str:
        key = (layer, id(item), state)
        if key not in self._done:
            cls = f"{'lk-now ' if state.endswith('+') else ''}{'lk-open ' if item.unfinished else ''}"
            tip = "\n".join(self.tips[id(e)] for e in item.events) if layer[1] == layer[0] else ""
            body = "".join(getattr(self, f"_{layer[1]}")(item, state.startswith("fly")))
            cls += f"lk-{layer[1]}"
            self._done[key] = el("g", el("title", escape(tip)) if tip else "", body, class_=cls) if body else ""
        return self._done[key]

    def _message(self, item: Item, flying: bool) -> Iterator[str]:
        p, (left, right) = self.paper, self.axis.message(item)
        send, recv = item.send, item.recv
        here, peer = item.events[0].rank, item.events[0].peer
        if send and recv:
            ends = (left, p.lane(send.rank)), (right, p.lane(recv.rank))
        elif recv and peer is not None and peer < self.ranks and isinstance(self.axis, OrderAxis):
            yield from self._awaited(here, peer, left)
            return
        else:  # it dangles: a part of the way to the lane that did nothing
            reach = 0 if peer is None else max(-0.44, min(0.44, peer - here)) * p.pitch
            room = left - self.axis.start if recv else self.axis.end - left
            away = (left + (-1 if recv else 1) * min(20.0 if p.upright else 40.0, room), p.lane(here) + reach)
            ends = (away, (left, p.lane(here))) if recv else ((left, p.lane(here)), away)
        a, b = p.xy(*ends[0]), p.xy(*ends[1])
        if flying:  # a stub of one length for all, so that no two seem to meet
            share = min(0.5, 36 / (hypot(b[0] - a[0], b[1] - a[1]) or 1))
            b = a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share
        yield from arrow(a, b, head=not flying, gap=6 if recv and not flying else 0)
        if send and send.rank == here:
            yield el("circle", cx=a[0], cy=a[1], r=4) if left >= self.axis.start else ""
        if recv and not flying:
            yield el("circle", cx=b[0], cy=b[1], r=4, class_="lk-recv")

    def _awaited(self, here: int, peer: int, along: float) -> Iterator[str]:
        """A receive whose message never came, as an arc to the rank that it waits for: a circle of waiting closes."""
        p, far = self.paper, abs(peer - here)
        apart = 5 if peer > here else 0  # two that wait for each other: one arc inside the other
        bulge = min(along - self.axis.start - 2, 12 + 16 * far + apart) * 4 / 3
        toward = 7 if peer > here else -7  # so that it does not begin at the head of the arc that ends here
        (x, y), (x2, y2) = p.xy(along - 4, p.lane(here) + toward), p.xy(along - 6, p.lane(peer))
        (cx, cy), (cx2, cy2) = p.xy(along - bulge, p.lane(here)), p.xy(along - bulge, p.lane(peer))
        yield el("path", d=f"M{num(x)} {num(y)}C{num(cx)} {num(cy)} {num(cx2)} {num(cy2)} {num(x2)} {num(y2)}",
                 fill="none")  # fmt: skip
        yield from arrow(p.xy(along - 16, p.lane(peer)), (x2, y2), head=True, gap=0)
        a, b = p.xy(along, p.lane(here))
        yield el("circle", cx=a, cy=b, r=4, class_="lk-recv")

    def _caption(self, item: Item, flying: bool) -> Iterator[str]:
        """The words of a message: above its start, or on the side that its arrow leaves free."""
        if not self.fits(item):
            return
        p, lines, along = self.paper, self.lines(item), self.axis.message(item)[0]
        rank, peer = item.events[0].rank, item.events[0].peer
        if p.upright:
            top = along - 8 - LINE * (len(lines) - 1) if item.send else along + 18  # what waits is written below
            for n, line in enumerate(lines):
                yield text(p.lane(rank), top + LINE * n, line, p.size, "middle")
            return
        below = peer is not None and peer < rank
        spill = along + 6 + text_width(lines[0], p.size) > max(self.width, self.axis.end)
        x, anchor = (along - 6, "end") if spill else (along + 6, None)
        yield text(x, p.lane(rank) + (17 if below else -7), lines[0], p.size, anchor)

    def _thread(self, item: Item, flying: bool) -> Iterator[str]:
        """What ties together the boxes of a group whose ranks are no neighbours."""
        p, pieces = self.paper, list(runs(item.ranks))
        if isinstance(self.axis, TimeAxis):
            late = max(self.axis.box(item, e)[0] for e in item.events)
            yield p.line((late, p.lane(item.ranks[0])), (late, p.lane(item.ranks[-1])))
            return
        along = self.axis.box(item, item.events[0])
        beside = [i for i in self.items if i.kind == "collective" and i.first == item.first]
        share = (along[1] - along[0]) / (len(beside) + 1)
        at = along[0] + share * (beside.index(item) + 1)  # groups that cross keep their threads apart
        for (_, above), (below, _) in pairwise(pieces):
            yield p.line((at, p.lane(above)), (at, p.lane(below)))

    def _collective(self, item: Item, flying: bool) -> Iterator[str]:
        if isinstance(self.axis, TimeAxis):
            yield from self._collective_in_time(item)
            return
        p, along = self.paper, self.axis.box(item, item.events[0])
        half = p.pitch / 2 - 3 if p.upright else min(p.pitch / 2 - 3, 17)
        for a, b in runs(item.ranks):
            yield p.rect(along, (p.lane(a) - half, p.lane(b) + half), rx=6)
            yield from self._inside(self.lines(item), along, (p.lane(a) - half, p.lane(b) + half))
        for a, b in runs(self._absent(item)):
            yield p.rect(along, (p.lane(a) - half, p.lane(b) + half), "lk-gone", rx=6)
            yield from self._inside([say("trace.missing")], along, (p.lane(a) - half, p.lane(b) + half))

    def _absent(self, item: Item) -> tuple[int, ...]:
        """The ranks that a collective of the whole world waits for, and that are not seen to wait elsewhere."""
        if item.events[0].group != "world" or not item.unfinished:
            return ()
        elsewhere = {r for i in self.items if i.unfinished for r in i.ranks}
        return tuple(r for r in range(self.ranks) if r not in item.ranks and r not in elsewhere)

    def _collective_in_time(self, item: Item) -> Iterator[str]:
        """Each rank from its call to its return, tied together where the last one came in."""
        p = self.paper
        half = p.pitch / 2 - 3 if p.upright else min(p.pitch / 2 - 3, 14)
        for e in item.events:
            along, across = self.axis.box(item, e), (p.lane(e.rank) - half, p.lane(e.rank) + half)
            yield p.rect(along, across)
            yield from self._inside(caption(item) if p.upright else [" · ".join(caption(item))], along, across)

    def _box(self, item: Item, flying: bool) -> Iterator[str]:
        p, e = self.paper, item.events[0]
        along, half = self.axis.box(item, e), p.pitch / 2 - 3 if p.upright else min(p.pitch / 2 - 3, 14)
        across = p.lane(e.rank) - half, p.lane(e.rank) + half
        letter = {"forward": "lk-F", "backward": "lk-B"}.get(e.phase or "")
        yield el("g", p.rect(along, across), class_=letter)
        yield from self._inside(self.lines(item), along, across)

    def _inside(self, lines: list[str], along: tuple[float, float], across: tuple[float, float]) -> Iterator[str]:
        """Lines of text in the middle of a box, cut where they must be."""
        p = self.paper
        (x, y), (x2, y2) = p.xy(along[0], across[0]), p.xy(along[1], across[1])
        if y2 - y < LINE or x2 - x < p.size:
            return
        lines = lines[: max(1, int((y2 - y) // LINE))]
        top = (y + y2) / 2 - LINE * (len(lines) - 1) / 2 + p.size * 0.36
        for n, line in enumerate(lines):
            yield text((x + x2) / 2, top + LINE * n, fit(line, x2 - x - 4, p.size), p.size, "middle", "lk-in")

    def _span(self, item: Item, flying: bool) -> Iterator[str]:
        p, e = self.paper, item.events[0]
        a, b = self.axis.box(item, e)
        half = p.pitch / 2 - 2
        yield p.rect((a - 4, b + 4), (p.lane(e.rank) - half, p.lane(e.rank) + half), "lk-span")
        if not p.upright and half > 26:
            yield text(a, p.lane(e.rank) - half + 12, fit(e.name, b - a, p.size - 1), p.size - 1, None, "lk-soft")


#: What is painted below what: (kind of item, method that draws it).
LAYERS = (("span", "span"), ("collective", "thread"), ("collective", "collective"), ("box", "box"),
          ("message", "message"), ("message", "caption"))  # fmt: skip


def caption(item: Item) -> list[str]:
    """What is written at an item: a size, a name, and what went wrong."""
    e = item.events[0]
    if item.kind == "message":
        if item.send is None:
            return [say("trace.waits", peer=say("trace.anyone") if e.peer is None else e.peer)]
        if item.recv is None:
            return [solid(size_of(e.nbytes)), say("trace.unreceived")]
        return [solid(size_of(e.nbytes)), *([say("trace.unfinished")] if item.unfinished else [])]
    name = {"forward": "F ", "backward": "B "}.get(e.phase or "", "") + e.name
    size = [solid(size_of(e.nbytes))] if item.kind == "collective" and e.nbytes else []
    return [name, *size, *([say("trace.unfinished")] if item.unfinished else [])]


def solid(words: str) -> str:
    """Words that no line break may part."""
    return words.replace(" ", "\xa0")


def runs(ranks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Neighbouring ranks as (first, last).

    >>> list(runs((0, 1, 3)))
    [(0, 1), (3, 3)]
    """
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in group]
        yield members[0], members[-1]


def arrow(a: tuple[float, float], b: tuple[float, float], head: bool, gap: float) -> Iterator[str]:
    """A line from a to b, its point `gap` before b. The head is a path, not a marker: markers need ids."""
    length = hypot(b[0] - a[0], b[1] - a[1]) or 1.0
    ux, uy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
    tip = b[0] - gap * ux, b[1] - gap * uy
    end = (tip[0] - 8 * ux, tip[1] - 8 * uy) if head else tip
    yield el("path", d=f"M{num(a[0])} {num(a[1])}L{num(end[0])} {num(end[1])}")
    if head:
        base = tip[0] - 10 * ux, tip[1] - 10 * uy
        left, right = (base[0] - 5 * uy, base[1] + 5 * ux), (base[0] + 5 * uy, base[1] - 5 * ux)
        points = " ".join(f"{num(x)},{num(y)}" for x, y in (tip, left, right))
        yield el("polygon", points=points, stroke="none", class_="lk-head")
