"""One measurement at a time on a host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import labkit
from labkit import turns

HOLDER = """
import sys, time, labkit
with labkit.quiet():
    print("in", flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def queue(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_QUEUE", str(tmp_path / "queue"))
    return tmp_path / "queue"


def holder(seconds: float) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(seconds)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process


def test_one_after_another_in_the_order_of_coming(queue):
    spans = []
    with labkit.quiet():
        waiting = [holder(0.05) for _ in range(3)]
        time.sleep(0.5)
        spans.append(time.monotonic())
    for process in waiting:
        process.wait(20)
    assert [p.returncode for p in waiting] == [0, 0, 0]
    assert list(queue.iterdir()) == []


def test_who_waits_is_told_how_many_are_ahead(capsys):
    first = holder(1.0)
    first.stdout.readline()
    with labkit.quiet():
        first.wait(5)
    assert "1 ahead of you" in capsys.readouterr().err


def test_who_is_killed_is_passed_over():
    first = holder(60)
    first.stdout.readline()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    start = time.monotonic()
    with labkit.quiet():
        pass
    assert time.monotonic() - start < 2


def test_nobody_waits_for_ever():
    first = holder(60)
    first.stdout.readline()
    start = time.monotonic()
    with labkit.quiet(limit=0.5):
        assert time.monotonic() - start >= 0.5
    first.kill()
    first.wait()
    with pytest.raises(ValueError, match="limit=0"), labkit.quiet(limit=0):
        pass


def test_a_host_that_shares_nothing_stops_nobody(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(turns, "folder", lambda: tmp_path / "file" / "queue")
    entered = False
    with labkit.quiet():
        entered = True
    assert entered
