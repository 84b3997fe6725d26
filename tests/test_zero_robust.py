"""ZeRO in use: what is refused, what goes on, what is mended by itself; bytes held beside `theory.zero.held`."""

from __future__ import annotations

import math

import programs_fully_sharded
import programs_zero_robust as programs
import pytest

import labkit
from labkit.theory import zero

TINY = 1e-6


REFUSED = {
    "stage": "stage=True: expected 1 or 2",
    "overlap": "overlap=True with stage=1",
    "unused": "find_unused_parameters is 'no'",
    "mixture": "parameters beside dictionaries",
    "number": "a group's 'params' is int",
    "names": "two parameters have the name 'w'",
    "no name": "1 is no name",
    "lazy": "weight has no shape yet",
    "pieces": "sharded over this group already",
    "grad_dtype": "grad_dtype is torch.float8_e4m3fn",
    "torch's state": "ValueError: the state has no",
    "no state": "TypeError: the state is NoneType",
    "hook": "hook is 3",
    "other cap": "bucket_cap_mb is 1 on rank 0 of the group, 25 on rank 1",
    "other class": "optimizer_class is AdamW on rank 0 of the group, Adam on rank 1",
    "other rate": "defaults is {'lr': 0.1} on rank 0",
    "blocks": "blocks is Linear: expected modules in a list",
    "keep": "keep_after_forward is 'yes'",
    "param_dtype": "param_dtype is torch.float8_e4m3fn",
    "init": "init= is for a module on the meta device",
    "lazy module": "weight has no shape yet",
    "complex": "weight is torch.complex64",
    "one memory": "are two parameters in one memory",
    "other prefetch": "prefetch is 0 on rank 0 of the group, 1 on rank 1",
    "other blocks": "blocks is ['', '0'] on rank 0 of the group, ['', '1'] on rank 1",
}


def test_refused_at_the_call():
    """On every rank, also what only one of them got: none waits for what the others never send."""
    for told in labkit.run(programs.every, programs.refused, list(REFUSED), ranks=2).values:
        assert not {kind: said for kind, said in told.items() if REFUSED[kind] not in said}


LATER = {
    "copy": "a ShardedOptimizer cannot be copied",
    "torch's scaler": "use labkit.tricks.GradScaler",
    "another layer": "1.weight was put into the module since the optimizer was made",
    "wrapped": "so does this optimizer",
    "stage 3 copy": "cannot be copied or pickled",
    "stage 3 copy of a part": "a copy of a part of a sharded one",
    "stage 3 added": "3.weight was put into the module since that was sharded",
    "stage 3 of gradients": "create_graph=True",
}


def test_refused_later():
    for told in labkit.run(programs.every, programs.later, list(LATER), ranks=2).values:
        assert not {kind: said for kind, said in told.items() if LATER[kind] not in said}


@pytest.mark.parametrize("kind", [1, 2, "distributed"])
def test_what_is_written_into_16_bit_parameters_reaches_their_masters(kind):
    for off in labkit.run(programs.edits_reach_masters, kind, ranks=2).values:
        assert off
        assert not any(off)


def test_buffers_are_those_of_rank_0_at_stage_3():
    assert labkit.run(programs.buffers_of_rank_0, ranks=2).values == [[0.0, 0.0]] * 2


def test_blocks_may_come_one_by_one():
    assert labkit.run(programs.units_of_a_generator, ranks=1).values == [4]


@pytest.mark.parametrize("kind", [1, 2, "distributed", 3])
def test_an_inf_on_one_rank_is_skipped_by_all(kind):
    assert labkit.run(programs.inf_on_one_rank, kind, ranks=2).values == [[1024.0, 512.0, 512.0, 512.0]] * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_bucket_is_reduced_beside_the_next_layers_backward(overlap):
    """Rank 1 is late, so that rank 0's first reduce-scatter cannot end before the next layer's backward has begun."""
    run = labkit.run(programs.overlapped, overlap, ranks=2)
    assert max(run.values) <= 1e-15
    events = [e for e in run.trace.of(0) if e.kind == "span"]
    scatters = [e for e in events if e.name.startswith("reduce_scatter")]
    assert [e.labels["bucket"] for e in scatters] == [0, 1, 2] * 2
    middle = next(e for e in events if e.name == "middle layer")
    first, second, third = scatters[:3]
    assert first.start <= middle.start
    assert (first.end > middle.end) == overlap
    assert first.end <= second.start <= second.end <= third.start


@pytest.mark.parametrize(("what", "told", "also"), [
    ("a file", "NotADirectoryError", "OSError: rank 0 of the group"),
    ("one rank", "ValueError: step=-1", "RuntimeError: rank 0 of the group could not go on: ValueError: step=-1"),
    ("no module", "TypeError: module is NoneType", "TypeError: module is NoneType"),
    ("no optimizer", "TypeError: optimizer is", "TypeError: optimizer is"),
    ("extra", "TypeError: extra cannot be pickled", "TypeError: extra cannot be pickled"),
    ("load on one", "FileNotFoundError", "FileNotFoundError"),
    ("another class", "the save's optimizer has", "the save's optimizer has"),
])  # fmt: skip
def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path, what, told, also):
    (tmp_path / "file").write_text("")
    first, second = labkit.run(programs.failing_save, str(tmp_path), what, ranks=2).values
    assert told in first
    assert also in second


SIZES = [7 * 29, 7, 11 * 7, 11, 13 * 11]  # of `programs_zero.Odd`, the last parameter first


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cap", [TINY, 25])
@pytest.mark.parametrize(("stage", "micro_steps"), [(1, 1), (2, 1), (2, 2)])
def test_bytes_held_are_those_of_theory(stage, micro_steps, cap, ranks):
    """Live and at the worst moment, to the byte; theory's states have the padding that the last rank's have not."""
    buckets = SIZES if cap == TINY else [sum(SIZES)]
    run = labkit.run(programs.stage_bytes, stage, cap, micro_steps, ranks=ranks)
    for rank, (live, worst, pieces) in enumerate(run.values):
        want = zero.held(buckets, stage, ranks, tensors=pieces, accumulated=micro_steps > 1)
        real = sum(max(0, min(size - rank * math.ceil(size / ranks), math.ceil(size / ranks))) for size in buckets)
        unpadded = 8 * (sum(math.ceil(size / ranks) for size in buckets) - real)
        for now, expected in ((live, want.live), (worst, want.worst)):
            assert now["parameters"] == expected["parameters"] + expected["padding"]
            assert now["optimizer"] == expected["optimizer"] - unpadded
            assert now["steps"] == expected["steps"]
            named = ("gradients", "bucket", "reduced shard")
            assert now["gradients"] == sum(expected.get(name, 0) for name in named)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_held_at_stage_3_are_those_of_theory(ranks, prefetch):
    h, layers = 18, 4
    want = zero.held([h * h] * layers, 3, ranks, prefetch=prefetch, largest=h * h)
    run = labkit.run(programs_fully_sharded.chain_under_a_meter, layers, h, {"prefetch": prefetch}, ranks=ranks)
    for peak, after in run.values:
        assert after["parameters"] == peak["parameters"] == want.live["parameters"]
        assert after["gradients"] == want.live["gradients"]
        assert peak["buffers"] == want.worst["gathered units"]
        named = ("gradients", "full gradients", "reduced shard")
        assert peak["gradients"] == sum(want.worst.get(name, 0) for name in named)
        assert peak["other"] == want.worst["arriving gradient"] + 4 + 4 * h * prefetch  # a loss's, and an activation's
