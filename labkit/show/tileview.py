"""`show.tiles` in one layout: a matrix a variant, all of one size, and beside or below it what each rank computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import groupby

from labkit.show.figure import WIDE, Drawing
from labkit.show.svg import el, fit, text, text_width, wrap
from labkit.show.tilegrid import Grid
from labkit.show.words import count, say

LINE = 17  #: between lines of text
TAB = 20  #: the strip that names the rank of a row or column
PITCH = 26  #: between two ranks' bars
GAP = 28  #: between panels
MOST = 44  #: height and width of a tile, at most
TALL = 420  #: of a matrix, at most, unless the numbers need more


class View:
    """All matrices in one layout, two abreast in the wide one; they are of one size, and so are all bars.

    Args:
        grids: Name → grid.
        width: Of the layout.
    """

    def __init__(self, grids: Mapping[str, Grid], width: float) -> None:
        self.grids, self.width = grids, width
        self.wide = width >= WIDE
        self.ranks = next(iter(grids.values())).ranks
        self.size = 13 if self.wide else 12
        self.name = 22 if any(grids) else 0  # height of a panel's name
        self.edge = 11 + max(text_width(str(at.start), 12) for g in grids.values() for at in g.rows)
        self.left = self.edge if self.ranks == 1 else TAB + 4
        self.right = 10 + text_width(say("tiles.head_rows"), 12) if self.ranks == 1 else 0.0
        self.head = self.name + 18 + (20 if self.ranks == 1 else TAB + 6)
        self.most = max(max(grid.counts()) for grid in grids.values())
        self.across = 2 if self.wide and len(grids) > 1 else 1
        if self.across == 2 and self._panel_width > self._room:
            self.across = 1
        #: Whether the words and bars stand at the right of the only matrix.
        self.beside = self.wide and len(grids) == 1 and self._panel_width + GAP + 220 <= width
        self._made: dict[tuple[object, ...], str] = {}

    def draw(self, step: int | None) -> Drawing:
        """Up to and with `step`, which is marked; ``None``: all steps, none marked."""
        parts: list[str] = []
        for n, name in enumerate(self.grids):
            row, column = divmod(n, self.across)
            parts += self._panel(name, 4 + column * (self._room + GAP), row * self._high, step)
        wide = self.width if self._panel_width <= self._room + 1 else self._panel_width + 8
        return Drawing(wide, self._high * -(-len(self.grids) // self.across), tuple(p for p in parts if p))

    # Measures

    @property
    def _room(self) -> float:
        """Width of a panel."""
        return (self.width - 8 - GAP * (self.across - 1)) / self.across

    @property
    def _side(self) -> float:
        """Of a matrix: what there is room for, at least what the numbers need."""
        tiles = max(max(len(g.rows), len(g.columns)) for g in self.grids.values())
        widest = max(text_width(str(step), 12) for g in self.grids.values() for step in g.steps)
        return max(tiles * max(16.5, widest + 6), min(self._room - self.left - self.right, TALL, tiles * MOST))

    @property
    def _panel_width(self) -> float:
        return self.left + self._side + self.right

    @property
    def _aside(self) -> tuple[float, float, float]:
        """Where the bars and words of a panel stand: from its left, from its top, and their width."""
        if self.beside:
            return self._panel_width + GAP, self.head, self.width - 12 - self._panel_width - GAP
        return 0.0, self.head + self._side + 12, self._room

    @cached_property
    def _high(self) -> float:
        """Of a panel, the same for all of them in all frames."""
        lines = max(len(self._lines(g, step)) for g in self.grids.values() for step in (None, *g.steps))
        aside = self._aside[1] + self._bars_high + LINE * lines
        return max(self.head + self._side + 4, aside) + 8

    @property
    def _bars_high(self) -> float:
        return 0.0 if self.ranks == 1 else 24 + PITCH * self.ranks

    # One matrix

    def _panel(self, name: str, x: float, y: float, step: int | None) -> Iterator[str]:
        grid, left, top = self.grids[name], x + self.left, y + self.head
        if self.name:
            yield text(x, y + 15, fit(name, self._room, self.size + 1), self.size + 1, None, "lk-name")
        yield text(left, y + self.name + 13, say("tiles.axes"), 12, None, "lk-soft")
        yield from self._edges(grid, left, top) if self.ranks == 1 else self._tabs(grid, left, top)
        for row in range(len(grid.rows)):
            yield from self._row(name, row, left, top, step)
        if self.ranks == 1 and step in grid.steps:
            yield self._taken(grid, left, top, step)
        right, down, _ = self._aside
        if self.ranks > 1:
            yield from self._bars(grid, x + right, y + down, step)
        for n, line in enumerate(self._lines(grid, step)):
            yield text(x + right, y + down + self._bars_high + 12 + LINE * n, line, self.size)

    def _edges(self, grid: Grid, left: float, top: float) -> Iterator[str]:
        """The first position of each row and column, where there is room; at a row's end its tiles."""
        high, wide = self._side / len(grid.rows), self._side / len(grid.columns)
        parts, free = [], 0.0
        for n, at in enumerate(grid.columns):
            end = wide * n + text_width(str(at.start), 12)
            if wide * n >= free and end <= self._side + 4:
                parts.append(text(left + wide * n, top - 8, str(at.start), 12, None, "lk-soft"))
                free = end + 6
        right = left + self._side + 8
        parts.append(text(right, top - 8, say("tiles.head_rows"), 12, None, "lk-soft"))
        for n, at in enumerate(grid.rows):
            y, made = top + high * (n + 0.5) + 4.3, sum(row == n for row, _ in grid.cells)
            parts += [text(left - 8, y, str(at.start), 12, "end", "lk-soft"), text(right, y, str(made), self.size)]
        yield el("g", *parts)

    def _tabs(self, grid: Grid, left: float, top: float) -> Iterator[str]:
        """Whose the queries of each row are, and whose the keys of each column were at first."""
        at = 0
        for owner, group in groupby(grid.row_owners):
            high, n = self._side / len(grid.rows), len(list(group))
            if owner is not None:
                yield tab(left - TAB - 4, top + high * at + 1, TAB, high * n - 2, owner)
            at += n
        at = 0
        for owner, group in groupby(grid.column_owners):
            wide, n = self._side / len(grid.columns), len(list(group))
            if owner is not None:
                yield tab(left + wide * at + 1, top - TAB - 4, wide * n - 2, TAB, owner)
            at += n

    def _row(self, name: str, row: int, left: float, top: float, step: int | None) -> Iterator[str]:
        """A row of tiles; one that is all made or all to come is one part, which many frames share."""
        grid = self.grids[name]
        looks = [self._look(grid, row, column, step) for column in range(len(grid.columns))]
        cells = [self._cell(name, row, column, look, left, top) for column, look in enumerate(looks)]
        yield from cells if "now" in looks or len({"done", "yet"} & set(looks)) > 1 else ["".join(cells)]

    def _taken(self, grid: Grid, left: float, top: float, step: int | None) -> str:
        """The queries and keys that are in fast memory with the tile, at the matrix's edges."""
        row, column = grid.at(step)
        high, wide = self._side / len(grid.rows), self._side / len(grid.columns)
        x, y = left + wide * column, top + high * row
        return el("g", el("line", x1=left - 2, y1=y + 1, x2=left - 2, y2=y + high - 1),
                  el("line", x1=x + 1, y1=top - 2, x2=x + wide - 1, y2=top - 2), class_="lk-taken")  # fmt: skip

    def _look(self, grid: Grid, row: int, column: int, step: int | None) -> str:
        if (row, column) not in grid.cells:
            return "out"
        _, when = grid.cells[row, column]
        return "done" if step is None or when < step else "now" if when == step else "yet"

    def _cell(self, name: str, row: int, column: int, look: str, left: float, top: float) -> str:
        key = name, row, column, look
        if key not in self._made:
            grid = self.grids[name]
            high, wide = self._side / len(grid.rows), self._side / len(grid.columns)
            x, y = left + wide * column, top + high * row
            rank, when = grid.cells.get((row, column), (0, 0))
            box = el("rect", x=x + 1, y=y + 1, width=wide - 2, height=high - 2, rx=2,
                     class_={"out": "lk-out", "yet": "lk-yet"}.get(look))  # fmt: skip
            if look in ("done", "now"):
                number = text(x + wide / 2, y + high / 2 + 4.3, str(when), 12, "middle", "lk-in lk-value")
                box = el("g", box, number, class_=f"{own(rank)} lk-now" if look == "now" else own(rank))
            self._made[key] = box
        return self._made[key]

    # What stands beside or below it

    def _bars(self, grid: Grid, x: float, y: float, step: int | None) -> Iterator[str]:
        """A bar a rank: the tiles that it has computed so far, in an outline of all of them."""
        yield text(x, y + 12, say("tiles.head_ranks"), 12, None, "lk-soft")
        done, whole = grid.counts(None if step is None else [s for s in grid.steps if s <= step]), grid.counts()
        now = grid.counts([step]) if step is not None else whole
        words = [self._told(*counts) for counts in zip(done, whole, now, strict=True)]
        unit = (self._aside[2] - TAB - 16 - self._told_width) / max(1, self.most)
        for rank in range(self.ranks):
            top, left = y + 20 + PITCH * rank, x + TAB + 4
            bar = [el("rect", x=left, y=top, width=unit * whole[rank], height=TAB, rx=2, class_="lk-yet"),
                   el("rect", x=left, y=top, width=unit * done[rank], height=TAB, rx=2)]  # fmt: skip
            yield el("g", tab(x, top, TAB, TAB, rank), *(bar[:1] if not done[rank] else bar), class_=own(rank))
            yield text(left + unit * whole[rank] + 6, top + 14.5, words[rank], self.size)

    def _told(self, done: int, whole: int, now: int) -> str:
        words = say("tiles.done_of", done=done, all=whole) if done < whole else str(whole)
        return words if now else say("tiles.idle", words=words)

    @cached_property
    def _told_width(self) -> float:
        """Room for the words at a bar's end, whatever the step."""
        longest = say("tiles.idle", words=say("tiles.done_of", done=self.most, all=self.most))
        return text_width(longest, self.size)

    def _lines(self, grid: Grid, step: int | None) -> list[str]:
        """What stands under or beside a matrix."""
        left = say("tiles.left", n=len(grid.left_out), all=len(grid.rows) * len(grid.columns))
        told = [left] if grid.left_out else []
        told += self._fast(grid, step) if self.ranks == 1 else self._slowest(grid, step)
        return [line for words in told for line in wrap(words, self._aside[2], self.size)]

    def _slowest(self, grid: Grid, step: int | None) -> Iterator[str]:
        """What the ring waits for: at each step its busiest rank."""
        terms = [max(grid.counts([s])) for s in grid.steps if step is None or s <= step]
        total = say("tiles.sum", terms=" + ".join(map(str, terms)), total=sum(terms)) if len(terms) > 1 else str(*terms)
        yield say("tiles.slowest", sum=total)

    def _fast(self, grid: Grid, step: int | None) -> Iterator[str]:
        """What is in fast memory."""
        if step not in grid.steps:
            yield count("tiles.computed", len(grid.cells))
            yield from (say("tiles.fast"), say("tiles.fast_scores", tile=grid.largest, whole=grid.whole))
            return
        row, column = grid.at(step)
        rows, columns = grid.rows[row], grid.columns[column]
        yield say("tiles.now", n=step, all=len(grid.cells))
        yield from (say("tiles.fast_now"), say("tiles.fast_queries", queries=span(rows)),
                    say("tiles.fast_keys", keys=span(columns)),
                    say("tiles.fast_scores", tile=f"{len(rows)}×{len(columns)}", whole=grid.whole))  # fmt: skip


def tab(x: float, y: float, width: float, height: float, rank: int) -> str:
    """A strip in a rank's colour, with its number."""
    box = el("rect", x=x, y=y, width=width, height=height, rx=2, class_="lk-tab")
    return el("g", box, text(x + width / 2, y + height / 2 + 4.3, str(rank), 12, "middle", "lk-in"), class_=own(rank))


def own(rank: int) -> str:
    """The looks of what is a rank's."""
    return f"lk-held lk-own lk-own{rank}"


def span(at: range) -> str:
    """Positions.

    >>> span(range(4, 8)), span(range(4, 5))
    ('4–7', '4')
    """
    return f"{at.start}–{at[-1]}" if len(at) > 1 else str(at.start)
