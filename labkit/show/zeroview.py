"""`show.zero` in one layout: ranks × columns of P G O bars, below them what was sent and what is held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from labkit.show.figure import WIDE, Drawing
from labkit.show.held import Unit
from labkit.show.memorybars import key
from labkit.show.svg import el, fit, num, text
from labkit.show.words import say
from labkit.show.zeroactions import Column
from labkit.show.zerofoot import Foot
from labkit.show.zerosteps import FULL, LETTERS, ROOT, SHARD, Play

BAR, SLIT = 16, 2  #: height of a bar, and between bars
CELL = len(LETTERS) * (BAR + SLIT) - SLIT
ROW = CELL + 12
GAP = 8  #: between columns
LEAST, MOST = 34, 172  #: width of a cell
LETTER = 11.5  #: of a shard that holds its letter
HEAD = 46  #: above the first row: what happens, and the columns' names


@dataclass(frozen=True, slots=True)
class Scale:
    """What all settings of a figure share.

    Attributes:
        bytes_to: Bytes at the top of the memory line.
        sent_to: Bytes at the end of the odometer.
        unit: In which bytes are told.
    """

    bytes_to: float
    sent_to: float
    unit: Unit


class View:
    """A run in one layout.

    Args:
        play: The run.
        scale: Its axes.
        width: Of the layout.
    """

    def __init__(self, play: Play, scale: Scale, width: float) -> None:
        self.play, self.width, self.wide = play, width, width >= WIDE
        self.size = 13 if self.wide else 12
        self.left = 58.0 if self.wide else 28.0
        if self._room / play.ranks < LETTER:  # no room for a letter in a shard: it stands at the left of the row
            self.tagged, self.left = True, self.left + 14
        else:
            self.tagged = False
        self.cell = max(LEAST, min(MOST, self._room))
        self.piece = self.cell / play.ranks
        self.bottom = HEAD + ROW * play.ranks
        legend, floor = key(list(LETTERS), 4, self.bottom, width - 8)
        self.foot = Foot(play, scale, width, floor + 8)
        self._made: dict[tuple[object, ...], str] = {}
        self._still = [*self._names(), *legend, *self.foot.still()]
        self._letters = self.foot.letters()

    @property
    def _room(self) -> float:
        """Width of a cell, if all columns are to be seen at once."""
        return (self.width - 8 - self.left + GAP) / len(self.play.columns) - GAP

    def draw(self, moment: int, newest: bool) -> Drawing:
        """A moment; `newest`: what it changed is marked."""
        parts = [*self._now(moment), *self._still, *self._bars(moment, newest), *self.foot.at(moment), self._letters]
        end = self.x(len(self.play.columns)) - GAP + 8
        wide, strip = max(self.width, end), None
        if wide > self.width + 1:
            strip = (self.left - 4, self.bottom, tuple(self._ranks()))
        return Drawing(wide, self.foot.bottom, tuple(p for p in parts if p), strip)

    def x(self, column: int) -> float:
        return self.left + (self.cell + GAP) * column

    def _names(self) -> Iterator[str]:
        names = [
            text(self.x(n) + self.cell / 2, HEAD - 8, fit(name, self.cell + GAP - 2, self.size), self.size, "middle")
            for n, name in enumerate(names_of(self.play))
        ]
        yield el("g", *names)
        yield from self._ranks()
        yield self._slots()

    def _ranks(self) -> Iterator[str]:
        parts = []
        for rank in range(self.play.ranks):
            y = HEAD + ROW * rank
            words = say("zero.rank", rank=rank) if self.wide else say("zero.rank_short", rank=rank)
            parts.append(text(4, y + CELL / 2 + 4.5, words, self.size))
            if self.tagged:
                parts += [text(self.left - 5, y + (BAR + SLIT) * n + 12.5, letter, 12, "end", "lk-soft")
                          for n, letter in enumerate(LETTERS)]  # fmt: skip
        yield el("g", *parts)

    # What changes

    def _now(self, moment: int) -> Iterator[str]:
        """What happens, as the picture's first line, and a band over its column."""
        action = self.play.moments[moment].action
        words = fit(told(self.play, moment), 0.92 * (self.width - 8), self.size + 1)  # bold is wider
        yield text(4, 14, words, self.size + 1, None, "lk-big")
        if action is not None and action.column is not None:
            x = self.x(self.play.columns.index(action.column))
            yield el("rect", x=x - 4, y=HEAD - 23, width=self.cell + 8, height=self.bottom - HEAD + 17, rx=4,
                     class_="lk-band")  # fmt: skip

    def _bars(self, moment: int, newest: bool) -> Iterator[str]:
        """A part for each letter of each column, all ranks' together: they mostly change at once."""
        here = self.play.moments[moment].cells
        before = self.play.moments[max(0, moment - 1)].cells if newest else here
        for column in range(len(self.play.columns)):
            for n, letter in enumerate(LETTERS):
                held, was = (tuple(row[column][n] for row in cells) for cells in (here, before))
                fresh = tuple(rank for rank, (a, b) in enumerate(zip(held, was, strict=True)) if a != b)
                known = column, letter, held, fresh
                if known not in self._made:
                    self._made[known] = self._letter(*known)
                yield self._made[known]

    def _letter(self, column: int, letter: str, held: tuple[int, ...], fresh: tuple[int, ...]) -> str:
        """What each rank has of it: one of N pieces, all, or none."""
        places = [self._place(column, letter, rank, state) for rank, state in enumerate(held)]
        boxes = "".join(box(*place) for place in places if place[2])
        marks = "".join(box(*places[rank]) for rank in fresh)
        words = [
            text(x + wide / 2, y + 12.5, letter, 12, "middle", "lk-in lk-big" if state == FULL else "lk-in")
            for (x, y, wide), state in zip(places, held, strict=True)
            if state == FULL or (state == SHARD and not self.tagged)
        ]
        cuts = "".join(self._cuts(x, y) for (x, y, _), state in zip(places, held, strict=True) if state == FULL)
        return el(
            "g",
            el("path", d=boxes) if boxes else "",
            el("path", d=cuts, class_="lk-cuts") if cuts else "",
            el("path", d=marks, class_="lk-fresh") if marks else "",
            *words,
            class_=f"lk-part lk-m{letter} lk-bits",
        )

    def _place(self, column: int, letter: str, rank: int, state: int) -> tuple[float, float, float]:
        """Left, top and width of what is filled; with nothing in it, where it would begin."""
        x, y = self.x(column), HEAD + ROW * rank + (BAR + SLIT) * LETTERS.index(letter)
        return x + self.piece * rank if state == SHARD else x, y, (0.0, self.piece, self.cell)[state]

    def _cuts(self, x: float, y: float) -> str:
        """Where a full bar is cut into shards: notches, so that its letter stays free."""
        return "".join(
            f"M{num(x + self.piece * n)} {num(y)}v3M{num(x + self.piece * n)} {num(y + BAR - 3)}v3"
            for n in range(1, self.play.ranks)
        )

    def _slots(self) -> str:
        """The outline of every bar, filled or not."""
        places = (
            self._place(column, letter, rank, FULL)
            for column in range(len(self.play.columns))
            for letter in LETTERS
            for rank in range(self.play.ranks)
        )
        return el("path", d="".join(box(*place) for place in places), class_="lk-slots0")


