"""What the tests of `labkit.context_parallel` and `show.tiles` run on ranks."""

from __future__ import annotations

from typing import Any

import torch

from labkit import context_parallel
from labkit.context_parallel import Tile


def places(order: str, tile: int, backward: bool = False) -> list[Tile]:
    """Where this rank's tiles lie, with 16 tokens a rank."""
    q = torch.zeros(1, 1, 16, 4, requires_grad=backward)
    with context_parallel.count_traffic() as traffic:
        out = context_parallel.ring_attention(q, q, q, order=order, tile=tile)
        if backward:
            out.sum().backward()
    return traffic.places


def tiled_places(length: int, tile: int, **more: Any) -> list[Tile]:
    q = torch.zeros(1, 1, length, 4)
    with context_parallel.count_traffic() as traffic:
        context_parallel.tiled_attention(q, q, q, tile=tile, **more)
    return traffic.places
