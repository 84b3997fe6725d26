"""Zero bubble: backward taken apart, and the half that nobody waits for put where a rank would idle.

B, the gradient of a stage's input, is what the stage before waits for. W, the gradient of its weights, is needed at the
end only. So B comes as early as it can, and W fills the gaps.

Source: Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism" (2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from labkit.pipeline.orders import EVEN, SYNCHRONOUS, by_rank, run
from labkit.pipeline.schedule import KINDS, Action, Schedule, whole

SOURCE = "Qi et al. 2023"
ALIKE = "F, B and W take the same time"
NO_BARRIER = "a rank begins the next batch without waiting for the others: its optimizer step has no barrier"


def zero_bubble_h1(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B's order and peak memory, a third of its bubble.

    Rank r does a W after each B once more than r B's are done, and the rest at the end. Bubble (p−1)(F+B−W); a rank
    holds min(m, p) micro-batches, since W keeps the stash of its B.

    Args:
        ranks: p, of one stage each.
        micro_batches: m; fewer than p work too.

    Raises:
        TypeError, ValueError: No whole number, or below 1.

    Source: Qi et al. (2023), section 2.1 and figure 3.

    >>> print(zero_bubble_h1(ranks=3, micro_batches=3).text())
    r0: F0 F1 F2 B0 W0 B1 W1 B2 W2
    r1: F0 F1 B0 F2 B1 W0 B2 W1 W2
    r2: F0 B0 F1 B1 F2 B2 W0 W1 W2
    """

    def order(rank: int) -> Iterable[Action]:
        return _one_f_one_b_one_w(rank, micro_batches, warm_up=ranks - 1 - rank, lag=rank)

    assumptions = (ALIKE, EVEN, SYNCHRONOUS)
    return by_rank("ZB-H1", ranks, micro_batches, order, assumptions, f"{SOURCE}, section 2.1")


def zero_bubble_h2(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H2: no bubble inside the batch, for twice the memory.

    The warm-up is twice 1F1B's, and W lags 2r behind B: each rank is busy from its first F to its last W. What is left
    is the slant: rank r begins r forwards later, and ends later. Bubble (p−1)(F+B−2W) of `Timeline.spans`, nothing if
    all three take the same and m ≥ 2p−1; a rank holds min(m, 2p−1) micro-batches.

    Args, Raises: As `zero_bubble_h1`.

    Source: Qi et al. (2023), section 2.2 and figure 3.

    >>> print(zero_bubble_h2(ranks=2, micro_batches=3).text())
    r0: F0 F1 F2 B0 W0 B1 W1 B2 W2
    r1: F0 B0 F1 B1 F2 B2 W0 W1 W2
    """

    def order(rank: int) -> Iterable[Action]:
        return _one_f_one_b_one_w(rank, micro_batches, warm_up=2 * (ranks - 1 - rank), lag=2 * rank)

    assumptions = (ALIKE, EVEN, NO_BARRIER, "m ≥ 2p−1")
    return by_rank("ZB-H2", ranks, micro_batches, order, assumptions, f"{SOURCE}, section 2.2")


def _one_f_one_b_one_w(stage: int, micro_batches: int, warm_up: int, lag: int) -> Iterable[Action]:
    """1F1B after `warm_up` forwards, and with each B the W of `lag` B's ago."""
    forwards, backwards, weights = (run(kind, stage, range(micro_batches)) for kind in KINDS)
    yield from islice(forwards, warm_up)
    for done, backward in enumerate(backwards, 1):
        yield from islice(forwards, 1)
        yield backward
        if done > lag:
            yield next(weights)
    yield from weights


def zero_bubble_v(ranks: int, micro_batches: int) -> Schedule:
    """ZB-V: no bubble inside the batch at 1F1B's memory, with two stages a rank, placed in a V.

    Rank r hosts stage r on the way down and stage 2p−1−r on the way up, so the last stage is on rank 0, and its first
    backward begins where the first forward did. A rank holds up to 2p pairs of half the size, as 1F1B's first rank.

    Args:
        ranks: p, of two stages each.
        micro_batches: m; fewer than 2p−1 work too: then it is the schedule of 2p−1, without those that are not there.

    Raises:
        TypeError, ValueError: No whole number, or below 1.

    Source: Qi et al. (2023), section 6. The order is that of torch's `ScheduleZBVZeroBubble`.

    >>> print(zero_bubble_v(ranks=1, micro_batches=2).text())
    r0: F0.0 F0.1 B0.1 W0.1 F1.0 B0.0 W0.0 F1.1 B1.1 W1.1 B1.0 W1.0
    """
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches)):
        whole(name, value, 1)

    def order(rank: int) -> Iterable[Action]:
        return (a for a in _v(rank, ranks, max(micro_batches, 2 * ranks - 1)) if a.micro_batch < micro_batches)

    assumptions = (ALIKE, EVEN, NO_BARRIER, "m ≥ 2p")
    placement = v_shape(ranks)
    return by_rank("ZB-V", ranks, micro_batches, order, assumptions, f"{SOURCE}, section 6", 2, placement)


def v_shape(ranks: int) -> tuple[int, ...]:
    """Stage → its rank: down, and back up.

    >>> v_shape(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))


def _v(rank: int, ranks: int, micro_batches: int) -> Iterable[Action]:
    """Warm-up, then a backward of each of the two stages for a forward of each, then what is left."""
    down, up = rank, 2 * ranks - 1 - rank
    f, b, w = ({stage: run(kind, stage, range(micro_batches)) for stage in (down, up)} for kind in KINDS)
    yield from islice(f[down], 2 * (ranks - rank) - 1)
    for _ in range(rank):
        yield from (next(f[up]), next(f[down]))
    for _ in range(ranks - rank):
        yield from (next(f[up]), next(b[up]), next(w[up]))
    for forward in f[up]:
        yield from islice(f[down], 1)
        yield from (next(b[down]), next(w[down]), forward, next(b[up]), next(w[up]))
    for _ in range(rank):
        yield from (next(b[down]), next(b[up]))
    for backward in b[down]:
        yield from (backward, next(w[down]))
    yield from w[up]
    yield from w[down]
