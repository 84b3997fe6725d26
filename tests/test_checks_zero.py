"""Exercises and impostors of chapter 07: against torch and by hand, and what a verdict tells."""

from __future__ import annotations

import inspect
import json
import re

import pytest
import torch
import torch.distributed as dist
from programs_checks_zero import RIGHT
from torch.nn import functional as F

import labkit
from labkit.checks import exercises
from labkit.checks.exercise import Case
from labkit.checks.exercises import flat_shards as cut
from labkit.checks.exercises import stage_one_step as one
from labkit.checks.exercises import stage_three_block as three
from labkit.checks.exercises import stage_two_hook as two
from labkit.checks.lineups import zero as lineup
from labkit.checks.shards import Adam, Block, Stack, in_shard, rows, shard_of
from labkit.show import guesses

NAMES = tuple(RIGHT)
#: What is tried on every change; the rest in the soak.
FIRST = {fns[0] for fns in RIGHT.values()}


def written(source, name, **more):
    """A function as a learner has it who typed it in: in a namespace with what a notebook imports, and more."""
    space = {"torch": torch, "dist": dist, "labkit": labkit, "__name__": "__main__", **more}
    exec(compile(source, "<cell>", "exec"), space)
    return space[name]


@pytest.mark.parametrize(
    ("name", "fn"),
    [pytest.param(name, fn, id=f"{name}-{fn.__name__}", marks=[] if fn in FIRST else [pytest.mark.soak])
     for name, fns in RIGHT.items() for fn in fns],
)  # fmt: skip
def test_other_ways_are_right_too(name, fn):
    verdict = labkit.check(name, fn)
    assert verdict.right, str(verdict)


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_needs_no_more_than_a_notebook_has(name):
    verdict = labkit.check(name, written(inspect.getsource(exercises.get(name).solution), name))
    assert verdict.right, str(verdict)


