"""A stage of a pipeline that exercise 6.6 hands to a learner's loop: it notices what is done with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labkit.checks.exercise import Case
from labkit.show.words import say

T = torch.Tensor


class Stage:
    """Its forward and backward.

    Stage r makes 2x + r + 1 of x, and 3g + r + 1 of a gradient g. The first makes its x itself, the last its g.

    Attributes:
        order: What was called, as words.
        fault: The first that was wrong with it, in words.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.order: list[str] = []
        self.fault = ""
        self.held: dict[int, tuple[T | None, T | None]] = {}  # micro-batch → its input, and a copy of it

    def forward(self, i: int, x: T | None) -> T:
        self._note("F", i, x, self.rank == 0)
        self.held[i] = x, None if x is None else x.clone()
        return 2 * (x if x is not None else first(self.case, i)) + self.rank + 1

    def backward(self, i: int, grad: T | None) -> T:
        self._note("B", i, grad, self.rank == self.case.ranks - 1)
        if i not in self.held:
            self._wrong(say("one_f_one_b_loop.early", rank=self.rank, micro_batch=i))
        x, copy = self.held.pop(i, (None, None))
        if x is not None and copy is not None and not torch.equal(x, copy):
            self._wrong(say("one_f_one_b_loop.overwritten", rank=self.rank, micro_batch=i))
        return 3 * (grad if grad is not None else first(self.case, i)) + self.rank + 1

    def _note(self, kind: str, i: int, given: T | None, at_the_end: bool) -> None:
        word = f"{kind}{i}"
        self.order.append(word)
        want = None if at_the_end else arriving(self.case, kind, i, self.rank)
        if (given is None) != (want is None):
            key = "one_f_one_b_loop.not_none" if want is None else "one_f_one_b_loop.none"
            self._wrong(say(key, rank=self.rank, word=word))
        elif given is not None and want is not None and not _same(given, want):
            others = (j for j in range(self.case.more) if _same(given, arriving(self.case, kind, j, self.rank)))
            if (whose := next(others, None)) is None:
                self._wrong(say("one_f_one_b_loop.given", rank=self.rank, word=word))
            else:
                self._wrong(say("one_f_one_b_loop.whose", rank=self.rank, word=word, whose=f"{kind}{whose}"))

    def _wrong(self, text: str) -> None:
        self.fault = self.fault or text


def first(case: Case, i: int) -> T:
    """What comes into the pipeline for micro-batch i, from either end: whole numbers, exact in fp32."""
    return torch.arange(case.elements).remainder(7).float() + 10 * i


def arriving(case: Case, kind: str, i: int, rank: int) -> T:
    """The input, or the gradient, that a stage gets of micro-batch i."""
    x = first(case, i)
    for stage in range(rank) if kind == "F" else reversed(range(rank + 1, case.ranks)):
        x = (2 if kind == "F" else 3) * x + stage + 1
    return x


def _same(have: Any, want: T) -> bool:
    return isinstance(have, torch.Tensor) and have.shape == want.shape and torch.equal(have, want)
