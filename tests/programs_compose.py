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


def batch(step: int, rows: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of all replicas; rows ignore different numbers of targets, and no number of rows divides."""
    tokens = torch.randint(33, (rows, 13), generator=torch.Generator().manual_seed(100 + step))
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, : row % 7] = -100
    return tokens[:, :-1], targets


def composed(sizes: dict[str, int], name: str, changes: dict, steps: int, options: dict) -> dict[str, Any]:
    """(loss, norm) of each step, and this rank's parameters at the end."""
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
    mesh = Mesh(**sizes)
    trainer = Trainer(mesh, preset(name, **{**SIZE, **changes}), seed=SEED, **{"lr": LR, **options})
    place = mesh.place(dist.get_rank())
    seen = []
    for step in range(steps):
        mine = (part.tensor_split(mesh.sizes["dp"])[place["dp"]].to(device.current()) for part in batch(step))
        seen.append(trainer.step(*mine))
    return {"place": place, "seen": seen, "parameters": _named(trainer, mesh), "scaler": trainer.scaler.state_dict()}


def _named(trainer: Trainer, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Name in the whole model → what this rank has of it."""
    counts: list[Any] = [0] * mesh.sizes["pp"]
    dist.all_gather_object(counts, len(trainer.module.blocks), group=mesh.group("pp"))
    before = sum(counts[: dist.get_rank(mesh.group("pp"))])  # layers of the stages before
    found = {}
    for name, param in trainer.module.named_parameters():
        words = name.split(".")
        if words[0] == "blocks":
            words[1] = str(int(words[1]) + before)
        found[".".join(words)] = param.detach().cpu()
    return found


def left_in_16_bits() -> list[bool]:
    """Whether gradients stay on the working copy after a micro-batch, where the next one's would be added in bf16."""
    left = []

    class Watched(Trainer):
        def _backward(self, *batch: torch.Tensor) -> torch.Tensor:
            loss = super()._backward(*batch)
            left.append(any(param.grad is not None for param in self.module.parameters()))
            return loss

    trainer = Watched(Mesh(), preset("tiny_gpt", **SIZE), dtype=torch.bfloat16, micro_batches=3, lr=LR)
    trainer.step(*(part.to(device.current()) for part in batch(0)))
    return left


def refused(sizes: dict[str, int], options: dict) -> str:
    """What the trainer says; the model's and the step's arguments may be among the options."""
    given = {"mesh": Mesh(**sizes), "config": preset("tiny_gpt", **SIZE), "lr": LR, **options}
    rows = given.pop("rows", None)
    try:
        trainer = Trainer(**given)
        if rows is not None:
            trainer.step(*(torch.zeros(n, 4, dtype=torch.int64, device=device.current()) for n in rows))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def tied_copies(zero: int) -> torch.Tensor:
    """The words' matrix, of which the first and the last stage have a copy, after some steps of three replicas."""
    torch.set_num_threads(1)
    mesh = Mesh(dp=3, pp=2)
    trainer = Trainer(mesh, preset("tiny_gpt", **SIZE, tied=True), zero=zero, micro_batches=2, lr=LR)
    for step in range(4):
        trainer.step(*(part.tensor_split(3)[mesh.place(dist.get_rank())["dp"]] for part in batch(step)))
    return next(p for p in trainer.module.parameters() if placement(p).tied is not None).detach().cpu()
