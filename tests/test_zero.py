"""ZeRO's stages 1 and 2 and the distributed optimizer, against one process in float64 and against the formulas."""

from __future__ import annotations

import math

import programs_zero as programs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit.zero import flat

KINDS = [1, 2, "distributed"]
TINY = 1e-6  # a bucket a parameter


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 9))
def test_shards_are_equal_and_cover_every_element_once(sizes, ranks):
    """Against a buffer in which every element says whose it is."""
    buffer = [(index, element) for index, size in enumerate(sizes) for element in range(size)]
    length = math.ceil(len(buffer) / ranks)
    for rank in range(ranks):
        expected = buffer[rank * length : (rank + 1) * length]
        have: list = [None] * len(expected)
        for piece in flat.cut(sizes, ranks, rank):
            have[piece.at : piece.at + piece.length] = [
                (piece.index, e) for e in range(piece.offset, piece.offset + piece.length)
            ]
        assert have == expected
    assert flat.padded(len(buffer), ranks) == length * ranks


def test_flat_arithmetic_refuses_what_is_no_size():
    for call in (lambda: flat.cut([3], 2, 2), lambda: flat.cut([-1], 2, 0), lambda: flat.shard_size(3, 0),
                 lambda: flat.shard_size(-3, 1)):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            call()


#: What one process is compared on; the last numbers of the model's sizes divide by nothing.
CASES = {
    "plain": ("tiny_gpt", {}, {}),
    "tied-groups-accumulated-clipped-scheduled": (
        "tiny_llama", {"tied": True},
        {"grouped": True, "micro_steps": 2, "clip": 0.3, "scheduled": True, "cap": TINY},
    ),
    "frozen-momentum": (
        "tiny_gpt", {"tied": False},
        {"frozen": "blocks.0", "optimizer": "SGD", "options": {"lr": 0.1, "momentum": 0.9}, "cap": 25},
    ),
}  # fmt: skip


#: On every change each case once, and one rank; all in the soak.
ON_EVERY_CHANGE = {("plain", 1), ("tied-groups-accumulated-clipped-scheduled", 2), ("frozen-momentum", 3), ("plain", 4)}


@pytest.mark.parametrize(
    ("case", "ranks"),
    [pytest.param(case, ranks, marks=[] if (case, ranks) in ON_EVERY_CHANGE else pytest.mark.soak)
     for case in CASES for ranks in (1, 2, 3, 4)],
)  # fmt: skip
def test_ten_steps_are_those_of_one_process(case, ranks):
    """Fault 41: stages 1 and 2 and the distributed optimizer, each against one process, and against each other."""
    name, changes, options = CASES[case]
    found = {}
    for kind in KINDS:
        run = labkit.run(programs.against_one_process, kind, name, changes, ranks=ranks, **options)
        assert max(off for off, _ in run.values) <= 1e-12, kind
        assert not run.leftovers
        for _, params in run.values[1:]:
            assert all(map(torch.equal, params, run.values[0][1])), kind
        found[kind] = run.values[0][1]
    for kind in (2, "distributed"):
        for have, want in zip(found[kind], found[1], strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["RMSprop", "Adagrad", "NAdam"])
def test_any_element_wise_optimizer(optimizer):
    options = {"eps": 1e-6}  # a gradient that is 0 but for rounding stays near 0
    run = labkit.run(
        programs.against_one_process, 2, "tiny_gpt", {}, steps=3, optimizer=optimizer, options=options, ranks=2
    )
    assert max(off for off, _ in run.values) <= 1e-12


@pytest.mark.parametrize("kind", [1, 2])
def test_gradients_of_the_step_before_stay_until_they_are_zeroed(kind):
    run = labkit.run(programs.against_one_process, kind, "tiny_gpt", {}, steps=3, zeroed=False, ranks=2)
    assert max(off for off, _ in run.values) <= 1e-12
    with pytest.raises(labkit.RankError, match=r"zero_grad\(\)"):
        labkit.run(programs.against_one_process, "distributed", "tiny_gpt", {}, steps=2, zeroed=False, ranks=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [TINY, 25])
