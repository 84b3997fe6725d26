"""Exercises and impostors of chapter 08: against torch and by hand, and what a verdict tells."""

from __future__ import annotations

import inspect
import json
import math
import re

import pytest
import torch
import torch.distributed as dist
from programs_checks_tricks import RIGHT

import labkit
from labkit.checks import exercises
from labkit.checks.exercise import Case
from labkit.checks.exercises import accumulate_all as accumulation
from labkit.checks.exercises import choose_segments as segments
from labkit.checks.exercises import global_norm as norm
from labkit.checks.exercises import loss_scaler as scaler
from labkit.checks.judge import judge
from labkit.checks.lineups import tricks as lineup
from labkit.checks.stepped import Accumulating, Batch
from labkit.show import guesses

NAMES = [name for name, chapter in exercises.NAMES.items() if chapter == "08"]
EACH = {name: exercises.get(name) for name in NAMES}


def written(source, name):
    """A function as a learner has it who typed it in: in a namespace with what a notebook imports."""
    space = {"torch": torch, "dist": dist, "labkit": labkit, "__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), space)
    return space[name]


def copied(name):
    return written(inspect.getsource(EACH[name].solution), name)


#: One other way each always, the rest in the soak.
OTHERS = [pytest.param(name, fn, marks=[pytest.mark.soak] if n > 0 else [])
          for name, fns in RIGHT.items() for n, fn in enumerate(fns)]  # fmt: skip


@pytest.mark.parametrize(("name", "fn"), OTHERS)
def test_other_ways_are_right_too(name, fn):
    verdict = labkit.check(name, fn)
    assert verdict.right, str(verdict)


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_needs_no_more_than_a_notebook_has(name):
    verdict = labkit.check(name, copied(name))
    assert verdict.right, str(verdict)
    body = inspect.getsource(EACH[name].solution).splitlines()[1:]
    assert sum(bool(line.strip()) for line in body) <= 15
    assert len(EACH[name].wrong) >= 8


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_attempted(name):
    def stub(*args):
        raise NotImplementedError

    assert str(labkit.check(name, stub)) == f"· not attempted · {name}"


# What is expected, against torch and by hand


@pytest.mark.parametrize("number", range(len(norm.SITUATIONS)))
def test_the_norm_is_torchs_of_the_whole(number):
    situation = norm.SITUATIONS[number]
    tensors = [torch.tensor(t, dtype=torch.float64) for rank in situation.sharded for t in rank]
    tensors += [torch.tensor(t, dtype=torch.float64) for t in situation.replicated]
    want = torch.nn.utils.get_total_norm(tensors).item()
    case = EACH["global_norm"].cases[number]
    assert [value for value, _ in norm.expected(case)] == [pytest.approx(want, rel=1e-12, nan_ok=True)] * case.ranks


def test_the_norm_of_the_chapter():
    assert norm.expected(Case(2, 1))[0][0] == pytest.approx(5.385, abs=1e-3)
    kinds = {s.dtype for s in norm.SITUATIONS}, {s.groups for s in norm.SITUATIONS}
    assert kinds == ({"float32", "float16", "bfloat16"}, {1, 2})


def test_a_rank_has_its_groups_gradients():
    """In groups of two, ranks 2 and 3 have what 0 and 1 have; kinds are mixed."""
    case = EACH["global_norm"].cases[3]
    told = [[(grad.tolist(), sharded) for grad, sharded in norm._given(case, rank)] for rank in range(4)]
    assert told[0] == told[2] == [([2.0], False), ([3.0], True)]
    assert told[1] == told[3]


def test_segments_are_those_of_the_chapter():
    """64 layers, in sbh: 8, 32, 64 segments hold 288, 132, 162; all insides 2176."""
    told = {s: segments.expected(Case(1, 1, more=n))[0] for n, s in enumerate(segments.SITUATIONS)}
    assert [told[(64, 2, 34, budget)] for budget in (2176, 288, 132, 131)] == [0, 8, 32, None]
    assert told[(64, 2, 34, 287)] == 10, "9 segments hold 290, more than 8 do"
    assert told[(64, 2, 34, 150)] == 22, "8 does not fit: √L is no answer"
    assert told[(16, 10, 10, 80)] == 4, "where an input is as large as the inside, √L is the best"
    assert told[(4, 2, 34, 42)] == 4
    assert set(told.values()) >= {0, None}


def test_scales_are_torchs():
    for case in EACH["loss_scaler"].cases:
        scale, tracker = torch.tensor([scaler.FIRST_SCALE]), torch.tensor([0], dtype=torch.int32)
        for number, seen in enumerate(scaler.expected(case)[0]):
            found = torch.tensor([float(bool(scaler._overflowing(case).get(number)))])
            torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, scaler._interval(case))
            assert (seen.scale, seen.streak, seen.steps) == (scale.item(), tracker.item(), 1 - found.item())


