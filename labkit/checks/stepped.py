"""What exercises of chapter 08 hand to a learner's function: steps that note their gradients, and a backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from labkit.checks.alone import in_short


class Stepped:
    """A step of an optimizer. It notes what the gradients are as it is called.

    Attributes:
        calls: How many there were.
        first: Of the first: the gradients' numbers, one after the other.
    """

    def __init__(self, grads: list[torch.Tensor]) -> None:
        self.grads, self.calls = grads, 0
        self.first: list[float] = []

    def __call__(self) -> None:
        if not self.calls:
            self.first = [x for grad in self.grads for x in grad.flatten().tolist()]
        self.calls += 1


class Batch(NamedTuple):
    """A micro-batch.

    Attributes:
        tokens: That count.
        each: The gradient of a token's loss, the same for all weights.
        touches: Whether the loss depends on the second parameter.
        number: Its place.
    """

    tokens: int
    each: float = 1.0
    touches: bool = True
    number: int = 0


#: The gradients that a step was called with, or in words what is strange about them; and micro-batches before it.
Step = tuple[list[list[float]] | str, int]


class Accumulating:
    """Two parameters in bf16, a backward and a step.

    Attributes:
        params: Of `size` weights, and of two.
        order: The micro-batches whose backward was called.
        steps: What the step was called with.
    """

    def __init__(self, size: int) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in (size, 2)]
        self.order: list[int] = []
        self.steps: list[Step] = []

    def backward(self, batch: Batch) -> int:
        """Of the sum of the tokens' losses; returns the tokens."""
        for param in self.params if batch.touches else self.params[:1]:
            (param * (batch.tokens * batch.each)).sum().backward()
        self.order.append(batch.number)
        return batch.tokens

    def step(self, grads: Any) -> None:
        self.steps.append((self._read(grads), len(self.order)))

    def _read(self, grads: Any) -> list[list[float]] | str:
        """The first numbers of each."""
        if not isinstance(grads, (list, tuple)) or not all(isinstance(grad, torch.Tensor) for grad in grads):
            return in_short(grads)
        if [tuple(grad.shape) for grad in grads] != [tuple(param.shape) for param in self.params]:
            return str([tuple(grad.shape) for grad in grads])
        if strange := [grad.dtype for grad in grads if grad.dtype not in (torch.float32, torch.float64)]:
            return str(strange[0])
        return [grad.double().flatten()[:4].tolist() for grad in grads]
