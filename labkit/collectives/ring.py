"""The ring: every rank sends to its right and receives from its left, at every step.

A tensor is cut into N chunks, one a rank. N−1 steps of reduce-scatter leave chunk i, reduced, on rank i; N−1 steps of
all-gather pass the finished chunks round. Both together are an all-reduce. Each link carries one chunk a step, so a
rank sends 2(N−1)/N of the tensor however many ranks there are.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labkit.collectives.peers import Peers, Works
from labkit.collectives.reduction import Reduction
from labkit.trace import label


def all_reduce(
    peers: Peers, flat: torch.Tensor, reduction: Reduction, segments: int = 1, parts: Sequence[int] | None = None,
    first_step: int = 1,
) -> None:  # fmt: skip
    """Reduce-scatter, then all-gather. `flat`: (elements,), in place."""
    chunks = flat.tensor_split(len(peers))
    reduce_scatter(peers, chunks, reduction, segments, parts, first_step)
    all_gather(peers, chunks, segments, first_step + len(peers) - 1)


def reduce_scatter(
    peers: Peers, chunks: Sequence[torch.Tensor], reduction: Reduction, segments: int = 1,
    parts: Sequence[int] | None = None, first_step: int = 1, output: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Afterwards ``chunks[me]`` is reduced over all peers; the others hold what is half done.

    Rank r starts with chunk r−1, not r: a chunk that goes once round is finished where it would be sent next, and so
    chunk r is finished on rank r, as torch wants it.

    Args:
        chunks: One a peer, (elements of that chunk,) each.
        segments: Each chunk travels in so many messages: while one is added, others are under way.
        parts: How many ranks' values each peer has reduced already; one each unless the algorithm has levels.
        output: Where my chunk is to end, (elements,); then all chunks have that size, and stay as they are.
    """
    me, n = peers.me, len(peers)
    parts = [1] * n if parts is None else parts
    right, left = (me + 1) % n, (me - 1) % n
    pieces = [chunk.tensor_split(segments) for chunk in chunks]
    room = torch.empty_like(max(chunks, key=torch.Tensor.numel))
    rooms = [t.tensor_split(segments) for t in (room if output is None else output, room)]
    under_way = [Works() for _ in range(segments)]

    def landing(chunk: int, segment: int, step: int) -> torch.Tensor:
        """What comes in one step and is passed on in the next takes turns between two rooms; the last is `output`."""
        return rooms[(n - 1 - step) % 2][segment][: pieces[chunk][segment].numel()]

    def reduced(chunk: int, segment: int, step: int) -> torch.Tensor:
        """Ours and what came in this step, which covers the nearest peers on the left, `step` of them."""
        under_way[segment].wait()
        ours, came = pieces[chunk][segment], landing(chunk, segment, step)
        covered = sum(parts[(me - k) % n] for k in range(1, step + 1))
        if output is None:
            reduction(ours, came, (parts[me], covered))
            return ours
        reduction(came, ours, (covered, parts[me]))
        return came

    for step in range(1, n):
        outgoing, incoming = (me - step) % n, (me - step - 1) % n
        with label(step=first_step + step - 1, chunk=outgoing):
            for segment in range(segments):
                piece = pieces[outgoing][segment] if step == 1 else reduced(outgoing, segment, step - 1)
                into = landing(incoming, segment, step)
                under_way[segment] = peers.exchange(send=[(piece, right)], receive=[(into, left)])
    if n > 1:
        for segment in range(segments):
            reduced(me, segment, n - 1)
    elif output is not None:
        output.copy_(chunks[0])


def all_gather(peers: Peers, chunks: Sequence[torch.Tensor], segments: int = 1, first_step: int = 1) -> None:
    """Peer i starts with ``chunks[i]``; afterwards all have all. Received straight into place."""
    me, n = peers.me, len(peers)
    right, left = (me + 1) % n, (me - 1) % n
    pieces = [chunk.tensor_split(segments) for chunk in chunks]
    under_way = [Works() for _ in range(segments)]
    for step in range(1, n):
        outgoing, incoming = (me - step + 1) % n, (me - step) % n
        with label(step=first_step + step - 1, chunk=outgoing):
            for segment, piece in enumerate(pieces[outgoing]):
                under_way[segment].wait()  # it came a step ago
                landing = pieces[incoming][segment]
                under_way[segment] = peers.exchange(send=[(piece, right)], receive=[(landing, left)])
    for works in under_way:
        works.wait()
