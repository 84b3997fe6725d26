"""FlashAttention's idea in plain torch: the same attention, and no s×s matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from labkit.context_parallel.tiles import attend, attend_backward


def tiled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, tile: int = 256
) -> torch.Tensor:
    """softmax(qkᵀ/√d)·v, exactly, with memory that grows with s and not with s².

    For reading and counting; `torch.nn.functional.scaled_dot_product_attention` does it in one kernel, and fast.
    Backward keeps q, k, v, the output and one number a row, and makes each tile again.

    Args:
        q: (b, a, s, d).
        k, v: (b, kv heads, t, d); kv heads divides a. 16-bit tensors are widened to fp32, a tile at a time at most.
        causal: Token i sees tokens 0 … i.
        tile: Rows and columns of a tile; any number.

    Returns:
        (b, a, s, d), in q's type.

    Raises:
        TypeError, ValueError: Shapes that do not fit together, or a tile below 1.

    Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", algorithms
    1 and 4.

    >>> q = k = v = torch.randn(1, 2, 8, 4)
    >>> whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(tiled_attention(q, k, v, tile=3), whole, atol=1e-6)
    True
    """
    check(q, k, v, causal, tile)
    return _Tiled.apply(q, k, v, causal, tile)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, tile: int) -> torch.Tensor:
        q_at, k_at = [range(q.shape[2])], [range(k.shape[2])]
        with without_autocast(q):
            out, log_sum = attend(*grouped(q, k, v), q.shape[-1] ** -0.5, q_at, k_at, tile, causal)
        ctx.save_for_backward(q, k, v, narrow := out.flatten(1, 2).to(q.dtype), log_sum)
        ctx.q_at, ctx.k_at, ctx.tile, ctx.causal = q_at, k_at, tile, causal
        return narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        q, k, v, out, log_sum = ctx.saved_tensors
        wide_q, wide_k, wide_v = grouped(q, k, v)
        wide_grad, wide_out = as_grouped(grad, k), as_grouped(out, k)
        delta = (wide_grad * wide_out).sum(-1, keepdim=True)
        with without_autocast(q):
            grads = attend_backward(
                wide_q, wide_k, wide_v, wide_grad, log_sum, delta, q.shape[-1] ** -0.5, ctx.q_at, ctx.k_at, ctx.tile,
                ctx.causal,
            )  # fmt: skip
        return *(g.flatten(1, 2).to(q.dtype) for g in grads), None, None


def without_autocast(x: torch.Tensor) -> torch.autocast:
    """Under autocast products would be narrower in forward than in backward."""
    return torch.autocast(x.device.type, enabled=False)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries by the key head that they share, (b, g, r, s, d); keys and values (b, g, 1, t, d); fp32 at least."""
    return as_grouped(q, k), as_grouped(k, k), as_grouped(v, k)


def as_grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (k.shape[1], -1)).to(torch.promote_types(x.dtype, torch.float32))


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, tile: int) -> None:
    """
    Raises:
        TypeError, ValueError: The three do not fit together, or the tile is no whole number from 1.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4 or not x.is_floating_point():
            said = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"{name} is {said}: expected floats, (b, heads, tokens, d)")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: expected one type")
    if not k.shape[1] or not q.shape[3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: expected at least one head, and d from 1")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected the same b and d, k "
                         "like v, and key heads that divide q's heads")  # fmt: skip
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal with {q.shape[2]} queries and {k.shape[2]} keys: expected as many")
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise ValueError(f"tile={tile!r}: expected a whole number, at least 1")
