"""Data parallelism against one process with the whole batch in float64, and against torch's own."""

from __future__ import annotations

import programs_data_parallel as programs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timing import on_a_busy_host, on_the_clock

import labkit
from labkit.data_parallel import assign
from labkit.model import Transformer, preset
from labkit.pace import Link, Pace

TINY = 1e-6  # a bucket a parameter


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("name", "changes", "cap", "options", "micro_steps"),
    [
        ("tiny_gpt", {}, 0.01, {}, 1),
        ("tiny_llama", {"tied": True}, 0.01, {"find_unused_parameters": True}, 3),
        ("tiny_gpt", {"tied": False}, TINY, {"overlap": False}, 2),
        ("tiny_llama", {}, 25, {}, 2),
    ],
    ids=["gpt", "llama-tied-unused-accumulated", "gpt-untied-no-overlap", "llama-one-bucket"],
)
def test_gradients_are_those_of_one_process(ranks, name, changes, cap, options, micro_steps):
    run = labkit.run(programs.against_one_process, name, changes, cap, options, micro_steps, ranks=ranks)
    assert max(run.values) <= 1e-12
    assert not run.leftovers


@pytest.mark.parametrize("cap_mb", [0.05, 1, 25])
def test_buckets_are_filled_as_torch_fills_them(cap_mb):
    """GPT-2 small, 148 tensors: at 25 MiB, the first at 1, 13 all-reduces, the last of 168 MiB; torch is the oracle."""
    params = list(reversed(list(Transformer(preset("gpt2_small"), device="meta").parameters())))
    sizes, cap = [p.nbytes for p in params], int(cap_mb * 2**20)
    of_torch = torch.distributed._compute_bucket_assignment_by_size
    assert [list(b) for b in of_torch(params, [cap])[0]] == assign(sizes, cap)
    mine = assign(sizes, cap, first=min(cap, 2**20))
    assert [list(b) for b in of_torch(params, [min(cap, 2**20), cap])[0]] == mine
    assert len(params) == 148
    if cap_mb == 25:
        assert len(mine) == 13
        assert round(sum(params[i].nbytes for i in mine[-1]) / 2**20) == 168


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from("ab"))), st.integers(1, 150))
def test_every_tensor_is_in_one_bucket(tensors, cap):
    sizes, kinds = [t[0] for t in tensors], [t[1] for t in tensors]
    buckets = assign(sizes, cap, kinds)
    assert sorted(i for b in buckets for i in b) == list(range(len(sizes)))
    for bucket in buckets:
        assert len({kinds[i] for i in bucket}) == 1
        assert bucket == sorted(bucket)
        assert sum(sizes[i] for i in bucket[:-1]) < cap
    for kind in "ab":  # only the last bucket of a kind may hold less
        full = [sum(sizes[i] for i in b) >= cap for b in buckets if kinds[b[0]] == kind]
        assert all(full[:-1])


def test_no_sync_is_decided_by_the_forward():
    """Fault 1: with no_sync round backward alone, every micro-step averages; the gradients are the same either way."""
    found = {}
    for where in ("both", "forward", "backward"):
        run = labkit.run(programs.syncs, where, ranks=2)
        reduced = [e for e in run.trace.of(0) if e.kind == "collective" and "bucket" in e.labels]
        found[where] = (len(reduced), run.values[0])
    assert [found[where][0] for where in ("both", "forward", "backward")] == [1, 1, 3]
    for where in ("forward", "backward"):
        for a, b in zip(found[where][1], found["both"][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_ranks_in_different_branches():
    """Faults 4 and 5: an error that names the parameter, or zeros where asked; what nobody used keeps no gradient."""
    run = labkit.run(programs.branches, ["a", "b", "ab"], True, 3, ranks=3)
    for values in run.values:
        for name, (have, want) in values.items():
            assert (have is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-15)
        assert values["never.weight"][0] is None
    with pytest.raises(labkit.RankError, match=r"no gradient for never.weight, never.bias, [ab].weight and 1 more"):
        labkit.run(programs.branches, ["a", "b"], False, ranks=2)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("shape", r"rank 0 of the group has 0.weight \(4, 4\) float32, rank 1 has 0.weight \(5, 4\)"),
        ("dtype", r"1.weight \(2, 4\) float32, rank 1 has 1.weight \(2, 4\) bfloat16"),
        ("more", r"rank 1 of the group has 2.weight, rank 0 has not"),
        ("frozen", r"rank 1 has 0.bias \(4,\) float32, not trained"),
    ],
)
def test_modules_that_differ_are_refused_at_once(kind, told):
    with pytest.raises(labkit.RankError, match=told):
        labkit.run(programs.differing_modules, kind, ranks=2)


