"""The collectives against float64 sums and torch's own, on real ranks."""

from __future__ import annotations

import math
from fractions import Fraction

import programs_collectives as programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import labkit
from labkit import collectives
from labkit.collectives.choose import choose
from labkit.collectives.reduction import Reduction

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
OPS = ("sum", "avg", "max", "min", "product")
ALL_REDUCE = collectives.ALGORITHMS["all_reduce"]


def half_ulp(x: Fraction | int, dtype: torch.dtype) -> Fraction:
    """Half the distance of neighbouring numbers of `dtype` at x > 0, exactly."""
    info = torch.finfo(dtype)
    exponent = math.frexp(max(float(x), info.smallest_normal))[1] - 1
    return Fraction(info.eps) * Fraction(2) ** exponent / 2


def check_reduced(result: torch.Tensor, brought: list[torch.Tensor], op: str) -> None:
    """Integers, maximum and minimum exactly; sums within (p−1) roundings of the largest partial sum there can be."""
    dtype, p = result.dtype, len(brought)
    if not dtype.is_floating_point or op in ("max", "min"):
        stacked = torch.stack(brought)
        expected = {
            "sum": lambda: stacked.any(0) if dtype == torch.bool else stacked.sum(0, dtype=torch.int64).to(dtype),
            "product": lambda: stacked.all(0) if dtype == torch.bool else stacked.prod(0, dtype=torch.int64).to(dtype),
            "max": lambda: stacked.any(0) if dtype == torch.bool else stacked.max(0).values,
            "min": lambda: stacked.all(0) if dtype == torch.bool else stacked.min(0).values,
        }[op]()
        assert torch.equal(result, expected)
        return
    columns = [[Fraction(x) for x in column] for column in zip(*(b.tolist() for b in brought), strict=True)]
    for got, column in zip(result.tolist(), columns, strict=True):
        largest = sum(abs(x) for x in column)
        if op == "product":
            expected = math.prod(column)
            relative = Fraction(torch.finfo(dtype).eps) / 2
            bound = abs(expected) * ((1 + relative) ** (p - 1) - 1) + p * half_ulp(0, dtype)  # it may be subnormal
        elif op == "sum":
            expected, bound = sum(column), (p - 1) * half_ulp(largest, dtype)
        elif dtype.itemsize == 2:  # a mean is rounded at each step, to the width of the largest mean
            expected, bound = sum(column) / p, (p - 1) * half_ulp(max(map(abs, column)), dtype)
        else:  # and the division's own rounding
            expected = sum(column) / p
            bound = (p - 1) * half_ulp(largest, dtype) / p + half_ulp(largest / p, dtype)
        assert abs(Fraction(got) - expected) <= bound, (op, dtype, got, float(expected), float(bound))


def case(algorithm: str, op: str, dtype: torch.dtype, length: int, seed: int, **more) -> dict:
    made = {"algorithm": algorithm, "op": op, "dtype": dtype, "length": length, "seed": seed, **more}
    if algorithm == "hierarchical":
        made.setdefault("node_size", 3)
    return made


def check_run(cases: list[dict], ranks: int) -> None:
    results = labkit.run(programs.reduce_all, cases, ranks=ranks).values
    for number, c in enumerate(cases):
        members = c.get("members") or tuple(range(ranks))
        ends = [results[r][number] for r in members]
        assert all(torch.equal(e, ends[0]) for e in ends), f"ranks end with different bits: {c}"
        brought = [programs.values(c["seed"], r, c["length"], c["dtype"]) for r in members]
        if c["algorithm"] == "native" and c["op"] == "avg" and c["dtype"].itemsize == 2:
            continue  # torch's own overflows; that it does is shown below
        check_reduced(ends[0], brought, c["op"])
        outside = [r for r in range(ranks) if r not in members]
        assert all(
            torch.equal(results[r][number], programs.values(c["seed"], r, c["length"], c["dtype"])) for r in outside
        )


