"""All parts in one step, beside a loop of one process in float64 that knows of none of them."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import programs_compose
import pytest
import torch
from programs_compose import LR, SEED, SIZE, batch
from torch.nn import functional as F

import labkit
from labkit.model import Transformer, preset

DOUBLE = {"dtype": torch.float64}


@cache
def by_one_process(
    name: str, changes: tuple, steps: int, clip: float, dtype: torch.dtype = torch.float64
) -> tuple[list, dict[str, torch.Tensor]]:
    """The whole batch at once, nothing recomputed: (loss, norm) of each step, and the parameters at the end."""
    torch.manual_seed(SEED)
    model = Transformer(preset(name, **{**SIZE, **dict(changes)}), dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    seen = []
    for step in range(steps):
        tokens, targets = batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen, {name: param.detach() for name, param in model.named_parameters()}


def part_of(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What tensor parallelism gives a rank of a parameter, from the definition."""
    kind = name.rsplit(".", 2)[-2]
    if kind in ("token_embedding", "head"):
        return whole.split(-(-len(whole) // ranks))[rank]
    if kind == "qkv":  # of the heads' queries, keys and values, the rank's heads of each
        return torch.cat([third.chunk(ranks)[rank] for third in whole.chunk(3)])
    if kind in ("output", "down"):
        return whole.chunk(ranks, -1)[rank] if name.endswith("weight") else whole
    return whole.chunk(ranks)[rank] if kind in ("query", "key", "value", "up", "gate") else whole


def off(sizes: dict, name: str = "tiny_gpt", steps: int = 4, clip: float = 0.5, changes: dict | None = None,
        **options: Any) -> tuple[float, float]:  # fmt: skip
    """The largest relative difference to one process: of losses and norms, and of parameters."""
    changes, options = changes or {}, {"clip": clip, **options}
    run = labkit.run(programs_compose.composed, sizes, name, changes, steps, options, ranks=math.prod(sizes.values()),
                     timeout=240)  # fmt: skip
    want, parameters = by_one_process(name, tuple(changes.items()), steps, clip)
    assert all(value["seen"] == run.values[0]["seen"] for value in run.values), "the ranks disagree"
    told = zip(sum(run.values[0]["seen"], ()), sum(want, ()), strict=True)
    return max(abs(a - b) / b for a, b in told), _parameters_off(run.values, parameters, sizes)


def _parameters_off(values: list, parameters: dict[str, torch.Tensor], sizes: dict) -> float:
    worst, ranks, named = 0.0, sizes.get("tp", 1), set()
    for value in values:
        same = [v for v in values if all(v["place"][axis] == value["place"][axis] for axis in ("tp", "pp"))]
        for name, (mine, _) in value["parameters"].items():
            whole = parameters.get(name, parameters["token_embedding.weight"])  # a tied head on the last stage
            want = part_of(name, whole, value["place"]["tp"], ranks)
            if mine.dim() < want.dim() or mine.numel() < want.numel():  # stage 3: the replicas' pieces, one by one
                mine = torch.cat([v["parameters"][name][0].flatten() for v in same])
                mine = mine.view(-1, *want.shape[1:])
            have = mine[: len(want)]
            assert have.shape == want.shape, name
            worst = max(worst, ((have - want).abs().max() / want.abs().max()).item())
            named.add(name)
    assert named >= parameters.keys()
    return worst


# float64


def test_the_composed_run():
    """dp 2 × tp 2, ZeRO-1, checkpointing, clipping, accumulation, 20 steps."""
    told, parameters = off({"tp": 2, "dp": 2}, steps=20, zero=1, micro_batches=3, checkpointing="full", **DOUBLE)
    assert told <= 1e-10
    assert parameters <= 1e-10


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2, "dp": 2}, {"zero": 0, "checkpointing": "selective"}),
        ({"tp": 2, "dp": 2}, {"zero": 2, "sequence_parallel": True, "checkpointing": "full", "segments": 1}),
        ({"tp": 2, "dp": 2}, {"zero": 3, "checkpointing": "full"}),
        ({"tp": 2, "dp": 2}, {"zero": 3, "sequence_parallel": True}),
        ({"dp": 2, "pp": 2}, {"zero": 0}),
        ({"dp": 2, "pp": 2}, {"zero": 1, "checkpointing": "full"}),
        ({"dp": 2, "pp": 2}, {"zero": 2, "checkpointing": "selective"}),
        ({"tp": 2, "pp": 2}, {"zero": 1, "sequence_parallel": True, "checkpointing": "full"}),
    ],
)
def test_on_a_mesh(sizes, options):
    assert max(off(sizes, micro_batches=2, **options, **DOUBLE)) <= 1e-10


def test_in_three_dimensions():
    sizes = {"tp": 2, "dp": 2, "pp": 2}
    options = {"zero": 1, "sequence_parallel": True, "checkpointing": "full", "micro_batches": 3}
    assert max(off(sizes, steps=3, **options, **DOUBLE)) <= 1e-10
