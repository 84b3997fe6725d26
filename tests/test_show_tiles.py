"""`show.tiles`: what is drawn of real runs, where tiles, bars and numbers stand, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import labkit
from labkit import show
from labkit.show.figure import NARROW, WIDE, style
from labkit.show.player import payload

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import programs_context_parallel as programs
import show_boxes as boxes

FIGURES = Path(__file__).parent / "figures"
Place = tuple[int, int, int, int, int | None]


def tiled(side: int = 4, tile: int = 16, causal: bool = True) -> list[list[Place]]:
    """One rank, row by row."""
    cells = [(r, c) for r, c in product(range(side), repeat=2) if c <= r or not causal]
    return [[(r * tile, c * tile, tile, tile, None) for r, c in cells]]


def ring(order: str, ranks: int = 4, causal: bool = True) -> list[list[Place]]:
    """By the definition: chunks of two tiles each a rank, keys of rank r − i in step i, what is masked left out."""
    chunks = {r: (2 * r, 2 * r + 1) if order == "contiguous" else (r, 2 * ranks - 1 - r) for r in range(ranks)}
    return [
        [(8 * q, 8 * k, 8, 8, step) for step in range(ranks) for q in chunks[r] for k in chunks[(r - step) % ranks]
         if k <= q or not causal]
        for r in range(ranks)
    ]  # fmt: skip


def two(ranks: int = 4) -> dict[str, list[list[Place]]]:
    return {"contiguous": ring("contiguous", ranks), "zig-zag": ring("zigzag", ranks)}


def words(figure, width=WIDE, frame=None) -> list[str]:
    return [w for _, w, _ in boxes.texts(figure.draw(width, frame))]


def rects(figure, cls: str, width=WIDE, frame=None) -> list[tuple[float, float, float, float]]:
    """x, y, width and height of the rectangles of a class."""
    found = boxes.tree(figure.draw(width, frame)).iter("rect")
    return [tuple(float(n.get(k)) for k in ("x", "y", "width", "height")) for n in found if n.get("class") == cls]


def made(figure, width=WIDE, frame=None) -> list[tuple[str, str, bool]]:
    """Of each tile that is drawn as computed: the rank whose colour it has, its number, whether it is marked."""
    found = []
    for group in boxes.tree(figure.draw(width, frame)).iter("g"):
        number = group.find("text")
        if number is not None and "lk-value" in (number.get("class") or ""):
            rank = re.search(r"lk-own(\d)", group.get("class")).group(1)
            found.append((rank, number.text, "lk-now" in group.get("class").split()))
    return found


# Real runs


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tiles_of_a_real_ring_are_those_of_the_definition(order, ranks):
    places = labkit.run(programs.places, order, 8, ranks=ranks).values
    assert [{tuple(p[:5]) for p in rank} for rank in places] == [set(rank) for rank in ring(order, ranks)]
    assert show.tiles(places).to_html() == show.tiles(ring(order, ranks)).to_html()


def test_a_real_ring_backward():
    places = labkit.run(programs.places, "zigzag", 8, True, ranks=2).values
    both = [{(p.query, p.key) for p in rank if p.phase == phase} for phase in show.tilegrid.PHASES for rank in places]
    assert both[:2] == both[2:]
    assert show.tiles(places).title == show.tiles(places, phase="backward").title


def test_real_tiles_on_one_rank():
    figure = show.tiles([programs.tiled_places(64, 16)])
    assert figure.to_html() == show.tiles(tiled()).to_html()
    assert figure.title == "6 of 16 tiles never computed; one at a time is in fast memory"
    ragged = show.tiles([programs.tiled_places(37, 10)])
    assert ragged.twin.rows[-1] == ("", "", "30–36", "0–9 (7), 10–19 (8), 20–29 (9), 30–36 (10)", "4", "")
    everything = show.tiles([programs.tiled_places(64, 16, causal=False)])
    assert everything.title == "All 16 tiles are computed; one at a time is in fast memory"
    assert "never" not in str(everything)


# The picture


def test_zigzag_gives_every_rank_the_same_work():
    figure = show.tiles(two())
    assert figure.title == "contiguous: 3, 7, 11, 15 tiles a rank; zig-zag: 9 tiles on every rank"
    for width in (WIDE, NARROW):
        said = words(figure, width)
        assert [said.count(n) for n in ("15", "11", "9")] == [1, 1, 4]
        assert said.count("28 of 64 tiles never computed") == 2
        assert "busiest at each step: 3 + 4 + 4 + 4 = 15" in said
        assert "busiest at each step: 3 + 2 + 2 + 2 = 9" in said


def test_bars_and_matrices_have_one_scale():
    figure = show.tiles(two())
    for width in (WIDE, NARROW):
        whole = rects(figure, "lk-yet", width)  # the outline of a bar
        unit = whole[0][2] / 3
        assert [bar[2] / unit for bar in whole] == pytest.approx([3, 7, 11, 15, 9, 9, 9, 9], rel=0.02)
        out = rects(figure, "lk-out", width)
        assert len(out) == 2 * 28
        assert len({(round(w), round(h)) for _, _, w, h in out}) == 1
    first, second = rects(figure, "lk-yet")[0], rects(figure, "lk-yet")[4]
    assert first[1] == second[1], "beside each other in the wide layout"
    first, second = rects(figure, "lk-yet", NARROW)[0], rects(figure, "lk-yet", NARROW)[4]
    assert first[0] == second[0], "below each other in the narrow one"


def test_a_tile_has_its_ranks_colour_and_its_step():
    figure = show.tiles(ring("zigzag"))
    expected = sorted((str(rank), str(p[4]), False) for rank, tiles in enumerate(ring("zigzag")) for p in tiles)
    for width in (WIDE, NARROW):
        assert sorted(made(figure, width)) == expected
    tabs = words(figure)[1 : 1 + 14]  # of rows and columns, the middle two of rank 3 being one
    assert tabs == list("0123210" * 2)
    assert words(show.tiles(ring("contiguous")))[1 : 1 + 8] == list("0123" * 2)


def test_steps_mark_what_is_computed_and_leave_the_rest_empty():
    figure = show.tiles(two())
    assert len(figure.says) == 4 + 1
    assert figure.start == 4
    assert figure.says[1] == "Step 1: contiguous: 0, 4, 4, 4 tiles a rank; zig-zag: 2 tiles on every rank"
    assert figure.says[4] == figure.title
    assert figure.draw(WIDE, 4) == figure.draw(WIDE, None)
    for step in range(4):
        drawn = made(figure, WIDE, step)
        counts = [(sum(p[4] <= step for rank in v for p in rank), sum(p[4] == step for rank in v for p in rank))
                  for v in two().values()]  # fmt: skip
        assert len(drawn) == sum(n for n, _ in counts)
        assert sum(now for *_, now in drawn) == sum(n for _, n in counts)
        assert all(now == (number == str(step)) for _, number, now in drawn)
    assert not any(now for *_, now in made(figure))
    assert {"3 · idle", "7", "7 of 11", "7 of 15"} <= set(words(figure, WIDE, 1))
    assert words(figure, WIDE, 1).count("5 of 9") == 4
    assert "busiest at each step: 3 + 4 = 7" in words(figure, WIDE, 1)


def test_a_bar_is_filled_by_what_is_done():
    figure = show.tiles(two())
    for frame, done in ((1, [3, 7, 7, 7, 5, 5, 5, 5]), (None, [3, 7, 11, 15, 9, 9, 9, 9])):
        pairs = []
        for group in boxes.tree(figure.draw(WIDE, frame)).iter("g"):
            bar = [n for n in group.findall("rect") if n.get("height") == "20"]
            if len(bar) == 2:
                pairs.append([float(n.get("width")) for n in bar])
        unit = pairs[0][0] / 3
        assert [filled / unit for _, filled in pairs] == pytest.approx(done, rel=0.02)


def test_on_one_rank_a_tile_at_a_time_is_in_fast_memory():
    figure = show.tiles(tiled())
    assert figure.says[4] == "Tile 5 of 10: queries 32–47, keys 16–31, alone in fast memory"
    for frame in range(10):
        drawn = made(figure, WIDE, frame)
        assert [number for _, number, _ in drawn] == [str(n + 1) for n in range(frame + 1)]
        assert [now for *_, now in drawn] == [False] * frame + [True]
    said = words(figure, NARROW, 4)
    assert {"queries 32–47", "keys and values 16–31", "16×16 of 64×64 scores"} <= set(said)
    (lines,) = [g for g in boxes.tree(figure.draw(WIDE, 4)).iter("g") if g.get("class") == "lk-taken"]
    row, column = lines.findall("line")
    (tile,) = [g for g in boxes.tree(figure.draw(WIDE, 4)).iter("g") if "lk-now" in (g.get("class") or "")]
    box = {k: float(v) for k, v in tile.find("rect").attrib.items() if k in ("x", "y")}
    assert float(row.get("y1")) == pytest.approx(box["y"], abs=0.2)
    assert float(column.get("x1")) == pytest.approx(box["x"], abs=0.2)


def test_at_a_rows_end_stands_its_number_of_tiles():
    figure = show.tiles(tiled())
    matrix = rects(figure, "lk-out")
    right = max(x + w for x, _, w, _ in matrix)
    ends = [w for (left, *_), w, _ in boxes.texts(figure.draw(WIDE, None)) if right < left < right + 20]
    assert ends == ["tiles", "1", "2", "3", "4"]


def test_without_steps_a_ranks_kth_tile_is_in_step_k():
    figure = show.tiles([[(0, 0, 8, 8)], [(8, 0, 8, 8), (8, 8, 8, 8)]])
    assert made(figure) == [("0", "0", False), ("1", "0", False), ("1", "1", False)]


def test_a_tile_missing_below_the_diagonal_is_not_explained():
    values = tiled()
    del values[0][2]
    figure = show.tiles(values)
    assert figure.title.startswith("7 of 16 tiles never computed")
    assert figure.notes[0].endswith("Dotted: never computed.")
    oblong = [[(q, k, 16, 8) for q in (0, 16) for k in range(0, q + 16, 8)]]
    assert show.tiles(oblong).notes[0].endswith("since all its keys come after its queries.")
    assert show.tiles([oblong[0][1:]]).notes[0].endswith("Dotted: never computed.")
    gap = [[(0, 0, 8, 8), (16, 16, 8, 8)]]
    assert [row[2] for row in show.tiles(gap).twin.rows] == ["0–7", "16–23"]
    assert len(rects(show.tiles(gap), "lk-out")) == 7


def test_tile_sizes_are_compared_in_matrices_of_one_size():
    figure = show.tiles({"16": tiled(), "32": tiled(2, 32)})
    assert {round(max(x + w for x, _, w, _ in rects(figure, "lk-out", NARROW, k))) for k in range(11)} == {
        round(max(x + w for x, _, w, _ in rects(figure, "lk-out", NARROW)))
    }
    assert figure.title == "16: 16×16 of 64×64 scores at a time; 32: 32×32 of 64×64 scores at a time"
    assert figure.says[9] == "16: Tile 10 of 10: queries 48–63, keys 48–63, alone in fast memory"
    assert "3 tiles computed" in words(figure, WIDE, 9)


def test_the_twin_is_what_is_drawn():
    rows = show.tiles(two()).twin.rows
    assert rows[0] == ("contiguous", "0", "0–7", "0–7 (0)", "1", "7")
    assert rows[2] == ("contiguous", "0", "all", "", "3", "")
    assert rows[-2] == (
        "zig-zag", "3", "32–39", "24–31 (0), 32–39 (0), 16–23 (1), 8–15 (2), 0–7 (3)", "5", "3",
    )  # fmt: skip
    assert "contiguous · rank 3 · queries all · tiles 15" in str(show.tiles(two()))


PICTURES = {
    "tiled": lambda: show.tiles(tiled(8, 128)),
    "ring": lambda: show.tiles(two()),
    "one_ring": lambda: show.tiles(ring("zigzag")),
    "eight": lambda: show.tiles(two(8)),
    "every": lambda: show.tiles(ring("contiguous", causal=False)),
    "one": lambda: show.tiles(tiled(1)),
    "sixteen": lambda: show.tiles(tiled(16, 8192)),
    "three": lambda: show.tiles({"16": tiled(), "32": tiled(2, 32), "8": tiled(8, 8)}),
    "long": lambda: show.tiles({"a very long name of an order, which no panel has room for at all": ring("zigzag"),
                                "b": ring("contiguous")}),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    figure = PICTURES[name]()
    last = len(figure.says)
    for width in (WIDE, NARROW):
        sizes = set()
        for frame in range(0, last, 1 + last // 9):
            drawing = figure.draw(width, frame)
            sizes.add((drawing.width, drawing.height))
            assert boxes.outside(drawing) == []
            assert boxes.overlapping(drawing) == []
        assert len(sizes) == 1
        assert drawing.width <= width or (name, width) == ("sixteen", NARROW), "only that one scrolls"


@pytest.mark.parametrize("name", ["tiled", "ring", "every"])
def test_a_picture_is_the_one_on_file(name):
    html = PICTURES[name]().to_html().replace(style("holdings", "tiles"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"tiles_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


def test_numbers_lie_inside_their_tiles():
    for name in PICTURES:
        for width in (WIDE, NARROW):
            for group in boxes.tree(PICTURES[name]().draw(width, None)).iter("g"):
                box, number = group.find("rect"), group.find("text")
                if box is None or number is None or "lk-value" not in number.get("class"):
                    continue
                half = show.svg.text_width(number.text, 12) / 2
                left, wide = float(box.get("x")), float(box.get("width"))
                assert left <= float(number.get("x")) - half
                assert float(number.get("x")) + half <= left + wide, (name, width, number.text)


def test_what_frames_share_is_sent_once():
    data = payload(PICTURES["tiled"]())
    assert len(data["wide"]["frames"]) == len(data["narrow"]["frames"]) == 36 + 1
    assert len(str(data)) < 150_000


def test_colours_are_those_of_ranks():
    css = Path(show.__file__).with_name("tiles.css").read_text(encoding="utf-8")
    rules = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    for selector in re.findall(r"([^{}]+){", rules):
        assert all(one.strip().startswith(".lk") for one in selector.split(",")), selector
    assert not re.search(r"#[0-9a-f]{3,6}\b", rules), "its colours are those of other sheets, which know forced colours"


@pytest.mark.soak
def test_pictures_are_the_same_in_every_run():
    code = "import test_show_tiles as t; print([t.PICTURES[n]().to_html() for n in ('tiled', 'ring', 'three')])"
    seen = set()
    for seed in ("1", "2"):
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
        seen.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
    assert len(seen) == 1


def test_names_are_escaped():
    assert "<b>" not in show.tiles({"<b>a</b>": tiled(), "b": tiled()}).to_html()


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: show.tiles(3), TypeError, "values is int: pass"),
    (lambda: show.tiles([]), TypeError, "values is list: pass"),
    (lambda: show.tiles([None]), TypeError, r"values\[0\] is NoneType: pass"),
    (lambda: show.tiles(tiled()[0]), TypeError, r"values\[0\]\[0\] is 0: expected \(first query, first key"),
    (lambda: show.tiles({}), ValueError, "values is empty"),
    (lambda: show.tiles({"a": "b"}), TypeError, r"values\['a'\] is str"),
    (lambda: show.tiles([["abcd"]]), TypeError, r"values\[0\]\[0\] is 'abcd'"),
    (lambda: show.tiles([[(0, 0, 8)]]), TypeError, r"is \(0, 0, 8\): expected"),
    (lambda: show.tiles([[(0, 0, 8, 0)]]), ValueError, r"columns of values\[0\]\[0\] is 0: expected a whole number"),
    (lambda: show.tiles([[(-1, 0, 8, 8)]]), ValueError, "query of .* is -1: expected a whole number from 0"),
    (lambda: show.tiles([[(0, 0, 8.0, 8)]]), ValueError, "rows of .* is 8.0"),
    (lambda: show.tiles([[(0, 0, 8, 8, -1)]]), ValueError, "step of .* is -1"),
    (lambda: show.tiles([[], []]), ValueError, "values has no tile of forward: run attention inside"),
    (lambda: show.tiles(tiled(), phase="backward"), ValueError, "values has no tile of backward"),
    (lambda: show.tiles(tiled(), phase="up"), ValueError, "phase is 'up': expected 'forward' or 'backward'"),
    (lambda: show.tiles([tiled()[0] * 2]), ValueError, "has the tile of query 0, key 0 twice: count the forward"),
    (lambda: show.tiles([[(0, 0, 8, 8)], [(0, 8, 8, 8)]]), ValueError, "has query 0 on ranks 0 and 1"),
    (lambda: show.tiles([[(0, 0, 8, 8), (4, 0, 8, 8)]]), ValueError, "tiles of rows 0–7 and 4–11: expected one grid"),
    (lambda: show.tiles([[(0, 0, 8, 8, 0)], [(8, 0, 8, 8)]]), ValueError, "tiles with a step and tiles without"),
    (lambda: show.tiles(tiled(17)), ValueError, "17 tiles along a side: expected at most 16; use a larger tile"),
    (lambda: show.tiles(ring("zigzag", 9)), ValueError, "values has 9 ranks: expected at most 8"),
    (lambda: show.tiles({"a": tiled(), "b": tiled(8)}), ValueError, "'b' has 128×128 scores on 1 ranks, 'a' 64×64"),
    (lambda: show.tiles(tiled(), title=3), TypeError, "title is 3"),
    (lambda: show.tiles(tiled(), source="guessed"), ValueError, "source is 'guessed'"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
