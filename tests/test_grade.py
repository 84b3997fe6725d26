"""An instructor's table, from the notebooks of several learners; and what of a notebook is run for it."""

from __future__ import annotations

import csv
import io
import time

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

import labkit
from labkit.checks import grade
from labkit.checks.cells import written
from labkit.cli import main

SET_UP = "import torch\nimport torch.distributed as dist\nimport labkit\nraised = []"
RIGHT = """
def exchange(tensor):
    theirs = torch.empty_like(tensor)
    for work in [dist.isend(tensor, dist.get_rank() ^ 1), dist.irecv(theirs, dist.get_rank() ^ 1)]:
        work.wait()
    return theirs

labkit.check("exchange", exchange)
raise RuntimeError("cells are not run, only their functions")
"""
STUB = "def barrier():\n    raise NotImplementedError\n\nlabkit.check('barrier', barrier)"


def save(folder, name, *cells):
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[new_code_cell(c) for c in cells]), folder / name)
    return folder / name


@pytest.mark.soak
def test_a_row_an_exercise_and_learner(tmp_path, capsys):
    save(tmp_path / "ada", "02_collectives.ipynb", SET_UP, RIGHT, STUB, "def half(:")
    wrong = SET_UP + RIGHT.replace("return theirs", "return tensor").split("labkit.check")[0]
    save(tmp_path / "bob" / "work", "02_collectives.ipynb", "import labkit", "from mine import exchange")
    (tmp_path / "bob" / "work" / "mine.py").write_text(wrong)  # a learner's own module lies beside the notebook
    save(tmp_path / "eve", "02_collectives.ipynb", "import no_such_module")
    (tmp_path / "zoe").mkdir()
    (tmp_path / "zoe" / "02_collectives.ipynb").write_text("<<<<<<< HEAD")
    assert main(["check", "--all", str(tmp_path)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(r["learner"], r["exercise"], r["verdict"]) for r in rows] == [
        ("ada", "exchange", "right"), ("ada", "barrier", "not_attempted"), ("bob", "exchange", "wrong"),
        ("eve", "", "not_graded"), ("zoe", "", "not_graded"),
    ]  # fmt: skip
    assert rows[2]["where"] == "world 2, 2 elements"
    assert "no_such_module" in rows[3]["seen"]
    assert "does not appear to be JSON" in rows[4]["seen"]


def test_folders_without_notebooks(tmp_path, capsys):
    with pytest.raises(ValueError, match="no notebook"):
        grade.table(tmp_path)
    assert main(["check", "--all", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize(("first", "seen"), [
    ("print(4)\nraise SystemExit", "the notebook's first cell ended the process"),
    ("import sys\nwhile True: sys.stderr.write('x' * 100_000)", "printed more than 1 MB"),
])  # fmt: skip
def test_a_first_cell_that_ends_its_process(tmp_path, monkeypatch, first, seen):
    monkeypatch.setattr(grade, "MOST_PRINTED", 1_000_000)
    save(tmp_path / "ada", "a.ipynb", first, "def barrier(): return 7")
    assert grade.table(tmp_path).splitlines()[1:] == [f"ada,a.ipynb,,not_graded,,{seen}"]


@pytest.mark.soak
def test_what_a_notebook_starts_costs_no_time_and_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = "import subprocess, threading, time\nchild = subprocess.Popen(['sleep', '99'])\n"
    save(tmp_path / "ada", "a.ipynb", start + "open('pid', 'w').write(str(child.pid))\n"
         "threading.Thread(target=time.sleep, args=(99,)).start()")  # fmt: skip
    began = time.monotonic()
    assert grade.table(tmp_path).count("\n") == 1
    assert time.monotonic() - began < 50
    pid = int((tmp_path / "ada" / "pid").read_text())
    assert _is_gone(pid)


def _is_gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("found", [4, None, "rows", {"a": 1}, [4], ["abcd"], [["a", "b", "c"]], [["a", "b", "c", 4]]])
def test_only_rows_of_four_texts_are_rows(found):
    assert grade._well_formed(found) is None
    assert grade._well_formed([]) == []
    assert grade._well_formed([["a", "b", "", "\ud800"]]) == [("a", "b", "", "?")]


# What of a notebook is run


def calls(tmp_path, *cells):
    """What `barrier` gives in a notebook of these cells, or why there is none."""
    given = [(found.exercise, found.why or found.fn()) for found in written(save(tmp_path, "a.ipynb", SET_UP, *cells))]
    assert [name for name, _ in given] == ["barrier"]
    return given[0][1]


@pytest.mark.parametrize("cells", [
    ["%time x = 1\n!ls\nfiles = !ls\n%matplotlib inline\ndef barrier():\n    return 7"],
    ["%%time\ndef barrier():\n    return 7"],
    ["%%bash\necho 1", "def barrier(): return 7", "barrier?"],
    ["def made(n):\n    return [i + 7 for i in range(n)]", "table = made(4)", "def barrier(): return table[0]"],
    ["%time table = list(range(7, 9))\ndef barrier(): return table[0]"],
    ["table = []\nfor i in range(3):\n    table.append(i + 5)\ndef barrier(): return table[2]"],
    ["table = []", "def f(i): return i + 5", "for i in [2]: table.append(f(i))", "def barrier(): return table[0]"],
    ["table = {}\ntable[0] = int('7')\ndef barrier(): return table[0]"],
    ["a = b = int('3')\na += int('4')\ndef barrier(): return a"],
    ["class Ring:\n    size = int('7')", "ring = Ring()", "def barrier(): return ring.size"],
    ["if True:\n    def barrier(): return 7\nelse:\n    def barrier(): return 8"],
    ["try:\n    def barrier(): return 7\nfinally:\n    pass"],
    ["def loud(fn):\n    return lambda: fn() + 1", "@loud\ndef barrier(): return 6"],
    ["import functools", "@functools.cache\ndef barrier(): return 7"],
    ["barrier = lambda: 7"],
    ["async def seven(): return 7", "table = await seven()", "def barrier(): return table"],
    ["def barrier(): return 1", "def barrier(): return 7", "labkit.check('barrier', barrier)"],
    ["def barrier(): return 1\ndef barrier(): return helper()\ndef helper(): return 7"],
    ["def helper(): return 7", "def barrier(): return helper()", "def helper(): return 8"],
    ["raise RuntimeError", "labkit.run(print, ranks=2)", "def barrier(): return 7", "if 1: labkit.hint('barrier')"],
    ["value = labkit.run(print, ranks=2)", "value = int('7')", "def barrier(): return value"],
    ["run = labkit.run(print, ranks=2)", "def barrier():\n    run = 7\n    return run"],
    ["table = [7]\nfor n in table.copy():\n    labkit.run(print, n, ranks=2)", "def barrier(): return table[0]"],
])  # fmt: skip
def test_what_an_exercise_needs_is_run(tmp_path, cells):
    assert calls(tmp_path, *cells) == 7


@pytest.mark.parametrize(("cells", "why"), [
    (["value = labkit.run(print, ranks=2)", "def barrier(): return value"], "value: while notebooks are read"),
    (["def a(): return labkit.run(print)", "v = a()", "def b(): return v", "def barrier(): return b()"], "v: while"),
    (["files = !ls", "def barrier(): return files"], "files: while notebooks are read"),
    (["value = 1 / 0", "def barrier(): return value"], "value: ZeroDivisionError: division by zero"),
    (["import sys", "value = sys.exit(3)", "def barrier(): return value"], "value: SystemExit: 3"),
    (["def barrier(): return 7", "def barrier():\n    return (7"], "its cell is not Python yet"),
    (["def loud(fn): pass", "@loud\ndef barrier(): return 7"], "barrier is no function"),
    (["@lowd\ndef barrier(): return 7"], "barrier: NameError: name 'lowd' is not defined"),
])  # fmt: skip
def test_what_cannot_be_made_is_named(tmp_path, cells, why):
    assert why in calls(tmp_path, *cells)


def test_nothing_else_is_run_and_ranks_may_be_launched_afterwards(tmp_path):
    run = labkit.run
    marks = [f"open({str(tmp_path / name)!r}, 'w').close()" for name in "abc"]
    cells = [f"def b(): {marks[0]}\nx = b()", marks[1], f"with {marks[2][:-8]}: y = 1", "def barrier(): return 7"]
    assert calls(tmp_path, *cells) == 7
    assert {p.name for p in tmp_path.iterdir()} == {"a.ipynb"}
    assert labkit.run is run


def test_a_first_cell_that_is_not_python_is_named(tmp_path):
    with pytest.raises(SyntaxError, match="the first code cell"):
        list(written(save(tmp_path, "a.ipynb", "import (", "def barrier(): return 7")))
    assert list(written(save(tmp_path, "b.ipynb"))) == []


def test_a_right_function_and_a_stub(tmp_path, capsys):
    save(tmp_path / "ada", "02_collectives.ipynb", SET_UP, RIGHT, STUB, "def half(:")
    assert main(["check", "--all", str(tmp_path)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(r["learner"], r["exercise"], r["verdict"]) for r in rows] == [
        ("ada", "exchange", "right"), ("ada", "barrier", "not_attempted"),
    ]  # fmt: skip
