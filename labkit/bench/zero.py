"""labkit's ZeRO beside torch's own: a whole training step, in alternating pairs in the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import labkit
from labkit.bench.measure import PAIRS, Spread, line, seconds

#: What is compared, ranks, torch's name for it, the bar.
ROWS = (
    ("stage 1", 2, "ZeroRedundancyOptimizer + DDP", ""),
    ("stage 1", 4, "ZeroRedundancyOptimizer + DDP", "≤ 0.9"),
    ("stage 2", 4, "ZeroRedundancyOptimizer + DDP", ""),
    ("stage 3", 2, "FSDP2", ""),
    ("stage 3", 4, "FSDP2", "≤ 0.8"),
)
LENGTH, BATCH = 64, 2


def main() -> None:
    print(f"time of a step ÷ torch's, {PAIRS} alternating pairs: median (quartiles)")
    for stage, ranks, name, bar in ROWS:
        pairs, apart = labkit.run(in_pairs, stage, ranks=ranks, timeout=300).values[0]
        ratio = Spread.of([ours / theirs for ours, theirs in pairs])
        theirs = Spread.of([1e3 * theirs for _, theirs in pairs])
        line(f"{stage} ÷ {name}, {ranks} ranks", f"{ratio}   torch {theirs.median:.3g} ms", bar)
        line("  losses apart by, relative", f"{apart:.1g}")


def in_pairs(stage: str) -> tuple[list[tuple[float, float]], float]:
    """On a rank: (seconds of labkit's, of torch's), and how far apart their losses are after all steps."""
    import torch
    import torch.distributed as dist

    from labkit.model import Transformer, loss, preset

    config = preset("tiny_gpt", hidden=128, heads=4, layers=8, positions=LENGTH, tied=False)
    made = []
    for make in (_ours, _theirs):
        torch.manual_seed(0)
        made.append(make(stage, Transformer(config)))
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(config.vocab, (BATCH, LENGTH + 1))
    losses = [0.0, 0.0]

    def timed(whose: int) -> float:
        model, step = made[whose]

        def work() -> None:
            total, count = loss(model(tokens[:, :-1]), tokens[:, 1:])
            (total / count).backward()
            step()
            losses[whose] = (total / count).item()
            dist.barrier()

        dist.barrier()
        return seconds(work)

    for _ in range(2):  # the first steps allocate, and DDP makes its buckets anew
        timed(0), timed(1)
    pairs = []
    for number in range(PAIRS):
        took = {whose: timed(whose) for whose in ((0, 1) if number % 2 else (1, 0))}
        pairs.append((took[0], took[1]))
    return pairs, abs(losses[0] / losses[1] - 1)


def _ours(stage: str, model: Any) -> tuple[Any, Callable[[], None]]:
    import torch

    from labkit.zero import FullyShardedDataParallel, ShardedOptimizer

    if stage == "stage 3":
        model = FullyShardedDataParallel(model)
        return model, _step(torch.optim.AdamW(model.parameters(), lr=1e-3))
    return model, _step(ShardedOptimizer(model, torch.optim.AdamW, stage=int(stage[-1]), lr=1e-3))


def _theirs(stage: str, model: Any) -> tuple[Any, Callable[[], None]]:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    if stage == "stage 3":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, _step(torch.optim.AdamW(model.parameters(), lr=1e-3))
    wrapped = DistributedDataParallel(model)
    return wrapped, _step(ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


def _step(optimizer: Any) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step
