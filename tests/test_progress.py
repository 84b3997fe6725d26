"""Progress on disk: whole after any kill, right after any number of writers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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


def test_a_file_that_is_no_progress_is_begun_anew(file):
    file.parent.mkdir()
    for text in ("", "{", "[1]"):
        file.write_text(text)
        progress.note_guess("bytes", 4.0)
        assert progress.read()["guesses"] == {"bytes": {"guess": 4.0}}


def test_a_home_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "file" / "progress.json"))
    with pytest.warns(UserWarning, match="progress is not kept"):
        progress.note_guess("bytes", 4.0)


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
