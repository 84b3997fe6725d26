"""`show.compare`, `show.volume`, `show.bandwidth`: lengths, lines, words, and what they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from math import nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import show
from labkit.show import guesses
from labkit.show.figure import NARROW, WIDE, style
from labkit.show.quantity import marks, told
from labkit.show.series import crossing, series_of
from labkit.trace import Event, Trace

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import show_boxes as boxes

FIGURES = Path(__file__).parent / "figures"
MIB = 2**20


@pytest.fixture(autouse=True)
def _no_guesses(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setattr(guesses, "_units", {})


def bars(figure, width=WIDE) -> list[list[tuple[float, float]]]:
    """(left end, length) of the rectangles of every bar: one, or two where it exceeds the ceiling."""
    tree = boxes.tree(figure.draw(width, None))
    groups = [g for g in tree.iter("g") if "lk-bar" in g.get("class", "")]
    return [[(float(r.get("x")), float(r.get("width"))) for r in g.iter("rect")] for g in groups]


def lines(figure, cls: str, width=WIDE) -> list[float]:
    """Where the upright lines of a class stand."""
    found = [n for n in boxes.tree(figure.draw(width, None)).iter("path") if cls in n.get("class", "").split()]
    return [float(re.match(r"M(-?[\d.]+)", n.get("d")).group(1)) for n in found]


def words(figure, width=WIDE) -> list[str]:
    return [w.replace("\xa0", " ") for _, w, _ in boxes.texts(figure.draw(width, None))]


def volumes() -> dict[str, list[int]]:
    """All-reduce of 8 MiB: what each rank sends."""
    d = 8 * MIB
    rings = {f"ring, N = {p}": [2 * d - 2 * d // p] * p for p in (2, 4, 8)}
    return {**rings, "tree, N = 4": [2 * d, d, 2 * d, d], "central, N = 8": [7 * d] + [d] * 7}


# compare


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=6))
def test_bars_are_as_long_as_their_numbers(values):
    measured = {f"row {n}": v for n, v in enumerate(values)}
    figure = show.compare(measured, measured)
    for width in (WIDE, NARROW):
        drawn = bars(figure, width)
        longest = max(length for (_, length), *_ in drawn)
        for value, ((left, length),) in zip(values, drawn, strict=True):
            assert length == pytest.approx(max(1, longest * value / (max(values) or 1)), abs=0.2)
            assert left + length <= width


def test_the_tick_stands_where_the_prediction_is():
    figure = show.compare({"ring": 6, "tree": 12}, {"ring": 12, "tree": 12})
    ((left, length),) = bars(figure)[0]
    short, exact = lines(figure, "lk-predicted")
    assert short == pytest.approx(left + length / 2, abs=0.2)
    assert exact == pytest.approx(left + length, abs=0.2)


def test_the_two_may_be_something_else_than_predicted_and_measured():
    figure = show.compare({"a": 4}, {"a": 5}, unit="%", names=("with f", "without f"), title="f matters")
    assert figure.notes[0] == "Bar: without f. Tick: with f."
    assert figure.twin.columns == ("what", "rank", "without f", "with f", "Δ")
    assert "  a · without f 5 % · with f 4 % · Δ +1 % (+25 %)" in str(figure)


def test_where_words_stand_above_their_bars_no_line_runs_through_them():
    both = {"step 1": 1, "step 10": 2, "one step more": 4}, {"step 1": 1.5, "step 10": 2, "one step more": 5}
    figure = show.compare(*both, unit="%", ceiling=("one node", 0.2))
    drawing = figure.draw(NARROW, None)
    found = [n.get("d") for n in boxes.tree(drawing).iter("path") if n.get("class") in (None, "lk-line lk-ceiling")]
    pieces = [tuple(map(float, piece)) for d in found for piece in re.findall(r"M([-\d.]+) ([-\d.]+)V([-\d.]+)", d)]
    assert len(pieces) >= 3 * 3
    rows = [box for box, said, _ in boxes.texts(drawing) if "%" in said and "·" in said]
    assert len(rows) == 3
    for x, top, bottom in pieces:
        assert not any(left < x < right and top < low and bottom > high for left, high, right, low in rows)


def test_the_difference_is_written():
    figure = show.compare({"a": 12 * MIB, "b": 12 * MIB, "c": 0}, {"a": 12 * MIB, "b": 13 * MIB, "c": 5})
    assert {"12 MiB · exactly", "13 MiB · Δ +1 MiB (+8.3 %)", "5 B · Δ +5 B"} <= set(words(figure))
    assert "  b · measured 13 MiB · predicted 12 MiB · Δ +1 MiB (+8.3 %)" in str(figure)
    times = show.compare({"a": 0.06}, {"a": 0.0585}, unit="s")
    assert "58.5 ms · Δ −1.5 ms (−2.5 %)" in words(times)


def test_the_title_says_whether_all_is_as_predicted():
    assert show.compare({"a": 1}, {"a": 1}).title == "Measured exactly what was predicted"
    off = show.compare({"a": 1, "b": [8, 8]}, {"a": 1, "b": [8, 10]})
    assert off.title == "Furthest from its prediction: rank 1 of b, 10 B where 8 B was predicted"
    from_nothing = show.compare({"a": 1, "b": 0}, {"a": 1, "b": 5})
    assert from_nothing.title == "Furthest from its prediction: b, 5 B where 0 B was predicted"


@pytest.mark.parametrize(("measured", "percent"), [
    ({"a": 100, "b": 101}, 1), ({"a": 100.01, "b": 100}, 1), ({"a": 98.9, "b": 101}, 2), ({"a": 100, "b": 107}, 7),
    ({"a": [100, 110], "b": 95}, 10), ({"a": [90, 90], "b": 100}, 10), ({"a": 100, "b": 110.5}, None),
    ({"a": 89, "b": 100}, None),
])  # fmt: skip
def test_the_title_says_how_near_all_are(measured, percent):
    """The furthest, in percent rounded up; beyond 10 % it is named."""
    title = show.compare({"a": 100, "b": 100}, measured).title
    if percent is None:
        assert title.startswith("Furthest from its prediction: ")
    else:
        assert title == f"Measured within {percent} % of what was predicted"


def test_a_list_has_a_bar_a_rank_and_one_prediction_may_stand_for_all():
    figure = show.compare({"ring": 12}, {"ring": [12, 12, 12, 12]})
    assert len(bars(figure)) == 4
    assert len(lines(figure, "lk-predicted")) == 4
    assert [row[1] for row in figure.twin.rows] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert figure.title == "Measured exactly what was predicted"


def test_the_axis_holds_everything_and_can_be_locked():
    for figure in (show.compare({"a": 30}, {"a": 10}), show.compare({"a": 10}, {"a": 10}, ceiling=("2D", 30))):
        (far,) = lines(figure, "lk-line") or lines(figure, "lk-predicted")
        ((left, length),) = bars(figure)[0]
        assert length == pytest.approx((far - left) / 3, abs=0.2)
        assert boxes.outside(figure.draw(WIDE, None)) == []
    small, large = (bars(show.compare({"a": n}, {"a": n}, axis_max=40))[0][0][1] for n in (10, 40))
    assert large == pytest.approx(4 * small, abs=3)  # their words differ in width by little
    with pytest.raises(ValueError, match="axis_max is 5, but there is 10 to show"):
        show.compare({"a": 1}, {"a": 10}, axis_max=5)


def test_the_guess_is_a_dashed_line_in_its_own_unit():
    show.predict("mine", "How many?", unit="MiB").note("6")
    figure = show.compare({"a": 12 * MIB}, {"a": 12 * MIB}, guess="mine")
    ((left, length),) = bars(figure)[0]
    assert lines(figure, "lk-guess") == [pytest.approx(left + length / 2, abs=0.2)]
    assert "your guess 6 MiB" in words(figure)
    assert lines(show.compare({"a": 1}, {"a": 1}, guess="never asked"), "lk-guess") == []
    show.predict("time", "How long?", unit="ms").note("30")
    assert "your guess 30 ms" in words(show.compare({"a": 0.06}, {"a": 0.06}, unit="s", guess="time"))
    with pytest.raises(ValueError, match="'time' was asked for in ms, which cannot be drawn in B"):
        show.compare({"a": 1}, {"a": 1}, guess="time")


def test_a_guess_far_off_does_not_squeeze_the_bars():
    show.predict("wild", "How many?", unit="B").note("1000000")
    figure = show.compare({"a": 10}, {"a": 10}, guess="wild")
    assert "your guess 976.6 KiB, beyond →" in words(figure)
    ((left, length),) = bars(figure)[0]
    assert lines(figure, "lk-guess") == [pytest.approx(left + length, abs=0.2)]


def test_each_label_may_have_its_own_guess():
    show.predict("a", "?", unit="B").note("5")
    figure = show.compare({"a": 10, "b": 10}, {"a": 10, "b": 10}, guess={"a": "a", "b": "never asked"})
    assert len(lines(figure, "lk-guess")) == 1
    assert "Dotted: your guess, a 5 B." in figure.notes
    show.predict("who", "?", choices=["ring", "tree"]).note("ring")
    assert "Your guess: ring." in show.compare({"a": 1}, {"a": 1}, guess="who").notes


# volume


def test_what_exceeds_the_ceiling_is_marked():
    figure = show.volume(volumes(), ceiling=("2D", 16 * MIB))
    assert figure.title == "Rank 0 of central, N = 8 sends 56 MiB, 3.5 × 2D; no other rank exceeds it"
    over = [pieces for pieces in bars(figure) if len(pieces) == 2]
    assert len(over) == 1
    (left, within), (start, beyond) = over[0]
    assert start == pytest.approx(left + within, abs=0.2)
    assert (within + beyond) / within == pytest.approx(3.5, abs=0.02)
    assert lines(figure, "lk-ceiling") == [pytest.approx(start, abs=0.2)]
    assert {"each 14 MiB", "2 of 4 ranks 16 MiB", "rank 0 56 MiB", "2D = 16 MiB"} <= set(words(figure))
    assert len(bars(figure)) == 2 + 4 + 8 + 4 + 8


def test_titles_of_volumes():
    rings = {k: v for k, v in volumes().items() if "ring" in k}
    assert show.volume(rings, ceiling=("2D", 16 * MIB)).title == "No rank sends more than 2D"
    assert show.volume(volumes()).title == "Rank 0 of central, N = 8 sends most, 56 MiB"
    two = show.volume({"a": [5, 6, 1]}, ceiling=("2D", 4))
    assert two.title == "Rank 1 of a sends 6 B, 1.5 × 2D; 2 of 3 ranks exceed it"


def test_a_trace_is_counted():
    events = [
        Event("send", "send", 0, 0.0, 0.1, nbytes=8, peer=1),
        Event("send", "send", 0, 0.2, 0.3, nbytes=8, peer=1),
    ]
    figure = show.volume({"mine": Trace(events, 2, paced=True)})
    assert [row[2] for row in figure.twin.rows] == ["16 B", "0 B"]
    assert figure.source == "paced"
    native = Trace([Event("collective", "all_reduce", 0, 0.0, 0.1, nbytes=8)], 1)
    with pytest.raises(ValueError, match="'native' holds a native collective"):
        show.volume({"native": native})


LATE = "rank 2 late by 100 ms, ring"
LONG = "a very long label that no row has room for, N = 1000"
PICTURES = {
    "compare": lambda: show.compare(
        {"ring": 12 * MIB, "central": 24 * MIB}, {"ring": 12 * MIB, "central": 25 * MIB}, ceiling=("2D", 16 * MIB)
    ),
    "compare_ranks": lambda: show.compare(
        {"ring": 12, "central": [24, 8, 8, 8]}, {"ring": [12] * 4, "central": [24, 8, 9, 8]}
    ),
    "compare_time": lambda: show.compare({LATE: 0.112}, {LATE: 0.1124}, unit="s", source="paced"),
    "long_label": lambda: show.volume({LONG: [5, 6]}, ceiling=("2D", 5)),
    "volume": lambda: show.volume(volumes(), ceiling=("2D", 16 * MIB)),
    "zero": lambda: show.compare({"a": 0}, {"a": 0}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    for width in (WIDE, NARROW):
        drawing = PICTURES[name]().draw(width, None)
        assert drawing.width <= width
        assert boxes.outside(drawing) == []
        assert boxes.overlapping(drawing) == []


@pytest.mark.parametrize("name", ["compare", "volume"])
def test_a_picture_is_the_one_on_file(name):
    html = PICTURES[name]().to_html().replace(style("bars"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"bars_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: show.compare(3, {"a": 1}), TypeError, "predicted is 3: expected label → number"),
    (lambda: show.compare({}, {}), ValueError, "predicted is empty"),
    (lambda: show.compare({"a": 1}, {"b": 1}), ValueError, "measured has no 'a'"),
    (lambda: show.compare({"a": 1}, {"a": "1"}), TypeError, "'a' has '1': expected a number"),
    (lambda: show.compare({"a": 1}, {"a": True}), TypeError, "'a' has True"),
    (lambda: show.compare({"a": 1}, {"a": -1}), ValueError, "'a' has -1: expected a finite number"),
    (lambda: show.compare({"a": nan}, {"a": 1}), ValueError, "'a' has nan"),
    (lambda: show.compare({"a": [1, 2]}, {"a": [1, 2, 3]}), ValueError, "2 predicted and 3 measured"),
    (lambda: show.compare({"a": []}, {"a": []}), ValueError, "an empty list"),
    (lambda: show.compare({"a": 1}, {"a": 1}, ceiling=5), TypeError, "ceiling is 5: expected a name and a number"),
    (lambda: show.compare({"a": 1}, {"a": 1}, guess=5), TypeError, "guess is 5"),
    (lambda: show.compare({"a": 1}, {"a": 1}, guess={"b": "k"}), ValueError, "guess has 'b', but the labels are a"),
    (lambda: show.compare({"a": 1}, {"a": 1}, source="x"), ValueError, "source is 'x'"),
    (lambda: show.compare({"a": 1}, {"a": 1}, names="ab", title=""), TypeError, "names is 'ab': expected two names"),
    (lambda: show.compare({"a": 1}, {"a": 1}, names=("p", "m")), ValueError, "but there is no title"),
    (lambda: show.volume([1, 2]), TypeError, r"sent is \[1, 2\]"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Numbers


@given(st.floats(1e-9, 1e15), st.sampled_from(["B", "s", ""]), st.integers(2, 8))
def test_marks_are_round_few_and_inside(top, unit, most):
    found = marks(top, unit, most)
    assert found[0] == 0
    assert len(found) <= most + 1
    assert found[-1] <= top * (1 + 1e-6)
    if unit == "B" and top < 1:
        return  # less than a byte
    assert len(found) >= 2


def test_quantities():
    assert [told(x, "s") for x in (0, 2e-6, 0.0125, 1.5)] == ["0 s", "2 µs", "12.5 ms", "1.5 s"]
    assert told(16_756_243, "B") == "15.98 MiB"
    assert told(12.5, "B") == "12.5 B"
    assert told(1234567, "messages") == "1,234,567 messages"
    assert told(12, "") == "12"


# bandwidth: measured times are α + β·n exactly

RING, TREE = (14e-5, 1.75e-10), (6e-5, 6e-10)


def points(pair: tuple[float, float]) -> list[tuple[int, float]]:
    return [(2**k, pair[0] + pair[1] * 2**k) for k in range(10, 29, 2)]


def two():
    return show.bandwidth({"ring": points(RING), "tree": points(TREE)}, {"ring": RING, "tree": TREE},
                          operation="all_reduce", ranks=8, factor=1.75, source="paced")  # fmt: skip


def test_the_curves_are_bandwidth_against_size():
    axes = two().axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    measured = next(line for line in axes.lines if line.get_marker() == "o")
    sizes, rates = measured.get_xdata(), measured.get_ydata()
    assert list(sizes) == [n for n, _ in points(RING)]
    assert list(rates) == pytest.approx([1.75 * n / t for n, t in points(RING)])
    halves = [line for line in axes.lines if line.get_marker() == "|"]
    assert [line.get_xdata()[0] for line in halves] == pytest.approx([RING[0] / RING[1], TREE[0] / TREE[1]])
    peak = 1.75 / RING[1]
    assert halves[0].get_ydata()[0] == pytest.approx(peak / 2)


def test_the_title_names_the_size_where_the_winner_changes():
    turn = (RING[0] - TREE[0]) / (TREE[1] - RING[1])
    picture = two().picture
    assert picture.title == "tree is faster below 184 KiB, ring above"
    assert round(turn / 1024) == 184
    assert picture.source == "paced"
    alone = show.bandwidth({"ring": points(RING)}, operation="all_reduce", ranks=8)
    assert alone.picture.title == "ring reaches 5.7 GB/s"
    same = show.bandwidth({"a": points((1e-5, 1e-10)), "b": points((2e-5, 2e-10))}, operation="x", ranks=2)
    assert same.picture.title == "a is the fastest at every size"


def test_without_a_fit_the_winner_changes_between_two_sizes():
    a, b = series_of({"ring": points(RING), "tree": points(TREE)}, None, 1)
    small, large, size = crossing([a, b])
    assert (small.label, large.label) == ("tree", "ring")
    assert 2**16 < size < 2**18


def test_a_function_may_be_the_fit():
    figure = show.bandwidth({"ring": points(RING)}, {"ring": lambda n: 1e-3}, operation="all_reduce", ranks=8)
    fitted = next(line for line in figure.axes[0].lines if len(line.get_xdata()) == 81)
    assert list(fitted.get_ydata()) == pytest.approx([n / 1e-3 for n in fitted.get_xdata()])
    assert not [line for line in figure.axes[0].lines if line.get_marker() == "|"], "n½ belongs to α and β"


def test_the_notebook_shows_it_once_with_words_in_the_pages_colours():
    data = two()._repr_mimebundle_()
    assert set(data) == {"text/html", "text/plain"}
    html = data["text/html"]
    assert "var(--lk-ink)" in html
    assert "#767676" not in html
    assert "<style type" not in html, "matplotlib's own sheet would change the page"
    sizes = [float(n) for n in re.findall(r"font-size: ([\d.]+)px", html.split("</style>")[1])]
    assert len(sizes) > 20
    assert min(sizes) >= 12
    assert "ring · 4 KiB" in data["text/plain"]


def test_two_figures_lend_each_other_no_clip_paths():
    first = two().picture.to_html()
    other = show.bandwidth({"ring": points(TREE)}, operation="all_reduce", ranks=8).picture.to_html()
    ids = [set(re.findall(r' id="([^"]+)"', html)) for html in (first, other)]
    assert ids[0]
    assert ids[1]
    assert not ids[0] & ids[1]
    for html in (first, other):
        used = set(re.findall(r"url\(#([^)]+)\)", html)) | set(re.findall(r'xlink:href="#([^"]+)"', html))
        assert used <= set(re.findall(r' id="([^"]+)"', html))
    wide, narrow = (set(re.findall(r' id="([^"]+)"', "".join(two().picture.draw(w, None).parts))) for w in (720, 300))
    assert not wide & narrow


def test_drawing_leaves_matplotlib_as_it_was_and_is_the_same_in_every_run():
    code = """
