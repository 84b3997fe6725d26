"""Attention a tile at a time: the s×s matrix is never whole.

The softmax of a row needs the row's largest score and its sum. Both can be had in pieces: seen so far are the largest
score m, the sum l of exp(score − m), and the weighted values o. A new tile raises m to m'; what was summed before then
shrinks by exp(m − m').

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3; Dao et al. 2022,
"FlashAttention", algorithms 1 (forward) and 4 (backward).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from labkit.trace import current_labels


class Tile(NamedTuple):
    """Where a tile of the s×s matrix lies, in tokens, and when it was computed.

    Attributes:
        query, key: Its first row and first column, as positions in the sequence.
        rows, columns: Its size.
        step: The label `step` in force, such as the ring's; ``None`` where there is none.
        phase: ``"forward"`` or ``"backward"``.
    """

    query: int
    key: int
    rows: int
    columns: int
    step: int | None = None
    phase: str = "forward"


@dataclass
class Traffic:
    """What tiles moved between a small fast memory and the large slow one, in bytes, and which were computed.

    Attributes:
        read, written: Bytes from and to the slow memory.
        tiles: How many tiles were computed.
        places: Where they lie, in the order in which they were computed; `labkit.show.tiles` draws them.
    """

    read: int = 0
    written: int = 0
    tiles: int = 0
    places: list[Tile] = field(default_factory=list)


#: Who counts, the innermost last. Not a context variable: on CUDA backward runs in a thread of its own.
_counting: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Inside, tiles count what a GPU would read from and write to its slow memory, and note where they lie.

    >>> q, at = torch.zeros(1, 1, 1, 8, 4), [range(8)]
    >>> with count_traffic() as traffic:
    ...     _ = attend(q, q, q, 1.0, at, at, tile=4, causal=False)
    >>> traffic.tiles, traffic.read                 # each of two query tiles once, with all keys and values
    (4, 640)
    >>> [(tile.query, tile.key) for tile in traffic.places]
    [(0, 0), (0, 4), (4, 0), (4, 4)]
    """
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.pop()


def _count(read: Sequence[torch.Tensor] = (), written: Sequence[torch.Tensor] = ()) -> None:
    if _counting:
        _counting[-1].read += sum(t.nbytes for t in read)
        _counting[-1].written += sum(t.nbytes for t in written)


def _note(rows: Cut, columns: Cut, phase: str) -> None:
    """A tile has been computed."""
    if _counting:
        size = len(rows.at), len(columns.at)
        place = Tile(rows.at.start, columns.at.start, *size, current_labels().get("step"), phase)
        _counting[-1].tiles += 1
        _counting[-1].places.append(place)


#: Where the tokens of a tensor stand in the whole sequence: runs of neighbours, in the order of the tensor.
Positions = Sequence[range]