STUBS = {
    "flat_shards": "def flat_shards(tensors, ranks):\n    raise NotImplementedError",
    "stage_one_step": "def stage_one_step(params, grads, update):\n    raise NotImplementedError",
    "stage_two_hook": """
def stage_two_hook(params, shard):
    def ready(param):
        raise NotImplementedError

    return ready
""",
    "stage_three_block": """
def stage_three_block(block, shard):
    def forward(x):
        raise NotImplementedError

    def backward(x, grad):
        raise NotImplementedError

    return forward, backward
""",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_attempted(name):
    assert str(labkit.check(name, written(STUBS[name], name))) == f"· not attempted · {name}"


def test_half_a_frame_is_not_attempted():
    gather = "p = [torch.empty_like(shard) for _ in range(dist.get_world_size())]; dist.all_gather(p, shard); "
    half = STUBS["stage_three_block"].replace(
        "raise NotImplementedError", f"{gather}return block.forward(torch.cat(p), x)", 1
    )
    assert labkit.check("stage_three_block", written(half, "stage_three_block")).kind == "not_attempted"


# What is expected, against torch and by hand


def test_shards_are_torchs_chunks_of_the_padded_buffer():
    for more, (shapes, ranks) in enumerate(cut.SITUATIONS):
        tensors, _ = cut.given(Case(1, 1, more=more))
        flat = torch.nn.utils.parameters_to_vector(tensors)
        flat = F.pad(flat, (0, ranks * in_shard(len(flat), ranks) - len(flat)))
        (want,) = cut.expected(Case(1, 1, more=more))
        assert want == [shard.tolist() for shard in flat.chunk(ranks)], shapes
        assert want == [shard_of(flat, rank, ranks).tolist() for rank in range(ranks)]


def test_the_example_of_shards():
    shards = exercises.get("flat_shards").solution([torch.arange(1.0, 4), torch.arange(4.0, 8)], 2)
    assert [shard.tolist() for shard in shards] == [[1, 2, 3, 4], [5, 6, 7, 0]]


def test_the_update_is_torchs_adam():
    ours, theirs = torch.arange(1.0, 6).double(), torch.arange(1.0, 6).double().requires_grad_()
    adam = Adam()
    torchs = torch.optim.Adam([theirs], lr=Adam.RATE, betas=Adam.BETAS, eps=Adam.EPS)
    for step in (1, 2, 3):
        theirs.grad = torch.linspace(-1, 2 * step, 5).double()
        adam.step = step
        adam.update(ours, theirs.grad)
        torchs.step()
        assert torch.allclose(ours, theirs.detach(), rtol=1e-12)
    assert adam.nbytes == 2 * 5 * 8


def test_the_update_refuses_what_it_has_no_state_for():
    adam = Adam()
    adam.update(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match="called twice in a step"):
        adam.update(torch.ones(3), torch.ones(3))
    adam.step = 2
    with pytest.raises(ValueError, match="state is of shape"):
        adam.update(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="expected equal shapes"):
        adam.update(torch.ones(2), torch.ones(3))


def test_stage_one_is_adam_on_the_mean():
    case = Case(3, 7)
    params = one._params(case).double().requires_grad_()
    adam = torch.optim.Adam([params], lr=Adam.RATE, betas=Adam.BETAS, eps=Adam.EPS)
    for step, wanted in enumerate(one.expected(case)[1][0].values(), 1):
        params.grad = sum(one._grads(case, rank, step).double() for rank in range(3)) / 3
        adam.step()
        assert wanted == pytest.approx(params.tolist())


def test_the_example_of_stage_one():
    def example(step):
        params, given = torch.full((4,), 9.0), []
        grads = torch.tensor([[1.0, 2, 3, 4], [3.0, 2, 1, 0]])[dist.get_rank()]

        def update(shard, grad):
            given.append((shard.tolist(), grad.tolist()))
            shard -= grad * (1 + dist.get_rank())

        step(params, grads, update)
        return given, params.tolist()

    values = labkit.run(example, one.stage_one_step, ranks=2, device="cpu").values
    assert values == [([([9, 9], [2, 2])], [7, 7, 5, 5])] * 2


def test_stage_two_is_the_mean_of_the_ranks_gradients():
    case = Case(4, 1, more=3)
    module = Stack(4, 5).double()
    for step in range(2):
        for rank in range(4):
            (module(rows(case, rank, step, 5).double()).square().sum() / 4).backward()
        grads = torch.cat([p.grad.flatten() for p in list(module.parameters())[4:]])  # of the second bucket
        for rank, (told,) in enumerate(two.expected(case)):
            have = told[f"shard of bucket 1 after backward {step + 1}"]
            assert have == pytest.approx(shard_of(grads, rank, 4).tolist())


def test_the_example_of_stage_two():
    def example(hook):
        param, shard = torch.nn.Parameter(torch.zeros(2)), torch.zeros(1)
        param.register_post_accumulate_grad_hook(hook([param], shard))
        seen = []
        for _ in range(2):
            (param * torch.tensor([[1.0, 2], [3.0, 6]])[dist.get_rank()]).sum().backward()
            seen.append(shard.item())
        return seen, param.grad

    values = labkit.run(example, two.stage_two_hook, ranks=2, device="cpu").values
    assert values == [([2, 4], None), ([4, 8], None)]


def test_a_block_goes_back_as_autograd_does():
    block = Block(3)
    flat, x, grad = F.pad(block.parameters(), (0, 2)), torch.randn(2, 3), torch.randn(2, 3)
    leaves = flat.clone().requires_grad_(), x.clone().requires_grad_()
    block.forward(*leaves).backward(grad)
    of_x, of_flat = block.backward(flat, x, grad)
    assert torch.allclose(of_x, leaves[1].grad)
    assert torch.allclose(of_flat, leaves[0].grad)
    assert of_flat[-2:].tolist() == [0, 0]


def test_stage_three_is_one_process_on_all_rows():
    """Gradients of the first step: the mean over ranks is that of a loss over all rows, divided by N."""
    case = Case(3, 2, more=1)
    blocks = [Block(4, 0), Block(4, 1)]
    flats = [block.parameters().double().requires_grad_() for block in blocks]
    x = torch.cat([rows(case, rank, 1, 4) for rank in range(3)]).double()
    y = blocks[1].forward(flats[1], blocks[0].forward(flats[0], x))
    (y.square().sum() / 3).backward()
    for rank, (told,) in enumerate(three.expected(case)):
        for n in range(2):
            have = told[f"gradient of block {n}'s shard, step 1"]
            assert have == pytest.approx(shard_of(flats[n].grad, rank, 3).tolist())
        assert told["block 1's output, step 1"] == pytest.approx(y[2 * rank : 2 * rank + 2].flatten().tolist())


def test_the_example_of_stage_three():
    class Given:
        def forward(self, flat, x):
            self.seen = flat.tolist()
            return x

        def backward(self, flat, x, grad):
            return grad, torch.tensor([[2.0, 4, 6, 0], [0.0, 4, 2, 0]])[dist.get_rank()]

    def example(pair):
        block = Given()
        forward, backward = pair(block, torch.tensor([[1.0, 2], [3.0, 0]])[dist.get_rank()])
        x = forward(torch.ones(1))
        return block.seen, backward(x, x)[1].tolist()

    values = labkit.run(example, three.stage_three_block, ranks=2, device="cpu").values
    assert values == [([1, 2, 3, 0], [1, 4]), ([1, 2, 3, 0], [4, 0])]


# What is told


def verdict_of(name, wrong):
    from labkit.checks.judge import judge

    fns = {w.fn.__name__: w.fn for w in exercises.get(name).wrong}
    return judge(exercises.get(name), fns[wrong])


def test_an_unsharded_state_is_told_by_its_bytes():
    verdict = verdict_of("stage_one_step", "keeps_the_whole_state")
    assert verdict.kind == "wasteful"
    assert "optimizer state of a rank: 32 B; budget 16 (2.0×)" in str(verdict)


def test_gradients_that_stay_are_told_by_their_bytes():
    verdict = verdict_of("stage_two_hook", "fills_with_zeros")
    assert verdict.kind == "wasteful"
    assert "held by a rank at once" in str(verdict)


def test_what_was_gathered_and_kept_is_told_by_its_bytes():
    verdict = verdict_of("stage_three_block", "keeps_what_it_gathered")
    assert verdict.kind == "wasteful"
    assert "blocks: 8, each of 337 parameters" in str(verdict)


@pytest.mark.soak  # the import takes seconds
def test_importing_torchs_sharding_borrows_nothing():
    """Some of torch's modules import it for themselves."""
    own = inspect.getsource(cut.flat_shards).replace(
        "    flat =", "    import torch.distributed.fsdp._fully_shard\n    flat =", 1
    )
    verdict = labkit.check("flat_shards", written(own, "flat_shards"))
    assert verdict.right, str(verdict)


# Hints

#: What the pseudo-code of the third hints says, as Python.
PHRASES = [
    ("·", "*"), (r"^( *)(\w+)\((.*)\):$", r"\1def \2(\3):"),
    (r"all tensors, (.*), one after the other", r"torch.cat([t.\1() for t in tensors])"),
    (r"what flat lacks to the next multiple of (.*)", r"-len(flat) % \1"),
    (r"append missing times (.*) to flat", r"flat = torch.cat([flat, torch.full((missing,), float(\1))])"),
    (r"flat in (.*) equal parts", r"flat.chunk(\1)"),
    (r"pad params and grads to a multiple of N",
     r"out = params; params, grads = (F.pad(t, (0, -len(t) % N)) for t in (params, grads))"),
    (r"part (.*) of the padded params", r"params.chunk(N)[\1].clone()"),
    (r"(\w+) = reduce-scatter of (\w+)(?:, divided by (.*))?$",
     r"\1 = torch.empty(len(\2) // N); dist.reduce_scatter_tensor(\1, \2 / (\3 1))"),
    (r"(\w+) = all-gather of (.*)",
     r"\1 = torch.empty(N * len(shard)); dist.all_gather_into_tensor(\1, \2)"),
    (r"copy (.*) into params", r"out.copy_(\1)"),
    (r"note param in arrived", "arrived.append(param)"), (r"if (.*) have arrived:", r"if len(arrived) == \1:"),
    (r"the gradients in the order of (.*), padded to (.*)",
     r"torch.cat([p.grad.flatten() for p in \1]); flat = F.pad(flat, (0, \2 - len(flat)))"),
    (r"set the gradients to (.*)", r"[setattr(p, 'grad', \1) for p in params]"),
    (r"add (.*) to shard", r"shard.add_(\1)"), (r"forget what arrived", "arrived.clear()"),
]  # fmt: skip
HEADS = {
    "flat_shards": "def flat_shards(tensors, N):",
    "stage_one_step": "def stage_one_step(params, grads, update):",
    "stage_two_hook": "def stage_two_hook(params, shard):",
    "stage_three_block": "def stage_three_block(block, shard):",
}
BLANKS = {
    "flat_shards": ["flatten", "N", "0", "N"],
    "stage_one_step": ["rank", "grads", "N", "shard", "flat[:len(out)]"],
    "stage_two_hook": ["len(params)", "params", "None", "N"],
    "stage_three_block": ["shard", "shard", "grad_flat", "N"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_hint_is_right_when_its_blanks_are_filled(name):
    """Word for word: nothing is added but what each phrase says, and the functions that are returned."""
    text = exercises.get(name).hints()[2].strip("\n")
    assert text.count("____") == len(BLANKS[name])
    for blank in BLANKS[name]:
        text = text.replace("____", blank, 1)
    body = [HEADS[name]]
    if name != "flat_shards":
        body.append("    rank, N = dist.get_rank(), dist.get_world_size()")
    for line in text.splitlines():
        for phrase, python in PHRASES:
            line = re.sub(phrase, python, line)
        body.append(f"    {line}".replace("( 1)", "1").replace("(N 1)", "N"))
    body += ["    return forward, backward"] if name == "stage_three_block" else []
    verdict = labkit.check(name, written("\n".join(body), name, F=F))
    assert verdict.right, f"{verdict}\n" + "\n".join(body)


# Impostors


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setenv("LABKIT_STATIC", "1")
    return labkit.impostors("07")


def test_each_impostor_has_symptoms_of_its_own(line):
    from labkit.checks.judge import judge

    assert judge(line.exercise, line.exercise.solution).right
    rows = {row[0]: row[1:] for row in line.symptoms}
    *_, allowed = line.symptoms
    assert rows["C"][0].endswith(", as one process")
    assert all("; one process " in rows[letter][0] for letter in "ABD")
    assert [", as one process" in rows[letter][1] for letter in "ABCD"] == [False, True, True, False]
    assert rows["C"][2] == "none"
    assert rows["D"][2].startswith("all 4: 0.")
    assert rows["B"][2].startswith("words, ")
    assert [rows[letter][3] for letter in "ABCD"] == ["two that differ"] + ["one tensor"] * 3
    assert rows["A"][4].endswith("; allowed 216")
    assert [rows[letter][4] for letter in "BCD"] == ["216"] * 3
    sent = {letter: int(rows[letter][5].replace(",", "")) for letter in "ABCD"}
    limit = int(allowed[6].replace(",", ""))
    assert sent["B"] == sent["D"] == limit
    assert sent["C"] == 1.5 * (limit - 24) + 24, "two thirds of the bytes too many, but for the norm's"
    assert len({json.dumps(row) for row in rows.values()}) == 5
    assert len({len(row) for row in line.symptoms} | {len(line.columns)}) == 1
    assert "<table>" in line._repr_mimebundle_()["text/html"]


def test_a_diagnosis(line):
    assert len(line.ask("A").choices) == 4
    line.ask("D").note("the buffer's padding is not zero, and counts in the norm")
    assert line.open("D").startswith("That is it")
    assert "memory(len(whole))" in line.open("D")


def test_the_impostors_differ_from_the_rest_in_one_place():
    """Each is the loop of `train` with a few lines of its own."""
    right = inspect.getsource(lineup.train).splitlines()[2:]
    for member in (lineup.a, lineup.b, lineup.c, lineup.d):
        mine = inspect.getsource(member).splitlines()[1:]
        assert len(set(right) - set(mine)) <= 2, member.__name__
        assert len(set(mine) - set(right)) <= 5, member.__name__
