"""Impostors: each has one fault, it shows in one symptom alone, and the source opens after a diagnosis."""

from __future__ import annotations

import re

import pytest

import labkit
from labkit.checks import report
from labkit.show import guesses


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setenv("LABKIT_STATIC", "1")
    return labkit.impostors("02")


def test_each_fault_shows_in_its_own_symptom(line):
    *members, allowed = line.symptoms
    over = {}
    for letter, values, *spent in members:
        numbers = [
            m != "–" and int(n.replace(",", "")) > int(m.replace(",", ""))
            for n, m in zip(spent, allowed[2:], strict=True)
        ]
        names = ("bytes", "messages", "rounds", "memory")
        over[letter] = {n for n, is_over in zip(names, numbers, strict=True) if is_over}
        over[letter] |= {"values"} if values != "right" else set()
    assert over["A"] >= {"bytes"}
    assert over["B"] == {"values"}
    assert over["C"] == {"memory"}
    assert over["D"] >= {"messages"}
    assert not over["D"] & {"bytes", "values", "memory"}
    assert "values" not in over["A"] | over["C"]


def test_the_source_opens_after_a_diagnosis(line):
    assert "Note a diagnosis first" in line.open("A")
    form = line.ask("A")
    assert len(form.choices) == 4
    form.note("it keeps everything that ever arrived")
    assert line.open("A").startswith("No: it lets rank 0 do everything")
    form.note("it lets rank 0 do everything")
    opened = line.open("A")
    assert opened.startswith("That is it")
    assert "dist.send(tensor, peer)" in opened


def test_the_diagnosis_before_the_source_counts(line, monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.delenv("LABKIT_STATIC")
    for letter, first in (("A", "it ends one step too early"), ("B", "it ends one step too early")):
        line.ask(letter).note(first)
        line.open(letter)
    line.ask("A").note("it lets rank 0 do everything")
    assert report.text().splitlines()[-1] == "2 guesses noted, 2 of them answered, 1 met"


def test_the_table_says_on_what(line):
    assert "4 ranks, D = 512 B (64 numbers of int64)" in line._repr_mimebundle_()["text/html"]
    assert line.symptoms[2][-1] == "768", "what arrived, and nothing else"


def test_on_a_narrow_page_each_symptom_has_its_head(line):
    html = line._repr_mimebundle_()["text/html"]
    cells = re.findall(r'<td data-head="([^"]+)">', html)
    assert cells == [head for _ in line.symptoms for head in line.columns]
    assert "white-space:nowrap" not in re.sub(r"^.*lk-lineup table", "", html), "cells wrap"
    assert 'lk-twin"' not in html, "nothing scrolls"


def test_what_does_not_exist(line):
    with pytest.raises(ValueError, match="expected one of A, B, C, D"):
        line.ask("E")
    with pytest.raises(ValueError, match="has no impostors"):
        labkit.impostors("2")
