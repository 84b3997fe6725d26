"""The tricks: recomputation, mixed precision, clipping on any mesh, accumulation."""

from labkit.tricks.norm import clip_grad_norm_, clip_pieces_, total_norm, was_clipped

__all__ = [
    "clip_grad_norm_",
    "clip_pieces_",
    "total_norm",
    "was_clipped",
]
