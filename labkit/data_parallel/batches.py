"""Ranks with different numbers of batches, or of tokens in them, and with seeds of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from labkit import collectives, device

T = TypeVar("T")


def stop_together(batches: Iterable[T], group: dist.ProcessGroup | None = None) -> Iterator[T]:
    """Yield batches while every rank of the group has one: with 5 on rank 0 and 4 on rank 1, four on each.

    Costs an all-reduce of one byte a batch. `DistributedDataParallel.join` trains on the rest too.

    >>> for batch in stop_together(batches):               # doctest: +SKIP
    ...     train(model, batch)
    """
    mine = iter(batches)
    while True:
        batch = next(mine, _NONE)
        all_have = torch.tensor([batch is not _NONE], dtype=torch.uint8, device=device.current())
        collectives.all_reduce(all_have, op="min", group=group)
        if not all_have.item():
            return
        yield batch  # type: ignore[misc]


_NONE = object()


def token_mean(
    total: torch.Tensor, count: int | torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, float]:
    """The loss to call ``backward()`` on, so that the mean over ranks comes out as the mean over all tokens.

    DDP gives (1/N)·Σ ∂lossᵣ; the mean over tokens has the gradient Σ ∂totalᵣ / Σ countᵣ, so lossᵣ = totalᵣ·N / Σ count.
    With losses 4.0 on 3 tokens and 1.0 on 8 the mean of the ranks' means is 2.50, and that over tokens 20/11 = 1.82. A
    rank without tokens adds 0, and does not make a NaN of everything.

    Args:
        total: (), the sum of the losses of this rank's tokens.
        count: Tokens that it is the sum of. When gradients are accumulated: of all micro-batches of the step together.
        group: The data-parallel group.

    Returns:
        (loss, the mean over all tokens of the ranks' `total`, a number to print).

    Raises:
        ValueError: `total` is not one number, or `count` is negative.
    """
    if total.numel() != 1:
        raise ValueError(f"total has shape {tuple(total.shape)}: expected the sum of the losses, one number")
    if not float(count) >= 0 or float(count) % 1:
        raise ValueError(f"count={float(count):g}: expected the number of tokens, 0 or more")
    both = torch.stack(
        [total.detach().double().reshape(()), torch.as_tensor(count, dtype=torch.double, device=total.device)]
    )
    collectives.all_reduce(both, group=group)
    tokens = max(1.0, both[1].item())
    return total * (dist.get_world_size(group) / tokens), both[0].item() / tokens


def seed_apart(seed: int, group: dist.ProcessGroup | None = None) -> None:
    """From now on each data-parallel rank draws other random numbers: dropout and shuffling must differ between ranks.

    Build the module before, with one seed on all ranks. Ranks of other groups with the same place in this one draw the
    same, as a tensor-parallel group must.
    """
    torch.manual_seed(seed + 1 + dist.get_rank(group))
