"""Exercises: the solution is accepted, and every wrong one is rejected with the verdict that its author expects."""

from __future__ import annotations

import inspect
import tracemalloc

import pytest
import torch
import torch.distributed as dist
from programs_checks import RIGHT

import labkit
from labkit.checks import exercises, look, verdict
from labkit.checks.exercise import Case
from labkit.checks.exercises import ring_reduce_scatter as scatter
from labkit.checks.judge import judge
from labkit.checks.look import Outcome
from labkit.checks.shrink import CRASHES, MOST, smallest
from labkit.checks.trial import Meter
from labkit.checks.verdict import Verdict
from labkit.progress import ORDER

ALL = [exercises.get(name) for name in exercises.NAMES]
#: On every change a third of the core exercises', one of each other; all, those that hang too, in the soak.
WRONG = [
    pytest.param(e, w, id=f"{e.name}-{w.fn.__name__}",
                 marks=[] if w.kind != "deadlocked" and (n % 3 == 1 if e.core else n == 1) else [pytest.mark.soak])
    for e in ALL for n, w in enumerate(e.wrong)
]  # fmt: skip


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.name)
def test_the_solution_is_right(exercise):
    verdict = judge(exercise, exercise.solution)
    assert verdict.kind == "right", str(verdict)
    assert len(exercise.wrong) >= 5
    assert all(exercise.hints())


@pytest.mark.parametrize(("exercise", "wrong"), WRONG)
def test_a_wrong_solution_gets_its_verdict(exercise, wrong):
    verdict = judge(exercise, wrong.fn)
    assert verdict.kind == wrong.kind, str(verdict)
    assert wrong.says in str(verdict)


@pytest.mark.parametrize(("name", "fn"), [(name, fn) for name, fns in RIGHT.items() for fn in fns])
def test_other_ways_are_right_too(name, fn):
    verdict = labkit.check(name, fn)
    assert verdict.right, str(verdict)


def test_a_stub_is_not_attempted_and_nothing_is_raised():
    def stub(tensor):
        raise NotImplementedError

    verdict = labkit.check("ring_reduce_scatter", stub)
    assert str(verdict) == "· not attempted · ring_reduce_scatter"
    assert "not attempted" in verdict._repr_mimebundle_()["text/html"]


def test_an_operation_that_torch_lacks_is_a_crash_and_not_a_stub():
    def lacks(tensor):
        raise NotImplementedError("such as torch raises")

    def inner(tensor):
        lacks(tensor)

    assert labkit.check("ring_reduce_scatter", inner).kind == "crashed"


def test_wrong_names_and_functions():
    with pytest.raises(ValueError, match="did you mean 'ring_all_gather'"):
        labkit.check("ring_allgather", len)
    with pytest.raises(TypeError, match="without \\(\\)"):
        labkit.check("barrier", None)
    with pytest.raises(TypeError, match="text"):
        labkit.hint(3)


def copied(fn):
    """A function as a learner has it who typed it in: the same source, in a namespace of its own."""
    space = {"torch": torch, "dist": dist, "device": labkit.device, "__name__": "__main__"}
    exec(compile(inspect.getsource(fn), "<cell>", "exec"), space)
    return space[fn.__name__]


SOLUTION = copied(exercises.get("ring_reduce_scatter").solution)

# The smallest case


def wrong_where(is_wrong):
    def spoiled(tensor):
        SOLUTION(tensor)
        if is_wrong(dist.get_world_size(), tensor):
            tensor += 1

    return spoiled


@pytest.mark.parametrize(
    ("is_wrong", "where"),
    [
        (lambda world, tensor: world == 3 and tensor.numel() >= 4, "world 3, 4 elements"),
        (lambda world, tensor: world == 3 and tensor.numel() % 3, "world 3, 4 elements"),
        (lambda world, tensor: tensor.numel() >= 7, "world 2, 7 elements"),
        (lambda world, tensor: world > 3, "world 4, 4 elements"),
        (lambda world, tensor: tensor.dtype == torch.uint8, "world 2, 2 elements, uint8"),
        (lambda world, tensor: tensor.is_floating_point(), "world 2, 2 elements, float32"),
        (lambda world, tensor: tensor.numel() > 999, "world 2, 1,000 elements"),
        (lambda world, tensor: tensor.numel() < world, "world 3, 2 elements"),
    ],
)
def test_the_smallest_case_that_fails_is_shown(is_wrong, where):
    verdict = labkit.check("ring_reduce_scatter", wrong_where(is_wrong))
    assert (verdict.kind, verdict.where.replace(", float32", "")) == ("wrong", where.replace(", float32", ""))
    assert where in verdict.where


