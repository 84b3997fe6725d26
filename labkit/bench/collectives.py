"""labkit's collectives beside torch's own: ratios in alternating pairs, in the same ranks over the same connections."""

from __future__ import annotations

import statistics
from typing import Any

import labkit
from labkit.bench.measure import PAIRS, Spread, line, seconds

MIB = 2**20
RANKS = 4
#: Operation, algorithm, segments, bytes of the whole tensor, the bar.
ROWS = (
    ("all_reduce", "ring", 1, 64 * MIB, "≤ 1.15"),
    ("all_reduce", "ring", 4, 64 * MIB, "≤ 1.15"),
    ("reduce_scatter", "ring", 1, 64 * MIB, "≤ 0.5"),
    ("all_gather", "ring", 1, 64 * MIB, "≤ 0.5"),
    ("reduce_scatter", "mesh", 1, MIB, ""),
    ("reduce_scatter", "ring", 1, MIB, ""),
    ("all_gather", "mesh", 1, MIB, ""),
    ("all_gather", "ring", 1, MIB, ""),
    ("reduce_scatter", "mesh", 1, 64 * MIB, ""),
    ("all_gather", "mesh", 1, 64 * MIB, ""),
    ("all_reduce", "halving_doubling", 1, 64 * MIB, ""),
    ("all_reduce", "mesh", 1, 64 * MIB, ""),
    ("all_reduce", "tree", 1, 64 * MIB, ""),
    ("all_reduce", "central", 1, 64 * MIB, ""),
    ("all_reduce", "ring", 1, 1024, ""),
    ("all_reduce", "tree", 1, 1024, ""),
    ("broadcast", "tree", 1, 64 * MIB, ""),
    ("all_to_all", "mesh", 1, 64 * MIB, ""),
)


def main() -> None:
    print(f"time ÷ that of torch's own (gloo), {RANKS} ranks, {PAIRS} alternating pairs: median (quartiles)")
    for operation, algorithm, segments, nbytes, bar in ROWS:
        size = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes} B"
        name = f"{operation} {algorithm}" + (f", {segments} segments" if segments > 1 else "")
        pairs = labkit.run(in_pairs, operation, algorithm, segments, nbytes, ranks=RANKS).values[0]
        ratio = Spread.of([ours / theirs for ours, theirs in pairs])
        native = Spread.of([1e3 * theirs for _, theirs in pairs])
        line(f"{name}, {size}", f"{ratio}   gloo {native.median:.3g} ms", bar)


def in_pairs(operation: str, algorithm: str, segments: int, nbytes: int) -> list[tuple[float, float]]:
    """On a rank: (seconds of labkit's, seconds of torch's), a pair at a time; each the median of some calls."""
    import torch
    import torch.distributed as dist

    whole, part = torch.ones(nbytes // 4), torch.ones(nbytes // 4 // dist.get_world_size())
    each = 1 if nbytes >= MIB else 20

    def timed(chosen: str) -> float:
        taken = []
        for _ in range(each):
            dist.barrier()
            taken.append(seconds(lambda: call(operation, whole, part, chosen, segments if chosen != "native" else 1)))
        return statistics.median(taken)

    timed(algorithm), timed("native")
    pairs = []
    for number in range(PAIRS):
        order = (algorithm, "native") if number % 2 else ("native", algorithm)
        took = {chosen: timed(chosen) for chosen in order}
        pairs.append((took[algorithm], took["native"]))
    return pairs


def call(operation: str, whole: Any, part: Any, algorithm: str, segments: int) -> None:
    """One collective on tensors of ones, of which a maximum is one again."""
    from labkit import collectives

    if operation == "all_reduce":
        collectives.all_reduce(whole, op="max", algorithm=algorithm, segments=segments)
    elif operation == "reduce_scatter":
        collectives.reduce_scatter(part, whole, op="max", algorithm=algorithm, segments=segments)
    elif operation == "all_gather":
        collectives.all_gather(whole, part, algorithm=algorithm, segments=segments)
    elif operation == "broadcast":
        collectives.broadcast(whole, algorithm=algorithm)
    else:
        collectives.all_to_all(whole.new_empty(whole.shape), whole, algorithm=algorithm)
