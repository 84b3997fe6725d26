"""`accumulate`: a large batch as several micro-batches, whose gradients add up to that of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from operator import index
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist

from labkit import collectives, device

T = TypeVar("T")


@dataclass
class MicroBatch(Generic[T]):
    """One of a window's micro-batches; ``with micro:`` around its forward and backward.

    Attributes:
        batch: What `batches` gave.
        weight: To multiply the loss by, so that the window's gradients add up to that of its mean loss.
        last: Whether it is its window's last: gradients are averaged over ranks in its backward, and then it is time
            for a step.
    """

    batch: T
    weight: float
    last: bool
    _model: Any = field(default=None, repr=False)
    _quiet: Any = field(default=None, repr=False)

    def __enter__(self) -> Self:
        self._quiet = nullcontext() if self.last or self._model is None else self._model.no_sync()
        self._quiet.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._quiet.__exit__(*error)


def accumulate(
    batches: Iterable[T],
    k: int,
    model: Any = None,
    tokens: Callable[[T], int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Iterator[MicroBatch[T]]:
    """Go through micro-batches in windows of k, each window one step; a last window of fewer is one too.

    A window is read ahead, since weights hang on all of it: 1/n of n micro-batches when the loss is a mean, 1/tokens
    when it is a sum over tokens. Means of means are not the mean where micro-batches differ in tokens. With a model
    that averages over ranks, tokens are counted over all of them (an all-reduce of 8 bytes a window), and the factor N
    makes up for the average.

    Args:
        batches: Any number of them, or without end.
        k: Micro-batches of a window.
        model: Whose ``no_sync()`` keeps gradients from being averaged before the window's last backward: labkit's and
            torch's DistributedDataParallel, `zero.ShardedOptimizer`. ``None``: nothing is averaged over ranks.
        tokens: How many tokens of a batch the loss counts; then the loss is to be their *sum*. ``None``: it is a mean.
        group: The ranks over which `model` averages; ``None`` is the world.

    Yields:
        `MicroBatch`. As many windows on each rank: one that has fewer leaves the others waiting, which ends in an error
        that names it.

    Raises:
        TypeError: `batches` cannot be gone through, `k` is no whole number, `model` has no ``no_sync``, or `tokens`
            cannot be called or gives no whole number.
        ValueError: k below 1; a negative number of tokens.

    Example:
        >>> for micro in accumulate(["a", "b", "c"], k=2):
        ...     with micro:
        ...         pass                       # (loss(model, micro.batch) * micro.weight).backward()
        ...     print(micro.batch, micro.weight, micro.last)  # if micro.last: optimizer.step(), optimizer.zero_grad()
        a 0.5 False
        b 0.5 True
        c 1.0 True

    Source: as in Ott et al. 2018, "Scaling Neural Machine Translation", section 3.
    """
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches is {type(batches).__name__}: expected a list of micro-batches, or a DataLoader")
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k is {k!r}: expected a whole number of micro-batches")
    if k < 1:
        raise ValueError(f"k={k}: expected at least 1 micro-batch a step")
    if model is not None and not callable(getattr(model, "no_sync", None)):
        raise TypeError(f"model is {type(model).__name__}, which has no no_sync(): give what averages the gradients "
                        "(DistributedDataParallel, ShardedOptimizer), or nothing")  # fmt: skip
    if tokens is not None and not callable(tokens):
        raise TypeError(
            f"tokens is {type(tokens).__name__}: expected a function of a batch, such as torch.Tensor.numel"
        )
    return _windows(iter(batches), k, model, tokens, group)


def _windows(
    batches: Iterator[T], k: int, model: Any, tokens: Callable[[T], int] | None, group: dist.ProcessGroup | None
) -> Iterator[MicroBatch[T]]:
    while window := list(islice(batches, k)):
        if tokens is None:
            weight = 1 / len(window)
        else:
            weight = _per_token([_number(tokens(batch)) for batch in window], model is not None, group)
        for n, batch in enumerate(window):
            yield MicroBatch(batch, weight, n == len(window) - 1, model)


def _number(count: Any) -> int:
    """Also of a tensor that holds one, such as ``(batch != padding).sum()``."""
    try:
        number = index(count)
    except TypeError:
        raise TypeError(f"tokens gave {count!r}: expected the number of tokens of a batch, a whole number") from None
    if number < 0:
        raise ValueError(f"tokens gave {number}: expected the number of tokens of a batch, 0 or more")
    return number


def _per_token(counts: list[int], shared: bool, group: dist.ProcessGroup | None) -> float:
    """One over the window's tokens; N over those of all ranks, where the mean over N ranks is taken afterwards."""
    if not shared or not dist.is_initialized():
        return 1 / max(1, sum(counts))
    total = torch.tensor(sum(counts), dtype=torch.int64, device=device.current())
    collectives.all_reduce(total, group=group)
    return dist.get_world_size(group) / max(1, int(total))
