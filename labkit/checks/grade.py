"""`labkit check --all DIR`: every exercise of every learner, as a table for an instructor.

A learner's functions are found in their notebooks and run in a process of their own, one a notebook: what one of them
does to its process, or how it hangs, touches no other. The cells are not run, only the first, imports, and what an
exercise's function needs (`cells.py` has the rule); and the learner's code is run as the instructor's user, so use it
on people whose code you would run anyway.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from labkit.show.words import say

#: Seconds for a notebook: each exercise may hang once in each of two limits.
LIMIT = 300
MOST_PRINTED = 50_000_000  #: bytes
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
    with tempfile.TemporaryDirectory() as folder:
        rows, printed = Path(folder, "rows.json"), Path(folder, "printed")
        why = _run(notebook, rows, printed) or _last_line(printed) or say("grade.ended")
        try:
            known = _well_formed(json.loads(rows.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):  # the process ended, or was ended, before it had them
            known = None
    return [("", "not_graded", "", why)] if known is None else known


def _run(notebook: Path, rows: Path, printed: Path) -> str:
    """Grade a notebook in a process of its own, which writes `rows`; returns why it was ended, if it was.

    What it starts may hold its streams and outlive it, so none of them is a pipe, and its process group goes as well.
    """
    with open(printed, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "labkit.checks.grade", str(notebook.absolute()), str(rows)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            cwd=notebook.parent,  # its modules lie there
        )  # fmt: skip
    end = time.monotonic() + LIMIT
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                return ""
            if printed.stat().st_size > MOST_PRINTED:
                return say("grade.much", limit=MOST_PRINTED // 10**6)
            if time.monotonic() > end:
                return say("grade.long", limit=LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(printed: Path) -> str:
    """The last line of what a process said at its end, an exception's as a rule."""
    with open(printed, "rb") as file:
        file.seek(max(0, printed.stat().st_size - 10_000))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _well_formed(found: Any) -> list[tuple[str, str, str, str]] | None:
    """The rows, if that is what they are: a learner's code may have come between."""
    if not isinstance(found, list):
        return None
    whole = all(isinstance(row, list) and len(row) == 4 and all(isinstance(v, str) for v in row) for row in found)
    return [tuple(v.encode(errors="replace").decode() for v in row) for row in found] if whole else None


def main(notebook: str, target: str) -> None:
    """Grade one notebook in this process, and write the rows as JSON, in one step."""
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
    beside = Path(target + ".new")
    beside.write_text(json.dumps(rows), encoding="utf-8")
    beside.replace(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # a learner's threads might not end
