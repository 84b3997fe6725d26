"""Collectives built from sends and receives, each beside torch's own.

    from labkit import collectives
    collectives.all_reduce(gradient, op="avg", algorithm="ring")

An algorithm is a file: `ring`, `tree`, `central`, `mesh`, `halving_doubling`, `hierarchical`. Read `ring` first.
"""

from labkit.collectives.choose import ALGORITHMS, again, asked, using
from labkit.collectives.messages import batch_isend_irecv, irecv, isend, recv, send
from labkit.collectives.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from labkit.collectives.placement import Placement, mark, placement

__all__ = [
    "ALGORITHMS",
    "Placement",
    "again",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "asked",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "mark",
    "placement",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "using",
]
