"""Progress on disk: whole after any kill, right after any number of writers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit import progress

WRITER = """
import sys
from labkit import progress
print("ready", flush=True)
for n in range(int(sys.argv[2])):
    progress.note_guess(f"{sys.argv[1]}.{n}", n)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "deep" / "progress.json"))
    monkeypatch.delenv("LABKIT_STATIC", raising=False)
    return tmp_path / "deep" / "progress.json"


def writer(name: str, times: int) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", WRITER, name, str(times)], stdout=subprocess.PIPE)


def test_checks_hints_guesses_and_answers(file):
    for verdict in ("wrong", "right", "wasteful"):
        progress.note_check("barrier", verdict)
    progress.note_hint("barrier", 2)
    progress.note_hint("barrier", 1)
    progress.note_answer("bytes", 5)  # nobody had guessed
    progress.note_guess("bytes", 4.0)
    progress.note_answer("bytes", 5)
    assert json.loads(file.read_text()) == {
        "version": 1,
        "exercises": {"barrier": {"verdict": "wasteful", "best": "right", "tries": 3, "hints": 2}},
        "guesses": {"bytes": {"guess": 4.0, "answer": 5}},
    }


def test_two_kernels_at_once_lose_nothing(file):
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: writer(name, 40).wait(), ["a", "b", "c"]))
    assert len(progress.read()["guesses"]) == 120


def test_static_pages_neither_read_nor_write(file, monkeypatch):
    progress.note_guess("bytes", 4.0)
    monkeypatch.setenv("LABKIT_STATIC", "1")
    progress.note_guess("other", 1.0)
    assert progress.read()["guesses"] == {}
    monkeypatch.delenv("LABKIT_STATIC")
    assert progress.read()["guesses"] == {"bytes": {"guess": 4.0}}


@pytest.mark.parametrize("text", ["", "{", "[1]", "4", '{"exercises": [1]}', "[" * 100_000, "\xff", "1" * 5000])
def test_a_file_that_is_no_progress_is_put_aside_and_told_once(file, text):
    file.parent.mkdir()
    file.write_text(text, encoding="latin-1")
    assert progress.read()["guesses"] == {}
    with pytest.warns(UserWarning, match=r"it is progress.json.bad now"):
        progress.note_guess("bytes", 4.0)
    assert file.with_name("progress.json.bad").read_text(encoding="latin-1") == text
    with warnings.catch_warnings(action="error"):
        progress.note_guess("more", 5.0)
    assert progress.read()["guesses"] == {"bytes": {"guess": 4.0}, "more": {"guess": 5.0}}


def test_what_a_later_version_has_noted_stays(file):
    later = {"version": 2, "badges": [1], "guesses": {"odd": 3, "a": {"guess": 1, "when": 5}},
             "exercises": {"new": {"best": "golden"}, "barrier": {"best": "golden", "seen": 1}}}  # fmt: skip
    file.parent.mkdir()
    file.write_text(json.dumps(later))
    progress.note_guess("a", 2)
    progress.note_check("exchange", "wrong")
    later["guesses"]["a"]["guess"] = 2
    later["exercises"]["exchange"] = {"verdict": "wrong", "best": "wrong", "tries": 1, "hints": 0}
    assert json.loads(file.read_text()) == later


def test_halves_of_characters_are_kept(file):
    progress.note_guess("a", "\ud83d!")
    progress.note_guess("b", 1)
    assert progress.read()["guesses"] == {"a": {"guess": "\ud83d!"}, "b": {"guess": 1}}


@pytest.mark.parametrize("place", [".", "/", "{tmp}", "{tmp}/file/progress.json", "~nobody-here/a"])
def test_a_place_that_cannot_be_written_is_told(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_PROGRESS", place.replace("{tmp}", str(tmp_path)))
    with pytest.warns(UserWarning, match="progress is not kept"):
        progress.note_guess("bytes", 4.0)
    assert progress.read()["guesses"] == {}
    assert not list(tmp_path.glob("*.bad"))


@pytest.mark.parametrize("error", [RuntimeError("no home"), KeyError("uid"), RecursionError(), TypeError("odd")])
def test_whatever_happens_a_check_goes_on(file, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(progress, "path", fail)
    with pytest.warns(UserWarning, match=f"progress is not kept: .*{error.args[0] if error.args else 'Recursion'}"):
        progress.note_guess("bytes", 4.0)
    assert progress.read()["guesses"] == {}


def test_a_file_that_cannot_be_read_is_not_replaced(file, monkeypatch):
    progress.note_guess("a", 1)
    before = file.read_bytes()

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "read_bytes", refuse)
    with pytest.warns(UserWarning, match="Permission denied"):
        progress.note_guess("b", 2)
    monkeypatch.undo()
    assert file.read_bytes() == before


def test_a_home_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LABKIT_PROGRESS", "~/mine.json")
    monkeypatch.setenv("LABKIT_CLASS_DIR", "~")
    monkeypatch.setenv("LABKIT_LEARNER", "ada")
    progress.note_guess("a", 1)
    assert (tmp_path / "mine.json").exists()
    assert (tmp_path / "ada.json").exists()


def test_only_the_copy_for_the_class_fails(file, monkeypatch):
    monkeypatch.setenv("LABKIT_CLASS_DIR", str(file.parent / "nowhere"))
    with pytest.warns(UserWarning, match="progress is kept, but not its copy for the class.*No such file"):
        progress.note_guess("a", 1)
    assert progress.read()["guesses"] == {"a": {"guess": 1}}


def test_what_killed_writers_left_is_removed_after_an_hour(file):
    progress.note_guess("a", 1)
    left = {name: file.with_name(name) for name in (".progress-abcd_123", ".progress-young_12", ".progress-my-own")}
    for name, path in left.items():
        path.write_text("")
        if "young" not in name:
            os.utime(path, (time.time() - 4000,) * 2)
    progress.note_guess("a", 2)
    assert [path.exists() for path in left.values()] == [False, True, True]


def test_the_name_of_a_learner(monkeypatch):
    monkeypatch.setattr(progress.getpass, "getuser", lambda: "jovyan")
    for name in ("LABKIT_LEARNER", "JUPYTERHUB_USER"):
        monkeypatch.delenv(name, raising=False)
    assert progress.learner() == "jovyan"
    monkeypatch.setenv("JUPYTERHUB_USER", "ada@school")
    assert progress.learner() == "ada_school"
    monkeypatch.setenv("LABKIT_LEARNER", "eve")
    assert progress.learner() == "eve"


def killed_while_writing(file, times: int) -> None:
    progress.note_guess("first", 1.0)
    for n in range(times):
        process = writer(str(n), 10_000)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.002 * (n % 7))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        known = json.loads(file.read_text())
        assert known["guesses"]["first"] == {"guess": 1.0}
    progress.note_guess("last", 2.0)
    assert progress.read()["guesses"]["last"] == {"guess": 2.0}


def test_the_file_is_whole_after_a_kill(file):
    killed_while_writing(file, 5)
    assert len(json.loads(file.read_text())["guesses"]) >= 2


@pytest.mark.soak
def test_the_file_is_whole_after_a_hundred_kills(file):
    killed_while_writing(file, 100)
    assert len(json.loads(file.read_text())["guesses"]) >= 2
