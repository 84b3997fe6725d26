"""What a rank sends in a step of each ZeRO stage.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 7;
the ring: Patarasuk and Yuan (2009), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.theory.communication.given import a_rank, whole
from labkit.theory.communication.planning import plan
from labkit.theory.memory.terms import Terms


def passes(stage: int, micro_batches: int = 1, *, keep_after_forward: bool = False) -> Terms[int]:
    """How often all parameters, Ψ of them, move in a step, by operation. On a ring each time costs Ψ(N−1)/N elements.

    =====  ==========================  =============================  =====================
    stage  k micro-batches             why                            total, k = 1 and k = 8
    =====  ==========================  =============================  =====================
    0      all-reduce, twice Ψ         gradients add up locally       2, 2
    1      reduce-scatter, all-gather  gradients add up locally       2, 2
    2      k reduce-scatters, 1        only a shard of the gradients  2, 9
           all-gather                  is kept
    3      2k all-gathers, k           the parameters are freed after 3, 24
           reduce-scatters             each forward and backward
    =====  ==========================  =============================  =====================

    Args:
        stage: ZeRO's stage, 0 (plain data parallelism) to 3.
        micro_batches: k, accumulated in one step.
        keep_after_forward: Stage 3 does not free what forward gathered before backward has used it: k all-gathers.

    Raises:
        TypeError, ValueError: No whole number, or out of range; `keep_after_forward` below stage 3.

    Source: Rajbhandari et al. (2020), sections 7.1 and 7.2, where k = 1.

    >>> passes(3)
    {'all-gather forward': 1, 'all-gather backward': 1, 'reduce-scatter': 1}
    >>> passes(3, keep_after_forward=True).total
    2
    """
    check_stage(stage)
    whole("micro_batches", micro_batches, 1)
    if keep_after_forward and stage < 3:
        raise ValueError(f"stage is {stage}, which always keeps its parameters: leave keep_after_forward out")
    if stage == 0:
        return Terms({"all-reduce": 2})
    if stage < 3:
        return Terms({"reduce-scatter": micro_batches if stage == 2 else 1, "all-gather": 1})
    again = 0 if keep_after_forward else micro_batches
    terms = {"all-gather forward": micro_batches, "all-gather backward": again, "reduce-scatter": micro_batches}
    return Terms({name: times for name, times in terms.items() if times})


def padding(units: int | Sequence[int], ranks: int) -> int:
    """Elements added in all so that N divides what is cut into N shards: each unit or bucket on its own.

    Args:
        units: Ψ, or the parameters of each unit (stage 3) or bucket (stages 1 and 2).
        ranks: N.

    Raises:
        TypeError, ValueError: No whole number, or out of range.

    >>> padding([10, 7], ranks=4)  # 12 and 8
    3
    """
    return sum(-count % ranks for count in listed(units, ranks))


def sent(
    units: int | Sequence[int], stage: int, ranks: int, micro_batches: int = 1, *, parameter_bytes: int = 4,
    gradient_bytes: int = 4, keep_after_forward: bool = False, rank: int = 0,
) -> Terms[int]:  # fmt: skip
    """Bytes that a rank sends in a step, to the byte, by operation: `passes` × (Ψ + padding)(N−1)/N × bytes.

    An all-reduce (stage 0) cuts what it is given without padding, so ranks differ by a few elements: `rank` says which
    is meant. At the other stages all ranks send the same.

    Args:
        units: Ψ, or the parameters of each unit (stage 3) or bucket (below), which travel one by one.
        stage, micro_batches, keep_after_forward: As in `passes`.
        ranks: N.
        parameter_bytes: Of an element that is gathered.
        gradient_bytes: Of an element that is reduced.
        rank: Which of the ring's ranks.

    Raises:
        TypeError, ValueError: As `passes` and `padding`.

    Assumptions: rings. The gradients' mean costs nothing more; norms and losses, a few bytes, are not counted.

    >>> sent(1000, stage=3, ranks=4)
    {'all-gather forward': 3000, 'all-gather backward': 3000, 'reduce-scatter': 3000}
    >>> sent([10, 7], stage=2, ranks=4, micro_batches=8).total == 9 * (17 + 3) * 3 // 4 * 4
    True
    """
    counts = listed(units, ranks)
    whole("parameter_bytes", parameter_bytes, 1)
    whole("gradient_bytes", gradient_bytes, 1)
    a_rank("rank", rank, ranks)
    times = passes(stage, micro_batches, keep_after_forward=keep_after_forward)
    if stage == 0:
        reduced = sum(plan("all_reduce", "ring", ranks, count, gradient_bytes).sent(rank) for count in counts)
        return Terms({"all-reduce": reduced})
    once = sum(shards(counts, ranks)) * (ranks - 1)
    width = {name: gradient_bytes if "reduce" in name else parameter_bytes for name in times}
    return Terms({name: n * once * width[name] for name, n in times.items()})


def shards(counts: Sequence[int], ranks: int) -> list[int]:
    """Elements of a rank's shard of each unit."""
    return [-(-count // ranks) for count in counts]


def listed(units: int | Sequence[int], ranks: int) -> list[int]:
    """The units as a list, checked."""
    whole("ranks", ranks, 1)
    counts = list(units) if isinstance(units, Sequence) else [units]
    for count in counts:
        whole("the parameters of a unit", count, 0)
    return counts


def check_stage(stage: object) -> None:
    whole("stage", stage, 0)
    if stage not in range(4):
        raise ValueError(f"stage is {stage}: ZeRO has 1, 2 and 3, and 0 is plain data parallelism")
