"""`show.holdings`: where numbers come from, what is said about an operation, what is drawn, and what is refused."""

from __future__ import annotations

import os
import re
import sys
from math import nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit import show
from labkit.show.figure import NARROW, WIDE, style
from labkit.show.holds import NOBODY, SEVERAL, SUM, placed, read

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import show_boxes as boxes

FIGURES = Path(__file__).parent / "figures"
NAMES = ("broadcast from 1", "reduce to 1", "all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def six(ranks: int, part: int = 1, number=lambda rank, element: 10 * rank + element) -> list[dict]:
    """The six operations by their definitions, on `part` numbers for each rank; rank r has number(r, 0), …"""
    own = [[number(r, c) for c in range(ranks * part)] for r in range(ranks)]
    sums = [sum(column) for column in zip(*own, strict=True)]
    mine = [slice(r * part, (r + 1) * part) for r in range(ranks)]
    return [
        {
            "at first": own[r],
            "broadcast from 1": own[1],
            "reduce to 1": sums if r == 1 else None,
            "all_reduce": sums,
            "reduce_scatter": sums[mine[r]],
            "all_gather": [n for row in own for n in row],
            "all_to_all": [n for row in own for n in row[mine[r]]],
        }
        for r in range(ranks)
    ]


def only(name: str, held: list[dict]) -> list[dict]:
    return [{"at first": row["at first"], name: row[name]} for row in held]


def wrong() -> list[dict]:
    held = six(4)
    held[2]["all_reduce"] = [60, 64, 67, 72]
    return held


EVERY = {
    "two": lambda: six(2),
    "three": lambda: six(3),
    "four": lambda: six(4),
    "eight": lambda: six(8),
    "floats": lambda: six(4, number=lambda r, c: 0.1 * r + 0.013 * c + 0.001),
    "long": lambda: six(4, 4, lambda r, c: 100 * r + c),
    "longest": lambda: six(8, 8, lambda r, c: 1000 * r + c),
    "large": lambda: six(8, number=lambda r, c: -1_234_567 * (10 * r + c + 1)),
    "wrong": wrong,
    "mixed": lambda: [{"a": [1], "b": [7] * 30 + [nan]}, {"a": [2, 3], "b": []}],
    "alone": lambda: [{"a": [5], "all_reduce": [5]}],
}


def pieces(figure, width=WIDE) -> list[tuple[str, float, float, list[str]]]:
    """Class, left end, top and words of each box, in painting order; those of the key have no second text."""
    tree = boxes.tree(figure.draw(width, None))
    groups = [g for g in tree.iter("g") if "lk-held" in g.get("class", "")]
    first = [(g, g.find("rect")) for g in groups]
    return [(g.get("class"), float(r.get("x")), float(r.get("y")), [t.text for t in g.iter("text")]) for g, r in first]


def cells(figure, width=WIDE):
    return [piece for piece in pieces(figure, width) if len(piece[3]) == 2]


# Where numbers come from


@given(st.integers(2, 8), st.integers(1, 3))
def test_the_origin_of_every_number_is_found(ranks, part):
    first, panels = read(six(ranks, part, lambda r, c: 1000 * r + c))
    n = ranks * part
    own = [[(r, c) for c in range(n)] for r in range(ranks)]
    sums = [(SUM, c) for c in range(n)]
    found = {p.name: [None if row is None else [(c.origin, c.column) for c in row] for row in p.rows] for p in panels}
    assert [[(c.origin, c.column) for c in row] for row in first.rows] == own
    assert found == {
        "broadcast from 1": [own[1]] * ranks,
        "reduce to 1": [sums if r == 1 else None for r in range(ranks)],
        "all_reduce": [sums] * ranks,
        "reduce_scatter": [sums[r * part : (r + 1) * part] for r in range(ranks)],
        "all_gather": [[mark for row in own for mark in row]] * ranks,
        "all_to_all": [[mark for row in own for mark in row[r * part : (r + 1) * part]] for r in range(ranks)],
    }


def test_what_is_a_sum_and_a_ranks_number_is_told_by_the_operation():
    _, (moved, added) = read([{"a": [0, 1], "copy": [10, 11], "all_reduce": [10, 12]},
                              {"a": [10, 11], "copy": [10, 11], "all_reduce": [10, 12]}])  # fmt: skip
    assert [c.origin for c in moved.rows[0]] == [1, 1]
    assert [c.origin for c in added.rows[0]] == [SUM, SUM]


def test_numbers_of_several_ranks_or_of_none():
    _, (panel,) = read([{"a": [1, 2], "b": [1, 9]}, {"a": [1, 5], "b": [2, nan]}])
    assert [[c.origin for c in row] for row in panel.rows] == [[SEVERAL, NOBODY], [0, NOBODY]]
    _, (panel,) = read([{"a": [0, 0], "broadcast": [7, 7]}, {"a": [7, 7], "broadcast": [7, 7]}])
    assert [(c.origin, c.column) for c in panel.rows[0]] == [(1, 0), (1, 1)], "twice on one rank: by its place"


def test_a_float_sum_may_be_as_inexact_as_float32():
    import torch

    own = [torch.rand(4, generator=torch.Generator().manual_seed(r)) for r in range(8)]
    total = torch.stack(own).sum(0)
    _, (exact,) = read([{"a": row, "all_reduce": total} for row in own])
    assert {c.origin for row in exact.rows for c in row} == {SUM}
    _, (off,) = read([{"a": row, "all_reduce": total * (1 + 1e-4)} for row in own])
    assert {c.origin for row in off.rows for c in row} == {NOBODY}


def test_short_rows_stand_where_their_numbers_come_from():
    _, panels = read(six(4, 2))
    scattered = next(p for p in panels if p.name == "reduce_scatter")
    assert [placed(row, 8) for row in scattered.rows] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    _, (dealt,) = read([{"a": [10 * r, 10 * r + 1], "scatter": [10 + r]} for r in range(2)])
    assert [placed(row, 2) for row in dealt.rows] == [[0], [1]]
    _, (odd,) = read([{"a": [1, 2, 3], "b": [3, 2]}, {"a": [4, 5, 6], "b": [99]}])
    assert [placed(row, 3) for row in odd.rows] == [[0, 1], [0]], "out of order, unknown: from the left"


# What is said


@pytest.mark.parametrize("ranks", range(2, 9))
def test_each_operation_is_told_by_what_it_did(ranks):
    held = six(ranks, number=lambda r, c: 1000 * r + c)
    titles = [show.holdings(only(name, held)).title for name in NAMES]
    assert titles == [
        "broadcast from 1: rank 1's data on every rank",
        "reduce to 1: every sum on rank 1",
        "all_reduce: every sum on every rank",
        "reduce_scatter: each sum on one rank",
        "all_gather: all data on every rank",
        "all_to_all: rows become columns, a transpose",
    ]
    assert show.holdings(held).title == "3 of 6 operations add up; the others only move what the ranks held"


def test_more_titles():
    rows = [[1, 2], [30, 40]]
    everything = [1, 2, 30, 40]

    def title(*after, name="x"):
        return show.holdings([{"a": own, name: row} for own, row in zip(rows, after, strict=True)]).title

    assert title(None, everything) == "x: all data on rank 1"
    assert title([1], [2]) == "x: rank 0's parts, one a rank"
    assert title(None, None) == title([1, 2], None) == "x: all as at first"
    assert title([31], None) == "Every operation adds up what the ranks held"
    assert title([2], [1]) == "Nothing is added up: every number was held by a rank at first"
    assert title(None, [31, 43]) == "x leaves 43 on rank 1, which no rank held at first and no column adds up to"
    assert show.holdings(wrong()).title.startswith("all_reduce leaves 67 on rank 2, which no rank held")
    two = [{"a": own, "sum": [31, 42], "move": [1, 2]} for own in rows]
    assert show.holdings(two).title == "1 of 2 operations adds up; the others only move what the ranks held"
    assert show.holdings(two, "Mine").title == "Mine"


def test_the_twin_tells_what_each_rank_holds_and_whose_it_is():
    figure = show.holdings(six(4))
    assert figure.twin.columns == ("operation", "rank", "holds", "from")
    rows = set(figure.twin.rows)
    assert len(figure.twin.rows) == 7 * 4
    assert {
        ("at first", "rank 2", "20, 21, 22, 23", "rank 2"),
        ("reduce to 1", "rank 1", "60, 64, 68, 72", "4 sums"),
        ("reduce to 1", "rank 2", "unchanged", ""),
        ("reduce_scatter", "rank 2", "68", "1 sum"),
        ("all_to_all", "rank 3", "3, 13, 23, 33", "ranks 0–3"),
    } <= rows
    assert ("all_reduce", "rank 2", "60, 64, 67, 72", "3 sums, no rank") in show.holdings(wrong()).twin.rows


# What is drawn


def test_colours_tell_the_operations_apart():
    """Four ranks, numbers all in cells: a broadcast has one colour, an all-to-all a colour a column."""
    figure = show.holdings(six(4))
    drawn = cells(figure, NARROW)
    panels = [drawn[n : n + 16] for n in (0, 16, 32, 48)]
    own = [[f"lk-held lk-own lk-own{r}"] * 4 for r in range(4)]
    assert [p[0] for p in panels[0]] == [cls for row in own for cls in row]
    assert {p[0] for p in panels[1]} == {"lk-held lk-own lk-own1"}
    assert [p[0] for p in panels[2]] == ["lk-held lk-faint"] * 4 + ["lk-held lk-sum"] * 4 + ["lk-held lk-faint"] * 8
    assert {p[0] for p in panels[3]} == {"lk-held lk-sum"}
    scattered, swapped = drawn[64:68], drawn[-16:]
    assert [p[0] for p in swapped] == [f"lk-held lk-own lk-own{r}" for r in range(4)] * 4
    assert [p[3] for p in swapped[:4]] == [["0", "0"], ["1", "10"], ["2", "20"], ["3", "30"]]
    assert [p[1] for p in scattered] == [p[1] for p in panels[0][:4]], "a diagonal, on the columns of the start"
    assert [p[3] for p in scattered] == [["Σ", "60"], ["Σ", "64"], ["Σ", "68"], ["Σ", "72"]]


def test_an_all_gather_is_a_row_of_blocks_one_a_rank():
    gathered = [p for p in cells(show.holdings(six(4))) if "…" in p[3][1]]
    assert [p[3] for p in gathered[:4]] == [["0", "0 … 3"], ["1", "10 … 13"], ["2", "20 … 23"], ["3", "30 … 33"]]
    assert len(gathered) == 16
    of_eight = [p for p in pieces(show.holdings(only("all_gather", six(8))), NARROW) if len(p[3]) == 1]
    assert [p[3] for p in of_eight[-8:]] == [[str(rank)] for rank in range(8)], "no room for numbers: the tab alone"


def test_no_number_without_a_block_is_hidden():
    """Where numbers do not fit, the picture gets wider and scrolls."""
    figure = show.holdings(EVERY["mixed"]())
    drawing = figure.draw(NARROW, None)
    assert drawing.width > NARROW
    assert [p[3][1] for p in cells(figure, NARROW)][3:34] == ["7"] * 30 + ["nan"]


def test_the_key_has_the_looks_that_are_drawn():
    def key(name):
        return [p[3][0] for p in pieces(show.holdings(EVERY[name]())) if p[3][1:] == []]

    assert key("four") == ["1", "Σ", "1"]
    assert key("wrong") == ["1", "Σ", "?", "1"]
    assert key("alone") == ["0", "Σ"]
    assert [p[3][0] for p in pieces(show.holdings([{"a": [1], "b": [1]}] * 2)) if len(p[3]) == 1] == ["1", "*"]


@pytest.mark.parametrize("name", EVERY)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    figure = show.holdings(EVERY[name]())
    for width in (WIDE, NARROW):
        drawing = figure.draw(width, None)
        assert boxes.outside(drawing) == []
        assert boxes.overlapping(drawing) == []
        assert drawing.width == width or name in ("mixed", "large")


@pytest.mark.parametrize("name", ["four", "wrong"])
def test_a_picture_is_the_one_on_file(name):
    html = show.holdings(EVERY[name]()).to_html().replace(style("holdings"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"holdings_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


def test_the_colours_carry_their_text():
    """WCAG 2.1: 4.5 for the rank's number on its tab."""
    from test_show_compare import contrast

    css = style("holdings")
    for rank in range(7):
        color, text = re.search(rf"\.lk-own{rank}{{--lk-own: ?(#\w+)(?:;--lk-on: ?(#\w+))?}}", css).groups()
        full = [f"#{''.join(2 * c for c in hue[1:])}" if len(hue) == 4 else hue for hue in (color, text or "#000")]
        assert contrast(*full) >= 4.5, rank


def test_every_rule_of_the_sheet_stays_inside_the_figure():
    css = re.sub(r"@(media|container)[^{]*{((?:[^{}]*{[^{}]*})*)}", r"\2", style("holdings"))
    for selector in re.findall(r"([^{}]+){", css):
        assert all(one.strip().startswith(".lk") for one in selector.split(",")), selector


# Real ranks


def real():
    import torch
    import torch.distributed as dist

    rank, p = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(p) + 10 * rank
    held = {"at first": mine.tolist()}
    total = mine.clone()
    dist.all_reduce(total)
    gathered = [torch.empty_like(mine) for _ in range(p)]
    dist.all_gather(gathered, mine)
    root = mine.clone()
    dist.broadcast(root, src=1)
    return held | {"broadcast from 1": root, "all_reduce": total, "all_gather": torch.cat(gathered).tolist()}


def test_real_ranks_hold_what_the_definitions_say():
    by_hand = [{name: row[name] for name in ("at first", "broadcast from 1", "all_reduce", "all_gather")}
               for row in six(3)]  # fmt: skip
    assert show.holdings(labkit.run(real, ranks=3).values).to_html() == show.holdings(by_hand).to_html()


# What is refused


@pytest.mark.parametrize(("held", "error", "message"), [
    (3, TypeError, "held is 3: expected a mapping name → numbers for each rank, such as run.values"),
    ({"a": [1]}, TypeError, "held is {'a': "),
    ([[1]], TypeError, r"held is \[\[1\]\]"),
    ([], ValueError, "held has 0 ranks: expected 1 to 8"),
    ([{"a": [1], "b": [1]}] * 9, ValueError, "held has 9 ranks: expected 1 to 8; draw a run of fewer ranks"),
    ([{3: [1], "b": [1]}], TypeError, "held names an operation 3: expected text"),
    ([{"a": [1]}], ValueError, r"rank 0 holds \['a'\]: expected the state before, and"),
    ([{"a": [1], "b": [1]}, {"a": [1]}], ValueError, "rank 0 has 'b', rank 1 has not.*give None where"),
    ([{"a": [1], "b": [1]}, {"a": [1], "b": [1], "c": [1]}], ValueError, "rank 1 has 'c', rank 0 has not"),
    ([{"a": [], "b": [1]}], ValueError, "rank 0 holds 0 numbers under 'a', the state before: expected 1 to 64"),
    ([{"a": None, "b": [1]}], ValueError, "rank 0 holds 0 numbers under 'a'"),
    ([{"a": [1] * 65, "b": [1]}], ValueError, "rank 0 holds 65 numbers under 'a'"),
    ([{"a": [1], "b": [1] * 513}], ValueError, "rank 0 holds 513 numbers under 'b': expected at most 512"),
    ([{"a": [1], "b": "unchanged"}], TypeError, "rank 0 holds 'unchanged' under 'b': expected a list of numbers, or N"),
    ([{"a": [1], "b": 5}], TypeError, "rank 0 holds 5 under 'b'"),
    ([{"a": [1], "b": [[1]]}], TypeError, r"rank 0 holds \[1\] under 'b': expected a flat list"),
    ([{"a": [1], "b": [True]}], TypeError, "rank 0 holds True under 'b'"),
])  # fmt: skip
def test_bad_data_is_named(held, error, message):
    with pytest.raises(error, match=message):
        show.holdings(held)


def mesh() -> list[dict]:
    """What ranks of a mesh of three times two find in their groups."""
    pairs = {"tp": lambda r: r & ~1, "dp": lambda r: r & ~2, "pp": lambda r: r & ~4}
    steps = {"tp": 1, "dp": 2, "pp": 4}
    return [{"rank": [r], **{n: [low(r), low(r) + steps[n]] for n, low in pairs.items()}} for r in range(8)]


def test_without_the_state_before_the_panels_stand_abreast():
    figure = show.holdings(mesh(), start=False, nodes=2)
    assert {row[0] for row in figure.twin.rows} == {"tp", "dp", "pp"}
    for width in (WIDE, NARROW):
        drawing = figure.draw(width, None)
        heads = [box for box, said, _ in boxes.texts(drawing) if said in ("tp", "dp", "pp")]
        assert len(heads) == 3
        assert len({top for _, top, _, _ in heads}) == 1
        assert drawing.height < 400
        assert boxes.outside(drawing) == []
        assert boxes.overlapping(drawing) == []
    assert show.holdings(mesh()).draw(WIDE, None).height > 600


def test_a_line_stands_between_nodes():
    def found(nodes):
        return [
            float(n.get("y1")) for n in boxes.tree(show.holdings(six(4), nodes=nodes).draw(WIDE, None)).iter("line")
        ]

    assert found(1) == []
    assert len(found(2)) == 7
    assert len(found(4)) == 3 * 7


def test_bad_arguments_are_named():
    for nodes in (0, 3, "2"):
        with pytest.raises(ValueError, match=f"nodes is {nodes!r}: expected a number that divides the 4 ranks"):
            show.holdings(six(4), nodes=nodes)
    with pytest.raises(TypeError, match="title is 3: expected text"):
        show.holdings(six(2), title=3)
    with pytest.raises(ValueError, match="source is 'guessed'"):
        show.holdings(six(2), source="guessed")
