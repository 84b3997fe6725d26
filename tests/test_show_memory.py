"""`show.memory`, `memory_settings`, `memory_timeline`: lengths, lines, words, and what they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import show
from labkit.show import guesses
from labkit.show.figure import NARROW, WIDE, style
from labkit.show.player import payload

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import show_boxes as boxes

FIGURES = Path(__file__).parent / "figures"
GB = 1e9
#: A parameter costs 2 + 2 + 4 + 8 bytes (ZeRO, section 3.1): 7B are 14, 14, 28, 56 GB.
SEVEN = {"parameters": 14 * GB, "gradients": 14 * GB, "master": 28 * GB, "optimizer": 56 * GB}
#: The same on four ranks at stage 1: the optimizer is a quarter.
STAGE_1 = {**SEVEN, "master": 7 * GB, "optimizer": 14 * GB}
SMALL = {"parameters": 204_800, "gradients": 204_800, "optimizer": 409_600, "steps": 48, "activations": 300_000,
         "buffers": 4096, "other": 512}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_guesses(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setattr(guesses, "_units", {})


def segments(figure, width=WIDE, frame=None) -> dict[str, list[tuple[float, float]]]:
    """Letter → (left end, width) of its rectangle in each row; the key's are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for node in boxes.tree(figure.draw(width, frame)).iter("rect"):
        look = re.fullmatch(r"lk-m(\w)", node.get("class", ""))
        if look and float(node.get("height")) > 20:
            found.setdefault(look.group(1), []).append((float(node.get("x")), float(node.get("width"))))
    return found


def paths(figure, cls: str, width=WIDE, frame=None) -> list[str]:
    tree = boxes.tree(figure.draw(width, frame))
    return [n.get("d") for n in tree.iter("path") if cls in n.get("class", "").split()]


def upright(figure, cls: str, width=WIDE, frame=None) -> list[float]:
    return [float(re.match(r"M(-?[\d.]+)", d).group(1)) for d in paths(figure, cls, width, frame)]


def rects(figure, cls: str, width=WIDE, frame=None) -> list[tuple[float, float]]:
    tree = boxes.tree(figure.draw(width, frame))
    found = [n for n in tree.iter("rect") if cls in n.get("class", "").split()]
    return [(float(n.get("x")), float(n.get("width"))) for n in found]


def words(figure, width=WIDE, frame=None) -> list[str]:
    return [w.replace("\xa0", " ") for _, w, _ in boxes.texts(figure.draw(width, frame))]


# Lengths


@given(st.lists(st.integers(0, 10**12), min_size=8, max_size=8), st.integers(1, 3))
def test_parts_lie_side_by_side_and_are_as_long_as_their_bytes(numbers, rows):
    categories = ("parameters", "gradients", "master", "optimizer", "steps", "activations", "buffers", "other")
    held = dict(zip(categories, numbers, strict=True))
    want = {"P": held["parameters"], "G": held["gradients"], "O": sum(numbers[2:5]), "A": held["activations"],
            "b": held["buffers"], "x": held["other"]}  # fmt: skip
    figure = show.memory({f"rank {r}": held for r in range(rows)}, axis_to=8 * 10**12)
    for width in (WIDE, NARROW):
        found = segments(figure, width)
        left = min((x for places in found.values() for x, _ in places), default=0)
        for letter, n in want.items():
            assert len(found.get(letter, [])) == (rows if n else 0)
        longest, start = max(want, key=want.__getitem__), 0  # its scale is the least spoilt by rounding to 0.1
        scale = found[longest][0][1] / want[longest] if want[longest] else 0
        for letter, n in want.items():
            if n > 10**11:
                x, length = found[letter][0]
                assert length == pytest.approx(n * scale, abs=0.15)
                assert x == pytest.approx(left + start * scale, abs=0.6)
            start += n


