"""Breadth-first: several stages a rank, and all micro-batches through one stage before the next."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.pipeline.orders import EVEN, SYNCHRONOUS, by_rank, run
from labkit.pipeline.schedule import Action, Schedule


def breadth_first(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """GPipe with `chunks` stages a rank: all micro-batches forward through one, then the next; backward in reverse.

    Bubble (p−1)/(vm) of the ideal time from m = p on, at GPipe's price: a rank holds all m micro-batches in each of its
    v stages. It is meant for data parallelism beside it: a stage's parameters are used in one go, so that they can be
    gathered once, and its gradients reduced early.

    Args:
        ranks: p; rank r hosts stages r, r+p, r+2p, …
        micro_batches: m.
        chunks: v, stages a rank; with 1 it is GPipe.

    Raises:
        TypeError, ValueError: No whole number, or below 1.

    Source: Lamy-Poirier, "Breadth-first pipeline parallelism" (2023). torch's `ScheduleLoopedBFS` takes the
    micro-batches of a backward in reverse.

    >>> print(breadth_first(ranks=2, micro_batches=2, chunks=2).text())
    r0: F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0
    r1: F0.1 F1.1 F0.3 F1.3 B0.3 B1.3 B0.1 B1.1
    """

    def order(rank: int) -> Iterable[Action]:
        own = range(rank, ranks * chunks, ranks)
        for stage in own:
            yield from run("F", stage, range(micro_batches))
        for stage in reversed(own):
            yield from run("B", stage, range(micro_batches))

    assumptions = (EVEN, SYNCHRONOUS, "m ≥ p: with fewer micro-batches a rank waits between its stages")
    return by_rank("breadth-first", ranks, micro_batches, order, assumptions, "Lamy-Poirier 2023", chunks)
