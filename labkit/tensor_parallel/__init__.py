"""Tensor parallelism: one layer on several ranks.

Read in this order: `functions` (f and g), `linear` (columns, rows), `embedding` and `cross_entropy` (the vocabulary),
`seeds` (dropout), `convert` (a whole transformer).
"""

from labkit.tensor_parallel.convert import loss, parallelize
from labkit.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from labkit.tensor_parallel.embedding import VocabParallelEmbedding
from labkit.tensor_parallel.functions import copy_to_group, gather_from_group, reduce_from_group, split_to_group
from labkit.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from labkit.tensor_parallel.seeds import Streams, seed, streams

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "Streams", "VocabParallelEmbedding", "copy_to_group",
           "gather_from_group", "loss", "parallelize", "reduce_from_group", "seed", "split_to_group", "streams",
           "vocab_parallel_cross_entropy"]  # fmt: skip
