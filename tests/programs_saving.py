"""What ranks run to save and load: a small model trained in every form, on the same batches whatever their number."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import torch
import torch.distributed as dist

from labkit import data_parallel, device
from labkit.zero import DistributedOptimizer, FullyShardedDataParallel, ShardedOptimizer, latest, load, save

ROWS = 12
FORMS = ("plain", "ddp", "stage 1", "stage 2", "distributed", "stage 3")


class Model(torch.nn.Module):
    """Tied, frozen, odd and 0-dimensional parameters, a buffer, and a weight that lies in memory column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 5)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(5, affine=False)
        self.head = torch.nn.Linear(5, 11, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.head.weight = self.words.weight
        self.blocks[1].bias.requires_grad_(False)
        self.blocks[2].weight.data = self.blocks[2].weight.data.t().contiguous().t()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        self.norm(x.flatten(0, 1))  # for its running means, which depend on the ranks' batches: nothing else reads them
        return self.head(x) * self.scale


def made(form, seed=0, dtype=torch.float64, kind=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = Model().to(device.current(), dtype)
    if form == "stage 3":
        model = FullyShardedDataParallel(model)
    if form == "ddp":
        model = data_parallel.DistributedDataParallel(model)
    if form in ("plain", "ddp", "stage 3"):
        return model, kind(groups(model), lr=0.05)
    if form == "distributed":
        return model, DistributedOptimizer(groups(model), kind, lr=0.05)
    return model, ShardedOptimizer(groups(model), kind, stage=int(form[-1]), lr=0.05)


def groups(model):
    """Two groups, of other learning rates."""
    named = list(model.named_parameters())
    return [{"params": [p for n, p in named if "blocks" in n]}, {"params": [p for n, p in named if "blocks" not in n],
                                                              "lr": 0.02}]  # fmt: skip


def train(model, optimizer, steps, first=0):
    """The loss over all rows in each step, the same for any number of ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in range(first, first + steps):
        rows = torch.randint(11, (ROWS, 4), generator=torch.Generator().manual_seed(step))
        mine = rows[rank * ROWS // ranks : (rank + 1) * ROWS // ranks]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(mine[:, :-1]).transpose(1, 2).double(), mine[:, 1:])
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


def train_and_save(directory, form, dtype=torch.float64, kind=torch.optim.AdamW):
    model, optimizer = made(form, dtype=dtype, kind=kind)
    train(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.04
    path = save(directory, 3, model, optimizer, extra={"seen": [1, 2]})
    return str(path), train(model, optimizer, 3, first=3)


def load_and_train(path, form, dtype=torch.float64, kind=torch.optim.AdamW):
    model, optimizer = made(form, seed=7, dtype=dtype, kind=kind)
    extra = load(path, model, optimizer)
    return extra, train(model, optimizer, 3, first=3)


def refused(directory, what):
    model, optimizer = made("stage 1")
    path = save(directory, 1, model, optimizer if what != "no optimizer" else None)
    if what == "twice":
        save(directory, 1, model, optimizer)
    if what == "no optimizer":
        load(path, model, optimizer)
    if what == "another model":
        load(path, torch.nn.Linear(2, 2))
    if what == "another part":
        load(path, model, optimizer, part="tp1")
    if what == "foreign optimizer":
        save(directory, 2, model, torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    if what == "two groups, one part":
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
        save(directory, 2, model, optimizer, group=pair)


def parts_of_a_mesh(directory):
    """Two groups of two, each with a model of its own, as tensor parallelism has; then each loads its part."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    torch.manual_seed(rank // 2)
    model = torch.nn.Linear(5, 3)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, group=pair)
    before = model.weight.detach().clone()
    path = save(directory, 0, model, optimizer, group=pair, part=f"tp{rank // 2}")
    with torch.no_grad():
        model.weight.zero_()
    load(path, model, optimizer, group=pair, part=f"tp{rank // 2}")
    return before, model.weight.detach()


def save_and_die(directory, step, seconds):
    """Saves again and again; after a while one rank is gone."""
    model, optimizer = made("stage 1")
    if (before := latest(directory)) is not None:
        load(before, model, optimizer)
    victim = random.Random(step).randrange(dist.get_world_size())

    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        threading.Thread(target=die, daemon=True).start()
    while True:
        train(model, optimizer, 1, first=step)
        save(directory, step, model, optimizer, extra=step)
        step += 1


def load_latest(directory):
    """(name of the last save, the step that it says, the loss of the next step)."""
    model, optimizer = made("stage 1", seed=9)
    path = latest(directory)
    if path is None:
        return None
    step = load(path, model, optimizer)
    return path.name, step, train(model, optimizer, 1, first=step + 1)[0]


def loaded_before_the_first_step(directory, form):
    """Save, step, load: what is left of the optimizer's state."""
    model, optimizer = made(form)
    path = save(directory, 0, model, optimizer)
    train(model, optimizer, 2)
    load(path, model, optimizer)
    return [key for state in optimizer.state.values() for key in state]
