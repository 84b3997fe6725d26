"""`show.buckets`: where boxes, lines and brackets stand, how a trace is read, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from math import nan
from pathlib import Path

import pytest

import labkit
from labkit import show
from labkit.show import guesses
from labkit.show.buckettimes import read
from labkit.show.figure import NARROW, WIDE, style
from labkit.show.player import payload
from labkit.trace import Event, Trace

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import show_boxes as boxes

FIGURES = Path(__file__).parent / "figures"
MIB = 2**20


@pytest.fixture(autouse=True)
def _no_guesses(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setattr(guesses, "_units", {})


def equal(n: int, names: bool = False) -> show.BucketTimes:
    """Backward 40 ms in 8 layers, reductions 30 ms and 0.5 ms a bucket: n equal buckets, one after the other."""
    backward = [(7 - k, 0.005 * k, 0.005 * (k + 1)) for k in range(8)]
    buckets, free = [], 0.0
    for k in range(n):
        ready = 0.04 * (k + 1) / n
        start = max(ready, free)
        free = start + 0.03 / n + 0.0005
        parameters = [f"blocks.{7 - k}.w{j}" for j in range(9)] if names else []
        buckets.append((k, 160 * MIB // n, start, free, parameters, ready))
    return show.BucketTimes(backward, buckets)


def three(**more):
    return show.buckets({f"n = {n}": equal(n) for n in (1, 10, 148)}, source="simulated", **more)


def paths(figure, cls: str, width=WIDE, frame=None) -> list[list[tuple[float, float]]]:
    tree = boxes.tree(figure.draw(width, frame))
    return [list(boxes.points(n.get("d"))) for n in tree.iter("path") if cls in n.get("class", "").split()]


def words(figure, width=WIDE, frame=None) -> list[str]:
    return [w for _, w, _ in boxes.texts(figure.draw(width, frame))]


def lane(figure, cls: str, width=WIDE) -> list[list[tuple[float, float]]]:
    """(left, right) of the boxes of each variant's lane."""
    tree = boxes.tree(figure.draw(width, None))
    groups = [g for g in tree.iter("g") if cls in g.get("class", "").split()]
    return [[(float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in g.iter("rect")] for g in groups]


# What is drawn


def test_the_worked_example():
    """Backward 40 ms, reductions 30 ms and 0.5 ms a bucket: 1, 10, 148 buckets take 70.5, 43.5, 104 ms."""
    figure = three()
    assert figure.title == ("n = 10 is the fastest, 43.5 ms with 3.5 ms exposed; n = 148 takes 104 ms, 64.3 ms exposed")
    assert {"exposed 30.5 ms", "exposed 3.5 ms", "exposed 64.3 ms"} <= set(words(figure))
    assert figure.origin == "simulated"
    for width in (WIDE, NARROW):
        spans = [p[2][0] - p[0][0] for p in paths(figure, "lk-bracket", width)]
        assert spans[0] / spans[1] == pytest.approx(30.5 / 3.5, rel=0.03)
        assert spans[2] / spans[0] == pytest.approx(64.27 / 30.5, rel=0.03)


def test_variants_share_one_axis_and_stand_at_their_times():
    figure = three(axis_to=0.12)
    for width in (WIDE, NARROW):
        backward, reduced = lane(figure, "lk-B", width), lane(figure, "lk-collective", width)
        assert backward[0] == backward[1] == backward[2]
        left, end = backward[0][0][0], backward[0][-1][1]
        scale = (end - left) / 0.04
        for n, found in zip((1, 10, 148), reduced, strict=True):
            assert len(found) == n
            for (x, right), (_, _, start, stop, *_) in zip(found, equal(n).buckets, strict=True):
                assert x == pytest.approx(left + start * scale, abs=0.2)
                assert right == pytest.approx(max(left + stop * scale, x + 0.8), abs=0.2)
        for (x, _), *_ in paths(figure, "lk-ends", width):
            assert x == pytest.approx(end, abs=0.2)
        for bracket in paths(figure, "lk-bracket", width):
            assert bracket[0][0] == pytest.approx(end, abs=0.2)


def test_a_line_leads_from_the_last_gradient_to_the_start():
    backward = [(1, 0.0, 0.02), (0, 0.02, 0.04)]
    waits = show.BucketTimes(backward, [(0, 8, 0.01, 0.03, [], 0.005), (1, 8, 0.05, 0.06, [], 0.02)])
    figure = show.buckets({"two": waits})
    (left, _), (_, end) = lane(figure, "lk-B")[0]
    starts = [x for x, _ in lane(figure, "lk-collective")[0]]
    wires = paths(figure, "lk-wire")
    assert [w[0][0] for w in wires] == pytest.approx([left + (end - left) / 8, left + (end - left) / 2], abs=0.2)
    assert [w[-1][0] for w in wires] == pytest.approx(starts, abs=0.2)


def test_nothing_exposed_has_no_bracket():
    hidden = show.buckets({"fast": show.BucketTimes([(0, 0.0, 0.04)], [(0, 8, 0.01, 0.02)])})
    assert paths(hidden, "lk-bracket") == []
    assert "nothing exposed" in words(hidden)
    assert hidden.title == "All 10.0 ms of reductions are hidden behind backward"


def test_numbers_stand_where_they_have_room_and_the_count_is_said():
    figure = three()
    assert "b0 160 MiB" in words(figure)
    assert {"70.5 ms · 1 bucket", "43.5 ms · 10 buckets", "104 ms · 148 buckets"} <= set(words(figure))
    assert not [w for w in words(figure) if w in {f"b{n}" for n in range(10, 148)}]
    assert "A bucket that is too narrow for its number has none; they count up from b0." in figure.notes
    assert len(figure.twin.rows) == 159
    roomy = show.buckets({"two": equal(2)})
    assert not any("too narrow" in note for note in roomy.notes)


def test_the_curve_has_a_point_a_variant():
    figure = three()
    circles = [(float(c.get("cx")), float(c.get("cy")), c.get("class"))
               for c in boxes.tree(figure.draw(WIDE, None)).iter("circle")]  # fmt: skip
    assert len(circles) == 3
    (small, y148, _), (middle, y10, best), (large, y1, _) = sorted(circles)
    assert best.endswith("lk-best")
    assert y10 > y1 > y148, "the higher, the longer"
    floor = max(float(n.get("y1")) for n in boxes.tree(figure.draw(WIDE, None)).iter("line")
                if n.get("class") == "lk-lane" and float(n.get("x1")) > 400)  # fmt: skip
    assert (floor - y1) / (floor - y148) == pytest.approx(70.5 / 104, abs=0.01), "from zero"
    assert (middle - small) / (large - small) == pytest.approx(1 - 1 / 2.17, abs=0.02)
    assert len(list(boxes.tree(three(sizes={"n = 1": 8, "n = 10": 4}).draw(WIDE, None)).iter("circle"))) == 2
    assert not list(boxes.tree(show.buckets({"a": equal(1)}).draw(WIDE, None)).iter("circle"))


def test_the_guess_is_a_dashed_line():
    show.predict("mine", "How long?", unit="ms").note("80")
    figure = three(guess="mine")
    ((x, _), *_), *_ = paths(figure, "lk-guess")
    (left, _), *_, (_, end) = lane(figure, "lk-B")[0]
    assert (x - left) / (end - left) == pytest.approx(2, abs=0.01)
    assert "your guess 80.0 ms" in words(figure)
    own = three(guess={"n = 10": "mine", "n = 1": "never asked"})
    assert len(paths(own, "lk-guess")) == 1
    assert "Dotted: your guess, n = 10 80.0 ms." in own.notes


def test_each_bucket_can_be_stepped_to():
    figure = show.buckets({"two": equal(2, names=True), "one": equal(1)})
    assert len(figure.says) == 4
    assert figure.says[0].startswith("All buckets. two is the fastest")
    assert figure.says[1] == ("two, b0: 80 MiB; last gradient at 20.0 ms, reduced from 20.0 ms to 35.5 ms; "
                              "blocks.7.w0, blocks.7.w1, blocks.7.w2, blocks.7.w3, blocks.7.w4, blocks.7.w5, and 3 more")  # noqa: E501  # fmt: skip
    assert figure.draw(WIDE, None) == figure.draw(WIDE, 0)
    for width in (WIDE, NARROW):
        ((x, right),) = [(float(r.get("x")), float(r.get("x")) + float(r.get("width")))
                         for r in boxes.tree(figure.draw(width, 2)).iter("rect")
                         if r.get("class") == "lk-here"]  # fmt: skip
        assert (x, right) == pytest.approx(lane(figure, "lk-collective", width)[0][1], abs=0.2)
    assert "blocks.6.w8" in figure.twin.rows[1][6]
    frames = payload(figure)["wide"]
    assert sum(map(len, frames["parts"])) < 2 * len("".join(figure.draw(WIDE, 0).parts)), "frames share their parts"


# A trace


def trace_of(steps: int = 1, rank: int = 0, queued: bool = False) -> Trace:
    """Two layers of 10 ms, a bucket each, reduced by a ring inside a span; several steps; native if `queued`."""
    events, index = [], 0

    def add(kind, name, start, end, **more):
        nonlocal index
        events.append(Event(kind, name, rank, start, end, index=index, **more))
        index += 1
        return index - 1

    for n in range(steps):
        t = 1.0 + n
        for k, layer in enumerate((1, 0)):
            begin, ready = t + 0.01 * k, t + 0.01 * (k + 1)
            add("compute", "layer", begin, ready, phase="backward", labels={"layer": layer})
            if queued:  # asked for when it is ready, over when the link has moved it
                add("collective", "all_reduce", ready, t + 0.03 + 0.02 * k, nbytes=8, labels={"bucket": k})
                continue
            start = ready + 0.001 * n
            span = add("span", "all_reduce ring", start, start + 0.008, nbytes=8, labels={"bucket": k})
            add("send", "send", start, start + 0.004, nbytes=4, peer=1, parent=span, labels={"bucket": k, "step": 1})
            add("span", "inner", start, start + 0.004, parent=span, labels={"bucket": k})
    return Trace(events, rank + 1, paced=True)


def test_a_trace_is_read():
    figure = show.buckets({"a": trace_of()})
    assert figure.source == "paced"
    assert figure.origin == "measured, paced"
    times = read("a", trace_of(), rank=0)
    assert [(s.layer, round(s.start, 6), round(s.end, 6)) for s in times.sections] == [(1, 0, 0.01), (0, 0.01, 0.02)]
    assert [(b.number, b.nbytes, round(b.start, 6), round(b.end, 6)) for b in times.buckets] == [
        (0, 8, 0.01, 0.018), (1, 8, 0.02, 0.028)]  # fmt: skip
    assert [round(b.ready, 6) for b in times.buckets] == [0.01, 0.02]
    assert times.exposed == pytest.approx(0.008)
    assert {"B 1", "B 0"} <= set(words(figure))
    assert read("a", trace_of(rank=1), rank=1) == times


def test_of_several_steps_the_last_is_drawn():
    times = read("a", trace_of(3), rank=0)
    assert len(times.sections) == len(times.buckets) == 2
    assert [round(b.start, 6) for b in times.buckets] == [0.012, 0.022], "two ms later than in the first"


def test_what_was_asked_for_early_begins_when_its_turn_comes():
    times = read("a", trace_of(queued=True), rank=0)
    assert [(round(b.ready, 6), round(b.start, 6), round(b.end, 6)) for b in times.buckets] == [
        (0.01, 0.01, 0.03), (0.02, 0.03, 0.05)]  # fmt: skip


def test_of_a_bucket_that_waited_only_its_names_tell_what_for():
    backward = [(2, 0.0, 0.01), (1, 0.01, 0.02), (0, 0.02, 0.03)]
    reduced = [(0, 8, 0.01, 0.04), (1, 8, 0.04, 0.05)]
    figure = show.buckets({"a": show.BucketTimes(backward, reduced)})
    assert len(paths(figure, "lk-wire")) == 1
    assert "No line: the bucket had to wait, and what it waited for is not known." in figure.notes
    named = show.buckets({"a": show.BucketTimes(backward, reduced)},
                         parameters={"a": [["blocks.2.w"], ["blocks.1.w", "blocks.1.b"]]})  # fmt: skip
    assert named.twin.rows[1][3] == "20.0 ms"
    assert named.twin.rows[1][6] == "blocks.1.w, blocks.1.b"


def paced_step():
    import torch
    import torch.distributed as dist

    from labkit import collectives, pace, trace

    gradients = [torch.full((4096,), float(dist.get_rank())) for _ in range(2)]
    handles = []
    for n, gradient in enumerate(gradients):
        with trace.label(layer=1 - n), trace.span("layer", kind="compute", phase="backward"), pace.section("work"):
            pass
        with trace.label(bucket=n):
            handles.append(collectives.all_reduce(gradient, algorithm="ring", async_op=True))
    for handle in handles:
        handle.wait()


@pytest.mark.alone
def test_real_ranks_under_a_pace():
    run = labkit.run(paced_step, ranks=2, pace=labkit.pace.Pace(compute={"work": 0.04}))
    times = read("a", run.trace, rank=1)
    assert [s.layer for s in times.sections] == [1, 0]
    assert [(b.number, b.nbytes) for b in times.buckets] == [(0, 16384), (1, 16384)]
    assert times.buckets[0].ready is not None
    assert times.buckets[0].ready <= times.buckets[0].start <= times.buckets[0].end <= times.buckets[1].end
    assert show.buckets({"a": run.trace}, rank=1).source == "paced"


# The picture as a whole

LONG = "a very long label that no row has room for, N = 1000"
PICTURES = {
    "three": three,
    "two": lambda: show.buckets({"2 buckets": equal(2, names=True), "8 buckets": equal(8, names=True)}),
    "long": lambda: show.buckets({LONG: equal(3)}, source="paced"),
    "six": lambda: show.buckets({f"n = {n}": equal(n) for n in (1, 2, 4, 8, 16, 32)}, axis_to=0.1),
    "trace": lambda: show.buckets({"a": trace_of(), "b": trace_of(2)}),
    "hidden": lambda: show.buckets({"a": show.BucketTimes([("wte", 0.0, 0.04)], [(0, 8, 0.01, 0.01)])}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    figure = PICTURES[name]()
    for width in (WIDE, NARROW):
        drawing = figure.draw(width, None)
        assert drawing.width <= width
        assert boxes.overlapping(drawing) == []
        for frame in {0, 1, len(figure.says) // 2, len(figure.says) - 1}:
            assert boxes.outside(figure.draw(width, frame)) == []


@pytest.mark.parametrize("name", ["two"])
def test_a_picture_is_the_one_on_file(name):
    html = PICTURES[name]().to_html().replace(style("bars", "buckets"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"buckets_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


def test_pictures_are_the_same_in_every_run():
    code = "import test_show_buckets as t; print([(n, f().to_html()) for n, f in t.PICTURES.items()])"
    seen = set()
    for seed in ("1", "2"):
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
        seen.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
    assert len(seen) == 1


def test_labels_are_escaped_and_rules_stay_inside_the_figure():
    odd = show.BucketTimes([("<i>", 0.0, 0.04)], [(0, 8, 0.01, 0.05, ["<b>w</b>"])])
    html = show.buckets({"<b>a</b>": odd}).to_html()
    assert "<b>" not in html
    assert "<i>" not in html
    assert not re.search(r'\sid="', html)
    css = Path(show.__file__).with_name("buckets.css").read_text(encoding="utf-8")
    for selector in re.findall(r"([^{}]+){", re.sub(r"/\*.*?\*/", "", css, flags=re.S)):
        assert all(one.strip().startswith(".lk") for one in selector.split(",")), selector


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: show.buckets([1]), TypeError, r"variants is \[1\]: expected label → trace"),
    (lambda: show.buckets({}), ValueError, "variants is empty"),
    (lambda: show.buckets({"a": 3}), TypeError, "'a' is int: expected a labkit.trace.Trace or show.BucketTimes"),
    (lambda: show.buckets({"a": Trace([], 1)}), ValueError, "'a' has no event with the label bucket"),
    (lambda: show.buckets({"a": trace_of()}, rank=5), ValueError, "rank 5 is not in this trace"),
    (lambda: show.buckets({"a": show.BucketTimes([], [])}), ValueError, "'a' has no backward"),
    (lambda: show.buckets({"a": show.BucketTimes([(0, 2.0, 1.0)])}), ValueError, "which ends before it starts"),
    (lambda: show.buckets({"a": show.BucketTimes([(0, nan, 1.0)])}), TypeError, "expected its start and end as sec"),
    (lambda: show.buckets({"a": show.BucketTimes([(0, 1.0)])}), TypeError, r"'a' has \(0, 1.0\)"),
    (lambda: show.buckets({"a": equal(1)}, sizes={"b": 1}), ValueError, "sizes has 'b', but the variants are a"),
    (lambda: show.buckets({"a": equal(1)}, sizes={"a": 0}), ValueError, "sizes has 0 for 'a'"),
    (lambda: show.buckets({"a": equal(1)}, sizes=3), TypeError, "sizes is 3"),
    (lambda: show.buckets({"a": equal(1)}, parameters={"b": []}), ValueError, "parameters has 'b'"),
    (lambda: show.buckets({"a": equal(1)}, guess=3), TypeError, "guess is 3"),
    (lambda: show.buckets({"a": equal(1)}, guess={"b": "k"}), ValueError, "guess has 'b'"),
    (lambda: show.buckets({"a": equal(1)}, axis_to=0.01), ValueError, "axis_to is 0.01, but there are 0.0705 s"),
    (lambda: show.buckets({"a": equal(1)}, axis_to="1"), TypeError, "axis_to is '1'"),
    (lambda: show.buckets({"a": equal(1)}, source="x"), ValueError, "source is 'x'"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
