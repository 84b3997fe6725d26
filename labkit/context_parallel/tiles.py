"""Attention a tile at a time: the s×s matrix is never whole.

The softmax of a row needs the row's largest score and its sum. Both can be had in pieces: seen so far are the largest
score m, the sum l of exp(score − m), and the weighted values o. A new tile raises m to m'; what was summed before then
shrinks by exp(m − m').

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3; Dao et al. 2022,
"FlashAttention", algorithms 1 (forward) and 4 (backward).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass
class Traffic:
    """What tiles moved between a small fast memory and the large slow one, in bytes, and how many were computed."""

    read: int = 0
    written: int = 0
    tiles: int = 0


_counting: ContextVar[Traffic | None] = ContextVar("labkit_traffic", default=None)


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Inside, tiles count what a GPU would read from and write to its slow memory.

    >>> q = torch.zeros(1, 1, 8, 4)
    >>> with count_traffic() as traffic:
    ...     _ = attend(q, q, q, 1.0, None, None, tile=4)
    >>> traffic.tiles, traffic.read                 # each of two query tiles once, with all keys and values
    (4, 640)
    """
    traffic = Traffic()
    token = _counting.set(traffic)
    try:
        yield traffic
    finally:
        _counting.reset(token)


def _count(read: tuple[torch.Tensor, ...] = (), written: tuple[torch.Tensor, ...] = (), tiles: int = 0) -> None:
    if (traffic := _counting.get()) is not None:
        traffic.read += sum(t.nbytes for t in read)
        traffic.written += sum(t.nbytes for t in written)
        traffic.tiles += tiles


Positions = torch.Tensor | None


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, q_at: Positions, k_at: Positions, tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale·qkᵀ)·v, tile by tile.

    Args:
        q: (b, g, r, s, d): r query heads share one of g key heads.
        k, v: (b, g, 1, t, d).
        scale: Of the scores.
        q_at, k_at: (s), (t), where each token stands; a token sees those that do not stand after it. ``None``: it
            sees all.
        tile: Rows and columns of a tile.

    Returns:
        (b, g, r, s, d), and log Σ exp(score) of each row, (b, g, r, s, 1); a row that sees nothing has 0 and −∞.
    """
    out, log_sum = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), float("-inf"))
    for rows in _cut(q.shape[-2], tile):
        q_tile = q[..., rows, :]
        most, total, summed = log_sum[..., rows, :], log_sum[..., rows, :].exp(), torch.zeros_like(q_tile)
        _count(read=(q_tile,))
        for columns in _cut(k.shape[-2], tile):
            scores = _scores(q_tile, k[..., columns, :], scale, _at(q_at, rows), _at(k_at, columns))
            if scores is None:
                continue
            _count(read=(k[..., columns, :], v[..., columns, :]), tiles=1)
            higher = torch.maximum(most, scores.amax(-1, keepdim=True))  # m'
            safe = higher.masked_fill(higher == float("-inf"), 0.0)
            weights, shrink = (scores - safe).exp(), (most - safe).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            summed = summed * shrink + weights @ v[..., columns, :]
            most = higher
        out[..., rows, :] = summed / total.masked_fill(total == 0, 1.0)
        log_sum[..., rows, :] = most + total.log()
        _count(written=(out[..., rows, :], log_sum[..., rows, :]))
    return out, log_sum


def attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, log_sum: torch.Tensor, delta: torch.Tensor,
    scale: float, q_at: Positions, k_at: Positions, tile: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v; the probabilities are made again, tile by tile, from the scores and `log_sum`.

    Args:
        grad: Of the output, (b, g, r, s, d).
        log_sum: Of each row over *all* its keys, (b, g, r, s, 1), also where k and v are a part of them.
        delta: Σ grad·output of each row, (b, g, r, s, 1).
        q, k, v, scale, q_at, k_at, tile: As in `attend`.
    """
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for columns in _cut(k.shape[-2], tile):
        k_tile, v_tile = k[..., columns, :], v[..., columns, :]
        _count(read=(k_tile, v_tile))
        for rows in _cut(q.shape[-2], tile):
            q_tile, grad_tile = q[..., rows, :], grad[..., rows, :]
            scores = _scores(q_tile, k_tile, scale, _at(q_at, rows), _at(k_at, columns))
            if scores is None:
                continue
            _count(read=(q_tile, grad_tile, grad_q[..., rows, :]), written=(grad_q[..., rows, :],), tiles=1)
            weights = (scores - log_sum[..., rows, :]).exp()  # the probabilities
            slope = weights * (grad_tile @ v_tile.transpose(-2, -1) - delta[..., rows, :]) * scale
            grad_q[..., rows, :] += slope @ k_tile
            grad_k[..., columns, :] += (slope.transpose(-2, -1) @ q_tile).sum(2, keepdim=True)
            grad_v[..., columns, :] += (weights.transpose(-2, -1) @ grad_tile).sum(2, keepdim=True)
        _count(written=(grad_k[..., columns, :], grad_v[..., columns, :]))
    return grad_q, grad_k, grad_v


def combine(
    out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, log_more: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two sets of keys, from that over each: weighted by their sums of exp(score)."""
    both = torch.logaddexp(log_sum, log_more)
    return out * (log_sum - both).exp() + more * (log_more - both).exp(), both


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, q_at: Positions, k_at: Positions) -> torch.Tensor | None:
    """Of one tile; ``None`` if nobody in it may look."""
    if q_at is None or k_at is None:
        return (q @ k.transpose(-2, -1)) * scale
    if int(k_at.min()) > int(q_at.max()):
        return None
    scores = (q @ k.transpose(-2, -1)) * scale
    if int(k_at.max()) > int(q_at.min()):
        scores = scores.masked_fill(k_at > q_at.unsqueeze(-1), float("-inf"))
    return scores


def _cut(length: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def _at(positions: Positions, which: slice) -> Positions:
    return None if positions is None else positions[which]
