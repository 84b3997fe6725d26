"""An instructor's table, from the notebooks of several learners."""

from __future__ import annotations

import csv
import io

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit.checks import grade
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


def test_a_row_an_exercise_and_learner(tmp_path, capsys):
    save(tmp_path / "ada", "02_collectives.ipynb", SET_UP, RIGHT, STUB, "def half(:")
    save(tmp_path / "bob" / "work", "02_collectives.ipynb", SET_UP, RIGHT.replace("return theirs", "return tensor"))
    save(tmp_path / "eve", "02_collectives.ipynb", "import no_such_module")
    assert main(["check", "--all", str(tmp_path)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(r["learner"], r["exercise"], r["verdict"]) for r in rows] == [
        ("ada", "exchange", "right"), ("ada", "barrier", "not_attempted"), ("bob", "exchange", "wrong"),
        ("eve", "", "not_graded"),
    ]  # fmt: skip
    assert rows[2]["where"] == "world 2, 2 elements"
    assert "no_such_module" in rows[3]["seen"]


def test_folders_without_notebooks(tmp_path, capsys):
    with pytest.raises(ValueError, match="no notebook"):
        grade.table(tmp_path)
    assert main(["check", "--all", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err
