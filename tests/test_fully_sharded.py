"""Stage 3 against one process with the whole model in float64: values, bytes held, bytes sent, and what is refused."""

from __future__ import annotations

import programs_fully_sharded as programs
import pytest
import torch

import labkit


@pytest.mark.parametrize(
    ("ranks", "name", "changes", "options", "micro_steps", "clip"),
    [
        (1, "tiny_gpt", {}, {}, 1, None),
        pytest.param(2, "tiny_gpt", {"layers": 3}, {"prefetch": 0}, 1, 0.1, marks=pytest.mark.soak),
        (2, "tiny_llama", {"tied": True}, {"prefetch": 2}, 3, None),
        (3, "tiny_gpt", {"ffn": 37}, {"keep_after_forward": True}, 2, 0.1),
        pytest.param(3, "tiny_llama", {}, {}, 1, 0.1, marks=pytest.mark.soak),
        (4, "tiny_gpt", {"vocab": 33}, {}, 2, None),
    ],
    ids=["one-rank", "no-prefetch-clipped", "two-ahead-accumulated", "kept", "llama-clipped", "four-ranks"],
)
def test_ten_steps_are_those_of_one_process(ranks, name, changes, options, micro_steps, clip):
    run = labkit.run(programs.ten_steps, name, changes, options, micro_steps, clip, ranks=ranks)
    assert programs.distance(run.values) <= 1e-12
    assert not run.leftovers


KINDS = ["plain", "frozen", "frozen-first", "mixed", "tied", "twice", "two-forwards", "checkpoint", "reentrant",
         "inner-checkpoint", "tricks", "nested", "units", "unused"]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in KINDS]
    + [(kind, {"prefetch": 0}) for kind in ("frozen", "unused")]
    + [(kind, {"keep_after_forward": True}) for kind in ("twice", "two-forwards", "inner-checkpoint")],
    ids=str,
)
def test_modules_of_all_sorts(kind, options):
    run = labkit.run(programs.of_all_sorts, kind, options, ranks=3)
    assert programs.distance(run.values) <= (1e-6 if kind == "mixed" else 1e-12)
    assert not run.leftovers


def test_the_losses_of_torchs_fsdp2():
    assert max(labkit.run(programs.beside_torch, ranks=2).values) <= 1e-12


def test_with_tensor_parallelism_inside():
    assert max(labkit.run(programs.beside_tensor_parallelism, "tiny_gpt", ranks=4).values) <= 1e-12


