"""simulate(): published figures, an independent longest path, ports, slow ranks, uneven stages; timelines of traces."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_schedules import of_size, torch_blocks

from labkit.pipeline import (
    IllegalSchedule,
    Schedule,
    TimedAction,
    Timeline,
    Transfer,
    dual_pipe,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from labkit.pipeline.schedule import needs
from labkit.trace import Event, Trace

SCHEDULES = [s for p in (1, 2, 3, 4) for m in (1, 3, 4, 8) for s in of_size(p, m, chunks=(1, 2))]
BY_SIZE = st.sampled_from(SCHEDULES)
TIMES = st.integers(1, 9)

#: Qi et al. 2023, tables 9 and 5: p, m; F, B, W, transfer in ms; bubble rate of 1F1B, ZB-H1, ZB-H2.
ZERO_BUBBLE = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
]


# Published figures


@pytest.mark.parametrize("row", ZERO_BUBBLE, ids=lambda row: f"p{row[0]} m{row[1]}")
def test_the_tables_of_zero_bubble(row):
    p, m, f, b, w, transfer, *published = row
    rates = []
    for make in (one_f_one_b, zero_bubble_h1, zero_bubble_h2):
        cost = max(simulate(make(p, m), f, b, w, transfer).spans)
        rates.append(round((cost - m * (f + b + w)) / cost, 4))
    assert rates == published


@pytest.mark.parametrize(("make", "free", "with_transfers"), [(gpipe, 660, 690), (one_f_one_b, 660, 740)])
def test_gpipe_and_1f1b_end_together_and_1f1b_later_with_transfers(make, free, with_transfers):
    schedule = make(4, 8)
    for f, b, w in ((20, 40, 0), (20, 20, 20)):
        assert simulate(schedule, f, b, w).makespan == free
        assert simulate(schedule, f, b, w, communication=5).makespan == with_transfers


def test_small_figures():
    assert simulate(zero_bubble_h1(4, 8)).makespan == 27
    assert simulate(one_f_one_b(4, 8)).makespan == 33
    eight = simulate(one_f_one_b(4, 8), weight=0)
    assert eight.makespan == 22
    assert eight.bubble == pytest.approx(3 / 8)
    assert eight.bubble_of_total == pytest.approx(3 / 11)


def test_at_equal_memory_1f1b_wins():
    """Room for four micro-batches: GPipe m = 4, 1F1B m = 32."""
    few, many = simulate(gpipe(4, 4)), simulate(one_f_one_b(4, 32))
    assert max(few.peak_stash) == max(many.peak_stash) == 4
    assert round(few.bubble_of_total, 2) == 0.43
    assert round(many.bubble_of_total, 3) == 0.086


@pytest.mark.parametrize(("p", "m"), [(4, 3), (8, 1), (4, 1)])
def test_fewer_micro_batches_than_ranks(p, m):
    assert simulate(one_f_one_b(p, m), forward=2, backward=3, weight=0).makespan == (m + p - 1) * 5


def test_zero_bubble_v_has_none_and_h2_only_the_slant():
    for p, m in ((2, 4), (4, 8), (4, 7), (8, 16)):
        assert set(simulate(zero_bubble_v(p, m)).spans) == {6 * m}
        assert set(simulate(zero_bubble_h2(p, m)).spans) == {3 * m}
        assert simulate(zero_bubble_v(p, m)).makespan == 6 * m + p - 1


@pytest.mark.parametrize(("f", "w"), [(1, 1), (2, 1), (4, 3), (3, 1)])
@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_dual_pipe_one_action_at_a_time(p, f, w):
    """With F = B: (p/2−1)(2F−W), less than the table's (p/2−1)(3F−W), since a forward's result leaves before the
    backward beside it has ended."""
    for m in (2 * p, 4 * p):
        timeline = simulate(dual_pipe(p, m), f, f, w)
        assert set(timeline.idle) == {(p // 2 - 1) * (2 * f - w)}
        assert simulate(dual_pipe_v(p // 2, m // 2), f, f, w).makespan == timeline.makespan


@pytest.mark.parametrize(("f", "w", "together"), [(1, 1, 3), (1, 1, 2), (4, 2, 10), (4, 2, 8), (3, 2, 7)])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_dual_pipe_in_blocks_is_its_table(p, f, w, together):
    """DeepSeek-V3, table 2: (p/2−1)(F&B + B − 3W), B both gradients; DualPipeV has it with half the ranks.

    A forward and a backward that overlap are one block, as torch pairs them: neither result leaves before its end.
    """
    blocks = torch_blocks("DualPipeV", p, 3 * p, 2)
    apart = {(a.micro_batch, a.stage) for row in blocks for block in row for a in block if a.kind == "W"}
    end: dict = {}
    clock, busy, place = [0] * p, [0] * p, [0] * p
    while any(place[rank] < len(blocks[rank]) for rank in range(p)):
        for rank in range(p):
            block = blocks[rank][place[rank]] if place[rank] < len(blocks[rank]) else ()
            waits = {a for x in block for a in needs(x, 2 * p)} - set(block)
            if block and waits <= end.keys():
                one = block[0]
                alone = {"F": f, "W": w, "B": f if (one.micro_batch, one.stage) in apart else f + w}[one.kind]
                length = together if len(block) == 2 else alone
                clock[rank] = max([clock[rank], *(end[a] for a in waits)]) + length
                busy[rank] += length
                end |= dict.fromkeys(block, clock[rank])
                place[rank] += 1
    assert max(clock) - min(busy) == (p - 1) * (together + (f + w) - 3 * w)


# An independent reference: the longest path through the graph of actions


def longest_path(schedule: Schedule, f: float, b: float, w: float, communication: float, factor) -> float:
    """Each action ends its duration after the last that it waits for; a message adds `communication`, ports none."""
    has_w = {(a.micro_batch, a.stage) for row in schedule.actions for a in row if a.kind == "W"}
    waits: dict = {}
    for row in schedule.actions:
        for a in row:
            i, s = a.micro_batch, a.stage
            waits[a.kind, i, s] = {
                "F": {("F", i, s - 1)} if s else set(),
                "B": {("F", i, s)} | ({("B", i, s + 1)} if s + 1 < schedule.stages else set()),
                "W": {("B", i, s)},
            }[a.kind]
        for one, other in pairwise(row):
            waits[tuple(other)] = waits[tuple(other)] | {tuple(one)}
    end: dict = {}
    for node in TopologicalSorter(waits).static_order():
        kind, i, s = node
        rank = schedule.rank_of(s, i)
        takes = {"F": f, "B": b if (i, s) in has_w else b + w, "W": w}[kind] * factor(rank)
        came = [end[n] + communication * (schedule.rank_of(n[2], i) != rank) for n in waits[node] if n[1] == i]
        came += [end[n] for n in waits[node] if n[1] != i]
        end[node] = max(came, default=0) + takes
    return max(end.values())


@settings(max_examples=150)
@given(BY_SIZE, TIMES, TIMES, st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))
def test_against_the_longest_path(schedule, f, b, w, communication, factor):
    """Equal where no message waits for a port; never shorter, since a port can only delay."""
    slow = {schedule.ranks - 1: factor}
    free = simulate(schedule, f, b, w, slow=slow).makespan
    assert free == longest_path(schedule, f, b, w, 0, lambda rank: slow.get(rank, 1))
    timeline = simulate(schedule, f, b, w, communication, slow)
    without_ports = longest_path(schedule, f, b, w, communication, lambda rank: slow.get(rank, 1))
    assert timeline.makespan >= without_ports >= free
    if all(t.end - t.ready == communication for t in timeline.transfers):
        assert timeline.makespan == without_ports


@settings(max_examples=150)
@given(BY_SIZE, TIMES, TIMES, st.integers(0, 9), st.integers(0, 20))
def test_nothing_overlaps_and_nothing_comes_early(schedule, f, b, w, communication):
    timeline = simulate(schedule, f, b, w, communication)
    for rank in range(schedule.ranks):
        row = timeline.of(rank)
        assert [e.action for e in row] == list(schedule.actions[rank])
        assert all(one.end <= other.start for one, other in pairwise(row))
        for port in (
            [(t.start, t.start + communication) for t in timeline.transfers if t.message.source == rank],
            [(t.end - communication, t.end) for t in timeline.transfers if t.message.target == rank],
        ):
            assert all(one[1] <= other[0] for one, other in pairwise(sorted(port)))
    event = {e.action: e for e in timeline.events}
    for t in timeline.transfers:
        assert event[t.message.producer].end == t.ready <= t.start <= t.end - communication
        assert t.end <= event[t.message.consumer].start


@settings(max_examples=150)
@given(BY_SIZE, st.integers(0, 2**32), st.sampled_from([0, 1, 7, 2.3]))
def test_the_critical_path_is_as_long_as_the_makespan(schedule, seed, communication):
    rng = random.Random(seed)
    durations = [[rng.choice([0.1, 1, 2, 3.7]) for _ in range(schedule.stages)] for _ in "FBW"]
    timeline = simulate(schedule, *durations, communication, slow={0: 1.5})
    path = timeline.critical_path
    begin = [step.ready if isinstance(step, Transfer) else step.start for step in path]
    assert begin[0] == 0
    assert path[-1].end == timeline.makespan
    assert all(one.end == start for one, start in zip(path, begin[1:], strict=False)), "no gap"
    assert sum(step.end - start for step, start in zip(path, begin, strict=True)) == pytest.approx(timeline.makespan)


def test_ports_queue():
    """Rank 0 makes two results in one unit each; each transfer takes three: the second waits for the first."""
    timeline = simulate(gpipe(2, 2), communication=3)
    forward = [t for t in timeline.transfers if t.message.kind == "F"]
    assert [(t.ready, t.start, t.end) for t in forward] == [(1, 1, 4), (2, 4, 7)]


def test_two_senders_to_one_rank_queue_at_its_port():
    """Ranks 0 and 2 both send to rank 1, at the same time, and F2's port is free to be there at once."""
    schedule = Schedule.parse("r0: F0 F1\nr1: F0\nr2: ", micro_batches=2, stages=3)
    both = replace(schedule, placement=lambda stage, i: [0, 1, 2][stage] if i == 0 else [2, 1, 0][stage],
                   actions=(schedule.actions[0][:1], schedule.actions[1], (schedule.actions[0][1],)))  # fmt: skip
    timeline = simulate(both, communication=3)
    to_rank_1 = [t for t in timeline.transfers if t.message.target == 1]
    assert [(t.message.source, t.start, t.end) for t in to_rank_1] == [(0, 1, 4), (2, 1, 7)]