@pytest.mark.parametrize(
    ("kind", "named"),
    [("parameter", "0.weight"), ("module", "1.weight"), ("dtype", "0.weight"), ("frozen", "0.bias"), ("none", "")],
)
def test_a_change_after_wrapping_is_found(kind, named):
    """Fault 2: torch never averages the gradient of a parameter that was put in later, and says nothing."""
    told = labkit.run(programs.changed_after_wrapping, kind, ranks=2).values
    assert all(t.startswith(f"{named} was replaced") if named else t == "" for t in told)


def test_uneven_batches_stop_together_or_join():
    """Fault 7: 5 batches on rank 0, 4 on rank 1, none on rank 2."""
    run = labkit.run(programs.batches_of, [5, 4], "stop", ranks=2)
    assert [count for count, _ in run.values] == [4, 4]
    run = labkit.run(programs.batches_of, [5, 4, 0], "join", ranks=3)
    assert [count for count, _ in run.values] == [5, 4, 0]
    for _, weights in run.values[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, run.values[0][1], strict=True))


def test_join_divides_by_all_ranks():
    """Against one process that adds the gradients of those who have a batch and divides by three."""
    weights = labkit.run(programs.batches_of, [5, 4, 0], "join", ranks=3).values[0][1]
    reference = labkit.run(reference_join, ranks=1).values[0]
    for have, want in zip(weights, reference, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=0)


def reference_join():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)).double()
    for number in range(5):
        net.zero_grad()
        here = sum(number < count for count in (5, 4, 0))
        (net(torch.full((1, 3), number + 1.0, dtype=torch.float64)).sum() * here / 3).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.01 * p.grad
    return [p.detach() for p in net.parameters()]


def test_mean_over_tokens():
    """Faults 9 to 11: 4.0 on 3 tokens, 1.0 on 8; a rank without tokens brings 0 and no NaN."""
    by_ranks, by_tokens, mean = labkit.run(programs.token_means, [3, 8], [4.0, 1.0], ranks=2).values[1]
    assert (by_ranks, by_tokens) == (2.5, pytest.approx(20 / 11, rel=1e-15))
    assert mean == pytest.approx(20 / 11, rel=1e-15)
    _, by_tokens, mean = labkit.run(programs.token_means, [0, 8], [4.0, 1.0], ranks=2).values[0]
    assert (by_tokens, mean) == (1.0, 1.0)
    _, by_tokens, mean = labkit.run(programs.token_means, [0, 0], [4.0, 1.0], ranks=2).values[0]
    assert (by_tokens, mean) == (0.0, 0.0)


def test_averages_of_16_bits_do_not_overflow():
    """Fault 16: the sum of 2 × 40000 is above the largest fp16."""
    assert labkit.run(programs.half_average, 40000.0, torch.float16, ranks=2).values == [40000.0] * 2
    assert labkit.run(programs.half_average, 2.0**-24, torch.float16, ranks=4).values == [2.0**-24] * 4