@pytest.mark.parametrize(("ranks", "ahead"), [(4, 0), (3, 1)])
def test_bytes_held(ranks, ahead):
    """Fault 42: shards, and of full parameters and gradients the root's and those of one unit, with prefetch two."""
    run = labkit.run(programs.bytes_held, "tiny_gpt", {"layers": 4}, {"prefetch": ahead}, ranks=ranks)
    for held in run.values:
        shards = sum(-(-unit // ranks) for unit in held["units"]) * 8
        root, block = (-(-unit // ranks) * ranks * 8 for unit in held["units"][:2])
        for when, gradients in (("between", 0), ("after", 0), ("highest", max(root + (1 + ahead) * block, shards))):
            of = held[when]
            assert (of["parameters"], of["gradients"]) == (shards, gradients)
            # The optimizer's state has no padding.
            assert (of["optimizer"], of["steps"]) == (2 * 8 * sum(held["pieces"]), 4 * len(held["pieces"]))
            assert of["buffers"] == (root + (1 + ahead) * block if when == "highest" else 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_peak_of_a_backward(ranks):
    """To the byte. Four blocks of h² elements; "other" is a gradient on its way into the buffer, and activations'."""
    h, layers = 32, 4
    block, shard, row = 4 * h * h, 4 * h * h // ranks, 4 * h
    run = labkit.run(programs.chain_under_a_meter, layers, h, {"prefetch": 0}, ranks=ranks)
    for peak, after in run.values:  # in the last block, whose input needs no gradient
        assert peak["parameters"] == after["parameters"] == after["gradients"] == layers * shard
        assert peak["buffers"] == block
        assert peak["gradients"] == block + 3 * shard
        assert peak["other"] == block + 4  # a gradient of the loss
        assert after["buffers"] == 0
    run = labkit.run(programs.chain_under_a_meter, layers, h, {"prefetch": 1}, ranks=ranks)
    for peak, _ in run.values:  # in block 1: block 0 is gathered, the gradients of block 2 are being reduced
        assert peak["parameters"] == layers * shard
        assert peak["buffers"] == 2 * block
        assert peak["gradients"] == 2 * block + 2 * shard
        assert peak["other"] == block + row + 4


@pytest.mark.parametrize(("ranks", "options", "micro_steps", "times"), [
    (2, {}, 1, 3), (3, {"prefetch": 0}, 1, 3), (4, {}, 2, 6), (3, {"keep_after_forward": True}, 2, 4),
])  # fmt: skip
def test_bytes_sent(ranks, options, micro_steps, times):
    """3kΨ(N−1)/N elements a rank, Ψ with each unit's padding; kept after forward, 2kΨ."""
    run = labkit.run(programs.bytes_sent, "tiny_gpt", {"vocab": 33, "ffn": 37}, options, micro_steps, ranks=ranks)
    units = run.values[0]
    padded = [-(-unit // ranks) * ranks for unit in units]
    assert sum(padded) > sum(units)
    for rank in range(ranks):
        sends = [e for e in run.trace.of(rank) if e.kind == "send" and e.labels.get("counted") == 1]
        assert not [e for e in run.trace.of(rank) if e.kind == "collective" and e.labels.get("counted") == 1]
        assert sum(e.nbytes for e in sends) == times * sum(padded) // ranks * (ranks - 1) * 8
        for number, size in enumerate(padded, start=-1):
            mine = sum(e.nbytes for e in sends if e.labels["unit"] == number)
            assert mine == times * size // ranks * (ranks - 1) * 8


def test_what_a_picture_is_drawn_from():
    """Labels and spans: who is gathered, freed and reduced, in this order on all ranks; the next one ahead."""
    run = labkit.run(programs.bytes_sent, "tiny_gpt", {}, {}, 1, ranks=2)
    for rank in range(2):
        spans = [e for e in run.trace.of(rank) if e.kind == "span" and e.labels.get("counted") == 1]
        told = [(e.name, e.labels["unit"], e.phase) for e in spans if e.name in ("gather", "free", "reduce")]
        assert told == [
            ("gather", -1, "forward"), ("gather", 0, "forward"), ("gather", 1, "forward"),
            ("free", 0, "forward"), ("free", 1, "forward"), ("free", -1, "forward"),
            ("gather", -1, "backward"), ("gather", 1, "backward"), ("gather", 0, "backward"),
            ("free", 1, "backward"), ("reduce", 1, "backward"),
            ("free", 0, "backward"), ("reduce", 0, "backward"),
            ("free", -1, "backward"), ("reduce", -1, "backward"),
        ]  # fmt: skip


def test_an_empty_root_says_nothing():
    run = labkit.run(programs.blocks_only, ranks=2)
    told = {(e.name, e.labels.get("unit")) for e in run.trace.of(0) if e.kind == "span"}
    ours = ("gather", "free", "reduce")
    assert {one for one in told if one[0] in ours} == {(name, unit) for name in ours for unit in (0, 1)}


def test_tied_weights_are_one():
    """Fault 39: embedding and head are one parameter, one shard, counted once; its gradient has both parts."""
    run = labkit.run(programs.ten_steps, "tiny_gpt", {"tied": True}, {}, ranks=2)
    assert programs.distance(run.values) <= 1e-12
    names = set(run.values[0][1])
    assert "token_embedding.weight" in names
    assert "head.weight" not in names


@pytest.mark.parametrize(("name", "tied"), [("tiny_gpt", True), ("tiny_llama", False)])
def test_a_model_from_meta(name, tied):
    """The values of one process with that seed; never the model, only shards, one unit's memory, and one parameter."""
    changes = {"layers": 6, "hidden": 32, "vocab": 64, "positions": 16, "tied": tied}
    run = labkit.run(programs.from_meta, name, changes, None, ranks=2)
    for most, elements, unit, _, _ in run.values:
        assert most <= 8 * (elements / 2 + 2 * unit) * 1.05 < 8 * elements
    for param_name, want in run.values[0][4].items():
        assert torch.equal(torch.cat([values[3][param_name] for values in run.values]), want.view(-1)), param_name


def test_an_initialisation_that_comes_back():
    assert labkit.run(programs.table_from_meta, ranks=3).values == [0.0] * 3
    with pytest.raises(labkit.RankError, match=r"scale was built on the meta device and nothing has initialised it"):
        labkit.run(programs.left_out_on_meta, None, ranks=2)
    with pytest.raises(labkit.RankError, match=r"layers.0.weight was built on the meta device and is not wholly"):
        labkit.run(programs.left_out_on_meta, programs.on_nothing, ranks=2)


def test_sixteen_bits_with_shards_of_thirty_two():
    """On one rank exactly a loop by hand; on two each element travels in two bytes."""
    assert labkit.run(programs.half_precision, ranks=1).values == [[0.0] * 3]
    run = labkit.run(programs.half_precision, ranks=2)
    assert max(max(values) for values in run.values) < 0.01
    assert {e.dtype for e in run.trace.events if e.kind == "send" and "unit" in e.labels} == {"bfloat16"}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"keep_after_forward": True, "prefetch": 0}], ids=["ahead", "kept"])
def test_a_step_after_one_that_failed(where, options):
    run = labkit.run(programs.after_an_error, where, options, ranks=2)
    for told, _, _ in run.values:  # ahead: the one reduction was under way, and could be dropped
        assert ("cut short" in told) == (where == "backward" and "prefetch" in options)
    for name, want in run.values[0][2].items():
        together = torch.cat([grads[name] for _, grads, _ in run.values])
        torch.testing.assert_close(together, want.view(-1), rtol=1e-12, atol=1e-15)


def test_gradients_of_inputs_only():
    assert labkit.run(programs.inputs_only, ranks=2).values == [True, True]


@pytest.mark.parametrize(("kind", "told"), [
    ("wrapped", "wrapped in FullyShardedDataParallel already"),
    ("averaged", "under DistributedDataParallel"),
    ("no part", "blocks[0], a Linear, is no part of the module"),
    ("tensor-parallel", "first.weight is sharded over this group already"),
    ("another", "rank 0 of the group has last.weight (3, 5) float64, rank 1 has last.weight (4, 5)"),
    ("replaced", "last.bias was replaced"),
    ("cast", "first.weight was replaced, moved, cast"),
    ("frozen", "layers.1.0.weight was replaced, moved, cast, frozen"),
    ("stepped", "changed between a forward and its backward"),
])  # fmt: skip
def test_refused(kind, told):
    for said in labkit.run(programs.refused, kind, ranks=2).values:
        assert told in said
