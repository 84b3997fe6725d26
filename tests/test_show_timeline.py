"""`show.timeline`: where blocks, stash and ends stand, what is said of them, real runs, keys and controls, refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from timing import on_a_busy_host, on_the_clock

import labkit
from labkit import show
from labkit.pace import Pace
from labkit.pipeline import (
    Timeline,
    dual_pipe,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
)
from labkit.show import live
from labkit.show.figure import NARROW, WIDE, style
from labkit.show.timelineplayer import payload, script
from labkit.trace import Event, Trace

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import programs_pipeline as programs
import show_boxes as boxes

FIGURES = Path(__file__).parent / "figures"
WHOLE = {"forward": 20, "backward": 40, "weight": 0}
SPLIT = {"forward": 20, "backward": 20, "weight": 20}


def two(**more):
    both = {"GPipe": simulate(gpipe(4, 8), **WHOLE), "1F1B": simulate(one_f_one_b(4, 8), **WHOLE)}
    return show.timeline(both, unit="ms", **more)


def large():
    return show.timeline(simulate(interleaved(8, 32, 2), forward=10, backward=20, weight=0), unit="ms")


def words(figure, width=WIDE) -> list[str]:
    return [w for _, w, _ in boxes.texts(figure.draw(width, None))]


def paths(figure, cls: str, width=WIDE) -> list[list[tuple[float, float]]]:
    """The points of each path of a class."""
    found = boxes.tree(figure.draw(width, None)).iter("path")
    return [list(boxes.points(n.get("d"))) for n in found if n.get("class") == cls]


def blocks(figure, kind: str, width=WIDE) -> list[list[tuple[float, float, float]]]:
    """(left, right, top) of each block of a kind; a list a row that has such."""
    found = []
    for node in boxes.tree(figure.draw(width, None)).iter("path"):
        if node.get("class") == f"lk-t{kind}":
            cut = [list(boxes.points(d)) for d in node.get("d").split("z") if d]
            found.append([(p[0][0], p[1][0], p[0][1]) for p in cut])
    return found


# What is drawn


def test_the_same_right_edge_and_a_different_stash():
    figure = two()
    assert figure.title == "The same end, 660 ms; micro-batches that a rank holds at most: GPipe 8, 1F1B 4"
    assert figure.origin == "simulated"
    for width in (WIDE, NARROW):
        said = words(figure, width)
        assert [w for w in said if w.startswith("peak")] == [f"peak {n}" for n in (8, 8, 8, 8, 4, 3, 2, 1)]
        (one, other) = (p[0][0] for p in paths(figure, "lk-end", width))
        assert (
            one == other == pytest.approx(max(end for row in blocks(figure, "B", width) for _, end, _ in row), abs=0.11)
        )
        heights = [max(y for _, y in p) - min(y for _, y in p) for p in paths(figure, "lk-stash", width)]
        assert [h / figure.views[width].stash * 8 for h in heights] == pytest.approx([8, 8, 8, 8, 4, 3, 2, 1], abs=0.1)
    assert words(figure).count("makespan 660 ms · bubble 37.5 % of ideal, 27.3 % of total") == 2
    assert words(figure).count("idle 27 %") == 8


def test_blocks_stand_at_their_times_and_f_stands_higher():
    """GPipe's closed form: on rank r micro-batch i is forwarded from 20 (r + i) on."""
    for width in (WIDE, NARROW):
        figure = two()
        view = figure.views[width]
        forward, backward = blocks(figure, "F", width), blocks(figure, "B", width)
        for r in range(4):
            for i in range(8):
                left, right, top = forward[r][i]
                assert left == pytest.approx(view.left + 20 * (r + i) * view.scale, abs=0.11)
                assert right - left == pytest.approx(20 * view.scale, abs=0.11)
                assert left >= view.left - 0.1
                assert backward[r][i][0] == pytest.approx(view.left + (660 - 40 * (8 - i + r)) * view.scale, abs=0.11)
                assert backward[r][i][2] == top + 4


