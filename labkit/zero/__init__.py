"""ZeRO: what data parallelism keeps N times over, each rank keeps an Nth of."""

from labkit.zero.distributed import DistributedOptimizer
from labkit.zero.fully_sharded import FullyShardedDataParallel
from labkit.zero.saving import consolidate, latest, load, save
from labkit.zero.sharded import Shard, ShardedOptimizer
