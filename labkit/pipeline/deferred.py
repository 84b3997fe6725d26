"""A backward in two halves: B makes the gradient of a stage's input, W those of its weights.

The stage before waits for B only. W may come whenever there is time, which is what zero-bubble schedules live on. A
product Y = XA + b needs two products in backward, grad·Aᵀ for B and Xᵀ·grad for W: nearly all of a transformer's
backward can be put off so. What is left, such as the weights of norms, is small and made at once, in B.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Waiting:
    """The work that a backward has left: gradients of weights.

    Only what runs under `PutOff` while `open` is set is left here; a gradient that a module asks for in its own forward
    is made at once.
    """

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.open = False

    def finish(self) -> None:
        """Do it: add to ``grad``."""
        while self.work:
            self.work.pop(0)()


class PutOff(TorchFunctionMode):
    """Inside, each `torch.nn.functional.linear` leaves the gradients of its weight and bias for later.

    It holds for forward, and for backward too, where checkpointed parts run their forward once more.

    Args:
        waiting: Takes the work that is left.
        params: Whose gradients may be put off; those with hooks, which want to see the gradient in backward, are not.

    >>> layer, waiting = torch.nn.Linear(2, 1, bias=False), Waiting()
    >>> with PutOff(waiting, layer.parameters()):
    ...     y = layer(torch.ones(3, 2))
    >>> waiting.open = True
    >>> y.sum().backward()
    >>> layer.weight.grad is None, len(waiting.work)
    (True, 1)
    >>> waiting.finish()
    >>> layer.weight.grad
    tensor([[3., 3.]])
    """

    def __init__(self, waiting: Waiting, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self._waiting = waiting
        self._params = {id(p) for p in params if not (p._backward_hooks or p._post_accumulate_grad_hooks)}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        asking = [p for p in (weight, bias) if p is not None and p.requires_grad]
        if not asking or weight.dim() != 2 or any(id(p) not in self._params for p in asking):
            return F.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias, self._waiting)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, waiting: Waiting
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias  # themselves: what is saved may come back as a copy
        ctx.waiting = waiting
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        grad_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None  # under autocast types differ
        if not ctx.waiting.open:
            return grad_x, *_weight_gradients(x, grad, weight, bias), None
        ctx.waiting.work.append(lambda: _add_weight_gradients(x, grad, weight, bias))
        return grad_x, None, None, None


@torch.no_grad()
def _add_weight_gradients(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    for param, found in zip((weight, bias), _weight_gradients(x, grad, weight, bias), strict=True):
        if param is not None and found is not None:
            add_gradient(param, found.to(param.dtype))


def _weight_gradients(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of Y = XAᵀ + b: gradᵀ·X, (out, in), and the sum of grad, (out)."""
    flat = grad.reshape(-1, grad.shape[-1])  # (tokens, out)
    of_weight = flat.t() @ x.reshape(-1, x.shape[-1]).to(grad.dtype) if weight.requires_grad else None
    return of_weight, flat.sum(0) if bias is not None and bias.requires_grad else None


def add_gradient(param: torch.Tensor, grad: torch.Tensor) -> None:
    """To what is in ``param.grad``, as backward does."""
    if param.grad is None:
        param.grad = grad
    else:
        param.grad += grad
