"""Pipelines on paper: the papers' figures, and every closed form against the schedules simulated."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from labkit.pipeline import (
    Send,
    breadth_first,
    dual_pipe,
    gpipe,
    interleaved,
    messages,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
    zero_bubble_h2,
)
from labkit.theory import memory, pipeline

MAKE = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zero_bubble_h1, "zb_h2": zero_bubble_h2}
RANKS, MICRO_BATCHES, CHUNKS = st.integers(1, 6), st.integers(1, 20), st.integers(2, 3)
TIMES = st.integers(0, 9)


# Figures


def test_published_figures():
    assert pipeline.makespan("gpipe", 4, 8, 20, 40) == pipeline.makespan("1f1b", 4, 8, 20, 40) == 660
    assert pipeline.makespan("gpipe", 4, 8, 20, 40, communication=5) == 690
    assert pipeline.makespan("1f1b", 4, 6, 1, 1) == 18
    assert pipeline.makespan("1f1b", 4, 8, 1, 2) == 33
    assert pipeline.makespan("zb_h1", 4, 8, 1, 1, 1) == 27
    assert pipeline.bubble_of_total(4, 8) == pytest.approx(3 / 11)
    assert [pipeline.in_flight("1f1b", 4, 3, rank) for rank in range(4)] == [3, 3, 2, 1]


def test_equal_memory():
    """Room for four micro-batches, p 4: GPipe 43 % of the total, 1F1B with m = 32 8.6 %."""
    assert pipeline.in_flight("gpipe", 4, 4) == pipeline.in_flight("1f1b", 4, 32) == 4
    assert f"{pipeline.bubble_of_total(4, 4):.0%}" == "43%"
    assert f"{pipeline.bubble_of_total(4, 32):.1%}" == "8.6%"


def test_the_price_of_interleaving():
    assert round(pipeline.messages(4, 8, 2) / pipeline.messages(4, 8), 2) == 2.33
    assert pipeline.memory_factor(4, 2) == 1 + 3 / 8


def test_dual_pipe_of_deepseek_v3():
    """Table 2 counts B as both gradients: 1F1B (p−1)(F+B), ZB1P (p−1)(F+B−2W), DualPipe (p/2−1)(F&B+B−3W)."""
    f, both, w, overlapped, p = 4.0, 7.0, 3.0, 9.0, 8
    b = both - w
    assert pipeline.idle_time("1f1b", p, f, b, w) == (p - 1) * (f + both)
    assert pipeline.idle_time("zb_h1", p, f, b, w) == (p - 1) * (f + both - 2 * w)
    assert pipeline.idle_time("dual_pipe", p, f, b, w, together=overlapped) == (
        (p / 2 - 1) * (overlapped + both - 3 * w)
    )
    assert pipeline.idle_time("dual_pipe", p, f, b, w) == (p / 2 - 1) * (f + both + both - 3 * w)
    assert dual_pipe(p, 16).stash() == tuple(pipeline.in_flight("dual_pipe", p, 16, rank) for rank in range(p))


# Against the schedules


@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, MICRO_BATCHES, st.integers(1, 9), TIMES, TIMES)
def test_gpipe_and_1f1b(schedule, p, m, f, b, w):
    timeline = simulate(MAKE[schedule](p, m), f, b, w)
    assert timeline.makespan == pipeline.makespan(schedule, p, m, f, b, w)
    assert timeline.bubble == pytest.approx(pipeline.bubble(p, m))
    assert timeline.bubble_of_total == pytest.approx(pipeline.bubble_of_total(p, m))
    assert set(timeline.idle) == {pipeline.idle_time(schedule, p, f, b, w)}
    assert timeline.peak_stash == tuple(pipeline.in_flight(schedule, p, m, rank) for rank in range(p))


@given(RANKS, st.integers(1, 4), CHUNKS, st.integers(1, 9), TIMES, TIMES)
def test_interleaved(p, rounds, v, f, b, w):
    """Times of a rank: each of its v stages takes a v-th."""
    m = p * rounds
    timeline = simulate(interleaved(p, m, v), f / v, b / v, w / v)
    assert timeline.makespan == pytest.approx(pipeline.makespan("interleaved", p, m, f, b, w, chunks=v))
    assert timeline.bubble == pytest.approx(pipeline.bubble(p, m, v), abs=1e-12)
    assert timeline.peak_stash == tuple(pipeline.in_flight("interleaved", p, m, rank, v) for rank in range(p))
    layers = memory.layers_in_flight(p * v * 5, p, m, "interleaved", chunks=v)
    assert layers == 5 * timeline.peak_stash[0]
    if rounds > 1:
        assert timeline.peak_stash[0] / v == pytest.approx(p * pipeline.memory_factor(p, v))


@given(RANKS, MICRO_BATCHES, st.integers(1, 9), TIMES, TIMES)
def test_zero_bubble(p, m, f, b, w):
    assume(w <= min(f, b))
    if m >= p:
        assert simulate(zero_bubble_h1(p, m), f, b, w).makespan == pipeline.makespan("zb_h1", p, m, f, b, w)
    if m >= 2 * p - 1:
        assert max(simulate(zero_bubble_h2(p, m), f, b, w).spans) == pipeline.makespan("zb_h2", p, m, f, b, w)
    for name in ("zb_h1", "zb_h2"):
        assert MAKE[name](p, m).stash() == tuple(pipeline.in_flight(name, p, m, rank) for rank in range(p))


@given(RANKS, MICRO_BATCHES, st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_gpipe_with_transfers(p, m, f, b, transfer):
    assume(transfer <= min(f, b))
    simulated = simulate(gpipe(p, m), f, b, weight=0, communication=transfer).makespan
    assert simulated == pipeline.makespan("gpipe", p, m, f, b, communication=transfer)


@settings(max_examples=50)
@given(RANKS, MICRO_BATCHES, st.integers(1, 3))
def test_messages_sent(p, m, v):
    """Counted in the programs that the engine carries out."""
    assume(v == 1 or m % p == 0)
    for schedule in (breadth_first(p, m, v), one_f_one_b(p, m) if v == 1 else interleaved(p, m, v)):
        counted = [sum(isinstance(item, Send) for item in program) for program in messages(schedule)]
        assert counted == [pipeline.messages_sent(p, m, rank, v) for rank in range(p)]
        assert sum(counted) == pipeline.messages(p, m, v)
        assert pipeline.messages(p, m, v) == (2 * m * (p * v - 1) if p > 1 else 0)


# What is refused


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pipeline.bubble(0, 4), "ranks is 0"),
        (lambda: pipeline.bubble(4, 6, 2), "ranks=4 does not divide micro_batches=6"),
        (lambda: pipeline.idle_time("ring", 4, 1, 1), "schedule is 'ring': expected one of 'gpipe'"),
        (lambda: pipeline.idle_time("zb_h1", 4, 1, 1, 2), "weight is 2, longer than forward=1"),
        (lambda: pipeline.idle_time("1f1b", 4, 1, 1, together=2), "overlaps no forward and backward"),
        (lambda: pipeline.idle_time("dual_pipe", 3, 1, 1), "ranks is 3: dual_pipe takes an even number"),
        (lambda: pipeline.idle_time("interleaved", 4, 1, 1), "chunks is 1 for interleaved"),
        (lambda: pipeline.idle_time("1f1b", 4, 1, 1, chunks=2), "chunks is 2 for 1f1b"),
        (lambda: pipeline.idle_time("1f1b", 4, -1, 1), "forward is -1"),
        (lambda: pipeline.makespan("zb_h2", 4, 6, 1, 1, 1), "micro_batches is 6: zb_h2 has a closed form from 7 on"),
        (lambda: pipeline.makespan("1f1b", 4, 8, 1, 1, communication=1), "only gpipe has a closed form"),
        (lambda: pipeline.makespan("gpipe", 4, 8, 1, 1, communication=2), "only gpipe has a closed form"),
        (lambda: pipeline.in_flight("1f1b", 4, 8, rank=4), "rank is 4, but there are 4 ranks"),
        (lambda: pipeline.messages_sent(4, 8, rank=-1), "rank is -1"),
        (lambda: pipeline.message_bytes(1, 0, 8), "sequence is 0"),
    ],
)
def test_refused_with_the_reason(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_message_bytes():
    """b·s·h elements of two bytes."""
    assert pipeline.message_bytes(batch=4, sequence=4096, hidden=8192) == 4 * 4096 * 8192 * 2
