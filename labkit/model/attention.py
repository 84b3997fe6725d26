"""Causal self-attention, with the s×s matrix in memory or without.

Source: Vaswani et al., "Attention Is All You Need" (2017), equation 1; grouped-query attention: Ainslie et al.,
"GQA: Training Generalized Multi-Query Transformer Models" (2023), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from labkit.model.config import Config
from labkit.model.dropout import Dropout
from labkit.model.rotary import Rotation, rotate


def call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


class Attention(nn.Module):
    """Every token looks at itself and at the tokens before it.

    GPT projects with one matrix, `qkv`, whose rows are all heads' queries, then all keys, then all values; each third
    is to be split by heads when ranks share it. Llama has `query`, `key` and `value`. How many heads there are is read
    from the projections' widths, so that a rank may hold some of them.
    """

    #: Calls the core, which is a function, with its arguments; `labkit.tricks.checkpoint` may stand in its place.
    run_core = staticmethod(call)

    def __init__(
        self, config: Config, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        h, kv = config.hidden, config.kv_heads * config.head_size
        self.head_size = config.head_size
        self.fused = config.attention == "fused"
        self.one_projection = config.dialect == "gpt"
        if self.one_projection:
            self.qkv = nn.Linear(h, 3 * h, device=device, dtype=dtype)
        else:
            self.query = nn.Linear(h, h, bias=False, device=device, dtype=dtype)
            self.key = nn.Linear(h, kv, bias=False, device=device, dtype=dtype)
            self.value = nn.Linear(h, kv, bias=False, device=device, dtype=dtype)
        self.output = nn.Linear(h, h, bias=self.one_projection, device=device, dtype=dtype)
        self.dropout = Dropout(config.attention_dropout)

    def forward(
        self, x: torch.Tensor, rotation: Rotation | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Mix what each token may see into it.

        Args:
            x: (b, s, h).
            rotation: What `labkit.model.rotary.rotation` says of the tokens' positions; None: they are not turned.
            mask: What `causal_mask` says of them; None: token i sees tokens 0 … i.

        Returns:
            (b, s, h).
        """
        q, k, v = self.heads(x)  # (b, s, a, d), then twice (b, s, kv heads, d)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (b, a, s, d), then twice (b, kv heads, s, d)
        attend = fused_attention if self.fused else explicit_attention
        x = self.run_core(attend, q, k, v, mask, self.dropout)  # (b, a, s, d)
        return self.output(x.transpose(1, 2).flatten(2))  # (b, s, h)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, (b, s, heads, d) each."""
        if self.one_projection:
            return self.qkv(x).unflatten(-1, (3, -1, self.head_size)).unbind(2)
        return tuple(p(x).unflatten(-1, (-1, self.head_size)) for p in (self.query, self.key, self.value))


def explicit_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: Dropout
) -> torch.Tensor:
    """softmax(qkᵀ/√d + mask)·v, step by step.

    For backward it keeps q, k, v, the probabilities (s² a head), and with dropout its mask and what it left of them.
    The scores before the softmax are kept by nobody, so they are scaled and masked in place; the mask is added, not
    filled in, since a fill would keep it.

    Args:
        q: (b, a, s, d).
        k: (b, kv heads, s, d).
        v: As `k`.
        mask: To be added to the scores, (s, s) or (b, 1, s, s).
        dropout: Of the probabilities.

    Returns:
        (b, a, s, d).
    """
    b, a, s, d = q.shape
    groups = k.shape[1]
    if mask is None:
        mask = causal_mask(torch.arange(s, device=q.device), q.dtype)
    q = q.reshape(b, groups, a // groups * s, d)  # the queries of heads that share a key head, one below the other
    scores = (q @ k.transpose(-2, -1)).mul_(d**-0.5)  # (b, groups, a/groups · s, s)
    scores = scores.view(b, a, s, s).add_(mask)
    probabilities = dropout(scores.softmax(dim=-1))  # (b, a, s, s)
    context = probabilities.view(b, groups, a // groups * s, s) @ v  # (b, groups, a/groups · s, d)
    return context.view(b, a, s, d)


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: Dropout
) -> torch.Tensor:
    """The same in one operation, which makes the s×s matrix piece by piece and again in backward.

    It keeps q, k, v, its output and one fp32 number (the log of the softmax's sum) a head and token; a mask, where one
    is given, too. With dropout, torch takes the explicit way on a CPU, in fp32.
    """
    dropped = dropout.p if dropout.training else 0.0
    with dropout.drawing() if dropped else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropped, is_causal=mask is None, enable_gqa=k.shape[1] < q.shape[1]
        )


def causal_mask(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a token may look, −∞ where the other one comes later: by position, in whichever order they stand.

    Args:
        positions: (s,) or (b, s).
        dtype: Of the scores to which it is added.

    Returns:
        (s, s), or (b, 1, s, s), one for all heads. Row: who looks; column: at whom.

    Example:
        >>> causal_mask(torch.tensor([0, 2, 1]), torch.float32)
        tensor([[0., -inf, -inf],
                [0., 0., 0.],
                [0., -inf, 0.]])
    """
    later = positions.unsqueeze(-2) > positions.unsqueeze(-1)  # (…, s, s)
    mask = torch.zeros(later.shape, device=positions.device, dtype=dtype).masked_fill_(later, float("-inf"))
    return mask if positions.dim() == 1 else mask.unsqueeze(1)
