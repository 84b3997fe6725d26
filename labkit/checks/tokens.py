"""What exercises of chapter 05 hand to a learner's function: a layer, attention to some keys, scores in tiles."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

WIDTH, FFN = 4, 12


class Layer(torch.nn.Module):
    """What stands round the pair: a norm before it, and an MLP between, whole or a rank's share of it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Parameter(torch.randn(FFN, WIDTH, generator=generator))
        self.down = torch.nn.Parameter(torch.randn(WIDTH, FFN, generator=generator))

    def share(self, rank: int, ranks: int) -> Layer:
        self.up = torch.nn.Parameter(self.up.detach().chunk(ranks)[rank])
        self.down = torch.nn.Parameter(self.down.detach().chunk(ranks, dim=1)[rank])
        return self

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x, self.up)), self.down)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of tokens to some keys: softmax(qkᵀ/√d)·v, (tokens, d), and log Σ exp(score) of each, (tokens, 1).

    Args:
        q: (tokens, d).
        k, v: (keys, d).
    """
    k, v = k.to(q.dtype), v.to(q.dtype)  # whoever looks on sees that they are read
    scores = q @ k.T * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1, keepdim=True)


class Attending:
    """`attend`, as a learner is given it; it notes to how many keys at once."""

    def __init__(self) -> None:
        self.largest = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.largest = max(self.largest, len(k))
        return attend(q, k, v)


#: What the tiles of a row of scores are like.
PLAIN, LARGE, MASKED, MANY = range(4)


def tiles(count: int, kind: int = PLAIN) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scores, (rows, n), and values, (n, d), of one tile after the other; each is made when it is asked for.

    Args:
        count: Tiles.
        kind: ``LARGE``: scores in the thousands. ``MASKED``: row 0 sees none of the first tile's keys, row 1 none of
            the last one's. ``MANY``: tiles of 64 rows and 64 keys.
    """
    rows, keys, width = (64, 64, 8) if kind == MANY else (3, 2, 4)
    generator = torch.Generator().manual_seed(3)
    for number in range(count):
        scores = torch.randn(rows, keys, generator=generator).mul_(1000.0 if kind == LARGE else 1.0)
        if kind == MASKED:
            scores[0 if number == 0 else 1, 0 if number in (0, count - 1) else 1 :] = float("-inf")
        yield scores, torch.randint(-9, 10, (keys, width), generator=generator).float()
