"""Exercises and impostors of chapter 04: against finite differences, torch and numbers by hand; what is told."""

from __future__ import annotations

import inspect
import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs_checks_tensor_parallel import RIGHT, Reduce
from torch.nn import functional as F

import labkit
from labkit.checks import alone, between, exercises, look
from labkit.checks.exercise import Case
from labkit.checks.exercises import column_then_row as column
from labkit.checks.exercises import f_and_g as fg
from labkit.checks.exercises import row_bias as bias
from labkit.checks.exercises import vocab_cross_entropy as vocab
from labkit.checks.gradients import taken
from labkit.checks.judge import judge
from labkit.checks.lineups import tensor_parallel as lineup
from labkit.show import guesses
from labkit.tensor_parallel import copy_to_group, reduce_from_group

NAMES = ("f_and_g", "column_then_row", "row_bias", "vocab_cross_entropy")
NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "04_tensor_parallel.ipynb"


def written(source, name):
    """A function as a learner has it who typed it in: in a namespace with what the notebook imports."""
    space = {"torch": torch, "dist": dist, "labkit": labkit, "F": F, "copy_to_group": copy_to_group,
             "reduce_from_group": reduce_from_group, "__name__": "__main__"}  # fmt: skip
    exec(compile(source, "<cell>", "exec"), space)
    return space[name]


@pytest.mark.parametrize(("name", "fn"), [(name, fn) for name, fns in RIGHT.items() for fn in fns])
def test_other_ways_are_right_too(name, fn):
    verdict = labkit.check(name, fn)
    assert verdict.right, str(verdict)
    assert len(exercises.get(name).wrong) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_needs_no_more_than_the_notebook_has(name):
    source = inspect.getsource(exercises.get(name).solution)
    verdict = labkit.check(name, written(source, name))
    assert verdict.right, str(verdict)
    assert sum(bool(line.strip()) for line in source.splitlines()[1:]) <= 15


# Not attempted


def cell(name):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (source,) = ("".join(c["source"]) for c in cells if "".join(c["source"]).startswith(f"def {name}("))
    return source.split("\n\n\nlabkit.check")[0]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_notebook_shows_at_first_is_not_attempted(name):
    assert str(labkit.check(name, written(cell(name), name))) == f"· not attempted · {name}"


#: The four bodies of the frame, as they stand in the notebook from the top.
BODIES = ("return x", "grad = grad.clone()\n            dist.all_reduce(grad)\n            return grad",
          "x = x.clone()\n            dist.all_reduce(x)\n            return x", "return grad")  # fmt: skip


@pytest.mark.parametrize("missing", [0, 1, 2, 3, None])
def test_a_frame_is_attempted_when_all_its_bodies_are_written(missing):
    source = cell("f_and_g")
    assert source.count("raise NotImplementedError") == 4
    for number, body in enumerate(BODIES):
        source = source.replace("raise NotImplementedError", "raise NotYet" if number == missing else body, 1)
    verdict = labkit.check("f_and_g", written(source.replace("NotYet", "NotImplementedError"), "f_and_g"))
    assert verdict.kind == ("right" if missing is None else "not_attempted"), str(verdict)


# What is expected


def test_the_gradients_of_f_and_g_are_the_slopes_of_the_loss():
    case = Case(2, 1)
    whole = {name: t.detach() for name, t in between.tensors(case).items()}
    ((first,), (second,)) = fg.expected(case)
    for name, dim in (("x", None), ("earlier", None), ("norm", None), ("A", 1), ("a", 0), ("B", 0), ("b", None)):
        slopes = torch.zeros_like(whole[name])
        for at in range(slopes.numel()):
            losses = []
            for by in (1e-6, -1e-6):
                moved = whole[name].clone()
                moved.view(-1)[at] += by
                losses.append(between.block(whole | {name: moved}, between.same, between.same))
            slopes.view(-1)[at] = (losses[0] - losses[1]) / 2e-6
        parts = (slopes, slopes) if dim is None else slopes.chunk(2, dim)
        for part, of_rank in zip(parts, (first, second), strict=True):
            torch.testing.assert_close(part.flatten(), torch.tensor(of_rank[f"{name}.grad"]).double(), rtol=1e-4,
                                       atol=1e-6)  # fmt: skip


