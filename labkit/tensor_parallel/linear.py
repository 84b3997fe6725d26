"""A matrix product shared by ranks: by columns of the matrix in the formula Y = XA, or by rows.

    column   A = [A₁ A₂]      X the same on all ranks → each its columns of Y        f before
    row      A = [A₁; A₂]     X split by columns      → each a share of all of Y     g after

Column first and row second needs nothing in between: the columns that a rank has made are the rows that it needs. torch
keeps A transposed, as (out, in), so a column of A is a row of ``weight``.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3, figure 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from labkit import collectives
from labkit.collectives import again, asked, mark
from labkit.tensor_parallel.functions import Group, gather_from_group, reduce_from_group, shard, split_to_group


class ColumnParallelLinear(torch.nn.Module):
    """Y = XA + b, of which each rank makes its own columns.

    Args:
        in_features, out_features: Of the whole layer; the ranks must divide `out_features`.
        bias: Whether there is b; each rank has its own part.
        gather_output: Put the columns of all ranks side by side; else Y stays split, as `RowParallelLinear` wants it.
        group: The tensor-parallel group; ``None`` is the world.
        device, dtype: Of the parameters.

    Attributes:
        weight: (out_features/N, in_features), this rank's rows of the whole `torch.nn.Linear`'s weight.
        bias: (out_features/N) or ``None``.

    In backward the all-reduce of the input's gradient (f) runs beside the product that makes the weight's gradient.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, gather_output: bool = False, group: Group = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._take(torch.nn.Linear(in_features, out_features, bias, device, dtype), gather_output, group)

    @classmethod
    def of(cls, whole: torch.nn.Linear, gather_output: bool = False, group: Group = None) -> ColumnParallelLinear:
        """This rank's part of a layer that is the same on all ranks."""
        self = cls.__new__(cls)
        torch.nn.Module.__init__(self)
        self._take(_linear(whole), gather_output, group)
        return self

    def _take(self, whole: torch.nn.Linear, gather_output: bool, group: Group) -> None:
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.gather_output, self.group = gather_output, group
        self.weight = own(shard(whole.weight, 0, group), group)
        self.bias = None if whole.bias is None else own(shard(whole.bias, 0, group), group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, in_features), the same on all ranks → (…, out_features/N), or all of it with `gather_output`."""
        (y,) = column_linears(x, [self.part()], self.group)
        return gather_from_group(y, self.group) if self.gather_output else y

    def part(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's matrix and bias."""
        return self.weight, self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, of which {self.weight.shape[0]} here"


class RowParallelLinear(torch.nn.Module):
    """Y = XA + b, of which each rank has some rows of A, and the matching columns of X.

    Args:
        in_features, out_features: Of the whole layer; the ranks must divide `in_features`.
        bias: Whether there is b. It is the same on all ranks, and added once, after the sum: added before, it would be
            counted N times.
        group: The tensor-parallel group.
        input_is_parallel: X comes split, as from `ColumnParallelLinear`; else it is split here.
        device, dtype: Of the parameters.

    Attributes:
        weight: (out_features, in_features/N).
        bias: (out_features) or ``None``.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, group: Group = None,
        input_is_parallel: bool = True, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._take(torch.nn.Linear(in_features, out_features, bias, device, dtype), group, input_is_parallel)

    @classmethod
    def of(cls, whole: torch.nn.Linear, group: Group = None, input_is_parallel: bool = True) -> RowParallelLinear:
        """This rank's part of a layer that is the same on all ranks."""
        self = cls.__new__(cls)
        torch.nn.Module.__init__(self)
        self._take(_linear(whole), group, input_is_parallel)
        return self

    def _take(self, whole: torch.nn.Linear, group: Group, input_is_parallel: bool) -> None:
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.group, self.input_is_parallel = group, input_is_parallel
        self.weight = own(shard(whole.weight, 1, group), group)
        self.bias = None if whole.bias is None else mark(whole.bias, replicated=(group,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, in_features/N), or all of it → (…, out_features), the same on all ranks."""
        if not self.input_is_parallel:
            x = split_to_group(x, self.group)
        y = reduce_from_group(self.share(x), self.group)
        return y if self.bias is None else y + self.bias

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum, without the bias."""
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.in_features}, of which {self.weight.shape[1]} here, {self.out_features}"


def _linear(whole: torch.nn.Linear) -> torch.nn.Linear:
    if not isinstance(whole, torch.nn.Linear):
        raise TypeError(f"the whole layer is {type(whole).__name__}: expected a torch.nn.Linear")
    return whole


def own(part: torch.Tensor, group: Group) -> torch.nn.Parameter:
    """A parameter of this rank alone: a copy of its part, so that the whole can go."""
    copy = part.detach().clone(memory_format=torch.contiguous_format)
    return mark(torch.nn.Parameter(copy, requires_grad=part.requires_grad), sharded=(group,))


def column_linears(
    x: torch.Tensor, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]], group: Group
) -> tuple[torch.Tensor, ...]:
    """f, then products with several matrices, as one step: one all-reduce in backward, beside the weights' gradients.

    Args:
        x: (…, in), the same on all ranks.
        layers: (weight, bias) of each: (out/N, in), and (out/N) or ``None``.
        group: The tensor-parallel group.

    Returns:
        (…, out/N) each. A second derivative is refused: use `copy_to_group` and `torch.nn.functional.linear` for one.
    """
    weights, biases = zip(*layers, strict=True)
    return _Columns.apply(narrowed(x), group, len(layers), *map(narrowed, (*weights, *biases)))


def narrowed(x: torch.Tensor | None) -> Any:
    """As autocast would have it here; outside of autocast, as it is. So backward finds all of one type."""
    if x is None or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, count: int, *both: Any) -> tuple[torch.Tensor, ...]:
        weights, biases = both[:count], both[count:]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.algorithm = group, asked()
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        grad_x, handle = None, None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(grads, weights)  # (…, in), this rank's share
            with again(ctx.algorithm):
                handle = collectives.all_reduce(grad_x, group=ctx.group, async_op=True)
        of_weights, of_biases = weight_gradients(grads, x, ctx.needs_input_grad[3:])
        if handle is not None:
            handle.wait()
        return grad_x, None, None, *of_weights, *of_biases


def input_gradient(grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Σ gradᵢ·weightᵢ, (…, in): what the outputs of several products say of their one input."""
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total += grad @ weight
    return total


def weight_gradients(
    grads: Sequence[torch.Tensor], x: torch.Tensor, needed: Sequence[bool]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Of each Yᵢ = XAᵢ + bᵢ: gradᵀ·x, (out, in), and the sum of grad, (out); `needed`: of all weights, then biases."""
    flat, x = [grad.reshape(-1, grad.shape[-1]) for grad in grads], x.reshape(-1, x.shape[-1])
    of_weights = [g.t() @ x if need else None for g, need in zip(flat, needed, strict=False)]
    of_biases = [g.sum(0) if need else None for g, need in zip(flat, needed[len(flat) :], strict=True)]
    return of_weights, of_biases
