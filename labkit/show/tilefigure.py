"""`show.tiles`: which tiles of attention's s×s matrix are computed, by which rank, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.tilegrid import Grid, grids_of
from labkit.show.tileview import View, span
from labkit.show.words import count, say


def tiles(
    values: Sequence[Any] | Mapping[str, Sequence[Any]],
    *,
    phase: str = "forward",
    title: str | None = None,
    source: str = "measured",
) -> Figure:
    """Draw the matrix of attention as a grid of tiles, queries down and keys across, and step through it.

    On one rank a tile's number is its turn: one tile at a time is in fast memory. On several a tile has the colour of
    the rank that computes it and the number of the step in which it does; a bar a rank shows its tiles. Tiles that
    nobody computes are dotted.

    Args:
        values: An entry a rank, the `places` that `labkit.context_parallel.count_traffic` has noted on it: such as
            ``run.values``, or ``[traffic.places]`` of one rank. Or name → such a list, to compare ("contiguous",
            "zig-zag"): matrices and bars then have one scale. A place is (first query, first key, rows, columns, step,
            phase); step and phase may be left out. On several ranks without steps a rank's k-th tile is in step k.
            1 to 8 ranks, at most 16 tiles along a side.
        phase: Which tiles are drawn: ``"forward"`` or ``"backward"``.
        title: The finding; left out, it is derived.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``.

    Returns:
        A figure that steps with the arrow keys, variants side by side. At the end, and without a kernel, it shows all
        tiles.

    Raises:
        TypeError: `values` are not the tiles of all ranks, or `title` is no text.
        ValueError: a tile is there twice, tiles overlap, ranks share a row, variants differ in size or ranks, there are
            too many of them, or `phase` or `source` is unknown.

    Source: Dao et al. 2022, "FlashAttention", figure 1; Liu et al. 2023, "Ring Attention", figure 2.

    >>> print(tiles([[(0, 0, 4, 4), (4, 0, 4, 4), (4, 4, 4, 4)]]))
    1 of 4 tiles never computed; one at a time is in fast memory [measured]
      A number is a tile's turn. Dotted: never computed, since all its keys come after its queries.
      queries 0–3 · keys (when) 0–3 (1) · tiles 1 · never computed 1
      queries 4–7 · keys (when) 0–3 (2), 4–7 (3) · tiles 2
    """
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title is {title!r}: expected text, or nothing to have it derived from the tiles")
    grids = grids_of(values, phase)
    steps = sorted({step for grid in grids.values() for step in grid.steps})
    views: dict[int, View] = {}

    def draw(width: int, frame: int | None) -> Drawing:
        if width not in views:
            views[width] = View(grids, width)
        return views[width].draw(None if frame is None or frame == len(steps) else steps[frame])

    found = _title(grids) if title is None else title
    says = [*(_said(grids, step) for step in steps), found]
    return Figure(found, draw, _twin(grids), source=source, notes=_notes(grids), says=says,
                  sheets=("holdings", "tiles"))  # fmt: skip


# What is written


def _title(grids: Mapping[str, Grid]) -> str:
    if len(grids) > 1:
        return "; ".join(_named(name, _compared(grid)) for name, grid in grids.items())
    (grid,) = grids.values()
    if grid.left_out:
        return say("tiles.finding", left=_left(grid), said=_all(grid))
    return say("tiles.all", n=len(grid.cells), said=_all(grid))


def _all(grid: Grid) -> str:
    """What the ranks have computed in the end."""
    return say("tiles.at_a_time") if grid.ranks == 1 else _spread(grid.counts())


def _compared(grid: Grid) -> str:
    """The same, where matrices are compared."""
    if grid.ranks > 1:
        return _all(grid)
    return say("tiles.scores_at_a_time", scores=say("tiles.fast_scores", tile=grid.largest, whole=grid.whole))


def _spread(counts: Sequence[int]) -> str:
    """Tiles a rank."""
    if len(set(counts)) == 1:
        return count("tiles.every", counts[0])
    if len(counts) > 4:
        return say("tiles.range", low=min(counts), high=max(counts))
    return say("tiles.spread", counts=", ".join(map(str, counts)))


def _left(grid: Grid) -> str:
    return say("tiles.left", n=len(grid.left_out), all=len(grid.rows) * len(grid.columns))


def _named(name: str, words: str) -> str:
    return say("tiles.named", name=name, said=words) if name else words


def _said(grids: Mapping[str, Grid], step: int) -> str:
    """What is announced of a step."""
    told = []
    for name, grid in grids.items():
        if grid.ranks == 1 and step in grid.steps:
            row, column = grid.at(step)
            words = say("tiles.said_tile", n=step, all=len(grid.cells), queries=span(grid.rows[row]),
                        keys=span(grid.columns[column]))  # fmt: skip
            told.append(_named(name, words))
        elif grid.ranks > 1:
            told.append(_named(name, _spread(grid.counts([step]))))
    words = "; ".join(told)
    return words if next(iter(grids.values())).ranks == 1 else say("tiles.said_step", step=step, said=words)


def _notes(grids: Mapping[str, Grid]) -> list[str]:
    """What the looks mean that this picture has."""
    notes = [say("tiles.legend_order") if next(iter(grids.values())).ranks == 1 else say("tiles.legend_step")]
    if any(grid.left_out for grid in grids.values()):
        causal = all(grid.causal for grid in grids.values())
        notes.append(say("tiles.legend_causal") if causal else say("tiles.legend_left"))
    return [" ".join(notes)]


def _twin(grids: Mapping[str, Grid]) -> Table:
    keys = ("tiles.column_variant", "tiles.column_rank", "tiles.column_queries", "tiles.column_keys",
            "tiles.column_count", "tiles.column_left")  # fmt: skip
    columns = tuple(say(key) for key in keys)
    rows = [row for name, grid in grids.items() for rank in range(grid.ranks) for row in _rows(name, grid, rank)]
    return Table(columns, rows, quiet=columns[:1])


def _rows(name: str, grid: Grid, rank: int) -> Iterator[tuple[str, ...]]:
    """The rows of tiles of a rank, and of several ranks the sum of each."""
    whose = str(rank) if grid.ranks > 1 else ""
    for row, owner in enumerate(grid.row_owners):
        if owner == rank:
            found = sorted((step, column) for (r, column), (_, step) in grid.cells.items() if r == row)
            when = ", ".join(say("tiles.keys_when", keys=span(grid.columns[c]), when=step) for step, c in found)
            left = len(grid.columns) - len(found)
            yield name, whose, span(grid.rows[row]), when, str(len(found)), str(left) if left else ""
    if grid.ranks > 1:
        yield name, whose, say("tiles.every_row"), "", str(grid.counts()[rank]), ""
