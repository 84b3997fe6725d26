"""Recursive halving and doubling: the ring's bytes in the tree's number of steps.

At every step partners exchange halves of what they still work on, so messages shrink by half: a reduce-scatter in
log₂ N steps. Then the same way back, doubling. The partners are far apart, so on a real network messages share links;
and the pattern wants N to be a power of two. Ranks beyond the largest one fold theirs into a partner first.

Source: Rabenseifner, "Optimization of collective reduction operations" (2004), section 4.
"""

from __future__ import annotations

import torch

from labkit.collectives.peers import Peers
from labkit.collectives.reduction import Reduction
from labkit.trace import label


def all_reduce(peers: Peers, flat: torch.Tensor, reduction: Reduction) -> None:
    """`flat`: (elements,), in place."""
    me, n = peers.me, len(peers)
    core = 2 ** (n.bit_length() - 1)  # the largest power of two
    step = 1
    if n > core:
        _fold(peers, flat, reduction, core, step)
        step += 1
    if me < core:
        covers = [1 + (rank + core < n) for rank in range(core)]
        step = _halve(peers, flat, reduction, covers, step)
        step = _double(peers, flat, core, step)
    if n > core:
        _unfold(peers, flat, core, 2 + 2 * (core.bit_length() - 1))


def _fold(peers: Peers, flat: torch.Tensor, reduction: Reduction, core: int, step: int) -> None:
    """Rank core+i sends all it has to rank i, and then waits for the result."""
    with label(step=step):
        if peers.me >= core:
            peers.exchange(send=[(flat, peers.me - core)]).wait()
        elif peers.me + core < len(peers):
            room = torch.empty_like(flat)
            peers.exchange(receive=[(room, peers.me + core)]).wait()
            reduction(flat, room)


def _halve(peers: Peers, flat: torch.Tensor, reduction: Reduction, covers: list[int], step: int) -> int:
    """A reduce-scatter: afterwards rank r's own chunk of `flat`, the r-th of len(covers), is reduced."""
    me, core = peers.me, len(covers)
    ends = _ends(flat, core)
    room = torch.empty_like(flat[: ends[core // 2]])
    low, high = 0, core  # the chunks that I still work on
    distance = core // 2
    while distance:
        partner, middle = me ^ distance, (low + high) // 2
        kept, given = ((low, middle), (middle, high)) if me < partner else ((middle, high), (low, middle))
        mine, theirs = flat[ends[kept[0]] : ends[kept[1]]], flat[ends[given[0]] : ends[given[1]]]
        landing = room[: mine.numel()]
        with label(step=step):
            peers.exchange(send=[(theirs, partner)], receive=[(landing, partner)]).wait()
        reduction(mine, landing, (_covered(covers, me, distance), _covered(covers, partner, distance)))
        low, high = kept
        distance, step = distance // 2, step + 1
    return step


def _double(peers: Peers, flat: torch.Tensor, core: int, step: int) -> int:
    """An all-gather: `_halve` backwards."""
    me, ends = peers.me, _ends(flat, core)
    distance = 1
    while distance < core:
        partner = me ^ distance
        low, theirs = me // distance * distance, partner // distance * distance
        mine = flat[ends[low] : ends[low + distance]]
        landing = flat[ends[theirs] : ends[theirs + distance]]
        with label(step=step):
            peers.exchange(send=[(mine, partner)], receive=[(landing, partner)]).wait()
        distance, step = 2 * distance, step + 1
    return step


def _unfold(peers: Peers, flat: torch.Tensor, core: int, step: int) -> None:
    """Back to those who folded theirs in."""
    with label(step=step):
        if peers.me >= core:
            peers.exchange(receive=[(flat, peers.me - core)]).wait()
        elif peers.me + core < len(peers):
            peers.exchange(send=[(flat, peers.me + core)]).wait()


def _ends(flat: torch.Tensor, core: int) -> list[int]:
    """Where the chunks begin and end: chunk r is ``flat[ends[r]:ends[r + 1]]``."""
    ends = [0]
    for chunk in flat.tensor_split(core):
        ends.append(ends[-1] + chunk.numel())
    return ends


def _covered(covers: list[int], rank: int, distance: int) -> int:
    """How many ranks' values `rank` has reduced when it meets its partner at `distance`: those further off."""
    return sum(count for other, count in enumerate(covers) if other % (2 * distance) == rank % (2 * distance))