import sys, matplotlib
before = matplotlib.rcParams.copy()
from labkit import show
points = [(2**k, 1e-5 + 1e-10 * 2**k) for k in range(10, 20)]
figure = show.bandwidth({"a": points}, {"a": (1e-5, 1e-10)}, operation="all_reduce", ranks=4)
html = figure._repr_mimebundle_()["text/html"]
assert dict.__eq__(matplotlib.rcParams.copy(), before)
assert "matplotlib.pyplot" not in sys.modules
print(html)
"""
    seen = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        seen.add(done.stdout)
    assert len(seen) == 1


def test_series_differ_in_more_than_colour():
    labels = "abcdef"
    figure = show.bandwidth({n: points((1e-5 * (k + 1), 1e-10)) for k, n in enumerate(labels)}, operation="x", ranks=2)
    looks = {(line.get_marker(), str(line.get_linestyle()), line.get_color()) for line in figure.axes[0].lines}
    assert len({marker for marker, _, _ in looks}) == len({color for _, _, color in looks}) == 6
    assert {t.get_text() for t in figure.axes[0].texts} >= set(labels)


def contrast(one: str, other: str) -> float:
    """WCAG 2.1's contrast ratio."""

    def light(color: str) -> float:
        parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    high, low = sorted((light(one), light(other)), reverse=True)
    return high / low


