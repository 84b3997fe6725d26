"""Schedules as data: the orders of the papers, torch's and Megatron's; what they hold; text and back."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_schedules import ONE_STAGE, of_size, torch_rows

from labkit.pipeline import (
    Action,
    Message,
    Schedule,
    breadth_first,
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
from labkit.pipeline.schedule import stash_after

SIZES = [(1, 1), (1, 4), (2, 1), (2, 4), (2, 5), (3, 7), (4, 1), (4, 3), (4, 4), (4, 8), (4, 11), (8, 16)]

#: Where each block of 1F1B starts with F = B = 1: digits are forwards, letters backwards.
CHART = """
R0 1234...a5b6c.d.e.f
R1 .123..a4b5c6d.e.f.
R2 ..12.a3b4c5d6e.f..
R3 ...1a2b3c4d5e6f...
"""


def rows(schedule: Schedule) -> list[list[Action]]:
    return [list(row) for row in schedule.actions]


# Against what is published


def test_the_chart_of_1f1b():
    timeline = simulate(one_f_one_b(4, 6), forward=1, backward=1, weight=0)
    chart = [["."] * 18 for _ in range(4)]
    for e in timeline.events:
        chart[e.rank][int(e.start)] = "123456"[e.micro_batch] if e.kind == "F" else "abcdef"[e.micro_batch]
    assert [f"R{rank} {''.join(row)}" for rank, row in enumerate(chart)] == CHART.split("\n")[1:-1]
    assert timeline.makespan == 18
    assert timeline.idle == (6, 6, 6, 6)


def test_the_rule_for_1f1b_rank_by_rank():
    """min(p−1−r, m) forwards first, then in turn; also with fewer micro-batches than ranks."""
    assert one_f_one_b(4, 3).text() == (
        "r0: F0 F1 F2 B0 B1 B2\nr1: F0 F1 F2 B0 B1 B2\nr2: F0 F1 B0 F2 B1 B2\nr3: F0 B0 F1 B1 F2 B2"
    )
    assert one_f_one_b(8, 1).text() == "\n".join(f"r{rank}: F0 B0" for rank in range(8))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_what_a_rank_holds(p, m):
    assert gpipe(p, m).stash() == (m,) * p
    assert one_f_one_b(p, m).stash() == tuple(min(m, p - rank) for rank in range(p))
    assert zero_bubble_h1(p, m).stash() == (min(m, p),) * p
    assert zero_bubble_h2(p, m).stash() == (min(m, 2 * p - 1),) * p
    assert breadth_first(p, m, 2).stash() == (2 * m,) * p
    assert max(zero_bubble_v(p, m).stash()) == min(2 * m, 2 * p)
    for v in (2, 3):
        if m % p == 0:
            most = [(v - 1) * p + 2 * (p - 1 - rank) + 1 for rank in range(p)]
            assert interleaved(p, m, v).stash() == tuple(min(m * v, n) for n in most)


def test_few_micro_batches_are_held_by_few():
    """pytorch/torchtitan#775: p 4, m 3."""
    assert one_f_one_b(4, 3).stash() == (3, 3, 2, 1)


def test_what_a_rank_holds_during_each_action():
    """From the beginning of F to the end of B, or of W."""
    assert stash_after(one_f_one_b(2, 3).actions[0], frozenset()) == [1, 2, 2, 2, 2, 1]
    schedule = zero_bubble_h1(2, 2)
    assert schedule.text().splitlines()[1] == "r1: F0 B0 F1 B1 W0 W1"
    assert stash_after(schedule.actions[1], schedule.taken_apart) == [1, 1, 2, 2, 2, 1]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_dual_pipe_holds_as_much_as_its_table_says(p):
    """DeepSeek-V3, table 2: p+1 micro-batches, and two copies of the parameters."""
    schedule = dual_pipe(p, 4 * p)
    assert schedule.stash() == (p + 1,) * p
    assert [schedule.stages_of(rank) for rank in range(p)] == [tuple(sorted({r, p - 1 - r})) for r in range(p)]


def test_dual_pipe_places_by_direction():
    schedule = dual_pipe(4, 8)
    assert [schedule.rank_of(stage, 3) for stage in range(4)] == [0, 1, 2, 3]
    assert [schedule.rank_of(stage, 4) for stage in range(4)] == [3, 2, 1, 0]


# Against torch's own


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_is_torchs(p, m):
    assert rows(gpipe(p, m)) == torch_rows("GPipe", p, m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8)])
