"""The binomial tree: whoever has the data passes it on, so the number of ranks that have it doubles at every step.

⌈log₂ N⌉ steps instead of the ring's N−1, but each message is the whole tensor: good for small ones.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), 3.2, 3.3.
"""

from __future__ import annotations

import torch

from labkit.collectives.peers import Peers
from labkit.collectives.reduction import Reduction
from labkit.trace import label


def steps(ranks: int) -> int:
    """⌈log₂ ranks⌉.

    >>> [steps(n) for n in (1, 2, 3, 4, 5, 8, 9)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return (ranks - 1).bit_length()


def broadcast(peers: Peers, flat: torch.Tensor, root: int, first_step: int = 1) -> None:
    """`flat`: (elements,), the root's goes to all. The far half of the tree first: it has the longer way to go."""
    n = len(peers)
    place = (peers.me - root) % n  # in the tree, where the root is 0
    for step in range(steps(n)):
        distance = 2 ** (steps(n) - 1 - step)
        with label(step=first_step + step):
            if place % (2 * distance) == 0 and place + distance < n:
                peers.exchange(send=[(flat, (peers.me + distance) % n)]).wait()
            elif place % (2 * distance) == distance:
                peers.exchange(receive=[(flat, (peers.me - distance) % n)]).wait()


def reduce(peers: Peers, flat: torch.Tensor, root: int, reduction: Reduction, first_step: int = 1) -> None:
    """`flat`: (elements,), reduced into the root's; on the way it is used up on the others."""
    n = len(peers)
    place = (peers.me - root) % n
    room = torch.empty_like(flat)
    for step in range(steps(n)):
        distance = 2**step
        with label(step=first_step + step):
            if place % (2 * distance) == distance:
                peers.exchange(send=[(flat, (peers.me - distance) % n)]).wait()
            elif place % (2 * distance) == 0 and place + distance < n:
                peers.exchange(receive=[(room, (peers.me + distance) % n)]).wait()
                theirs = min(distance, n - place - distance)  # the last branch may be cut short
                reduction(flat, room, (distance, theirs))


def all_reduce(peers: Peers, flat: torch.Tensor, reduction: Reduction) -> None:
    """Up the tree to rank 0, and down again."""
    reduce(peers, flat, 0, reduction)
    broadcast(peers, flat, 0, first_step=steps(len(peers)) + 1)


def barrier(peers: Peers, device: torch.device) -> None:
    """Nobody leaves before everybody came: an all-reduce of one byte."""
    all_reduce(peers, torch.zeros(1, dtype=torch.uint8, device=device), Reduction("max", torch.uint8))
