"""A backward in two halves: B makes the gradient of a stage's input, W those of its weights.

The stage before waits for B only. W may come whenever there is time, which is what zero-bubble schedules live on. A
product Y = XA + b needs two products in backward, grad·Aᵀ for B and Xᵀ·grad for W: nearly all of a transformer's
backward can be put off so. What is left, such as the weights of norms, is small and made at once, in B.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Waiting = list[Callable[[], None]]


class PutOff(TorchFunctionMode):
    """Inside, each `torch.nn.functional.linear` leaves the gradients of its weight and bias for later.

    What is recomputed in backward is not seen, and makes its weights' gradients at once.

    Args:
        waiting: Backward appends the work that is left; call each once. It adds to ``weight.grad`` and ``bias.grad``.

    >>> layer, waiting = torch.nn.Linear(2, 1, bias=False), []
    >>> with PutOff(waiting):
    ...     y = layer(torch.ones(3, 2))
    >>> y.sum().backward()
    >>> layer.weight.grad is None, len(waiting)
    (True, 1)
    >>> waiting.pop()()
    >>> layer.weight.grad
    tensor([[3., 3.]])
    """

    def __init__(self, waiting: Waiting) -> None:
        super().__init__()
        self._waiting = waiting

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        leaves = [p for p in (weight, bias) if p is not None and p.requires_grad]
        if not leaves or not all(p.is_leaf for p in leaves):  # a weight that was made must hand its gradient on
            return F.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias, self._waiting)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, waiting: Waiting
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.waiting = waiting
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        ctx.waiting.append(lambda: _weight_gradients(x, grad, weight, bias))
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None


@torch.no_grad()
def _weight_gradients(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    flat = grad.reshape(-1, grad.shape[-1])  # (tokens, out)
    if weight.requires_grad:
        add_gradient(weight, flat.t() @ x.reshape(-1, x.shape[-1]))
    if bias is not None and bias.requires_grad:
        add_gradient(bias, flat.sum(0))


def add_gradient(param: torch.Tensor, grad: torch.Tensor) -> None:
    """To what is in ``param.grad``, as backward does."""
    if param.grad is None:
        param.grad = grad
    else:
        param.grad += grad
