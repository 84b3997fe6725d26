"""`show.segments`, `floats`, `loss_scale`, `norm`: lengths, marks, words, and what they refuse."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import time
from itertools import pairwise
from math import inf, isinf, log2, nan, sqrt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import show
from labkit.show import guesses
from labkit.show.figure import NARROW, WIDE, style
from labkit.show.floatformats import FORMATS, Sizes
from labkit.show.player import payload, script

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import show_boxes as boxes

FIGURES = Path(__file__).parent / "figures"
FP32, BF16, FP16 = FORMATS
N = None


@pytest.fixture(autouse=True)
def _no_guesses(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setattr(guesses, "_units", {})


def held(layers: int, kept: float = 2, inside: float = 34) -> dict[int, float]:
    """c·A_in + ⌈L/c⌉·A_int, counted: every segment's input, and the layers of the longest segment."""
    numbers = {}
    for c in range(1, layers + 1):
        longest = max(layers * (k + 1) // c - layers * k // c for k in range(c))
        numbers[c] = sum(kept for _ in range(c)) + sum(inside for _ in range(longest))
    return numbers


def layers(n: int, **more):
    best = more.pop("best", min(n, sqrt(17 * n)))
    return show.segments(held(n), kept=2, inside=34, best=best, unit="sbh", **more)


def nodes(figure, tag: str, cls: str, width=WIDE, frame=None):
    tree = boxes.tree(figure.draw(width, frame))
    return [n for n in tree.iter(tag) if set(cls.split()) <= set(n.get("class", "").split())]


def words(figure, width=WIDE, frame=None) -> list[str]:
    return [w.replace("\xa0", " ") for _, w, _ in boxes.texts(figure.draw(width, frame))]


def heights(figure, cls: str, width=WIDE, frame=None) -> list[float]:
    """Of the rectangles of a class that are taller than the key's."""
    found = [float(n.get("height")) for n in nodes(figure, "rect", cls, width, frame)]
    return [h for h in found if h != 18 and h != 26]


# Segments


def test_the_worked_example_of_64_layers():
    figure = layers(64, limit=289, measured={8: 288, 64: 162})
    told = "Of 64 layers, 32 segments hold least: 132 sbh; √L = 8 segments hold 288 sbh, 2.2 times as much"
    assert figure.title == told
    assert figure.origin == "computed · measured"
    assert {"√L = 8: 288 sbh ✗", "√(17L) = 33 ✓ 134 sbh", "every layer: 162 sbh"} <= set(words(figure))
    assert "Every layer by itself holds less than √L segments below L = 289." in figure.notes
    assert any("2 values of c. Equal to the prediction to the last byte" in note for note in figure.notes)
    assert layers(64).origin == "computed"


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_two_parts_of_a_c_are_as_high_as_what_they_hold(width):
    figure, numbers = layers(64), held(64)
    scale = None
    for c in (6, 8, 16, 33, 63, 64):
        (r,), (k,) = (heights(figure, cls, width, c - 1) for cls in ("lk-mR", "lk-mK"))
        scale = scale or (k + r) / numbers[c]
        assert k == pytest.approx(2 * c * scale, abs=0.2)
        assert k + r == pytest.approx(numbers[c] * scale, abs=0.3), "one scale in all frames"


def test_what_is_beyond_the_axis_is_torn_and_says_so():
    figure = layers(64)
    assert "2,178 sbh ↑" in words(figure, WIDE, 0)
    assert "2,178 sbh ↑" in " ".join(words(figure, NARROW, 0))
    assert len(nodes(figure, "path", "lk-torn", WIDE, 0)) == 2, "the curve, and the bar beside it"
    assert len(nodes(figure, "path", "lk-torn", WIDE, 20)) == 1
    assert nodes(layers(64, axis_to=3000), "path", "lk-torn", WIDE, 0) == []


def test_the_curve_is_at_its_height_in_every_column():
    figure, numbers = layers(64), held(64)
    r, k = (nodes(figure, "path", f"lk-m{letter}")[0].get("d") for letter in "RK")
    top = list(boxes.points(r))
    floor = max(y for _, y in boxes.points(k))
    edges = sorted({x for x, _ in top})
    left, right = edges[0], edges[-1]
    scale = None
    for c in (8, 16, 32, 40, 63, 64):
        x = left + (c - 0.5) * (right - left) / 64
        pairs = pairwise(top)
        crossing = [y0 for (x0, y0), (x1, y1) in pairs if y0 == y1 and min(x0, x1) <= x <= max(x0, x1)]
        high = floor - min(crossing)
        scale = scale or high / numbers[c]
        assert high == pytest.approx(numbers[c] * scale, abs=0.4), c


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_marks_stand_at_their_c(width):
    figure = layers(64, measured={16: 168.0})
    at = {cls: float(re.match(r"M([\d.]+)", nodes(figure, "path", cls, width)[0].get("d")).group(1))
          for cls in ("lk-wrong", "lk-best")}  # fmt: skip
    column = (at["lk-best"] - at["lk-wrong"]) / (sqrt(17 * 64) - 8)
    left = min(x for x, _ in boxes.points(nodes(figure, "path", "lk-mK", width)[0].get("d")))
    assert (at["lk-wrong"] - left) / column == pytest.approx(7.5, abs=0.06), "in the middle of its column"
    point = min(float(n.get("cx")) for n in nodes(figure, "circle", "lk-dot", width) if float(n.get("cy")) < 300)
    assert (point - at["lk-wrong"]) / column == pytest.approx(8, abs=0.05)


def test_the_layers_stand_in_their_segments():
    figure = layers(16)
    for c, sizes in ((1, [16]), (4, [4] * 4), (5, [3, 3, 3, 3, 4]), (16, [1] * 16)):
        (d,) = [n.get("d") for n in nodes(figure, "path", "lk-mK", WIDE, c - 1) if n.get("d").count("z") == c
                and "v26" in n.get("d")]  # fmt: skip
        starts = [float(x) for x in re.findall(r"M([\d.]+)", d)]
        pitch = (WIDE - 8) / 16
        want = [sum(sizes[:n]) for n in range(c)]
        assert [round((x - 4) / pitch, 2) for x in starts] == pytest.approx(want, abs=0.01)
        (strip,) = [n for n in nodes(figure, "rect", "lk-mR", WIDE, c - 1) if n.get("height") == "26"]
        assert float(strip.get("width")) == pytest.approx(max(sizes) * pitch, abs=0.2)


def test_every_layer_may_be_the_best():
    figure = layers(16)
    assert figure.title.startswith("Of 16 layers, every layer by itself holds least: 66 sbh; √L = 4 segments hold 144")
    assert "every layer ✓ 66 sbh" in words(figure)
    assert not any("√(17L)" in w for w in words(figure))
    equal = show.segments(held(16, 4, 4), kept=4, inside=4, best=4, unit="x")
    assert equal.title == "Of 16 layers, √L = 4 segments hold least: 32 x"
    assert "√L = 4: 32 x" in words(equal), "where A_in = A_int it is right"


def test_it_steps_through_every_c():
    figure = layers(64, capacity=200)
    assert len(figure.says) == 64
    assert figure.says[7] == (
        "c = 8: 8 inputs, 16 sbh, and the inside of 8 layers, 272 sbh: 288 sbh in all, 2.18 times the least; "
        "does not fit"
    )
    assert figure.says[63].endswith("the inside of 1 layer, 34 sbh: 162 sbh in all, 1.23 times the least; fits")
    assert figure.says[31].endswith("132 sbh in all, the least; fits")
    assert figure.start == 31, "without a kernel the least stands there"
    assert figure.draw(WIDE, None) == figure.draw(WIDE, 31)
    assert layers(64, start=8).draw(WIDE, None) == layers(64).draw(WIDE, 7)
    assert len(payload(figure)["wide"]["frames"]) == 64
    assert len(script(figure)) < 400_000
    assert len({figure.draw(WIDE, k).height for k in range(64)}) == 1


def test_bytes_are_told_in_one_unit_and_to_the_byte_in_the_twin():
    numbers = {c: n * 1_000_003 for c, n in held(4).items()}
    figure = show.segments(numbers, kept=2_000_006, inside=34_000_102, best=4, measured={2: numbers[2] + 4})
    assert "42 MB" in figure.title
    assert figure.twin.rows[1][3:] == ("72,000,216 B", "72,000,220 B", "Δ +4 B")
    assert "Points: measured at 1 value of c. At most 4 B from the prediction." in figure.notes


def test_the_guess_is_a_dashed_line_at_its_c():
    show.predict("c", "Which c?").note("20")
    figure = layers(64, guess="c")
    assert "your guess 20" in words(figure)
    assert len(nodes(figure, "path", "lk-guess")) == 1
    assert nodes(layers(64, guess="never"), "path", "lk-guess") == []


# Floats


@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_fp16_and_fp32_round_as_the_standard_library_does(value):
    for form, code in ((FP16, "e"), (FP32, "f")):
        try:
            want = struct.unpack(code, struct.pack(code, value))[0]
        except OverflowError:
            want = inf if value > 0 else -inf
        assert form.nearest(value) == want, form.name


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_bf16_rounds_as_torch_does(value):
    torch = pytest.importorskip("torch")
    assert BF16.nearest(value) == torch.tensor(value, dtype=torch.float32).bfloat16().item()


def test_the_ends_of_the_formats_are_torchs():
    torch = pytest.importorskip("torch")
    for form, dtype in zip(FORMATS, (torch.float32, torch.bfloat16, torch.float16), strict=True):
        info = torch.finfo(dtype)
        assert (form.largest, form.normal, form.step(1.0)) == (info.max, info.smallest_normal, info.eps)
        assert form.smallest == torch.nextafter(torch.tensor(0.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)).item()
        assert form.nearest(form.smallest / 2) == 0 < form.nearest(form.smallest * 0.51)
        assert isinf(form.nearest(form.overflow))
        one, add = torch.tensor(1.0, dtype=dtype), torch.tensor(0.001, dtype=dtype)
        assert form.add(1.0, 0.001) == (one + add).item()


def test_neighbours_are_all_numbers_of_the_format():
    torch = pytest.importorskip("torch")
    found = BF16.between(0.98, 1.02, 80)
    bits = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    assert found == bits[(bits >= 0.98) & (bits <= 1.02)].tolist()
    assert FP32.between(0.98, 1.02, 80) == []


def test_the_worked_example_of_floats():
    figure = show.floats()
    assert figure.title == "1 + 0.001 is 1 in bf16 and 1.00098 in fp16; 1e-8 is 0 in fp16 alone"
    assert figure.origin == "computed"
    assert {"= 1 ✗", "= 1.00098", "= 1.001", "1e-8", "6e-5", "65,504", "subnormal", "inf"} <= set(words(figure))
    assert len(nodes(figure, "path", "lk-cross")) == 1, "1e-8 in fp16"
    assert len(nodes(show.floats(values=(7e4,)), "path", "lk-cross")) == 1, "inf in fp16"


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_places_on_the_line_are_logarithms(width):
    figure = show.floats(values=(1e-8, 1e-4, 1e4))
    a, b, c = (float(re.match(r"M([\d.]+)", n.get("d")).group(1)) for n in nodes(figure, "path", "lk-value", width))
    assert (c - b) / (b - a) == pytest.approx(2, abs=0.02)
    decade = (b - a) / 4
    reach = [n for n in nodes(figure, "rect", "lk-fp16", width) if float(n.get("height")) == 28]
    thin, normal = sorted(((float(n.get("x")), float(n.get("width"))) for n in reach), key=lambda pair: pair[0])
    assert normal[0] == pytest.approx(b + (log2(2**-14) / log2(10) + 4) * decade, abs=0.2)
    assert normal[1] == pytest.approx(log2(65504 / 2**-14) / log2(10) * decade, abs=0.2)
    assert thin[0] + thin[1] == pytest.approx(normal[0], abs=0.2)
    assert thin[1] == pytest.approx(log2(2**-14 / 2**-25) / log2(10) * decade, abs=0.2)


def test_gradients_that_fp16_loses_are_counted_as_torch_counts_them():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    g = torch.randn(4000) * 10 ** (torch.randn(4000) * 1.5 - 6.5)
    g[::100] = 0
    sizes = Sizes(g.tolist())
    there = g != 0
    assert sizes.zeros == int((~there).sum())
    for scale in (1.0, 2.0**10, 2.0**24):
        half = (g * scale).half()
        assert sizes.lost(FP16, scale) == int((there & (half == 0)).sum())
        assert sizes.beyond(FP16, scale) == int(half.isinf().sum())
    figure = show.floats(gradients=g.tolist(), scale=2**16)
    lost = 100 * sizes.lost(FP16) / int(there.sum())
    assert f"0 in fp16: {lost:.3g} % ✗" in words(figure)
    assert figure.title.startswith(f"{lost:.3g} % of these gradients are 0 in fp16; multiplied by 65,536, ")
    assert figure.origin == "computed · measured"
    assert any(note == "40 more are exactly 0 and left out." for note in figure.notes)
    assert sum(sizes.bins().values()) == len(sizes)


def test_the_hatched_part_ends_where_fp16_begins_and_the_scale_shifts():
    values = [2.0**k for k in range(-34, -4) for _ in range(3)]
    figure = show.floats(None, gradients=values, scale=2**20, values=(2.0**-25, 2.0**-5))
    a, b = (float(re.match(r"M([\d.]+)", n.get("d")).group(1)) for n in nodes(figure, "path", "lk-value"))
    octave = (b - a) / 20
    gone = nodes(figure, "rect", "lk-gone0")
    assert max(float(n.get("x")) + float(n.get("width")) for n in gone) == pytest.approx(a, abs=0.2)
    (outline,) = nodes(figure, "path", "lk-shifted")
    xs = [x for x, _ in boxes.points(outline.get("d"))]
    assert min(xs) == pytest.approx(a + (-34 + 20 + 25) * octave, abs=0.3)
    assert figure.title == "33.3 % of these gradients are 0 in fp16; multiplied by 1,048,576, 0 %"
    beyond = show.floats(None, gradients=[1.0, 1e-9], scale=2**20)
    assert beyond.title == "50 % of these gradients are 0 in fp16; multiplied by 1,048,576, 0 %, but 50 % are inf"


# Loss scale


def run_of(n: int, limit: float, interval: int, start: float) -> list[tuple[float, list[int]]]:
    """`torch.amp.GradScaler`'s rule: halved after an overflow, doubled after `interval` good steps."""
    scale, good, entries = start, 0, []
    for k in range(n):
        bad = [k % 4] if scale > limit else []
        entries.append((scale, bad))
        good = 0 if bad else good + 1
        if bad:
            scale /= 2
        elif good == interval:
            scale, good = scale * 2, 0
    return entries


def test_the_scale_is_a_line_of_steps_on_a_logarithmic_axis():
    history = run_of(40, 2.0**16.5, 8, 2.0**18)
    figure = show.loss_scale(history, ranks=4)
    skipped = sum(bool(bad) for _, bad in history)
    assert figure.title == f"{skipped} of 40 steps skipped, by every rank; each divides the scale by 2; it ends at 2¹⁶"
    for width in (WIDE, NARROW):
        (line,) = nodes(figure, "path", "lk-scale", width)
        points = list(boxes.points(line.get("d")))
        left, right = points[0][0], points[-1][0]
        column = (right - left) / 40
        unit = None
        for n, (scale, _) in enumerate(history):
            x = left + (n + 0.5) * column
            (y,) = {y0 for (x0, y0), (x1, y1) in pairwise(points) if y0 == y1 and x0 < x < x1}
            if n == 1:
                unit = y - points[0][1]
                assert unit > 5, "step 1 has half the scale of step 0"
            if unit:
                assert y - points[0][1] == pytest.approx((18 - log2(scale)) * unit, abs=0.3)


def test_every_rank_shows_what_it_did_with_a_skipped_step():
    figure = show.loss_scale([(4, []), (4, [1]), (2, []), (2, [0, 2]), (1, [])], ranks=3)
    assert len(nodes(figure, "path", "lk-cross")) == 3 + 1, "and one in the key"
    assert len(nodes(figure, "circle", "lk-ring")) == 3 + 1
    assert len(nodes(figure, "rect", "lk-skip")) == 2
    assert nodes(figure, "circle", "lk-no") == []
    assert {"÷2", "overflows", "skips the step too", "rank 2"} <= set(words(figure))
    assert figure.twin.rows[1] == ("1", "4", "rank 1", "ranks 0–2")


def test_an_overflow_that_is_not_shared_is_the_title():
    figure = show.loss_scale([(8, []), (8, [2], [2]), ([8, 8, 4, 8], [])])
    assert figure.title == "Step 1: overflow on rank 2, yet ranks 0–1, 3 made the step: from here on the ranks differ"
    assert len(nodes(figure, "circle", "lk-no")) == 3 + 1
    assert len(nodes(figure, "path", "lk-scale")) == 2
    assert {"ranks 0–1, 3", "makes the step nevertheless"} <= set(words(figure))
    nobody = show.loss_scale([(8, [0], []), (8, [])], ranks=2)
    assert nobody.title.startswith("Step 0: overflow on rank 0, yet ranks 0–1 made the step")


def test_titles_of_loss_scales():
    assert show.loss_scale([(2, []), (4, [])]).title == "None of 2 steps overflows; the scale ends at 2²"
    odd = show.loss_scale([(8, [0]), (4, []), (4, [0]), (1, [])])
    assert odd.title == "2 of 4 steps skipped, by every rank; the scale goes from 2³ to 2⁰"
    assert "steps 0–1: scale 1,000" in str(show.loss_scale([(1000, []), (1000, [])]))


# Norm


def tp(**more):
    return show.norm({"W": ([9, 16], "tp"), "bias": ([4, 4], ())}, mesh={"tp": 2}, **more)


MESH = {"pp": 2, "dp": 2, "tp": 2}
WHOLE = {"embedding": ([2, 3] * 4, "tp"), "W": ([9, 16, 9, 16, N, N, N, N], "tp"), "norm": ([4] * 4 + [N] * 4, ()),
         "W zero": ([N, N, N, N, 1.5, 2.5, 3.25, 0.75], ("dp", "tp"))}  # fmt: skip


def whole(**more):
    return show.norm(WHOLE, mesh=MESH, tied=["embedding"], **more)


def test_the_worked_example_of_the_norm():
    """Squares 9 and 16 sharded, 4 replicated: 5.385; counted on both ranks 5.745, everything twice 7.616."""
    figure = tp(wrong={"bias counted on both ranks": sqrt(33), "every square twice": sqrt(58)})
    assert figure.title == "The norm is √29 = 5.385, not 5.745 (bias counted on both ranks)"
    assert {"S 9", "S 16", "R 4", "25", "25 + 4", "Σ = 29", "√ = 5.385", "Σ over tp", "once"} <= set(words(figure))
    assert {"5.385", "5.745 ✗", "7.616 ✗"} <= set(words(figure, NARROW))
    bars = [float(n.get("width")) for n in nodes(figure, "rect", "") if n.get("height") == "14"]
    assert [b / bars[0] for b in bars] == pytest.approx([1, sqrt(33 / 29), sqrt(2)], abs=0.005)
    (mark,) = nodes(figure, "path", "lk-best")
    assert len(nodes(figure, "rect", "lk-copy")) == 1 + 1, "the other bias, and the key"
    assert mark.get("d").count("M") == 3


def test_stages_are_added_last():
    """Stages of norm 3 and 4: 5 on both."""
    figure = show.norm({"a": ([9, N], ()), "b": ([N, 16], ())}, mesh={"pp": 2}, wrong={"each stage alone": [3, 4]})
    assert figure.title == "The norm is √25 = 5, not 3 or 4 (each stage alone)"
    assert {"W 9", "W 16", "stage sum", "Σ over pp", "9 + 16"} <= set(words(figure))


def test_a_whole_mesh_counts_each_number_once():
    torch = pytest.importorskip("torch")
    pieces = [torch.tensor([s]).sqrt() for s in (2.0, 3, 9, 16, 4, 1.5, 2.5, 3.25, 0.75)]
    want = torch.nn.utils.get_total_norm(pieces).item()
    figure = whole()
    assert f"√ = {want:.4g}" in words(figure)
    assert "34 + 8" in words(figure)
    assert figure.title == f"The norm is √42 = {want:.4g}: every shard counts, of copies one"
    solid = [n for n in nodes(figure, "rect", "") if n.get("height") == "28" and "lk-copy" not in n.get("class")]
    assert len(solid) == 2 + 2 + 1 + 4
    assert figure.twin.rows[-1] == ("norm", "", "", "pp", "√42 = 6.481")


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_brackets_join_the_ranks_of_a_group(width):
    figure = show.norm({"W": ([9, 9, 16, 16], "tp")}, mesh={"tp": 2, "dp": 2})
    boxes_ = [n for n in nodes(figure, "rect", "lk-nS", width) if n.get("height") != "18"]
    middles = sorted(float(n.get("y")) + float(n.get("height")) / 2 for n in boxes_)
    (counted,), (copy,) = (nodes(figure, "path", cls, width) for cls in ("lk-join-of", "lk-join-copy"))
    for node, rows in ((counted, (0, 2)), (copy, (1, 3))):
        ys = sorted({y for _, y in boxes.points(node.get("d"))})
        assert ys == pytest.approx([middles[r] for r in rows], abs=0.1)
        (line,) = re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", node.get("d"))
        assert [float(y) for y in line] == pytest.approx([middles[r] for r in rows], abs=0.1)


# The pictures as a whole

GRADIENTS = [((7 * k) % 13 + 1) * 10.0 ** -((5 * k) % 11) for k in range(200)]
LONG = "a name that no column has room for"
PICTURES = {
    "segments_16": lambda: layers(16, capacity=100.0, measured={4: 144, 8: 84}, limit=289),
    "segments_64": lambda: layers(64, measured={8: 288, 32: 132}, limit=289),
    "segments_300": lambda: show.segments({c: n * 1e6 for c, n in held(300).items()}, kept=2e6, inside=34e6,
                                          best=sqrt(17 * 300), start=17),
    "segments_2": lambda: layers(2),
    "floats_line": show.floats,
    "floats_reach": lambda: show.floats(None, values=()),
    "floats_small": lambda: show.floats(3e-4, 1e-7, values=(1e-7, 2e-7, 3e-7, 1e5, 2e5)),
    "floats_gradients": lambda: show.floats(None, gradients=[0.0, *GRADIENTS], scale=2**16, values=(65504.0,)),
    "floats_one": lambda: show.floats(1.0, 0.0, gradients=[1e-30, 1e20]),
    "loss_scale_shared": lambda: show.loss_scale(run_of(40, 2.0**16.5, 8, 2.0**18), ranks=4),
    "loss_scale_alone": lambda: show.loss_scale([(8, []), (8, [2], [2]), ([8, 8, 4, 8], []), ([8, 8, 4, 8], [])]),
    "loss_scale_one": lambda: show.loss_scale([(1, [])]),
    "loss_scale_long": lambda: show.loss_scale(run_of(1000, 2.0**9, 100, 2.0**40), ranks=16),
    "norm_tp": lambda: tp(wrong={"bias counted on both ranks": 5.745}),
    "norm_pp": lambda: show.norm({"a": ([9, N], ()), "b": ([N, 16], ())}, mesh={"pp": 2}, wrong={"alone": [3, 4]}),
    "norm_mesh": lambda: whole(wrong={LONG: 9.1, "each stage alone": [5.8, 2.8], LONG * 2: 0}),
    "norm_strided": lambda: show.norm({LONG: ([9, 9, 16, 16], "tp"), "b": ([1, 2, 1, 2], "dp")},
                                      mesh={"tp": 2, "dp": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    figure = PICTURES[name]()
    last = len(figure.says)
    for width in (WIDE, NARROW):
        for frame in (None, *sorted({0, 1, 3, last // 8, last // 2, last - 1} & set(range(last)))):
            drawing = figure.draw(width, frame)
            assert drawing.width <= width
            assert boxes.outside(drawing) == [], frame
            assert boxes.overlapping(drawing) == [], frame


@pytest.mark.parametrize("name", ["segments_16", "floats_line", "floats_gradients", "loss_scale_shared", "norm_mesh"])
def test_a_picture_is_the_one_on_file(name):
    html = PICTURES[name]().to_html().replace(style("bars", "memory", "tricks"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"tricks_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


@pytest.mark.parametrize("name", ["segments_64", "floats_gradients", "loss_scale_shared", "norm_mesh"])
def test_a_picture_takes_less_than_50_ms(name):
    PICTURES[name]().to_html()
    best = inf
    for _ in range(20):
        start = time.perf_counter()
        PICTURES[name]().to_html()
        best = min(best, time.perf_counter() - start)
    assert best < 0.05


@pytest.mark.parametrize("name", PICTURES)
def test_every_fill_has_its_letter_or_name(name):
    """Parts of memory and of a norm have letters in the key, formats their names, crosses and rings a word."""
    figure = PICTURES[name]()
    names = {"lk-mK": "K", "lk-mR": "R", "lk-nS": "S", "lk-nR": "R", "lk-nT": "T", "lk-nW": "W", "lk-fp32": "fp32",
             "lk-bf16": "bf16", "lk-fp16": "fp16", "lk-cross": "overflows",
             "lk-ring": "skips the step too"}  # fmt: skip
    if name.startswith("floats"):
        names["lk-cross"] = "0"
    for width in (WIDE, NARROW):
        told = words(figure, width)
        for node in boxes.tree(figure.draw(width, None)).iter():
            for cls in node.get("class", "").split():
                assert cls not in names or names[cls] in told or names["lk-cross"] == "0", (width, cls)


def test_fills_have_outlines_and_rules_stay_inside():
    css = Path(show.__file__).with_name("tricks.css").read_text(encoding="utf-8")
    rules = re.sub(r"/\*.*?\*/|@media[^{]*{|}\s*}", "", css, flags=re.S)
    for selector in re.findall(r"([^{}]+){", rules):
        assert all(one.strip().startswith(".lk") for one in selector.split(",")), selector
    assert "forced-colors" in css


@pytest.mark.soak
def test_pictures_are_the_same_in_every_run():
    code = "import test_show_tricks as t; print([(n, f().to_html()) for n, f in t.PICTURES.items()])"
    seen = set()
    for seed in ("1", "2"):
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
        seen.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
    assert len(seen) == 1


def test_labels_are_escaped():
    for html in (show.norm({"<b>a</b>": ([1], ())}, mesh={"tp": 1}, wrong={"<i>": 2}).to_html(),
                 show.segments({1: 2, 2: 3}, kept=1, inside=1, best=1, unit="<b>").to_html()):  # fmt: skip
        assert "<b>" not in html
        assert "<i>" not in html
        assert not re.search(r'\sid="', html)


def seg(**more):
    return show.segments(**{"predicted": {1: 2, 2: 3}, "kept": 1, "inside": 1, "best": 1, **more})


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: seg(predicted=[1]), TypeError, r"predicted is \[1\]: expected number of segments → bytes"),
    (lambda: seg(predicted={"1": 2}), TypeError, "predicted has '1': expected a whole number of segments"),
    (lambda: seg(predicted={1: 2, 3: 4}), ValueError, r"predicted has \[1, 3\]: expected bytes for each c from 1 to L"),
    (lambda: seg(predicted={1: 2, 2: -1}), ValueError, r"predicted\[2\] is -1: expected a finite number above 0"),
    (lambda: seg(measured={3: 2}), ValueError, "measured has 3 segments: expected 1 to 2"),
    (lambda: seg(start=3), ValueError, "start is 3: expected a number of segments, 1 to 2"),
    (lambda: seg(kept="2"), TypeError, "kept is '2': expected a number"),
    (lambda: seg(capacity=inf), ValueError, "capacity is inf"),
    (lambda: show.floats(0.0), ValueError, "near is 0.0: expected a number above 0"),
    (lambda: show.floats(values=[1, 2, 3, 4, 5, 6]), ValueError, "values has 6 numbers: expected at most 5"),
    (lambda: show.floats(scale=2), ValueError, "scale is 2, but there are no gradients"),
    (lambda: show.floats(gradients=3), TypeError, "gradients is 3: expected a flat list"),
    (lambda: show.floats(gradients=[[1.0]]), TypeError, r"gradients is \[1.0\]: expected a number"),
    (lambda: show.floats(gradients=[1.0, nan]), ValueError, "gradients is nan: expected a finite number"),
    (lambda: show.floats(gradients=[0.0]), ValueError, "gradients has 1 numbers, none other than 0"),
    (lambda: show.loss_scale(3), TypeError, "history is 3"),
    (lambda: show.loss_scale([]), ValueError, "history is empty"),
    (lambda: show.loss_scale([4]), TypeError, r"history\[0\] is 4: expected \(scale, ranks that overflowed\)"),
    (lambda: show.loss_scale([("4", [])]), TypeError, r"history\[0\] has '4' as its scale"),
    (lambda: show.loss_scale([(0, [])]), ValueError, r"history\[0\] has 0 as its scale"),
    (lambda: show.loss_scale([(1, True)]), TypeError, r"history\[0\] has True for ranks"),
    (lambda: show.loss_scale([(1, [3])], ranks=2), ValueError, "ranks is 2: the history names 4"),
    (lambda: show.loss_scale([([1, 2], []), ([1, 2, 3], [])]), ValueError, r"history\[0\] has 2 scales"),
    (lambda: show.norm(3, mesh={"tp": 1}), TypeError, "parts is 3"),
    (lambda: show.norm({}, mesh={"tp": 1}), ValueError, "parts has 0 entries"),
    (lambda: show.norm({"a": ([1], ())}, mesh=2), TypeError, "mesh is 2"),
    (lambda: show.norm({"a": ([1], ())}, mesh={"tp": 0}), ValueError, "mesh has 0 ranks along 'tp'"),
    (lambda: show.norm({"a": ([1], ())}, mesh={"tp": 9}), ValueError, "mesh has 9 ranks: expected at most 8"),
    (lambda: show.norm({"a": 3}, mesh={"tp": 1}), TypeError, "'a' has 3: expected"),
    (lambda: show.norm({"a": ([1], "dp")}, mesh={"tp": 1}), ValueError, "'a' is sharded over 'dp', but the mesh"),
    (lambda: show.norm({"a": ([1], ())}, mesh={"tp": 2}), ValueError, "'a' has 1 squares: expected one for each of 2"),
    (lambda: show.norm({"a": ([-1], ())}, mesh={"tp": 1}), ValueError, "'a' has -1: expected a finite sum"),
    (lambda: show.norm({"a": (["1"], ())}, mesh={"tp": 1}), TypeError, "'a' has '1': expected a number"),
    (lambda: show.norm({"a": ([1, 2], ())}, mesh={"tp": 2}), ValueError, "'a' is 1 on rank 0 and 2 on rank 1"),
    (lambda: show.norm({"a": ([1], ())}, mesh={"tp": 1}, tied=["b"]), ValueError, "tied has 'b', but the parts are a"),
    (lambda: show.norm({"a": ([1], ())}, mesh={"tp": 1}, wrong={"b": "x"}), TypeError, "wrong has 'x' for 'b'"),
    (lambda: show.norm({"a": ([1], ())}, mesh={"tp": 1}, wrong={"b": []}), ValueError, "wrong has an empty list"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
