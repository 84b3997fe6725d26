"""The norm on any mesh against one process and by hand; faults 44 and 45."""

from __future__ import annotations

import math

import programs_norm as programs
import pytest
import torch
from torch import nn

import labkit
from labkit.collectives import Placement
from labkit.tricks import clip_grad_norm_, clip_pieces_, total_norm, was_clipped

INF, NAN = math.inf, math.nan


def only(run):
    """What all ranks say, to the bit."""
    assert len(set(run.values)) == 1, run.values
    return run.values[0]


# By hand


@pytest.mark.parametrize(("p", "norm"), [(2.0, 29**0.5), (1.0, 9.0), (3.0, 99 ** (1 / 3)), (INF, 4.0)])
def test_a_replicated_parameter_counts_once(p, norm):
    """Fault 44: 5.385, not 5.745 (twice) or 7.616 (all of it)."""
    run = labkit.run(programs.sharded_and_replicated, p, ranks=2)
    assert {value for value, _ in run.values} == {run.values[0][0]}
    assert run.values[0][0] == pytest.approx(norm, rel=1e-14)
    for rank, (_, grads) in enumerate(run.values):
        assert grads == pytest.approx([(3, 4)[rank] / (norm + 1e-6), 2 / (norm + 1e-6)], rel=1e-14)


@pytest.mark.parametrize(
    ("p", "tied", "norm"),
    [(2.0, False, 5.0), (2.0, True, 29**0.5), (1.0, True, 9.0), (INF, False, 4.0), (INF, True, 4)],
)
def test_stages_clip_by_the_norm_of_all(p, tied, norm):
    """Fault 45: 5 on both, not 3 and 4. What is tied counts once, on however many stages it is; a stage may have no
    parameters."""
    assert only(labkit.run(programs.stages, p, tied, False, ranks=2)) == pytest.approx(norm, rel=1e-14)
    assert only(labkit.run(programs.stages, p, tied, False, ranks=3)) == pytest.approx(norm, rel=1e-14)
    assert only(labkit.run(programs.stages, p, tied, True, ranks=3)) == pytest.approx(norm, rel=1e-14)


def test_gradients_split_at_random():
    assert max(labkit.run(programs.at_random, range(40), ranks=4).values) <= 1e-12


@pytest.mark.parametrize("p", [2.0, 1.0, INF])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_what_is_not_finite_on_one_rank_is_so_on_all(value, p):
    """Of any kind, on any of the ranks that have it: also a replica that differs from the others."""
    for found in labkit.run(programs.one_that_is_not_finite, value, p, ranks=4).values:
        assert len(found) == 10
        for *_, norm, refused in found:
            assert str(norm) == str(abs(value))
            assert refused


