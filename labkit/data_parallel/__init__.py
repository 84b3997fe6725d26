"""Data parallelism: the same model on every rank, a batch for each, one mean of gradients.

Read in this order: `naive` (ten lines, slow), `buckets` (what travels together), `reducer` (when it leaves), `wrapper`
(what the user sees).
"""

from labkit.data_parallel.batches import seed_apart, stop_together, token_mean
from labkit.data_parallel.buckets import Bucket, assign
from labkit.data_parallel.hooks import average, compressed_bf16
from labkit.data_parallel.naive import average_gradients
from labkit.data_parallel.wrapper import DistributedDataParallel, is_averaged

__all__ = ["Bucket", "DistributedDataParallel", "assign", "average", "average_gradients", "compressed_bf16",
           "is_averaged", "seed_apart", "stop_together", "token_mean"]  # fmt: skip
