"""The tricks: recomputation, mixed precision, clipping on any mesh, accumulation."""

from labkit.tricks.accumulate import MicroBatch, accumulate
from labkit.tricks.checkpoint import checkpoint
from labkit.tricks.norm import clip_grad_norm_, clip_pieces_, total_norm, was_clipped
from labkit.tricks.policies import checkpointed
from labkit.tricks.precision import MixedPrecision
from labkit.tricks.scaler import GradScaler
from labkit.tricks.segments import checkpoint_sequential

__all__ = [
    "GradScaler",
    "MicroBatch",
    "MixedPrecision",
    "accumulate",
    "checkpoint",
    "checkpoint_sequential",
    "checkpointed",
    "clip_grad_norm_",
    "clip_pieces_",
    "total_norm",
    "was_clipped",
]
