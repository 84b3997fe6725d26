"""One stage of a pipeline: its module, and for each micro-batch under way what backward needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from labkit.pipeline.deferred import PutOff, Waiting

Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _Held:
    """Of a micro-batch between its F and its B (or W).

    Attributes:
        inputs: What came in; backward fills their gradients.
        edges: Where backward enters: the outputs' places in the graph, not the outputs, which may go once sent.
        waiting: Gradients of weights that B leaves for W; ``None`` where it leaves none.
    """

    inputs: Tensors
    edges: list[GradientEdge]
    waiting: Waiting | None


class PipelineStage:
    """A module as a stage: F, B and W of one micro-batch at a time, in any order that its dependencies allow.

    Override `forward`, `backward` or `weight` to do something around them.

    Args:
        module: Takes and returns a tensor, or several as arguments and as a tuple.

    Example:
        >>> stage = PipelineStage(torch.nn.Linear(2, 2))
        >>> (y,) = stage.forward(0, (torch.ones(1, 2, requires_grad=True),))
        >>> (grad,) = stage.backward(0, [torch.ones(1, 2)])
        >>> torch.equal(grad, stage.module.weight.sum(0)[None])
        True
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._held: dict[int, _Held] = {}

    def forward(
        self,
        micro_batch: int,
        inputs: Tensors,
        finish: Callable[[Any], torch.Tensor] | None = None,
        split: bool = False,
    ) -> Tensors:
        """F: the module's outputs, cut from their graph, which the stage keeps. Those in it have ``requires_grad``.

        Args:
            micro_batch: Its number.
            inputs: What the module takes; those with ``requires_grad`` get a gradient in B.
            finish: What the last stage does with the output: makes the loss of it.
            split: Leave the weights' gradients for `weight`.
        """
        held = _Held(inputs, [], Waiting() if split else None)
        with self._put_off(held):
            made = self.module(*inputs)
            outputs = as_tuple(made if finish is None else finish(made))
        held.edges = [get_gradient_edge(y) for y in outputs if y.requires_grad]
        if torch.is_grad_enabled():
            self._held[micro_batch] = held
        return tuple(y.detach().requires_grad_(y.requires_grad) for y in outputs)

    def backward(self, micro_batch: int, grads: Sequence[torch.Tensor]) -> Tensors:
        """B: from the gradients of the outputs that have ``requires_grad`` those of the inputs that have it."""
        held = self._held[micro_batch]
        if held.waiting is not None:
            held.waiting.open = True
        if held.edges:
            with self._put_off(held):  # what is recomputed in backward puts off as well
                torch.autograd.backward(held.edges, list(grads))
        found = tuple(x.grad if x.grad is not None else torch.zeros_like(x) for x in held.inputs if x.requires_grad)
        held.inputs, held.edges = (), []
        if held.waiting is None:
            del self._held[micro_batch]
        return found

    def weight(self, micro_batch: int) -> None:
        """W: what B has left."""
        waiting = self._held.pop(micro_batch).waiting
        if waiting is not None:
            waiting.finish()

    def _put_off(self, held: _Held) -> AbstractContextManager[Any]:
        return nullcontext() if held.waiting is None else PutOff(held.waiting, self.module.parameters())

    def forget(self) -> None:
        """Let go of what a step that was cut short has left."""
        self._held.clear()


def as_tuple(made: Any) -> Tensors:
    """
    Raises:
        TypeError: A module returned something else than a tensor or a tuple of tensors.
    """
    outputs = made if isinstance(made, tuple) else (made,)
    for y in outputs:
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"a stage returned {type(y).__name__}: expected a tensor or a tuple of tensors")
    return outputs
