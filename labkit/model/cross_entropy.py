"""The loss as a sum and a count, so that any number of ranks and micro-batches can be averaged without error."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from labkit.model.norm import widen


def loss(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy, summed over the targets that count, and how many those are.

    The mean over several ranks or micro-batches is (sum of sums)/(sum of counts); the mean of their means is another
    number as soon as counts differ. With no target to count, both are 0 and so is every gradient, where a mean would
    be 0/0.

    Args:
        logits: (…, V). In 16 bits they are widened to fp32 first; float64 stays.
        targets: (…), int64.
        ignore_index: Targets of this value do not count.

    Returns:
        The sum, a scalar in fp32 or float64, and the count, a scalar int64; both on the logits' device.

    Raises:
        TypeError: Targets that are no int64.
        ValueError: Shapes that do not fit; on a CPU also a target out of range.

    Example:
        >>> total, count = loss(torch.zeros(3, 256), torch.tensor([65, 66, -100]))
        >>> round(float(total / count), 3), int(count)  # ln 256
        (5.545, 2)
    """
    if targets.dtype != torch.int64:
        raise TypeError(f"targets is {targets.dtype}: expected torch.int64")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and logits {tuple(logits.shape)}: expected logits to be "
            "targets' shape, then one score a word"
        )
    scores = widen(logits).reshape(-1, logits.shape[-1])  # (b·s, V)
    try:
        total = F.cross_entropy(scores, targets.reshape(-1), ignore_index=ignore_index, reduction="sum")
    except IndexError as error:
        raise ValueError(
            f"targets: {error} Expected 0 … {logits.shape[-1] - 1}, or ignore_index={ignore_index}"
        ) from None
    return total, (targets != ignore_index).sum()