def test_a_smaller_case_fails_in_the_same_way():
    """Of a function with two faults only the one that was found first is followed."""

    def raises(tensor):
        if (dist.get_world_size(), tensor.numel()) == (2, 3):
            raise KeyError("another")
        if tensor.numel() in (4, 5):
            raise ValueError("this one")
        SOLUTION(tensor)

    verdict = labkit.check("ring_reduce_scatter", raises)
    assert (verdict.kind, verdict.where) == ("crashed", "world 2, 4 elements")
    assert "this one" in str(verdict)


@pytest.mark.soak
def test_a_smaller_hang_is_found_at_the_price_of_one():
    def hangs(tensor):
        if tensor.numel() > 4:
            dist.recv(tensor, (dist.get_rank() + 1) % dist.get_world_size())
        SOLUTION(tensor)

    verdict = labkit.check("ring_reduce_scatter", hangs)
    assert (verdict.kind, verdict.where) == ("deadlocked", "world 2, 5 elements")


def searched(kind, case, fails, passed=()):
    """What `smallest` finds without any rank, and the cases that it looked at."""
    seen = []

    def look(one):
        seen.append(one)
        return Outcome(kind if fails(one) else "right", one)

    found = smallest(Outcome(kind, case), passed, look, lambda one: one.elements >= one.ranks)
    return found.case, seen


def test_the_search_is_bounded():
    large = Case(4, 2**18, "numbers", "float32")
    found, seen = searched("wrong", large, lambda one: one.elements > 100_000 and one.ranks > 2)
    assert found == Case(3, 100_001)
    assert len(seen) <= MOST
    assert searched("wrong", large, lambda one: False) == (large, searched("wrong", large, lambda one: False)[1])
    _, hung = searched("deadlocked", Case(4, 10), lambda one: True)
    assert len(hung) == 1
    _, crashed = searched("crashed", Case(4, 10), lambda one: True)
    assert len(crashed) <= CRASHES
    case, seen = searched("wrong", Case(4, 5, "numbers", more=3), lambda one: one.more < 3, [Case(3, 5)])
    assert case == Case(2, 2)
    assert Case(3, 5) not in seen


# What was seen


def facts(name, fn):
    return str(labkit.check(name, fn)).splitlines()


def test_another_chunk_than_ones_own_is_whole():
    own = copied(scatter._run)
    seen = facts("ring_reduce_scatter", lambda tensor: own(tensor, 1, dist.get_world_size(), shift=1))
    assert "  rank 0 ends with chunk 1 whole; chunk 0 was asked for" in seen


def test_all_messages_go_the_other_way():
    def turned(tensor):
        rank, world = dist.get_rank(), dist.get_world_size()
        chunks = tensor.tensor_split(world)
        for step in range(1, world):
            incoming = chunks[(rank - step - 1) % world]
            arriving = torch.empty_like(incoming)
            for work in [dist.isend(chunks[(rank - step) % world], (rank - 1) % world),
                         dist.irecv(arriving, (rank + 1) % world)]:  # fmt: skip
                work.wait()
            incoming += arriving

    seen = facts("ring_reduce_scatter", turned)
    assert seen[0] == "✗ wrong · ring_reduce_scatter · world 3, 3 elements"
    assert "  every message goes from rank r to rank r − 1; the ring goes to r + 1" in seen


def test_a_tensor_that_was_never_changed():
    def ignores(tensor):
        SOLUTION(tensor.clone())

    def returns(tensor):
        SOLUTION(own := tensor.clone())
        return own

    told = "  messages came to rank 0, and its tensor is as it was at first"
    assert told in facts("ring_reduce_scatter", ignores)
    assert f"{told}; what the function returns is not looked at" in facts("ring_all_reduce", returns)