def test_the_worked_example():
    figure = show.memory({"plain": SEVEN}, capacity=80 * GB, where="computed")
    assert figure.title == "112 of 80 GB: does not fit; the optimizer is 84"
    assert figure.origin == "computed"
    found = segments(figure)
    (p,), (g,), (o,) = found["P"], found["G"], found["O"]
    assert g[0] == pytest.approx(p[0] + p[1], abs=0.2)
    assert o[1] == pytest.approx(6 * p[1], abs=0.4)
    (card,) = set(upright(figure, "lk-cap"))
    assert (card - p[0]) / (o[0] + o[1] - p[0]) == pytest.approx(80 / 112, abs=0.002)
    ((x, beyond),) = rects(figure, "lk-beyond")
    assert x == pytest.approx(card, abs=0.2)
    assert x + beyond == pytest.approx(o[0] + o[1], abs=0.2)
    assert {"P 14 GB", "G 14", "O 84 GB", "112 GB", "32 too much", "capacity 80 GB"} <= set(words(figure))
    assert len(rects(figure, "lk-sub")) == 2, "the master copy and the moments are outlined inside O"


def test_what_fits_is_not_hatched_and_the_line_stays_in_sight():
    figure = show.memory({"a": {"parameters": 20 * GB}}, capacity=80 * GB)
    assert figure.title == "20 of 80 GB: fits; most is parameters, 20"
    assert paths(figure, "lk-burst") == []
    assert len(paths(figure, "lk-zone")) == 1
    assert "60 free" in words(figure)
    ((left, _),) = segments(figure)["P"]
    (card,) = set(upright(figure, "lk-cap"))
    assert card < WIDE - 60
    assert (card - left) / segments(figure)["P"][0][1] == pytest.approx(4, abs=0.01)
    exact = show.memory({"a": {"parameters": 80 * GB}}, capacity=80 * GB)
    assert exact.title.startswith("80 of 80 GB: fits")
    assert rects(exact, "lk-beyond") == []
    assert "0 free" in words(exact)


# One axis


def test_a_locked_axis_makes_pictures_comparable():
    def length(held):
        return segments(show.memory({"a": held}, axis_to=120 * GB))["P"][0][1]

    assert length({"parameters": 100 * GB}) == pytest.approx(10 * length({"parameters": 10 * GB}), rel=0.03)


def test_a_bar_beyond_the_axis_is_torn_off_and_says_so():
    figure = show.memory({"70B": {k: 10 * n for k, n in SEVEN.items()}}, capacity=80 * GB, axis_to=130 * GB)
    assert "1,120 GB →" in words(figure)
    assert len(paths(figure, "lk-torn")) == 1
    for width in (WIDE, NARROW):
        assert boxes.outside(figure.draw(width, None)) == []
    beyond = show.memory({"a": {"parameters": GB}}, capacity=80 * GB, axis_to=2 * GB)
    assert "capacity 80 GB →" in words(beyond)


@pytest.mark.parametrize(("largest", "told"), [
    (112e9, "112 GB"), (1.88e9, "1.88 GB"), (1e9, "1 GB"), (999e6, "999 MB"), (1.2e6, "1,200 KB"), (9_000, "9,000 B"),
    (96, "96 B"), (2_800e9, "2,800 GB"), (31.4e9, "31.4 GB"),
])  # fmt: skip
def test_one_unit_a_power_of_1000(largest, told):
    figure = show.memory({"a": {"parameters": largest}, "b": {"parameters": largest / 1000}})
    assert told in words(figure)
    units = {m.group(1) for w in words(figure) for m in [re.search(r"\d ([KMGT]?i?B)", w)] if m}
    assert units == {told.split()[-1]}, "one unit in the whole picture"


# Ghost, prediction, guess


def test_the_ghost_is_the_outline_of_what_was():
    figure = show.memory({"ZeRO-1": STAGE_1}, ghost={"plain": SEVEN}, capacity=80 * GB)
    found = segments(figure)
    left = found["P"][0][0]
    ((x, length),) = rects(figure, "lk-ghost")
    assert x == left
    assert length / (sum(places[0][1] for places in found.values())) == pytest.approx(112 / 49, abs=0.01)
    assert "before 112 GB" in words(figure)
    assert str(figure).endswith("O master copy 7 GB · O moments 14 GB · in all 49 GB · before 112 GB")
    assert rects(show.memory({"a": SEVEN}), "lk-ghost") == []


