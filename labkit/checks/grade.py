"""`labkit check --all DIR`: every exercise of every learner, as a table for an instructor.

A learner's functions are found in their notebooks and run in a process of their own, one a notebook: what one of them
does to its process, or how it hangs, touches no other. The cells are not run, only the set-up cell, imports and
functions; and the learner's code is run as the instructor's user, so use it on people whose code you would run anyway.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.checks.exercises import NAMES
from labkit.show.words import say

#: Seconds for a notebook: each exercise may hang once in each of two limits.
LIMIT = 300
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)
COLUMNS = ("learner", "notebook", "exercise", "verdict", "where", "seen")


def table(folder: Path) -> str:
    """CSV: a row for each exercise that somebody has attempted.

    Args:
        folder: Holds a folder a learner, with notebooks at any depth, or notebooks themselves.

    Raises:
        ValueError: There is no such folder, or no notebook in it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: expected one with a working copy a learner")
    notebooks = [p for p in sorted(folder.rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts]
    if not notebooks:
        raise ValueError(f"there is no notebook in {folder}")
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    writer.writerow(COLUMNS)
    for notebook in notebooks:
        learner = notebook.relative_to(folder).parts[0].removesuffix(".ipynb")
        writer.writerows((learner, notebook.name, *row) for row in _graded(notebook))
    return page.getvalue()


def _graded(notebook: Path) -> list[tuple[str, str, str, str]]:
    """Exercise, verdict, where, what was seen; of a notebook that cannot be graded one row that says why."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "labkit.checks.grade", str(notebook)],
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [("", "not_graded", "", say("grade.long", limit=LIMIT))]
    try:
        rows = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (IndexError, ValueError):  # its set-up cell ended the process, or printed last
        rows = None
    if rows is None:
        told = done.stderr.strip().splitlines()
        return [("", "not_graded", "", told[-1] if told else say("grade.ended"))]
    return [tuple(row) for row in rows]


def functions(notebook: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Exercise name → the namespace in which its function was defined, for each that the notebook defines."""
    cells = [c for c in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    sources = ["".join(c["source"]) for c in cells]
    names: dict[str, Any] = {"__name__": "__main__"}
    if sources:
        exec(compile(sources[0], "<set-up cell>", "exec"), names)
    for source in sources[1:]:
        with contextlib.suppress(Exception):  # a cell that its learner has not finished
            tree = ast.parse(source)
            kept: list[ast.stmt] = [n for n in tree.body if isinstance(n, _KEPT) and not _runs(n)]
            exec(compile(ast.Module(kept, []), "<cell>", "exec"), names)  # what others may use: helpers, imports
            for node in kept:
                if isinstance(node, ast.FunctionDef) and node.name in NAMES:
                    yield node.name, names


def _runs(node: ast.stmt) -> bool:
    """Whether an assignment calls something: cells are not run."""
    return isinstance(node, ast.Assign) and any(isinstance(n, ast.Call) for n in ast.walk(node))


def main(notebook: str) -> None:
    """Grade one notebook in this process, and print the rows as JSON."""
    from labkit.checks.exercises import get
    from labkit.checks.judge import judge

    rows = []
    for name, space in functions(Path(notebook)):
        verdict = judge(get(name), space[name])
        rows.append((name, verdict.kind, verdict.where, "; ".join(verdict.lines[:3])))
    print("\n" + json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
