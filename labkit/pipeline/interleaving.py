"""Interleaved 1F1B: several stages a rank, so that the pipeline fills in smaller steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from labkit.pipeline.orders import EVEN, SYNCHRONOUS, by_rank
from labkit.pipeline.schedule import Action, Schedule, whole


def interleaved(ranks: int, micro_batches: int, chunks: int, group: int | None = None) -> Schedule:
    """1F1B over `chunks` stages a rank: a group of micro-batches through one stage, then through the next.

    With m a multiple of p and groups of p, the bubble is (p−1)/(vm) of the ideal time. The price: v times as many
    messages, (pv−1)/(p−1) to be exact, and a stash of 1 + (p−1)/(pv) times 1F1B's.

    A rank goes through its stages in groups of micro-batches. Its first group is back from the last rank when it has
    sent the whole group off: that takes p micro-batches or more in each group, unless there is only one.

    Args:
        ranks: p; rank r hosts stages r, r+p, r+2p, …
        micro_batches: m; any number, fewer than p too.
        chunks: v, stages a rank; with 1 it is 1F1B, but for a longer warm-up.
        group: Micro-batches of a group; the last may have fewer. Default: as many groups of p or more as m allows, as
            even as possible.

    Raises:
        TypeError, ValueError: No whole number, or below 1; a group, or what is left over for the last one, is smaller
            than p.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021), section 2.2.2;
    groups of other sizes than p as in Megatron-LM (`microbatch_group_size_per_vp_stage`).

    >>> print(interleaved(ranks=2, micro_batches=2, chunks=2).text())
    r0: F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0
    r1: F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1
    """
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        whole(name, value, 1)
    groups = _groups(ranks, micro_batches, group)

    def order(rank: int) -> Iterable[Action]:
        own = range(rank, ranks * chunks, ranks)
        forwards = (Action("F", m, stage) for members in groups for stage in own for m in members)
        backwards = (Action("B", m, stage) for members in groups for stage in reversed(own) for m in members)
        yield from islice(forwards, (chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank))  # the warm-up
        for forward in forwards:
            yield forward
            yield next(backwards)
        yield from backwards

    assumptions = (EVEN, SYNCHRONOUS, "m is a multiple of p, for a bubble of (p−1)/(vm)")
    return by_rank("interleaved 1F1B", ranks, micro_batches, order, assumptions, "Narayanan et al. 2021, section 2.2.2",
                   chunks)  # fmt: skip


def _groups(ranks: int, micro_batches: int, group: int | None) -> list[range]:
    """The micro-batches, cut into groups."""
    if group is None:
        number = max(1, micro_batches // ranks)
        size, larger = divmod(micro_batches, number)
        starts = [n * size + min(n, larger) for n in range(number)]
    else:
        whole("group", group, 1)
        starts = list(range(0, micro_batches, group))
    groups = [range(a, b) for a, b in zip(starts, [*starts[1:], micro_batches], strict=True)]
    smallest = min(map(len, groups))
    if len(groups) > 1 and smallest < ranks:
        raise ValueError(
            f"group={group} cuts {micro_batches} micro-batches by {', '.join(str(len(g)) for g in groups)}: "
            f"expected {ranks} in each or more, as there are ranks, or one waits for a group that is not back yet"
        )
    return groups