def test_ticks_stand_where_parts_were_to_end():
    exact = show.memory({"rank 0": SMALL}, predicted={"rank 0": SMALL})
    ends = [x + n for places in segments(exact).values() for x, n in places if n > 2]
    ticks = upright(exact, "lk-predicted")
    assert len(ticks) == 6
    for end in ends:
        assert min(abs(end - tick) for tick in ticks) < 0.2
    assert any("Δ 0 B" in w for w in words(exact))
    half = show.memory({"rank 0": SMALL}, predicted={"rank 0": {**SMALL, "gradients": 102_400}})
    ((x, n),) = segments(half)["G"]
    assert any(abs(tick - (x + n / 2)) < 0.2 for tick in upright(half, "lk-predicted"))
    assert any("gradients Δ +102,400 B" in w for w in words(half))


def test_differences_that_cancel_inside_the_optimizer_show():
    off = {**SMALL, "optimizer": SMALL["optimizer"] + 4, "steps": SMALL["steps"] - 4}
    figure = show.memory({"rank 0": SMALL}, predicted={"rank 0": off})
    assert any("moments Δ −4 B · step counters Δ +4 B" in w for w in words(figure))
    assert "Δ 0 B" not in [part for w in words(figure) for part in w.split(" · ")]


def test_one_prediction_may_stand_for_all_rows():
    rows = {f"rank {r}": SMALL for r in range(3)}
    figure = show.memory(rows, predicted={"each": SMALL})
    assert sum("Δ 0 B" in w for w in words(figure)) == 3
    assert len(figure.twin.rows) == 3 * 8
    assert {row[5] for row in figure.twin.rows} == {"Δ 0 B"}


def test_the_guess_is_a_dashed_line_in_its_own_unit():
    show.predict("mine", "How much?", unit="GB").note("56")
    figure = show.memory({"plain": SEVEN}, guess="mine")
    found = segments(figure)
    left, end = found["P"][0][0], sum(found["O"][0])
    (x,) = upright(figure, "lk-guess")
    assert (x - left) / (end - left) == pytest.approx(0.5, abs=0.002)
    assert "your guess 56 GB" in words(figure)
    show.predict("words", "How much?", choices=["56 GB", "84 GB"]).note("84 GB")
    assert "Your guess: 84 GB." in show.memory({"plain": SEVEN}, guess="words").notes
    assert upright(show.memory({"plain": SEVEN}, guess="never asked"), "lk-guess") == []


# Titles


def test_titles():
    def title(rows, **more):
        return show.memory(rows, **more).title

    assert title({"a": SEVEN}) == "112 GB; the optimizer is 84"
    assert title({"a": SEVEN, "b": STAGE_1}) == "a holds 112 GB; the optimizer is 84"
    some = title({"a": SEVEN, "b": STAGE_1}, capacity=80 * GB)
    assert some == "a holds 112 of 80 GB: does not fit; the optimizer is 84; 1 of 2 rows fit"
    none = title({"a": SEVEN, "b": STAGE_1}, capacity=40 * GB)
    assert none == "a holds 112 of 40 GB: does not fit; the optimizer is 84"
    assert title({"r0": SEVEN, "r1": SEVEN}, capacity=200 * GB) == "112 of 200 GB: fits; the optimizer is 84"
    assert title({"a": {"activations": 9, "parameters": 1}}) == "10 B; most is activations, 9"
    assert title({"a": {}}) == "Nothing is held"
    assert title({"a": SEVEN}, title="So") == "So"


# Settings


def settings(**more):
    plain, one = {"a rank": SEVEN}, {"a rank": STAGE_1}
    return show.memory_settings({"plain": plain, "ZeRO-1": one}, capacity=80 * GB, where="computed", **more)


def test_settings_step_on_one_axis_with_the_one_before_as_ghost():
    figure = settings()
    assert figure.title == "ZeRO-1 is the first of 2 settings to fit in 80 GB: it holds 49 GB"
    assert list(figure.says) == ["plain: 112 of 80 GB: does not fit; the optimizer is 84",
                                 "ZeRO-1: 49 of 80 GB: fits; the optimizer is 21"]  # fmt: skip
    for width in (WIDE, NARROW):
        first, second = (segments(figure, width, k) for k in (0, 1))
        assert first["P"] == second["P"], "the axis is the same in all frames"
        assert figure.draw(width, 0).height == figure.draw(width, 1).height
        assert rects(figure, "lk-ghost", width, 0) == []
        ((_, ghost),) = rects(figure, "lk-ghost", width, 1)
        assert ghost == pytest.approx(sum(places[0][1] for places in first.values()), abs=0.3)
    assert figure.draw(WIDE, None) == figure.draw(WIDE, 1), "without a kernel the last setting is shown"
    assert {"plain", "ZeRO-1", "ZeRO-1 (2 of 2)"} <= set(words(figure, WIDE, 1))
    data = payload(figure)
    assert len(data["wide"]["frames"]) == 2
    assert "simulated" not in figure.to_html()
    assert '<span class="lk-pill">computed</span>' in figure.to_html()


