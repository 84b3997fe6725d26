"""labkit's data parallelism beside torch's: a training step's forward and backward, in alternating pairs."""

from __future__ import annotations

import labkit
from labkit.bench.measure import PAIRS, Spread, line, seconds

#: Ranks, MiB of a bucket, the bar.
ROWS = ((2, 1, "≤ 1.05"), (4, 1, "≤ 1.05"), (4, 25, ""))


def main() -> None:
    print(
        f"time of forward and backward ÷ torch's DistributedDataParallel, {PAIRS} alternating pairs: median (quartiles)"
    )
    for ranks, cap, bar in ROWS:
        pairs = labkit.run(in_pairs, cap, ranks=ranks, timeout=300).values[0]
        ratio = Spread.of([ours / theirs for ours, theirs in pairs])
        theirs = Spread.of([1e3 * theirs for _, theirs in pairs])
        line(
            f"DistributedDataParallel, {ranks} ranks, {cap} MiB buckets", f"{ratio}   torch {theirs.median:.3g} ms", bar
        )


def in_pairs(cap: float, steps: int = 3) -> list[tuple[float, float]]:
    """On a rank: (seconds of labkit's, seconds of torch's) for some steps of a model of 3.2 million parameters."""
    import torch
    import torch.distributed as dist

    from labkit.data_parallel import DistributedDataParallel
    from labkit.model import Transformer, loss, preset

    config = preset("tiny_gpt", hidden=256, heads=4, layers=4)
    tokens = torch.randint(256, (2, 33))
    wrapped = {}
    for name in ("ours", "theirs"):
        torch.manual_seed(0)
        module = Transformer(config)
        wrapped[name] = (
            DistributedDataParallel(module, bucket_cap_mb=cap) if name == "ours"
            else torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        )  # fmt: skip

    def step(name: str) -> None:
        for _ in range(steps):
            wrapped[name].zero_grad()
            total, count = loss(wrapped[name](tokens[:, :-1]), tokens[:, 1:])
            (total / count).backward()

    def timed(name: str) -> float:
        dist.barrier()
        return seconds(lambda: step(name))

    for name in wrapped:  # buckets are refilled after the first backward
        timed(name)
    pairs = []
    for number in range(PAIRS):
        took = {name: timed(name) for name in (("ours", "theirs") if number % 2 else ("theirs", "ours"))}
        pairs.append((took["ours"], took["theirs"]))
    return pairs