def test_1f1b_is_torchs_but_for_the_last_rank(p, m):
    """There torch's table numbers forwards from 1: what it draws is F8 of eight micro-batches. Its runtime does not
    read that table."""
    ours, theirs = rows(one_f_one_b(p, m)), torch_rows("1F1B", p, m)
    assert ours[:-1] == theirs[:-1]
    assert ours[-1] == [a._replace(micro_batch=a.micro_batch - (a.kind == "F")) for a in theirs[-1]]


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_breadth_first_is_torchs_with_backwards_in_the_order_of_forwards(p, m, v):
    """torch runs them from the last micro-batch to the first: the same makespan and the same peak."""
    turned = [
        [a if a.kind == "F" else a._replace(micro_batch=m - 1 - a.micro_batch) for a in row]
        for row in torch_rows("LoopedBFS", p, m, v)
    ]
    ours = breadth_first(p, m, v)
    assert rows(ours) == turned
    theirs = replace(ours, actions=torch_rows("LoopedBFS", p, m, v))
    theirs.check()
    assert theirs.stash() == ours.stash()
    assert simulate(theirs).makespan == simulate(ours).makespan


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 10), (2, 3)])
def test_interleaved_is_torchs(p, m, v):
    """For every m that torch takes; it refuses where the groups cannot be even (p 4, m 11), labkit makes 6 and 5."""
    if m % max(1, m // p):
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            torch_rows("Interleaved1F1B", p, m, v)
        interleaved(p, m, v).check()
    else:
        assert rows(interleaved(p, m, v)) == torch_rows("Interleaved1F1B", p, m, v)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % max(1, m // p) == 0])
def test_zero_bubble_h1_is_torchs_with_one_stage_a_rank(p, m):
    assert rows(zero_bubble_h1(p, m)) == torch_rows("InterleavedZeroBubble", p, m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (4, 3)])
def test_torchs_interleaved_zero_bubble_is_legal_and_shorter(p, m):
    """labkit has no name for it: two stages a rank, W as in ZB-H1, and half the warm-up of interleaved 1F1B."""
    theirs = replace(interleaved(p, m, 2), name="torch's", actions=torch_rows("InterleavedZeroBubble", p, m, 2))
    theirs.check()
    assert simulate(theirs).makespan < simulate(interleaved(p, m, 2)).makespan


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_v_is_torchs(p, m):
    ours = zero_bubble_v(p, m)
    assert rows(ours) == torch_rows("ZBVZeroBubble", p, m, 2)
    assert ours.placement == (*range(p), *reversed(range(p)))


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 5), (3, 7), (4, 8), (4, 11), (8, 16)])
def test_dual_pipe_v_is_torchs(p, m):
    assert rows(dual_pipe_v(p, m)) == torch_rows("DualPipeV", p, m, 2)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 14), (8, 16)])