def test_the_ghost_is_the_setting_just_before():
    sizes = {"a": 90, "b": 60, "c": 30}
    rows = {name: {"r": {"parameters": n * GB}} for name, n in sizes.items()}
    figure = show.memory_settings(rows, capacity=70 * GB)
    assert figure.title == "b is the first of 3 settings to fit in 70 GB: it holds 60 GB"
    ((_, ghost),), ((_, now),) = rects(figure, "lk-ghost", WIDE, 2), segments(figure, WIDE, 2)["P"]
    assert ghost == pytest.approx(2 * now, abs=0.2)


@pytest.mark.parametrize(("capacity", "title"), [
    (40 * GB, "None of 2 settings fits in 40 GB; the smallest holds 49 GB"),
    (200 * GB, "All 2 settings fit in 200 GB; the largest holds 112 GB"),
    (None, "ZeRO-1 holds the least, 49 GB; the most is 112 GB"),
])  # fmt: skip
def test_titles_of_settings(capacity, title):
    rows = {"plain": {"a rank": SEVEN}, "ZeRO-1": {"a rank": STAGE_1}}
    assert show.memory_settings(rows, capacity=capacity).title == title


# The time line


def step():
    """Two layers: activations rise by 10 each, then gradients of 4 take their place, then the optimizer comes."""
    held = [(8, 0, 0, 0), (8, 0, 0, 10), (8, 0, 0, 20), (8, 4, 0, 20), (8, 4, 0, 10), (8, 8, 0, 10), (8, 8, 0, 0),
            (8, 8, 16, 0)]  # fmt: skip
    phases = ["forward"] * 3 + ["backward"] * 4 + ["step"]
    names = ("parameters", "gradients", "optimizer", "activations")
    return [(0, phase, dict(zip(names, row, strict=True))) for phase, row in zip(phases, held, strict=True)]


def columns(figure, letter: str) -> list[float]:
    """Heights of the upper edge of a part, left to right, one a level."""
    (d,) = paths(figure, f"lk-m{letter}")[:1]
    forward = d.split("z")[0]
    return [y for _, y in boxes.points(forward)]


def test_the_stack_is_as_high_as_what_is_held():
    figure = show.memory_timeline(step())
    assert figure.title == "The peak is in backward: 32 B; most is activations, 20"
    floor = max(columns(figure, "P"))
    high = {letter: floor - min(columns(figure, letter)) for letter in "PGOA"}
    assert high["P"] / high["A"] == pytest.approx(8 / 32, abs=0.01)
    assert high["O"] / high["A"] == pytest.approx(32 / 32, abs=0.01)
    assert high["G"] / high["A"] == pytest.approx(16 / 32, abs=0.01)
    assert {"forward", "backward", "peak 32 B, backward", "order of events →"} <= set(words(figure))
    tree = boxes.tree(figure.draw(WIDE, None))
    ((x, y),) = [(float(c.get("cx")), float(c.get("cy"))) for c in tree.iter("circle")]
    assert floor - y == pytest.approx(high["A"], abs=0.2)
    left, right = min(x for x, _ in boxes.points(paths(figure, "lk-mP")[0])), WIDE - 8
    assert (x - left) / (right - left) == pytest.approx(3.5 / 8, abs=0.005), "in the fourth of eight columns"


def test_equal_neighbours_are_one_point_and_none_is_a_phase():
    twice = [sample for sample in step() for _ in range(3)]
    assert show.memory_timeline(twice).twin.rows == show.memory_timeline(step()).twin.rows
    figure = show.memory_timeline([(0, None, {"parameters": 8}), (0, "forward", {"parameters": 4})])
    assert figure.title == "The peak is in no phase: 8 B; most is parameters, 8"
    assert "peak 8 B, layers.1" in words(show.memory_timeline([(0, None, {"parameters": 8})], at="layers.1"))


