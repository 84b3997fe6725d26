"""What `show.tiles` draws, as plain data: the tiles of the s×s matrix, who computed which, and when.

>>> grid = grids_of([[(0, 0, 4, 4), (4, 0, 4, 4), (4, 4, 4, 4)]], "forward")[""]
>>> grid.rows, grid.cells[1, 0], grid.left_out
((range(0, 4), range(4, 8)), (0, 2), [(0, 1)])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

RANKS, SIDE = 8, 16  #: at most so many ranks, and tiles along a side
PHASES = ("forward", "backward")
HINT = "pass [traffic.places] of context_parallel.count_traffic, or the values of a run whose ranks return places"
Cell = tuple[int, int]  #: of a row and a column of tiles


@dataclass(frozen=True)
class Grid:
    """The tiles of one matrix.

    Attributes:
        rows, columns: The positions of each row and column of tiles.
        cells: (row, column) → (rank, step) of each tile that was computed.
        ranks: How many there are.
    """

    rows: tuple[range, ...]
    columns: tuple[range, ...]
    cells: Mapping[Cell, tuple[int, int]]
    ranks: int

    @cached_property
    def left_out(self) -> list[Cell]:
        """The tiles that nobody computed."""
        return [c for c in product(range(len(self.rows)), range(len(self.columns))) if c not in self.cells]

    @cached_property
    def causal(self) -> bool:
        """Whether exactly those are left out whose keys all come after their queries."""
        after = [(r, c) for r, c in product(range(len(self.rows)), range(len(self.columns)))
                 if self.columns[c].start > self.rows[r][-1]]  # fmt: skip
        return self.left_out == after

    @cached_property
    def steps(self) -> list[int]:
        """The steps in which somebody computed a tile."""
        return sorted({step for _, step in self.cells.values()})

    def at(self, step: int | None) -> Cell:
        """The first tile of a step; on one rank the only one."""
        return next(cell for cell, (_, when) in self.cells.items() if when == step)

    @cached_property
    def row_owners(self) -> list[int | None]:
        """The rank that computed each row; its queries stay with it."""
        owners: dict[int, int] = {row: rank for (row, _), (rank, _) in self.cells.items()}
        return [owners.get(row) for row in range(len(self.rows))]

    @cached_property
    def column_owners(self) -> list[int | None]:
        """The rank that held each column's keys at first, if it is known: it has the queries of the same tokens."""
        return [next((owner for owner, row in zip(self.row_owners, self.rows, strict=True)
                      if row.start <= at.start and at.stop <= row.stop), None) for at in self.columns]  # fmt: skip

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.rows[-1].stop, self.columns[-1].stop

    @property
    def whole(self) -> str:
        """The size as words."""
        return "{}×{}".format(*self.size)

    @property
    def largest(self) -> str:
        """The size of the largest tile, as words."""
        return "×".join(str(max(map(len, side))) for side in (self.rows, self.columns))

    def counts(self, steps: Sequence[int] | None = None) -> list[int]:
        """Tiles that each rank computed, in these steps or in all."""
        made = Counter(rank for rank, step in self.cells.values() if steps is None or step in steps)
        return [made[rank] for rank in range(self.ranks)]


def grids_of(values: Any, phase: str) -> dict[str, Grid]:
    """Name → grid; of one the name is empty.

    Raises:
        TypeError, ValueError: `values` is nothing that `show.tiles` takes.
    """
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}: expected {' or '.join(map(repr, PHASES))}")
    if isinstance(values, Mapping):
        if not values:
            raise ValueError("values is empty: expected name → the tiles of each rank")
        found = {str(name): _grid(f"values[{name!r}]", one, phase) for name, one in values.items()}
    else:
        found = {"": _grid("values", values, phase)}
    first = next(iter(found.values()))
    for name, grid in found.items():
        if (grid.size, grid.ranks) != (first.size, first.ranks):
            raise ValueError(
                f"{name!r} has {grid.whole} scores on {grid.ranks} ranks, {next(iter(found))!r} {first.whole} on "
                f"{first.ranks}: compare one matrix on one number of ranks, or draw two pictures"
            )
    return found


@dataclass(frozen=True, slots=True)
class _Given:
    """A tile as it was given."""

    rank: int
    rows: range
    columns: range
    step: int | None


