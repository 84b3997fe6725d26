"""check() against another executor, a sorted graph: what is broken is rejected, what can run is accepted."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipeline_schedules import of_size

from labkit.pipeline import (
    Action,
    Compute,
    IllegalSchedule,
    Message,
    Receive,
    Schedule,
    Send,
    check_messages,
    dual_pipe,
    interleaved,
    messages,
    one_f_one_b,
    zero_bubble_h1,
)

SCHEDULES = [s for p in (1, 2, 3, 4) for m in (1, 2, 4, 8) for s in of_size(p, m, chunks=(1, 2))]


def runs(schedule: Schedule) -> bool:
    """The other executor: every action is a node, each arrow says "before". It can run if there is no circle, and if
    what there is on each rank is what there has to be."""
    p, m, last = schedule.ranks, schedule.micro_batches, schedule.stages - 1
    split = any(a.kind == "W" for row in schedule.actions for a in row)
    wanted = [Counter() for _ in range(p)]
    before = defaultdict(set)
    for i in range(m):
        for s in range(last + 1):
            has_w = split and (i, s) not in schedule.unsplit
            wanted[schedule.rank_of(s, i)].update([("F", i, s), ("B", i, s), *[("W", i, s)] * has_w])
            if s < last:
                before["F", i, s + 1].add(("F", i, s))
                before["B", i, s].add(("B", i, s + 1))
            before["B", i, s].add(("F", i, s))
            before["W", i, s].add(("B", i, s))
    if [Counter(map(tuple, row)) for row in schedule.actions] != wanted:
        return False
    for row in schedule.actions:
        for one, other in pairwise(row):
            before[tuple(other)].add(tuple(one))
    return sorts(before)


def sorts(before: dict) -> bool:
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


def accepted(schedule: Schedule) -> bool:
    try:
        schedule.check()
    except IllegalSchedule:
        return False
    return True


# Mutants


def drop(rows, rng):
    row = rng.choice([r for r in rows if r])
    del row[rng.randrange(len(row))]


def duplicate(rows, rng):
    row = rng.choice([r for r in rows if r])
    row.insert(rng.randrange(len(row) + 1), rng.choice(row))


def swap(rows, rng):
    row = rng.choice([r for r in rows if len(r) > 1])
    i, j = rng.sample(range(len(row)), 2)
    row[i], row[j] = row[j], row[i]


def swap_neighbours(rows, rng):
    row = rng.choice([r for r in rows if len(r) > 1])
    i = rng.randrange(len(row) - 1)
    row[i], row[i + 1] = row[i + 1], row[i]


def shift(rows, rng):
    row = rng.choice([r for r in rows if r])
    row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))


def move(rows, rng):
    source = rng.choice([r for r in rows if r])
    action = source.pop(rng.randrange(len(source)))
    target = rng.choice(rows)
    target.insert(rng.randrange(len(target) + 1), action)


def reverse(rows, rng):
    """F after its B on the same rank, or B after its W."""
    row = rng.choice([r for r in rows if r])
    a = rng.choice([a for a in row if a.kind == "F"])
    i, j = row.index(a), row.index(a._replace(kind="B"))
    row[i], row[j] = row[j], row[i]


ALWAYS_WRONG = (drop, duplicate, reverse)
MUTATIONS = (*ALWAYS_WRONG, swap, swap_neighbours, shift, move)


def mutant(schedule: Schedule, seed: int, mutations) -> Schedule:
    rng, rows = random.Random(seed), [list(row) for row in schedule.actions]
    for mutate in mutations:
        if max(map(len, rows)) > 1:
            mutate(rows, rng)
    return replace(schedule, actions=tuple(map(tuple, rows)))


@settings(max_examples=400)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(0, 2**32),
    st.lists(st.sampled_from([m for m in MUTATIONS if m is not reverse]), min_size=1, max_size=4),
)
def test_agrees_with_the_other_executor(schedule, seed, mutations):
    broken = mutant(schedule, seed, mutations)
    assert accepted(broken) == runs(broken)


@settings(max_examples=200)
@given(st.sampled_from(SCHEDULES), st.integers(0, 2**32), st.integers(1, 6))
def test_agrees_where_most_can_run(schedule, seed, times):
    """Neighbours changed over: about half of these still run, with other messages in another order."""
    changed = mutant(schedule, seed, [swap_neighbours] * times)
    assert accepted(changed) == runs(changed)
    if runs(changed):
        assert_messages_can_be_sent(changed)


@settings(max_examples=150)
@given(st.sampled_from(SCHEDULES), st.integers(0, 2**32), st.sampled_from(ALWAYS_WRONG))
def test_dropped_duplicated_and_reversed_are_rejected(schedule, seed, mutate):
    broken = mutant(schedule, seed, [mutate])
    assume(broken.split == schedule.split)  # without its only W a schedule is another one, which is whole
    assert not accepted(broken)


@settings(max_examples=100)
@given(st.sampled_from(SCHEDULES), st.integers(0, 2**32))
def test_a_random_order_that_can_run_is_accepted(schedule, seed):
    """Not a change of a known one: each rank does at random whatever can be done."""
    rng, left = random.Random(seed), {a for row in schedule.actions for a in row}
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    while left:
        a = rng.choice(sorted(left))
        s, i = a.stage, a.micro_batch
        waits = {"F": [("F", i, s - 1)], "B": [("F", i, s), ("B", i, s + 1)], "W": [("B", i, s)]}[a.kind]
        if not left.intersection(waits):
            left.remove(a)
            rows[schedule.rank_of(s, i)].append(a)
    made = replace(schedule, actions=tuple(map(tuple, rows)))
    made.check()
    assert_messages_can_be_sent(made)


# Messages


def assert_messages_can_be_sent(schedule: Schedule) -> None:
    """Each rank computes in the schedule's order; each input is received between its making and its use; and with a
    send and its receive as one node, what remains is no circle."""
    programs = messages(schedule)
    assert [[x.action for x in p if isinstance(x, Compute)] for p in programs] == list(map(list, schedule.actions))
    assert meets(programs)
    for rank, program in enumerate(programs):
        place = {x.action: n for n, x in enumerate(program) if isinstance(x, Compute)}
        for n, x in enumerate(program):
            if isinstance(x, Send):
                assert place[x.message.producer] < n
            elif isinstance(x, Receive):
                assert n < place[x.message.consumer]
        crossing = sum(1 for x in program if isinstance(x, Receive))
        fed = [a for a in schedule.actions[rank] if feeder(schedule, a) not in (None, rank)]
        assert crossing == len(fed), "each input that another rank makes, once"


def feeder(schedule: Schedule, a: Action) -> int | None:
    """The rank whose message the action waits for."""
    neighbour = a.stage + {"F": -1, "B": 1, "W": schedule.stages}[a.kind]
    return schedule.rank_of(neighbour, a.micro_batch) if neighbour in range(schedule.stages) else None


def meets(programs) -> bool:
    """Whether programs of single, blocking sends and receives come to their ends."""
    pairs = defaultdict(lambda: ([], []))
    for program in programs:
        for x in program:
            if not isinstance(x, Compute):
                pairs[x.message.source, x.message.target][isinstance(x, Receive)].append(x.message)
    if any(sent != received for sent, received in pairs.values()):
        return False
    before = defaultdict(set)
    for rank, program in enumerate(programs):
        nodes = [(rank, n) if isinstance(x, Compute) else x.message for n, x in enumerate(program)]
        for one, other in pairwise(nodes):
            before[other].add(one)
    return sorts(before)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_messages_of_every_schedule_can_be_sent(p):
    for m in (1, 3, 4, 8):
        for schedule in of_size(p, m):
            assert_messages_can_be_sent(schedule)


def test_two_ranks_interleaved_where_the_next_is_the_one_before():
    """NVIDIA/Megatron-LM#750: all of a rank's messages go to the same one, so only their order tells them apart."""
    schedule = interleaved(2, 4, 2)
    programs = messages(schedule)
    for source, target in ((0, 1), (1, 0)):
        sent = [x.message for x in programs[source] if isinstance(x, Send)]
        received = [x.message for x in programs[target] if isinstance(x, Receive)]
        assert sent == received
        # forward: rank 0 sends from stages 0 and 2, rank 1 from 1; backward: from 2, and from 1 and 3; four each
        assert Counter((m.kind, m.stage) for m in sent) == (
            {("F", 0): 4, ("F", 2): 4, ("B", 2): 4} if source == 0 else {("F", 1): 4, ("B", 1): 4, ("B", 3): 4}
        )
    ours = [n for n, x in enumerate(programs[1]) if isinstance(x, Receive)]
    n = next(n for n in ours if n + 1 in ours or n + 2 in ours)
    other = next(k for k in ours if k > n)
    programs[1][n], programs[1][other] = programs[1][other], programs[1][n]
    with pytest.raises(IllegalSchedule, match=r"message \d from rank 0 to rank 1 is sent as F.*, and received as"):
        check_messages(programs)