# Slow ranks and uneven stages


def test_a_slow_rank_sets_the_pace():
    """Once filled, the pipeline goes at the speed of its slowest rank, whichever that is."""
    for rank in range(4):
        slow = simulate(one_f_one_b(4, 32), slow={rank: 2})
        assert slow.busy[rank] == 2 * 32 * 3
        all_forwards_first = simulate(gpipe(4, 32), slow={rank: 2}).makespan
        assert all_forwards_first == (2 * 32 + 3) * 3
        assert 2 * 32 * 3 < slow.makespan <= all_forwards_first


def test_uneven_stages_as_their_closed_form():
    """GPipe with stages of 1, 3, 2 and F, B alike: fill and drain pass all stages, in between the slowest counts."""
    times, m = [1, 3, 2], 5
    fill = sum(times)
    expected = 2 * (fill + (m - 1) * max(times))
    assert simulate(gpipe(3, m), forward=times, backward=times, weight=0).makespan == expected


def test_a_whole_backward_is_both_gradients():
    """A B with no W of its own takes backward + weight, also where others have one."""
    assert simulate(gpipe(1, 1), 1, 2, 4).makespan == 7
    timeline = simulate(dual_pipe(2, 4), 1, 2, 4)
    lengths = {(e.micro_batch, e.stage): e.end - e.start for e in timeline.events if e.kind == "B"}
    apart = {(e.micro_batch, e.stage) for e in timeline.events if e.kind == "W"}
    assert apart
    assert all(length == (2 if pair in apart else 6) for pair, length in lengths.items())


