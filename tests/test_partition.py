"""Layers to stages: none dropped, as even as can be, optimal against all cuts tried."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.pipeline import one_f_one_b, partition, simulate


def sizes(parts: list[range]) -> list[int]:
    return [len(part) for part in parts]


def test_layers_that_do_not_divide():
    """NVIDIA/Megatron-LM#1304: 30 layers on 4 stages; 10 on 3."""
    assert sizes(partition([1] * 30, 4)) == [8, 8, 7, 7]
    assert sizes(partition([1] * 10, 3)) == [4, 3, 3]
    assert sizes(partition([0.1] * 30, 4)) == [8, 8, 7, 7], "ten times 0.1 is not 1, but ties are ties"


def test_embedding_and_head_are_counted():
    """A head as dear as two layers takes two layers from the last stage."""
    assert sizes(partition([1] * 18 + [2], 4)) == [5, 5, 5, 4]
    assert sizes(partition([5] + [1] * 10, 3)) == [1, 5, 5]


def test_a_device_at_half_speed_gets_half_the_layers():
    parts = partition([1] * 14, 4, speeds=[1, 0.5, 1, 1])
    assert sizes(parts) == [4, 2, 4, 4]
    even, fitted = partition([1] * 14, 4), parts
    slow = {1: 2}
    spans = [
        simulate(one_f_one_b(4, 16), *[[len(part) for part in split]] * 3, slow=slow).makespan
        for split in (even, fitted)
    ]
    assert spans[1] < spans[0]


@settings(max_examples=200)
@given(st.data())
def test_optimal_and_complete(data):
    """Every way to cut, tried: none has a smaller largest time, and of those none is more even."""
    costs = data.draw(st.lists(st.one_of(st.integers(0, 9), st.floats(0, 9)), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, min(4, len(costs))))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1, 2, 3.7]), min_size=stages, max_size=stages))

    def times(parts: list[range]) -> list[Fraction]:
        return [sum((Fraction(costs[i]) for i in part), Fraction(0)) / Fraction(v)
                for part, v in zip(parts, speeds, strict=True)]  # fmt: skip

    def quality(parts: list[range]) -> tuple[Fraction, Fraction]:
        return max(times(parts)), sum(t * t for t in times(parts))

    parts = partition(costs, stages, speeds)
    assert [layer for part in parts for layer in part] == list(range(len(costs)))
    assert len(parts) == stages
    every = (
        [range(a, b) for a, b in pairwise([0, *cuts, len(costs)])]
        for cuts in combinations(range(1, len(costs)), stages - 1)
    )
    assert quality(parts) == min(map(quality, every))


@given(st.integers(1, 12), st.integers(0, 60))
def test_equal_layers_as_tensor_split(stages, more):
    layers = stages + more
    size, larger = divmod(layers, stages)
    assert sizes(partition([1] * layers, stages)) == [size + (n < larger) for n in range(stages)]


def test_a_large_model_is_quick():
    """Llama 3 405B: 126 layers, embedding and head, on 16 stages."""
    parts = partition([0.3, *[1] * 126, 1.9], 16)
    assert sum(sizes(parts)) == 128


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: partition([1, 1], 3), ValueError, "stages is 3, but there are 2 layers"),
        (lambda: partition([1, 1], 0), ValueError, "stages is 0: expected 1 or more"),
        (lambda: partition([1, 1], 1.0), TypeError, r"stages is 1\.0"),
        (lambda: partition([1, -1], 2), ValueError, r"costs\[1\] is -1"),
        (lambda: partition([1, "2"], 2), TypeError, r"costs\[1\] is '2'"),
        (lambda: partition([1, 1], 2, speeds=[1]), ValueError, "speeds has 1, but there are 2 stages"),
        (lambda: partition([1, 1], 2, speeds=[1, 0]), ValueError, r"speeds\[1\] is 0: expected more than 0"),
    ],
)
def test_refused_with_the_reason(call, error, said):
    with pytest.raises(error, match=said):
        call()