@settings(max_examples=200)
@given(st.sampled_from([s for s in SCHEDULES if s.ranks > 1]), st.integers(0, 2**32), st.integers(1, 3))
def test_programs_by_hand_are_judged_as_by_the_other_executor(schedule, seed, times):
    """Neighbouring items of a rank's program changed over: the order of a pair breaks, or two wait for each other."""
    rng, programs = random.Random(seed), messages(schedule)
    for _ in range(times):
        swap_neighbours(programs, rng)
    try:
        check_messages(programs)
        said = True
    except IllegalSchedule:
        said = False
    assert said == meets(programs)


def test_both_send_first():
    """NVIDIA/nccl#479."""
    there, back = Message("F", 0, 0, source=0, target=1), Message("B", 0, 1, source=1, target=0)
    check_messages([[Send(there), Receive(back)], [Receive(there), Send(back)]])
    with pytest.raises(IllegalSchedule) as error:
        check_messages([[Send(there), Receive(back)], [Send(back), Receive(there)]])
    assert str(error.value) == (
        "deadlock: rank 0 waits at place 0 to send F0.0 to 1, rank 1 waits at place 0 to send B0.1 to 0"
    )


def test_what_is_sent_is_received():
    message = Message("F", 0, 0, source=0, target=1)
    with pytest.raises(IllegalSchedule, match="rank 0 sends 1 messages to rank 1, which receives 0"):
        check_messages([[Send(message)], []])
    with pytest.raises(IllegalSchedule, match=r"rank 1 cannot send F0\.0 to 1"):
        check_messages([[], [Send(message)]])
    with pytest.raises(IllegalSchedule, match="the message goes from 0 to 1, and there are 1 ranks"):
        check_messages([[Send(message)]])


