"""Exercises: the solution is accepted, and every wrong one is rejected with the verdict that its author expects."""

from __future__ import annotations

import pytest

import labkit
from labkit.checks import exercises
from labkit.checks.exercise import Case
from labkit.checks.judge import judge
from labkit.checks.verdict import Verdict

ALL = [exercises.get(name) for name in exercises.NAMES]
#: The core exercise's in every test run, the others' in the soak.
WRONG = [
    pytest.param(e, w, id=f"{e.name}-{w.fn.__name__}", marks=[] if e.core else [pytest.mark.soak])
    for e in ALL for w in e.wrong
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


def test_hints_come_one_by_one_and_the_solution_after_an_attempt():
    from labkit import checks

    checks._given.clear()
    checks._tried.clear()
    heads = [labkit.hint("exchange").splitlines()[0] for _ in range(4)]
    assert heads == ["hint 1 of 3", "hint 2 of 3", "hint 3 of 3", "hint 3 of 3"]
    assert "after an attempt" in labkit.solution("exchange")
    labkit.check("exchange", lambda tensor: tensor)
    assert labkit.solution("exchange").startswith("def exchange(")


def test_the_first_failing_case_is_the_smallest():
    """Only worlds that are no power of two fail, and only where the tensor does not divide."""
    solution = exercises.get("ring_reduce_scatter").solution

    def picky(tensor):
        import torch.distributed as dist

        if dist.get_world_size() == 3 and tensor.numel() % 3:
            tensor += 1
        solution(tensor)

    verdict = labkit.check("ring_reduce_scatter", picky)
    assert verdict.kind == "wrong"
    assert verdict.where == "world 3, 5 elements"


def test_a_picture_comes_with_a_ring_that_goes_astray():
    wrong = {w.fn.__name__: w.fn for w in exercises.get("ring_reduce_scatter").wrong}
    verdict = labkit.check("ring_reduce_scatter", wrong["adds_twice"])
    assert verdict.picture is not None
    assert "twice" in str(verdict.picture)


def test_a_verdict_holds_only_what_was_seen():
    assert str(Verdict("x", "right", "", ("a",))) == "✓ right · x\n  a"
    assert Case(3, 5).kind == "parts"
