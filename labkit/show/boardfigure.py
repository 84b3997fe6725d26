"""`show.builder`: a schedule built by hand, block by block or as text, against a cap and a par."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from labkit.show.boardview import Board, View
from labkit.show.figure import Figure, Table
from labkit.show.live import is_live
from labkit.show.svg import el
from labkit.show.words import say

if TYPE_CHECKING:
    from labkit.pipeline.building import Building, Refused
    from labkit.pipeline.schedule import Action, Schedule


class Level(NamedTuple):
    ranks: int
    micro_batches: int
    cap: int | None = None
    split: bool = False


LEVELS = {1: Level(2, 2), 2: Level(4, 4), 3: Level(4, 4, 2), 4: Level(4, 8, 4), 5: Level(4, 4, 4, True)}
#: What keys of the page ask for.
KEYS = {"R": "repeat", "r": "repeat", "f": "F", "b": "B", "w": "W"}
#: How the cursor moves: ranks and slots.
ARROWS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def builder(
    level: int | None = None,
    *,
    ranks: int | None = None,
    micro_batches: int | None = None,
    cap: int | Sequence[int] | None = None,
    split: bool = False,
) -> Builder:
    """Build a schedule on a grid of ranks and slots: F, B and, where it is split, W take a slot each.

    Args:
        level: 1: two ranks, two micro-batches. 2: four and four. 3: the same, but a rank may hold 2. 4: four ranks,
            eight micro-batches, a rank may hold 4; par is 22. 5: four and four, cap 4, with W apart. Left out: 1,
            unless `ranks` and `micro_batches` are given.
        ranks, micro_batches: A grid of one's own.
        cap: How many micro-batches a rank may hold: a number for all, or one a rank; left out: any.
        split: Whether W is a block of its own.

    Returns:
        A `Builder`. In a notebook it takes keys and text. Its `schedule` can be checked, simulated and run on ranks;
        `Builder.write` places a text from a cell.

    Raises:
        TypeError, ValueError: There is no such level, or both a level and a grid, or half a grid; numbers as in
            `labkit.pipeline.building.Building`.

    >>> board = builder(1)
    >>> print(board.write("r0: F0 F1 B0 B1 \\n r1: F0 B0 F1 B1"))
    Complete, on par: makespan 6 [simulated]
      makespan 6, par 6 · peaks 2 1
      A block takes a slot. Dotted: what can come next. Below a row what it holds; dashed: how much it may.
      r0: F0 F1 B0 B1
      r1: F0 B0 F1 B1
    >>> board.schedule.check()
    """
    from labkit.pipeline.building import Building, par

    own = ranks is not None or micro_batches is not None or cap is not None or split
    if level is not None and own:
        raise ValueError(f"level is {level!r}, but ranks, micro_batches, cap or split are given too: expected either")
    if not own:
        number = 1 if level is None else level
        if isinstance(number, bool) or number not in LEVELS:
            raise ValueError(f"level is {level!r}: expected one of {', '.join(map(str, LEVELS))}")
        ranks, micro_batches, cap, split = LEVELS[number]
    if ranks is None or micro_batches is None:
        raise ValueError(f"ranks is {ranks!r} and micro_batches is {micro_batches!r}: expected both, or a level")
    return Builder(Building(ranks, micro_batches, cap, split), par(ranks, micro_batches, cap, split))


class Builder:
    """A grid that is being filled.

    Attributes:
        building: The blocks that are placed.
        par: The makespan to reach.
        cursor: Rank and slot.
        said: What the last move did, or why it was refused.
        blocker: What stood in its way.
    """

    def __init__(self, building: Building, par: int) -> None:
        self.building, self.par = building, par
        self.cursor = (0, 0)
        self.said = ""
        self.blocker: Action | None = None
        self.name = f"lk-{uuid4().hex}"  #: of its picture in a page, which the live grid hides
        self._widget: Any = None

    @property
    def schedule(self) -> Schedule:
        """What is placed so far."""
        return self.building.schedule

    # Moves

    def press(self, command: str) -> None:
        """Do what a key asks for.

        Args:
            command: ``"up"``, ``"down"``, ``"left"``, ``"right"``, ``"first"`` and ``"last"`` move the cursor; ``"F"``,
                ``"B"``, ``"W"`` place there; ``"back"`` takes the last move back; ``"repeat"`` repeats the pattern.
                The letters on keys do as well: ``"R"``, ``"f"``.
        """
        command = KEYS.get(command, command)
        rank, slot = self.cursor
        if command in ARROWS:
            self.point(rank + ARROWS[command][0], slot + ARROWS[command][1])
        elif command == "first":
            self.point(rank, 0)
        elif command == "last":
            self.point(rank, max((s for s, _ in self.building.row(rank)), default=-1) + 1)
        elif command == "back":
            self._done(self._undo())
        elif command == "repeat":
            self._try(self._repeat)
        else:
            self._try(lambda: self._place(command))

    def point(self, rank: int, slot: int) -> None:
        """Move the cursor to a cell."""
        self.cursor = max(0, min(self.building.ranks - 1, rank)), max(0, slot)
        self._done(self._here())

    def write(self, text: str) -> Builder:
        """Replace all blocks by what a text says, such as "r0: F0 F1 B0 B1", a line a rank.

        Raises:
            ValueError: The text cannot be read, or does not fit the grid; `Refused` names the block in the way.
        """
        self.building.write(text)
        self._done(self.line)
        return self

    def _place(self, kind: Any) -> str:
        rank, slot = self.cursor
        if kind not in self.building.kinds:
            return say("builder.no_kind", kind=kind)
        action = self.building.place(kind, rank, slot)
        self.cursor = rank, slot + 1
        return say("builder.placed", word=word(action), rank=rank, slot=slot, line=self.line)

    def _undo(self) -> str:
        taken = self.building.undo()
        if not taken:
            return say("builder.nothing")
        return say("builder.undone", word=word(taken[0]), rank=taken[0].stage, n=len(taken))

    def _repeat(self) -> str:
        return say("builder.repeated", n=len(self.building.repeat()), line=self.line)

    def _try(self, move: Any) -> None:
        from labkit.pipeline.building import Refused

        try:
            self._done(move())
        except Refused as refused:
            self.said, self.blocker = refusal(self.building, refused), refused.blocker

    def _done(self, said: str) -> None:
        self.said, self.blocker = said, None

    # What is written

    @property
    def text(self) -> str:
        """The twin of the grid: "r0: F0 F1 B0", a line a rank."""
        return self.schedule.text()

    @property
    def line(self) -> str:
        """The state of the grid: "makespan 24, par 22 · peaks 4 3 2 1, cap 4"."""
        values = {"makespan": self.building.makespan, "par": self.par, "peaks": " ".join(map(str, self.building.peaks))}
        cap = self._cap()
        return say("builder.line", cap=cap, **values) if cap else say("builder.line_free", **values)

    def _cap(self) -> str:
        caps = self.building.caps
        return "" if caps[0] is None else " ".join(map(str, caps if len(set(caps)) > 1 else caps[:1]))

    def _here(self) -> str:
        rank, slot = self.cursor
        action = self.building.at(rank, slot)
        offers = [a for a, s in self.building.ready(rank) if s <= slot] if action is None else []
        held = word(action) if action else ", ".join(map(word, offers)) or say("builder.none")
        return say("builder.here", rank=rank, slot=slot, held=held)

    @property
    def title(self) -> str:
        building, cap = self.building, self._cap()
        more = building.makespan - self.par
        if not building.finished:
            values = {"ranks": building.ranks, "micro_batches": building.micro_batches, "par": self.par}
            return say("builder.goal", cap=cap, **values) if cap else say("builder.goal_free", **values)
        if more == 0:
            return say("builder.on_par", makespan=building.makespan)
        key = "builder.over" if more > 0 else "builder.below"
        return say(key, makespan=building.makespan, par=self.par, slots=abs(more))

    def figure(self, cursor: bool = False) -> Figure:
        """The grid as it is now."""
        board = Board(self.building, self.par, self.cursor if cursor else None, self.blocker if cursor else None)
        text = self.text.splitlines()
        rows = [(name, order.strip()) for name, _, order in (line.partition(":") for line in text)]
        twin = Table((say("builder.column_rank"), say("builder.column_order")), rows, lines=text)
        notes = [self.line, say("builder.legend_split") if self.building.split else say("builder.legend")]
        return Figure(self.title, lambda width, frame: View(board, width).draw(), twin, source="simulated",
                      notes=notes, sheets=("bars", "timeline", "board"))  # fmt: skip

    # In a page

    @property
    def widget(self) -> Any:
        """The grid as a widget, made when first asked for (it needs anywidget)."""
        if self._widget is None:
            from labkit.show.boardwidget import make

            self._widget = make(self)
        return self._widget

    def __str__(self) -> str:
        return str(self.figure())

    def __repr__(self) -> str:
        return str(self)

    def to_html(self) -> str:
        return self.figure().to_html()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.to_html(), "text/plain": str(self)}

    def _ipython_display_(self) -> None:
        """Live, two outputs: the picture, which stays in the notebook, and the grid that works with the kernel."""
        if not is_live():
            raise NotImplementedError  # IPython goes on to the bundle above
        from IPython.display import display

        try:
            live = self.widget._repr_mimebundle_()[0]
        except ImportError:  # without anywidget the picture stands all the same
            raise NotImplementedError from None
        display(self._still(), raw=True, display_id=self.name)
        display({kind: data for kind, data in live.items() if kind != "text/plain"}, raw=True)

    def _still(self) -> dict[str, str]:
        """The picture as it is now, for who opens the notebook later; the live grid hides it while it is there."""
        return {"text/html": el("div", self.to_html(), class_=f"lk-built {self.name}"), "text/plain": str(self)}

    def show_again(self) -> None:
        """Put the picture as it is now into the notebook."""
        from IPython.display import update_display

        update_display(self._still(), raw=True, display_id=self.name)


def word(action: Action) -> str:
    """A rank has one stage: no need to name it.

    >>> from labkit.pipeline import Action
    >>> word(Action("F", 3, 1))
    'F3'
    """
    return f"{action.kind}{action.micro_batch}"


def refusal(building: Building, refused: Refused) -> str:
    """Why a block cannot stand there, in a sentence."""
    action, blocker, rank = refused.action, refused.blocker, refused.action.stage
    if refused.reason == "none-left":
        return say("builder.none_left", rank=rank, kind=action.kind)
    if refused.reason == "no-round":
        return say("builder.no_round", rank=rank, kind=action.kind)
    assert blocker is not None
    if refused.reason == "taken":
        return say("builder.taken", rank=rank, slot=refused.slot, blocker=word(blocker))
    if refused.reason == "full":
        return say("builder.full", word=word(action), rank=rank, cap=building.caps[rank], blocker=word(blocker))
    values = {"word": word(action), "rank": rank, "blocker": word(blocker), "other": blocker.stage}
    if refused.reason == "late":
        return say("builder.late", end=refused.end, **values)
    return say("builder.missing", **values)