def test_whoever_has_no_gradient_takes_part():
    assert only(labkit.run(programs.whoever_has_no_gradient, ranks=3)) == (5.0, 5.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_gradients_are_summed_in_fp32(dtype):
    assert only(labkit.run(programs.by_narrow_types, dtype, ranks=2)) == pytest.approx(9984 * 510**0.5, rel=1e-6)


# Whole models


@pytest.mark.parametrize(
    ("name", "changes", "how", "p"),
    [
        ("tiny_gpt", {}, "tp", 2.0),
        ("tiny_gpt", {}, "sp", 2.0),
        ("tiny_llama", {"kv_heads": 1}, "tp", 2.0),
        ("tiny_llama", {"kv_heads": 1}, "sp", 1.0),
        ("tiny_gpt", {"tied": False}, "tp", INF),
    ],
)
def test_beside_data_and_tensor_parallelism(name, changes, how, p):
    run = labkit.run(programs.beside_data_parallelism, name, changes, how, p, ranks=4)
    assert len({norm for norm, _ in run.values}) == 1
    assert max(off for _, off in run.values) <= 1e-12


@pytest.mark.parametrize(
    ("p", "tied"), [(2.0, True), *(pytest.param(*rest, marks=pytest.mark.soak) for rest in ((2.0, False), (INF, True)))]
)
def test_in_three_dimensions(p, tied):
    """dp 2 × tp 2 × pp 2; the tied embedding counts once."""
    run = labkit.run(programs.in_three_dimensions, p, tied, ranks=8)
    assert len({norm for norm, _ in run.values}) == 1
    assert max(off for _, off in run.values) <= 1e-12


@pytest.mark.parametrize(
    ("stage", "tp", "p"), [(1, 1, 2.0), (2, 1, INF), (3, 1, 2.0), (1, 2, 2.0), (2, 2, 2.0), (3, 2, 2.0)]
)
def test_what_zero_shards(stage, tp, p):
    run = labkit.run(programs.by_zero, stage, tp, p, ranks=2 * tp)
    assert len({norm for norm, _ in run.values}) == 1
    assert max(off for _, off in run.values) <= 1e-12


@pytest.mark.parametrize("stage", [1, 2])
def test_what_zero_shards_in_a_pipeline(stage):
    """dp 2 × pp 2: a tie whose places are shards."""
    run = labkit.run(programs.by_zero_in_a_pipeline, stage, ranks=4)
    assert len({norm for norm, _ in run.values}) == 1
    assert max(off for _, off in run.values) <= 1e-12


# As torch does


@pytest.mark.parametrize("p", [2.0, 1.0, 4.0, INF])
@pytest.mark.parametrize("max_norm", [0.01, 1e9, INF])
def test_on_one_rank_it_is_torchs(p, max_norm):
    models = [nn.Linear(7, 5, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model(torch.arange(7.0, dtype=torch.float64)).square().sum().backward()
    want = nn.utils.clip_grad_norm_(models[0].parameters(), max_norm, p)
    torch.testing.assert_close(clip_grad_norm_(models[1].parameters(), max_norm, p), want, rtol=1e-14, atol=0)
    for have, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(have.grad, expected.grad, rtol=1e-14, atol=0)


def test_one_parameter_given_twice_counts_once():
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.tensor([5.0])
    assert clip_grad_norm_([param, param], 10.0).item() == 5.0


@pytest.mark.parametrize("p", [2.0, 3.0, INF])
def test_sparse_and_mixed_gradients(p):
    """A row looked up twice counts as its sum; element types side by side."""
    models = [nn.Embedding(9, 3, sparse=sparse) for sparse in (True, False)]
    others = [[nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float64, torch.bfloat16)] for _ in models]
    norms = []
    for model, more in zip(models, others, strict=True):
        model(torch.tensor([1, 1, 2])).sum().backward()
        for param in more:
            param.grad = torch.ones_like(param)
        norms.append(clip_grad_norm_([more[0], *model.parameters(), more[1]], 1.0, p).item())
    ones = [2.0] * 3 + [1.0] * 3 + [1.0] * 8
    assert norms[0] == norms[1] == pytest.approx(torch.tensor(ones).norm(p).item(), rel=1e-6)
    torch.testing.assert_close(models[0].weight.grad.to_dense(), models[1].weight.grad)
    assert [param.grad.dtype for param in others[0]] == [torch.float64, torch.bfloat16]


def test_nothing_at_all_has_norm_0():
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(iter([nn.Parameter(torch.zeros(2))]), 1.0).item() == 0.0


def test_large_gradients_do_not_overflow_where_they_are_added():
    """Two of 1.8e19 in fp32: the sum of their squares is above fp32's range."""
    grads = [torch.tensor([1.8e19]) for _ in range(2)]
    assert total_norm([(g, Placement()) for g in grads]).item() == pytest.approx(1.8e19 * 2**0.5, rel=1e-6)


def test_ties_on_one_rank():
    """Two places of one parameter, both here."""
    pieces = [(torch.tensor([3.0]), Placement(tied="a")) for _ in range(2)] + [(torch.tensor([4.0]), Placement())]
    assert total_norm(pieces).item() == 5.0


def test_what_was_clipped_is_known_until_it_changes():
    grad = torch.tensor([3.0, 4.0])
    assert not was_clipped(grad)
    clip_pieces_([(grad, Placement())], 10.0)
    assert was_clipped(grad)
    grad.zero_()
    assert not was_clipped(grad)


# What is refused


@pytest.mark.parametrize("p", [2.0, INF])
def test_partial_gradients_that_nobody_summed(p):
    for before, after in labkit.run(programs.partial_that_nobody_summed, p, ranks=2).values:
        assert before.startswith("ValueError: gradients marked as partial differ on ranks [0, 1]")
        assert after.startswith("no error")


def test_a_tie_whose_other_stage_is_left_out():
    for message in labkit.run(programs.a_tie_without_its_other_stage, ranks=2).values:
        assert message.startswith("ValueError: 'embedding' is tied, and its other place is on another rank: pass pipe")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"max_norm": 0.0}, ValueError, "max_norm=0.0"),
        ({"max_norm": -1}, ValueError, "max_norm=-1"),
        ({"max_norm": NAN}, ValueError, "max_norm=nan"),
        ({"max_norm": "1"}, ValueError, "max_norm='1'"),
        ({"max_norm": True}, ValueError, "max_norm=True"),
        ({"norm_type": 0}, ValueError, "norm_type=0"),
        ({"norm_type": NAN}, ValueError, "norm_type=nan"),
        ({"norm_type": "fro"}, ValueError, "norm_type='fro'"),
        ({"params": nn.Linear(2, 2)}, TypeError, r"params is a Linear: expected parameters, such as model\.parameters"),
        ({"params": None}, TypeError, "params is None"),
        ({"params": [1.0]}, TypeError, "params holds float"),
        ({"params": nn.Linear(2, 2).named_parameters()}, TypeError, "params holds tuple"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, error, says):
    with pytest.raises(error, match=says):
        clip_grad_norm_(**{"params": [nn.Parameter(torch.zeros(1))], "max_norm": 1.0, **arguments})


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (3, "pieces is int: expected pairs"),
        (torch.ones(2), "pieces is Tensor"),
        ([torch.ones(2)], "pieces holds Tensor"),
        ([(torch.ones(2), None)], "pieces holds tuple"),
        ([(1.0, Placement())], "a gradient that is float"),
    ],
)
def test_pieces_that_are_none(pieces, says):
    for call in (total_norm, lambda pieces: clip_pieces_(pieces, 1.0)):
        with pytest.raises(TypeError, match=says):
            call(pieces)


def test_a_norm_that_is_not_finite_is_an_error_if_asked_for():
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.tensor([NAN])
    assert clip_grad_norm_([param], 1.0).isnan()
    with pytest.raises(RuntimeError, match="norm is nan"):
        clip_grad_norm_([param], 1.0, error_if_nonfinite=True)


# What travels


@pytest.mark.parametrize(("kinds", "groups"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_one_small_all_reduce_a_group(kinds, groups):
    """However many parameters there are."""
    run = labkit.run(programs.what_travels, kinds, ranks=4)
    for rank in range(4):
        calls = [e for e in run.trace.events if e.rank == rank and e.parent is None and "all_reduce" in e.name]
        assert len(calls) == groups
