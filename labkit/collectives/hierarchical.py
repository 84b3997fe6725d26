"""Two levels: inside a node, between nodes, inside again.

Links inside a node are ten to a hundred times as fast as those between nodes, so the bytes that leave a node count. A
reduce-scatter inside leaves every rank a chunk; each reduces its chunk with the ranks of other nodes that hold the same
one; an all-gather inside. Of D bytes a rank sends 2(M−1)/M · D/m between M nodes of m ranks, instead of the 2D that a
ring through all ranks sends over the one link that leaves the node.

Source: Jia et al., "Highly scalable deep learning training system with mixed-precision" (2018), section 3.3; Goyal et
al., "Accurate, large minibatch SGD" (2017), section 4.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from labkit.collectives import ring
from labkit.collectives.peers import Peers
from labkit.collectives.reduction import Reduction


def all_reduce(peers: Peers, flat: torch.Tensor, reduction: Reduction, node_size: int, segments: int = 1) -> None:
    """`flat`: (elements,), in place.

    Args:
        node_size: Ranks of a node; peers 0 … node_size−1 are the first. The last node may have fewer, whose ranks then
            hold several chunks each.
    """
    nodes = [range(at, min(at + node_size, len(peers))) for at in range(0, len(peers), node_size)]
    mine = peers.me // node_size
    inside = peers.part(nodes[mine])
    chunks = flat.tensor_split(len(nodes[0]))
    held = [_held(len(nodes[0]), len(node)) for node in nodes]
    pieces = _pieces(flat, chunks, held[mine])

    ring.reduce_scatter(inside, pieces, reduction, segments)
    step = len(inside)
    for chunk in held[mine][inside.me]:
        holders = [_holder(node, of_node, chunk) for node, of_node in zip(nodes, held, strict=True)]
        between = peers.part(holders)
        ring.all_reduce(between, chunks[chunk], reduction, segments, [len(node) for node in nodes], step)
        step += 2 * (len(nodes) - 1)
    ring.all_gather(inside, pieces, segments, step)


def _held(chunks: int, members: int) -> list[range]:
    """Which chunks each member of a node holds after the reduce-scatter inside.

    >>> _held(4, 4), _held(4, 3)
    ([range(0, 1), range(1, 2), range(2, 3), range(3, 4)], [range(0, 2), range(2, 3), range(3, 4)])
    """
    size, larger = divmod(chunks, members)
    starts = [n * size + min(n, larger) for n in range(members + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def _pieces(flat: torch.Tensor, chunks: tuple[torch.Tensor, ...], held: list[range]) -> list[torch.Tensor]:
    """The chunks of each member as one piece: they lie side by side."""
    sizes = [sum(chunks[c].numel() for c in of_member) for of_member in held]
    return list(flat.split(sizes))


def _holder(node: range, held: list[range], chunk: int) -> int:
    """The peer of this node that holds the chunk."""
    return next(peer for peer, of_member in zip(node, held, strict=True) if chunk in of_member)
