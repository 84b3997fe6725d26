"""What collectives cost on the wire, whatever carries them out: the bytes that a ring would send for them."""

from __future__ import annotations

from labkit.checks.judge import collectives
from labkit.checks.trial import GIVEN
from labkit.trace import Trace


def sent_by_a_ring(trace: Trace, rank: int) -> int:
    """Bytes of a rank: (N−1)/N of a collective's whole tensor, of an all-reduce twice that; and messages of its own.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
    """
    mine = [e for e in trace.of(rank) if GIVEN not in e.labels]
    called = collectives(mine)
    inside = {e.index for e in called}
    sends = sum(e.nbytes for e in mine if e.kind == "send" and e.parent not in inside)
    phases = sum(e.nbytes * (2 if e.name.startswith("all_reduce") else 1) for e in called)
    return sends + phases * (trace.ranks - 1) // trace.ranks