def test_ranks_in_different_branches(kind, cap):
    """Gradients in other orders, and none at all: zeros are brought; what nobody used is left alone where asked."""
    uses = [["abc", "cba"], ["ab", "c"], ["", "bca"]]
    run = labkit.run(programs.branches, kind, uses[:2], cap, False, 0.0, ranks=2)
    assert max(run.values) <= 1e-12
    if kind != 2:  # nor has stage 2 a backward on rank 0 in the third step, which the loss does not need
        uses = uses[:2]
    run = labkit.run(programs.branches, kind, uses[:2], cap, True, 0.3, ranks=2)
    assert max(run.values) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_16_bit_gradients_does_not_overflow(kind):
    """Fault 16: 40000 on each of two ranks."""
    values = labkit.run(programs.half_mean, kind, 40000.0, ranks=2).values
    assert [element for shard in values for element in shard] == [40000.0] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_fp32_and_the_rest_has_none(kind):
    """Against AdamW on fp32 copies, given the mean of gradients that were made in bf16."""
    net = programs.mixed_module()
    wide = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone() for name, p in net.items()}
    reference = torch.optim.AdamW(list(wide.values()), lr=0.01)
    for step in range(4):
        grads = []
        for rank in range(2):
            net.zero_grad()
            programs.mixed_loss(net, 10 * step + rank).backward()
            grads.append({name: p.grad.clone() for name, p in net.items()})
        for name, master in wide.items():
            master.grad = (grads[0][name].to(master.dtype) + grads[1][name].to(master.dtype)) / 2
            if kind != "distributed":  # the mean is rounded once
                master.grad = master.grad.to(net[name].dtype).to(master.dtype)
        reference.step()
        for name, param in net.items():
            param.data.copy_(wide[name])
    for runs in labkit.run(programs.masters, kind, ranks=2).values:
        for name, offset, values in runs:
            expected = wide[name].flatten()[offset : offset + len(values)]
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_next_to_tensor_parallelism(kind):
    """Shards in the data-parallel group; the norm by each parameter's mark; partial gradients are added up too."""
    factor = programs.factor
    mean = {(n, t): 2 * (factor(n, t, 0) + factor(n, t, 1)) / 2 for n in programs.MARKS for t in (0, 1)}
    both = mean["partial", 0] + mean["partial", 1]
    whole = torch.cat([mean["sharded", 0], mean["sharded", 1], mean["replicated", 0], both])
    for found in labkit.run(programs.on_a_mesh, kind, ranks=4).values:
        assert found["norm"] == pytest.approx(whole.norm().item(), rel=1e-12)
        expected = {"sharded": mean["sharded", found["tp"]], "replicated": mean["replicated", 0], "partial": both}
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], -grad / (whole.norm() + 1e-6), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("kind", "by_hand"), [*((kind, False) for kind in KINDS), (1, True)])
def test_equal_parts_of_a_gradient_are_added_up_once(kind, by_hand):
    for stepped in labkit.run(programs.equal_parts, kind, by_hand, ranks=4).values:
        assert stepped.tolist() == [-2.0] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_in_no_norm_and_no_parameter(kind):
    assert max(labkit.run(programs.no_garbage, kind, ranks=3).values) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_by_name_and_loads(kind):
    values = labkit.run(programs.loaded, kind, ranks=2).values
    for same, told, _ in values:
        assert same
        assert "layers.0.weight: this rank holds" in told
    for name, (_, _, shape, _) in values[0][2].items():
        runs = [value[2][name] for value in values]
        assert next(offset for offset, length, *_ in runs if length) == 0
        assert sum(length for _, length, *_ in runs) == math.prod(shape)
        for offset, length, _, keys in runs:
            assert keys == (["exp_avg", "exp_avg_sq", "step"] if length else [])
            assert offset + length in (0, *[r[0] for r in runs], math.prod(shape))


@pytest.mark.parametrize(("kind", "told"), [
    ("torch's DDP", "wrapped in DistributedDataParallel"),
    ("DDP", "wrapped in DistributedDataParallel"),
    ("under DDP", "a module under DistributedDataParallel"),
    ("parameters under DDP", "a module under DistributedDataParallel"),
    ("Adafactor", "Adafactor is not element-wise"),
    ("LBFGS", "LBFGS is not element-wise"),
    ("Muon", "Muon is not element-wise"),
    ("SparseAdam", "SparseAdam is not element-wise"),
    ("two in one memory", "0.weight and 1.weight are two parameters in one memory"),
    ("made already", "not one that is made already"),
    ("frozen", "no trained parameter"),
    ("stage", "stage=3: expected 1 or 2"),
    ("cap", "bucket_cap_mb=0"),
    ("tensor", "module_or_params is Tensor"),
    ("meta", "weight is on the meta device"),
])  # fmt: skip
def test_what_cannot_be_sharded_is_refused(kind, told):
    for value in labkit.run(programs.refused, kind, ranks=2).values:
        assert told in value


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("kind", "told"), [
    ("none", ""), ("cast", "was replaced, moved, cast or frozen"), ("unfrozen", "0.bias was not trained"),
    ("group", "takes no further parameters"), ("error", "cut short"),
])  # fmt: skip
def test_what_changes_later_is_found(kind, told, stage):
    if (kind, stage) == ("error", 1):
        told = ""  # gradients simply stay, as in torch
    for value in labkit.run(programs.changed, kind, stage, ranks=2).values:
        assert told in value
        assert told or not value


