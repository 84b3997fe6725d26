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


def test_who_is_killed_is_passed_over(queue):
    first = holder(60)
    first.stdout.readline()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    start = time.monotonic()
    with labkit.quiet():
        pass
    assert time.monotonic() - start < 2
    assert list(queue.iterdir()) == [], "its ticket is cleared away"


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


def test_a_host_that_shares_nothing_stops_nobody(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(turns, "folder", lambda: tmp_path / "file" / "queue")
    entered = False
    with labkit.quiet():
        entered = True
    assert entered
    assert "no queue for measurements: [Errno" in capsys.readouterr().err


def test_a_folder_that_vanishes_stops_nobody(queue, monkeypatch, capsys):
    def gone(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(turns, "_ahead", gone)
    with labkit.quiet():
        pass
    assert "no queue for measurements: [Errno 13] Permission denied" in capsys.readouterr().err
    assert list(queue.iterdir()) == []


def test_a_queue_in_a_queue_does_not_wait_for_itself():
    start = time.monotonic()
    with labkit.quiet(limit=5), labkit.quiet(limit=5):
        pass
    assert time.monotonic() - start < 3


MANY = """
import os, random, sys, time, labkit
from labkit import turns
turns.POLL = 0.01
now = time.time_ns
time.time_ns = lambda: now() + random.choice([-3600, 0, 3600]) * 10**9  # clocks that are set back and forth
os.umask(0o077)
for _ in range(int(sys.argv[2])):
    with labkit.quiet():
        os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))
        time.sleep(random.random() / 200)
        os.unlink(sys.argv[1])
"""


def test_two_are_never_inside_whatever_the_clock_says(tmp_path, queue):
    line = [sys.executable, "-c", MANY, str(tmp_path / "inside"), "10"]
    all_of_them = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    said = [process.communicate(timeout=60)[1] for process in all_of_them]
    assert [(p.returncode, "Error" in e) for p, e in zip(all_of_them, said, strict=True)] == [(0, False)] * 6
    assert list(queue.iterdir()) == []


def test_a_process_forked_inside_does_not_hold_on():
    fork = "import os, time, labkit\nwith labkit.quiet():\n    if not os.fork(): time.sleep(5), os._exit(0)"
    subprocess.run([sys.executable, "-c", fork], check=True)
    start = time.monotonic()
    with labkit.quiet():
        assert time.monotonic() - start < 3


def test_other_users_see_that_a_ticket_is_held(queue):
    before = os.umask(0o077)
    try:
        with labkit.quiet():
            assert [ticket.stat().st_mode & 0o777 for ticket in queue.iterdir()] == [0o644]
            assert queue.stat().st_mode & 0o7777 == 0o1777
    finally:
        os.umask(before)


def test_what_else_lies_in_the_folder_holds_up_nobody(queue):
    (queue / "0").mkdir(parents=True)
    os.mkfifo(queue / "1")
    (queue / "2").symlink_to(queue / "nowhere")
    (queue / "3").write_text("old")
    start = time.monotonic()
    with labkit.quiet():
        assert time.monotonic() - start < 2
