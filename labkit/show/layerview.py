"""`show.layer` in one layout: a lane a rank, forward above backward, f and g in the same columns of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

from labkit.show.figure import WIDE, Drawing
from labkit.show.layerstages import PHASES, Layer, LayerStage, Shape
from labkit.show.svg import el, escape, fit, num, size_of, text, text_width, wrap
from labkit.show.words import say

LINE = 14  #: between lines of text
HALF = 14  #: half the height of f and g
PITCH = 2 * HALF + 6  #: between two of them at one place
HEAD = 56  #: from a row's top to its first lane: the part, the places, the phase
LOOKS = {"share": "lk-share"}
Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a place is drawn: its row, the middle of its column, and the column's width."""

    row: int
    x: float
    width: float


class View:
    """Layers of the same ranks and places in one layout; a narrow one has a row for each part of the layer.

    Args:
        layers: Name → layer.
        tips: Name → what is said of each stage.
        width: Of the layout.
    """

    def __init__(self, layers: Mapping[str, Layer], tips: Mapping[str, list[str]], width: float) -> None:
        self.layers, self.tips, self.width = layers, tips, width
        first = next(iter(layers.values()))
        self.wide, self.ranks, self.places = width >= WIDE, first.ranks, first.places
        self.size = 13 if self.wide else 12
        self.gates = set().union(*(layer.gates() for layer in layers.values()))
        self.stack = max([1, *(len(layer.at(p, f)) for layer in layers.values() for p in self.gates for f in PHASES)])
        self.names = [say("trace.rank", rank=r) if self.wide else str(r) for r in self.ranks]
        self.left = 10 + max(text_width(name, 12) for name in self.names)
        self.rows = [self.places] if self.wide else [tuple(row) for _, row in groupby(self.places, lambda p: p[0])]
        self.lines, self.need = self._fitting()
        self.spots = dict(self._spots())
        self.extent = max(width, *(s.x + s.width / 2 + 4 for s in self.spots.values()))
        self.lane = max(LINE * self.lines + 10, -(-PITCH * self.stack // len(self.ranks)))
        self.apart = self._words_apart()
        self.phases = [f for f in PHASES if any(s.phase == f for layer in layers.values() for s in layer.stages)]
        self.under = LINE * self.stack * (2 if self.apart else 1)
        self.block = len(self.ranks) * self.lane + self.under + 28
        self.high = HEAD + len(self.phases) * self.block - 10
        self.top = 26.0 if len(layers) > 1 else 0.0
        self.foot = max(len(self._foot(name, n)) for name in layers for n in range(len(layers[name].stages) + 1))
        self._made: dict[tuple[str, int, str], str] = {}
        self._frame = el("g", *self._scaffold())

    def draw(self, name: str, step: int | None) -> Drawing:
        """One layer; with a `step` (from 1) that stage is marked and later ones are outlines only."""
        layer, parts = self.layers[name], [self._frame]
        if self.top:
            order = say("layer.variant", name=name, n=list(self.layers).index(name) + 1, all=len(self.layers))
            parts.append(text(4, 15, fit(order, self.width - 8, self.size + 1), self.size + 1, cls="lk-big"))
        for n in range(len(layer.stages)):
            look = "done" if step is None or n < step - 1 else "now" if n == step - 1 else "later"
            parts.append(self._stage(name, n, look))
        y = self.top + self.high * len(self.rows) + 16
        lines = self._foot(name, len(layer.stages) if step is None else step)
        parts.append(el("g", *(text(4, y + 16 * n, line, self.size, cls="lk-big") for n, line in enumerate(lines))))
        return Drawing(self.extent, y + 16 * (self.foot - 1) + 8, tuple(parts))

    # Measures

    def _shapes(self) -> Iterator[Shape]:
        for layer in self.layers.values():
            for stage in layer.stages:
                yield from stage.shapes

    def _room(self, row: tuple[Place, ...]) -> float:
        """Width of a column that holds a tensor, if all are to fit."""
        gates = sum(place in self.gates for place in row)
        return (self.width - self.left - 4 - gates * self._column) / max(1, len(row) - gates)

    @property
    def _column(self) -> float:
        return 40 if self.wide else 30

    def _fitting(self) -> tuple[int, float]:
        """In how many lines shapes are written, and the width that a column needs for it."""
        room = min(self._room(row) for row in self.rows)
        names = max(text_width(place[1], 12) + 2 for place in self.places)
        for lines in (1, 2, 3):
            widest = max(text_width(line, 12) for shape in self._shapes() for line in written(shape, lines))
            if widest + 6 <= room:
                break
        return lines, max(widest + 6, names)

    def _spots(self) -> Iterator[tuple[Place, Spot]]:
        for n, row in enumerate(self.rows):
            x, box = self.left, max(self.need, self._room(row))
            for place in row:
                width = self._column if place in self.gates else box
                yield place, Spot(n, x + width / 2, width)
                x += width

    def _words_apart(self) -> bool:
        """Whether the name of a collective and its bytes stand in two lines, since one is too long."""
        longest = max([0.0, *(text_width(told(s), 12) for la in self.layers.values() for s in la.calls())])
        for n in range(len(self.rows)):
            at = sorted(self.spots[place].x for place in self.gates if self.spots[place].row == n)
            ends = [longest / 2 + 2, *at, self.extent - longest / 2 - 2]  # pushed inwards at the edges
            at = [min(max(x, ends[0]), ends[-1]) for x in at]
            if any(b - a < longest + 6 for a, b in pairwise(at)):
                return True
        return False

    def _lanes(self, row: int, phase: str) -> float:
        """The top of the lanes of a row and phase."""
        return self.top + row * self.high + HEAD + self.phases.index(phase) * self.block

    # What all frames share

    def _scaffold(self) -> Iterator[str]:
        heads = {"forward": say("layer.forward"), "backward": say("layer.backward")}
        parts = {"attention": say("layer.attention"), "mlp": say("layer.mlp")}
        for n, row in enumerate(self.rows):
            y = self.top + n * self.high
            for part, places in groupby(row, lambda p: p[0]):
                spots = [self.spots[place] for place in places]
                name = fit(parts.get(part, part), sum(s.width for s in spots) - 4, self.size)
                yield text(spots[0].x - spots[0].width / 2 + 2, y + 14, name, self.size, cls="lk-big")
            for place in row:
                yield text(self.spots[place].x, y + 31, place[1], 12, "middle")
            for phase in self.phases:
                top = self._lanes(n, phase)
                yield text(4, top - 7, heads[phase], 12, None, "lk-soft")
                for k, name in enumerate(self.names):
                    yield text(4, top + self.lane * (k + 0.5) + 4.5, name, 12)
                yield el("g", *self._through(row, top), class_="lk-lines")

    def _through(self, row: tuple[Place, ...], top: float) -> Iterator[str]:
        """Each rank's way through f and g."""
        for place in row:
            if place in self.gates:
                spot = self.spots[place]
                for k in range(len(self.ranks)):
                    y = top + self.lane * (k + 0.5)
                    yield el("line", x1=spot.x - spot.width / 2, y1=y, x2=spot.x + spot.width / 2, y2=y)

    def _foot(self, name: str, step: int) -> list[str]:
        """How many of the collectives there have been, and what they sent."""
        layer = self.layers[name]
        done, total = sum(bool(s.collective) for s in layer.stages[:step]), len(layer.calls())
        words, sent = say("layer.counter", done=done, all=total), layer.sent()
        if sent:
            words = say("layer.counter_sent", counter=words, done=size_of(layer.sent(step) or 0), all=size_of(sent))
        return wrap(words, self.width - 8, self.size)

    # Stages

    def _stage(self, name: str, n: int, look: str) -> str:
        key = (name, n, look)
        if key not in self._made:
            stage = self.layers[name].stages[n]
            spot = self.spots[stage.place]
            top = self._lanes(spot.row, stage.phase)
            if stage.shapes:
                cls = "lk-box lk-F" if stage.phase == "forward" else "lk-box lk-B"
                parts = self._outlines(stage, spot, top) if look == "later" else self._box(stage, spot, top)
            else:
                cls, parts = "lk-gate", self._gate(stage, spot, top, self._level(name, n), look == "later")
            cls = {"later": "lk-gate", "now": f"{cls} lk-now", "done": cls}[look]
            tip = "" if look == "later" else el("title", escape(self.tips[name][n]))
            self._made[key] = el("g", tip, *parts, class_=cls)
        return self._made[key]

    def _cells(self, stage: LayerStage, top: float) -> list[tuple[float, float]]:
        """Top and height of each box of a tensor: one across all lanes, or one a lane."""
        if stage.wide:
            return [(top + 2, len(self.ranks) * self.lane - 4)]
        return self._each(top)

    def _each(self, top: float) -> list[tuple[float, float]]:
        return [(top + self.lane * k + 2, self.lane - 4) for k in range(len(self.ranks))]

    def _outlines(self, stage: LayerStage, spot: Spot, top: float, cls: str | None = "lk-later") -> Iterator[str]:
        for y, high in self._cells(stage, top):
            yield el("rect", x=spot.x - spot.width / 2 + 2, y=y, width=spot.width - 4, height=high, rx=2, class_=cls)

    def _box(self, stage: LayerStage, spot: Spot, top: float) -> Iterator[str]:
        """A tensor with its shape; of one that should be whole and is not, each rank's own, and cracks between."""
        yield from self._outlines(stage, spot, top, "lk-split" if stage.cracked else LOOKS.get(stage.kind))
        if stage.cracked:
            for k in range(1, len(self.ranks)):
                d = crack(spot.x - spot.width / 2 + 2, top + self.lane * k, spot.width - 4)
                yield el("path", d=d, class_="lk-crack")
        cells = self._each(top) if stage.cracked else self._cells(stage, top)
        for shape, (y, high) in zip(stage.shapes, cells, strict=False):
            lines = written(shape, self.lines)
            base = y + high / 2 + 4.3 - LINE * (len(lines) - 1) / 2
            for k, line in enumerate(lines):
                yield text(spot.x, base + LINE * k, line, 12, "middle", "lk-in")

    def _level(self, name: str, n: int) -> tuple[int, int]:
        """Which of the symbols at one place this is, and how many there are."""
        layer = self.layers[name]
        stage = layer.stages[n]
        before = sum(s.place == stage.place and s.phase == stage.phase for s in layer.stages[:n])
        return before, len(layer.at(stage.place, stage.phase))

    def _gate(self, stage: LayerStage, spot: Spot, top: float, level: tuple[int, int], later: bool) -> Iterator[str]:
        """f or g: hollow where nothing is sent; a collective joins the lanes and has its bytes below."""
        (before, count), high = level, len(self.ranks) * self.lane
        y = top + high / 2 + (before - (count - 1) / 2) * PITCH
        if later:
            yield el("path", d=symbol(None, spot.x, y), class_="lk-unmade")
            return
        if stage.collective and not before:
            d = f"M{num(spot.x)} {num(top + self.lane / 2)}V{num(top + high - self.lane / 2)}"
            yield el("path", d=d, class_="lk-join")
        yield el("path", d=symbol(stage.collective, spot.x, y), class_="lk-solid" if stage.collective else "lk-hollow")
        x = spot.x + {"all_gather": 3, "reduce_scatter": -3}.get(stage.collective or "", 0)
        yield text(x, y + 4, stage.name[:1], 12, "middle", "lk-in lk-on" if stage.collective else "lk-in")
        if stage.collective:
            yield from self._bytes(stage, spot, top + high, before)

    def _bytes(self, stage: LayerStage, spot: Spot, bottom: float, before: int) -> Iterator[str]:
        lines = [operation(stage), size_of(stage.nbytes)] if self.apart else [told(stage)]
        for n, line in enumerate(lines):
            half = text_width(line, 12) / 2 + 2
            x = max(half, min(spot.x, self.extent - half))
            yield text(x, bottom + 12 + LINE * (before * len(lines) + n), line, 12, "middle")


def written(shape: Shape, lines: int) -> list[str]:
    """A shape in one line, in two, or a dimension a line.

    >>> written((2, 8, 16), 1), written((2, 8, 16), 2), written((2, 8, 16), 3)
    (['2×8×16'], ['2×8', '×16'], ['2', '8', '16'])
    """
    if lines == 1 or len(shape) == 1:
        return ["×".join(map(str, shape))]
    return ["×".join(map(str, shape[:-1])), f"×{shape[-1]}"] if lines == 2 else [str(n) for n in shape]


def symbol(collective: str | None, x: float, y: float) -> str:
    """The outline of f or g: a gather points left, a scatter right, anything else is a diamond."""
    left, right = num(x - HALF), num(x + HALF)
    if collective == "all_gather":
        return f"M{left} {num(y)}L{right} {num(y - HALF)}V{num(y + HALF)}z"
    if collective == "reduce_scatter":
        return f"M{right} {num(y)}L{left} {num(y - HALF)}V{num(y + HALF)}z"
    return f"M{left} {num(y)}L{num(x)} {num(y - HALF)}L{right} {num(y)}L{num(x)} {num(y + HALF)}z"


def crack(x: float, y: float, width: float) -> str:
    """A zigzag across a box."""
    teeth = max(2, round(width / 8))
    points = (f"L{num(x + width * n / teeth)} {num(y + (3 if n % 2 else -3))}" for n in range(1, teeth + 1))
    return f"M{num(x)} {num(y - 3)}{''.join(points)}"


def operation(stage: LayerStage) -> str:
    """The name of a collective."""
    known = {"all_reduce": say("layer.all_reduce"), "all_gather": say("layer.all_gather"),
             "reduce_scatter": say("layer.reduce_scatter"), "send": say("layer.send")}  # fmt: skip
    return known.get(stage.collective or "", str(stage.collective))


def told(stage: LayerStage) -> str:
    """A collective with its bytes."""
    return say("layer.bytes", name=operation(stage), size=size_of(stage.nbytes))
