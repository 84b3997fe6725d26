"""What the tests of `labkit.context_parallel` and `show.tiles` run on ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit import context_parallel, device
from labkit.context_parallel import Tile, tiles
from labkit.context_parallel import ring as ring_module
from labkit.trace import span

ORDERS = {"zigzag": context_parallel.zigzag, "contiguous": context_parallel.contiguous}


def strided(length: int, rank: int, ranks: int) -> torch.Tensor:
    """An order that ring attention does not know: every N-th token."""
    return torch.arange(rank, length, ranks)


def whole(length: int, kv_heads: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v of the whole sequence, the same on every rank, and the gradient of the output."""
    torch.manual_seed(0)
    shapes = [(2, 4, length, 8), (2, kv_heads, length, 8), (2, kv_heads, length, 8)]
    made = [torch.randn(shape, dtype=dtype, device=device.current()) for shape in (*shapes, shapes[0])]
    return made[:3], made[3]


def reference(given: list[torch.Tensor], grad: torch.Tensor, causal: bool) -> list[torch.Tensor]:
    """Torch's attention over the whole sequence: the output, and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in given]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


def ring(order: str, causal: bool, kv_heads: int, tile: int, each: int = 16, members: tuple[int, ...] = ()) -> Any:
    """Ring attention, both directions, in float64: how far off it is, and where this rank's tiles lie."""
    group = dist.new_group(list(members)) if members else None
    if members and dist.get_rank() not in members:
        return 0.0, []
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    given, grad = whole(each * ranks, kv_heads, torch.float64)
    deal, dealt = (ORDERS[order], {"order": order}) if order in ORDERS else (strided, {})
    mine = deal(each * ranks, me, ranks)
    parts = [x[:, :, mine].clone().requires_grad_() for x in given]
    with context_parallel.count_traffic() as traffic:
        out = context_parallel.ring_attention(*parts, group=group, causal=causal, tile=tile, **dealt)
        out.backward(grad[:, :, mine])
    found = [out.detach(), *(x.grad for x in parts)]
    expected = reference(given, grad, causal)
    return max((a - b[:, :, mine]).abs().max().item() for a, b in zip(found, expected, strict=True)), traffic.places


def half() -> tuple[list[torch.dtype], float, bool]:
    """Ring attention of bf16 tensors: the types, how far off the exact one, and whether what travels is bf16."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    given, grad = whole(16 * ranks, 2, torch.bfloat16)
    mine = context_parallel.zigzag(16 * ranks, me, ranks)
    parts = [x[:, :, mine].clone().requires_grad_() for x in given]
    out = context_parallel.ring_attention(*parts)
    out.backward(grad[:, :, mine])
    found = [out.detach(), *(x.grad for x in parts)]
    expected = reference([x.double() for x in given], grad.double(), True)
    off = max((a - b[:, :, mine]).abs().max().item() for a, b in zip(found, expected, strict=True))
    return [x.dtype for x in found], off, max(x.abs().max().item() for x in expected)


def in_spans() -> None:
    """Ring attention whose blocks stand in the trace as what they are, computation."""

    def seen(work: Any) -> Any:
        def attend(*args: Any) -> Any:
            with span(work.__name__, kind="compute"):
                return work(*args)

        return attend

    given, grad = whole(16, 4, torch.float32)
    for x in given:
        x.requires_grad_()
    with (
        mock.patch.object(ring_module, "attend", seen(tiles.attend)),
        mock.patch.object(ring_module, "attend_backward", seen(tiles.attend_backward)),
    ):
        context_parallel.ring_attention(*given).backward(grad)


def refused(what: str) -> str:
    q = torch.zeros(1, 4, 6, 2)
    calls: dict[str, Any] = {
        "odd": lambda: context_parallel.ring_attention(q[:, :, :5], q[:, :, :5], q[:, :, :5]),
        "tile": lambda: context_parallel.ring_attention(q, q, q, tile=0),
        "float tile": lambda: context_parallel.ring_attention(q, q, q, tile=2.0),  # type: ignore[arg-type]
        "order": lambda: context_parallel.ring_attention(q, q, q, order="striped"),
        "keys": lambda: context_parallel.ring_attention(q, q[:, :, :4], q[:, :, :4], causal=False),
        "heads": lambda: context_parallel.ring_attention(q, q[:, :3], q[:, :3]),
        "shape": lambda: context_parallel.ring_attention(q[0], q, q),
        "integers": lambda: context_parallel.ring_attention(q.long(), q, q),
    }
    try:
        calls[what]()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def places(order: str, tile: int, backward: bool = False) -> list[Tile]:
    """Where this rank's tiles lie, with 16 tokens a rank."""
    q = torch.zeros(1, 1, 16, 4, requires_grad=backward)
    with context_parallel.count_traffic() as traffic:
        out = context_parallel.ring_attention(q, q, q, order=order, tile=tile)
        if backward:
            out.sum().backward()
    return traffic.places


def tiled_places(length: int, tile: int, **more: Any) -> list[Tile]:
    q = torch.zeros(1, 1, length, 4)
    with context_parallel.count_traffic() as traffic:
        context_parallel.tiled_attention(q, q, q, tile=tile, **more)
    return traffic.places