def test_a_receive_that_is_never_waited_for():
    def hasty(tensor):
        rank, world = dist.get_rank(), dist.get_world_size()
        chunks = tensor.tensor_split(world)
        for step in range(1, world):
            incoming = chunks[(rank - step - 1) % world]
            arriving = incoming.clone()
            dist.irecv(arriving, (rank - 1) % world)
            incoming += arriving
            dist.send(chunks[(rank - step) % world], (rank + 1) % world)

    seen = "\n".join(facts("ring_reduce_scatter", hasty))
    assert "  rank 0 used what it was to receive before it had waited for it  (test_checks.py:" in seen
    assert "rank 0 started a receive from rank 1 and never waited" in seen
    assert "twice" not in seen
    assert "astray" not in seen


def test_a_receive_that_was_waited_for_is_not_hasty():
    """Sizes may be asked for at any time, and other chunks of the same tensor be added to."""

    def careful(tensor):
        rank, world = dist.get_rank(), dist.get_world_size()
        chunks = tensor.tensor_split(world)
        for step in range(1, world):
            into = chunks[(rank - step) % world]
            receiving = dist.irecv(into, (rank - 1) % world)
            assert torch.empty_like(into).numel() == into.numel()
            chunks[rank].add_(0)
            dist.send(chunks[(rank - step + 1) % world], (rank + 1) % world)
            receiving.wait()

    assert labkit.check("ring_all_gather", careful).right


def test_a_number_that_is_no_sum_is_not_called_twice():
    def adds_noise(tensor):
        SOLUTION(tensor)
        tensor += 3

    def adds_a_part(tensor):
        SOLUTION(tensor)
        tensor += 1

    assert "20, which is no sum of what the ranks brought" in str(labkit.check("ring_reduce_scatter", adds_noise))
    assert "expected {0,1}, got {0,0,1}" in str(labkit.check("ring_reduce_scatter", adds_a_part))
    assert "twice" not in str(labkit.check("ring_reduce_scatter", adds_noise))


def test_who_runs_for_ever_is_not_deadlocked(monkeypatch):
    monkeypatch.setattr(look, "LIMIT", 0.5)
    monkeypatch.setattr(look, "PATIENCE", 0.5)

    def runs(tensor):
        while dist.get_rank() == 0:
            pass
        dist.recv(tensor, 0)

    verdict = labkit.check("ring_reduce_scatter", runs)
    assert (verdict.kind, verdict.head.split(" · ")[0]) == ("deadlocked", "∞ not finished")
    assert "deadlocked" not in str(verdict)


def test_what_a_backend_says_as_it_gives_up_is_told_without_time_and_place(capsys):
    def wrong_type(tensor):
        out = torch.empty(len(tensor.tensor_split(dist.get_world_size())[dist.get_rank()]))
        dist.reduce_scatter_tensor(out, tensor)

    seen = str(labkit.check("ring_reduce_scatter", wrong_type))
    assert "Check failed" in seen
    assert ".cpp" not in seen
    assert capsys.readouterr().out == ""


def test_the_root_is_named():
    verdict = labkit.check("tree_broadcast", copied(exercises.get("tree_broadcast").wrong[2].fn))
    assert verdict.kind == "crashed", "it calls what is not there"
    assert verdict.where == "world 2, 1 element, root 0"


def test_a_picture_comes_with_a_ring_that_goes_astray():
    wrong = {w.fn.__name__: w.fn for w in exercises.get("ring_reduce_scatter").wrong}
    verdict = judge(exercises.get("ring_reduce_scatter"), wrong["adds_twice"])
    assert verdict.picture is not None
    assert "twice" in str(verdict.picture)


# Borrowed


def calls_the_group(tensor):
    dist.distributed_c10d._get_default_group().allreduce(tensor).wait()


def calls_the_backend(tensor):
    dist.distributed_c10d._get_default_group()._get_backend(tensor.device).allreduce([tensor]).wait()


def calls_the_transport(tensor):
    dist.distributed_c10d._get_default_group().transport.allreduce([tensor]).wait()


