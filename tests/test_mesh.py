"""Groups of a mesh: Megatron's published table, numpy's arithmetic, and real groups on real ranks."""

from __future__ import annotations

import itertools

import numpy as np
import programs_train
import pytest

import labkit
from labkit.train import AXES, Mesh

#: Megatron-LM, `initialize_model_parallel`: 16 GPUs, tensor 2, pipeline 4.
MEGATRON = {
    "tp": [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)],
    "dp": [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)],
    "pp": [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)],
}


@pytest.mark.parametrize("axis", AXES)
def test_groups_are_megatrons(axis):
    assert sorted(Mesh(tp=2, dp=2, pp=4).groups(axis)) == MEGATRON[axis]


def test_rank_5_of_8():
    assert Mesh(tp=2, dp=2, pp=2).groups_of(5) == {"tp": (4, 5), "dp": (5, 7), "pp": (1, 5)}


@pytest.mark.parametrize(("tp", "dp", "pp"), list(itertools.product((1, 2, 3), (1, 2, 4), (1, 3))))
def test_groups_are_the_lines_of_a_grid(tp, dp, pp):
    mesh, grid = Mesh(tp=tp, dp=dp, pp=pp), np.arange(tp * dp * pp).reshape(pp, dp, tp)
    for rank, (p, d, t) in enumerate(np.ndindex(grid.shape)):
        lines = {"tp": grid[p, d, :], "dp": grid[p, :, t], "pp": grid[:, d, t]}
        assert mesh.groups_of(rank) == {axis: tuple(line.tolist()) for axis, line in lines.items()}
        assert mesh.place(rank) == {"tp": t, "dp": d, "pp": p}


@pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "pp": 2}, {"tp": 4}, {"pp": 2}])
def test_real_groups_are_those(sizes):
    mesh = Mesh(**sizes)
    run = labkit.run(programs_train.real_groups, sizes, ranks=mesh.ranks)
    for rank, (sums, members, of_torch) in enumerate(run.values):
        expected = mesh.groups_of(rank)
        assert members == expected
        assert of_torch == expected["tp"]
        assert sums == {axis: sum(2**r for r in group) for axis, group in expected.items()}


def test_a_trace_names_the_axis():
    run = labkit.run(programs_train.real_groups, {"tp": 2, "dp": 2}, ranks=4)
    names = {e.group for e in run.trace.of(3) if e.name == "all_reduce"}
    assert {"tp {2,3}", "dp {1,3}"} <= names


def test_sizes_must_make_the_world():
    for said in labkit.run(programs_train.wrong_product, ranks=2).values:
        assert "tp=2 · dp=3 · pp=1 is 6 ranks, but there are 2" in said


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda: Mesh(tp=0), ValueError, "tp=0: expected at least 1"),
        (lambda: Mesh(dp=2.0), TypeError, "dp is 2.0"),
        (lambda: Mesh(pp=True), TypeError, "pp is True"),
        (lambda: Mesh(tp=2).groups_of(2), ValueError, "rank=2: .* ranks 0 to 1"),
        (lambda: Mesh(tp=2).place("1"), TypeError, "rank is '1'"),
        (lambda: Mesh(tp=2).groups("cp"), ValueError, "axis='cp'"),
        (lambda: Mesh(tp=2).group("mp"), ValueError, "axis='mp'"),
        (lambda: Mesh(tp=2).group("tp"), RuntimeError, "made outside of ranks"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, told):
    with pytest.raises(error, match=told):
        call()
