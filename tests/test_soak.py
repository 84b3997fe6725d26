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

pytestmark = [pytest.mark.soak, pytest.mark.alone]

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


RING = """
import torch, torch.distributed as dist
from labkit import collectives, show, trace

def ring():
    world = dist.get_world_size()
    t = torch.full((world,), 16 ** dist.get_rank())
    with trace.watch(t, parts=world):
        collectives.all_reduce(t, algorithm="ring")
    return t.tolist()

run = labkit.run(ring, ranks=4, timeout=120)
print(run.values == [[0x1111] * 4] * 4, show.ring(run.trace).title[:26])
"""


def test_thirty_learners_run_the_ring_at_once():
    """Thirty kernels with four ranks each: all right, and the memory that they take together."""
    import psutil

    kernels, took = [], []
    before = psutil.virtual_memory().available
    try:
        for _ in range(30):
            kernels.append(Kernel())
            kernels[-1].result(kernels[-1].send(f"{SETUP}\nimport torch"), timeout=120)
        began = time.monotonic()
        requests = [(k, k.send(RING)) for k in kernels]
        for k, request in requests:
            assert k.result(request, timeout=240).strip() == "True Every rank sends at every"
            took.append(time.monotonic() - began)
        used = (before - psutil.virtual_memory().available) / 1e9
        print(f"30 kernels, 120 ranks: {used:.1f} GB together; done after {took[0]:.0f} to {max(took):.0f} s")
    finally:
        for k in kernels:
            k.close()
    assert used < 20


def test_the_solution_is_accepted_fifty_times_beside_other_load():
    from labkit.checks.exercises import get
    from labkit.checks.judge import judge

    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        exercise = get("ring_reduce_scatter")
        kinds = [judge(exercise, exercise.solution).kind for _ in range(50)]
    finally:
        for process in busy:
            process.kill()
    assert kinds == ["right"] * 50


def test_a_group_made_at_the_end_of_a_run_is_not_closed_under_the_others_hands():
    def ends_with_a_group():
        return programs.dist.get_world_size(programs.dist.new_group([0, 1]))

    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(12)]
    try:
        sizes = [labkit.run(ends_with_a_group, ranks=2).values for _ in range(300)]
    finally:
        for process in busy:
            process.kill()
    assert sizes == [[2, 2]] * 300


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