class Cut(NamedTuple):
    """Neighbouring tokens: where they lie in their tensor, and where they stand in the sequence."""

    inside: slice
    at: range


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, q_at: Positions, k_at: Positions, tile: int,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale·qkᵀ)·v, tile by tile.

    Args:
        q: (b, g, r, s, d): r query heads share one of g key heads.
        k, v: (b, g, 1, t, d).
        scale: Of the scores.
        q_at, k_at: Where the s and the t tokens stand; no tile lies in two of their runs.
        tile: Rows and columns of a tile, at most.
        causal: A token sees those that do not stand after it; else it sees all.

    Returns:
        (b, g, r, s, d), and log Σ exp(score) of each row, (b, g, r, s, 1); a row that sees nothing has 0 and −∞.
    """
    out, log_sum = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), float("-inf"))
    for rows in _cut(q_at, tile):
        q_tile, mine = q[..., rows.inside, :], (..., rows.inside, slice(None))
        most, total, summed = log_sum[mine], log_sum[mine].exp(), torch.zeros_like(q_tile)
        _count(read=[q_tile])
        for columns in _cut(k_at, tile):
            if causal and _unseen(rows, columns):
                continue
            k_tile, v_tile = k[..., columns.inside, :], v[..., columns.inside, :]
            scores = _scores(q_tile, k_tile, scale, rows, columns, causal)
            _count(read=[k_tile, v_tile])
            _note(rows, columns, "forward")
            higher = torch.maximum(most, scores.amax(-1, keepdim=True))  # m'
            safe = higher.masked_fill(higher == float("-inf"), 0.0)
            weights, shrink = (scores - safe).exp(), (most - safe).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            summed = summed * shrink + weights @ v_tile
            most = higher
        out[mine] = summed / total.masked_fill(total == 0, 1.0)
        log_sum[mine] = most + total.log()
        _count(written=[out[mine], log_sum[mine]])
    return out, log_sum


def attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, log_sum: torch.Tensor, delta: torch.Tensor,
    scale: float, q_at: Positions, k_at: Positions, tile: int, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v; the probabilities are made again, tile by tile, from the scores and `log_sum`.

    Args:
        grad: Of the output, (b, g, r, s, d).
        log_sum: Of each row over *all* its keys, (b, g, r, s, 1), also where k and v are a part of them.
        delta: Σ grad·output of each row, (b, g, r, s, 1).
        q, k, v, scale, q_at, k_at, tile, causal: As in `attend`.
    """
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for columns in _cut(k_at, tile):
        k_tile, v_tile = k[..., columns.inside, :], v[..., columns.inside, :]
        of_k, of_v = grad_k[..., columns.inside, :], grad_v[..., columns.inside, :]
        _count(read=[k_tile, v_tile])
        for rows in _cut(q_at, tile):
            if causal and _unseen(rows, columns):
                continue
            q_tile, grad_tile, of_q = (x[..., rows.inside, :] for x in (q, grad, grad_q))
            scores = _scores(q_tile, k_tile, scale, rows, columns, causal)
            _count(read=[q_tile, grad_tile, of_q], written=[of_q])
            _note(rows, columns, "backward")
            weights = (scores - log_sum[..., rows.inside, :]).exp()  # the probabilities
            slope = weights * (grad_tile @ v_tile.transpose(-2, -1) - delta[..., rows.inside, :]) * scale
            of_q += slope @ k_tile
            of_k += (slope.transpose(-2, -1) @ q_tile).sum(2, keepdim=True)
            of_v += (weights.transpose(-2, -1) @ grad_tile).sum(2, keepdim=True)
        _count(written=[of_k, of_v])
    return grad_q, grad_k, grad_v


def combine(
    out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, log_more: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two sets of keys, from that over each: weighted by their sums of exp(score)."""
    both = torch.logaddexp(log_sum, log_more)
    safe = both.masked_fill(both == float("-inf"), 0.0)  # a row that has seen nothing yet
    return out * (log_sum - safe).exp() + more * (log_more - safe).exp(), both


def _unseen(rows: Cut, columns: Cut) -> bool:
    """Whether every key of a tile stands after all its queries, so that it need not be computed."""
    return columns.at.start > rows.at[-1]


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, rows: Cut, columns: Cut, causal: bool) -> torch.Tensor:
    """Of one tile, −∞ where a key stands after its query."""
    scores = (q @ k.transpose(-2, -1)) * scale
    if causal and columns.at[-1] > rows.at.start:
        q_at, k_at = (torch.arange(at.start, at.stop, device=q.device) for at in (rows.at, columns.at))
        scores = scores.masked_fill(k_at > q_at.unsqueeze(-1), float("-inf"))
    return scores


def _cut(at: Positions, tile: int) -> Iterator[Cut]:
    """
    >>> [(cut.inside.start, cut.at) for cut in _cut([range(4), range(12, 15)], tile=3)]
    [(0, range(0, 3)), (3, range(3, 4)), (4, range(12, 15))]
    """
    first = 0
    for run in at:
        for start in range(0, len(run), tile):
            part = run[start : start + tile]
            yield Cut(slice(first, first + len(part)), part)
            first += len(part)
