"""Messages between two ranks: torch's own calls, and a batch whose `wait` waits for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.collectives import check
from labkit.collectives.peers import Works

Group = dist.ProcessGroup | None


def send(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    """Send to rank `dst` of the world; returns when `tensor` may be changed again."""
    isend(tensor, dst, group, tag).wait()


def recv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    """Fill `tensor` from rank `src` of the world, or, with ``None``, from whoever sends; returns the sender."""
    check.member(group)
    if src is not None:
        check.in_group("src", src, group)
    t = _to_fill(tensor)
    filled = t if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format)
    sender = dist.recv(filled, src, group, tag)
    if filled is not t:
        t.copy_(filled)
    return sender


def isend(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> Any:
    """Start to send. Until the handle's ``wait()`` has returned, `tensor` must not be changed."""
    check.member(group)
    check.in_group("dst", dst, group)
    return dist.isend(check.tensor("tensor", tensor, written=False).contiguous(), dst, group, tag)


def irecv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> Any:
    """Start to receive. `tensor` is filled when the handle's ``wait()`` has returned.

    Raises:
        ValueError: `tensor` is not contiguous.
    """
    check.member(group)
    if src is not None:
        check.in_group("src", src, group)
    t = _to_fill(tensor)
    if not t.is_contiguous():
        raise ValueError("irecv fills a contiguous tensor: receive into one, wait, then copy")
    return dist.irecv(t, src, group, tag)


def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> Works:
    """Start several sends and receives at once, which cannot deadlock whatever their order.

    Returns:
        The handles, a list whose own ``wait()`` waits for every one of them.
    """
    if (
        not isinstance(operations, (list, tuple))
        or not operations
        or not all(isinstance(o, dist.P2POp) for o in operations)
    ):
        raise ValueError(f"operations is {operations!r}: expected a list of torch.distributed.P2POp, at least one")
    return Works(dist.batch_isend_irecv(list(operations)))


def _to_fill(tensor: torch.Tensor) -> torch.Tensor:
    return check.tensor("tensor", tensor)