def test_the_axis_can_be_locked():
    short, locked = two(), two(axis_to=1320)
    for width in (WIDE, NARROW):
        right = [
            max(r for row in blocks(f, "B", width) for _, r, _ in row) - f.views[width].left for f in (short, locked)
        ]
        assert right[0] == pytest.approx(2 * right[1], abs=0.5)


def test_the_stash_steps_where_it_changes():
    """1F1B on rank 1 of 2, F and B of 1: one micro-batch from F to B, again and again; on rank 0 two at most."""
    figure = show.timeline(simulate(one_f_one_b(2, 2), forward=1, backward=1, weight=0))
    view = figure.views[WIDE]
    first, last = ([((x - view.left) / view.scale, y) for x, y in p] for p in paths(figure, "lk-stash"))
    unit = (first[0][1] - min(y for _, y in first)) / 2
    held = [(round(x, 1), round((last[0][1] - y) / unit, 1)) for x, y in last]
    assert held == [(0, 0), (1, 0), (1, 1), (3, 1), (3, 1), (5, 1), (5, 0), (6, 0)]


def test_a_split_backward_is_hatched_and_held_until_w():
    figure = show.timeline(
        {"1F1B": simulate(one_f_one_b(4, 8), **SPLIT), "ZB-H1": simulate(zero_bubble_h1(4, 8), **SPLIT)}, unit="ms"
    )
    assert figure.title == "ZB-H1 ends at 540 ms and holds at most 4; 1F1B ends at 660 ms and holds at most 4"
    assert len(blocks(figure, "W")) == 4
    assert len(paths(figure, "lk-thatch")) == 4
    assert "W (hatched)" in figure.notes[0]
    assert not paths(two(), "lk-thatch")
    assert "W" not in two().notes[0]


def test_a_chunk_has_notches_and_its_stash_is_a_part():
    figure = show.timeline(simulate(interleaved(4, 8, 2), **WHOLE))
    assert [w for w in words(figure) if w.startswith("peak")] == [f"peak {n}×½" for n in (11, 9, 7, 5)]
    assert figure.title.endswith("micro-batches that a rank holds at most: 5.5")
    notched = [boxes.points(n.get("d")) for n in boxes.tree(figure.draw(WIDE, None)).iter("path")
               if n.get("class") == "lk-notch"]  # fmt: skip
    assert len(notched) == 4
    assert all(len(list(points)) == 16 * 5 for points in notched), "8 F and 8 B of the second chunk"
    assert any("Notches" in note for note in figure.notes)
    assert not any("Notches" in note for note in two().notes)
    both_ways = show.timeline(simulate(dual_pipe(4, 8)))
    assert "peak" in " ".join(words(both_ways))
    assert "½" not in " ".join(words(both_ways)), "each direction has whole stages"


def test_labels_of_a_large_picture_stay_legible():
    figure = large()
    assert len(figure.chart.variants[0].timeline.events) == 8 * 32 * 2 * 2
    for width in (WIDE, NARROW):
        flags = [w for w in words(figure, width) if re.fullmatch(r"[FB]\d+", w)]
        assert len(flags) >= 4 * 8
        assert {size for *_, size in boxes.texts(figure.draw(width, None))} <= {12.0, 13.0, 14.0}
        lines = [p[0] for p in paths(figure, "lk-flag", width)]
        assert len(lines) == len(flags)
        starts = {round(left, 1) for kind in "FB" for row in blocks(figure, kind, width) for left, *_ in row}
        assert all(min(abs(x - left) for left in starts) < 1 for x, _ in lines)
    assert len(figure.twin.rows[0][2].split()) == 128


def test_idle_is_dotted_between_blocks():
    figure = two()
    for row in range(8):
        gaps = paths(figure, "lk-gap")[row]
        taken = blocks(figure, "F")[row] + blocks(figure, "B")[row]
        for (left, _), (right, _) in zip(gaps[::2], gaps[1::2], strict=True):
            assert right > left
            assert all(right <= a + 0.1 or left >= b - 0.1 for a, b, _ in taken)


