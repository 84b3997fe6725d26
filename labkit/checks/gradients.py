"""Gradients that the ranks ended with, against those of one process; and where they differ, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from labkit.checks.exercise import Case
from labkit.show.words import say


class Numbers(list[float]):
    """The numbers of a tensor, flat.

    Attributes:
        shape: Of the tensor.
    """

    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Numbers:
        numbers = cls(tensor.detach().double().flatten().tolist())
        numbers.shape = tuple(tensor.shape)
        return numbers


#: Name of a tensor → its numbers after a backward; ``None``: there is none.
Backward = dict[str, list[float] | None]
#: Beside the largest number of a tensor; fp32 sums in another order differ by less.
TOLERANCE = 1e-4


def taken(named: Iterable[tuple[str, torch.Tensor | None]]) -> Backward:
    """Tensors by name, as they are now."""
    return {name: None if t is None else Numbers.of(t) for name, t in named}


def gradients(module: torch.nn.Module) -> Backward:
    return taken((name, param.grad) for name, param in module.named_parameters())


def mean(of_ranks: list[list[Backward]]) -> list[Backward]:
    """The mean over ranks, backward by backward."""
    return [
        {name: [sum(numbers) / len(each) for numbers in zip(*(e[name] or [] for e in each), strict=True)]
         for name in each[0]}
        for each in zip(*of_ranks, strict=True)
    ]  # fmt: skip


def differing(case: Case, values: list[Any], expected: list[Any]) -> list[int]:
    """The ranks on which something is further from the expected than `TOLERANCE`, or is no gradient at all."""
    return [rank for rank, (have, want) in enumerate(zip(values, expected, strict=True)) if _first(have, want)]


def told(values: list[Any], expected: list[list[Backward]], own: list[list[Backward]] | None, rank: int) -> str:
    """The first number of a rank that is wrong, and what else it is: its own gradient, or a multiple."""
    have, want = values[rank], expected[rank]
    first = _first(have, want)
    if first is None or isinstance(have, str):
        return str(have)
    step, name, at = first
    mine, right = have[step].get(name), want[step][name] or [0.0]
    said = {"rank": rank, "backward": which(step), "name": name}
    if mine is None or len(mine) != len(right):
        return say("gradients.none", **said, want=f"{right[at]:.4g}")
    line = say("gradients.element", **said, element=at, want=f"{right[at]:.4g}", have=f"{mine[at]:.4g}")
    if own and own[rank][step].get(name) and near(mine, own[rank][step][name]):
        return line + say("gradients.own", rank=rank)
    ratio = mine[at] / right[at] if right[at] else 0.0
    whole = ratio and near(mine, [ratio * number for number in right])
    return line + say("gradients.ratio", ratio=f"{ratio:.3g}") if whole else line


def which(step: int) -> str:
    """A backward in words, counted from 0; no exercise has a third."""
    return say("gradients.first" if step == 0 else "gradients.second")


def _first(have: Any, want: list[Backward]) -> tuple[int, str, int] | None:
    """Backward, name and element of the first that is wrong."""
    if not isinstance(have, list):
        return 0, "", 0
    for step, (mine, right) in enumerate(zip(have, want, strict=True)):
        for name, numbers in right.items():
            given = mine[name]
            if given is None or len(given) != len(numbers or []):
                return step, name, 0
            if not near(given, numbers):
                largest = max(map(abs, numbers or []), default=0.0)
                return step, name, next(n for n, (a, b) in enumerate(zip(given, numbers or [], strict=True))
                                        if not abs(a - b) <= TOLERANCE * largest)  # fmt: skip
    return None


def near(have: list[float], want: list[float] | None) -> bool:
    """Whether no number is further from the wanted than `TOLERANCE`."""
    largest = max(map(abs, want or []), default=0.0)
    return all(abs(a - b) <= TOLERANCE * largest for a, b in zip(have, want or [], strict=True))
