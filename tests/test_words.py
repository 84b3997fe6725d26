"""One table of words: nothing a learner reads stands in the code, and the code and the table agree."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from labkit.show import words

SHOW = Path(words.__file__).parent
SOURCES = sorted([*SHOW.glob("*.py"), *SHOW.parent.joinpath("checks").rglob("*.py")])
PROSE = re.compile(r"[^\W\d_]{2,}[,;:]? +[^\W\d_]{2,}|^[A-Z][a-z]+[.!?]?$")
#: Families of keys that the code builds: the part before the braces, and what may stand in them.
BUILT = {"trace.column_": None, "player.": None}


@cache
def trees():
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES]


def exempt(tree: ast.Module) -> set[int]:
    """Docstrings, what is raised (exceptions stay English), and annotations."""
    found: set[int] = set()
    for node in ast.walk(tree):
        inside: list[ast.AST] = []
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "Wrong"):
            inside = [node]
        elif isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            inside = [node.body[0]]
        elif isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id in ("hint", "HINT", "__all__", "_HOME") for t in node.targets
        ):
            inside = [node]  # a part of what is raised; names
        found |= {id(n) for one in inside for n in ast.walk(one)}
    return found


def literals(tree: ast.Module) -> list[tuple[int, str]]:
    skip = exempt(tree)
    return [(n.lineno, n.value) for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in skip]  # fmt: skip


def prose(tree: ast.Module) -> list[tuple[int, str]]:
    return [
        (line, value) for line, value in literals(tree) if PROSE.search(re.sub(r"<[^>]*>|[\w-]*-[\w-]*", "", value))
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_no_words_stand_in_the_code(path):
    found = prose(ast.parse(path.read_text(encoding="utf-8")))
    allowed = {"export default { render };"}  # JavaScript
    assert [(line, text) for line, text in found if text not in allowed] == []


def test_the_test_above_sees_prose():
    for bad in ('x = "no message came"', 'x = f"{n} messages sent"', 'text(0, 0, "Waiting")', 'y = "<p>Two words</p>"'):
        assert prose(ast.parse(bad)), bad
    for good in ('"""Doc string here."""', 'raise ValueError("two words")', 'el("g", class_="lk-a lk-b")', 'x = "end"'):
        assert not prose(ast.parse(good)), good


def used() -> dict[str, set[str] | None]:
    """Key → the placeholders given in code; ``None`` where they are built."""
    found: dict[str, set[str] | None] = {}
    for _, tree in trees():
        for node in ast.walk(tree):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("say", "count")
            ):
                continue
            given = {k.arg for k in node.keywords if k.arg}
            if any(k.arg is None for k in node.keywords):
                given = None
            for key in keys(node.args[0]):
                for full in (key,) if node.func.id == "say" else (f"{key}.one", f"{key}.other"):
                    found[full] = None if given is None else given | ({"n"} if node.func.id == "count" else set())
    return found


def keys(node: ast.AST) -> list[str]:
    """The keys that an argument may be: a constant, one of two, or a family."""
    if isinstance(node, ast.Constant):
        return [node.value]
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        family = node.values[0].value
        assert family in BUILT, f"a key built from {family!r}: list it in BUILT"
        return [k for k in words.table("en") if k.startswith(family)]
    if isinstance(node, ast.IfExp):
        return keys(node.body) + keys(node.orelse)
    if isinstance(node, ast.Name):  # a variable: what it is assigned stands in the same file
        return []
    raise AssertionError(ast.dump(node))


def mentioned() -> set[str]:
    """Every literal that is a key, wherever it stands (a key may be chosen before it is looked up)."""
    table = words.table("en")
    return {value for _, tree in trees() for _, value in literals(tree) if value in table}


def test_every_key_that_is_used_exists():
    assert sorted(set(used()) - set(words.table("en"))) == []


def test_every_key_is_used():
    assert sorted(set(words.table("en")) - set(used()) - mentioned()) == []


def test_placeholders_agree():
    for key, given in used().items():
        if given is not None:
            assert words.placeholders(words.table("en")[key]) == given, key


@pytest.mark.parametrize("path", sorted(words.FOLDER.glob("*.toml")), ids=lambda p: p.stem)
def test_every_language_has_the_same_keys_and_placeholders(path):
    english, other = words.table("en"), words.table(path.stem)
    optional = {k for k in english if k.endswith(".one")}  # a language may know one form only
    assert set(english) - set(other) <= optional
    assert set(other) <= set(english)
    for key, text in other.items():
        assert words.placeholders(text) == words.placeholders(english[key]), key


def test_a_missing_key_is_named_with_its_neighbours():
    with pytest.raises(ValueError, match=r"no words under 'trace.rnak' in en.toml; near it: trace.rank"):
        words.say("trace.rnak")


def test_missing_and_surplus_values_are_named():
    with pytest.raises(ValueError, match=r"'trace.rank' in en.toml asks for \['rank'\], but was given \[\]"):
        words.say("trace.rank")
    with pytest.raises(ValueError, match=r"asks for \[\], but was given \['n'\]"):
        words.say("finding.nothing", n=1)


def test_an_unknown_language_is_named(monkeypatch):
    monkeypatch.setenv("LABKIT_LANG", "xx")
    with pytest.raises(ValueError, match="LABKIT_LANG is 'xx', but the words exist in en only"):
        words.say("finding.nothing")


def test_the_language_is_chosen_by_the_environment(monkeypatch, tmp_path):
    (tmp_path / "de.toml").write_text('[trace]\nrank = "Rang {rank}"\n[trace.messages]\nother = "{n} Nachrichten"')
    monkeypatch.setattr(words, "FOLDER", tmp_path)
    monkeypatch.setenv("LABKIT_LANG", "de")
    assert words.say("trace.rank", rank=1) == "Rang 1"
    assert words.count("trace.messages", 1) == "1 Nachrichten"
    words.table.cache_clear()
