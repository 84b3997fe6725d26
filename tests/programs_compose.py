"""What the tests of the composed step run on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labkit import device
from labkit.collectives import placement
from labkit.model import preset
from labkit.train import Mesh, Trainer

SIZE = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 33, "positions": 12}  # 33 words: nothing divides by 2
SEED, LR = 5, 1e-2


def batch(step: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of all replicas; every row ignores another number of targets."""
    tokens = torch.randint(33, (rows, 13), generator=torch.Generator().manual_seed(100 + step))
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, : row % 7] = -100
    return tokens[:, :-1], targets


def composed(sizes: dict[str, int], name: str, changes: dict, steps: int, options: dict) -> dict[str, Any]:
    """(loss, norm) of each step, and this rank's parameters at the end."""
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
    mesh = Mesh(**sizes)
    place = mesh.place(dist.get_rank())
    trainer = Trainer(mesh, preset(name, **{**SIZE, **changes}), seed=SEED, lr=LR, **options)
    seen = []
    for step in range(steps):
        mine = (part.tensor_split(sizes.get("dp", 1))[place["dp"]].to(device.current()) for part in batch(step))
        seen.append(trainer.step(*mine))
    return {"place": place, "seen": seen, "parameters": _named(trainer, mesh), "scaler": trainer.scaler.state_dict()}


def _named(trainer: Trainer, mesh: Mesh) -> dict[str, tuple[torch.Tensor, bool]]:
    """Name in the whole model → (what this rank has of it, whether it is cut over tp)."""
    found = {}
    before = 0
    if trainer.engine is not None:
        mine = torch.tensor([len(trainer.module.blocks)])
        counts = [torch.zeros_like(mine) for _ in range(mesh.sizes["pp"])]
        dist.all_gather(counts, mine, group=mesh.group("pp"))
        before = int(sum(counts[: dist.get_rank(mesh.group("pp"))]))
    for name, param in trainer.module.named_parameters():
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = str(int(parts[1]) + before)
        found[".".join(parts)] = param.detach(), any(g is mesh.group("tp") for g in placement(param).sharded)
    return found


def refused(sizes: dict[str, int], options: dict) -> str:
    try:
        Trainer(Mesh(**sizes), preset("tiny_gpt", **SIZE), lr=LR, **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