def test_overflows_are_of_every_kind():
    all_of = [(rank, x) for steps in scaler.OVERFLOWS for bad in steps.values() for rank, x in bad.items()]
    assert {rank for rank, _ in all_of} == {0, 1, 2}
    assert {str(x) for _, x in all_of} == {"inf", "-inf", "nan"}
    grown = [[seen.scale for seen in scaler.expected(case)[0]] for case in EACH["loss_scaler"].cases]
    assert any(max(each) > scaler.FIRST_SCALE for each in grown)
    assert any(min(each) < scaler.FIRST_SCALE for each in grown)


@pytest.mark.parametrize("number", range(len(accumulation.SITUATIONS)))
def test_a_windows_gradient_is_that_of_its_mean_loss(number):
    """One backward in float64 of all tokens of the window at once."""
    batches, k, size = accumulation.SITUATIONS[number]
    found = []
    for at in range(0, len(batches), k):
        window = batches[at : at + k]
        params = [torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in (size, 2)]
        losses = [each * sum(p.sum() for p in (params if touches else params[:1]))
                  for tokens, each, touches, _ in window for _ in range(tokens)]  # fmt: skip
        if losses:
            torch.stack(losses).mean().backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            found.append(([grad[:4].tolist() for grad in grads], at + len(window)))
    ((steps, order),) = accumulation.expected(Case(1, 1, more=number))
    assert order == list(range(len(batches)))
    assert [when for _, when in steps] == [when for _, when in found]
    for (have, _), (want, _) in zip(steps, found, strict=True):
        assert [pytest.approx(each, rel=1e-12) for each in want] == have


def test_what_a_backward_adds_to_a_grad():
    given = Accumulating(3)
    assert given.backward(Batch(1, 256.0)) == 1
    assert given.backward(Batch(1, 1.0, touches=False, number=1)) == 1
    assert given.params[0].grad.tolist() == [256.0] * 3, "256 + 1 is 256 in bf16"
    assert given.order == [0, 1]


# What is told


def test_what_is_told_of_a_norm():
    own = copied("global_norm")

    def told(change):
        return str(labkit.check("global_norm", lambda grads, group: change(own(grads, group))))

    assert "rank 1 has 5.385164737701417, the first rank of its group 5.385164737701416" in told(
        lambda made: made if dist.get_rank() != 1 else math.nextafter(made, 9)
    )
    assert "rank 0: expected a number, got None" in told(lambda made: None)
    assert "rank 0: expected inf, got nan" in told(lambda made: made if math.isfinite(made) else math.nan)
    assert "got 5.375" in told(lambda made: torch.tensor(made).bfloat16()), "a result in bf16 is too coarse"


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda made: str(made), "expected a whole number or None, got '8'"),
        (lambda made: 65, "65 is no number of segments of 64 layers"),
        (lambda made: 0, "expected 8, got 0; 8 segments hold 288; all of the layers hold 2,176"),
        (lambda made: 1 if made is None else made, "expected None, got 1; 1 segment holds 2,178"),
    ],
)
def test_what_is_told_of_segments(returned, says):
    own = copied("choose_segments")
    assert says in str(labkit.check("choose_segments", lambda *args: returned(own(*args))))


