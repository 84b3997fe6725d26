"""Exercises and impostors of chapter 05: against torch and by hand, and what a verdict tells."""

from __future__ import annotations

import ast
import inspect
import json
import math
import sys

import pytest
import torch
import torch.distributed as dist
from programs_checks_sequence_parallel import RIGHT
from torch.nn import functional as F

import labkit
from labkit.checks import catchup, exercises
from labkit.checks.borrow import Borrowing
from labkit.checks.exercise import Case
from labkit.checks.exercises import online_softmax as softmax
from labkit.checks.exercises import ring_combine as ring
from labkit.checks.exercises import sequence_pair as pair
from labkit.checks.judge import judge
from labkit.checks.lineups import sequence_parallel as lineup
from labkit.checks.tokens import LARGE, MANY, MASKED, Layer, attend, tiles
from labkit.checks.wire import sent_by_a_ring
from labkit.show import guesses
from labkit.trace import Event, Trace

NAMES = ("sequence_pair", "norm_gradients", "online_softmax", "ring_combine")
FRAME = """
def sequence_pair():
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise NotImplementedError

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            raise NotImplementedError

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError

    return Gather.apply, Scatter.apply
"""


def written(source, name):
    """A function as a learner has it who typed it in: in a namespace with what a notebook imports."""
    space = {"torch": torch, "dist": dist, "labkit": labkit, "__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), space)
    return space[name]


def copied(name):
    return written(inspect.getsource(exercises.get(name).solution), name)


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


# A frame


def filled(*bodies):
    """The frame, with these in place of its four bodies; ``None`` leaves one."""
    first, *rest = FRAME.split("raise NotImplementedError")
    return first + "".join(
        (body or "raise NotImplementedError") + part for body, part in zip(bodies, rest, strict=True)
    )


GATHER = (
    "p = [torch.empty_like(x) for _ in range(dist.get_world_size())]; dist.all_gather(p, x); return torch.cat(p, 1)"
)
SCATTER = (
    "p = [c.contiguous() for c in y.chunk(dist.get_world_size(), 1)]; t = torch.empty_like(p[0]); "
    "dist.reduce_scatter(t, p); return t"
)
BODIES = (GATHER, "return Scatter.forward(ctx, grad)", SCATTER, "return Gather.forward(ctx, grad)")


@pytest.mark.parametrize("missing", [(0, 1, 2, 3), (1, 2, 3), (2, 3), (3,), (1,), (0,)])
def test_a_frame_is_not_attempted_while_a_body_is_missing(missing):
    source = filled(*(None if n in missing else body for n, body in enumerate(BODIES)))
    assert str(labkit.check("sequence_pair", written(source, "sequence_pair"))) == "· not attempted · sequence_pair"


def test_a_filled_frame_is_right():
    verdict = labkit.check("sequence_pair", written(filled(*BODIES), "sequence_pair"))
    assert verdict.right, str(verdict)


def test_what_torch_lacks_is_no_missing_body():
    body = "torch.zeros(1, device='meta').item()"  # raises something like NotImplementedError, from torch
    assert labkit.check("sequence_pair", written(filled(body, *BODIES[1:]), "sequence_pair")).kind == "crashed"


def test_catching_up_fills_a_frame_in_which_nothing_is_written():
    def stub(source):
        return catchup._is_stub(ast.parse(source).body[0])

    assert stub(FRAME)
    assert stub('def f():\n    "a note"\n    raise NotImplementedError')
    assert not stub(filled(GATHER, None, None, None)), "what is written stays"
    assert not stub(filled(*BODIES))
    assert not stub('def f():\n    "a note"')
    assert not stub("def f():\n    x = 1\n    return x")
    source = catchup._filled(FRAME, ast.parse(FRAME).body)
    assert "NotImplementedError" not in source
    assert judge(exercises.get("sequence_pair"), written(source, "sequence_pair")).right


# What is expected, against torch and by hand


def test_the_layer_is_that_of_one_process():
    """Norm weights see a part of the tokens each: their gradients add up to the whole one's."""
    case = Case(3, 2)
    whole, x = Layer().double(), pair._tokens(case, 1).double().requires_grad_()
    y = whole.mlp(whole.norm(x))
    ((x + y) * pair._tokens(case, 2).double()).sum().backward()
    of_ranks = [torch.tensor(each[0]["norm.weight.grad"]) for each in pair.expected(case)]
    assert torch.allclose(sum(of_ranks), whole.norm.weight.grad.float(), atol=1e-5)
    for rank, (each,) in enumerate(pair.expected(case)):
        wanted = {"x.grad": x.grad.chunk(3, 1), "up.grad": whole.up.grad.chunk(3), "scatter(…)": y.chunk(3, 1),
                  "down.grad": whole.down.grad.chunk(3, 1)}  # fmt: skip
        for name, want in ((name, shares[rank]) for name, shares in wanted.items()):
            assert torch.allclose(torch.tensor(each[name]), want.flatten().float(), atol=1e-5), name


def test_the_example_of_the_pair():
    def example():
        gather, scatter = pair.sequence_pair()
        x = torch.tensor([1.0 + dist.get_rank()]).view(1, 1, 1).requires_grad_()
        whole = gather(x)
        y = torch.tensor([[10.0, 20.0], [30.0, 40.0]])[dist.get_rank()].view(1, 2, 1).requires_grad_()
        whole.backward(y.detach())
        total = scatter(y)
        total.backward(torch.full((1, 1, 1), 5.0 + dist.get_rank()))
        return whole.flatten().tolist(), x.grad.item(), total.item(), y.grad.flatten().tolist()

    run = labkit.run(example, ranks=2, device="cpu")
    assert run.values == [([1, 2], 40, 40, [5, 6]), ([1, 2], 60, 60, [5, 6])]


def test_the_example_of_partial_gradients():
    def example(norm_gradients):
        norm, up = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        norm.grad, up.grad = torch.tensor([2.0, 6.0])[[dist.get_rank()]], torch.tensor([1.0, 5.0])[[dist.get_rank()]]
        norm_gradients([(norm, True), (up, False)])
        return norm.grad.item(), up.grad.item()

    assert labkit.run(example, exercises.get("norm_gradients").solution, ranks=2, device="cpu").values == [
        (8, 1),
        (8, 5),
    ]


def test_softmax_in_pieces_is_torchs():
    fn = softmax.online_softmax
    by_hand = [(torch.tensor([[0.0, math.log(2)]]), torch.tensor([[1.0], [4.0]])),
               (torch.tensor([[math.log(4)]]), torch.tensor([[5.0]]))]  # fmt: skip
    assert fn(iter(by_hand)).item() == pytest.approx(29 / 7)
    for count, kind in ((3, MASKED), (4, LARGE), (9, MANY)):
        scores, values = (
            torch.cat(each, dim) for each, dim in zip(zip(*tiles(count, kind), strict=True), (-1, 0), strict=True)
        )
        zeros = torch.zeros(len(scores), 1, dtype=torch.float64)
        want = F.scaled_dot_product_attention(zeros, torch.zeros(len(values), 1).double(), values.double(),
                                              attn_mask=scores.double())  # fmt: skip
        assert torch.allclose(fn(tiles(count, kind)).double(), want, atol=1e-5)
        assert torch.allclose(softmax._whole(Case(1, count, more=kind)), want)
    assert torch.isinf(next(tiles(2, MASKED))[0][0]).all()


def test_attention_round_the_ring_is_torchs():
    case = Case(3, 2, "numbers")
    q, k, v = (torch.cat(each).double() for each in zip(*(ring._given(case, rank) for rank in range(3)), strict=True))
    want = F.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(torch.tensor([each[0]["out"] for each in ring.expected(case)]).view_as(want).double(), want)
    _, log_sum = attend(q, k, v)
    assert torch.allclose(log_sum, (q @ k.T / 2).exp().sum(-1, keepdim=True).log())
    _, log_sum = attend(*ring._given(Case(2, 3, "numbers", more=ring.LARGE), 0))
    assert log_sum.exp().isinf().any(), "whoever takes exponentials of them gets no number"


def test_the_example_of_the_ring():
    def example(ring_combine):
        mine = torch.tensor([[2.0, 6.0][dist.get_rank()], math.log([3, 1][dist.get_rank()])])
        given = torch.zeros(1, 2), mine[None], mine[None]
        return ring_combine(*given, lambda q, k, v: (k[:, :1], k[:, 1:])).item()

    values = labkit.run(example, ring.ring_combine, ranks=2, device="cpu").values
    assert values == [pytest.approx(3)] * 2


# What is told


def test_a_wrong_pair_is_told_by_what_is_wrong_and_right():
    wrong = {w.fn.__name__: w.fn for w in exercises.get("sequence_pair").wrong}
    one = str(judge(exercises.get("sequence_pair"), wrong["gathers_back_a_slice"]))
    assert "wrong too: x.grad; right: gather(…), scatter(…), down.grad, up.grad" in one
    other = str(judge(exercises.get("sequence_pair"), wrong["averages"]))
    assert "(0.5 × as much); right: gather(…), down.grad, up.grad, norm.weight.grad, x.grad" in other


def test_a_row_that_is_wrong_is_told():
    own = copied("online_softmax")

    def spoils(tiles):
        made = own(tiles)
        made[1:] += 1
        return made

    assert "row 1: expected" in str(labkit.check("online_softmax", spoils))
    assert "wrong rows: 2 of 3" in str(labkit.check("online_softmax", spoils))


def test_torchs_collectives_with_a_backward_are_borrowed():
    def calls_torchs():
        from torch.distributed.nn import functional

        return lambda x: torch.cat(functional.all_gather(x), 1), lambda y: y

    verdict = labkit.check("sequence_pair", calls_torchs)
    assert verdict.kind == "borrowed"
    assert "torch.distributed.nn.functional.all_gather" in str(verdict)


def test_borrowing_in_a_backward_is_seen():
    own = copied("sequence_pair")

    def borrows_backward():
        gather, scatter = own()

        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return gather(x)

            @staticmethod
            def backward(ctx, grad):
                return labkit.sequence_parallel.reduce_scatter_to_sequence(grad)

        return Gather.apply, scatter

    assert labkit.check("sequence_pair", borrows_backward).kind == "borrowed"


def test_borrowing_may_be_nested():
    before = sys.getprofile()
    with Borrowing(False) as seen, seen:
        pass
    assert sys.getprofile() is before


def test_a_collective_where_only_messages_are_allowed():
    assert not exercises.get("ring_combine").allowed
    assert all(exercises.get(name).allowed for name in NAMES[:2])


def test_what_a_ring_would_send():
    def event(kind, name, nbytes, index, **more):
        return Event(kind, name, 0, 0.0, 1.0, nbytes, index=index, **more)

    of_torch = [event("collective", "all_reduce", 96, 0), event("collective", "all_gather", 96, 1)]
    of_labkit = [event("span", "reduce_scatter ring", 96, 2), event("send", "send", 32, 3, parent=2, peer=1)]
    alone = [event("send", "send", 10, 4, peer=1), event("collective", "all_reduce", 96, 5, labels={"given": True})]
    assert sent_by_a_ring(Trace([*of_torch, *of_labkit, *alone], 3), 0) == (2 * 96 + 96 + 96) * 2 // 3 + 10


# Impostors


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setenv("LABKIT_STATIC", "1")
    return labkit.impostors("05")


def test_each_impostor_has_symptoms_of_its_own(line):
    assert judge(line.exercise, line.exercise.solution).right
    rows = {row[0]: row[1:] for row in line.symptoms}
    *_, allowed = line.symptoms
    first = {letter: rows[letter][0] for letter in "ABCD"}
    assert first["A"] == first["C"] == "8.724, as one process"
    assert all(first[letter].endswith("; one process 8.724") for letter in "BD")
    assert rows["A"][1] == ", ".join(lineup.PARTIAL) + ": 0.33 × each"
    assert rows["C"][1] == "words, places, norm"
    assert rows["B"][1] == rows["D"][1] == "all 7"
    assert [rows[letter][3] for letter in "ABCD"] == ["different", "alike", "different", "different"]
    assert all(rows[letter][2].startswith("ranks alike; 5 of 5") for letter in "ABCD"), "drift is not what tells"
    assert rows["A"][4:] == rows["B"][4:] == rows["D"][4:] == allowed[5:]
    assert int(rows["C"][4]) == int(allowed[5]) - 2, "no reduce-scatter in backward, twice"
    assert len({json.dumps(row) for row in rows.values()}) == 5
    assert len({len(row) for row in line.symptoms} | {len(line.columns)}) == 1
    assert "<table>" in line._repr_mimebundle_()["text/html"]


def test_ranks_that_drift_apart_would_be_told(line):
    wanted = line.exercise.expected(line.case)
    drifted = [[dict(each[0])] for each in wanted]
    drifted[1][0]["norm"] = [0.0] * lineup.WIDTH
    assert lineup.last_weights(line.case, drifted, wanted) == "ranks differ in 1 of 5; 1 of 5 are not one process's"
    assert lineup.first_gradients(line.case, wanted, wanted) == "none"


def test_the_masks_are_those_of_the_ranks(line):
    """One process draws them as torch's own stream does on each rank."""
    for rank, (want,) in enumerate(line.exercise.expected(line.case)):
        with torch.random.fork_rng():
            torch.manual_seed(lineup.SEED + rank)
            kept = [torch.rand(lineup.BATCH, 2, lineup.WIDTH) >= lineup.DROPPED for _ in range(2 * lineup.STEPS)]
        assert want["masks"] == torch.stack(kept).double().flatten().tolist()


def test_a_diagnosis(line):
    assert len(line.ask("A").choices) == 4
    line.ask("C").note("gather's backward takes its slice of the gradient, and adds nothing up")
    assert line.open("C").startswith("That is it")
    assert "grad.chunk(world, dim=1)[rank]" in line.open("C")
