"""`labkit check --all DIR`: every exercise of every learner, as a table for an instructor.

A learner's functions are found in their notebooks and run in a process of their own, one a notebook: what one of them
does to its process, or how it hangs, touches no other. The cells are not run, only the first, imports, and what an
exercise's function needs (`cells.py` has the rule); and the learner's code is run as the instructor's user, so use it
on people whose code you would run anyway.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

from labkit.show.words import say

#: Seconds for a notebook: each exercise may hang once in each of two limits.
LIMIT = 300
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
            [sys.executable, "-m", "labkit.checks.grade", str(notebook.absolute())],
            capture_output=True, text=True, timeout=LIMIT, check=False, cwd=notebook.parent,  # its modules lie there
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


def main(notebook: str) -> None:
    """Grade one notebook in this process, and print the rows as JSON."""
    from labkit.checks.cells import written
    from labkit.checks.exercises import get
    from labkit.checks.judge import judge

    rows = []
    for found in written(Path(notebook)):
        if found.why:
            rows.append((found.exercise, "not_graded", "", found.why))
        elif not get(found.exercise).is_shipped(found.fn):
            verdict = judge(get(found.exercise), found.fn)
            rows.append((found.exercise, verdict.kind, verdict.where, "; ".join(verdict.lines[:3])))
    print("\n" + json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
