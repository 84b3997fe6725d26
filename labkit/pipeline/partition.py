"""Layers to stages: which layers each rank gets, so that the slowest stage is as fast as it can be.

A pipeline goes at the pace of its slowest stage. Layers stay in order, so a partition is p−1 cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from labkit.pipeline.schedule import number, whole


def partition(costs: Sequence[float], stages: int, speeds: Sequence[float] | None = None) -> list[range]:
    """Cut layers into `stages` runs whose largest time is as small as it can be; of those, the most even.

    Most even: the smallest sum of squared times; then the first stages get more. Every layer is in exactly one stage.

    Args:
        costs: What each layer takes, in any unit: measured, or counted. The embedding and the head are layers too.
        stages: p, at most as many as layers.
        speeds: How fast each stage's device is, relative to the others; default: all alike. A stage's time is the sum
            of its costs divided by its speed.

    Returns:
        Stage → the numbers of its layers.

    Raises:
        TypeError, ValueError: A cost that is no finite number or below 0; a speed that is not above 0; not one speed a
            stage; more stages than layers.

    Source: the linear partition problem; Narayanan et al., "PipeDream" (2019), section 3.1, solves it with replicated
    stages. Here it is exact: times are compared as whole numbers, without rounding.

    >>> [len(layers) for layers in partition([1] * 30, stages=4)]
    [8, 8, 7, 7]
    >>> partition([1, 1, 1, 1, 1, 3], stages=2)  # the last layer has the head
    [range(0, 4), range(4, 6)]
    """
    for name, given in (("costs", costs), ("speeds", speeds)):
        if isinstance(given, Mapping):
            raise TypeError(f"{name} is a {type(given).__name__}: expected numbers in order, such as list(….values())")
    time = _times(costs, stages, speeds)
    layers = len(costs)
    limit = _fastest(time, layers, stages)
    cuts = _most_even(time, layers, stages, limit)
    return [range(first, end) for first, end in pairwise(cuts)]


#: (stage, first layer, the layer after the last) → that stage's time.
Time = Callable[[int, int, int], int]


def _fastest(time: Time, layers: int, stages: int) -> int:
    """The largest time of the best partition, one stage after the other: layers so far → the best so far."""
    best = {0: 0}
    for stage in range(stages):
        ends = range(stage + 1, layers + 1)  # a layer at least for each stage so far
        best = {end: min(max(best[cut], time(stage, cut, end)) for cut in best if cut < end) for end in ends}
    return best[layers]


def _most_even(time: Time, layers: int, stages: int, limit: int) -> tuple[int, ...]:
    """The cuts with the smallest sum of squares among those within the limit, the same way."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for stage in range(stages):
        following = {}
        for end in range(stage + 1, layers + 1):
            within = (
                (squares + time(stage, cuts[-1], end) ** 2, tuple(-cut for cut in cuts), cuts)
                for squares, cuts in best.values() if cuts[-1] < end and time(stage, cuts[-1], end) <= limit
            )  # fmt: skip
            if found := min(within, default=None):
                following[end] = found[0], (*found[2], end)
        best = following
    return best[layers][1]


def _times(costs: Sequence[float], stages: int, speeds: Sequence[float] | None) -> Time:
    """Times as whole numbers: over their common denominator, so that equal ones are equal."""
    whole("stages", stages, 1)
    if stages > len(costs):
        raise ValueError(f"stages is {stages}, but there are {len(costs)} layers: expected a layer for each stage")
    speeds = [1] * stages if speeds is None else speeds
    if len(speeds) != stages:
        raise ValueError(f"speeds has {len(speeds)}, but there are {stages} stages: expected one each")
    for layer, cost in enumerate(costs):
        number(f"costs[{layer}]", cost)
    for stage, speed in enumerate(speeds):
        number(f"speeds[{stage}]", speed)
        if not speed:
            raise ValueError(f"speeds[{stage}] is {speed}: expected more than 0")
    exact, slowness = _as_whole(map(Fraction, costs)), _as_whole(1 / Fraction(speed) for speed in speeds)
    upto = [0, *accumulate(exact)]
    return lambda stage, first, end: (upto[end] - upto[first]) * slowness[stage]


def _as_whole(fractions: Iterable[Fraction]) -> list[int]:
    """The same numbers, multiplied by their common denominator."""
    given = list(fractions)
    common = math.lcm(*(f.denominator for f in given))
    return [int(f * common) for f in given]
