"""The mesh: every rank sends to every other one at once. One or two steps, and as few bytes as the ring.

What it needs is a network in which all pairs can talk at the same time, such as NVSwitch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labkit.collectives.peers import Peers
from labkit.collectives.reduction import Reduction
from labkit.trace import label


def all_reduce(peers: Peers, flat: torch.Tensor, reduction: Reduction) -> None:
    """Reduce-scatter, then all-gather. `flat`: (elements,), in place."""
    chunks = flat.tensor_split(len(peers))
    reduce_scatter(peers, chunks, reduction, output=chunks[peers.me])
    all_gather(peers, chunks, first_step=2)


def reduce_scatter(
    peers: Peers, chunks: Sequence[torch.Tensor], reduction: Reduction, output: torch.Tensor
) -> None:  # fmt: skip
    """Everybody sends me its copy of my chunk; reduced, it goes to `output`, which may be the chunk itself."""
    rooms = {peer: torch.empty_like(output) for peer in _from_the_left(peers)}
    with label(step=1):
        to_all = [(chunks[peer], peer) for peer in _from_the_right(peers)]
        peers.exchange(send=to_all, receive=[(room, peer) for peer, room in rooms.items()]).wait()
    output.copy_(chunks[peers.me])
    for done, room in enumerate(rooms.values(), start=1):
        reduction(output, room, (done, 1))


def all_gather(peers: Peers, chunks: Sequence[torch.Tensor], first_step: int = 1) -> None:
    """Peer i starts with ``chunks[i]``, and sends it to all."""
    with label(step=first_step, chunk=peers.me):
        to_all = [(chunks[peers.me], peer) for peer in _from_the_right(peers)]
        peers.exchange(send=to_all, receive=[(chunks[peer], peer) for peer in _from_the_left(peers)]).wait()


def all_to_all(peers: Peers, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
    """``sent[i]`` goes to peer i, ``received[i]`` comes from there."""
    received[peers.me].copy_(sent[peers.me])
    with label(step=1):
        to_all = [(sent[peer], peer) for peer in _from_the_right(peers)]
        peers.exchange(send=to_all, receive=[(received[peer], peer) for peer in _from_the_left(peers)]).wait()


def _from_the_right(peers: Peers) -> list[int]:
    """The others, each rank beginning with a different one: if all began with rank 0, they would queue at its port."""
    return [(peers.me + distance) % len(peers) for distance in range(1, len(peers))]


def _from_the_left(peers: Peers) -> list[int]:
    """The order in which messages come when everybody sends to its right first."""
    return [(peers.me - distance) % len(peers) for distance in range(1, len(peers))]