def test_without_f_each_rank_has_its_own_part_and_the_parts_add_up():
    """But for what the residual connection brings, which each of them has whole."""
    case = Case(3, 2)
    own, ((whole,), *_) = fg.own(case), fg.expected(case)
    alone = between.tensors(case)
    between.block(alone, between.same, lambda share: share.detach()).backward()
    total = torch.tensor([rank["norm.grad"] for rank in own]).sum(0)
    expected = torch.tensor(whole["norm.grad"]) + 2 * alone["norm"].grad
    torch.testing.assert_close(total.double(), expected.double(), rtol=1e-5, atol=1e-7)
    assert all(rank["loss"] == pytest.approx(whole["loss"]) for rank in own)


def test_the_mlp_is_torchs():
    case = Case(2, 3)
    given = column.tensors(case)
    mlp = torch.nn.Sequential(torch.nn.Linear(12, 48), torch.nn.GELU(), torch.nn.Linear(48, 12)).double()
    for param, name in zip(mlp.parameters(), ("A", "a", "B", "b"), strict=True):
        param.data = given[name].t().double()
    x = given["x"].double().requires_grad_()
    column.loss(mlp(x)).backward()
    found = column.expected(case)[0][0]
    for name, grad in (("A.grad of all ranks", mlp[0].weight.grad.t()), ("a.grad of all ranks", mlp[0].bias.grad),
                       ("B.grad of all ranks", mlp[2].weight.grad.t()), ("b.grad", mlp[2].bias.grad),
                       ("x.grad", x.grad)):  # fmt: skip
        assert found[name] == pytest.approx(grad.flatten().tolist()), name


def test_the_bias_by_hand():
    """b is 100 everywhere, x·A is 0; the loss weighs the elements with 1 … 6, in rows of three."""
    ((first,), _) = bias.expected(Case(2, 1, more=bias.HUNDRED))
    assert first["y"] == [100.0] * 6
    assert first["b.grad"] == [1 + 4, 2 + 5, 3 + 6]
    assert first["x.grad"] == [1 + 2 + 3, 4 + 5 + 6]


def test_the_loss_by_hand():
    logits, target = torch.tensor([[0.0] * 10]), torch.tensor([7])
    assert vocab.tensors(Case(2, 1))[0].shape == logits.shape
    (first,), (second,) = expected_of(logits, target)
    assert first["loss"] == second["loss"] == pytest.approx([2.302585])  # log 10
    assert first["logits.grad"] == pytest.approx([0.1] * 5)
    assert second["logits.grad"] == pytest.approx([0.1, 0.1, -0.9, 0.1, 0.1])


def expected_of(logits, target):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab, "tensors", lambda case: (logits, target))
        return vocab.expected(Case(2, 1))


