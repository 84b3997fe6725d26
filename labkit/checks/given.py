"""What exercises of data parallelism hand to a learner's function: small modules, the same on every rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from labkit import pace
from labkit.checks.trial import GIVEN
from labkit.trace import label, now

WIDTH = 8
#: Seconds that a rank waits, once, for one that may, in a wrong solution, never come.
PATIENCE = 1.0


def uncounted() -> AbstractContextManager[None]:
    """What is sent inside counts as nobody's."""
    return label(**{GIVEN: True})


class Layers(torch.nn.Module):
    """Linear layers one after the other; the backward of each is recorded (`labkit.pace.backward_sections`).

    Args:
        count: Layers, each of a weight (8, 8) and a bias (8).
        tied: The first layer is used again after the last.
    """

    def __init__(self, count: int, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(count)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.tied = tied
        for number, layer in enumerate(self.layers):
            pace.backward_sections(layer, "backward", layer=number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.tanh(self.layers[0](x)) if self.tied else x


class Branches(torch.nn.Module):
    """Two layers, `small` and `large`, side by side. The one that is computed last has its gradients first.

    Args:
        turned: Compute `large` first.
    """

    def __init__(self, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.small = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4), torch.nn.Linear(4, 1))
        self.large = torch.nn.Sequential(torch.nn.Linear(WIDTH, 12), torch.nn.Linear(12, 1))
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.turned:
            large, small = self.large(x), self.small(x)
        else:
            small, large = self.small(x), self.large(x)
        return torch.tanh(small + large)


def batch(rank: int, step: int, rows: int = 4) -> torch.Tensor:
    """What a rank trains on: (rows, WIDTH), other numbers for each rank and step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(rows, WIDTH, generator=generator)


def others_wait_for_rank_0(first: torch.nn.Module, last: torch.nn.Module) -> None:
    """From now on the other ranks begin a backward when rank 0 has come to the end of its own.

    So a collective that rank 0 starts on the way cannot be over before rank 0 goes on, unless it stands still for it.
    No verdict depends on how long that takes, but for `PATIENCE`.

    Args:
        first, last: The modules whose backward is the last, and the first.
    """
    nonce = torch.tensor([time.time_ns()])
    with uncounted():
        dist.broadcast(nonce, 0)
    store, came = dist.distributed_c10d._get_default_store(), itertools.count()
    left = [PATIENCE]

    def key() -> str:
        return f"labkit/checks/{nonce.item()}/{next(came)}"

    def wait() -> None:
        began, awaited = now(), key()
        while not store.check([awaited]) and now() < began + left[0]:
            time.sleep(0.001)
        left[0] -= now() - began

    if dist.get_rank() == 0:
        _in_backward(first, lambda: store.set(key(), "1"))
    else:
        _in_backward(last, wait)


def _in_backward(module: torch.nn.Module, do: Callable[[], None]) -> None:
    def ask(_: Any, __: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: do())

    module.register_forward_hook(ask)


class Scored(torch.nn.Module):
    """Three layers and a loss: ``module(batch)`` is the mean loss of a batch, (rows, WIDTH) → ()."""

    #: Tensors as large as a batch that a forward makes, at most.
    HELD = 8

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()
