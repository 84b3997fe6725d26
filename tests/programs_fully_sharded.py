"""What the tests of stage 3 run on ranks. A reference is one process with the whole model and batch, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from programs_data_parallel import mean_loss, model, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit import collectives, device, tensor_parallel, tricks
from labkit.memory import MemoryMeter
from labkit.model import Transformer, preset
from labkit.trace import label
from labkit.train import Mesh
from labkit.zero import FullyShardedDataParallel

Values = dict[str, torch.Tensor]


def pieces(sharded: nn.Module, grads: bool = False) -> dict[str, torch.Tensor | None]:
    """This rank's part of each parameter, or of its gradient, by the name it has in the whole module."""
    found = {}
    for name, param in sharded.named_parameters():
        value = param.grad if grads else param
        found[name.replace("module.", "")] = None if value is None else value.detach().clone()
    return found


def whole(net: nn.Module, grads: bool = False) -> dict[str, torch.Tensor | None]:
    return {name: None if (value := p.grad if grads else p) is None else value.detach().clone()
            for name, p in net.named_parameters()}  # fmt: skip


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups: what is a matrix in the whole model decays."""
    named = list(net.named_parameters())
    decays = [p for name, p in named if name.endswith("weight") and "norm" not in name]
    rest = [p for name, p in named if all(p is not d for d in decays)]
    return torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": rest}], 1e-2, eps=1e-6)


def ten_steps(name: str, changes: dict, options: dict, micro_steps: int = 1, clip: float | None = None) -> Any:
    """(losses, pieces) of this rank, and (losses, parameters) of one process."""
    n, me = dist.get_world_size(), dist.get_rank()
    net = model(name, **changes)
    reference = copy.deepcopy(net)
    if me:  # what rank 0 has is what counts
        nn.init.ones_(next(net.parameters()))
    sharded = FullyShardedDataParallel(net, **options)
    ours, theirs = adam(sharded), adam(reference)
    losses: list[tuple[float, float]] = []
    for step in range(10):
        batch = tokens(2 * n * micro_steps, seed=step)
        mine, expected = 0.0, mean_loss(reference, batch)
        for piece in batch.tensor_split(n)[me].tensor_split(micro_steps):
            part = mean_loss(sharded, piece) / micro_steps
            part.backward()
            mine += part.item()
        expected.backward()
        if clip is not None:
            tricks.clip_grad_norm_(sharded.parameters(), clip)
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        losses.append((mine, expected.item()))
    return losses, pieces(sharded), whole(reference)


# Modules of all sorts


class Odd(nn.Module):
    """Layers of odd sizes in a list; some frozen, of another type, tied, called twice, checkpointed, or not used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind = kind
        self.first = nn.Linear(3, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3))
        self.last = nn.Linear(5, 3)
        self.double()
        if kind == "mixed":
            self.layers[1] = nn.Sequential(*self.layers[1][:2], As(torch.float32), self.layers[1][2].float(),
                                           As(torch.float64))  # fmt: skip
        if kind == "frozen":
            for part in (self.layers[0][0], self.layers[1], self.layers[2][2]):
                part.requires_grad_(False)
        if kind == "frozen-first":
            self.first.requires_grad_(False)
            self.layers[0].requires_grad_(False)
        if kind == "tied":  # across blocks, and with the root
            self.layers[2][0].weight = self.layers[0][0].weight
            self.again = nn.Linear(5, 7).double()
            self.again.weight = self.layers[1][0].weight
        if kind == "unused":
            self.layers[1] = Skips(self.layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + self.through(layer, x)
        if self.kind == "twice":
            x = self.layers[0](x) + self.layers[2](x)
        if self.kind == "tied":
            x = x + self.again(x)[..., :5]
        return self.last(x)

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "checkpoint":
            return checkpoint(layer, x, use_reentrant=False)
        if self.kind == "reentrant":
            return checkpoint(layer, x, use_reentrant=True)
        if self.kind == "tricks":
            return tricks.checkpoint(layer, x)
        return layer(x)


class As(nn.Module):
    """A change of type between layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


class Skips(nn.Module):
    """Has a layer that its forward does not use."""

    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used, self.never = used, nn.Linear(2, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Inner(nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: self.b(self.a(t).tanh()), x, use_reentrant=False)


def odd(kind: str) -> Odd:
    net = Odd(kind).to(device.current())
    if kind == "inner-checkpoint":
        net.layers = nn.ModuleList(Inner().double().to(device.current()) for _ in range(3))
    return net


def drawn(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(device.current())


def wrapped(net: Odd, options: dict) -> FullyShardedDataParallel:
    if net.kind == "nested":
        net.layers[1] = FullyShardedDataParallel(net.layers[1], keep_after_forward=True)
    if net.kind == "units":
        return FullyShardedDataParallel(net, blocks=[net.first, *net.layers, net.layers[1][0], net.last], **options)
    return FullyShardedDataParallel(net, **options)


def of_all_sorts(kind: str, options: dict) -> Any:
    """Three steps of two backwards each: (losses, pieces) of this rank, (losses, parameters) of one process."""
    n, me = dist.get_world_size(), dist.get_rank()
    net = odd(kind)
    reference = copy.deepcopy(net)
    sharded = wrapped(net, options)
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (sharded, reference)]
    ours, theirs = (torch.optim.SGD(params, 0.05, momentum=0.9) for params in trained)
    losses: list[tuple[float, float]] = []
    for step in range(3):
        batches = [drawn(2 * step + k, 2 * n) for k in range(2)]
        parts = [batch.tensor_split(n)[me] for batch in batches]
        if kind == "two-forwards":
            outs = [sharded(part) for part in parts]
            mine = sum(out.square().mean() for out in outs)
            mine.backward()
        else:
            mine = torch.zeros((), dtype=torch.float64, device=device.current())
            for part in parts:
                loss = sharded(part).square().mean()
                loss.backward()
                mine = mine + loss.detach()
        expected = sum(reference(batch).square().mean() for batch in batches)
        expected.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        losses.append((mine.item(), expected.item()))
    assert not any(t.numel() for t in (*sharded.gathered(), *sharded.full_gradients()))
    return losses, pieces(sharded), whole(reference)