@given(BY_SIZE)
def test_stash_and_idle_agree_with_the_schedule(schedule):
    timeline = simulate(schedule)
    assert timeline.peak_stash == schedule.stash()
    work = [sum(e.end - e.start for e in timeline.of(rank)) for rank in range(schedule.ranks)]
    assert timeline.idle == tuple(timeline.makespan - w for w in work)
    assert timeline.bubble == pytest.approx(sum(timeline.idle) / sum(work))


def test_an_unfinished_schedule_is_simulated_as_far_as_it_goes():
    timeline = simulate(Schedule.parse("r0: F0 F1\nr1: F0", micro_batches=4))
    assert [(e.rank, e.start, e.end) for e in timeline.events] == [(0, 0, 1), (0, 1, 2), (1, 1, 2)]
    empty = simulate(Schedule.parse("r0:\nr1:"))
    assert (empty.makespan, empty.peak_stash, empty.critical_path) == (0, (0, 0), ())
    assert (empty.bubble, empty.bubble_of_total) == (0, 0)


def test_what_cannot_run_is_refused():
    with pytest.raises(IllegalSchedule, match="needs B0 of stage 1, which no rank does"):
        simulate(Schedule.parse("r0: F0 B0\nr1: F0"))
    with pytest.raises(IllegalSchedule, match="behind B0 itself"):
        simulate(Schedule.parse("r0: B0 F0"))
    with pytest.raises(IllegalSchedule, match="but also at place 0"):
        simulate(Schedule.parse("r0: F0 F0"))


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"forward": -1}, ValueError, "forward is -1: expected 0 or more"),
        ({"backward": [1, 2]}, ValueError, "backward has 2 durations, but there are 4 stages"),
        ({"weight": [1, 1, 1, float("nan")]}, ValueError, r"weight\[3\] is nan"),
        ({"communication": None}, TypeError, "communication is None: expected a number"),
        ({"slow": {4: 2}}, ValueError, "slow has rank 4: expected one from 0 to 3"),
        ({"slow": {0: -2}}, ValueError, r"slow\[0\] is -2"),
    ],
)
def test_durations_that_cannot_be(given, error, said):
    with pytest.raises(error, match=said):
        simulate(gpipe(4, 4), **given)