def test_transfers_and_the_critical_path_are_drawn_on_demand():
    late = simulate(one_f_one_b(4, 8), communication=5, **WHOLE)
    assert paths(show.timeline(late), "lk-sent") == []
    ((*points,),) = paths(show.timeline(late, transfers=True), "lk-sent")
    assert len(points) == 2 * 3 * 8 * 2, "two ends, three boundaries, eight micro-batches, both ways"
    assert paths(show.timeline(late), "lk-critical") == []
    figure = show.timeline(simulate(gpipe(2, 2), forward=1, backward=1, weight=0), path=True)
    (outline,) = paths(figure, "lk-critical")
    assert len(outline) == 6 * 5 + 2 * 2, "six blocks of five points, and a line down and up"
    assert any("critical path" in note for note in figure.notes)


def test_the_guess_is_a_dashed_line():
    show.predict("pipe", "How long?", unit="ms").note("330")
    figure = two(guess="pipe")
    ((x, _), *_), *_ = paths(figure, "lk-line lk-guess")
    view = figure.views[WIDE]
    assert x == pytest.approx(view.left + 330 * view.scale, abs=0.1)
    assert "your guess 330 ms" in words(figure)
    own = two(guess={"1F1B": "pipe"})
    assert len(paths(own, "lk-line lk-guess")) == 1
    assert "Dotted: your guess, 1F1B 330 ms." in own.notes
    show.predict("slots", "How many slots?", unit="slots").note("9")
    slots = show.timeline(simulate(gpipe(2, 2)), unit="slots", guess="slots")
    assert "your guess 9 slots" in words(slots)


@pytest.mark.parametrize(("lines", "title"), [
    ({"a": (gpipe, 0), "b": (gpipe, 0)}, "a, b: the same end, 660 ms; micro-batches that a rank holds at most: 8 each"),
    ({"G": (gpipe, 5), "1": (one_f_one_b, 5)},
     "G ends at 690 ms and holds at most 8; 1 ends at 740 ms and holds at most 4"),
    ({"1F1B": (one_f_one_b, 5)}, "1F1B ends at 740 ms, 35 % of it idle; micro-batches that a rank holds at most: 4"),
])  # fmt: skip
def test_titles(lines, title):
    made = {name: simulate(order(4, 8), communication=c, **WHOLE) for name, (order, c) in lines.items()}
    assert show.timeline(made, unit="ms").title == title


def test_the_text_is_the_schedule():
    lines = str(two()).splitlines()
    assert lines[2] == "  GPipe | makespan 660 ms | bubble 37.5 % of ideal, 27.3 % of total | peaks 8 8 8 8"
    assert lines[-1] == "  r3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 | idle 27 %"
    assert "  r0: F0.0 F1.0 F0.2 F1.2 B0.2" in str(show.timeline(simulate(interleaved(2, 2, 2))))


# A trace


def trace_of(steps: int = 1, slow: float = 1.0, evaluated: bool = False, paced: bool = False) -> Trace:
    """Two ranks, one micro-batch, 1F1B, F 20 and B 40 ms; each step 10 ms longer in its first F."""
    events: list[Event] = []

    def add(name, rank, start, end):
        labels = {"stage": rank, "micro_batch": 0}
        events.append(Event("span", name, rank, start, end, index=len(events), labels=labels))

    for n in range(steps):
        t, late = 5.0 + n, 0.01 * n
        add("F", 0, t - late, t + 0.02)
        add("F", 1, t + 0.02, t + 0.04)
        add("B", 1, t + 0.04, t + 0.04 + 0.04 * slow)
        add("B", 0, t + 0.04 + 0.04 * slow, t + 0.04 + 0.08 * slow)
    if evaluated:
        add("F", 0, 50.0, 50.02)
        add("F", 1, 50.02, 50.04)
    return Trace(events, 2, paced)


