"""What ranks run in the tests of labkit.tricks.checkpoint: the same with and without it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit import device, pipeline, sequence_parallel, tensor_parallel
from labkit.data_parallel import DistributedDataParallel
from labkit.model import Transformer, loss, preset
from labkit.pipeline.parts import cut
from labkit.tricks import checkpoint, checkpointed

TOLD = {
    "full": {"policy": "full"},
    "segments": {"policy": "full", "segments": 1},
    "early stop": {"policy": "full", "early_stop": True},
    "selective": {"policy": "selective"},
    "offload": {"policy": "full", "offload": True},
}


def transformer(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    size = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "positions": 16, **changes}
    return Transformer(preset("tiny_gpt", **size), dtype=torch.float64, device=device.current())


def tokens() -> torch.Tensor:
    rows = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    return rows.to(device.current())


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def in_ddp() -> list[bool]:
    """Whether the averaged gradients are equal bit for bit, and the random stream after backward."""
    found = []
    for told in ({"policy": "none"}, *TOLD.values()):
        model = checkpointed(transformer(dropout=0.5, attention_dropout=0.5), **told)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
        torch.manual_seed(5 + dist.get_rank())
        batch = tokens()
        for _ in range(2):  # the second with buckets in the order of arrival
            total, count = loss(wrapped(batch[:, :-1]), batch[:, 1:])
            (total / count).backward()
        found.append((gradients(model), torch.rand(1)))
    return [torch.equal(grads, found[0][0]) and torch.equal(after, found[0][1]) for grads, after in found[1:]]


def a_checkpoint_round_ddp() -> bool:
    """The whole wrapped module in a checkpoint: its forward runs again inside backward."""
    found = []
    for call in (lambda module, x: module(x), checkpoint):
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)))
        x = torch.ones(2, 4) * (1 + dist.get_rank())
        call(wrapped, x).square().sum().backward()
        found.append(gradients(wrapped))
    return torch.equal(*found)


def shared(how: str, attention: str, kind: str) -> bool:
    """Layers shared by a group, dropout on what is whole and on what is split, and the random stream after."""
    found = []
    for told in ({"policy": "none"}, TOLD[kind]):
        model = transformer(dropout=0.5, attention_dropout=0.5, attention=attention)
        model = (tensor_parallel if how == "tp" else sequence_parallel).parallelize(model)
        checkpointed(model, **told)
        tensor_parallel.seed(7)
        batch = torch.arange(18, device=device.current()).view(2, 9)
        total, count = tensor_parallel.loss(model(batch[:, :-1]), batch[:, 1:], 37)
        (total / count).backward()
        found.append(torch.cat([gradients(model), torch.rand(1, dtype=torch.float64, device=device.current())]))
    return torch.equal(*found)


def a_step(kind: str) -> None:
    """One step of shared layers, for the trace."""
    model = checkpointed(tensor_parallel.parallelize(transformer()), **TOLD[kind] if kind else {"policy": "none"})
    batch = torch.arange(18, device=device.current()).view(2, 9)
    total, count = tensor_parallel.loss(model(batch[:, :-1]), batch[:, 1:], 37)
    (total / count).backward()


def in_a_pipeline(schedule: pipeline.Schedule, kind: str) -> bool:
    """Each rank's part with and without; dropout follows this rank's stream."""
    found = []
    for told in ({"policy": "none"}, TOLD[kind]):
        me = dist.get_rank()
        parts = cut(transformer(layers=4, dropout=0.5), pipeline.partition([1.0] * 4, dist.get_world_size()))
        part = checkpointed(parts[me], **told)
        engine = pipeline.PipelineEngine({me: part}, schedule, loss)
        torch.manual_seed(me)
        batch = torch.arange(36, device=device.current()).view(4, 9)
        engine.step(batch[:, :-1], batch[:, 1:])
        found.append(gradients(part))
    return torch.equal(*found)


def on_a_gpu() -> tuple[list[bool], list[int]]:
    """Gradients with dropout against none, for each way; and the bytes held after forward, the first without."""
    held, found = [], []
    for told in ({"policy": "none"}, *TOLD.values()):
        torch.manual_seed(0)
        config = preset("tiny_gpt", layers=8, hidden=256, dropout=0.5, attention_dropout=0.5)
        model = checkpointed(Transformer(config, device=device.current()), **told)
        batch = torch.randint(256, (8, 65), device=device.current())
        with torch.autocast("cuda", torch.bfloat16):
            total, _ = loss(model(batch[:, :-1]), batch[:, 1:])
        held.append(device.memory()["allocated"])
        total.backward()
        found.append(torch.cat([gradients(model), torch.rand(1, device=device.current())]))
        del model, total
    return [torch.equal(other, found[0]) for other in found[1:]], held