def test_what_is_told_of_accumulation():
    own = copied("accumulate_all")

    def told(step):
        return str(
            labkit.check("accumulate_all", lambda params, batches, k, backward, given: own(
                params, batches, k, backward, lambda grads: given(step(grads))
            ))
        )  # fmt: skip

    assert "step 0: expected a list of fp32 gradients, got None" in told(lambda grads: None)
    assert "got [(6,), (4,)]" in told(lambda grads: [grad.repeat(2) for grad in grads])
    assert "step 0, gradient 1: expected 3.5, got 7 (2 × as much)" in told(lambda grads: [grads[0], grads[1] * 2])


def test_a_scaler_that_ends_early_is_told():
    own = copied("loss_scaler")
    verdict = labkit.check("loss_scaler", lambda *args: own(*args) if args[2] == 0 else None)
    assert "step 1, rank 0: expected scale and streak, got None" in str(verdict)


# Hints

#: What the pseudo-code of third hints says, as Python.
PHRASES = [
    ("·", "*"), (r"^sharded, replicated = 0, 0, each.*", "sharded, replicated = torch.zeros(1), torch.zeros(1)"),
    (r"^for each gradient, in fp32:", "for grad, is_sharded in grads:"),
    (r"add the sum of its squares to sharded, or to (\w+)",
     r"(sharded if is_sharded else \1).add_(grad.float().square().sum())"),
    (r"^all-reduce (\w+) over the group", r"dist.all_reduce(\1, group=group)"),
    (r"^the root of (.*)", r"return (\1).sqrt().item()"),
    (r"^if L \* inside fits:  return", "if layers * inside <= budget: return"),
    (r"^for c in 1 … L:", "for c in range(1, layers + 1):"),
    (r"longest = L / c, rounded up", "longest = -(-layers // c)"),
    (r"if (.*) fits:  return c", r"if \1 <= budget: return c"),
    (r"^overflow = 1 if .*", "overflow = torch.tensor([float(not all(g.isfinite().all() for g in grads))])"),
    (r"^all-reduce overflow, as a maximum", "dist.all_reduce(overflow, dist.ReduceOp.MAX)"),
    (r"^if overflow:  return", "if overflow.item(): return"),
    (r"^every gradient divided by (\w+)", r"[g.div_(\1) for g in grads]"),
    (r"^if streak \+ 1 is interval:  return", "if streak + 1 == interval: return"),
    (r"^for each window of k micro-batches.*", "for window in (batches[i:i + k] for i in range(0, len(batches), k)):"),
    (r"sums = zeros in fp32, tokens = 0", "sums, tokens = [torch.zeros(p.shape) for p in params], 0"),
    (r"for each of its micro-batches:", "for batch in window:"),
    (r"tokens \+ backward of it", "tokens += backward(batch)"),
    (r"sums \+ the grads, where there are any;  every grad (\w+)",
     r"[s.add_(p.grad) for s, p in zip(sums, params) if p.grad is not None]; [setattr(p, 'grad', \1) for p in params]"),
    (r"if (\w+):  step with sums / (\w+)", r"if \1: step([s / \2 for s in sums])"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "blanks"),
    [
        ("global_norm", ["replicated", "sharded", "sharded + replicated"]),
        ("choose_segments", ["0", "up", "kept", "inside", "None"]),
        ("loss_scaler", ["maximum", "0", "scale", "0", "streak + 1"]),
        ("accumulate_all", ["k", "fp32", "None", "tokens", "tokens"]),
    ],
)
def test_a_hint_is_right_when_its_blanks_are_filled(name, blanks):
    exercise = EACH[name]
    code = exercise.hints()[2].strip()
    assert code.count("____") == len(blanks)
    for blank in blanks:
        code = code.replace("____", blank, 1)
    for phrase, python in PHRASES:
        code = re.sub(phrase, python, code, flags=re.MULTILINE)
    body = "\n".join(f"    {line}" for line in code.splitlines())
    head = f"def {name}({', '.join(inspect.signature(exercise.solution).parameters)}):"
    verdict = labkit.check(name, written(f"{head}\n{body}\n", name))
    assert verdict.right, f"{verdict}\n{body}"


# Impostors


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setenv("LABKIT_STATIC", "1")
    return labkit.impostors("08")