def test_a_trace_is_drawn_from_zero_in_ms():
    figure = show.timeline(trace_of(paced=True))
    assert figure.origin == "measured, paced"
    assert figure.chart.unit == "ms"
    assert figure.chart.variants[0].timeline.makespan == pytest.approx(120)
    assert figure.title == "measured ends at 120 ms, 50 % of it idle; micro-batches that a rank holds at most: 1"


@pytest.mark.parametrize("evaluated", [False, True])
def test_of_several_steps_the_last_is_drawn(evaluated):
    line = show.timeline(trace_of(3, evaluated=evaluated)).chart.variants[0].timeline
    assert [(e.kind, e.rank, round(e.start, 3), round(e.end, 3)) for e in line.events] == [
        ("F", 0, 0, 40), ("F", 1, 40, 60), ("B", 1, 60, 100), ("B", 0, 100, 140)]  # fmt: skip
    only = Trace([e for e in trace_of(evaluated=True).events if e.start > 40], 2)
    assert show.timeline(only).chart.variants[0].timeline.makespan == pytest.approx(40)


@pytest.mark.parametrize(("slow", "title"), [
    (1.05, "real takes 124 ms, 3.3 % longer than paper"), (0.9, "real takes 112 ms, 6.7 % less than paper"),
])  # fmt: skip
def test_simulated_over_measured(slow, title):
    paper = simulate(one_f_one_b(2, 1), **WHOLE)
    figure = show.timeline({"paper": paper, "real": trace_of(slow=slow)}, unit="ms")
    assert figure.title == title
    assert figure.origin == "simulated · measured"
    forward = blocks(figure, "F")
    assert forward[0][0][:2] == pytest.approx(forward[2][0][:2], abs=0.2), "one axis"
    in_seconds = simulate(one_f_one_b(2, 1), 0.02, 0.04, 0)
    assert show.timeline({"paper": in_seconds, "real": trace_of(slow=slow)}, unit="s").title.endswith("than paper")


@on_a_busy_host
@pytest.mark.alone
def test_a_real_run_under_a_pace():
    schedule = one_f_one_b(2, 3)
    run = labkit.run(programs.paced, schedule, ranks=2, pace=Pace(compute={"set-up": 0.5, "F": 0.02, "B": 0.04}))
    paper = simulate(schedule, **WHOLE)
    figure = show.timeline({"simulated": paper, "measured": run.trace}, unit="ms")
    measured = figure.chart.variants[1].timeline
    assert [[e.action for e in measured.of(rank)] for rank in (0, 1)] == [list(row) for row in schedule.actions]
    assert measured.peak_stash == paper.peak_stash == (2, 1)
    with on_the_clock():
        assert measured.makespan > 0.8 * paper.makespan, "a busy host begins late and ends in time"
    assert figure.origin == "simulated · measured, paced"


# Keys and controls


def controlled():
    def both(m, communication):
        kw = {**WHOLE, "communication": communication}
        return {"GPipe": simulate(gpipe(4, m), **kw), "1F1B": simulate(one_f_one_b(4, m), **kw)}

    return show.timeline(both, controls={"m": [1, 8], "communication": [0, 5]}, unit="ms", axis_to=740)


def test_a_control_has_a_picture_for_each_combination():
    figure = controlled()
    titles = [scene.title for scene in figure.scenes]
    assert titles[0] == "GPipe, 1F1B: the same end, 240 ms; micro-batches that a rank holds at most: 1 each"
    assert titles[2].startswith("The same end, 660 ms")
    assert titles[3].startswith("GPipe ends at 690 ms and holds at most 8; 1F1B ends at 740 ms")
    assert len({scene.views[WIDE].scale for scene in figure.scenes}) == 1, "one axis for all"
    data = payload(figure)
    assert data["dials"] == [{"name": "m", "values": ["1", "8"]}, {"name": "communication", "values": ["0", "5"]}]
    assert [titles[n] in scene["html"] for n, scene in enumerate(data["scenes"])] == [True] * 4
    assert not any("<style" in scene["html"] for scene in data["scenes"])
    assert str(figure).startswith(titles[0])


