"""Sequence parallelism: what tensor parallelism leaves whole on every rank, split along the tokens.

Read in this order: `functions` (the pair that replaces f and g), `convert` (a whole transformer).
"""

from labkit.sequence_parallel.convert import parallelize, reduce_partial_gradients
from labkit.sequence_parallel.functions import gather_from_sequence, reduce_scatter_to_sequence, scatter_to_sequence

__all__ = ["gather_from_sequence", "parallelize", "reduce_partial_gradients", "reduce_scatter_to_sequence",
           "scatter_to_sequence"]  # fmt: skip