def test_a_closure_and_a_warning_of_zeros():
    total, told = labkit.run(programs.closure_and_warning, ranks=2).values[0]
    assert total == pytest.approx(total)
    assert len(told) == 1
    assert "2 parameters, such as layers.never" in told[0]


SIZES = [13 * 11, 11, 11 * 7, 7, 7 * 29]  # of `programs.Odd`


def cut_by_hand(buckets, ranks, rank):
    """(elements of all buckets with padding, of this rank's shards, of them not padding, pieces)."""
    whole = shard = real = pieces = 0
    for sizes in buckets:
        per_rank = math.ceil(sum(sizes) / ranks)
        whole, shard = whole + per_rank * ranks, shard + per_rank
        owner = [n for n, size in enumerate(sizes) for _ in range(size)][rank * per_rank : (rank + 1) * per_rank]
        real, pieces = real + len(owner), pieces + len(set(owner))
    return whole, shard, real, pieces


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cap", [TINY, 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_held_are_those_of_the_formula(kind, dtype, cap, ranks):
    """Every rank, every category; what comes beside the stage's formula has a name here."""
    one = cap == 25 or kind == "distributed"
    buckets = [SIZES[::-1]] if one else [[size] for size in SIZES[::-1]]
    width, mixed, psi = dtype.itemsize, dtype == torch.bfloat16, sum(SIZES)
    for rank, found in enumerate(labkit.run(programs.memory, kind, cap, dtype, ranks=ranks).values):
        whole, shard, real, pieces = cut_by_hand(buckets, ranks, rank)
        for when in ("before", "backward", "reduced", "stepped", "after"):
            held, stepped = found[when], when in ("stepped", "after")
            assert held["parameters"] == width * whole
            assert held["master"] == (4 * shard if mixed else 0)
            assert held["optimizer"] == (8 * real if stepped else 0)
            assert held["steps"] == (4 * pieces if stepped else 0)
            assert held["other"] == held["buffers"] == 0
        gradients = [found[when]["gradients"] for when in ("backward", "reduced", "stepped", "after")]
        if kind == "distributed":
            assert gradients == [4 * whole] * 4
        else:
            assert gradients == [width * (psi if kind == 1 else shard), 4 * shard, 4 * shard, 0]


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_the_peak_of_gradients_has_names(kind, micro_steps):
    """Fault 42: what stage 2 holds at its worst is its shards, one full bucket, and that bucket's part on its way."""
    ranks, sizes = 3, SIZES[::-1]
    padded = [math.ceil(size / ranks) * ranks for size in sizes]
    for found in labkit.run(programs.memory, kind, TINY, torch.float32, micro_steps, ranks=ranks).values:
        most = found["most gradients"]
        if kind == 1:  # all gradients, and buckets one by one; what is reduced is freed
            assert most["backward"] == 4 * sum(sizes)
            assert most["reduce"] == 4 * max(
                sum(sizes[n:]) + padded[n] + sum(padded[:n]) // ranks for n in range(len(sizes))
            )
        else:
            kept = [sum(padded if micro_steps > 1 else padded[:n]) // ranks for n in range(len(sizes))]
            assert most["backward"] == 4 * max(k + p + p // ranks for k, p in zip(kept, padded, strict=True))
            assert most["reduce"] == 4 * sum(padded) // ranks


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cap", [TINY, 25])
@pytest.mark.parametrize(("kind", "micro_steps", "quiet", "scatters"), [
    (1, 1, False, 1), (1, 4, False, 1), (2, 1, False, 1), (2, 4, False, 4), (2, 4, True, 1),
    ("distributed", 4, False, 1),
])  # fmt: skip
def test_bytes_sent_are_those_of_the_formula(kind, micro_steps, quiet, scatters, cap, ranks):
    """Faults 36 and 37: 2Ψ(N−1)/N each rank, at stage 2 with k micro-steps (k+1)Ψ(N−1)/N; Ψ with the padding."""
    run = labkit.run(programs.volume, kind, cap, micro_steps, quiet, ranks=ranks)
    one = cap == 25 or kind == "distributed"
    shard = sum(math.ceil(size / ranks) for size in ([sum(SIZES)] if one else SIZES))
    for rank in range(ranks):
        counted = [e for e in run.trace.of(rank) if "counted" in e.labels]
        assert not [e for e in counted if e.kind == "collective"]
        sends = [e for e in counted if e.kind == "send"]
        assert sum(e.nbytes for e in sends) == (scatters + 1) * 4 * shard * (ranks - 1)
        assert {e.labels["bucket"] for e in sends} == set(range(1 if one else len(SIZES)))
        spans = [e.name.split()[0] for e in counted if e.kind == "span"]
        buckets = len(spans) // (scatters + 1)
        assert spans == ["reduce_scatter"] * scatters * buckets + ["all_gather"] * buckets
