"""ZeRO on paper: volumes against plans of rings, bytes as counted by hand, times against a clock that ticks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.theory import zero
from labkit.theory.communication import plan
from labkit.theory.memory import model_states
from labkit.theory.zero import Unit, held, padding, passes, sent, step_time

GB = 10**9
UNITS = st.lists(st.integers(0, 300), min_size=1, max_size=6)
RANKS = st.integers(1, 6)

# Volume


def test_published_volumes():
    """ZeRO's section 7: 2Ψ, 2Ψ, 2Ψ, 3Ψ; chapter 07: at eight micro-batches 2, 9 and 24."""
    assert [passes(stage).total for stage in range(4)] == [2, 2, 2, 3]
    assert [passes(stage, 8).total for stage in range(4)] == [2, 2, 9, 24]
    assert [passes(2, k).total for k in (1, 2, 5)] == [2, 3, 6]
    assert passes(3, keep_after_forward=True).total == 2
    assert passes(3).total / passes(1).total == 1.5  # the third pays for the second gather


def test_the_gpt_of_facts_on_64():
    """7.5B in 16-bit: 2·Ψ·2 bytes a step, ×63/64, and 45 instead of 30 GB at stage 3."""
    volumes = [sent(7_500_000_000, stage, 64, parameter_bytes=2, gradient_bytes=2).total for stage in range(4)]
    assert volumes == [29_531_250_000] * 3 + [44_296_875_000]


@settings(max_examples=60)
@given(UNITS, RANKS, st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 4, 8]), st.booleans())
def test_bytes_are_those_of_the_rings_messages(units, ranks, stage, k, width, keep):
    """Every operation of the step as a plan of messages, on every rank."""
    keep = keep and stage == 3
    cut = [math.ceil(n / ranks) * ranks for n in units]
    gathers = {1: 1, 2: 1, 3: k if keep else 2 * k}[stage]
    reductions = {1: 1, 2: k, 3: k}[stage]
    for rank in range(ranks):
        gathered = sum(plan("all_gather", "ring", ranks, n, width).sent(rank) for n in cut)
        reduced = sum(plan("reduce_scatter", "ring", ranks, n, 4).sent(rank) for n in cut)
        terms = sent(units, stage, ranks, k, parameter_bytes=width, keep_after_forward=keep, rank=rank)
        assert terms.with_name("reduce").total == reductions * reduced
        assert terms.with_name("gather").total == gathers * gathered
        assert terms.total * ranks == (ranks - 1) * (sum(units) + padding(units, ranks)) * (
            width * gathers + 4 * reductions
        )


@settings(max_examples=40)
@given(UNITS, RANKS)
def test_plain_data_parallelism_sends_what_tensor_split_cuts(units, ranks):
    """Not padded: rank r keeps chunk r back in the first half and chunk r+1 in the second."""
    for rank in range(ranks):
        size = lambda n, chunk: n // ranks + (chunk < n % ranks)  # noqa: E731
        expected = sum(2 * n - size(n, rank) - size(n, (rank + 1) % ranks) for n in units) if ranks > 1 else 0
        assert sent(units, 0, ranks, 5, gradient_bytes=2, rank=rank).total == 2 * expected


def test_padding_is_what_ten_in_four_need():
    assert padding(10, 4) == 2
    assert padding([10, 7, 8], 4) == 3
    assert sent(10, 2, 4).total == 2 * 9 * 4  # 12 elements, 3 of 4 parts
    assert sent([10, 7, 8], 3, 1).total == padding([10, 7, 8], 1) == 0


# Bytes


def test_table_1_of_zero_is_what_lives():
    """7.5B on 64: 120, 31.4, 16.6, 1.88 GB, and no buffer is in it."""
    lives = [held(7_500_000_000, stage, 64, "bf16_mixed").live.total / GB for stage in range(4)]
    assert lives == pytest.approx([120, 31.40625, 16.640625, 1.875])