# What the error says


def error_of(text: str, **more) -> IllegalSchedule:
    with pytest.raises(IllegalSchedule) as error:
        Schedule.parse(text, **more).check()
    return error.value


def test_it_names_action_blocker_and_place():
    error = error_of("r0: F0 F1 B0 B1\nr1: F0 B1 F1 B0")
    assert str(error) == (
        "B1 on rank 1, at place 1, can never run: it needs F1 on rank 1, which stands at place 2 behind B1 itself"
    )
    assert (error.action, error.at) == (Action("B", 1, 1), (1, 1))
    assert (error.blocker, error.blocker_at) == (Action("F", 1, 1), (1, 2))


def test_it_follows_a_circle_across_ranks():
    error = error_of("r0: F0 B0 F1 B1\nr1: F0 F1 B0 B1")
    assert str(error) == (
        "B0 on rank 0, at place 1, can never run: it needs B0 on rank 1, which stands at place 2 behind F1 (place 1), "
        "which needs F1 on rank 0, which stands at place 2 behind B0 itself"
    )


def test_it_names_what_is_missing_twice_or_elsewhere():
    assert str(error_of("r0: F0 B0\nr1: F0")) == "B0 of stage 1 is missing: rank 1 never does it"
    assert str(error_of("r0: F0 F0 B0\nr1: F0 B0")) == "F0 of stage 0 stands on rank 0 at place 1, but also at place 0"
    error = error_of("r0: F0.0 B0.0 F0.1\nr1: B0.1")
    assert str(error) == "F0 of stage 1 stands on rank 0 at place 2, but rank 1 has that stage"
    assert error.at == (0, 2)


def test_if_one_is_split_all_are():
    assert "W1 of stage 0 is missing: rank 0 never does it" in str(error_of("r0: F0 B0 W0 F1 B1"))
    schedule = dual_pipe(2, 4)
    assert schedule.split
    with pytest.raises(IllegalSchedule, match=r"W0\.0 of stage 0 is missing"):
        replace(schedule, unsplit=frozenset()).check()
    with pytest.raises(IllegalSchedule, match=r"W0 stands on rank 0, but its B is both gradients"):
        replace(zero_bubble_h1(1, 2), unsplit=frozenset({(0, 0)})).check()


def test_micro_batches_that_are_not_there_are_missed():
    assert "F1 of stage 0 is missing" in str(error_of("r0: F0 B0", micro_batches=2))


def test_it_can_be_caught_as_a_value_error():
    assert issubclass(IllegalSchedule, ValueError)
    one_f_one_b(4, 8).check()
