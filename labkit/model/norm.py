"""RMSNorm that keeps its input and one number a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight, over the last dimension; computed in fp32 at least.

    Values and gradients are `torch.nn.functional.rms_norm`'s. That function keeps two fp32 copies of a 16-bit input
    for backward on a CPU, but only the input and 1/√… on CUDA. This one keeps the latter two everywhere, so what a
    layer holds does not depend on where it runs.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.

    Args:
        size: h, elements of the last dimension.
        eps: ε.

    Example:
        >>> RMSNorm(2, eps=0.0)(torch.tensor([3.0, 3.0])).tolist()
        [1.0, 1.0]
    """

    def __init__(
        self, size: int, eps: float = 1e-5, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Normalise.apply(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = widen(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (b, s, 1)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        normal, grad = widen(x) * scale, widen(grad)
        along = grad * weight
        grad_x = scale * (along - normal * (along * normal).mean(-1, keepdim=True))
        grad_weight = (grad * normal).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def widen(x: torch.Tensor) -> torch.Tensor:
    """In fp32 if it is narrower; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
