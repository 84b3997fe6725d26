"""DualPipe: micro-batches enter at both ends, and forward and backward that meet on a rank overlap.

For `check`, `simulate` and the picture. The engine does not run it: it needs two copies of each stage (DualPipe), and
kernels that share a device (both).

Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 3.2.1, and github.com/deepseek-ai/DualPipe, whose
eight steps this file follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from labkit.pipeline.orders import EVEN, SYNCHRONOUS, run
from labkit.pipeline.schedule import Action, Schedule, whole
from labkit.pipeline.zero_bubble import v_shape

SOURCE = "DeepSeek-AI 2024; github.com/deepseek-ai/DualPipe"
OVERLAP = "a forward and a backward that stand together overlap; here, where a rank does one at a time, B follows F"


@dataclass(frozen=True)
class BothWays:
    """DualPipe's placement: the first half of the micro-batches goes through the ranks upward, the second downward.

    Rank r hosts stage r of one copy of the model and stage p−1−r of the other.
    """

    ranks: int
    micro_batches: int

    def __call__(self, stage: int, micro_batch: int) -> int:
        return stage if micro_batch < self.micro_batches // 2 else self.ranks - 1 - stage


def dual_pipe(ranks: int, micro_batches: int) -> Schedule:
    """DualPipe: two copies of the model, half of the micro-batches through each, in opposite directions.

    Bubble (p/2−1)(F&B + B − 3W), where B is both gradients and F&B a forward and a backward that overlap. `simulate`
    does one at a time, so that a forward's result leaves before the backward beside it ends: (p/2−1)(2F − W) where one
    gradient takes as long as a forward. A rank holds the parameters twice, and up to p+1 micro-batches.

    Args:
        ranks: p, even.
        micro_batches: m, even, 2p or more.

    Raises:
        TypeError, ValueError: No whole number; odd; too few.

    Source: DeepSeek-AI (2024), section 3.2.1, figure 5 and table 2.

    >>> schedule = dual_pipe(ranks=2, micro_batches=4)
    >>> print(schedule.text())
    r0: F0.0 F2.1 F1.0 B2.1 F3.1 B0.0 B3.1 B1.0 W1.0
    r1: F2.0 F0.1 F3.0 B0.1 F1.1 B2.0 B1.1 B3.0 W3.0
    >>> schedule.rank_of(0, micro_batch=0), schedule.rank_of(0, micro_batch=3)
    (0, 1)
    """
    whole("ranks", ranks, 1)
    whole("micro_batches", micro_batches, 1)
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches)):
        if value % 2:
            raise ValueError(f"{name} is {value}: DualPipe takes an even number, half of them for each direction")
    _enough(micro_batches, 2 * ranks)
    first, second = range(micro_batches // 2), range(micro_batches // 2, micro_batches)

    def order(rank: int) -> Iterable[Action]:
        """To a rank of the second half everything looks the same, with the two directions changed over."""
        depth = min(rank, ranks - 1 - rank)
        near, far = (first, second) if rank == depth else (second, first)
        return _eight_steps(depth, ranks // 2, _Way(depth, near), _Way(ranks - 1 - depth, far))

    return _dual("DualPipe", ranks, micro_batches, ranks, order, BothWays(ranks, micro_batches))


def dual_pipe_v(ranks: int, micro_batches: int) -> Schedule:
    """DualPipeV: DualPipe cut in half. One copy of the model, two stages a rank, placed in a V as in ZB-V.

    What DualPipe's rank r and its mirror image do for each other, a rank does for itself: the same order as DualPipe
    with twice the ranks and micro-batches.

    Args:
        ranks: p, of two stages each.
        micro_batches: m, 2p or more.

    Raises:
        TypeError, ValueError: No whole number; too few.

    Source: github.com/deepseek-ai/DualPipe; Qi et al., "DualPipe could be better without the dual" (2025).

    >>> print(dual_pipe_v(ranks=1, micro_batches=2).text())
    r0: F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0 W1.0
    """
    whole("ranks", ranks, 1)
    whole("micro_batches", micro_batches, 1)
    _enough(micro_batches, 2 * ranks)
    all_of_them = range(micro_batches)

    def order(rank: int) -> Iterable[Action]:
        return _eight_steps(rank, ranks, _Way(rank, all_of_them), _Way(2 * ranks - 1 - rank, all_of_them))

    return _dual("DualPipeV", ranks, micro_batches, 2 * ranks, order, v_shape(ranks))


def _enough(micro_batches: int, least: int) -> None:
    if micro_batches < least:
        raise ValueError(f"micro_batches is {micro_batches}: expected {least} or more, twice as many as ranks, which "
                         "fill the pipeline from both ends")  # fmt: skip


def _dual(
    name: str, ranks: int, micro_batches: int, stages: int, order: Callable[[int], Iterable[Action]],
    placement: tuple[int, ...] | Callable[[int, int], int],
) -> Schedule:  # fmt: skip
    actions = tuple(tuple(order(rank)) for rank in range(ranks))
    pairs = {kind: {(a.micro_batch, a.stage) for row in actions for a in row if a.kind == kind} for kind in "BW"}
    return Schedule(
        name=name, ranks=ranks, micro_batches=micro_batches, stages=stages, actions=actions, placement=placement,
        unsplit=frozenset(pairs["B"] - pairs["W"]), assumptions=(EVEN, SYNCHRONOUS, OVERLAP), source=SOURCE,
    )  # fmt: skip


class _Way:
    """One direction, as a rank sees it: its stage there, and what it does, one micro-batch after the other."""

    def __init__(self, stage: int, micro_batches: range) -> None:
        self.forwards, self.backwards = run("F", stage, micro_batches), run("B", stage, micro_batches)


def _eight_steps(depth: int, half: int, near: _Way, far: _Way) -> Iterable[Action]:
    """A rank's order, `depth` ranks from where its near direction begins, of `half` ranks up to the middle."""
    weights: deque[Action] = deque()  # of the backwards that were taken apart, in their order
    beyond = half - 1 - depth

    def apart(way: _Way) -> Action:
        backward = next(way.backwards)
        weights.append(backward._replace(kind="W"))
        return backward

    yield from islice(near.forwards, 2 * beyond)
    for _ in range(depth + 1):
        yield from (next(near.forwards), next(far.forwards))
    for _ in range(beyond):
        yield from (apart(far), weights.popleft(), next(far.forwards))
    for forward in near.forwards:  # the main part: a forward one way beside a backward the other way
        yield from (forward, next(far.backwards), next(far.forwards), next(near.backwards))
    for _ in range(beyond):
        yield from (next(far.backwards), next(far.forwards), next(near.backwards))
    for number in range(2 * (depth + 1)):  # backwards of both in turn; those of the second half are taken apart
        way = near if number % 2 else far
        yield apart(way) if number > depth else next(way.backwards)
    for _ in range(beyond):
        yield from (weights.popleft(), apart(near))
    yield from weights
