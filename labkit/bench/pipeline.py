"""labkit's pipeline engine beside torch's: a step, forward and backward of all micro-batches, in alternating pairs."""

from __future__ import annotations

from typing import Any

import labkit
from labkit.bench.measure import PAIRS, Spread, line, seconds

#: Schedule, ranks, stages a rank, the bar.
ROWS = (
    ("GPipe", 2, 1, "≤ 1.05"), ("GPipe", 4, 1, "≤ 1.05"), ("1F1B", 2, 1, "≤ 1.05"), ("1F1B", 4, 1, "≤ 1.05"),
    ("interleaved", 2, 2, "≤ 1.05"), ("interleaved", 4, 2, "≤ 1.05"),
)  # fmt: skip
MICRO_BATCHES, LENGTH = 8, 64


def main() -> None:
    print(f"time of a step ÷ torch.distributed.pipelining's, {PAIRS} alternating pairs: median (quartiles)")
    for name, ranks, chunks, bar in ROWS:
        pairs, off = labkit.run(in_pairs, name, chunks, ranks=ranks, timeout=300).values[0]
        ratio = Spread.of([ours / theirs for ours, theirs in pairs])
        theirs = Spread.of([1e3 * theirs for _, theirs in pairs])
        line(f"{name}, {ranks} ranks, {chunks} stages each, m = {MICRO_BATCHES}",
             f"{ratio}   torch {theirs.median:.3g} ms", bar)  # fmt: skip
        line("  gradients apart by, relative", f"{off:.1g}")


def in_pairs(name: str, chunks: int) -> tuple[list[tuple[float, float]], float]:
    """On a rank: (seconds of labkit's, of torch's), and how far apart their gradients are."""
    import torch
    import torch.distributed as dist

    from labkit import pipeline
    from labkit.model import Transformer, preset
    from labkit.pipeline.parts import cut

    ranks, rank = dist.get_world_size(), dist.get_rank()
    stages = ranks * chunks
    config = preset("tiny_gpt", hidden=128, heads=4, layers=2 * stages, positions=LENGTH, tied=False)
    schedule = {
        "GPipe": lambda: pipeline.gpipe(ranks, MICRO_BATCHES),
        "1F1B": lambda: pipeline.one_f_one_b(ranks, MICRO_BATCHES),
        "interleaved": lambda: pipeline.interleaved(ranks, MICRO_BATCHES, chunks),
    }[name]()
    mine: list[dict[int, Any]] = []
    for _ in ("ours", "theirs"):
        torch.manual_seed(0)
        parts = cut(Transformer(config), pipeline.partition([1.0] * config.layers, stages))
        mine.append({stage: parts[stage] for stage in schedule.stages_of(rank)})
    tokens = torch.randint(config.vocab, (2 * MICRO_BATCHES, LENGTH + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    engine = pipeline.PipelineEngine(mine[0], schedule, _sum_and_count)
    steps = {"ours": lambda: engine.step(inputs, targets), "theirs": _by_torch(name, mine[1], stages, inputs, targets)}

    def timed(whose: str) -> float:
        for part in mine[whose == "theirs"].values():
            part.zero_grad()
        dist.barrier()
        return seconds(lambda: (steps[whose](), dist.barrier()))

    for whose in ("ours", "theirs"):  # shapes are agreed on
        timed(whose)
    pairs = []
    for number in range(PAIRS):
        took = {whose: timed(whose) for whose in (("ours", "theirs") if number % 2 else ("theirs", "ours"))}
        pairs.append((took["ours"], took["theirs"]))
    both = [[p.grad for part in parts.values() for p in part.parameters()] for parts in mine]
    return pairs, max(((a - b).norm() / b.norm()).item() for a, b in zip(*both, strict=True))


def _sum_and_count(logits: Any, targets: Any) -> tuple[Any, int]:
    from torch.nn import functional as F

    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def _by_torch(name: str, mine: dict[int, Any], stages: int, inputs: Any, targets: Any) -> Any:
    """A step of torch's engine on the same parts."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.nn import functional as F

    made = [pipelining.PipelineStage(part, n, stages, torch.device("cpu")) for n, part in mine.items()]
    kind = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B}[name]  # fmt: skip

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    schedule = kind(made if name == "interleaved" else made[0], MICRO_BATCHES, loss_fn=loss)
    first, last = 0 in mine, stages - 1 in mine
    given = (inputs,) if first else ()
    wanted = {"target": targets, "losses": []} if last else {}
    assert dist.is_initialized()
    return lambda: schedule.step(*given, **wanted)