def test_dual_pipe_is_torchs_dual_pipe_v_unfolded(p, m):
    """A rank of DualPipe does what DualPipeV's does on half the ranks; the way up there is the other copy here."""
    for rank, row in enumerate(rows(dual_pipe(p, m))):
        depth = min(rank, p - 1 - rank)
        near_is_first = rank == depth
        theirs = torch_rows("DualPipeV", p // 2, m // 2, 2)[depth]
        for ours, a in zip(row, theirs, strict=True):
            first = (a.stage == depth) == near_is_first
            assert ours == (a.kind, a.micro_batch + (0 if first else m // 2), a.stage)


# Against Megatron's


@pytest.mark.parametrize(("p", "m", "v", "group"), [(2, 8, 2, 4), (4, 16, 3, 8), (4, 10, 2, 6), (2, 6, 4, 3)])
def test_groups_as_megatron_makes_them(p, m, v, group):
    """`get_schedule_table`: the k-th of a rank's m·v forwards, by arithmetic on k; backwards take the chunks in
    reverse. The warm-up is (v−1)·group and two for each rank after this one."""

    def at(k: int, backward: bool) -> tuple[int, int]:
        first = k // (group * v) * group
        size = min(group, m - first)
        chunk, offset = divmod(k - first * v, size)
        return first + offset, v - 1 - chunk if backward else chunk

    for rank, row in enumerate(interleaved(p, m, v, group).actions):
        by_kind = {kind: [(a.micro_batch, a.stage // p) for a in row if a.kind == kind] for kind in "FB"}
        assert by_kind == {"F": [at(k, False) for k in range(m * v)], "B": [at(k, True) for k in range(m * v)]}
        warm_up = min(m * v, (v - 1) * group + 2 * (p - 1 - rank))
        kinds = "F" * warm_up + "FB" * (m * v - warm_up) + "B" * warm_up
        assert "".join(a.kind for a in row) == kinds


# Every one of them


@pytest.mark.parametrize("p", range(1, 6))
def test_every_size_is_legal(p):
    """Fewer micro-batches than ranks, no multiple of them, one rank."""
    for m in range(1, 12):
        for schedule in of_size(p, m):
            schedule.check()


def test_one_rank_is_no_special_program():
    for make in ONE_STAGE[:2]:
        assert make(1, 2).stages_of(0) == (0,)
    assert gpipe(1, 2).text() == "r0: F0 F1 B0 B1"
    assert one_f_one_b(1, 2).text() == "r0: F0 B0 F1 B1"
    assert zero_bubble_h1(1, 2).text() == "r0: F0 B0 W0 F1 B1 W1"


def test_one_chunk_is_what_it_generalises():
    assert breadth_first(4, 6, 1).actions == gpipe(4, 6).actions
    assert sorted(map(sorted, interleaved(4, 6, 1).actions)) == sorted(map(sorted, one_f_one_b(4, 6).actions))


def test_each_lists_assumptions_and_source():
    for schedule in of_size(2, 4):
        assert schedule.assumptions
        assert schedule.source


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: gpipe(0, 4), "ranks is 0: expected 1 or more"),
        (lambda: one_f_one_b(4, 0), "micro_batches is 0"),
        (lambda: breadth_first(4, 4, 0), "chunks is 0"),
        (lambda: interleaved(4, 8, 2, group=2), "group=2 cuts 8 micro-batches by 2, 2, 2, 2: expected 4"),
        (lambda: interleaved(4, 9, 2, group=4), "by 4, 4, 1: expected 4"),
        (lambda: dual_pipe(3, 8), "ranks is 3: DualPipe takes an even number"),
        (lambda: dual_pipe(4, 9), "micro_batches is 9"),
        (lambda: dual_pipe(4, 6), "micro_batches is 6: expected 8 or more"),
        (lambda: dual_pipe_v(4, 6), "micro_batches is 6: expected 8 or more"),
    ],
)
def test_refused_with_the_reason(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_no_whole_number():
    for make in (*ONE_STAGE, zero_bubble_v, dual_pipe, dual_pipe_v):
        with pytest.raises(TypeError, match=r"ranks is 2\.0: expected a whole number"):
            make(2.0, 4)


# The data


def test_a_schedule_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="actions has 1 rows, but there are 2 ranks"):
        Schedule(name="x", ranks=2, micro_batches=1, stages=2, actions=((),))
    with pytest.raises(ValueError, match="there is no micro-batch 1, expected 0 to 0"):
        Schedule(name="x", ranks=1, micro_batches=1, stages=1, actions=((Action("F", 1, 0),),))
    with pytest.raises(ValueError, match="expected kind 'F', 'B' or 'W'"):
        Schedule(name="x", ranks=1, micro_batches=1, stages=1, actions=((Action("G", 0, 0),),))
    with pytest.raises(TypeError, match="expected an Action"):
        Schedule(name="x", ranks=1, micro_batches=1, stages=1, actions=(("F0",),))
    with pytest.raises(ValueError, match=r"placement is \(0, 2\)"):
        replace(gpipe(2, 1), placement=(0, 2))


def test_messages_follow_the_placement():
    schedule = zero_bubble_v(2, 1)  # stages 0 1 2 3 on ranks 0 1 1 0
    assert schedule.message(Action("F", 0, 0)) == Message("F", 0, 0, source=0, target=1)
    assert schedule.message(Action("F", 0, 1)) is None, "stages 1 and 2 are on one rank"
    assert schedule.message(Action("B", 0, 0)) is None, "nobody waits for the first stage's"
    assert schedule.message(Action("W", 0, 2)) is None
    message = schedule.message(Action("B", 0, 3))
    assert message == Message("B", 0, 3, source=0, target=1)
    assert message.producer == Action("B", 0, 3)
    assert message.consumer == Action("B", 0, 2)


@given(st.sampled_from([s for p in (1, 2, 4) for m in (1, 4, 8) for s in of_size(p, m)]))
def test_text_and_back(schedule):
    back = Schedule.parse(schedule.text(), placement=schedule.placement, stages=schedule.stages)
    assert back.actions == schedule.actions
    assert (back.ranks, back.micro_batches, back.stages) == (
        schedule.ranks, schedule.micro_batches, schedule.stages)  # fmt: skip


def test_parse_says_where_it_cannot_read():
    for text, said in {
        "r0: F0\nr0: F0": "line 2 is 'r0: F0': expected 'r1: F0 F1 …'",
        "r0: F0 X1": "line 1, word 2: 'X1' is no action",
        "\nrank 0: F0": "line 2 is 'rank 0: F0'",
        "r0: F0.0 F0.1 B0": "line 1, word 3: 'B0' names no stage, but rank 0 hosts 2",
        " ": "the text has no line",
    }.items():
        with pytest.raises(ValueError, match=said.replace(".", r"\.")):
            Schedule.parse(text)


def test_parse_takes_what_is_not_in_the_text():
    schedule = Schedule.parse("r0: F0\nr1:", micro_batches=4)
    assert (schedule.ranks, schedule.stages, schedule.micro_batches) == (2, 2, 4)
    assert schedule.actions == ((Action("F", 0, 0),), ())


def test_schedules_need_no_torch():
    code = "import sys, labkit.pipeline as p; p.one_f_one_b(4, 8).check(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
