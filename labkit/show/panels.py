"""Small multiples: a panel an operation, a row a rank, and each number in the colour of the rank that it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from labkit.show.figure import WIDE, Drawing
from labkit.show.holds import NOBODY, SEVERAL, SUM, Cell, Panel, blocks
from labkit.show.outcome import outcome, short
from labkit.show.svg import el, fit, text, text_width, wrap
from labkit.show.words import say

TABS = 16, 11  #: width of the tab that names a cell's origin: with room, and where it is tight
GAP = 28  #: between panels
BREAK = 12  #: between nodes
MARKS = {SUM: "Σ", NOBODY: "?", SEVERAL: "*"}
Block = tuple[int, list[Cell]]


@dataclass(frozen=True, slots=True)
class Grid:
    """How the rows of a panel are cut: the width of a number's place, of a tab, and how a block is written.

    Attributes:
        unit, tab: In pixels.
        dots: How a block is written, with its first and last number; empty when there is room for the tab alone,
            ``None`` when each number has its own cell.
    """

    unit: float
    tab: float
    dots: str | None

    @classmethod
    def within(cls, rows: list[list[Block]], columns: int, room: float, size: float) -> Grid:
        """The first that fits in `room`: cells, then blocks; when nothing fits, cells that are as wide as they must."""
        unit = room / columns
        for dots in (None, "{0} … {1}", "{0}…", ""):
            for tab in TABS:
                grid = cls(unit, tab, dots)
                if all(grid._need(cells, size) <= unit * len(cells) for _, cells in grid.cut(rows)):
                    return grid
        widest = max(cls(0, TABS[-1], None)._need(cells, size) for _, cells in cls(0, 0, None).cut(rows))
        return cls(widest, TABS[-1], None)

    def cut(self, rows: list[list[Block]]) -> list[Block]:
        """All blocks of these rows, or all cells."""
        found = list(chain(*rows))
        return found if self.dots is not None else [(at + n, [c]) for at, row in found for n, c in enumerate(row)]

    def words(self, cells: list[Cell]) -> str:
        if len(cells) == 1:
            return short(cells[0].value)
        return (self.dots or "").format(short(cells[0].value), short(cells[-1].value))

    def _need(self, cells: list[Cell], size: float) -> float:
        words = self.words(cells)
        return self.tab + (text_width(words, size) + (8 if self.tab == TABS[0] else 1.5) if words else 0)


class View:
    """All panels in one layout: two abreast in the wide one, unless that is too narrow for their numbers.

    Without the state before, as many are abreast as have room for each number, and never more than three.
    """

    def __init__(self, first: Panel, panels: list[Panel], width: float, start: bool = True, nodes: int = 1) -> None:
        self.first, self.panels, self.width = first, [first, *panels] if start else panels, width
        self.start, self.nodes = start, nodes
        self.wide, self.ranks = width >= WIDE, len(first.rows)
        self.size = 13 if self.wide and self.ranks <= 4 else 12
        self.columns = max(len(row or ()) for row in first.rows)
        names = max(text_width(self._name(rank), self.size) for rank in range(self.ranks))
        self.label = names + (10 if self.wide else 6)
        self.rows = [[list(blocks(self._row(p, rank), self.columns)) for rank in range(self.ranks)]
                     for p in self.panels]  # fmt: skip
        for across in (2 if self.wide else 1, 1) if start else range(min(3, len(panels)), 0, -1):
            self.across = across
            self.grids = self._grids()
            if max(map(self._extent, range(len(self.panels)))) <= self.room + 1 and (start or self._single()):
                break
        self.pitch = 34 if self.ranks <= 4 else 28
        self.head = 42
        self.high = self.head + self.pitch * self.ranks + BREAK * (nodes - 1) + GAP - 4

    @property
    def room(self) -> float:
        """Width of a panel's cells."""
        return (self.width - 8 - GAP * (self.across - 1)) / self.across - self.label

    def draw(self) -> Drawing:
        parts, y = self._before() if self.start else ([], 0.0)
        after = range(1 if self.start else 0, len(self.panels))
        for place, n in enumerate(after):
            row, column = divmod(place, self.across)
            parts += self._panel(n, self._left(column), y + row * self.high)
        y += -(-len(after) // self.across) * self.high - GAP + 8
        if not self.start:
            parts += (below := list(self._key(4, y + 4, self.width - 8)))
            y += 30 * len(below)
        extent = max(map(self._extent, range(len(self.panels))))
        width = self.width if extent <= self.room + 1 else self.label + extent + 8
        return Drawing(width, y, tuple(parts))

    def _before(self) -> tuple[list[str], float]:
        """The state before, with what the looks mean beside or below it, and where the next panels begin."""
        panel = list(self._panel(0, 4, 0))
        if self.across == 2:
            return [*panel, *self._key(self._left(1) + self.label, 4 + self.head, self.room)], self.high
        below = list(self._key(4 + self.label, self.high - 8, self.room))
        return [*panel, *below], self.high + 30 * len(below)

    def _left(self, column: int) -> float:
        return 4 + column * (self.label + self.room + GAP)

    def _grids(self) -> list[Grid]:
        return [Grid.within(rows, self._columns(rows), self.room, self.size) for rows in self.rows]

    def _single(self) -> bool:
        return all(grid.dots is None for grid in self.grids)

    def _columns(self, rows: list[list[Block]]) -> int:
        return max(self.columns, *(at + len(cells) for row in rows for at, cells in row))

    def _extent(self, n: int) -> float:
        return self.grids[n].unit * self._columns(self.rows[n])

    def _row(self, panel: Panel, rank: int) -> tuple[Cell, ...]:
        """What a rank holds: what it held at first, where that is unchanged."""
        row, own = panel.rows[rank], self.first.rows[rank]
        return row if row is not None else own or ()

    def _name(self, rank: int) -> str:
        return say("trace.rank", rank=rank) if self.wide and self.ranks <= 4 else str(rank)

    # One panel

    def _panel(self, n: int, x: float, y: float) -> Iterator[str]:
        panel, room = self.panels[n], self.label + self.room
        yield text(x, y + 16, fit(panel.name, room * 0.9, self.size + 1), self.size + 1, None, "lk-name")
        what = outcome(panel, self.first) if n or not self.start else say("holdings.first")
        if what:
            yield text(x, y + 33, fit(what, room, self.size), self.size, None, "lk-soft")
        left, y = x + self.label, y + self.head
        for rank in range(self.ranks):
            if rank and rank * self.nodes % self.ranks == 0:
                yield el("line", x1=x, y1=y + BREAK / 2 - 2, x2=x + room, y2=y + BREAK / 2 - 2, class_="lk-lane")
                y += BREAK
            middle = y + (self.pitch - 4) / 2
            yield text(x, middle + 4.5, self._name(rank), self.size)
            yield from self._cells(n, rank, left, y)
            y += self.pitch

    def _cells(self, n: int, rank: int, x: float, y: float) -> Iterator[str]:
        grid, faint = self.grids[n], self.panels[n].rows[rank] is None
        pieces = grid.cut([self.rows[n][rank]])
        taken = {at + k for at, cells in pieces for k in range(len(cells))}
        for column in sorted(set(range(self.columns)) - taken):
            yield el("rect", x=x + grid.unit * column + 1, y=y, width=grid.unit - 2, height=self.pitch - 4, rx=3,
                     class_="lk-none")  # fmt: skip
        for at, cells in pieces:
            cls = "lk-held lk-faint" if faint else _class(cells[0].origin)
            place = x + grid.unit * at + 1, y, grid.unit * len(cells) - 2
            yield self._piece(*place, grid.tab, cls, _mark(cells[0].origin), grid.words(cells))

    def _piece(self, x: float, y: float, width: float, tab: float, cls: str, mark: str, words: str) -> str:
        """A box: at its left a tab that names the origin, then the number."""
        height, tab = self.pitch - 4, tab - 1 if words else width
        middle = y + height / 2
        parts = [el("rect", x=x, y=y, width=width, height=height, rx=3),
                 el("rect", x=x, y=y, width=tab, height=height, rx=3, class_="lk-tab"),
                 text(x + tab / 2, middle + 4.3, mark, 12, "middle", "lk-in")]  # fmt: skip
        if words:
            parts.append(text(x + (tab + width) / 2, middle + 4.5, words, self.size, "middle", "lk-in lk-value"))
        return el("g", *parts, class_=cls)

    # What the looks mean

    def _key(self, x: float, y: float, room: float) -> Iterator[str]:
        """A line for each look that the picture has."""
        seen = {cell.origin for panel in self.panels for row in panel.rows for cell in row or ()}
        rank = min(1, self.ranks - 1)
        lines = [(_class(rank), str(rank), say("holdings.key_rank", rank=rank))]
        lines += [(_class(SUM), MARKS[SUM], say("holdings.key_sum"))] if SUM in seen else []
        lines += [(_class(NOBODY), MARKS[NOBODY], say("holdings.key_nobody"))] if NOBODY in seen else []
        lines += [(_class(SEVERAL), MARKS[SEVERAL], say("holdings.key_several"))] if SEVERAL in seen else []
        if any(row is None for panel in self.panels for row in panel.rows):
            lines.append(("lk-held lk-faint", str(rank), say("holdings.key_unchanged")))
        for n, (cls, mark, words) in enumerate(lines):
            top = y + 30 * n
            body = (
                el("rect", x=x, y=top, width=34, height=20, rx=3),
                el("rect", x=x, y=top, width=15, height=20, rx=3, class_="lk-tab"),
            )
            told = wrap(words, room - 44, 12)
            said = [text(x + 42, top + 14.5 - 7 * (len(told) - 1) + 14 * k, line, 12, None, "lk-soft")
                    for k, line in enumerate(told)]  # fmt: skip
            sample = el("g", *body, text(x + 7.5, top + 14.3, mark, 12, "middle", "lk-in"), class_=cls)
            yield el("g", sample, *said)


def _mark(origin: int) -> str:
    return MARKS.get(origin, str(origin))


def _class(origin: int) -> str:
    looks = {SUM: "lk-sum", NOBODY: "lk-odd", SEVERAL: "lk-several"}
    return f"lk-held {looks.get(origin, f'lk-own lk-own{origin}')}"
