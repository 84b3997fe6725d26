"""Exercises and impostors of chapters 01 and 03: against torch and published numbers, and what a verdict tells."""

from __future__ import annotations

import inspect
import json
import sys
import time

import pytest
import torch
import torch.distributed as dist
from programs_checks_data_parallel import RIGHT

import labkit
from labkit import collectives
from labkit.checks import exercises
from labkit.checks.exercise import Case, Cost
from labkit.checks.exercises import bucket_assignment as assignment
from labkit.checks.exercises import bucketed_ddp as bucketed
from labkit.checks.exercises import gradient_hook as hook
from labkit.checks.gradients import told
from labkit.checks.judge import costs, judge
from labkit.show import guesses
from labkit.trace import Event, Trace

NAMES = ("model_bytes", "bucket_assignment", "gradient_hook", "bucketed_ddp", "accumulation")


def copied(name):
    """The solution as a learner has it who typed it in: in a namespace with what a notebook imports."""
    space = {"torch": torch, "dist": dist, "labkit": labkit, "__name__": "__main__"}
    exec(compile(inspect.getsource(exercises.get(name).solution), "<cell>", "exec"), space)
    return space[name]


@pytest.mark.parametrize(("name", "fn"), [(name, fn) for name, fns in RIGHT.items() for fn in fns])
def test_other_ways_are_right_too(name, fn):
    verdict = labkit.check(name, fn)
    assert verdict.right, str(verdict)


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_needs_no_more_than_a_notebook_has(name):
    """`labkit catchup` writes its source into a notebook that imports torch, dist and labkit."""
    verdict = labkit.check(name, copied(name))
    assert verdict.right, str(verdict)


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_attempted(name):
    def stub(*args):
        raise NotImplementedError

    assert str(labkit.check(name, stub)) == f"· not attempted · {name}"


