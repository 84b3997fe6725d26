"""`labkit catchup NN`: put solutions where a chapter's exercises are still unwritten, for who comes late to a class."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import shutil
import stat
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
        ValueError: The file is no notebook, or is read-only; or a cell was left as it is, since a solution would not
            have been all that changed there. Other cells are filled then.
    """
    text = notebook.read_text(encoding="utf-8", errors="replace")
    try:
        page = nbformat.reads(text, as_version=4)
        cells = [cell for cell in page.cells if cell.cell_type == "code"]
    except Exception as error:  # no JSON, or JSON of something else: nbformat raises whatever it meets
        raise ValueError(f"{notebook} is no notebook that can be read: {_first_line(error)}") from None
    own = {node.name for cell in cells for node in _exercises(cell.source) if not _is_stub(node)}
    done, left = [], []
    for cell in cells:
        stubs = [node for node in _exercises(cell.source) if _is_stub(node) and node.name not in own]
        filled, names = _filled(cell.source, stubs), [node.name for node in stubs]
        if stubs and not _only_these_differ(cell.source, filled, names):
            left += names
        elif stubs:
            cell.source = filled
            cell.outputs, cell.execution_count = [], None
            done += names
    if done:
        _replace(notebook.resolve(), text, page)
    if left:
        hint = f"; filled were {', '.join(done)}: reload the notebook" if done else ""
        raise ValueError(f"{notebook}: {', '.join(left)} left as written, a solution does not fit in there{hint}")
    return done


def _parsed(source: str) -> ast.Module | None:
    """A cell, whose magics are passed over; ``None`` if it is no Python."""
    for text in (source, re.sub(r"^([ \t]*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            continue
    return None


def _exercises(source: str) -> list[ast.FunctionDef]:
    """The functions of exercises in a cell."""
    tree = _parsed(source)
    return [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in NAMES] if tree else []


def _only_these_differ(before: str, after: str, names: list[str]) -> bool:
    """Whether a cell still compiles, with all that it held but for these functions, which are written now."""
    old, new = _parsed(before), _parsed(after)
    if old is None or new is None or any(_is_stub(n) for n in _exercises(after) if n.name in names):
        return False
    try:
        compile(new, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    kept = [[ast.dump(n) for n in tree.body if getattr(n, "name", "") not in names] for tree in (old, new)]
    return kept[0] == kept[1]


def _is_stub(node: ast.FunctionDef) -> bool:
    """Whether a function does nothing but say that it is not written; or is a frame of such functions and classes."""
    match _but_notes(node):
        case [last]:
            return isinstance(last, ast.Raise) and "NotImplementedError" in ast.unparse(last)
        case [*frame, last]:
            return isinstance(last, ast.Return) and all(map(_is_unwritten, frame))
    return False


def _is_unwritten(node: ast.stmt) -> bool:
    """A stub in a frame, or a class of stubs."""
    if isinstance(node, ast.ClassDef):
        return bool(bodies := _but_notes(node)) and all(map(_is_unwritten, bodies))
    return isinstance(node, ast.FunctionDef) and _is_stub(node)


def _but_notes(node: ast.FunctionDef | ast.ClassDef) -> list[ast.stmt]:
    return [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]


def _filled(source: str, stubs: list[ast.FunctionDef]) -> str:
    """The cell with solutions in place of its stubs."""
    lines = _lines(source)
    for node in reversed(stubs):
        stub = lines[node.lineno - 1 : node.end_lineno]
        solution = inspect.getsource(get(node.name).solution).rstrip().split("\n")
        lines[node.lineno - 1 : node.end_lineno] = [*_notes(node, stub), *solution]
    return "\n".join(lines)


def _lines(source: str) -> list[str]:
    """As Python counts them; `str.splitlines` would split at a form feed, and inside of strings."""
    return re.split("\r\n?|\n", source)


def _notes(node: ast.FunctionDef, stub: list[str]) -> list[str]:
    """What a learner noted in a stub, as comments."""
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(stub) + "\n").readline)
    comments = [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
    said = [n for n in node.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    strings = [(n.lineno - node.lineno + 1, f"# {line.strip()}") for n in said if isinstance(n.value, ast.Constant)
               and isinstance(n.value.value, str) for line in n.value.value.strip().splitlines()]  # fmt: skip
    return [text for _, text in sorted([*comments, *strings], key=lambda note: note[0])]


def _replace(target: Path, before: str, page: Any) -> None:
    """The new notebook in place of the old in one step, and trusted by Jupyter if the old was: else no output steps.

    Raises:
        ValueError: The old one is read-only, which its replacement would not notice.
    """
    if not (target.stat().st_mode & stat.S_IWUSR and os.access(target, os.W_OK)):
        raise ValueError(f"{target} is read-only: make it writable first (chmod u+w), or work on a copy")
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