@pytest.mark.parametrize("d", [1, 2, 8, 64])
def test_megatrons_distributed_optimizer(d):
    """18 → 6 + 12/d, 20 → 4 + 16/d, 16 → 8 + 8/d bytes a parameter."""
    for name, whole, cut in (("bf16_fp32_gradients", 6, 12), ("fp16_megatron", 4, 16), ("fp32", 8, 8)):
        assert held(64_000, 1, d, name).live.total == 64_000 * whole + 64_000 // d * cut
        assert held(64_000, 0, d, name).live.total == 64_000 * (whole + cut)


def test_every_cause_of_uneven_buckets_by_hand():
    """Buckets of 25 and 5 on 4 ranks: padded 28 and 8, shards 7 and 2. fp32, the last gradient of a bucket has 3."""
    two = held([25, 5], 2, 4, tensors=3, largest=3)
    assert two.live == {"parameters": 120, "gradients": 36, "master": 0, "optimizer": 72, "steps": 12, "padding": 24}
    assert two.worst == {**two.live, "gradients": 0, "bucket": 28 * 4, "reduced shard": 7 * 4}
    again = held([25, 5], 2, 4, tensors=3, largest=8, accumulated=True)
    assert again.worst == {**two.live, "gradients": 36, "bucket": 28 * 4, "arriving gradient": 8 * 4}
    one = held([5, 25], 1, 4, tensors=3)
    assert one.live["gradients"] == 120  # all of them, until backward has ended
    assert one.worst == {**one.live, "gradients": (2 + 25) * 4, "bucket": 28 * 4}


def test_every_cause_of_uneven_units_by_hand():
    """Units of 10, 6 and 9 and a root of 5 on 4 ranks: padded 12, 8, 12 and 8; shards 3, 2, 3 and 2."""
    units = [10, 6, 9]
    plain = held(units, 3, 4, "bf16_mixed", root=5, tensors=4, largest=4)
    assert plain.live == {"parameters": 20, "gradients": 20, "master": 40, "optimizer": 80, "steps": 16}
    assert plain.worst == {  # the first unit's backward: the other two are reduced
        **plain.live, "gradients": 5 * 2, "gathered units": (8 + 12) * 2, "full gradients": (8 + 12) * 2,
        "arriving gradient": 8,
    }  # fmt: skip
    both = held(units, 3, 4, root=5, prefetch=1, gathered_bytes=2, accumulated=True)
    assert both.worst == {  # the middle one's: the first is there, and the last one's gradients are on their way
        **both.live, "gradients": 40, "gathered units": (8 + 12 + 8) * 2, "full gradients": (8 + 8 + 12) * 2,
        "reduced shard": 3 * 2,
    }  # fmt: skip
    assert both.peak == 10 * 16 + 56 + 56 + 6


def test_neighbours_are_gathered_not_the_largest_two():
    worst = held([8, 4, 4, 8], 3, 4, prefetch=1).worst
    assert worst["gathered units"] + worst["full gradients"] == 20 * 4
    assert held([8], 3, 4, prefetch=1).worst["gathered units"] == 8 * 4


@settings(max_examples=60)
@given(UNITS, st.integers(2, 6), st.sampled_from(["fp32", "bf16_mixed", "bf16_fp32_gradients"]))
def test_what_lives_are_the_states_and_padding_is_named(units, ranks, name):
    for stage in range(4):
        made = held(units, stage, ranks, name)
        states = model_states(units, name, stage, ranks)
        assert made.live.without_name("padding") == states
        wide = 4 if name == "fp32" else 2
        assert made.live.get("padding", 0) == (padding(units, ranks) * wide if stage in (1, 2) else 0)
        assert made.peak == sum(made.worst.values())
        assert held(units, stage, 1, name).worst.without_name("padding") == model_states(units, name)
        if stage in (2, 3):  # an earlier micro-batch, a gradient that arrives, a prefetched unit only add
            more = held(
                units, stage, ranks, name, accumulated=True, largest=3, **({"prefetch": 1} if stage == 3 else {})
            )
            assert more.peak >= made.peak