def test_a_hook_that_compresses():
    far = labkit.run(programs.compressed, ranks=2)
    assert 1e-4 < max(far.values) < 2**-7
    sizes = [e.nbytes for e in far.trace.of(0) if e.name == "all_reduce ring" and "bucket" in e.labels]
    assert sizes == [2 * (64 * 64 + 64)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("cap", [TINY, 0.005, 25])
def test_bytes_and_messages_of_a_step(ranks, cap):
    run = labkit.run(programs.one_step, cap, "ring", ranks=ranks)
    buckets = run.values[0]
    for rank in range(ranks):
        sends = [e for e in run.trace.of(rank) if e.kind == "send" and e.labels.get("training_step") == 2]
        assert {e.labels["bucket"] for e in sends} == set(range(len(buckets)))
        assert len(sends) == 2 * (ranks - 1) * len(buckets)
        for number, nbytes in enumerate(buckets):  # fp32 elements; where they do not divide, chunks differ by one
            sent = sum(e.nbytes for e in sends if e.labels["bucket"] == number)
            chunks = [4 * len(c) for c in torch.arange(nbytes // 4).tensor_split(ranks)]
            assert sent == 2 * nbytes - chunks[rank] - chunks[(rank + 1) % ranks]


def test_naive_and_bucketed_all_reduces():
    naive = labkit.run(programs.one_step, 25, "native", "tiny_gpt", True, ranks=2)
    assert len([e for e in naive.trace.of(0) if e.kind == "collective" and e.labels.get("training_step") == 2]) == 28
    ours = labkit.run(programs.one_step, 25, "native", ranks=2)
    assert len([e for e in ours.trace.of(0) if e.kind == "collective" and e.labels.get("training_step") == 2]) == 1


@on_a_busy_host
@pytest.mark.alone
@pytest.mark.parametrize(
    ("buckets", "overlap", "whole"),
    [
        (10, True, 43.5),
        (10, False, 75),
        *(pytest.param(*row, marks=pytest.mark.soak) for row in ((1, True, 70.5), (148, True, 104))),  # in 03 as well
    ],
)
def test_paced_backward(buckets, overlap, whole):
    """Backward 40, reduce 30, 0.5 a bucket; stretched so that two cores can move 150 buckets in time."""
    count, alpha = (150, 0.0005 * 148 / 150) if buckets == 148 else (buckets, 0.0005)
    expected = whole + (40 / 150 if buckets == 148 else 0)  # the first layer's gradient starts it
    for stretch in (20.0, 40.0, 80.0):
        found, took, exposed = paced(count, alpha, overlap, stretch)
        assert found == count
        if took == pytest.approx(expected, rel=0.03) and exposed == pytest.approx(expected - 40, rel=0.03):
            break
    with on_the_clock():
        assert took == pytest.approx(expected, rel=0.03)
        assert exposed == pytest.approx(expected - 40, rel=0.03)


def paced(count: int, alpha: float, overlap: bool, stretch: float) -> tuple[int, float, float]:
    """Buckets; milliseconds of a backward, and of it after its last section, as if nothing had been stretched."""
    pace = Pace(
        compute={"layer": stretch * 0.040 / 150, "forward": 0.2, "set-up": 0.5},
        link=Link(stretch * alpha / 2, 150 * 16 * 16 * 4 / (stretch * 0.030)),
    )
    run = labkit.run(programs.paced_backward, count, stretch, overlap, ranks=2, pace=pace)
    found, start, end = run.values[0]
    events = run.trace.of(0)  # by one clock: `elapsed` has another zero
    backward_ends = max(e.end for e in events if e.kind == "compute" and e.phase == "backward")
    reduced = max(e.end for e in events if "bucket" in e.labels)
    return found, 1e3 * (end - start), 1e3 * (reduced - backward_ends) / stretch


def test_buckets_are_refilled_in_order_of_arrival():
    before, after = labkit.run(programs.order_of_arrival, ranks=2).values[1]
    assert [i for b in before for i in b] == [3, 2, 1, 0]
    assert sorted(i for b in after[:2] for i in b) == [0, 1]  # "last" is used last, so its gradient comes first


def test_buffers_follow_rank_0():
    means = labkit.run(programs.buffers, ranks=2).values
    assert means[0] == means[1]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("twice", "wrapped already"),
        ("sparse", "sparse=False"),
        ("graph", "create_graph"),
        ("hook", "expected a function"),
    ],
)
def test_what_cannot_work_is_refused(kind, told):
    assert all(told in said for said in labkit.run(programs.refused, kind, ranks=2).values)


def test_arguments():
    for wrong, error in (
        ({"module": 3}, TypeError),
        ({"module": torch.nn.ReLU()}, ValueError),
        ({"module": torch.nn.Linear(1, 1), "bucket_cap_mb": 0}, ValueError),
        ({"module": torch.nn.Linear(1, 1), "bucket_cap_mb": "25"}, TypeError),
        ({"module": torch.nn.Linear(1, 1, device="meta")}, ValueError),
    ):
        with pytest.raises(labkit.RankError, match=error.__name__):
            labkit.run(lambda wrong=wrong: labkit.data_parallel.DistributedDataParallel(**wrong), ranks=1)
    with pytest.raises(ValueError, match="positive"):
        assign([1], 0)


def test_seeds_differ_between_ranks_and_weights_do_not():
    (w0, d0), (w1, d1) = labkit.run(programs.seeds, ranks=2).values
    assert w0 == w1
    assert d0 != d1


def test_used_twice_and_checkpointed():
    assert max(labkit.run(programs.checkpointed, ranks=2).values) <= 1e-12


def test_gradients_lie_as_their_parameters_do():
    assert max(labkit.run(programs.fused_channels_last, ranks=2).values) <= 1e-6


def test_a_backward_that_was_cut_short_does_not_reach_the_next():
    assert max(labkit.run(programs.after_an_error, ranks=2).values) <= 1e-12


def test_a_backward_belongs_to_its_forward():
    assert labkit.run(programs.forwards_in_between, ranks=2).values == [(True, False)] * 2


def test_an_unused_gradient_that_was_replaced_is_averaged():
    assert labkit.run(programs.clipped_by_assignment, ranks=2).values == [True] * 2


def test_ordinary_code_works():
    assert labkit.run(programs.ordinary_code, ranks=2).values == [[]] * 2
