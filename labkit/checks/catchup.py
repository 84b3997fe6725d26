"""`labkit catchup NN`: put solutions where a chapter's exercises are still unwritten, for who comes late to a class."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import shutil
import tokenize
from pathlib import Path
from typing import Any

import nbformat
from nbformat.sign import NotebookNotary

from labkit.checks.exercises import NAMES, get


def fill(notebook: Path) -> list[str]:
    """Write solutions into the stubs of a notebook; what is written already stays. Returns the exercises filled.

    Comments and notes in a stub are kept, above the solution. An exercise that is written anywhere in the notebook is
    not filled elsewhere.

    Raises:
        ValueError: The file is no notebook.
    """
    text = notebook.read_text(encoding="utf-8", errors="replace")
    try:
        page = nbformat.reads(text, as_version=4)
        cells = [cell for cell in page.cells if cell.cell_type == "code"]
    except Exception as error:  # no JSON, or JSON of something else: nbformat raises whatever it meets
        raise ValueError(f"{notebook} is no notebook that can be read: {_first_line(error)}") from None
    own = {node.name for cell in cells for node in _exercises(cell.source) if not _is_stub(node)}
    done = []
    for cell in cells:
        stubs = [node for node in _exercises(cell.source) if _is_stub(node) and node.name not in own]
        if stubs:
            cell.source = _filled(cell.source, stubs)
            cell.outputs, cell.execution_count = [], None
            done += [node.name for node in stubs]
    if done:
        _replace(notebook.resolve(), text, page)
    return done


def _exercises(source: str) -> list[ast.FunctionDef]:
    """The functions of exercises in a cell, whose magics are passed over; none if it is no Python."""
    for text in (source, re.sub(r"^([ \t]*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)):
        try:
            return [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name in NAMES]
        except SyntaxError:
            continue
    return []


def _is_stub(node: ast.FunctionDef) -> bool:
    """Whether a function does nothing but say that it is not written."""
    *before, last = node.body
    only_says = all(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in before)
    return only_says and isinstance(last, ast.Raise) and "NotImplementedError" in ast.unparse(last)


def _filled(source: str, stubs: list[ast.FunctionDef]) -> str:
    """The cell with solutions in place of its stubs."""
    lines = source.splitlines()
    for node in reversed(stubs):
        stub = lines[node.lineno - 1 : node.end_lineno]
        solution = inspect.getsource(get(node.name).solution).rstrip().splitlines()
        lines[node.lineno - 1 : node.end_lineno] = [*_notes(node, stub), *solution]
    return "\n".join(lines)


def _notes(node: ast.FunctionDef, stub: list[str]) -> list[str]:
    """What a learner noted in a stub, as comments."""
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(stub) + "\n").readline)
    comments = [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
    said = [n for n in node.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    strings = [(n.lineno - node.lineno + 1, f"# {line.strip()}") for n in said if isinstance(n.value, ast.Constant)
               and isinstance(n.value.value, str) for line in n.value.value.strip().splitlines()]  # fmt: skip
    return [text for _, text in sorted([*comments, *strings], key=lambda note: note[0])]


def _replace(target: Path, before: str, page: Any) -> None:
    """The new notebook in place of the old in one step, and trusted by Jupyter if the old was: else no output steps."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(nbformat.writes(page) + "\n")
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, beside)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a home that cannot be written
        notary = NotebookNotary()
        if notary.check_signature(nbformat.reads(before, as_version=4)):
            notary.sign(page)
        notary.store.close()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