def test_targets_lie_where_a_case_says():
    assert (vocab.tensors(Case(2, 9, more=1))[1] >= vocab.WORDS).all()
    _, target = vocab.tensors(Case(4, 6, more=2))
    assert len({int(word) // vocab.WORDS for word in target}) > 2, "words of several ranks"
    assert vocab.tensors(Case(4, 6, more=2))[0].max() > 1000


# What is told


@pytest.mark.parametrize(
    ("have", "own", "says"),
    [
        ([2.0, 8.0], None, "w, element 0: expected 1, got 2 (2 × as much); wrong too: v; right: loss"),
        ([0.5, 2.0], None, "w, element 0: expected 1, got 0.5 (0.5 × as much)"),
        ([1.5, 6.0], None, "w, element 0: expected 1, got 1.5; wrong"),
        ([1.0, 3.0], [1.0, 3.0], "w, element 1: expected 4, got 3, which is what rank 1's own part gives"),
        ([1.0], None, "w: expected 1, …, there is none of this shape"),
        (None, None, "rank 1: w is None; expected 1, …"),
        ([float("nan"), 4.0], None, "w, element 0: expected 1, got nan"),
    ],
)
def test_what_is_told_of_a_rank(have, own, says):
    want = {"loss": [1.0], "w": [1.0, 4.0], "v": [-0.0, -0.0]}
    mine = {"loss": [1.0], "w": have, "v": [1.0, 0.0]}
    line = alone.told([[want], [mine]], [[want], [want]], [1], own and [{}, {"w": own}])
    assert line.startswith("rank 1")
    assert says in line


def test_where_a_number_stands_is_told_by_the_shape_of_its_tensor():
    want, have = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    have[1, 0, 2] = 5.0
    assert "w, element [1, 0, 2]: expected 1, got 5" in alone.told(
        [[taken([("w", have)])]], [[taken([("w", want)])]], [0]
    )
    flat = [[taken([("w", t.flatten())])] for t in (have, want)]
    assert "w, element 14: expected 1, got 5" in alone.told(flat[:1], flat[1:], [0])


def test_a_bias_in_each_share_is_told():
    def says(fn):
        return str(judge(exercises.get("column_then_row"), fn))

    clue = "z is what comes out if b is added 2 times"
    assert clue in says(column.last_bias_in_the_share)
    assert clue not in says(column.forgets_g)


def test_the_rank_whose_fault_comes_first_is_told():
    want = {"loss": [1.0], "w": [1.0]}
    late, early = {"loss": [1.0], "w": [2.0]}, {"loss": [-0.0], "w": [1.0]}
    line = alone.told([[late], [early]], [[want], [want]], [0, 1])
    assert line == "rank 1, loss: expected 1, got 0; right: w"
    assert alone.told(["returned 3"], [[want]], [0]) == "rank 0: returned 3"


def test_what_is_no_tensor_is_told_without_where_it_lies():
    assert alone.strange(None, (2,), "f") == "f returned None; expected a tensor of shape (2,)"
    assert "a tensor of shape (3,)" in alone.strange(torch.ones(3), (2,), "f")
    assert " at 0x" not in alone.strange(object(), (2,), "f")
    assert alone.strange(torch.ones(2), (2,), "f") == ""


def test_what_only_a_backward_calls_is_seen():
    def hands_its_backward_on():
        from labkit.tensor_parallel import reduce_from_group

        class Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                return reduce_from_group(grad)

        return Copy.apply, Reduce.apply

    verdict = labkit.check("f_and_g", hands_its_backward_on)
    assert verdict.kind == "borrowed"
    assert "reduce_from_group" in str(verdict)


def test_numbers_are_told_before_a_tensor_that_was_changed():
    verdict = judge(exercises.get("f_and_g"), fg.g_reduces_backward_in_place)
    assert "B.grad, element [0, 0]" in str(verdict)
    assert "is not what it was" not in str(verdict)


@pytest.mark.parametrize("name", NAMES)
def test_hints_leave_something_open(name):
    question, state, code = exercises.get(name).hints()
    assert question.endswith("?")
    assert state
    assert "____" in code


# Impostors


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setenv("LABKIT_STATIC", "1")
    return labkit.impostors("04")


def test_each_impostor_has_symptoms_of_its_own(line):
    assert judge(line.exercise, line.exercise.solution).right
    rows = {row[0]: row[1:] for row in line.symptoms}
    everywhere = "differs on every rank"
    assert rows["A"] == ("differs on ranks 1, 2", everywhere, "1 of 3 tensors differ", "3 different", "4", "768")
    assert rows["B"] == ("as in one process", everywhere, "alike", "3 different", "4", "768")
    assert rows["C"] == ("as in one process", everywhere, "2 of 3 tensors differ", "3 different", "2", "384")
    assert rows["D"] == (everywhere, everywhere, "alike", "alike", "4", "768")
    assert len({row[:4] for row in rows.values()}) == 5
    assert [row[4:] for row in rows.values()][-1] == ("4", "768")


def test_a_symptom_is_far_from_what_rounding_does(line):
    """A loss that differs differs by ten times the tolerance, and more."""
    wanted = lineup.expected(line.case)[0][0]["loss 2"][0]
    for member in line.members.values():
        values = labkit.run(lineup.call, member.fn, line.case, ranks=3, device="cpu").values
        assert all(abs(v[0]["loss 2"][0] - wanted) > 1e-3 * wanted for v in values)


def test_a_busy_host_is_no_deadlock(line, monkeypatch):
    def late(batches):
        time.sleep(0.5)
        return lineup.train(batches)

    monkeypatch.setattr(look, "LIMIT", 0.05)
    assert line._taken(late)[:2] == ("as in one process", "as in one process")


def test_a_diagnosis(line):
    assert len(line.ask("A").choices) == 4
    line.ask("C").note("f is missing")
    opened = line.open("C")
    assert opened.startswith("That is it")
    assert "up(norm(x))" in opened