def test_the_longest_setting_decides_where_the_axis_ends():
    figure = show.timeline(lambda m: simulate(gpipe(4, m), **WHOLE), controls={"m": [8, 1, 16]})
    assert [scene.chart.top for scene in figure.scenes] == [1140] * 3, "(16 + 3) · 60"


def test_the_browser_is_told_where_each_block_is():
    figure = two()
    data = json.loads(json.dumps(payload(figure)))["scenes"][0]["focus"]
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        place = data[name]
        for v, rows in enumerate([blocks(figure, "B", width)[:4], blocks(figure, "B", width)[4:]]):
            for rank, row in enumerate(rows):
                told = [e for e in data["variants"][v]["rows"][rank] if e[0] == "B"]
                for (left, _, top), event in zip(row, told, strict=True):
                    assert left == pytest.approx(place["left"] + event[3] * place["scale"], abs=0.11)
                    assert top == pytest.approx(place["tops"][v][rank] + 4, abs=0.11)


def test_a_notebook_stores_the_page_and_no_widget(monkeypatch):
    monkeypatch.delenv("LABKIT_STATIC", raising=False)
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(live.sys.modules, "IPython", kernel)
    data = two()._repr_mimebundle_()
    assert set(data) == {"text/html", "text/plain"}
    assert data["text/html"].count("<script>") == 1
    monkeypatch.setenv("LABKIT_STATIC", "1")
    assert "<script" not in controlled()._repr_mimebundle_()["text/html"]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_is_valid_javascript(tmp_path):
    text = script(two()).removeprefix("<script>").removesuffix("</script>")
    (tmp_path / "timeline.js").write_text(text, encoding="utf-8")
    subprocess.run(["node", "--check", str(tmp_path / "timeline.js")], check=True, capture_output=True)


@pytest.mark.browser
def test_keys_outline_what_a_block_needs_and_a_slider_swaps_the_picture(tmp_path):
    """In a browser, without a kernel. A control's new picture is there within 50 ms; ten times that on a busy host."""
    sync_api = pytest.importorskip("playwright.sync_api")
    figure = controlled()
    page_file = tmp_path / "page.html"
    page_file.write_text(f"<meta charset=utf-8>{figure.to_html()}{script(figure)}", encoding="utf-8")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 800, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(page_file.as_uri())
        page.locator(".lk-dials input").first.focus()
        took = page.evaluate("""async () => {
            const slider = document.querySelector(".lk-dials input"), before = performance.now();
            slider.value = 1; slider.dispatchEvent(new Event("input"));
            document.querySelector(".lk").getBoundingClientRect();
            return performance.now() - before;
        }""")
        assert took < 500
        assert page.locator(".lk-title").inner_text().startswith("The same end, 660 ms")
        assert page.locator(".lk-dials label").first.inner_text() == "m = 8"
        page.locator(".lk-wide").focus()
        for key in ("ArrowRight", "ArrowDown", "ArrowRight", "End", "Home"):
            page.keyboard.press(key)
        assert page.locator(".lk-say").inner_text() == (
            "GPipe, rank 1, F0, 20 ms to 40 ms. Needs F0 on rank 0. Unblocks F0 on rank 2, B0 on rank 1."
        )
        for _ in range(8):
            page.keyboard.press("ArrowRight")
        assert page.locator(".lk-say").inner_text() == (
            "GPipe, rank 1, B0, 300 ms to 340 ms. Needs F0 on rank 1, B0 on rank 2. Unblocks B0 on rank 0."
        )
        counts = [page.locator(f".lk-wide .lk-{what}").count() for what in ("here", "needs", "frees")]
        assert counts == [1, 2, 1]
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement === document.body")
        assert errors == []
        browser.close()


# The picture as a whole

