"""What an operation did with the data of the ranks, in words: what it did to one, and what all of them show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from labkit.show.holds import NOBODY, SUM, Number, Panel
from labkit.show.words import count, say

Mark = tuple[int, int | None]  #: origin and column
Marks = list[Mark]


def outcome(after: Panel, first: Panel) -> str:
    """What an operation did, when it is one of the known patterns; else nothing.

    >>> from labkit.show.holds import read
    >>> first, (after,) = read([{"at first": [1, 2], "broadcast": [3, 4]}, {"at first": [3, 4], "broadcast": None}])
    >>> outcome(after, first)
    "rank 1's data on every rank"
    """
    own = [_marks(row) for row in first.rows]
    rows = [own[rank] if row is None else _marks(row) for rank, row in enumerate(after.rows)]
    sums: Marks = [(SUM, column) for column in range(min(map(len, own)))]
    every, joined = list(chain(*own)), list(chain(*rows))
    if rows == own:
        return say("holdings.as_before")
    for rank, data in enumerate(own):
        if all(row == data for row in rows):
            return say("holdings.copied", rank=rank)
        if joined == data:
            return say("holdings.dealt", rank=rank)
    if all(row == sums for row in rows):
        return say("holdings.all_reduced")
    if joined == sums:
        return say("holdings.scattered")
    if all(row == every for row in rows):
        return say("holdings.all_gathered")
    changed = [rank for rank, row in enumerate(rows) if row != own[rank]]
    if len(changed) == 1 and rows[changed[0]] in (sums, every):
        key = "holdings.reduced" if rows[changed[0]] == sums else "holdings.gathered"
        return say(key, rank=changed[0])
    return say("holdings.swapped") if rows == _transposed(own) else ""


def holdings_finding(first: Panel, panels: Sequence[Panel]) -> str:
    """The title: a number that nobody can explain, what the one operation did, or how many of them add up."""
    for panel in panels:
        for rank, row in enumerate(panel.rows):
            if odd := [cell for cell in row or () if cell.origin == NOBODY]:
                return say("holdings.odd", name=panel.name, value=short(odd[0].value), rank=rank)
    if len(panels) == 1 and (what := outcome(panels[0], first)):
        return say("holdings.only", name=panels[0].name, what=what)
    adds = sum(any(cell.origin == SUM for row in panel.rows for cell in row or ()) for panel in panels)
    if adds == len(panels):
        return say("holdings.all_add")
    return count("holdings.some_add", adds, all=len(panels)) if adds else say("holdings.none_adds")


def short(value: Number) -> str:
    """A number in few characters.

    >>> short(60), short(0.30000001), short(12_345_678)
    ('60', '0.3', '1.23e+07')
    """
    return str(value) if isinstance(value, int) and abs(value) < 10**6 else f"{value + 0.0:.3g}"


def _marks(row) -> Marks:
    return [(cell.origin, cell.column) for cell in row]


def _transposed(own: list[Marks]) -> list[Marks] | None:
    """What an all-to-all leaves: part j of rank i has become part i of rank j."""
    ranks, length = len(own), len(own[0])
    if length % ranks or any(len(row) != length for row in own):
        return None
    part = length // ranks
    return [[mark for row in own for mark in row[rank * part : (rank + 1) * part]] for rank in range(ranks)]
