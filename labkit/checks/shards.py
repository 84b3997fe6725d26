"""What exercises of sharded training share: who does them already, a flat buffer's shards, an optimizer, a block."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import Case

ROWS = 2  #: that a rank trains on
_SPEC = importlib.util.find_spec("torch.distributed")
_TORCHS = Path(_SPEC.origin).parent if _SPEC and _SPEC.origin else PACKAGE
#: Where a flat buffer is cut.
FLAT = str(PACKAGE / "zero" / "flat.py")
#: Files that shard a model, its gradients, or its optimizer's state; none in which a mere import calls a function.
SHARDED = frozenset(
    [str(path) for path in (PACKAGE / "zero").rglob("*.py") if str(path) != FLAT]
    + [str(_TORCHS / "fsdp" / f"{name}.py") for name in ("_flat_param", "fully_sharded_data_parallel")]
    + [str(_TORCHS / "fsdp" / "_fully_shard" / f"{name}.py")
       for name in ("_fsdp_collectives", "_fsdp_param", "_fully_shard")]
    + [str(_TORCHS / "optim" / "zero_redundancy_optimizer.py")]
)  # fmt: skip


def in_shard(elements: int, ranks: int) -> int:
    """Elements of a rank's shard, padding included.

    >>> in_shard(7, 3)
    3
    """
    return math.ceil(elements / ranks)


def shard_of(flat: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's shard of a flat buffer, a copy; what is behind the buffer's end is 0."""
    size = in_shard(flat.numel(), ranks)
    mine = flat[rank * size : (rank + 1) * size]
    return F.pad(mine, (0, size - mine.numel())).clone()


class Adam:
    """Adam for a shard; it makes its state when it is first called, for as many elements as it is given.

    Its ε is large, so that a gradient that is N times too large tells: Adam with a small one would hardly see it.

    Source: Kingma and Ba 2015, algorithm 1.

    Args:
        step: Of the training, from 1; whoever trains sets it.
    """

    RATE, BETAS, EPS = 0.1, (0.8, 0.9), 1.0

    def __init__(self) -> None:
        self.step = 1
        self._updated = 0
        self.mean: torch.Tensor | None = None
        self.square: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of its state."""
        return 0 if self.mean is None else 2 * self.mean.nbytes

    def update(self, params: torch.Tensor, grads: torch.Tensor) -> None:
        """Change `params` in place; both of any shape, the same in each step."""
        if params.shape != grads.shape:
            raise ValueError(f"update was given {tuple(params.shape)} and {tuple(grads.shape)}: expected equal shapes")
        if self._updated == self.step:
            raise ValueError("update was called twice in a step: its state belongs to the first call's shard")
        self._updated = self.step
        if self.mean is None or self.square is None:
            self.mean, self.square = torch.zeros_like(params), torch.zeros_like(params)
        if self.mean.shape != params.shape:
            raise ValueError(f"update was given {tuple(params.shape)}: its state is of shape {tuple(self.mean.shape)}")
        (one, two), t = self.BETAS, self.step
        with torch.no_grad():
            self.mean.mul_(one).add_(grads, alpha=1 - one)
            self.square.mul_(two).addcmul_(grads, grads, value=1 - two)
            scale = (self.square / (1 - two**t)).sqrt_().add_(self.EPS)
            params.addcdiv_(self.mean, scale, value=-self.RATE / (1 - one**t))


class Stack(torch.nn.Module):
    """Linear layers one after the other, (rows, width) → (rows, width); 30 parameters each if the width is 5."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(layers)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block:
    """A residual MLP whose parameters come from one flat buffer: y = x + tanh(x·A + a)·B + b.

    Args:
        width: Of what enters and leaves.
        number: Of the block; each starts with other parameters.
    """

    def __init__(self, width: int, number: int = 0) -> None:
        inner = width + 1
        self.shapes = ((width, inner), (inner,), (inner, width), (width,))
        self.numel = sum(math.prod(shape) for shape in self.shapes)
        self._seed = number

    def parameters(self) -> torch.Tensor:
        """All of them, flat, as they are at first."""
        return torch.randn(self.numel, generator=torch.Generator().manual_seed(self._seed)) / self.shapes[1][0]

    def forward(self, flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Args: flat: (numel), or longer: what is behind is padding. x: (rows, width). Returns: (rows, width)."""
        parts = flat[: self.numel].split([math.prod(shape) for shape in self.shapes])
        A, a, B, b = (part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
        return x + torch.tanh(x @ A + a) @ B + b

    def backward(self, flat: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Args: flat, x: As in forward. grad: Of what left. Returns: gradients of x, and of flat, as long as that."""
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), flat.detach().requires_grad_()
            out = self.forward(leaves[1], leaves[0])
            of_x, of_flat = torch.autograd.grad((out * grad).sum(), leaves)  # of a number: no compiler is imported
        return of_x, of_flat


def rows(case: Case, rank: int, step: int, width: int) -> torch.Tensor:
    """What a rank trains on: (ROWS, width), other numbers for each rank and step."""
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(100 * rank + step + case.elements))


def mean(of_ranks: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.double() for each in of_ranks]).mean(0)
