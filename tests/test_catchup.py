"""Solutions for who comes late: in stubs only, and right."""

from __future__ import annotations

import nbformat

from labkit.checks.catchup import fill
from labkit.checks.cells import written
from labkit.checks.exercises import NAMES, get
from labkit.checks.judge import judge
from labkit.cli import main


def test_stubs_are_filled_and_what_is_written_stays(tmp_path, capsys):
    assert main(["catchup", "02", "--dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "ring_reduce_scatter" in told
    assert "exchange" not in told.split(": ")[-1], "it is written, if wrong"
    functions = {found.exercise: found.fn for found in written(tmp_path / "02_collectives.ipynb")}
    assert set(functions) == set(NAMES)
    assert judge(get("tree_broadcast"), functions["tree_broadcast"]).right
    assert fill(tmp_path / "02_collectives.ipynb") == []
    page = nbformat.read(tmp_path / "02_collectives.ipynb", as_version=4)
    assert sum('labkit.check("' in c.source for c in page.cells if c.cell_type == "code") == len(NAMES)
