"""What each rank holds after each operation, and where every number comes from: a rank, or the sum of a column.

>>> first, (after,) = read([{"at first": [1, 2], "all_reduce": [4, 6]}, {"at first": [3, 4], "all_reduce": [4, 6]}])
>>> [(cell.value, cell.origin == SUM, cell.column) for cell in after.rows[1]]
[(4, True, 0), (6, True, 1)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

RANKS, FIRST, LONGEST = 8, 64, 512  #: at most so many ranks, numbers at first, numbers after an operation
SUM, NOBODY, SEVERAL = -1, -2, -3  #: origins that are no rank: added up; held by none at first; by more than one
Number = int | float


@dataclass(frozen=True, slots=True)
class Cell:
    """A number that a rank holds.

    Attributes:
        value: The number.
        origin: The rank that held it at first, or `SUM`, `NOBODY` or `SEVERAL`.
        column: Where it stood in that rank's list, or which column it is the sum of; ``None`` where that is open.
    """

    value: Number
    origin: int
    column: int | None


@dataclass(frozen=True, slots=True)
class Panel:
    """What the ranks hold after one operation; the row of a rank whose data is unchanged is ``None``."""

    name: str
    rows: tuple[tuple[Cell, ...] | None, ...]


class Origins:
    """Where a number may come from, given what each rank held at first."""

    def __init__(self, first: Sequence[Sequence[Number]]) -> None:
        self.first = first
        self.holders: dict[Number, list[tuple[int, int]]] = defaultdict(list)
        for rank, row in enumerate(first):
            for column, value in enumerate(row):
                self.holders[value].append((rank, column))
        self.columns = list(zip(*first, strict=False))  # only a column that all ranks have can be added up

    def row(self, values: Sequence[Number], rank: int, adds: bool) -> tuple[Cell, ...]:
        """The cells of `rank`; `adds`: what is both a rank's number and a sum is taken for the sum."""
        whole = len(values) == len(self.first[rank])
        return tuple(self._cell(v, rank, place if whole else rank, adds) for place, v in enumerate(values))

    def _cell(self, value: Number, rank: int, near: int, adds: bool) -> Cell:
        held, added = self._held(value, near), self._added(value, near)
        order = (added, held) if adds else (held, added)
        return next((cell for cell in order if cell), Cell(value, NOBODY, None))

    def _held(self, value: Number, near: int) -> Cell | None:
        holders = self.holders.get(value, [])
        ranks, columns = {rank for rank, _ in holders}, [column for _, column in holders]
        if not ranks:
            return None
        return Cell(value, ranks.pop(), _pick(columns, near)) if len(ranks) == 1 else Cell(value, SEVERAL, None)

    def _added(self, value: Number, near: int) -> Cell | None:
        columns = [n for n, column in enumerate(self.columns) if _same(value, column)]
        return Cell(value, SUM, _pick(columns, near)) if columns else None


def read(held: Sequence[Mapping[str, Sequence[Number] | None]]) -> tuple[Panel, list[Panel]]:
    """What the ranks held at first, and after each operation.

    Raises:
        TypeError: `held` is no list of mappings, or what a rank holds is no list of numbers.
        ValueError: the ranks name different operations, a list is empty at first, or there is too much to draw.
    """
    names = _names(held)
    lists = [{name: _numbers(row[name], rank, name) for name in names} for rank, row in enumerate(held)]
    first = []
    for rank, row in enumerate(lists):
        values = row[names[0]]
        if not values or len(values) > FIRST:
            raise ValueError(
                f"rank {rank} holds {len(values or ())} numbers under {names[0]!r}, the state before: "
                f"expected 1 to {FIRST}"
            )
        first.append(values)
    origins = Origins(first)
    start = tuple(tuple(Cell(v, rank, c) for c, v in enumerate(values)) for rank, values in enumerate(first))
    panels = []
    for name in names[1:]:
        adds, after = "reduce" in name, [row[name] for row in lists]
        rows = tuple(None if v is None else origins.row(v, rank, adds) for rank, v in enumerate(after))
        panels.append(Panel(name, rows))
    return Panel(names[0], start), panels


def placed(row: Sequence[Cell], columns: int) -> list[int]:
    """The column in which each cell of a row is drawn.

    A row shorter than `columns`, the length at first, stands where its numbers come from, so that the parts of a
    reduce-scatter lie on a diagonal.
    """
    own = [cell.column for cell in row if cell.column is not None]
    if len(own) == len(row) < columns and all(a < b for a, b in pairwise(own)):
        return own
    return list(range(len(row)))


def blocks(row: Sequence[Cell], columns: int) -> Iterator[tuple[int, list[Cell]]]:
    """Cells that belong together, of one origin and in their order there, with the column in which they begin."""
    block: list[Cell] = []
    start = last = -1
    for at, cell in zip(placed(row, columns), row, strict=True):
        goes_on = block and cell.origin == block[0].origin and at == last + 1 and _follows(block[-1], cell)
        if not goes_on:
            if block:
                yield start, block
            block, start = [], at
        block.append(cell)
        last = at
    if block:
        yield start, block


def _follows(one: Cell, other: Cell) -> bool:
    return one.column is not None and other.column == one.column + 1


def _pick(columns: list[int], near: int) -> int | None:
    """The one column that it may be; of several, the one that is near."""
    if near in columns:
        return near
    return columns[0] if len(columns) == 1 else None


def _same(value: Number, column: Sequence[Number]) -> bool:
    """Whether a column adds up to `value`; of floats, to what float32 can tell."""
    total = sum(column)
    if all(isinstance(n, int) for n in (value, *column)):
        return value == total
    return abs(value - total) <= 1e-6 * sum(map(abs, column))


# What was given


def _names(held: object) -> list[str]:
    """The names that all ranks have."""
    if not isinstance(held, (list, tuple)) or not all(isinstance(row, Mapping) for row in held):
        raise TypeError(f"held is {held!r:.60}: expected a mapping name → numbers for each rank, such as run.values")
    if not 1 <= len(held) <= RANKS:
        raise ValueError(f"held has {len(held)} ranks: expected 1 to {RANKS}; draw a run of fewer ranks")
    names = list(held[0])
    if odd := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"held names an operation {odd[0]!r}: expected text")
    if len(names) < 2:
        raise ValueError(f"rank 0 holds {names}: expected the state before, and what it holds after an operation")
    for rank, row in enumerate(held):
        if odd := sorted(set(names) ^ set(row), key=str):
            lacking, other = (rank, 0) if odd[0] in names else (0, rank)
            raise ValueError(
                f"rank {other} has {odd[0]!r}, rank {lacking} has not: expected the same names on all ranks; give "
                "None where an operation leaves a rank's data unchanged"
            )
    return names


def _numbers(values: object, rank: int, name: str) -> list[Number] | None:
    """A list of Python numbers; ``None`` when there is nothing."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if values is None:
        return None
    if not isinstance(values, (list, tuple, range)):
        raise TypeError(
            f"rank {rank} holds {values!r:.60} under {name!r}: expected a list of numbers, or None where the rank's "
            "data is unchanged"
        )
    if bad := [v for v in values if isinstance(v, bool) or not isinstance(v, (int, float))]:
        raise TypeError(f"rank {rank} holds {bad[0]!r:.60} under {name!r}: expected a flat list of numbers")
    if len(values) > LONGEST:
        raise ValueError(f"rank {rank} holds {len(values)} numbers under {name!r}: expected at most {LONGEST}")
    return list(values) or None
