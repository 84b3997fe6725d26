"""What must hold every time, many times over. `make soak` runs it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
from kernels import Kernel
from test_kernel import SETUP, check_interrupt_and_kill

import labkit
from labkit.world.failure import RankDied

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[1]


def timed(fn, *args, kind, **options) -> tuple[labkit.RunFailed, float]:
    labkit.run(programs.nothing)
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        labkit.run(fn, *args, **options)
    return caught.value, time.monotonic() - began


def test_a_killed_rank_is_named_twenty_times():
    for number in range(20):
        failure, took = timed(programs.killed, number % 4, kind=RankDied)
        assert failure.ranks == [number % 4]
        assert failure.signal == "SIGKILL"
        assert took < 2
        assert labkit.run(programs.total).values == [10] * 4


def test_an_exception_is_named_twenty_times():
    for number in range(20):
        failure, took = timed(programs.raise_on, number % 4, kind=labkit.RankError)
        assert failure.ranks == [number % 4]
        assert took < 2
        assert labkit.run(programs.total).values == [10] * 4


def test_different_sizes_never_give_a_number_twenty_times():
    for number in range(20):
        failure, _ = timed(programs.different_sizes, number % 4, kind=labkit.Disagreement)
        assert failure.ranks == [0, 1, 2, 3]
        assert labkit.run(programs.total).values == [10] * 4


@pytest.mark.parametrize("with_forked_child", [False, True])
def test_interrupt_and_kill_ten_times(with_forked_child):
    for _ in range(10):
        check_interrupt_and_kill(with_forked_child)


def test_fifteen_kernels_at_once():
    kernels = []
    try:
        kernels = [Kernel() for _ in range(15)]
        requests = [(k, k.send(f"{SETUP}\nprint(labkit.run(programs.total, ranks=2, timeout=120).values)"))
                    for k in kernels]  # fmt: skip
        assert [k.result(r, timeout=180).strip() for k, r in requests] == ["[3.0, 3.0]"] * 15
    finally:
        for k in kernels:
            k.close()


def test_thousand_warm_runs_hold_no_more_memory_or_descriptors():
    import psutil

    me = psutil.Process()
    for _ in range(50):
        labkit.run(programs.total)
    files, threads = me.num_fds(), me.num_threads()
    ranks = [psutil.Process(p) for p in labkit.run(programs.pid).values]
    before = [r.memory_info().rss for r in ranks]
    for _ in range(1000):
        labkit.run(programs.total)
    assert me.num_fds() == files
    assert me.num_threads() == threads
    assert all(r.memory_info().rss < b + 8e6 for r, b in zip(ranks, before, strict=True))


def test_nbval_three_times():
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "notebooks"],
            cwd=ROOT, capture_output=True, text=True, env={**__import__("os").environ, "LABKIT_STATIC": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
