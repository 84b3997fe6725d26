"""A schedule built by hand: blocks on a grid of ranks and slots, each checked when it is placed.

Rank r has stage r. F, B and W take one slot each; without W, B is both gradients, and still one slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from labkit.pipeline.legal import places, stuck
from labkit.pipeline.schedule import KINDS, Action, Kind, Schedule, needs, stash_after, whole
from labkit.pipeline.simulate import simulate
from labkit.pipeline.zero_bubble import zero_bubble_h1

#: Why a block cannot stand where it was put.
Reason = Literal["none-left", "taken", "missing", "late", "full", "no-round"]


class Refused(ValueError):
    """A move that cannot be made. Nothing has changed.

    Attributes:
        reason: "none-left": the rank has all blocks of this kind; "taken": the slot has the `blocker`; "missing": what
            it needs, the `blocker`, is placed nowhere; "late": the `blocker` ends after the slot begins; "full": the
            rank holds all that it may, until the `blocker`; "no-round": it has no like to repeat yet.
        action: What was to be placed; its stage is its rank.
        slot: Where.
        blocker: What stands in the way.
        end: When the blocker ends.
    """

    def __init__(
        self, reason: Reason, action: Action, slot: int, blocker: Action | None = None, end: int | None = None
    ) -> None:
        stands = "" if blocker is None else f", {blocker.kind}{blocker.micro_batch} on rank {blocker.stage}"
        super().__init__(
            f"{action.kind}{action.micro_batch} cannot stand on rank {action.stage} in slot {slot}: {reason}{stands}"
        )
        self.reason, self.action, self.slot, self.blocker, self.end = reason, action, slot, blocker, end


class Building:
    """A grid on which a schedule is built.

    Args:
        ranks: p, of one stage each.
        micro_batches: m.
        cap: How many micro-batches a rank may hold: a number for all, or one a rank; ``None``: as many as it likes.
        split: Whether the gradient of the weights, W, is a block of its own.

    Raises:
        TypeError, ValueError: A number that is no whole number or below 1, or not one cap a rank.

    >>> grid = Building(ranks=2, micro_batches=1)
    >>> for kind, rank, slot in (("F", 0, 0), ("F", 1, 1), ("B", 1, 2), ("B", 0, 3)):
    ...     _ = grid.place(kind, rank, slot)
    >>> grid.makespan, grid.peaks, grid.finished
    (4, (1, 1), True)
    """

    def __init__(
        self, ranks: int, micro_batches: int, cap: int | Sequence[int] | None = None, split: bool = False
    ) -> None:
        whole("ranks", ranks, 1)
        whole("micro_batches", micro_batches, 1)
        caps = [cap] * ranks if cap is None or isinstance(cap, int) else list(cap)
        if len(caps) != ranks:
            raise ValueError(f"cap has {len(caps)} numbers, but there are {ranks} ranks: expected one each")
        for number in caps:
            if number is not None:
                whole("cap", number, 1)
        self.ranks, self.micro_batches, self.caps, self.split = ranks, micro_batches, tuple(caps), split
        self.kinds: tuple[Kind, ...] = KINDS if split else ("F", "B")
        self.slots: dict[Action, int] = {}  #: what is placed, and where
        self._moves: list[list[Action]] = []

    # What stands there

    def row(self, rank: int) -> list[tuple[int, Action]]:
        """(slot, action) of a rank, in order."""
        return sorted((slot, action) for action, slot in self.slots.items() if action.stage == rank)

    def at(self, rank: int, slot: int) -> Action | None:
        """What a cell holds."""
        return next((a for a, s in self.slots.items() if a.stage == rank and s == slot), None)

    def held(self, rank: int) -> list[int]:
        """How many micro-batches the rank holds in each of its slots, up to its last block."""
        row = self.row(rank)
        after = self._stash([action for _, action in row])
        held = [0] * (row[-1][0] + 1 if row else 0)
        for n, (slot, action) in enumerate(row):
            until = row[n + 1][0] if n + 1 < len(row) else slot + 1
            held[slot:until] = [after[n]] + [after[n] - (action.kind == self.kinds[-1])] * (until - slot - 1)
        return held

    def _stash(self, actions: Sequence[Action]) -> list[int]:
        every = {(m, s) for m in range(self.micro_batches) for s in range(self.ranks)} if self.split else set()
        return stash_after(actions, frozenset(every))

    @property
    def makespan(self) -> int:
        """The end of the last block."""
        return max(self.slots.values(), default=-1) + 1

    @property
    def peaks(self) -> tuple[int, ...]:
        """Rank → the most micro-batches that it holds."""
        return tuple(max(self.held(rank), default=0) for rank in range(self.ranks))

    @property
    def finished(self) -> bool:
        return len(self.slots) == self.ranks * self.micro_batches * len(self.kinds)

    @property
    def schedule(self) -> Schedule:
        """What is placed so far, each rank's blocks in the order of their slots."""
        rows = tuple(tuple(action for _, action in self.row(rank)) for rank in range(self.ranks))
        return Schedule(name="by hand", ranks=self.ranks, micro_batches=self.micro_batches, stages=self.ranks,
                        actions=rows)  # fmt: skip

    # Moves

    def next(self, kind: Kind, rank: int) -> Action | None:
        """The block of a kind that is a rank's next: of the lowest micro-batch that is not placed."""
        every = (Action(kind, micro_batch, rank) for micro_batch in range(self.micro_batches))
        return next((action for action in every if action not in self.slots), None)

    def ready(self, rank: int) -> list[tuple[Action, int]]:
        """The tray: blocks that the rank can place next, and the first slot after its last block for each."""
        row, found = self.row(rank), []
        free = row[-1][0] + 1 if row else 0
        for kind in self.kinds:
            action = self.next(kind, rank)
            if action is None or any(needed not in self.slots for needed in needs(action, self.ranks)):
                continue
            slot = self._from(action, free)
            if self.refusal(action, slot) is None:
                found.append((action, slot))
        return found

    def _from(self, action: Action, free: int) -> int:
        """The first slot from `free` on in which what the action needs has ended."""
        return max([free, *(self.slots[needed] + 1 for needed in needs(action, self.ranks))])

    def refusal(self, action: Action, slot: int) -> Refused | None:
        """Why an action cannot be placed in a slot; ``None`` if it can."""
        rank = action.stage
        if other := self.at(rank, slot):
            return Refused("taken", action, slot, other, slot + 1)
        for needed in needs(action, self.ranks):
            if needed not in self.slots:
                return Refused("missing", action, slot, needed)
            if self.slots[needed] >= slot:
                return Refused("late", action, slot, needed, self.slots[needed] + 1)
        cap = self.caps[rank]
        row = [a for _, a in sorted([*self.row(rank), (slot, action)])]
        if action.kind == "F" and cap is not None and max(self._stash(row)) > cap:
            frees = self.next(self.kinds[-1], rank)
            return Refused("full", action, slot, frees)
        return None

    def place(self, kind: Kind, rank: int, slot: int) -> Action:
        """Put the rank's next block of a kind into a slot.

        Raises:
            Refused: It cannot stand there.
            ValueError: There is no such kind, rank or slot.
        """
        if kind not in self.kinds:
            raise ValueError(f"kind is {kind!r}: expected one of {', '.join(self.kinds)}")
        if rank not in range(self.ranks):
            raise ValueError(f"rank is {rank!r}: expected one from 0 to {self.ranks - 1}")
        whole("slot", slot, 0)
        action = self.next(kind, rank)
        if action is None:
            raise Refused("none-left", Action(kind, self.micro_batches - 1, rank), slot)
        self._put([(action, slot)])
        return action

    def _put(self, blocks: Iterable[tuple[Action, int]]) -> None:
        """Place blocks as one move: all of them, or none."""
        done: list[Action] = []
        for action, slot in blocks:
            if refusal := self.refusal(action, slot):
                for one in done:
                    del self.slots[one]
                raise refusal
            self.slots[action] = slot
            done.append(action)
        self._moves.append(done)

    def undo(self) -> list[Action]:
        """Take back the last move, and return its blocks; nothing if there was none."""
        taken = self._moves.pop() if self._moves else []
        for action in taken:
            del self.slots[action]
        return taken

    def repeat(self) -> list[Action]:
        """Repeat the pattern: on each rank the last block of each kind, again for each micro-batch that is left.

        All with one period, the shortest that fits. With one round by hand, from the first F to the first B of every
        rank, what is repeated is the steady state.

        Raises:
            Refused: Some rank has no block of some kind yet, nothing is left, or no period fits: then what stands in
                the way of the shortest.
        """
        last = {(a.kind, a.stage): a for a in sorted(self.slots, key=self.slots.__getitem__)}
        for rank in range(self.ranks):
            for kind in self.kinds:
                if (kind, rank) not in last:
                    raise Refused("no-round", Action(kind, 0, rank), self.makespan)
        if self.finished:
            raise Refused("none-left", Action("F", self.micro_batches - 1, 0), self.makespan)
        refused: list[Refused] = []
        for period in range(len(self.kinds), len(self.kinds) * self.ranks + self.makespan + 1):
            try:
                self._put(sorted(self._again(last.values(), period), key=lambda block: block[1]))
            except Refused as one:
                refused.append(one)
            else:
                return self._moves[-1]
        raise refused[0]

    def _again(self, last: Iterable[Action], period: int) -> Iterable[tuple[Action, int]]:
        for action in last:
            for micro_batch in range(action.micro_batch + 1, self.micro_batches):
                later = period * (micro_batch - action.micro_batch)
                yield Action(action.kind, micro_batch, action.stage), self.slots[action] + later

    def write(self, text: str) -> None:
        """Replace all by what a text says, each block as early as it can be; see `Schedule.parse`.

        Raises:
            Refused: Something is more than a rank may hold. Nothing has changed.
            IllegalSchedule: Something stands twice, on another rank's line, or can never come to its turn.
            ValueError: The text cannot be read, or has other ranks, micro-batches or kinds than this grid.

        >>> grid = Building(ranks=2, micro_batches=2)
        >>> grid.write("r0: F0 F1 B0 B1 \\n r1: F0 B0 F1 B1")
        >>> grid.makespan
        6
        """
        schedule = Schedule.parse(text, micro_batches=self.micro_batches)
        if schedule.ranks != self.ranks or schedule.stages != self.ranks:
            raise ValueError(f"the text has {schedule.ranks} lines and {schedule.stages} stages: expected "
                             f"{self.ranks}, one of each a rank")  # fmt: skip
        if odd := [action for row in schedule.actions for action in row if action.kind not in self.kinds]:
            raise ValueError(f"the text has {schedule.word(odd[0])}: expected blocks {', '.join(self.kinds)}")
        places(schedule)
        fresh = Building(self.ranks, self.micro_batches, split=self.split)
        fresh.caps = self.caps
        fresh._follow(schedule)
        self.slots = fresh.slots
        self._moves = [[action] for action in sorted(self.slots, key=self.slots.__getitem__)]

    def _follow(self, schedule: Schedule) -> None:
        """Place each rank's actions in their order, each as early as it can be."""
        begun = [0] * self.ranks
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(schedule.actions):
                while begun[rank] < len(row):
                    action = row[begun[rank]]
                    if any(needed not in self.slots for needed in needs(action, self.ranks)):
                        break
                    placed = self.row(rank)
                    self._put([(action, self._from(action, placed[-1][0] + 1 if placed else 0))])
                    begun[rank], moved = begun[rank] + 1, True
        if begun != [len(row) for row in schedule.actions]:
            raise stuck(schedule, begun)


def par(ranks: int, micro_batches: int, cap: int | Sequence[int] | None = None, split: bool = False) -> int:
    """The makespan to reach: that of a simple order, slot by slot a B if there is one, else an F if it may, else a W.

    That order is 1F1B's: without W and with room for p micro-batches it ends with 1F1B, after 2(m+p−1) slots. With W,
    what counts is ZB-H1 if it holds no more than it may and is faster.

    >>> par(ranks=4, micro_batches=8, cap=4), par(4, 8, cap=4, split=True)
    (22, 27)
    """
    grid = Building(ranks, micro_batches, cap, split)
    slot = 0
    while not grid.finished:
        for rank in range(ranks):
            every = (grid.next(kind, rank) for kind in ("B", "F", "W") if kind in grid.kinds)
            fits = (action for action in every if action is not None and grid.refusal(action, slot) is None)
            if action := next(fits, None):
                grid._put([(action, slot)])
        slot += 1
    known = zero_bubble_h1(ranks, micro_batches)
    room = all(cap is None or held <= cap for held, cap in zip(known.stash(), grid.caps, strict=True))
    return min(grid.makespan, int(simulate(known).makespan)) if split and room else grid.makespan
