"""The two orders to know: GPipe, all forwards first; and 1F1B, which keeps as few micro-batches as it can.

Both end at the same moment. They differ in what a rank holds: GPipe all m micro-batches, 1F1B one for each stage from
its own to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from labkit.pipeline.schedule import Action, Kind, Schedule, whole

SYNCHRONOUS = "every weight gradient is used only after the last backward: one optimizer step a batch"
EVEN = "all stages take the same time"


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards.

    Makespan (m+p−1)(F+B), bubble (p−1)/m of the ideal time; each rank holds all m micro-batches.

    Args:
        ranks: p, of one stage each.
        micro_batches: m.

    Raises:
        TypeError, ValueError: No whole number, or below 1.

    Source: Huang et al., "GPipe" (2019), figure 2c. There the backwards run from the last micro-batch to the first,
    which changes no makespan and no peak; here they run in the order of the forwards, as in torch and Megatron-LM.

    >>> print(gpipe(ranks=2, micro_batches=3).text())
    r0: F0 F1 F2 B0 B1 B2
    r1: F0 F1 F2 B0 B1 B2
    """

    def order(rank: int) -> Iterable[Action]:
        yield from run("F", rank, range(micro_batches))
        yield from run("B", rank, range(micro_batches))

    return by_rank("GPipe", ranks, micro_batches, order, (EVEN, SYNCHRONOUS), "Huang et al. 2019, figure 2c")


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """One forward, one backward (1F1B, PipeDream-Flush): after its warm-up a rank does them in turn.

    Makespan and bubble are GPipe's on free links. Rank r holds min(m, p−r) micro-batches: it warms up with one forward
    for each rank after it, so that its first backward comes as early as it can.

    Args:
        ranks: p, of one stage each.
        micro_batches: m; fewer than p work too.

    Raises:
        TypeError, ValueError: No whole number, or below 1.

    Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (2021), PipeDream-Flush; Fan et al.,
    "DAPPLE" (2021).

    >>> print(one_f_one_b(ranks=4, micro_batches=3).text())
    r0: F0 F1 F2 B0 B1 B2
    r1: F0 F1 F2 B0 B1 B2
    r2: F0 F1 B0 F2 B1 B2
    r3: F0 B0 F1 B1 F2 B2
    """

    def order(rank: int) -> Iterable[Action]:
        forwards, backwards = run("F", rank, range(micro_batches)), run("B", rank, range(micro_batches))
        yield from islice(forwards, ranks - 1 - rank)  # the warm-up
        for forward in forwards:
            yield forward
            yield next(backwards)
        yield from backwards

    return by_rank("1F1B", ranks, micro_batches, order, (EVEN, SYNCHRONOUS), "Narayanan et al. 2021; Fan et al. 2021")


def run(kind: Kind, stage: int, micro_batches: Iterable[int]) -> Iterator[Action]:
    """The same for one micro-batch after the other."""
    return (Action(kind, micro_batch, stage) for micro_batch in micro_batches)


def by_rank(
    name: str, ranks: int, micro_batches: int, order: Callable[[int], Iterable[Action]],
    assumptions: tuple[str, ...], source: str, chunks: int = 1,
    placement: tuple[int, ...] | Callable[[int, int], int] | None = None,
) -> Schedule:  # fmt: skip
    """The schedule of which ``order(rank)`` yields each rank's actions; `chunks` stages a rank."""
    for given, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        whole(given, value, 1)
    return Schedule(
        name=name, ranks=ranks, micro_batches=micro_batches, stages=ranks * chunks, placement=placement,
        actions=tuple(tuple(order(rank)) for rank in range(ranks)), assumptions=assumptions, source=source,
    )  # fmt: skip
