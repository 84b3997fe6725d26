"""The functions in a notebook, without running it.

The first code cell is run, and every import. Of the rest only what an exercise's function names, directly or through
what that names: helpers, classes, and values, however they are made. Ranks are not launched meanwhile. What is left out
by this rule is left out silently, since nothing depends on it; what could not be run, but is needed, is named.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import dis
import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import nbformat

import labkit
from labkit.checks.exercises import NAMES
from labkit.show.words import say

#: What launches ranks, or is nothing without a learner who looks on.
_LEFT_OUT = ("run", "check", "hint", "solution", "impostors")
#: Magics in front of Python that is meant to take effect: they go, what follows stays.
_IN_FRONT = re.compile(r"\A\s*%%(?:time|capture)\b.*\n|^[ \t]*%time[ \t]+", re.MULTILINE)


class LeftOut(RuntimeError):
    """Something that is not done while a notebook is read."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of a cell, and the names that it binds, imports, changes in place and looks up."""

    code: CodeType
    binds: frozenset[str]
    changes: frozenset[str]
    reads: frozenset[str]
    imports: bool


@dataclass(frozen=True, slots=True)
class Written:
    """An exercise in a notebook: what stands under its name, or why that could not be had."""

    exercise: str
    fn: Any = None
    why: str = ""


def written(notebook: Path) -> Iterator[Written]:
    """Each exercise that the notebook defines, once, as its last definition has it.

    What its function looks up is as it was when the cell ended, so use each before asking for the next.

    Raises:
        Exception: Whatever the first code cell raises.
    """
    cells = [c.source for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"]
    parsed = [_statements(source) for source in cells]
    last = {name: n for n, source in enumerate(cells) for name in _defined(source, parsed[n])}
    if parsed and parsed[0] is None:
        raise SyntaxError("the first code cell is not Python")
    flat = [s for cell in parsed for s in cell or ()]
    wanted = _closure(set(last), flat, changes=True)
    needs = {name: _closure({name}, flat) for name in last}
    names: dict[str, Any] = {"__name__": "__main__", "get_ipython": _refuse}
    failed: dict[str, str] = {}
    for n, cell in enumerate(parsed):
        with _nothing_launched():
            for statement in cell or ():
                if n == 0 or statement.imports or (statement.binds | statement.changes) & wanted:
                    _run(statement, names, failed, strict=n == 0)
        for name in (name for name, place in last.items() if place == n):
            lacking = next((f"{x}: {failed[x]}" for x in failed if x in needs[name]), "")
            if cell is None:
                yield Written(name, why=say("grade.unfinished"))
            elif lacking:
                yield Written(name, why=say("grade.lacks", what=lacking))
            elif not callable(names.get(name)):
                yield Written(name, why=say("grade.no_function", name=name))
            else:
                yield Written(name, names[name])


def _statements(source: str) -> list[Statement] | None:
    """A cell taken apart; ``None`` if it is no Python, such as one that its learner has not finished."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        tree = ast.parse(TransformerManager().transform_cell(_IN_FRONT.sub("", source)))
        return [_statement(node) for node in tree.body]
    except (SyntaxError, ValueError):
        return None


def _statement(node: ast.stmt) -> Statement:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(ast.Module([node], []), "<cell>", "exec", flags, dont_inherit=True)
    binds = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_NAME", "STORE_GLOBAL")}
    inside = [i for c in _nested(code) for i in dis.get_instructions(c)]
    reads = {i.argval for i in inside if i.opname.startswith(("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GL"))}
    changes = {root for n in ast.walk(node) if (root := _changed(n))}
    imports = isinstance(node, (ast.Import, ast.ImportFrom))
    return Statement(code, frozenset(binds), frozenset(changes), frozenset(reads), imports)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _nested(inner)


def _changed(node: ast.AST) -> str | None:
    """The name behind `x[0] = …`, `x.y = …` and `x.append(…)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        inner: ast.AST = node.func
    elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        inner = node
    else:
        return None
    while isinstance(inner, (ast.Subscript, ast.Attribute)):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) else None


def _defined(source: str, cell: list[Statement] | None) -> set[str]:
    """The exercises that a cell defines, or would if it were Python."""
    if cell is None:
        return {name for name in NAMES if re.search(rf"^\s*(?:async\s+)?def\s+{name}\b", source, re.MULTILINE)}
    return {name for statement in cell for name in statement.binds if name in NAMES}


def _closure(names: set[str], statements: Collection[Statement], changes: bool = False) -> frozenset[str]:
    """These names and those that they rest on, but no modules; with `changes`, also what is used to change them."""
    skipped = {name for s in statements if s.imports for name in s.binds} | set(dir(builtins))
    known: set[str] = set()
    while new := names - known:
        known |= new
        used = [s for s in statements if s.binds & new or (changes and s.changes & new)]
        names = names.union(*(s.reads - skipped for s in used))
    return frozenset(known)


def _run(statement: Statement, names: dict[str, Any], failed: dict[str, str], strict: bool) -> None:
    """Run a statement as a notebook does, or note what is not bound for it."""
    try:
        result = eval(statement.code, names)
        if inspect.iscoroutine(result):  # a cell may await
            asyncio.run(result)
    except LeftOut as error:
        failed.update(dict.fromkeys(statement.binds, str(error)))
    except (Exception, SystemExit) as error:
        if strict:
            raise
        failed.update(dict.fromkeys(statement.binds, f"{type(error).__name__}: {error}"))
    else:
        for name in statement.binds:
            failed.pop(name, None)


@contextlib.contextmanager
def _nothing_launched() -> Iterator[None]:
    kept = {name: getattr(labkit, name) for name in _LEFT_OUT}
    try:
        for name in _LEFT_OUT:
            setattr(labkit, name, _refuse)
        yield
    finally:
        for name, value in kept.items():
            setattr(labkit, name, value)


def _refuse(*_: Any, **__: Any) -> Any:
    raise LeftOut(say("grade.left_out"))