#: Larger worlds are in the soak.
WORLDS = [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.soak) for n in (5, 6, 7, 8, 16))]


@pytest.mark.parametrize("ranks", WORLDS)
def test_every_algorithm_op_and_dtype(ranks):
    cases = []
    for number, algorithm in enumerate(ALL_REDUCE if ranks == 4 else ALL_REDUCE[1:]):  # torch's own once is enough
        for op in OPS:
            for dtype in FLOATS + (INTEGERS if op != "avg" else ()):
                length = (0, 1, ranks - 1, ranks + 1, 29)[(number + len(cases)) % 5]
                cases.append(case(algorithm, op, dtype, length, seed=len(cases)))
    check_run(cases if ranks <= 8 else cases[::12], ranks)


@settings(max_examples=10)
@given(st.data())
def test_any_length_world_segments_node_size_and_sub_group(data):
    ranks = data.draw(st.integers(1, 8), "ranks")
    cases = []
    for number in range(6):
        algorithm = data.draw(st.sampled_from(ALL_REDUCE))
        op = data.draw(st.sampled_from(OPS))
        dtype = data.draw(st.sampled_from(FLOATS if op == "avg" else FLOATS + INTEGERS))
        more = {"node_size": data.draw(st.integers(1, 9))}
        if algorithm in ("ring", "hierarchical"):
            more["segments"] = data.draw(st.integers(1, 5))
        if data.draw(st.booleans()):
            members = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
            more["members"] = tuple(sorted(members))
        cases.append(case(algorithm, op, dtype, data.draw(st.integers(0, 70)), number, **more))
    check_run(cases, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 5, *(pytest.param(n, marks=pytest.mark.soak) for n in (4, 6, 7, 8))])
def test_half_precision_average_keeps_the_largest_and_the_smallest(ranks):
    """65504 is fp16's largest number, 2⁻²⁴ its smallest: a sum overflows, a division first gives 0."""
    own = (*(a for a in ALL_REDUCE if a != "native"), None)
    for value in (65504.0, 2.0**-24, -65504.0):
        for results in labkit.run(programs.same_value, value, torch.float16, own, ranks=ranks).values:
            assert all((t.double() == value).all() for t in results)


def test_torchs_own_half_precision_average_overflows():
    """Why `algorithm=None` does not use it for 16-bit floats."""
    (result, *_), *_ = labkit.run(programs.same_value, 40000.0, torch.float16, ("native",), ranks=2).values
    assert result.isinf().all()


@pytest.mark.parametrize(("ranks", "length", "dtype"), [
    (1, 3, torch.float32), (2, 5, torch.int64), (3, 0, torch.float32), (3, 1, torch.uint8), (4, 6, torch.bool),
    (5, 2, torch.int32), (8, 3, torch.int64), (16, 1, torch.int64),
])  # fmt: skip
def test_every_operation_equals_torchs_own(ranks, length, dtype):
    for rank, results in enumerate(labkit.run(programs.every_operation, length, dtype, ranks=ranks).values):
        assert results.keys() == collectives.ALGORITHMS.keys() - {"all_reduce", "barrier"}
        for operation, by_algorithm in results.items():
            for algorithm, result in by_algorithm.items():
                assert torch.equal(result, by_algorithm["native"]), (rank, operation, algorithm)


def test_every_operation_in_a_sub_group_with_a_root_that_is_not_0():
    values = labkit.run(programs.every_operation, 4, torch.int64, [1, 2, 4], ranks=5).values
    assert values[0] == values[3] == {}
    for results in (values[1], values[2], values[4]):
        for operation, by_algorithm in results.items():
            assert all(torch.equal(r, by_algorithm["native"]) for r in by_algorithm.values()), operation


def test_all_to_all_of_uneven_parts():
    for native, mesh in labkit.run(programs.uneven_all_to_all, ranks=4).values:
        assert torch.equal(native, mesh)
        assert native.any()


