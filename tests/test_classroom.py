"""What an instructor sees of a class."""

from __future__ import annotations

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
