"""Dropout whose memory is one byte an element."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


class Dropout(nn.Module):
    """Zeroes each element with probability p and multiplies the rest by 1/(1−p), while training.

    Backward needs to know which elements stayed. `torch.native_dropout` keeps that as a bool, one byte an element on
    every device, which is what Korthikanti et al. (2022, section 4.1) count; `torch.nn.functional.dropout` on a CPU
    keeps a mask as wide as the activation. With p = 0, and in eval mode, nothing is kept.

    Args:
        p: From 0 up to, but not, 1.

    Example:
        >>> Dropout(0.5).eval()(torch.ones(3))
        tensor([1., 1., 1.])
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def drawing(self) -> AbstractContextManager[None]:
        """Around an operation that draws a mask by itself, such as fused attention."""
        return nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        return torch.native_dropout(x, self.p, True)[0]

    def extra_repr(self) -> str:
        return f"p={self.p}"