def test_model_bytes_are_those_of_the_zero_paper():
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 cards."""
    fn = exercises.get("model_bytes").solution
    assert [round(fn(7_500_000_000, 64, stage) / 1e9, 1) for stage in range(4)] == [120, 31.4, 16.6, 1.9]


def test_buckets_are_those_of_torchs_ddp():
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for number, (sizes, kinds, cap) in enumerate(assignment.SITUATIONS):
        backward = range(len(sizes))[::-1]
        tensors = [torch.empty(sizes[i] // dtypes[kinds[i]].itemsize, dtype=dtypes[kinds[i]]) for i in backward]
        torchs, _ = dist._compute_bucket_assignment_by_size(tensors, [cap])
        theirs = [[backward[i] for i in bucket] for bucket in torchs]
        case = Case(1, 1, more=number)
        assert assignment.differing(case, [theirs], assignment.expected(case)) == []


def test_gpt2_small_travels_in_thirteen_buckets():
    sizes, kinds, cap = assignment.SITUATIONS[-2]
    made = assignment.bucket_assignment(sizes, kinds, cap)
    assert len(sizes) == 148
    assert len(made) == 13
    assert sum(sizes) == 4 * 124_439_808


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([[3, 2], [1, 0], []], "bucket 2 of float32: expected none, got [], 0 B"),
        ([[3, 2], [1]], "expected a"),
        ([[3, 2], [1, 4]], "holds 4, which is no index into 4 sizes"),
        ([[3, 2], [2, 1, 0]], "tensor 2, of 4 B, stands in more than one place"),
        ([[2, 3], [1, 0]], "bucket 0 of float32: expected [3, 2], 8 B, got [2, 3], 8 B"),
        (None, "got None"),
    ],
)
def test_what_is_told_of_buckets(monkeypatch, returned, says):
    monkeypatch.setattr(assignment, "SITUATIONS", (([4] * 4, ["float32"] * 4, 8),))
    case = Case(1, 1)
    value = assignment.call(lambda *_: returned, case)
    assert assignment.differing(case, [value], assignment.expected(case)) == [0]
    line = assignment.told(case, [value], [0])
    assert says in line or (says == "expected a" and "expected [1, 0], 8 B, got [1], 4 B" in line)


def test_a_large_bucket_is_told_in_short():
    own = copied("bucket_assignment")

    def gives_up(sizes, kinds, cap):
        return own(sizes, kinds, cap) if len(sizes) < 100 else [list(range(len(sizes)))[::-1]]

    verdict = labkit.check("bucket_assignment", gives_up)
    assert verdict.where == "GPT-2 small, 148 tensors, float32; cap 26,214,400"
    assert "…" in str(verdict)
    assert max(map(len, verdict.lines)) < 130


def test_the_mean_that_a_hook_must_leave():
    """Gradients 3 and 7 of the first step, by hand."""
    case = Case(2, 1)
    assert hook.expected(case)[0][0] == {"param.grad": [5.0], "param": [0.0]}
    assert hook.expected(case)[1][1]["param.grad"] == [6.0]


def test_a_parameter_that_was_changed_is_told():
    own = copied("gradient_hook")

    def spoils(param):
        def change(param):
            param.data += 1

        own(param)
        param.register_post_accumulate_grad_hook(change)

    assert "rank 0, the first backward, param, element 0: expected 0, got 1" in str(
        labkit.check("gradient_hook", spoils)
    )


def test_what_is_told_of_gradients():
    want, own = [[{"w": [2.0, 4.0]}]] * 2, [[{"w": [1.0, 1.0]}], [{"w": [3.0, 7.0]}]]

    def line(values):
        return told([[{"w": values}]] * 2, want, own, 0)

    assert line([4.0, 8.0]).endswith("element 0: expected 2, got 4 (2 × as much)")
    assert line([1.0, 1.0]).endswith("element 0: expected 2, got 1, which is rank 0's own")
    assert line([2.0, 5.0]).endswith("element 1: expected 4, got 5")
    assert line(None).endswith("expected 2, …, there is none of this shape")
    assert line([float("nan"), 4.0]).endswith("element 0: expected 2, got nan")


def test_collectives_are_counted_as_they_were_asked_for():
    def asks():
        from labkit.checks.given import uncounted
        from labkit.checks.trial import Tried

        t = torch.ones(6)
        with uncounted():
            dist.all_reduce(t)
        dist.all_reduce(t)
        collectives.all_reduce(t, algorithm="ring")
        collectives.all_reduce(t, algorithm="native")
        return Tried()

    run = labkit.run(asks, ranks=2, device="cpu")
    assert [(c.calls, c.handed) for c in costs(run)] == [(3, 72)] * 2
    assert all(c.messages == 2 for c in costs(run)), "the ring's"
    assert Cost().calls is None


# The order of events


def happened(*what):
    """A trace of rank 0: "s2" is the backward of layer 2, "r" an all-reduce and how many events later it ends."""
    events = []
    for n, one in enumerate(what):
        labels = {"backward": 0}
        if one[0] == "s":
            events.append(Event("compute", "backward", 0, n, n + 0.5, phase="backward", labels=labels, index=n))
        else:
            end = n + int(one[1:]) + 0.1
            events.append(Event("collective", "all_reduce", 0, n, end, labels=labels, index=n))
    return Trace(events, 1)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (("s2", "r9", "s1", "r9", "s0", "r9"), ""),
        (("s2", "r0", "s1", "r0", "s0", "r9"), "was over before backward went on"),
        (("s2", "r2", "s1", "r0", "s0", "r9"), "was over before backward went on"),
        (("s2", "r0", "s1", "r1", "s0", "r9"), ""),
        (("s2", "s1", "s0", "r9", "r9", "r9"), "only when backward had reached layer 0, the last it comes to"),
    ],
)
def test_backward_that_stands_still_is_seen_in_the_order_of_events(monkeypatch, what, says):
    monkeypatch.setattr(bucketed, "BACKWARDS", 1)
    line = bucketed.stands_still(Case(1, 3, more=4), happened(*what))
    assert says in line if says else not line


@pytest.mark.soak
def test_a_solution_that_overlaps_is_right_on_any_host():
    """The late ranks wait for rank 0 and for no clock; here every hook takes long, before it starts an all-reduce or
    after."""
    own = copied("bucketed_ddp")

    def slow(module, cap):
        def sleep(_):
            time.sleep(0.02)

        for param in module.parameters():
            param.register_post_accumulate_grad_hook(sleep)
        finish = own(module, cap)
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(sleep)
        return finish

    verdict = judge(exercises.get("bucketed_ddp"), slow)
    assert verdict.right, str(verdict)


# Borrowed


def test_what_is_imported_but_not_called_is_not_borrowed():
    def only_imports(param):
        for name in [name for name in sys.modules if name.startswith("labkit.data_parallel")]:
            del sys.modules[name]
        import labkit.data_parallel.wrapper

        assert labkit.data_parallel.wrapper

    assert labkit.check("gradient_hook", only_imports).kind == "wrong"


def test_a_collective_is_allowed_in_these_exercises_alone():
    assert labkit.check("ring_all_reduce", dist.all_reduce).kind == "borrowed"
    assert all(exercises.get(name).allowed for name in NAMES[2:])


# Impostors


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setenv("LABKIT_STATIC", "1")
    return labkit.impostors("03")


def test_each_impostor_has_symptoms_of_its_own(line):
    assert judge(line.exercise, line.exercise.solution).right
    rows = {row[0]: row[1:] for row in line.symptoms}
    *_, (_, _, _, calls, handed) = line.symptoms
    assert rows["A"][:2] == ("6 of 6 tensors differ", "4 of 6 tensors differ")
    assert rows["A"][2] < calls, "no broadcasts"
    assert rows["B"] == ("stopped: ranks in different collectives", "", "", "")
    assert rows["C"][:2] == ("6 of 6 tensors differ", "alike")
    assert rows["D"][:2] == ("6 of 6 tensors differ", "2 of 6 tensors differ")
    assert rows["D"][2:] == (calls, handed)
    assert len({json.dumps(row) for row in rows.values()}) == 5
    assert len({len(row) for row in line.symptoms} | {len(line.columns)}) == 1
    assert "<table>" in line._repr_mimebundle_()["text/html"]


def test_a_diagnosis(line):
    assert len(line.ask("A").choices) == 4
    line.ask("D").note("a layer was replaced after the parameters to average were noted")
    assert line.open("D").startswith("That is it")
