"""What every committed notebook must hold to; nbval runs them, this reads them."""

from __future__ import annotations

import ast
import builtins
import itertools
import json
import re
from pathlib import Path

import pytest

import labkit

NOTEBOOKS = sorted(Path(__file__).parents[1].joinpath("notebooks").glob("*.ipynb"))
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
             "zeros"}  # fmt: skip
#: What differs from run to run: a path, an address in memory, a process number, a duration.
UNSTABLE = re.compile(r"/(tmp|home|root|usr|Users|work)/|0x[0-9a-f]{6,}|\bpid\b|\d+(\.\d+)? ?(ms|µs)\b|\d\.\d+ ?s\b")

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def cells(path: Path, kind: str = "code") -> list[dict]:
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def test_ids_are_readable_and_stable(path):
    ids = [c["id"] for kind in ("code", "markdown") for c in cells(path, kind)]
    assert len(set(ids)) == len(ids)
    assert not [i for i in ids if not re.fullmatch(r"[a-z][a-z0-9-]*", i) or re.fullmatch(r"[0-9a-f]{8}", i)]


def test_committed_executed_in_static_mode(path):
    assert not json.loads(path.read_text(encoding="utf-8"))["metadata"].get("widgets"), "no widget state"
    counts = [c["execution_count"] for c in cells(path)]
    assert counts == list(range(1, len(counts) + 1)), "run from top to bottom in one go"
    for cell in cells(path):
        for output in cell["outputs"]:
            assert output["output_type"] != "error", cell["id"]
            assert not [m for m in output.get("data", {}) if "widget" in m], cell["id"]
            assert "<script" not in json.dumps(output), cell["id"]


def test_the_first_code_cell_asserts_the_version(path):
    assert f'labkit.__version__ == "{labkit.__version__}"' in source(cells(path)[0])


def test_no_magics_and_no_hidden_state(path):
    for cell in cells(path):
        assert not re.search(r"^\s*[%!]|clear_output|get_ipython", source(cell), re.M), cell["id"]
        ast.parse(source(cell))


def test_compared_cells_hold_nothing_that_differs_between_runs(path):
    for cell in cells(path):
        if "nbval-ignore-output" not in cell["metadata"].get("tags", []):
            shown = re.sub(r"<style>.*?</style>", "", json.dumps(cell["outputs"], ensure_ascii=False))
            assert not UNSTABLE.search(shown), f"{cell['id']}: {UNSTABLE.search(shown)}"


def test_an_ignored_cell_is_followed_by_one_that_is_compared(path):
    all_cells = cells(path)
    for cell, following in itertools.pairwise(all_cells):
        if "nbval-ignore-output" in cell["metadata"].get("tags", []):
            assert "nbval-ignore-output" not in following["metadata"].get("tags", []), cell["id"]


def test_tensors_in_ranks_are_made_on_the_ranks_device(path):
    """A factory without a device would put a GPU's tensors on the CPU. In a notebook what runs in ranks is a `def`."""
    for cell in cells(path):
        for function in ast.walk(ast.parse(source(cell))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in {f"torch.{f}" for f in FACTORIES}:
                    assert any(k.arg == "device" for k in call.keywords), f"{cell['id']}: {ast.unparse(call)}"


def test_chapters_link_on(path):
    """The title links to what a chapter builds on, what there is to keep ends with the chapter that comes next."""
    text = {cell["id"]: source(cell) for cell in cells(path, "markdown")}
    before, after = NOTEBOOKS[: NOTEBOOKS.index(path)], NOTEBOOKS[NOTEBOOKS.index(path) + 1 :]
    _, _, builds_on = text["title"].partition("It builds on")
    linked = set(re.findall(r"\((\d\d_\w+\.ipynb)\)", builds_on))
    assert linked <= {other.name for other in before}
    assert linked or not before
    assert not before or "(00_start.ipynb#cell-id=notation)" in builds_on
    _, _, comes_next = text["keep"].partition("**Next:**")
    assert f"({after[0].name if after else 'claims.md'})" in comes_next


def test_any_section_runs_after_the_set_up_and_itself(path):
    """No name that a section uses may come from another section."""
    every_cell = json.loads(path.read_text(encoding="utf-8"))["cells"]
    shared = set(dir(builtins)) | _defined(source(cells(path)[0]))
    known: set[str] = set(shared)
    for cell in every_cell:
        text = source(cell)
        if cell["cell_type"] == "markdown" and text.startswith("## "):
            known = set(shared)
        elif cell["cell_type"] == "code":
            known |= _defined(text)
            assert not _used(text) - known, f"{cell['id']} uses {_used(text) - known} of another section"


def _defined(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _used(text: str) -> set[str]:
    return {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
