"""Solutions for who comes late: in stubs only, and right."""

from __future__ import annotations

import ast
import os

import nbformat
import pytest
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.checks import catchup
from labkit.checks.catchup import fill
from labkit.checks.cells import written
from labkit.checks.exercises import NAMES, get
from labkit.checks.judge import judge
from labkit.cli import main

pytestmark = pytest.mark.usefixtures("jupyter_home")  # signatures


def save(path, *cells):
    nbformat.write(new_notebook(cells=[new_markdown_cell("# hello"), *(new_code_cell(c) for c in cells)]), path)
    return path


def sources(path):
    return [c.source for c in nbformat.read(path, as_version=4).cells]


def test_stubs_are_filled_and_what_is_written_stays(tmp_path, capsys):
    assert main(["catchup", "02", "--dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "ring_reduce_scatter" in told
    assert "exchange" not in told, "it is written, if wrong"
    assert "Reload Notebook from Disk" in told
    functions = {found.exercise: found.fn for found in written(tmp_path / "02_collectives.ipynb")}
    of_02 = {name for name, chapter in NAMES.items() if chapter == "02"}
    assert set(functions) == of_02
    assert judge(get("tree_broadcast"), functions["tree_broadcast"]).right
    assert fill(tmp_path / "02_collectives.ipynb") == []
    page = nbformat.read(tmp_path / "02_collectives.ipynb", as_version=4)
    assert sum('labkit.check("' in c.source for c in page.cells if c.cell_type == "code") == len(of_02)


def test_two_stubs_in_one_cell_and_magics_beside_them(tmp_path):
    stubs = [f"def {name}(tensor):\n    raise NotImplementedError('later')" for name in ("barrier", "ring_all_gather")]
    both = "\n".join(["%load_ext x", stubs[0], "n = 3", "!ls", stubs[1], "last = 1"])
    path = save(tmp_path / "a.ipynb", both)
    assert fill(path) == ["barrier", "ring_all_gather"]
    source = sources(path)[1]
    assert "NotImplementedError" not in source
    lines = source.splitlines()
    assert (lines[0], lines[-1]) == ("%load_ext x", "last = 1")
    assert (
        lines.index("n = 3") + 1
        == lines.index("!ls")
        == next(n for n, x in enumerate(lines) if "def ring_all" in x) - 1
    )


def test_what_a_learner_noted_in_a_stub_is_kept(tmp_path):
    path = save(
        tmp_path / "a.ipynb",
        '''# above
def barrier():  # beside
    """First up the tree,
    then down."""
    # "inside", with a # twice
    raise NotImplementedError  # at the end
    # below
# under''',
    )
    assert fill(path) == ["barrier"]
    lines = sources(path)[1].splitlines()
    assert lines[:7] == ["# above", "# beside", "# First up the tree,", "# then down.", '# "inside", with a # twice',
                         "# at the end", "def barrier() -> None:"]  # fmt: skip
    assert lines[-2:] == ["    # below", "# under"]
    compile("\n".join(lines), "cell", "exec")


@pytest.mark.parametrize("odd", ["\u2028", "\u0085", "\x0c", "\x1c", "\r"])
def test_nothing_beside_a_stub_is_lost_to_odd_characters(tmp_path, odd):
    first, last = f'first = """a{odd}b"""  # {odd}', f'last = """a{odd}{odd}b"""'
    stub = f'def barrier():\n    """Up,{odd}then down."""\n    raise NotImplementedError'
    path = save(tmp_path / "a.ipynb", f"{first}\n{stub}\n{last}")
    assert fill(path) == ["barrier"]
    values = [ast.literal_eval(n.value) for n in ast.parse(sources(path)[1]).body if isinstance(n, ast.Assign)]
    assert values == [f"a{odd}b".replace("\r", "\n"), f"a{odd}{odd}b".replace("\r", "\n")]
    assert "NotImplementedError" not in sources(path)[1]


def test_a_cell_into_which_a_solution_does_not_fit_is_left(tmp_path, monkeypatch):
    stubs = [f"def {name}():\n    raise NotImplementedError" for name in ("barrier", "tree_broadcast")]
    path = save(tmp_path / "a.ipynb", *stubs)
    whole = catchup._filled
    monkeypatch.setattr(catchup, "_filled", lambda s, n: whole(s, n) + (")" if "barrier" in s else ""))
    with pytest.raises(ValueError, match=r"barrier left as written.*filled were tree_broadcast"):
        fill(path)
    assert sources(path)[1] == stubs[0]
    assert "NotImplementedError" not in sources(path)[2]


@pytest.mark.parametrize("after", ["def f(: pass", "x = 2", "", "x = 1\nreturn"])
def test_only_a_solution_may_differ(after):
    stub = "def barrier():\n    raise NotImplementedError\n"
    assert catchup._only_these_differ(stub + "x = 1", "def barrier():\n    return\nx = 1", ["barrier"])
    assert not catchup._only_these_differ(stub + "x = 1", "def barrier():\n    return\n" + after, ["barrier"])
    assert not catchup._only_these_differ(stub + "x = 1", stub + "x = 1", ["barrier"])


def test_a_read_only_notebook_is_refused(tmp_path):
    path = save(tmp_path / "a.ipynb", "def barrier():\n    raise NotImplementedError")
    path.chmod(0o444)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="is read-only: make it writable"):
        fill(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("cells", [
    ["def barrier():\n    x = 1\n    raise NotImplementedError"],
    ["def barrier():\n    return"],
    ["def barrier():\n    raise ValueError"],
    ["def barrier(:\n    raise NotImplementedError"],
    ["def barrier():\n    return 'mine'", "def barrier():\n    raise NotImplementedError"],
    ["def mine():\n    raise NotImplementedError"],
])  # fmt: skip
def test_what_is_written_is_not_touched(tmp_path, cells):
    path = save(tmp_path / "a.ipynb", *cells)
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert fill(path) == []
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_only_the_stubs_cell_loses_its_output_and_trust_is_kept(tmp_path):
    old = [new_output("stream", text="old")]
    code = ("def mine():\n    pass", "def barrier():\n    raise NotImplementedError")
    page = new_notebook(cells=[new_code_cell(c, outputs=old) for c in code])
    for trusted in (True, False):
        page.metadata["trusted_here"] = trusted  # the two differ, so one's signature is not the other's
        path = tmp_path / f"{trusted}.ipynb"
        nbformat.write(page, path)
        path.chmod(0o640)
        if trusted:
            NotebookNotary().sign(nbformat.read(path, as_version=4))
        assert fill(path) == ["barrier"]
        after = nbformat.read(path, as_version=4)
        assert [len(c.outputs) for c in after.cells] == [1, 0]
        assert NotebookNotary().check_signature(after) is trusted
        assert path.stat().st_mode & 0o777 == 0o640


def test_a_write_that_fails_leaves_the_notebook_whole(tmp_path, monkeypatch):
    path = save(tmp_path / "a.ipynb", "def barrier():\n    raise NotImplementedError")
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catchup.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fill(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.ipynb"]


@pytest.mark.parametrize(
    "text", ["<<<<<<< HEAD\n{", "", "[1, 2]", '"text"', '{"cells": 3, "nbformat": 4}', "{}", "\0\xff"]
)
def test_a_file_that_is_no_notebook_is_named(tmp_path, capsys, text):
    (tmp_path / "02_collectives.ipynb").write_text(text, encoding="latin-1")
    assert main(["catchup", "02", "--dir", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "02_collectives.ipynb is no notebook" in told
    assert (tmp_path / "02_collectives.ipynb").read_text(encoding="latin-1") == text