def box(x: float, y: float, width: float) -> str:
    """A bar as a path."""
    return f"M{num(x)} {num(y)}h{num(width)}v{BAR}h{num(-width)}z"


# What is written


def names_of(play: Play) -> list[str]:
    """The columns' names."""
    return [
        unit.name or (say("zero.root") if c == ROOT else _numbered(c))
        for c, unit in zip(play.columns, play.units, strict=True)
    ]


def _numbered(column: Column) -> str:
    unit = column.kind == "unit"
    return say("zero.unit", n=column.label) if unit else say("zero.bucket", n=column.label)


def told(play: Play, moment: int) -> str:
    """What happens: "Backward, layer 2: gathered"."""
    action = play.moments[moment].action
    if action is None:
        return say("zero.start")
    phase = {"forward": say("zero.forward"), "backward": say("zero.backward"), "step": say("zero.step")}[action.phase]
    if action.column is None:
        return say("zero.backward_over")
    name = names_of(play)[play.columns.index(action.column)]
    what = {
        "gather": lambda: say("zero.gathered") if action.column.kind == "unit" else say("zero.refreshed"),
        "free": lambda: say("zero.freed"),
        "reduce": lambda: say("zero.reducing"),
        "reduced": lambda: say("zero.reduced"),
        "all_reduce": lambda: say("zero.all_reduced"),
    }[action.kind]()
    return say("zero.now", phase=phase, name=name, what=what)
