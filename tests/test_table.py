"""The operation table, and what is read from it: pure data, no processes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.world.compare import find_disagreement
from labkit.world.stuck import find_cycle, rows, seen_in_table, verdict
from labkit.world.table import DONE, KEEP, WAITING, Operation, OperationTable, Signature, chained


@pytest.fixture
def table():
    made = OperationTable(3)
    yield made
    made.close()


def operation(rank=0, number=1, name="all_reduce", numel=10, sequence=1, state=WAITING, **more):
    signature = Signature(name, "float32", numel, "sum" if "reduce" in name else None)
    return Operation(signature, number=number, slot=number, sequence=sequence, rank=rank, state=state,
                     chain=chained(0, signature), **more)  # fmt: skip


def test_what_is_written_is_read(table):
    written = operation(1, place=("/somewhere/model.py", 7, "step"), members=[0, 1], group="tp {0,1}", tag=3, since=1.5)
    table.write(1, written)
    written.slot = 0  # where it stood is of no interest to a reader
    assert table.read(1) == [written]
    assert table.read(0) == []
    again = OperationTable(3, __import__("os").dup(table.fd))
    assert again.read(1) == [written], "another process sees the same"
    again.close()


def test_the_last_operations_are_kept_and_states_follow(table):
    operations = [operation(number=n, sequence=n) for n in range(1, KEEP + 10)]
    for o in operations:
        table.write(0, o)
    assert [o.number for o in table.read(0)] == list(range(10, KEEP + 10))
    table.set_state(0, operations[-1], DONE)
    table.set_state(0, operations[0], DONE)  # its place has been taken: nothing must change
    assert [o.state for o in table.read(0)] == [WAITING] * (KEEP - 1) + [DONE]
    table.clear(0)
    assert table.read(0) == []


def test_messages_do_not_push_out_collectives(table):
    table.write(0, operation(number=1))
    for n in range(2, 3 * KEEP):
        o = Operation(Signature("send", "float32", 1), peer=1, rank=0, number=n, slot=n, state=DONE)
        table.write(0, o)
    kept = table.read(0)
    assert kept[0].is_collective
    assert len(kept) == KEEP + 1


def test_a_reader_never_sees_half_a_record():
    """One process writes as fast as it can, this one reads: nothing torn, nothing raised."""
    import multiprocessing

    shared = OperationTable(2)
    writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(shared,), daemon=True)
    writer.start()
    try:
        seen = 0
        for _ in range(1000):
            for o in shared.read(0):
                seen += 1
                assert o.signature.numel == o.number, "text and head belong together"
                assert o.group == f"group {o.number % 7}"
            assert not shared.conflicts(operation(1, numel=1, group="group 1", sequence=10**6))
        assert seen > 3_000
    finally:
        writer.kill()
        writer.join()
        shared.close()


def _write_for_ever(shared):
    n = 0
    while True:
        n += 1
        shared.write(
            0, operation(number=n, sequence=n, numel=n, group=f"group {n % 7}", place=("x" * (n % 50), n, "f"))
        )


def test_long_names_of_groups_stay_apart(table):
    long = "a description of a group that goes on for very much longer than sixty characters "
    for rank, name in enumerate((long + "one", long + "two")):
        table.write(rank, operation(rank, group=name, members=[rank]))
    names = {table.read(rank)[0].group for rank in (0, 1)}
    assert len(names) == 2


@given(st.text(max_size=500), st.text(max_size=200), st.lists(st.integers(0, 10**6), max_size=200))
def test_any_text_fits(path, group, members):
    made = OperationTable(1)
    made.write(0, operation(place=(path, 1, group), group=group, members=members))
    (read,) = made.read(0)
    made.close()
    assert read.signature == operation().signature
    assert group.startswith(read.group[:50])


def test_a_conflict_is_seen_by_whoever_looks_second(table):
    table.write(0, operation(0, numel=10))
    assert table.conflicts(operation(1, numel=11))
    assert not table.conflicts(operation(1, numel=10))
    assert not table.conflicts(operation(1, numel=11, sequence=2)), "not the same meeting"
    assert not table.conflicts(operation(1, numel=11, group="{0,1}")), "not the same group"


def test_a_disagreement_is_the_first_in_time_and_names_members_only():
    a = [operation(0, 1, since=0.0), operation(0, 2, sequence=2, numel=5, since=2.0)]
    b = [operation(1, 1, since=0.0), operation(1, 2, sequence=2, numel=6, since=1.0)]
    failure = find_disagreement([a, b], set(), 2)
    assert failure.ranks == [0, 1]
    assert "collective 2" in str(failure)
    assert find_disagreement([a[:1], b[:1]], set(), 2) is None
    assert find_disagreement([a, b[:1]], set(), 2) is None, "rank 1 may still come"
    assert "nothing: its function had returned" in str(find_disagreement([a, b[:1]], {1}, 2))


@given(st.integers(2, 6), st.integers(0, 5), st.randoms())
def test_a_mutated_program_is_always_found(ranks, length, rng: random.Random):
    """Every rank runs the same list of collectives, but one has one operation changed or left out."""
    program = [rng.randint(1, 5) for _ in range(length + 1)]
    programs = [list(program) for _ in range(ranks)]
    guilty, at = rng.randrange(ranks), rng.randrange(len(program))
    if rng.random() < 0.5:
        programs[guilty][at] += 1
    else:
        del programs[guilty][at]
    histories = [
        [operation(r, n, sequence=n, numel=size, since=float(n)) for n, size in enumerate(p, start=1)]
        for r, p in enumerate(programs)
    ]
    assert find_disagreement(histories, set(range(ranks)), ranks) is not None
    assert find_disagreement([histories[guilty - 1]] * ranks, set(range(ranks)), ranks) is None


def receives(rank: int, peer: int) -> list[Operation]:
    return [Operation(Signature("recv", "float32", 1), peer=peer, rank=rank, state=WAITING, number=1)]


@given(st.lists(st.integers(0, 7), min_size=2, max_size=8), st.data())
def test_a_cycle_is_found_exactly_when_there_is_one(targets, data):
    """Each rank waits for one other, or has returned: follow the pointers as an independent check."""
    n = len(targets)
    returned = set(data.draw(st.sets(st.integers(0, n - 1))))
    waits = {r: t % n for r, t in enumerate(targets) if r not in returned and t % n != r}
    operations = [receives(r, waits[r]) if r in waits else [] for r in range(n)]
    found = find_cycle(rows(operations, set(range(n)) - waits.keys(), set(), {}, 0.0))

    def circles(start: int) -> bool:
        at = start
        for _ in range(n + 1):
            if at not in waits:
                return False
            at = waits[at]
        return True

    assert bool(found) == any(circles(r) for r in waits)
    for a, b in zip(found, found[1:] + found[:1], strict=True):
        assert waits[a] == b


def test_verdicts():
    both = rows([receives(0, 1), receives(1, 0)], set(), set(), {}, 0.0)
    assert verdict(both, find_cycle(both)) == "0 waits for 1, 1 waits for 0: both receive first"
    mixed = rows([receives(0, 1), [operation(1)]], set(), set(), {}, 0.0)
    assert verdict(mixed, find_cycle(mixed)) == "0 waits for 1, 1 waits for 0"
    gone = rows([receives(0, 1), []], {1}, set(), {}, 0.0)
    assert verdict(gone, []) == "rank 0 waits for rank 1, which had returned already"
    busy = rows([[], []], set(), set(), {0: ("<ipython-input-1>", 3, "f")}, 0.0)
    assert verdict(busy, []) == "ranks 0 and 1 still ran; nobody waits in a circle"


def test_events_from_the_table():
    (event,) = seen_in_table([operation(2, since=5.0, state=WAITING)], 3.0)
    assert (event.rank, event.start, event.end, event.nbytes, event.kind) == (2, 2.0, None, 40, "collective")