def test_tensors_with_gaps():
    assert all(all(right) for right in labkit.run(programs.strided, ranks=3).values)
    assert all(all(right) and len(right) > 15 for right in labkit.run(programs.strided_others, ranks=3).values)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_outputs_that_are_parts_of_the_input(ranks):
    assert all(labkit.run(programs.in_the_same_memory, ranks=ranks).values)


@pytest.mark.parametrize("times", [20, pytest.param(80, marks=pytest.mark.soak)])
def test_two_at_once_do_not_mix(times):
    assert labkit.run(programs.overlapping, times, ranks=4).values == [times] * 4
    assert labkit.run(programs.overlapping, 10, "halving_doubling", ranks=3).values == [10] * 3


def test_a_ring_under_way_leaves_other_messages_alone():
    assert all(labkit.run(programs.beside_messages, ranks=3).values)


def test_an_asynchronous_call_takes_labels_along_and_leaves_no_thread():
    run = labkit.run(programs.labelled_async, ranks=3)
    sends = [e for e in run.trace.events if e.kind == "send"]
    assert len(sends) == 12
    assert all(e.labels["bucket"] == 3 and e.labels["step"] for e in sends)
    assert all(e.line.startswith("programs_collectives.py:") for e in sends), "the learner's line, not the thread's"
    first = labkit.run(programs.leaves_no_thread, ranks=3).values
    assert labkit.run(programs.leaves_no_thread, ranks=3).values == first


def test_what_goes_wrong_in_the_thread_comes_out_of_wait():
    assert labkit.run(programs.async_error, ranks=2).values == ["in the thread"] * 2


def test_what_nobody_waited_for_is_told():
    """As torch's own: an error in the thread must not be lost, nor a handle."""
    with pytest.raises(labkit.RankError, match="all_reduce ring failed, and nobody had waited for it"):
        labkit.run(programs.error_nobody_waits_for, ranks=2)
    left = labkit.run(programs.unwaited, ranks=2).leftovers
    assert len([s for s in left if "started all_reduce ring and never waited for it" in s]) == 2


def test_ranks_that_ask_for_different_reductions_get_no_number():
    with pytest.raises(labkit.RunTimeout):
        labkit.run(programs.different_ops, ranks=2, timeout=2)


def test_groups_do_not_wait_for_each_other():
    assert labkit.run(programs.chain_of_groups, ranks=3, timeout=10).values == [4.0, 4.0, 3.0]


def test_two_threads_of_a_rank_take_turns():
    assert labkit.run(programs.two_threads, 20, ranks=3).values == [20] * 3


def test_inference_mode_goes_along_into_the_thread():
    assert labkit.run(programs.in_inference_mode, ranks=2).values == [[2.0] * 3] * 2


def test_an_average_of_large_bfloat16_stays_finite():
    for mean, brought in labkit.run(programs.large_bfloat16, ranks=3).values:
        assert mean == brought


def test_integers_that_gloo_does_not_know():
    assert labkit.run(programs.small_integers, ranks=3).values == [[[3] * 3] * 2] * 3


def test_a_root_whose_tensor_lies_in_another_ranks_part():
    assert labkit.run(programs.aliased_scatter, ranks=3).values == [[0, 1], [2, 3], [4, 5]]


def test_to_wait_again_changes_nothing():
    assert labkit.run(programs.waits_twice, ranks=2).values == [[0.0] * 8] * 2


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(labkit.RunTimeout, match="rank 1"):
        labkit.run(programs.stuck_in_thread, ranks=3, timeout=2)


def test_a_batch_waits_for_every_message():
    assert labkit.run(programs.batch, ranks=4).values == [[r for r in range(4) if r != me] for me in range(4)]


def test_a_leaf_with_a_gradient_is_reduced_outside_of_autograd():
    assert labkit.run(programs.gradient_inside, ranks=2).values == [[2.0] * 6] * 2