def test_a_large_layer_lifts_stage_2_above_stage_3():
    """Fault 42: a bucket is never smaller than its largest parameter, and stage 2 holds all parameters besides."""
    small, large = held([100] * 9, 2, 4), held([100] * 8 + [1000], 2, 4)
    assert large.worst["bucket"] - small.worst["bucket"] == 900 * 4
    assert held([1000], 2, 4).peak > held([1000], 1, 4).live.total  # one bucket: nothing is saved at the worst moment


# Time


def program_of(forward, backward, prefetch, keep, rooted):
    """What a rank asks for, waits for and computes; with `rooted` the first unit is a root around the others."""
    units, program = list(range(len(forward))), []
    for u in units:
        ahead = units[u : u + 1 + prefetch]
        program += [("ask", u), ("here", u), *(("ask", a) for a in ahead)]
        program += [] if rooted and u == 0 else [("work", forward[u])]
    program += [("work", forward[0])] if rooted else []
    program += [] if keep else [("forget", u) for u in units]
    back = [0, *units[:0:-1]] if rooted else units[::-1]
    before = None
    for n, u in enumerate(back):
        program += [("ask", u), ("here", u), *(("ask", a) for a in back[n : n + 1 + prefetch]), ("work", backward[u])]
        if not (rooted and u == 0):
            program += [("reduced", before), ("reduce", u), *([] if prefetch else [("reduced", u)])]
            before = u
    return program + ([("reduced", before), ("reduce", 0)] if rooted else [])


def ticking(gather, forward, backward, reduce, prefetch, keep, rooted):
    """The end of a step by a clock that ticks: a program of things to wait for, and a link with a queue."""
    program = program_of(forward, backward, prefetch, keep, rooted)
    asked, here, reduced, queue, tick, place, left = set(), set(), {None}, [], 0, 0, None
    while place < len(program) or queue:
        while queue and queue[0][2] == 0:
            (here if queue[0][0] == "gather" else reduced).add(queue.pop(0)[1])
        kind, what = program[place] if place < len(program) else (None, None)
        done = True
        if kind == "work":
            left = what if left is None else left
            done = left == 0
        elif kind in ("here", "reduced"):
            done = what in (here if kind == "here" else reduced)
        elif kind == "ask" and what not in asked:
            asked.add(what)
            queue.append(["gather", what, gather[what]])
        elif kind == "reduce":
            queue.append(["reduce", what, reduce[what]])
        elif kind == "forget":
            asked.discard(what)
            here.discard(what)
        if kind is not None and done:
            place, left = place + 1, None
            continue
        if queue and queue[0][2] == 0:
            continue
        if kind is None and not queue:
            break
        tick += 1
        left = None if left is None else left - 1
        if queue:
            queue[0][2] -= 1
    return tick


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 3), st.booleans(), st.booleans())
def test_a_step_ends_when_a_ticking_clock_says(data, count, prefetch, keep, rooted):
    rooted = rooted and count > 1
    rows = [data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)) for _ in range(4)]
    gather, forward, backward, reduce = rows
    units = [Unit(*row) for row in zip(gather, forward, backward, reduce, strict=True)]
    # two ranks send half of a unit: with 2 seconds a byte a gather takes as long as it has bytes
    root = units.pop(0) if rooted else None
    step = step_time(units, 2, alpha=0, beta=2, root=root, prefetch=prefetch, keep_after_forward=keep)
    assert step.makespan == ticking(*rows, prefetch, keep, rooted)
    assert step.computing == sum(forward) + sum(backward)
    assert step.exposed == step.makespan - step.computing >= 0