def test_each_impostor_has_symptoms_of_its_own(line):
    verdict = judge(line.exercise, line.exercise.solution)
    assert verdict.right, str(verdict)
    rows = {row[0]: row[1:] for row in line.symptoms}
    *_, allowed = line.symptoms
    assert {rows[letter][0] for letter in "ABCD"} == {"3.832, as one process"}, "no loss tells"
    assert [rows[letter][1] for letter in "ABCD"] == [
        "16.191; one process 13.556",
        "14.954; one process 13.556",
        "13.556, as one process",
        "3,470.253; one process 13.556",
    ]
    assert [rows[letter][2] for letter in "ABCD"] == ["4 of 4, each 0.84 ×", "4 of 4", "none", "4 of 4, each 0.0039 ×"]
    assert [rows[letter][3:5] for letter in "ABD"] == [("2, 2", "128, 128")] * 3
    assert rows["C"][3:6] == ("3, 2", "256, 128", "2 of 2 differ between the ranks")
    assert {rows[letter][5] for letter in "ABD"} == {"ranks alike"}
    assert all(rows[letter][6:] == allowed[7:] for letter in "ABD")
    assert int(rows["C"][6]) == int(allowed[7]) - 3, "an all-reduce a step that nobody wrote"
    assert len({json.dumps(row) for row in rows.values()}) == 5
    assert len({len(row) for row in line.symptoms} | {len(line.columns)}) == 1
    assert "2 ranks, 3 steps, scale 256 at first" in line._repr_mimebundle_()["text/html"]


def test_one_process_is_torchs(line):
    """The first loss, its norm and gradients, by torch's own clipping, without a scale."""
    whole, (x, y) = lineup.Layer(), lineup.data()[0]
    up, down, bias, head = (p.detach().double().requires_grad_() for p in whole.parameters())
    with torch.random.fork_rng():
        torch.manual_seed(lineup.SEED)
        kept = torch.rand(lineup.BATCH, lineup.WIDTH) >= lineup.DROPPED
    hidden = torch.nn.functional.linear(torch.nn.functional.linear(x.double(), up).relu(), down, bias)
    loss = torch.nn.functional.mse_loss((hidden * kept / (1 - lineup.DROPPED)) @ head.T, y.double())
    loss.backward()
    total = torch.nn.utils.clip_grad_norm_([up, down, bias, head], lineup.MAX_NORM)
    first, second = (each[0] for each in line.exercise.expected(line.case))
    assert (first["losses"][0], first["norms"][0]) == (pytest.approx(loss.item()), pytest.approx(total.item()))
    assert first["up.grad"] + second["up.grad"] == pytest.approx(up.grad.flatten().tolist(), rel=1e-5)
    assert first["head.grad"] == second["head.grad"] == pytest.approx(head.grad.flatten().tolist(), rel=1e-5)


def test_the_overflow_is_on_one_rank_only_and_far_from_the_limit(line):
    whole, scaled = lineup.Whole().double(), []
    with torch.random.fork_rng():
        torch.manual_seed(lineup.SEED)
        for x, y in lineup.data():
            loss = whole.loss(whole.block(x.double()), y.double())
            (whole.scale * loss).backward()
            shards = [p.grad.chunk(2, d) for p, d in ((whole.up, 0), (whole.down, 1))]
            of_ranks = [max(shard[rank].abs().max().item() for shard in shards) for rank in range(2)]
            scaled.append([*of_ranks, max(grad.abs().max().item() for grad in whole.grads(lineup.REPLICATED))])
            whole.multiply(1 / whole.scale)
            norm = lineup.squares(whole.grads()).sqrt().item()
            whole.multiply(min(1.0, lineup.MAX_NORM / norm))
            whole.step(loss.item(), norm, overflow=len(scaled) == 2)
    assert [x > lineup.LARGEST for step in scaled for x in step] == [n == 4 for n in range(9)]
    assert all(not 0.7 < x / lineup.LARGEST < 1.4 for step in scaled for x in step)


def test_a_diagnosis(line):
    assert len(line.ask("A").choices) == 4
    line.ask("C").note("a rank that sees an overflow tells nobody")
    assert line.open("C").startswith("That is it")
    assert "dist.ReduceOp.MAX" not in line.open("C")
    line.ask("D").note("a rank that sees an overflow tells nobody")
    assert line.open("D").startswith("No: gradients are clipped before they are unscaled")