def test_a_saved_figure_reads_on_white_and_on_black():
    from labkit.show.curves import INK, LOOKS

    assert contrast(INK, "#ffffff") >= 4.5
    assert contrast(INK, "#111111") >= 4.1  # no grey reaches 4.5 on both
    for color, _, _ in LOOKS:
        assert contrast(color, "#111111") >= 3


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: show.bandwidth([1], operation="x", ranks=2), TypeError, r"measured is \[1\]"),
    (lambda: show.bandwidth({}, operation="x", ranks=2), ValueError, "measured is empty"),
    (lambda: show.bandwidth({"a": [1, 2]}, operation="x", ranks=2), TypeError, "'a' has .*pair for each size"),
    (lambda: show.bandwidth({"a": []}, operation="x", ranks=2), ValueError, "'a' has no points"),
    (lambda: show.bandwidth({"a": [(0, 1)]}, operation="x", ranks=2), ValueError, r"'a' has \(0.0, 1.0\)"),
    (lambda: show.bandwidth({"a": [(1, 1)]}, {"b": (1, 1)}, operation="x", ranks=2), ValueError, "fitted has 'b'"),
    (lambda: show.bandwidth({"a": [(1, 1)]}, {"a": 3}, operation="x", ranks=2), TypeError, "fitted by 3"),
    (lambda: show.bandwidth({"a": [(1, 1)]}, {"a": (-1, 1)}, operation="x", ranks=2), ValueError, "0 or more"),
    (lambda: show.bandwidth({"a": [(1, 1)]}, operation="x", ranks=2, factor=0), ValueError, "factor is 0"),
    (lambda: show.bandwidth({n: [(1, 1)] for n in "abcdefg"}, operation="x", ranks=2), ValueError, "7 series"),
])  # fmt: skip
def test_bad_series_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
