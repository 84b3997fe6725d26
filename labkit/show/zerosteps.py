"""A sharded step read from a trace: what is gathered, freed and reduced when, and what each rank holds by then.

`labkit.zero` and `labkit.data_parallel` label each collective with the unit or bucket that it moves, and a unit that is
freed says so in a span. Nothing is assumed that no event has said:

- a column that is gathered under the label ``unit`` was a shard before, and is one again once it is freed;
- one that is only gathered under ``bucket``, or never, has its full parameters all the time;
- what is reduce-scattered was full, and is a shard afterwards; so the optimizer's state is that of a shard;
- what is all-reduced stays full, and with it the optimizer;
- what is reduced after backward has ended was full from then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from labkit.show.zeroactions import Action, Column, actions_of
from labkit.trace import Trace

NONE, SHARD, FULL = 0, 1, 2
LETTERS = "PGO"
MOST = 400  #: moments
ROOT = Column("unit", -1)  #: as `labkit.zero` labels what lies around the blocks


@dataclass(frozen=True, slots=True)
class ZeroUnit:
    """Bytes of a unit or bucket, each as much as a rank would hold that has it in full.

    Attributes:
        parameters, gradients, optimizer: Bytes; the optimizer is master weights and moments.
        name: What the column is called; ``None``: "layer 0" or "bucket 0", by its label.
    """

    parameters: float
    gradients: float
    optimizer: float
    name: str | None = None

    def __post_init__(self) -> None:
        for field in ("parameters", "gradients", "optimizer"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{field} of a unit is {value!r}: expected a number of bytes")
            if not 0 <= value < float("inf"):
                raise ValueError(f"{field} of a unit is {value!r}: expected bytes, 0 or more")

    def of(self, letter: str) -> float:
        return {"P": self.parameters, "G": self.gradients, "O": self.optimizer}[letter]


Held = tuple[int, int, int]  #: of P, G and O: NONE, SHARD or FULL
Cells = tuple[tuple[Held, ...], ...]  #: by rank, then by column


@dataclass(frozen=True, slots=True)
class Moment:
    """What is there after an action.

    Attributes:
        action: ``None`` at the beginning.
        cells: What each rank holds of each column.
        sent: By rank: operation → bytes so far.
    """

    action: Action | None
    cells: Cells
    sent: tuple[Mapping[str, int], ...]


@dataclass(frozen=True)
class Play:
    """A run: its columns, and its moments from the first on.

    Attributes:
        name: Of the setting.
        ranks: N.
        columns, units: The labels, and what they hold.
        moments: At least the beginning.
        paced: Whether the run was.
    """

    name: str
    ranks: int
    columns: tuple[Column, ...]
    units: tuple[ZeroUnit, ...]
    moments: tuple[Moment, ...]
    paced: bool

    @property
    def all_parameters(self) -> float:
        """Ψ in bytes."""
        return sum(unit.parameters for unit in self.units)

    @property
    def psi(self) -> float:
        """What a rank sends when all parameters go round the ring once: Ψ(N−1)/N."""
        return self.all_parameters * (self.ranks - 1) / self.ranks

    @property
    def plain(self) -> float:
        """Bytes of a rank that holds everything."""
        return sum(unit.of(letter) for unit in self.units for letter in LETTERS)

    def held(self, moment: int, rank: int, letter: str) -> float:
        """Bytes of a letter."""
        n = LETTERS.index(letter)
        share = (0.0, 1 / self.ranks, 1.0)
        row = self.moments[moment].cells[rank]
        return sum(share[cell[n]] * unit.of(letter) for cell, unit in zip(row, self.units, strict=True))

    def total(self, moment: int, rank: int) -> float:
        return sum(self.held(moment, rank, letter) for letter in LETTERS)

    def sent(self, moment: int, rank: int) -> int:
        return sum(self.moments[moment].sent[rank].values())

    @cached_property
    def blocks(self) -> list[int]:
        """The columns but the root, which is full as long as any other is."""
        return [n for n, c in enumerate(self.columns) if c != ROOT] or list(range(len(self.columns)))

    def full(self, moment: int, letter: str = "P") -> list[int]:
        """The columns of which some rank holds all."""
        n = LETTERS.index(letter)
        cells = self.moments[moment].cells
        return [c for c in range(len(self.columns)) if any(row[c][n] == FULL for row in cells)]

    @cached_property
    def most_full(self) -> dict[str, int]:
        """Letter → columns that are full at once, at most; the root does not count."""
        blocks = set(self.blocks)
        return {n: max(len(blocks & {*self.full(m, n)}) for m in range(len(self.moments))) for n in LETTERS}

    @cached_property
    def fullest(self) -> int:
        """The rank that holds most at its worst moment."""
        peaks = [max(self.total(m, rank) for m in range(len(self.moments))) for rank in range(self.ranks)]
        return peaks.index(max(peaks))

    @property
    def peak(self) -> float:
        return max(self.total(m, self.fullest) for m in range(len(self.moments)))

    @cached_property
    def busiest(self) -> int:
        """The rank that sends most."""
        sent = [self.sent(-1, rank) for rank in range(self.ranks)]
        return sent.index(max(sent))


def read(name: str, trace: Trace, units: Mapping[int | str, ZeroUnit]) -> Play:
    """The moments of a run.

    Raises:
        ValueError: No collective is labelled; a label is none of `units`; torch moved the bytes out of sight; gradients
            are reduced in buckets and nothing says where backward ended.
    """
    rows = [actions_of(trace, rank, name) for rank in range(trace.ranks)]
    columns = _columns(name, rows, units)
    steps = _merged(rows)
    if len(steps) > MOST:
        raise ValueError(f"{name!r} has {len(steps)} moments: expected at most {MOST}; draw a run of one step")
    held = [[_before(rows[rank], column) for column in columns] for rank in range(trace.ranks)]
    sent: list[dict[str, int]] = [defaultdict(int) for _ in rows]
    moments = [Moment(None, _frozen(held), tuple({} for _ in rows))]
    for number in steps:
        for rank, row in enumerate(rows):
            if number in row:
                _apply(row, number, columns, held[rank])
                sent[rank][row[number].operation] += row[number].nbytes
        first, now = next(row[number] for row in rows if number in row), _frozen(held)
        if first.column is not None or now != moments[-1].cells:  # the end of backward need not change anything
            moments.append(Moment(first, now, tuple(dict(row) for row in sent)))
    return Play(name, trace.ranks, columns, tuple(units[c.label] for c in columns), tuple(moments), trace.paced)


Row = Mapping[tuple, Action]  #: (kind, column, how often before) → the action, in the rank's own order


def _columns(name: str, rows: Sequence[Row], units: Mapping[int | str, ZeroUnit]) -> tuple[Column, ...]:
    """Those of `units`, in that order, as far as the run has them."""
    found = {a.column.label: a.column for row in rows for a in row.values() if a.column is not None}
    if not found:
        raise ValueError(f"nothing in {name!r} says which unit or bucket it moves: draw a run of labkit.zero or of "
                         "labkit.data_parallel, recorded from forward to step")  # fmt: skip
    if odd := [label for label in found if label not in units]:
        raise ValueError(f"{name!r} moves {found[odd[0]].kind} {odd[0]!r}, but units has {list(units)}: expected its "
                         "bytes too")  # fmt: skip
    return tuple(found[label] for label in units if label in found)


def _merged(rows: Sequence[Row]) -> list[tuple]:
    """One order of what any rank did: the first rank's, and what only others did after what they did before it."""
    order = list(rows[0])
    known = set(order)
    for row in rows[1:]:
        at = 0
        for number in row:
            if number in known:
                at = order.index(number) + 1
            else:
                order.insert(at, number)
                known.add(number)
                at += 1
    return order


def _before(row: Row, column: Column) -> list[int]:
    """What a rank holds of a column before anything has happened."""
    kinds = {a.kind for a in row.values() if a.column == column}
    gathered = column.kind == "unit" and "gather" in kinds
    return [SHARD if gathered else FULL, NONE, SHARD if "reduce" in kinds else FULL]


def _apply(row: Row, number: tuple, columns: Sequence[Column], held: list[list[int]]) -> None:
    """What an action leaves a rank with."""
    action = row[number]
    if action.column is None:  # backward is over: what is reduced later, and was not before, is there
        later = list(row)[list(row).index(number) :]
        waiting = {row[n].column for n in later if row[n].kind == "reduce" and row[n].phase != "backward"}
        for column, cell in zip(columns, held, strict=True):
            cell[1] = FULL if column in waiting else cell[1]
        return
    cell = held[columns.index(action.column)]
    if action.kind in ("gather", "free"):
        if action.column.kind == "unit":
            cell[0] = FULL if action.kind == "gather" else SHARD
    else:
        cell[1] = SHARD if action.kind == "reduced" else FULL


def _frozen(held: Sequence[Sequence[Sequence[int]]]) -> Cells:
    return tuple(tuple((c[0], c[1], c[2]) for c in row) for row in held)