# Measured timelines


def spans(timeline: Timeline, zero: float) -> list[Event]:
    return [
        Event("span", e.kind, e.rank, zero + e.start, zero + e.end, index=n,
              labels={"stage": e.stage, "micro_batch": e.micro_batch, "step": 0})
        for n, e in enumerate(timeline.events)
    ]  # fmt: skip


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 8), interleaved(2, 4, 2), zero_bubble_h1(4, 4)])
def test_a_trace_with_labelled_spans_is_the_same_timeline(schedule):
    simulated = simulate(schedule, 2, 3, 1)
    others = [Event("send", "send", 0, 3.0, 4.0, peer=1), Event("span", "step", 0, 0.5, 90.0)]
    measured = Timeline.from_trace(Trace([*spans(simulated, 8.0), *others], ranks=schedule.ranks))
    assert measured.events == simulated.events
    assert (measured.ranks, measured.stages, measured.micro_batches) == (
        simulated.ranks, simulated.stages, simulated.micro_batches)  # fmt: skip
    assert measured.makespan == simulated.makespan
    assert measured.peak_stash == simulated.peak_stash
    assert measured.critical_path == tuple(s for s in simulated.critical_path if isinstance(s, TimedAction))


def test_one_of_several_steps():
    timeline = simulate(one_f_one_b(2, 2))
    second = [replace(e, labels=e.labels | {"step": 1}) for e in spans(timeline, 50.0)]
    trace = Trace([*spans(timeline, 0.0), *second], ranks=2)
    assert Timeline.from_trace(trace, step=1).events == timeline.events
    with pytest.raises(ValueError, match=r"the trace has F0\.0 2 times: expected one step"):
        Timeline.from_trace(trace)


def test_a_trace_without_them_is_refused():
    with pytest.raises(ValueError, match='no span "F", "B" or "W"'):
        Timeline.from_trace(Trace([], ranks=1))
    with pytest.raises(ValueError, match="expected stage and micro_batch"):
        Timeline.from_trace(Trace([Event("span", "F", 0, 0.0, 1.0)], ranks=1))
    with pytest.raises(ValueError, match="ends at None"):
        Timeline.from_trace(Trace([Event("span", "F", 0, 0.0, None, labels={"stage": 0, "micro_batch": 0})], ranks=1))


def test_fast_enough_for_a_slider():
    """p 8, m 32, v 2 within a small part of 100 ms of processor time, best of several on a shared machine."""

    def once() -> float:
        begin = time.process_time()
        timeline = simulate(interleaved(8, 32, 2), communication=0.5)
        assert timeline.critical_path
        return time.process_time() - begin

    assert min(once() for _ in range(10)) < 0.05
