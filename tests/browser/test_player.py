"""A picture in a real JupyterLab steps with the keyboard, also while the kernel is busy."""

from __future__ import annotations

import statistics

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit.execute import METADATA

PICTURE = """
from labkit import show
from labkit.trace import Event, Trace

events = [Event(kind, kind, rank, float(n), n + 0.5, 8, 1 - rank, index=n)
          for n in range(20) for rank, kind in ((n % 2, "send"), (1 - n % 2, "recv"))]
show.trace(Trace(events, ranks=2))
"""
#: Milliseconds from a key to the first picture that is painted with the new frame.
WATCH = """() => {
    const frame = document.querySelector(".lk-stage:not([style*='none']) .lk-frame");
    window.taken = [];
    let pressed = null;
    document.addEventListener("keydown", () => { pressed = performance.now(); }, true);
    new MutationObserver(() => {
        const from = pressed;
        requestAnimationFrame(() => requestAnimationFrame(() => window.taken.push(performance.now() - from)));
    }).observe(frame, { childList: true });
}"""


@pytest.fixture
def busy(lab):
    """A picture, and a kernel that sleeps."""
    cells = [new_code_cell(PICTURE, id="picture"), new_code_cell("import time; time.sleep(60)", id="sleep")]
    nbformat.write(new_notebook(cells=cells, metadata=METADATA), lab.server.work / "busy.ipynb")
    lab.open("busy.ipynb")
    lab.page.click('.lm-MenuBar-itemLabel:text-is("Run")')
    lab.page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
    lab.page.wait_for_selector(".lk-controls")
    lab.page.wait_for_selector('.jp-NotebookPanel [data-status="busy"]')
    return lab


def said(lab) -> str:
    return lab.page.locator(".lk-say").first.inner_text()


def test_a_picture_steps_while_the_kernel_is_busy(busy):
    busy.page.locator(".lk-stage:visible").first.focus()
    busy.page.keyboard.press("Home")
    first = said(busy)
    busy.page.keyboard.press("ArrowRight")
    assert said(busy) != first
    assert busy.page.locator('.jp-NotebookPanel [data-status="busy"]').count() > 0, "the kernel still sleeps"
    assert busy.errors == []


@pytest.mark.soak
def test_a_key_shows_its_frame_within_50_milliseconds(busy):
    busy.page.locator(".lk-stage:visible").first.focus()
    busy.page.evaluate(WATCH)
    for key in ["Home"] + ["ArrowRight", "ArrowRight", "ArrowLeft"] * 15:
        busy.page.keyboard.press(key)
        busy.page.wait_for_timeout(60)
    taken = busy.page.evaluate("window.taken")
    assert len(taken) >= 40
    print(f"key to frame: median {statistics.median(taken):.0f} ms, worst {max(taken):.0f} ms")
    assert statistics.median(taken) <= 50