def test_steps_are_named_when_there_are_several():
    both = [*step(), *((1, phase, held) for _, phase, held in step())]
    assert {"step 0", "step 1"} <= set(words(show.memory_timeline(both)))
    assert "step 0" not in words(show.memory_timeline(step()))


def test_a_long_line_keeps_its_peak():
    samples = [(0, "forward", {"activations": n % 7}) for n in range(1500)]
    samples[778] = (0, "forward", {"activations": 100})
    figure = show.memory_timeline(samples)
    assert "peak 100 B, forward" in words(figure)
    assert any(note.startswith("Drawn are ") for note in figure.notes)
    assert len(figure.twin.rows) > 1000
    assert len(figure.to_html()) < 400_000


def test_the_line_of_the_card():
    figure = show.memory_timeline(step(), capacity=20)
    assert figure.title == "The peak is in backward: 32 of 20 B, does not fit; most is activations, 20"
    assert "capacity 20 B" in words(figure)
    assert "fits" in show.memory_timeline(step(), capacity=40).title


# The picture as a whole

LONG = "a very long label that no row has room for, N = 1000"
PICTURES = {
    "seven": lambda: show.memory({"plain": SEVEN}, capacity=80 * GB, where="computed"),
    "stages": lambda: show.memory({"plain": {**SEVEN, "activations": 6 * GB, "buffers": 2 * GB, "other": GB},
                                   "ZeRO-1": STAGE_1}, capacity=80 * GB, axis_to=130 * GB),
    "ghost": lambda: show.memory({"ZeRO-1": STAGE_1}, ghost={"plain": SEVEN}, capacity=80 * GB),
    "ranks": lambda: show.memory({f"rank {r}": SMALL for r in range(8)}, predicted={"each": {**SMALL, "steps": 4}}),
    "torn": lambda: show.memory({"70B": {k: 10 * n for k, n in SEVEN.items()}}, capacity=80 * GB, axis_to=130 * GB),
    "long": lambda: show.memory({LONG: SMALL, "b": {}}, capacity=1e6),
    "nothing": lambda: show.memory({"a": {}}),
    "settings": settings,
    "line": lambda: show.memory_timeline(step(), capacity=30),
    "two_steps": lambda: show.memory_timeline([*step(), *((1, p, {**h, "buffers": 5}) for _, p, h in step())]),
    "one_point": lambda: show.memory_timeline([(0, None, {"parameters": 8})]),
    "zero": lambda: show.memory_timeline([(0, "forward", {})]),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    figure = PICTURES[name]()
    for width in (WIDE, NARROW):
        for frame in range(max(1, len(figure.says))):
            drawing = figure.draw(width, frame)
            assert drawing.width <= width
            assert boxes.outside(drawing) == []
            assert boxes.overlapping(drawing) == []


@pytest.mark.parametrize("name", ["ghost", "line"])
def test_a_picture_is_the_one_on_file(name):
    html = PICTURES[name]().to_html().replace(style("bars", "memory"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"memory_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


@pytest.mark.parametrize("name", PICTURES)
def test_every_fill_has_its_letter_or_is_listed(name):
    """A letter is in its part, or with its number below the bar; the key has every letter."""
    figure = PICTURES[name]()
    for width in (WIDE, NARROW):
        told = words(figure, width)
        for letter in segments(figure, width):
            assert sum(letter in re.split(r"[ ·]+", w) for w in told) >= 2, (width, letter)


def test_the_twin_is_what_is_drawn():
    table = show.memory({"a": SEVEN}, predicted={"a": {**SEVEN, "optimizer": 56 * GB - 8}}).twin
    assert table.rows[-1] == ("", "a", "in all", "112 GB", "112 GB", "Δ +8 B", "")
    assert [row[2] for row in table.rows] == ["P parameters", "G gradients", "O master copy", "O moments", "in all"]
    assert "<th" in table.to_html()


def test_fills_have_outlines_and_system_colours():
    css = Path(show.__file__).with_name("memory.css").read_text(encoding="utf-8")
    assert ".lk .lk-part rect, .lk .lk-part path { stroke: var(--lk-ink)" in css
    colours = dict(re.findall(r"--lk-([PGOA]): (#\w+)", css))
    assert colours == {"P": "#56b4e9", "G": "#d55e00", "O": "#009e73", "A": "#cc79a7"}, "Okabe and Ito's"
    forced = css.split("forced-colors: active")[1]
    assert all(f"--lk-{letter}: Canvas" in forced for letter in "PGOAb")
    rules = re.sub(r"/\*.*?\*/|@media[^{]*{|}\s*}", "", css, flags=re.S)
    for selector in re.findall(r"([^{}]+){", rules):
        assert all(one.strip().startswith(".lk") for one in selector.split(",")), selector


@pytest.mark.soak
def test_pictures_are_the_same_in_every_run():
    code = "import test_show_memory as t; print([(n, f().to_html()) for n, f in t.PICTURES.items()])"
    seen = set()
    for seed in ("1", "2"):
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
        seen.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
    assert len(seen) == 1


def test_labels_are_escaped():
    html = show.memory({"<b>a</b>": SEVEN}).to_html()
    assert "<b>" not in html
    assert not re.search(r'\sid="', html)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: show.memory([1]), TypeError, r"rows is \[1\]: expected label → bytes by category"),
    (lambda: show.memory({}), ValueError, "rows is empty"),
    (lambda: show.memory({"a": 3}), TypeError, "rows has 3 for 'a': expected category → bytes"),
    (lambda: show.memory({"a": {"weights": 3}}), ValueError, "rows has 'weights' for 'a': expected one of parameters"),
    (lambda: show.memory({"a": {"other": "3"}}), TypeError, "rows has '3' as other of 'a': expected a number of bytes"),
    (lambda: show.memory({"a": {"other": True}}), TypeError, "rows has True as other"),
    (lambda: show.memory({"a": {"other": -1}}), ValueError, "rows has -1 as other of 'a': expected a finite number"),
    (lambda: show.memory({"a": {"other": inf}}), ValueError, "rows has inf"),
    (lambda: show.memory({"a": {}}, capacity="80"), TypeError, "capacity is '80': expected a number of bytes"),
    (lambda: show.memory({"a": {}}, capacity=0), ValueError, "capacity is 0: expected a finite number of bytes above"),
    (lambda: show.memory({"a": {}}, axis_to=-1), ValueError, "axis_to is -1"),
    (lambda: show.memory({"a": {}}, where="guessed"), ValueError, "where is 'guessed': expected one of measured, comp"),
    (lambda: show.memory({"a": {}}, predicted={"b": {}, "c": {}}), ValueError, "predicted has 'b', but the rows are a"),
    (lambda: show.memory({"a": {}}, ghost=3), TypeError, "ghost is 3"),
    (lambda: show.memory_settings({}), TypeError, "settings is {}: expected name → rows"),
    (lambda: show.memory_settings({"x": {"a": 1}}), TypeError, r"settings\['x'\] has 1 for 'a'"),
    (lambda: show.memory_timeline(3), TypeError, "samples is 3"),
    (lambda: show.memory_timeline([]), ValueError, "samples is empty"),
    (lambda: show.memory_timeline([(0, "forward")]), TypeError, r"samples\[0\] is \(0, 'forward'\)"),
    (lambda: show.memory_timeline(step(), axis_to=4), ValueError, "axis_to is 4, but the peak is 32"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_meter_can_be_drawn():
    """What `MemoryMeter` gives is what the pictures take."""
    torch = pytest.importorskip("torch")
    from labkit.memory import MemoryMeter

    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.ReLU())
    meter = MemoryMeter(model)
    with meter:
        with meter.phase("forward"):
            loss = model(torch.ones(4, 8)).sum()
        with meter.phase("backward"):
            loss.backward()
    figure = show.memory({"rank 0": meter.held()}, predicted={"rank 0": {"parameters": 512, "gradients": 512}})
    assert any("Δ 0 B" in w for w in words(figure))
    line = show.memory_timeline(meter.samples)
    assert f"{sum(meter.peak.values()):,} B" in line.title
