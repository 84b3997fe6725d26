"""The MLP of a layer: every token by itself goes up to `ffn` elements and down again."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from labkit.model.config import Config


class GeluMLP(nn.Module):
    """GPT's: down(gelu(up(x))), with biases."""

    def __init__(
        self, config: Config, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn, device=device, dtype=dtype)
        self.down = nn.Linear(config.ffn, config.hidden, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)  # (b, s, ffn)
        x = F.gelu(x)
        return self.down(x)  # (b, s, h)


class SwiGLU(nn.Module):
    """Llama's: down(silu(gate(x)) · up(x)), without biases.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), equation 6.
    """

    def __init__(
        self, config: Config, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.gate(x)) * self.up(x)  # (b, s, ffn)
        return self.down(x)  # (b, s, h)