def _grid(name: str, values: Any, phase: str) -> Grid:
    ranks = _ranks(name, values)
    given = [tile for rank, tiles in enumerate(ranks) for tile in _tiles(f"{name}[{rank}]", tiles, rank, phase)]
    if not given:
        raise ValueError(f"{name} has no tile of {phase}: run attention inside count_traffic(), and return its places")
    if len(ranks) > RANKS:
        raise ValueError(f"{name} has {len(ranks)} ranks: expected at most {RANKS}")
    rows, columns = (_cut(name, what, [getattr(t, what) for t in given]) for what in ("rows", "columns"))
    cells: dict[Cell, tuple[int, int]] = {}
    owner: dict[int, int] = {}
    for tile, step in zip(given, _steps(name, given, len(ranks)), strict=True):
        cell = rows.index(tile.rows), columns.index(tile.columns)
        query, key = tile.rows.start, tile.columns.start
        if cell in cells:
            raise ValueError(
                f"{name} has the tile of query {query}, key {key} twice: count the {phase} of one attention"
            )
        if owner.setdefault(cell[0], tile.rank) != tile.rank:
            raise ValueError(
                f"{name} has query {query} on ranks {owner[cell[0]]} and {tile.rank}: expected queries to stay where "
                "they are"
            )
        cells[cell] = tile.rank, step
    return Grid(rows, columns, cells, len(ranks))


def _ranks(name: str, values: Any) -> Sequence[Any]:
    """The tiles of each rank."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise TypeError(f"{name} is {type(values).__name__}: {HINT}")
    for rank, tiles in enumerate(values):
        if isinstance(tiles, str) or not isinstance(tiles, Sequence):
            raise TypeError(f"{name}[{rank}] is {type(tiles).__name__}: {HINT}")
    return values


def _tiles(name: str, tiles: Sequence[Any], rank: int, phase: str) -> Iterator[_Given]:
    """The tiles of one rank and phase."""
    for n, tile in enumerate(tiles):
        if isinstance(tile, str) or not isinstance(tile, Sequence) or not 4 <= len(tile) <= 6:
            raise TypeError(
                f"{name}[{n}] is {tile!r:.60}: expected (first query, first key, rows, columns), then perhaps the step "
                f"and the phase; {HINT}"
            )
        query, key, rows, columns = tile[:4]
        step = tile[4] if len(tile) > 4 else None
        its_phase = tile[5] if len(tile) > 5 else "forward"
        for what, value, least in (("query", query, 0), ("key", key, 0), ("rows", rows, 1), ("columns", columns, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{what} of {name}[{n}] is {value!r}: expected a whole number from {least}")
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise ValueError(f"step of {name}[{n}] is {step!r}: expected a whole number from 0, or None")
        if its_phase == phase:
            yield _Given(rank, range(query, query + rows), range(key, key + columns), step)


def _steps(name: str, given: Sequence[_Given], ranks: int) -> list[int]:
    """When each was computed: one after the other on one rank, else as labelled, else as its rank's k-th."""
    if ranks == 1:
        return list(range(1, len(given) + 1))
    labelled = [tile.step for tile in given if tile.step is not None]
    if len(labelled) == len(given):
        return labelled
    if labelled:
        raise ValueError(f"{name} has tiles with a step and tiles without: expected the label step around all or none")
    seen: Counter[int] = Counter()
    steps = []
    for tile in given:
        steps.append(seen[tile.rank])
        seen[tile.rank] += 1
    return steps


def _cut(name: str, what: str, found: Sequence[range]) -> tuple[range, ...]:
    """How a side is cut into tiles; where none was computed, a piece as well."""
    pieces: list[range] = []
    end = 0
    for piece in sorted(set(found), key=lambda p: (p.start, p.stop)):
        if piece.start < end:
            raise ValueError(
                f"{name} has tiles of {what} {pieces[-1].start}–{pieces[-1][-1]} and {piece.start}–{piece[-1]}: "
                "expected one grid; count one attention"
            )
        pieces += [range(end, piece.start), piece] if piece.start > end else [piece]
        end = piece.stop
    if len(pieces) > SIDE:
        raise ValueError(f"{name} has {len(pieces)} tiles along a side: expected at most {SIDE}; use a larger tile")
    return tuple(pieces)
