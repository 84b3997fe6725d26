"""The centre: one rank deals with all others. The simplest way, and its root sends and receives (N−1) whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labkit.collectives.peers import Peers
from labkit.collectives.reduction import Reduction
from labkit.trace import label


def broadcast(peers: Peers, flat: torch.Tensor, root: int, first_step: int = 1) -> None:
    """`flat`: (elements,), the root's goes to all."""
    with label(step=first_step):
        if peers.me == root:
            peers.exchange(send=[(flat, peer) for peer in _others(peers)]).wait()
        else:
            peers.exchange(receive=[(flat, root)]).wait()


def reduce(peers: Peers, flat: torch.Tensor, root: int, reduction: Reduction) -> None:
    """`flat`: (elements,), reduced into the root's, in the order of the ranks."""
    with label(step=1):
        if peers.me != root:
            peers.exchange(send=[(flat, root)]).wait()
            return
        rooms = {peer: torch.empty_like(flat) for peer in _others(peers)}
        peers.exchange(receive=[(room, peer) for peer, room in rooms.items()]).wait()
    for done, room in enumerate(rooms.values(), start=1):
        reduction(flat, room, (done, 1))


def all_reduce(peers: Peers, flat: torch.Tensor, reduction: Reduction) -> None:
    """All to rank 0, which adds them up and sends the result back."""
    reduce(peers, flat, 0, reduction)
    broadcast(peers, flat, 0, first_step=2)


def scatter(peers: Peers, mine: torch.Tensor, all_parts: Sequence[torch.Tensor] | None, root: int) -> None:
    """Each peer gets its own part of what the root has. `all_parts` is ``None`` but on the root."""
    with label(step=1):
        if all_parts is None:
            peers.exchange(receive=[(mine, root)]).wait()
        else:
            peers.exchange(send=[(all_parts[peer], peer) for peer in _others(peers)]).wait()
            mine.copy_(all_parts[root])  # now: it may be the memory of another part


def gather(peers: Peers, mine: torch.Tensor, all_parts: Sequence[torch.Tensor] | None, root: int) -> None:
    """The root gets everybody's part. `all_parts` is ``None`` but on the root."""
    with label(step=1):
        if all_parts is None:
            peers.exchange(send=[(mine, root)]).wait()
        else:
            all_parts[root].copy_(mine)
            peers.exchange(receive=[(all_parts[peer], peer) for peer in _others(peers)]).wait()


def _others(peers: Peers) -> list[int]:
    return [peer for peer in range(len(peers)) if peer != peers.me]
