"""What the tests of pipeline parallelism run on ranks; the reference is one process."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from labkit import device, pipeline
from labkit.model import Transformer, preset
from labkit.model import loss as mean_loss
from labkit.pipeline import engine as engines
from labkit.pipeline.parts import cut
from labkit.pipeline.wires import BatchedWires
from labkit.train import Mesh

VOCAB = 11


def transformer(name: str, layers: int, **changes: Any) -> Transformer:
    torch.manual_seed(0)
    size = {"layers": layers, "hidden": 8, "heads": 2, "vocab": VOCAB, "positions": 8, **changes}
    return Transformer(preset(name, **size), dtype=torch.float64, device=device.current())


def batch(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, of which every row ignores another number."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, 7), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, : row % 5] = -100
    here = device.current()
    return tokens[:, :-1].to(here), targets.to(here)


def hosted(schedule: pipeline.Schedule, parts: list, rank: int) -> dict[int, Any]:
    return {stage: parts[stage] for stage in schedule.stages_of(rank)}


def worst(pairs: Any) -> float:
    found = 0.0
    for have, want in pairs:
        assert (have is None) == (want is None)
        if want is not None:
            found = max(found, ((have - want).norm() / want.norm().clamp(min=1e-30)).item())
    return found


def by_one_process(model: Transformer, batches: list) -> torch.Tensor:
    sums = [mean_loss(model(tokens), targets) for tokens, targets in batches]
    total = sum(s for s, _ in sums) / sum(c for _, c in sums)
    total.backward()
    return total.detach()


def against_one_process(
    schedule: pipeline.Schedule, layers: int, rows: int, name: str = "tiny_gpt", dp: int = 1, steps: int = 2,
    batched: bool = False,
) -> float:  # fmt: skip
    """Some steps whose gradients add up, then an evaluation: the largest relative difference to one process."""
    with batches_of_messages() if batched else nullcontext():
        return _against_one_process(schedule, layers, rows, name, dp, steps)


@contextmanager
def batches_of_messages() -> Any:
    """Inside, messages travel as they do over NCCL."""
    own, engines.Wires = engines.Wires, BatchedWires
    try:
        yield
    finally:
        engines.Wires = own


def _against_one_process(schedule: pipeline.Schedule, layers: int, rows: int, name: str, dp: int, steps: int) -> float:
    mesh = Mesh(dp=dp, pp=schedule.ranks)
    place = mesh.place(dist.get_rank())
    reference = transformer(name, layers)
    parts = cut(copy.deepcopy(reference), pipeline.partition([1.0] * layers, schedule.stages))
    mine = hosted(schedule, parts, place["pp"])
    replicas = mesh.group("dp") if dp > 1 else None
    engine = pipeline.PipelineEngine(mine, schedule, mean_loss, mesh.group("pp"), replicas)
    off = []
    for step in range(steps):
        batches = [batch(rows, seed=10 * step + replica) for replica in range(dp)]
        want = by_one_process(reference, batches)
        have = engine.step(*batches[place["dp"]])
        off.append(abs(have - want) / want)
    expected = dict(_by_part(reference, schedule, layers))
    for stage, part in mine.items():
        off.append(worst((p.grad, expected[stage, n].grad) for n, p in part.named_parameters()))
    with torch.no_grad():
        sums = [mean_loss(reference(t), y) for t, y in batches]
        want = sum(s for s, _ in sums) / sum(c for _, c in sums)
    off.append(abs(engine.evaluate(*batches[place["dp"]]) - want) / want)
    return max(float(o) for o in off)


def _by_part(model: Transformer, schedule: pipeline.Schedule, layers: int) -> Any:
    """The reference's own parameters by stage and name; a tied head is the embedding."""
    own = {}
    tied = model.head.weight is model.token_embedding.weight
    shared = model.token_embedding.weight
    for stage, part in enumerate(cut(model, pipeline.partition([1.0] * layers, schedule.stages))):
        own |= {(stage, name): param for name, param in part.named_parameters()}
    if tied:
        own = {key: shared if key[1] == "head.weight" else param for key, param in own.items()}
    return own


def tied_after_training(steps: int) -> tuple[Any, Any]:
    """The embedding and the head of a tied model on the first and last of the ranks, after some steps."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    schedule = pipeline.one_f_one_b(ranks, 3)
    part = cut(transformer("tiny_gpt", ranks), pipeline.partition([1.0] * ranks, ranks))[me]
    engine = pipeline.PipelineEngine({me: part}, schedule, mean_loss)
    optimizer = torch.optim.AdamW(part.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        engine.step(*batch(5, seed=step))
        optimizer.step()
    return (part.token_embedding.weight.detach() if me == 0 else None,
            part.head.weight.detach() if me == ranks - 1 else None)  # fmt: skip