def sends_past_the_group(tensor):
    """The trace would count no bytes of these messages."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(tensor.device)
    rank, world, total = dist.get_rank(), dist.get_world_size(), tensor.clone()
    for distance in range(1, world):
        sent, arriving = backend.send([tensor], (rank + distance) % world, 0), torch.empty_like(tensor)
        backend.recv([arriving], (rank - distance) % world, 0).wait()
        sent.wait()
        total += arriving
    tensor.copy_(total)


def uses_the_algorithm(tensor):
    from labkit.collectives import ring
    from labkit.collectives.peers import Peers
    from labkit.collectives.reduction import Reduction

    ring.all_reduce(Peers(None), tensor, Reduction("sum", tensor.dtype))


def calls_the_solution(tensor):
    from labkit.checks.exercises.ring_all_reduce import EXERCISE

    EXERCISE.solution(tensor)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (calls_the_group, "dist.all_reduce"),
        (calls_the_backend, "backend.allreduce"),
        (calls_the_transport, "backend.allreduce"),
        (sends_past_the_group, "backend.send"),
        (uses_the_algorithm, "collectives.ring.all_reduce"),
        (calls_the_solution, "checks.exercises.ring_all_reduce.ring_all_reduce"),
        (exercises.get("ring_all_reduce").solution, "this function is one of labkit's own"),
    ],
)
def test_what_does_the_exercise_is_borrowed(fn, name):
    verdict = labkit.check("ring_all_reduce", fn)
    assert verdict.kind == "borrowed", str(verdict)
    assert name in str(verdict)


# Not written yet


def test_a_stub_on_one_rank_or_after_a_message_is_a_crash():
    def on_rank_1(tensor):
        if dist.get_rank() == 1:
            raise NotImplementedError
        SOLUTION(tensor)

    def on_rank_1_without_a_word():
        if dist.get_rank() == 1:
            raise NotImplementedError

    def half_written(tensor):
        SOLUTION(tensor)
        raise NotImplementedError

    one, half = labkit.check("ring_reduce_scatter", on_rank_1), labkit.check("ring_all_reduce", half_written)
    assert one.kind == half.kind == labkit.check("barrier", on_rank_1_without_a_word).kind == "crashed"
    assert "not written yet on rank 1 of 2" in str(one)
    assert "not written yet on rank 0, 1 of 2" in str(half)


# Memory, output, words


@pytest.mark.parametrize("share", [1, 8])
def test_arrays_of_numpy_are_counted(share):
    """Whether they are too much alone, or together with the tensors."""

    def hoards(tensor):
        kept = [tensor.numpy()[: tensor.numel() // share].copy() for _ in range(5)]
        if share == 1:
            kept.clear()
        SOLUTION(tensor)

    seen = str(labkit.check("ring_reduce_scatter", hoards))
    assert seen.startswith("△ right, but wasteful")
    assert "held by a rank in tensors of its own" in seen


def test_a_storage_that_is_resized_to_nothing_is_not_held():
    """As FSDP frees. Its bytes count again once they are there again."""
    kept = []
    with Meter() as meter:
        for _ in range(8):
            kept.append(torch.empty(1000))
            kept[-1].untyped_storage().resize_(0)
    assert meter.peak == 4000
    with Meter() as meter:
        one = torch.empty(1000)
        one.untyped_storage().resize_(0)
        one.untyped_storage().resize_(8000)
        another = torch.empty(10)
    assert meter.peak == 8000 + another.nbytes


def test_no_meter_ends_the_tracing_that_it_began():
    """To end it while a thread of gloo's lets go of a tensor crashes the rank."""
    try:
        with Meter(arrays=True):
            assert not tracemalloc.is_tracing(), "nothing has left torch yet"
            torch.ones(3).tolist()
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()  # here there is no gloo


def test_output_of_one_case_is_shown_and_no_noise(capsys):
    def talks(tensor):
        print(f"{dist.get_world_size()} ranks, {tensor.numel()} elements")
        SOLUTION(tensor)

    assert labkit.check("ring_reduce_scatter", talks).right
    assert capsys.readouterr().out == "rank 0 │ 2 ranks, 2 elements\nrank 1 │ 2 ranks, 2 elements\n"
    receives_as_float = copied(scatter.receives_as_float)
    assert labkit.check("ring_reduce_scatter", receives_as_float).kind == "crashed"
    assert capsys.readouterr() == ("", "")


def test_each_kind_has_a_sign_and_words():
    assert list(verdict.SIGNS) == list(ORDER)
    assert all(verdict.kind_in_words(kind) for kind in ORDER)


def test_a_verdict_holds_only_what_was_seen():
    assert str(Verdict("x", "right", "", ("a",))) == "✓ right · x\n  a"
    assert Case(3, 5).kind == "parts"