PICTURES = {
    "two": two,
    "large": large,
    "split": lambda: show.timeline({"1F1B": simulate(one_f_one_b(4, 8), **SPLIT),
                                    "ZB-H1": simulate(zero_bubble_h1(4, 8), **SPLIT)}, unit="ms", path=True),
    "interleaved": lambda: show.timeline(simulate(interleaved(4, 8, 2), communication=5, **WHOLE), transfers=True),
    "one": lambda: show.timeline(simulate(gpipe(1, 1))),
    "long": lambda: show.timeline({"a very long name that says far more than anybody wants to know of a schedule":
                                   simulate(one_f_one_b(16, 16), **WHOLE)}, unit="thousandths"),
    "trace": lambda: show.timeline({"paper": simulate(one_f_one_b(2, 1), **WHOLE), "real": trace_of(2)}, unit="ms"),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    for width in (WIDE, NARROW):
        drawing = PICTURES[name]().draw(width, None)
        assert drawing.width <= width
        assert boxes.overlapping(drawing) == []
        assert boxes.outside(drawing) == []


@pytest.mark.parametrize("name", ["two", "split"])
def test_a_picture_is_the_one_on_file(name):
    html = PICTURES[name]().to_html().replace(style("bars", "timeline"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"timeline_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


def test_names_are_escaped_and_rules_stay_inside_the_figure():
    figure = show.timeline({"<b>a</b>": simulate(gpipe(1, 1))})
    assert "<b>" not in figure.to_html()
    assert "<b>" not in script(figure)
    assert not re.search(r'\sid="', figure.to_html())
    css = Path(show.__file__).with_name("timeline.css").read_text(encoding="utf-8")
    css = re.sub(r"@media[^{]*{", "", re.sub(r"/\*.*?\*/", "", css, flags=re.S))
    for selector in re.findall(r"([^{}]+){", css):
        assert all(one.strip().startswith(".lk") for one in selector.split(",")), selector


def test_nothing_of_torch_is_loaded():
    code = (
        "import sys; from labkit import pipeline as p, show; str(show.timeline(p.simulate(p.gpipe(2, 2)))); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What is refused

NOTHING = Timeline(name="none", ranks=1, micro_batches=1, stages=1, events=())
PAPER = simulate(gpipe(1, 1))


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: show.timeline(3), TypeError, "was given int: pass simulate"),
    (lambda: show.timeline(SimpleNamespace(trace=trace_of())), TypeError, "pass its .trace"),
    (lambda: show.timeline({}), ValueError, "there is no timeline"),
    (lambda: show.timeline(NOTHING), ValueError, "'none' has no action"),
    (lambda: show.timeline(Trace([], 1)), ValueError, 'the trace has no span "F"'),
    (lambda: show.timeline({"a": PAPER, "b": trace_of()}), ValueError, "unit is None, but measured times are seconds"),
    (lambda: show.timeline(trace_of(), unit="slots"), ValueError, "unit is 'slots', but measured"),
    (lambda: show.timeline(PAPER, unit=3), TypeError, "unit is 3: expected text"),
    (lambda: show.timeline(PAPER, controls={"m": [1]}), TypeError, "controls need a function"),
    (lambda: show.timeline(lambda m: PAPER), TypeError, "is a function, which needs controls"),
    (lambda: show.timeline(lambda m: PAPER, controls=[1]), TypeError, r"controls is \[1\]: expected argument"),
    (lambda: show.timeline(lambda m: PAPER, controls={"m": []}), ValueError, "0 combinations"),
    (lambda: show.timeline(lambda m: PAPER, controls={"m": range(201)}), ValueError, "201 combinations"),
    (lambda: show.timeline(PAPER, axis_to="1"), TypeError, "axis_to is '1'"),
    (lambda: show.timeline(PAPER, axis_to=2), ValueError, "axis_to is 2, but the longest takes 3"),
    (lambda: show.timeline(PAPER, axis_to=float("inf")), ValueError, "axis_to is inf"),
    (lambda: show.timeline(PAPER, guess=3), TypeError, "guess is 3"),
    (lambda: show.timeline(PAPER, source="x"), ValueError, "source is 'x'"),
    (lambda: show.timeline(PAPER, title=" "), ValueError, "title is ' '"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