def test_what_none_chooses_by_size():
    """On gloo one round of many messages while they are small, a ring where there is much to add up or to cut."""
    small, large = 2**20, 2**26
    assert [choose("reduce_scatter", None, "gloo", nbytes=n) for n in (small, large)] == ["mesh", "ring"]
    assert [choose("all_gather", None, "gloo", nbytes=n) for n in (small, large)] == ["mesh", "mesh"]
    assert choose("all_gather", None, "gloo", nbytes=small, segments=2) == "ring"
    assert choose("all_gather", None, "gloo", nbytes=small, paced=True) == "ring"
    assert choose("reduce_scatter", None, "nccl", nbytes=small) == choose("all_reduce", None, "gloo") == "native"


def test_what_none_chooses():
    """gloo's own all-reduce, but a running mean for fp16; `using` where the operation has it, else as before."""
    run = labkit.run(programs.who_counts, 2.0, ranks=3)
    names = [e.name for e in run.trace.of(0) if e.kind == "collective" or e.kind == "span"]
    assert names == ["all_reduce", "all_reduce ring", "all_reduce tree", "reduce_scatter mesh"]


def test_what_is_refused_says_what_to_do():
    said = labkit.run(programs.refusals, ranks=3).values
    for name in said[0]:
        texts = [s[name] for s in said]
        assert "nothing" not in texts, name
    expected = {
        "op": "'mean'", "avg of integers": "use 'sum' and divide", "algorithm": "'rings'", "no such here": "'tree'",
        "does not divide": "pad it to a multiple of 3", "root": "src=7", "8-bit": "view(torch.uint8)",
        "expanded": ".clone()", "all_to_all": "output_splits", "batch": "at least one",
    }  # fmt: skip
    for name, text in expected.items():
        assert text in said[0][name], said[0][name]
    assert "no member" in said[2]["not a member"]
    assert "[0, 1]" in said[0]["root outside"]


@given(st.lists(st.floats(-60000, 60000, width=16), min_size=2, max_size=16))
def test_a_running_mean_stays_between_the_extremes(brought):
    """However they are combined, a mean of means is a mean: here one after another."""
    reduction, mean = Reduction("avg", torch.float16), torch.tensor([brought[0]], dtype=torch.float16)
    for done, value in enumerate(brought[1:], start=1):
        reduction(mean, torch.tensor([value], dtype=torch.float16), (done, 1))
    assert min(brought) <= mean.item() <= max(brought)


def test_hex_digits_count_contributions():
    """The values of the ring's picture: after step k a chunk on its way holds k + 1 ranks' parts, each once."""
    run = labkit.run(programs.hex_ring, 4, ranks=4)
    assert run.values == [[0x1111] * 4] * 4
    for rank in range(4):
        states = {e.labels["step"]: e.after for e in run.trace.of(rank) if "step" in e.labels}
        for step in (1, 2, 3):
            arrived = states[step][(rank - 1 - step) % 4]
            assert f"{arrived:x}".count("1") == step + 1
            assert set(f"{arrived:x}") <= set("01")
        assert states[6] == [0x1111] * 4


def test_marks():
    weight = torch.nn.Parameter(torch.ones(2))
    assert collectives.placement(weight) == collectives.Placement()
    assert collectives.mark(weight, replicated=(None,), tied="wte") is weight
    assert collectives.placement(weight) == collectives.Placement(replicated=(None,), tied="wte")
    with pytest.raises(TypeError, match="tuple"):
        collectives.mark(weight, sharded=None)
    with pytest.raises(TypeError, match="process groups"):
        collectives.mark(weight, sharded=("tp",))
    with pytest.raises(ValueError, match="either shards or replicates"):
        collectives.mark(weight, sharded=(None,), replicated=(None,))
    with pytest.raises(TypeError, match="parameter"):
        collectives.mark("weight")
