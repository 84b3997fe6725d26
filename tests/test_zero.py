"""ZeRO's stages 1 and 2 and the distributed optimizer, against one process in float64 and against the formulas."""

from __future__ import annotations

import math

import programs_zero as programs
import pytest
import torch

import labkit

KINDS = [1, 2, "distributed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ten_steps_are_those_of_one_process(kind, ranks):
    run = labkit.run(programs.against_one_process, kind, "tiny_gpt", {}, ranks=ranks)
    assert max(off for off, _ in run.values) <= 1e-12


SIZES = [13 * 11, 11, 11 * 7, 7, 7 * 29]  # of `programs.Odd`
TINY = 1e-6  # a bucket a parameter


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
    (1, 1, False, 1), (1, 4, False, 1), (2, 1, False, 1), (2, 4, False, 4), (2, 4, True, 1), ("distributed", 4, False, 1),
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
        assert spans == ["reduce_scatter"] * scatters * (len(spans) // (scatters + 1)) + ["all_gather"] * (
            len(spans) // (scatters + 1)
        )
