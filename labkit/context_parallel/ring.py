"""Ring attention: a sequence too long for one rank. Queries stay, keys and values go round.

    step 0   every rank attends to its own keys and values, and sends them on
    step i   it attends to those of the rank i places before it, while the next ones arrive

After N − 1 steps every query has seen every key. The pieces combine exactly, as tiles do. With causal attention early
tokens see few keys and late ones many; so that ranks have equal work, the sequence is cut into 2N chunks, and rank r
holds chunks r and 2N − 1 − r (*zig-zag*).

Sources: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"; zig-zag:
Brandon et al. 2023, "Striped Attention", and Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from labkit.collectives.check import member, whole_number
from labkit.context_parallel.tiled import as_grouped, check, without_autocast
from labkit.context_parallel.tiles import attend, attend_backward, combine
from labkit.trace import label

Group = dist.ProcessGroup | None
#: How a sequence is dealt to the ranks.
ORDERS = ("zigzag", "contiguous")


def zigzag(length: int, rank: int, ranks: int) -> torch.Tensor:
    """The tokens that a rank holds, (length/N): chunks `rank` and 2N − 1 − `rank` of 2N.

    Give them to the model as `positions`, and take the same ones of tokens and targets.

    Raises:
        ValueError: 2N does not divide the length.

    >>> zigzag(8, 0, 2), zigzag(8, 1, 2)
    (tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5]))
    """
    return torch.cat([torch.arange(run.start, run.stop) for run in _runs("zigzag", length, rank, ranks)])


def contiguous(length: int, rank: int, ranks: int) -> torch.Tensor:
    """The tokens that a rank holds, (length/N), if each has one chunk: under causal attention the last works most.

    Raises:
        ValueError: N does not divide the length.

    >>> contiguous(8, 0, 2), contiguous(8, 1, 2)
    (tensor([0, 1, 2, 3]), tensor([4, 5, 6, 7]))
    """
    return torch.cat([torch.arange(run.start, run.stop) for run in _runs("contiguous", length, rank, ranks)])


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group = None, causal: bool = True, tile: int = 256,
    order: str = "zigzag",
) -> torch.Tensor:  # fmt: skip
    """Attention over a sequence of which each rank holds s/N tokens.

    Forward sends keys and values N − 1 times; backward sends them again, with their gradients, which come home in a
    last step.

    Args:
        q: (b, a, s/N, d), this rank's tokens.
        k, v: (b, kv heads, s/N, d), as many tokens on every rank.
        group: The ranks that share the sequence; ``None`` is the world.
        causal: A token sees those that do not come after it.
        tile: Of the tiles that a rank's block is computed in; see `labkit.context_parallel.tiled_attention`.
        order: Which tokens a rank holds: ``"zigzag"`` as `zigzag` says, ``"contiguous"`` as `contiguous` says. Without
            `causal` any order gives the same, and tiles are noted as if contiguous.

    Returns:
        (b, a, s/N, d), in q's type.

    Raises:
        TypeError, ValueError: Shapes that do not fit together, a tile below 1, an unknown order, or in zig-zag order an
            odd number of tokens on a rank.

    Source: Liu et al. 2023, algorithm 1.

    >>> def attend(q, k, v):                            # whole on every rank
    ...     mine = zigzag(q.shape[2], dist.get_rank(), dist.get_world_size())
    ...     return ring_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine])
    >>> labkit.run(attend, q, k, v, ranks=4)            # doctest: +SKIP
    """
    member(group)
    check(q, k, v, causal, tile)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} tokens, k {k.shape[2]}: expected as many, those that this rank holds")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: expected one of {', '.join(map(repr, ORDERS))}")
    ranks = dist.get_world_size(group)
    dealt = order if causal else "contiguous"
    at = [_runs(dealt, q.shape[2] * ranks, rank, ranks) for rank in range(ranks)]
    return _Ring.apply(q, k, v, group, causal, tile, at)


def _runs(order: str, length: int, rank: int, ranks: int) -> list[range]:
    """Where the tokens of a rank stand: the chunks that it holds."""
    whole_number("length", length, least=0)
    if whole_number("rank", rank, least=0) >= whole_number("ranks", ranks):
        raise ValueError(f"rank={rank} of {ranks} ranks: expected 0 to {ranks - 1}")
    chunks = 2 * ranks if order == "zigzag" else ranks
    if length % chunks:
        each = "two chunks" if order == "zigzag" else "a chunk"
        raise ValueError(f"{length} tokens on {ranks} ranks: expected a multiple of {chunks}, for {each} each")
    size = length // chunks
    held = (rank, chunks - 1 - rank) if order == "zigzag" else (rank,)
    return [range(size * chunk, size * (chunk + 1)) for chunk in held]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, causal: bool, tile: int,
        at: list[list[range]],
    ) -> torch.Tensor:  # fmt: skip
        wide_q, scale, mine = as_grouped(q, k), q.shape[-1] ** -0.5, at[dist.get_rank(group)]
        held = torch.stack([k, v])  # (2, b, kv heads, s/N, d)
        out, log_sum = torch.zeros_like(wide_q), wide_q.new_full((*wide_q.shape[:-1], 1), float("-inf"))
        for step, source in enumerate(_sources(group)):
            with label(step=step):
                passing = _Passing(held, group) if step < len(at) - 1 else None
                k_now, v_now = (as_grouped(x, k) for x in held)
                with without_autocast(q):
                    more = attend(wide_q, k_now, v_now, scale, mine, at[source], tile, causal)
                out, log_sum = combine(out, log_sum, *more) if step else more
                if passing is not None:
                    held = passing.wait()
        narrow = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, narrow, log_sum)
        ctx.group, ctx.causal, ctx.tile, ctx.at = group, causal, tile, at
        return narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        q, k, v, out, log_sum = ctx.saved_tensors
        wide_q, wide_grad, scale = as_grouped(q, k), as_grouped(grad, k), q.shape[-1] ** -0.5
        delta = (wide_grad * as_grouped(out, k)).sum(-1, keepdim=True)
        mine, ranks = ctx.at[dist.get_rank(ctx.group)], len(ctx.at)
        held, grad_q = torch.stack([k, v]), torch.zeros_like(wide_q)
        carried = torch.zeros_like(torch.stack([as_grouped(k, k), as_grouped(v, k)]))  # the gradients of what is held
        returning = None
        for step, source in enumerate(_sources(ctx.group)):
            with label(step=step):
                passing = _Passing(held, ctx.group) if step < ranks - 1 else None
                k_now, v_now = (as_grouped(x, k) for x in held)
                with without_autocast(q):
                    of_q, of_k, of_v = attend_backward(
                        wide_q, k_now, v_now, wide_grad, log_sum, delta, scale, mine, ctx.at[source], ctx.tile,
                        ctx.causal,
                    )  # fmt: skip
                grad_q += of_q
                if returning is not None:  # they follow what they belong to, one step behind
                    carried = returning.wait()
                carried = carried + torch.stack([of_k, of_v])
                if ranks > 1:
                    returning = _Passing(carried, ctx.group, tag=1)
                if passing is not None:
                    held = passing.wait()
        home = carried if returning is None else returning.wait()
        grad_k, grad_v = (x.flatten(1, 2).to(k.dtype) for x in home)
        return grad_q.flatten(1, 2).to(q.dtype), grad_k, grad_v, None, None, None, None


def _sources(group: Group) -> list[int]:
    """Whose keys and values a rank holds at each step."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return [(rank - step) % ranks for step in range(ranks)]


class _Passing:
    """A message to the next rank and one from the rank before, under way."""

    def __init__(self, sent: torch.Tensor, group: Group, tag: int = 0) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._sent, self._arriving = sent.contiguous(), torch.empty_like(sent, memory_format=torch.contiguous_format)
        to, source = ((rank + 1) % ranks, (rank - 1) % ranks)
        if group is not None:
            to, source = dist.get_global_rank(group, to), dist.get_global_rank(group, source)
        self._works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, self._sent, to, group, tag),
            dist.P2POp(dist.irecv, self._arriving, source, group, tag),
        ])  # fmt: skip

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._arriving
