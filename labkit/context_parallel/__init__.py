"""Long sequences: attention in tiles, on one rank, and round a ring of ranks.

Read in this order: `tiles` (softmax in pieces), `tiled` (on one device), `ring` (keys and values go round).
"""

from labkit.context_parallel.ring import contiguous, ring_attention, zigzag
from labkit.context_parallel.tiled import tiled_attention
from labkit.context_parallel.tiles import Tile, Traffic, combine, count_traffic

__all__ = ["Tile", "Traffic", "combine", "contiguous", "count_traffic", "ring_attention", "tiled_attention", "zigzag"]