def test_like_units_in_closed_form():
    """L = 8 on 4 ranks; a gather takes 3 hops of α + βn/4."""
    forward, backward, count = 5.0, 10.0, 8
    for hop in (0.5, 1.0):  # gathers of 1.5 and 3 s, shorter than the computation
        g = 3 * hop
        units = [Unit(4.0, forward, backward)] * count
        slow, fast = (step_time(units, 4, alpha=hop / 2, beta=hop / 2, prefetch=n) for n in (0, 1))
        assert slow.exposed == pytest.approx(3 * count * g)  # every gather and every reduce-scatter shows
        assert fast.exposed == pytest.approx(3 * g)  # the first of each pass, and the last reduce-scatter
        kept = step_time(units, 4, hop / 2, hop / 2, keep_after_forward=True)
        assert kept.exposed == pytest.approx(2 * g)
    slow_link = step_time([Unit(4.0, 1.0, 1.0)] * count, 4, alpha=0.5, beta=0.5)  # 3 s: the link never rests
    assert slow_link.makespan == pytest.approx(count * 3 + 1 + 2 * count * 3)


def test_the_order_of_what_is_asked_for():
    step = step_time([Unit(4, 5, 10)] * 3, 4, alpha=0.5, beta=0.5)
    comm = [(e.name, e.unit, e.phase) for e in step.events if e.lane == "comm"]
    assert comm == [
        ("gather", 0, "forward"), ("gather", 1, "forward"), ("gather", 2, "forward"),
        ("gather", 2, "backward"), ("gather", 1, "backward"), ("reduce_scatter", 2, "backward"),
        ("gather", 0, "backward"), ("reduce_scatter", 1, "backward"), ("reduce_scatter", 0, "backward"),
    ]  # fmt: skip
    for lane in ("compute", "comm"):
        row = [e for e in step.events if e.lane == lane]
        assert all(one.end <= other.start for one, other in pairwise(row))
    assert step.events[-1].end == step.makespan


def test_one_rank_waits_for_nothing():
    assert step_time([Unit(4e6, 1, 2)] * 3, 1, alpha=1, beta=1).exposed == 0


# What is refused


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: passes(4), ValueError, "stage is 4: ZeRO has 1, 2 and 3"),
        (lambda: passes(True), TypeError, "stage is True"),
        (lambda: passes(2, 0), ValueError, "micro_batches is 0: expected 1 or more"),
        (lambda: passes(2, keep_after_forward=True), ValueError, "stage is 2, which always keeps"),
        (lambda: sent(10.5, 1, 2), TypeError, "parameters of a unit is 10.5"),
        (lambda: sent([4, -1], 1, 2), ValueError, "parameters of a unit is -1"),
        (lambda: sent("12", 1, 2), TypeError, "a unit is '1'"),
        (lambda: sent(10, 1, 2, gradient_bytes=0), ValueError, "gradient_bytes is 0"),
        (lambda: sent(10, 0, 2, rank=2), ValueError, "rank is 2, but there are 2 ranks"),
        (lambda: padding(10, 0), ValueError, "ranks is 0"),
        (lambda: held(10, 2, 2, root=3), ValueError, "root is 3, but stage 2 gathers no units"),
        (lambda: held(10, 1, 2, prefetch=1), ValueError, "prefetch is 1, but stage 1 gathers no units"),
        (lambda: held(10, 3, 2, "fp8"), ValueError, "precision"),
        (lambda: held(10, 3, 2, largest=-1), ValueError, "largest is -1"),
        (lambda: held(10, 3, 2, gathered_bytes=0), ValueError, "gathered_bytes is 0"),
        (lambda: Unit(-1, 1, 1), ValueError, "nbytes is -1"),
        (lambda: Unit(1, 1, math.nan), ValueError, "backward is nan"),
        (lambda: Unit(1, 1, 1, gradient_bytes="4"), TypeError, "gradient_bytes is '4'"),
        (lambda: step_time([], 2, 0, 0), ValueError, "there are no units"),
        (lambda: step_time([3], 2, 0, 0), TypeError, "a unit is 3"),
        (lambda: step_time([Unit(1, 1, 1)], 2, 0, 0, root=3), TypeError, "a unit is 3"),
        (lambda: step_time([Unit(1, 1, 1)], 2, 0, 0, prefetch=-1), ValueError, "prefetch is -1"),
        (lambda: step_time([Unit(1, 1, 1)], 2, -1, 0), ValueError, "alpha"),
    ],
)
def test_bad_input_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_public_names():
    assert all(hasattr(zero, name) for name in zero.__all__)
