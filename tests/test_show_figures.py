"""Pictures, compared with files and measured: nothing outside, nothing too small, nothing told by colour alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from labkit import show
from labkit.show import svg, words
from labkit.show.figure import NARROW, WIDE, Figure, Table, style
from labkit.show.player import payload

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helper is beside them

import show_traces as traces

FIGURES = Path(__file__).parent / "figures"
GOLDEN = ("ring", "posted_ring", "subgroups", "deadlock", "unreceived", "missing", "spans", "empty")
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", GOLDEN)
def test_a_picture_is_the_one_on_file(name):
    html = show.trace(traces.EVERY[name]()).to_html().replace(style(), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"trace_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


def test_pictures_do_not_depend_on_the_hash_seed_or_on_time():
    code = (
        "import show_traces as t; from labkit import show; from labkit.show.player import payload\n"
        "print([(show.trace(f()).to_html(), payload(show.trace(f()))) for f in t.EVERY.values()])"
    )
    seen = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed,
                       "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1


def test_the_picture_does_not_show_when_things_happened():
    """The same events at other times give the same picture, so that a compared notebook cell stays equal."""
    import dataclasses

    from labkit.trace import Trace

    for make in (traces.ring, traces.subgroups, traces.posted_ring):
        trace = make()
        later = Trace([dataclasses.replace(e, start=5 - e.start, end=5.1) for e in trace.events], trace.ranks)
        assert show.trace(later).to_html() == show.trace(trace).to_html()


# Boxes


def drawings(figure: Figure):
    for width in (WIDE, NARROW):
        for frame in (None, *range(len(figure.says))[-2:]):
            yield width, figure.draw(width, frame)


def texts(drawing):
    """(left, top, right, bottom, words, size) of every text of a drawing."""
    strip = drawing.strip[2] if drawing.strip else ()
    for node in ElementTree.fromstring(f"<g>{''.join((*drawing.parts, *strip))}</g>").iter("text"):
        size, x, y = (float(node.get(k, "0")) for k in ("font-size", "x", "y"))
        width = svg.text_width(node.text or "", size)
        left = x - {"middle": width / 2, "end": width}.get(node.get("text-anchor", ""), 0)
        yield left, y - 0.8 * size, left + width, y + 0.22 * size, node.text, size


def shapes(drawing):
    """The extent of everything else."""
    for node in ElementTree.fromstring(f"<g>{''.join(drawing.parts)}</g>").iter():
        at = {k: float(v) for k, v in node.attrib.items() if re.fullmatch(r"-?[\d.]+", v)}
        if node.tag == "rect":
            yield at["x"], at["y"], at["x"] + at["width"], at["y"] + at["height"]
        elif node.tag == "circle":
            yield at["cx"] - 4, at["cy"] - 4, at["cx"] + 4, at["cy"] + 4
        elif node.tag == "line":
            yield at["x1"], at["y1"], at["x2"], at["y2"]
        elif node.tag in ("path", "polygon"):
            xy = [float(n) for n in re.findall(r"-?[\d.]+", node.get("d") or node.get("points"))]
            yield min(xy[::2]), min(xy[1::2]), max(xy[::2]), max(xy[1::2])


@pytest.mark.parametrize("axis", ["order", "time"])
@pytest.mark.parametrize("name", traces.EVERY)
def test_no_text_is_small_and_nothing_lies_outside(name, axis):
    figure = show.trace(traces.EVERY[name](), axis=axis)
    for width, drawing in drawings(figure):
        assert drawing.width <= width + 1 or drawing.strip, "wider than the page, and it does not scroll"
        for left, top, right, bottom, told, size in texts(drawing):
            assert size >= 12, told
            assert left >= -1 and right <= drawing.width + 1, (width, told, left, right)  # noqa: PT018
            assert top >= -1 and bottom <= drawing.height + 1, (width, told, top, bottom)  # noqa: PT018
        for left, top, right, bottom in shapes(drawing):
            assert left >= -1 and right <= drawing.width + 1, (width, left, right)  # noqa: PT018
            assert top >= -1 and bottom <= drawing.height + 1, (width, top, bottom)  # noqa: PT018


@pytest.mark.parametrize("name", ["ring", "ring_rounds", "subgroups", "deadlock", "unreceived", "spans", "ring_16"])
def test_texts_do_not_lie_on_each_other(name):
    for width, drawing in drawings(show.trace(traces.EVERY[name]())):
        boxes = list(texts(drawing))
        for i, (l1, t1, r1, b1, one, _) in enumerate(boxes):
            for l2, t2, r2, b2, other, _ in boxes[i + 1 :]:
                apart = r1 <= l2 + 1 or r2 <= l1 + 1 or b1 <= t2 + 1 or b2 <= t1 + 1
                assert apart or (one, t1) == (other, t2), (width, one, other)


@pytest.mark.parametrize("longer", [lambda w: w + "m" * max(1, len(w) * 2 // 5), lambda w: "环" * (len(w) // 2 + 1)])
def test_longer_words_and_east_asian_ones_fit(longer, monkeypatch):
    """40 % slack, and characters twice as wide."""
    table = {
        key: longer(text) if key.startswith("trace.") and not words.placeholders(text) else text
        for key, text in words.table("en").items()
    }
    monkeypatch.setattr(words, "table", lambda lang: table)
    for name in ("ring", "deadlock", "unreceived", "missing"):
        test_no_text_is_small_and_nothing_lies_outside(name, "order")


# Colour, escaping, ids


@pytest.mark.parametrize("name", traces.EVERY)
def test_nothing_is_told_by_colour_alone(name):
    """Every filled box holds a word; what went wrong has a word too, not just its colour."""
    figure = show.trace(traces.EVERY[name]())
    drawing = figure.draw(WIDE, None)
    tree = ElementTree.fromstring(f"<g>{''.join(drawing.parts)}</g>")
    for group in tree.iter("g"):
        cls = group.get("class", "")
        if cls.split()[-1:] and cls.split()[-1] in ("lk-collective", "lk-box"):
            told = [t for t in group.iter("text") if t.text]
            assert len(told) >= len(list(group.iter("rect")))
        if "lk-open" in cls and "lk-message" not in cls and "lk-thread" not in cls:
            told = " ".join(t.text or "" for t in group.iter("text"))
            assert any(words.say(f"trace.{w}") in told for w in ("unfinished", "unreceived")) or "waits" in told


def test_fills_have_an_outline():
    for rule in re.findall(r"\.lk ([^{}]*rect[^{}]*){([^{}]*fill:[^{}]*)}", style()):
        selector, body = rule
        outlined = "stroke:" in body or re.fullmatch(r"\.lk-[FB] rect", selector.strip()) or "lk-gone" in selector
        assert outlined, rule


def test_yellow_is_not_used():
    assert "f0e442" not in style().lower()


def test_names_and_labels_are_escaped():
    figure = show.trace(traces.hostile(), title="<b>bold</b> & more")
    pages = [figure.to_html(), *(p for k in ("wide", "narrow") for p in payload(figure)[k]["parts"])]
    for page in pages:
        assert "<script" not in page
        assert "<b>" not in page
        assert "\x00" not in page
    ElementTree.fromstring(f"<g>{''.join(pages[1:])}</g>")  # well-formed


def test_ids_cannot_collide_since_there_are_none():
    for make in traces.EVERY.values():
        assert not re.search(r'\sid="', show.trace(make()).to_html())


def test_every_style_rule_stays_inside_the_figure():
    css = re.sub(r"@(media|container)[^{]*{((?:[^{}]*{[^{}]*})*)}", r"\2", style())
    for selector in re.findall(r"([^{}]+){", css):
        assert all(one.strip().startswith(".lk") for one in selector.split(",")), selector


# Speed


def test_a_small_picture_is_quick():
    """A millisecond or so on an idle host; the bound leaves room for a busy one."""
    trace = traces.ring()
    show.trace(trace).to_html()
    best = min(_seconds(lambda: show.trace(trace).to_html()) for _ in range(20))
    assert best < 0.015


def test_a_large_trace_is_still_drawn():
    trace = traces.ring(16, 320)
    assert _seconds(lambda: show.trace(trace).to_html()) < 5


def _seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_importing_show_imports_no_torch_and_no_widgets():
    heavy = "{'torch', 'anywidget', 'ipywidgets', 'IPython', 'numpy'}"
    code = f"import sys, labkit.show; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE.parent)
    assert done.stdout.strip() == "[]"


# The figure itself


def test_a_figure_checks_its_title_and_its_source():
    with pytest.raises(ValueError, match="title is ''"):
        Figure("", None, Table((), ()))
    with pytest.raises(ValueError, match="source is 'guessed'"):
        Figure("All wait", None, Table((), ()), source="guessed")


def test_every_source_has_its_pill():
    for source, pill in (("measured", "measured"), ("paced", "measured, paced"), ("simulated", "simulated")):
        assert f'class="lk-pill">{pill}<' in show.trace(traces.ring(), source=source).to_html()


def test_text_width_counts_east_asian_characters_and_marks():
    assert svg.text_width("环形", 10) == 20
    assert svg.text_width("é", 10) == svg.text_width("e", 10)
    assert svg.wrap("环形归约", 25, 10) == ["环形", "归约"]
