"""What an instructor sees of a class."""

from __future__ import annotations

import json
import os

import pytest

from labkit import progress
from labkit.checks import classroom
from labkit.cli import main


@pytest.fixture
def shared(tmp_path, monkeypatch):
    folder = tmp_path / "class"
    folder.mkdir()
    monkeypatch.delenv("LABKIT_STATIC", raising=False)
    monkeypatch.setenv("LABKIT_CLASS_DIR", str(folder))

    def become(name):
        monkeypatch.setenv("LABKIT_LEARNER", name)
        monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / name / "progress.json"))

    become("ada")
    progress.note_check("barrier", "right")
    progress.note_guess("bytes", "12 MiB")
    progress.note_answer("bytes", "16 MiB")
    for name, guess in (("bob", "16 MiB"), ("eve", "12 MiB")):
        become(name)
        progress.note_check("barrier", "wrong")
        progress.note_guess("bytes", guess)
    return folder


def test_who_is_where_and_what_was_guessed(shared, capsys):
    (shared / "broken.json").write_text("{")
    assert main(["class"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "3 learners"
    at = next(n for n, line in enumerate(told) if "barrier" in line)
    assert told[at].endswith("1 of 3 right")
    assert told[at + 1].strip() == "right: ada"
    assert told[at + 2].strip() == "at it: bob, eve"
    assert told[-3:] == ["guesses for bytes, answer 16 MiB", "  ██ 2  12 MiB", "  █ 1  16 MiB"]


def entry(best, **changes):
    return {"exercises": {"barrier": {"verdict": best, "best": best, "tries": 1, "hints": 0, **changes}}}


MALFORMED = ["", "{", "[]", "null", "3", "[" * 100_000, '{"exercises": [1], "guesses": "a"}', '{"a": "\xff"}',
             *(json.dumps(e) for e in (entry(["x"]), entry({"a": 1}), entry("wrong", tries="2"))),
             '{"guesses": {"q": {"guess": 1' + "0" * 5000 + "}}}"]  # fmt: skip


def test_malformed_files_stop_no_report(shared):
    for n, text in enumerate(MALFORMED):
        (shared / f"bad{n:02}.json").write_text(text, encoding="latin-1")
    (shared / "folder.json").mkdir()
    (shared / "nowhere.json").symlink_to(shared / "no such file")
    os.mkfifo(shared / "pipe.json")  # reading it would never end
    told = classroom.text(shared)
    assert "2 of" not in told
    assert "right: ada\n" in told
    assert "at it: bob, eve\n" in told


def test_what_learners_write_cannot_move_the_cursor(shared):
    evil = entry("wrong") | {"guesses": {"\x1b[1m\nq": {"guess": "\x1b[2J\ud800" * 99, "answer": "\x1b[31m\nx"}}}
    (shared / "eve\x1b[31m\n.json").write_text(json.dumps(evil))
    told = classroom.text(shared)
    assert "\x1b" not in told
    told.encode()
    assert max(map(len, told.splitlines())) < 130


def test_thirty_learners_in_a_few_lines(shared, capsys):
    for n in range(27):
        guess = {"guesses": {"bytes": {"guess": float(16 + n % 2)}}}
        (shared / f"l{n:02}.json").write_text(json.dumps(entry("right") | guess))
    assert main(["class", str(shared)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("30 learners\n")
    assert "right: ada, l00, l01, l02, l03, l04, l05, l06 and 20 others\n" in told.replace(", and", " and")
    assert f"  {'█' * 14} 14  16\n  {'█' * 13} 13  17\n" in told


def test_no_code_is_shared(shared):
    assert {f.name for f in shared.iterdir()} == {"ada.json", "bob.json", "eve.json"}
    assert set(progress.read()) == {"version", "exercises", "guesses"}


def test_a_name_cannot_leave_the_folder(shared, monkeypatch):
    monkeypatch.setenv("LABKIT_LEARNER", "../../evil")
    progress.note_guess("bytes", "x")
    assert (shared / "_.._evil.json").exists()


def test_no_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("LABKIT_CLASS_DIR", raising=False)
    assert main(["class"]) == 2
    with pytest.raises(ValueError, match="is no folder"):
        classroom.text(tmp_path / "nowhere")
