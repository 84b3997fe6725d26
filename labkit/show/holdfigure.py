"""`show.holdings`: what each rank holds before and after each collective operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.holds import NOBODY, SEVERAL, SUM, Cell, Number, Panel, read
from labkit.show.lanes import runs
from labkit.show.outcome import holdings_finding
from labkit.show.panels import View
from labkit.show.words import count, say


def holdings(
    held: Sequence[Mapping[str, Sequence[Number] | None]],
    title: str | None = None,
    source: str = "measured",
    *,
    start: bool = True,
    nodes: int = 1,
) -> Figure:
    """Draw what each rank holds at first and after each operation; a number has the colour of the rank it comes from.

    Give every rank numbers that no other rank holds, such as ``10 * rank + element``: then a number tells where it
    comes from. One that no rank held but that is the sum of a column (element c of all ranks) is marked Σ. Where a
    number is both, an operation with "reduce" in its name is taken to have added.

    Args:
        held: An entry a rank, as ``run.values`` gives them: name → list of numbers. The first name is the state
            before, each other one what an operation leaves, all of them begun from that state. ``None`` or an empty
            list: the operation leaves the rank's data unchanged. 1 to 8 ranks, at first 1 to 64 numbers each.
        title: The finding; left out, it is derived.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``.
        start: Whether the state before is drawn as well. If not, all panels stand abreast where they have room.
        nodes: Equal parts of the ranks, one after another, with a line between them.

    Returns:
        A figure with a panel an operation, a row a rank. A short list stands in the columns that its numbers come
        from; numbers that have no room each are drawn as blocks, "10 … 13".

    Raises:
        TypeError: `held` is no list of mappings, a rank holds something other than a list of numbers, or `title` is
            no text.
        ValueError: the ranks name different operations, a rank holds nothing at first, there are too many ranks or
            numbers, `nodes` does not divide the ranks, or `source` is unknown.

    Source: the operations as in the MPI standard (4.1), chapter 6, figure 6.1.

    >>> print(holdings([{"at first": [0, 1], "reduce_scatter": [10]}, {"at first": [10, 11], "reduce_scatter": [12]}]))
    reduce_scatter: each sum on one rank [measured]
      at first · rank 0 · 0, 1 · from rank 0
      at first · rank 1 · 10, 11 · from rank 1
      reduce_scatter · rank 0 · 10 · from 1 sum
      reduce_scatter · rank 1 · 12 · from 1 sum
    """
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title is {title!r}: expected text, or nothing to have it derived from what the ranks hold")
    first, panels = read(held)
    if not isinstance(nodes, int) or nodes < 1 or len(held) % nodes:
        raise ValueError(f"nodes is {nodes!r}: expected a number that divides the {len(held)} ranks")

    def draw(width: int, frame: int | None) -> Drawing:
        return View(first, panels, width, start, nodes).draw()

    found = holdings_finding(first, panels) if title is None else title
    return Figure(found, draw, _twin([first, *panels] if start else panels), source=source, sheets=("holdings",))


def _twin(panels: Sequence[Panel]) -> Table:
    keys = ("holdings.column_operation", "holdings.column_rank", "holdings.column_holds", "holdings.column_from")
    columns = tuple(say(key) for key in keys)
    rows = [
        (panel.name, say("trace.rank", rank=rank), _numbers(row), _origins(row))
        for panel in panels
        for rank, row in enumerate(panel.rows)
    ]
    return Table(columns, rows, columns[:3])


def _numbers(row: tuple[Cell, ...] | None) -> str:
    if row is None:
        return say("holdings.unchanged")
    return ", ".join(str(c.value) if isinstance(c.value, int) else f"{c.value:.6g}" for c in row)


def _origins(row: tuple[Cell, ...] | None) -> str:
    """Where the numbers of a row come from, as its colours tell it."""
    seen = {cell.origin for cell in row or ()}
    ranks = tuple(sorted(origin for origin in seen if origin >= 0))
    words = [say("holdings.from_rank", rank=ranks[0])] if len(ranks) == 1 else []
    if len(ranks) > 1:
        spans = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs(ranks))
        words = [say("holdings.from_ranks", ranks=spans)]
    if SUM in seen:
        words.append(count("holdings.from_sums", sum(cell.origin == SUM for cell in row or ())))
    words += [say("holdings.from_nobody")] if NOBODY in seen else []
    words += [say("holdings.from_several")] if SEVERAL in seen else []
    return ", ".join(words)
