"""The ranks that take part in an algorithm, in order, and the messages between them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

#: Tags of messages that an algorithm sends begin here, apart from a learner's own, whose tag is 0 unless they say
#: otherwise. gloo matches messages by tag; NCCL knows none and matches by order alone.
TAG = 2**20


def tag_of(call: str) -> int:
    """One tag for equal calls: ranks that ask for different ones wait for each other instead of adding to a product.

    >>> tag_of("all_reduce ring sum") == tag_of("all_reduce ring sum") != tag_of("all_reduce ring max")
    True
    """
    return TAG + zlib.crc32(call.encode()) % TAG


Message = tuple[torch.Tensor, int]


class Peers:
    """Members of a process group, numbered from 0 in the order of the algorithm: a ring's neighbours, a tree's nodes.

    Usually that is the whole group. The hierarchical algorithm takes a part of it: one node, or one rank of each.

    Attributes:
        me: This rank's number among the peers.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int] | None = None, tag: int = TAG) -> None:
        self.group, self.tag = group, tag
        self.ranks = range(dist.get_world_size(group)) if ranks is None else ranks
        self.me = self.ranks.index(dist.get_rank(group))

    def __len__(self) -> int:
        return len(self.ranks)

    def part(self, numbers: Iterable[int]) -> Peers:
        """Some of these peers, of which this rank must be one."""
        return Peers(self.group, [self.ranks[n] for n in numbers], self.tag)

    def exchange(self, send: Sequence[Message] = (), receive: Sequence[Message] = ()) -> Works:
        """Start messages, all at once, and wait for none: waiting is what can deadlock.

        Args:
            send: (tensor, to whom); receive: (tensor to fill, from whom). Empty tensors do not travel.
        """
        # Receives first: what comes then goes straight into its place.
        operations = [self._operation(dist.irecv, t, peer) for t, peer in receive if t.numel()]
        operations += [self._operation(dist.isend, t, peer) for t, peer in send if t.numel()]
        return Works(dist.batch_isend_irecv(operations) if operations else [])

    def _operation(self, kind: Any, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self.group, tag=self.tag, group_peer=self.ranks[peer])


class Works(list):
    """Handles of messages under way. `wait` waits for every one of them.

    `dist.batch_isend_irecv` returns a handle a message on gloo and one for all on NCCL, so code that waits for the
    first alone is right on NCCL and wrong on gloo.
    """

    def wait(self) -> None:
        for work in self:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self)
