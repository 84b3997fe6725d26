"""The grid of `show.builder` in one layout: ranks down, slots across, and under each rank what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.show.figure import WIDE, Drawing
from labkit.show.memorybars import hatch
from labkit.show.svg import el, num, text, text_width
from labkit.show.words import say

if TYPE_CHECKING:
    from labkit.pipeline.building import Building
    from labkit.pipeline.schedule import Action

CELL = 22, 36  #: least and largest width of a slot
BLOCK, STASH, GAP = 28, 16, 10  #: heights of a block, of the stash below it, and between ranks
TOP = 44  #: where the first row begins


@dataclass(frozen=True)
class Board:
    """All that the picture shows.

    Attributes:
        building: The blocks.
        par: The makespan to reach.
        cursor: Rank and slot where the next block would be placed; ``None`` where nobody places any.
        blocker: A block that stands in the way of the last move.
    """

    building: Building
    par: int
    cursor: tuple[int, int] | None = None
    blocker: Action | None = None

    @property
    def slots(self) -> int:
        """How many columns are drawn: room to go beyond par."""
        wanted = [self.par + 4, self.building.makespan + 2]
        return max(wanted if self.cursor is None else [*wanted, self.cursor[1] + 2])


class View:
    """A board in one layout; what is wider scrolls, and the names of the ranks stay in view."""

    def __init__(self, board: Board, width: float) -> None:
        self.board, self.building = board, board.building
        wide = width >= WIDE
        names = [w for n in range(self.building.ranks) for w in (rank(n), self._holds(n))]
        self.left = 12 + max(text_width(w, 12) for w in [*names, say("builder.held_of", held=10, cap=10)])
        least = max(CELL[0], text_width(f"F{self.building.micro_batches - 1}", 12) + 4)
        self.cell = max(least, min(CELL[1], (width - self.left - 10) / board.slots)) if wide else least + 2
        need = self.left + self.cell * board.slots + 10
        self.scrolls, self.width = need > width + 1, max(width, need)
        held = max((c for c in self.building.caps if c is not None), default=self.building.micro_batches)
        self.unit = STASH / max(held, *self.building.peaks, 1)
        self.height = TOP + self.building.ranks * (BLOCK + STASH + GAP) + 6

    def at(self, slot: float) -> float:
        return self.left + slot * self.cell

    def top(self, rank: int) -> float:
        return TOP + rank * (BLOCK + STASH + GAP)

    def draw(self) -> Drawing:
        ranks = range(self.building.ranks)
        grid = [part for rank in ranks for part in (*self._cells(rank), *self._stash(rank), *self._blocks(rank))]
        parts = (*self._slots(), *grid, *self._par(), *self._ready(), *self._marks(), *self._targets())
        names = [part for rank in ranks for part in self._name(rank)]
        if not self.scrolls:
            return Drawing(self.width, self.height, (*parts, *names))
        ground = el("rect", x=0, y=0, width=self.left - 2, height=self.height, class_="lk-ground")
        return Drawing(self.width, self.height, (*parts, *names),
                       strip=(self.left - 2, self.height, (ground, *names)))  # fmt: skip

    def _slots(self) -> Iterator[str]:
        """The numbers of the slots."""
        every = 1 if self.cell >= 26 else 2
        for slot in range(0, self.board.slots, every):
            yield text(self.at(slot + 0.5), TOP - 8, str(slot), 12, "middle", "lk-soft")

    def _par(self) -> Iterator[str]:
        x = self.at(self.board.par)
        yield el("path", d=f"M{num(x)} 20V{num(self.height - 4)}", class_="lk-line lk-par")
        yield text(x, 14, say("builder.par", par=self.board.par), 13, "middle", "lk-big")

    def _name(self, n: int) -> Iterator[str]:
        yield text(4, self.top(n) + BLOCK / 2 + 4.5, rank(n), 12)
        yield text(4, self.top(n) + BLOCK + STASH / 2 + 6, self._holds(n), 12, cls="lk-peak")

    def _holds(self, n: int) -> str:
        """What the rank holds now, in the end what it held at most; and its cap."""
        row, cap = self.building.row(n), self.building.caps[n]
        now = sum(a.kind == "F" for _, a in row) - sum(a.kind == self.building.kinds[-1] for _, a in row)
        held = self.building.peaks[n] if self.building.finished else now
        return say("builder.held", held=held) if cap is None else say("builder.held_of", held=held, cap=cap)

    def _cells(self, n: int) -> Iterator[str]:
        y, end = self.top(n), self.at(self.board.slots)
        lines = "".join(f"M{num(self.at(s))} {num(y)}v{BLOCK}" for s in range(self.board.slots + 1))
        yield el("path", d=f"{lines}M{num(self.left)} {num(y)}H{num(end)}M{num(self.left)} {num(y + BLOCK)}H{num(end)}",
                 class_="lk-grid")  # fmt: skip

    def _stash(self, n: int) -> Iterator[str]:
        """What the rank holds, slot by slot, and the line that it may not cross."""
        floor, cap = self.top(n) + BLOCK + STASH + 2, self.building.caps[n]
        steps = "".join(f"V{num(floor - held * self.unit)}h{num(self.cell)}" for held in self.building.held(n))
        if steps:
            yield el("path", d=f"M{num(self.left)} {num(floor)}{steps}V{num(floor)}", class_="lk-stash")
        if cap is not None:
            d = f"M{num(self.left)} {num(floor - cap * self.unit)}H{num(self.at(self.board.slots))}"
            yield el("path", d=d, class_="lk-limit")

    def _blocks(self, n: int) -> Iterator[str]:
        for slot, action in self.building.row(n):
            x, y, wide = self.at(slot) + 1, self.top(n) + 1, self.cell - 2
            body = [el("rect", x=x, y=y, width=wide, height=BLOCK - 2, class_=f"lk-t{action.kind}")]
            if action.kind == "W":
                body.append(el("path", d=hatch(x, y, wide, BLOCK - 2, 5), class_="lk-thatch"))
            word = f"{action.kind}{action.micro_batch}"
            cls = None if action.kind == "W" else "lk-in"  # on hatching, words need their halo
            yield el("g", *body, text(self.at(slot + 0.5), y + 17.3, word, 12, "middle", cls), class_="lk-work")

    def _ready(self) -> Iterator[str]:
        """The next legal cells: dotted, with what may stand there."""
        for n in range(self.building.ranks):
            offers: dict[int, list[Action]] = {}
            for action, slot in self.building.ready(n):
                offers.setdefault(slot, []).append(action)
            for slot, actions in offers.items():
                one = f"{actions[0].kind}{actions[0].micro_batch}"
                said = one if len(actions) == 1 else "".join(action.kind for action in actions)
                x, y = self.at(slot) + 2.5, self.top(n) + 2.5
                box = el("rect", x=x, y=y, width=self.cell - 5, height=BLOCK - 5, rx=3)
                words = text(self.at(slot + 0.5), y + 15.8, said, 12, "middle", "lk-in")
                yield el("g", box, words, class_="lk-offer")

    def _marks(self) -> Iterator[str]:
        """The cursor, and what stands in the way."""
        for cls, place in (("lk-needs", self._place(self.board.blocker)), ("lk-cursor", self.board.cursor)):
            if place is not None:
                x, y = self.at(place[1]), self.top(place[0])
                yield el("rect", x=x - 1, y=y - 1, width=self.cell + 2, height=BLOCK + 2, class_=cls)

    def _targets(self) -> Iterator[str]:
        """Where a click moves the cursor, over everything else."""
        if self.board.cursor is not None:
            for n in range(self.building.ranks):
                for slot in range(self.board.slots):
                    yield el("rect", x=self.at(slot), y=self.top(n), width=self.cell, height=BLOCK, class_="lk-cell",
                             data_cell=f"{n} {slot}")  # fmt: skip

    def _place(self, action: Action | None) -> tuple[int, int] | None:
        """Where a block stands; of one that is not placed, where it could be."""
        if action is None:
            return None
        offered = dict(self.building.ready(action.stage))
        slot = self.building.slots.get(action, offered.get(action))
        return None if slot is None else (action.stage, slot)


def rank(n: int) -> str:
    return say("trace.rank", rank=n)
