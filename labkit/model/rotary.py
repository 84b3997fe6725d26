"""Rotary positions: each pair of elements of a query or key is turned by an angle that grows with its position.

The product of a turned query and a turned key depends on how far apart they stand, not on where.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), equations 14, 15 and 34; the
base 500,000 is Llama 3's (Grattafiori et al. 2024, section 3.2).
"""

from __future__ import annotations

import torch

from labkit.model.norm import widen

#: cos and sin of the angles, (s, d/2) or (b, s, d/2) each.
Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(positions: torch.Tensor, head_size: int, dtype: torch.dtype, base: float = 500_000.0) -> Rotation:
    """The angles of all positions: pair i at position p is turned by p · base^(−2i/d).

    Args:
        positions: (s,) or (b, s), whole numbers.
        head_size: d.
        dtype: The model's; angles are in fp32 at least, since 16 bits cannot tell position 2048 from 2049.
    """
    exact = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(0, head_size, 2, device=positions.device, dtype=exact)  # (d/2,)
    angles = positions.unsqueeze(-1) * base ** (-pairs / head_size)  # (s, d/2) or (b, s, d/2)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Turn neighbours (x₀, x₁), (x₂, x₃), …

    Backward turns by the opposite angle, so it keeps the angles, which all layers share, and nothing of x.

    Args:
        x: (b, s, heads, d).
    """
    cos, sin = (part.unsqueeze(-2) for part in by)  # (s, 1, d/2): the same for all heads
    first, second = widen(x).unflatten(-1, (-1, 2)).unbind(-1)  # (b, s, heads, d/2)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)
