"""When units are gathered, freed and reduced: hooks on modules and outputs, one order on all ranks.

Forward: a unit is gathered before its module runs, and freed after it. Backward: it is gathered when the gradient of its
output has come, and once the gradients of all its parameters are there it is freed and they are reduced. Meanwhile the
next unit in that order is gathered beside the computation, if `prefetch` says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from labkit.data_parallel.reducer import in_backward
from labkit.zero.flat_shard import FlatShard, Reduction
from labkit.zero.unit import Unit


class Conductor:
    """The units of one model, and what is under way.

    Args:
        units: In the order in which they are expected to run: the root first.
        prefetch: How many units ahead of the running one are gathered; 0: none, and nothing is asynchronous.
    """

    def __init__(self, units: Sequence[Unit], prefetch: int) -> None:
        self.units, self.prefetch = list(units), prefetch
        self._begun = list(units)  # the order in which the last forward entered units
        self._ended = [*units[1:], *units[:1]]  # and left them: backward goes through it from its end
        self._running: list[Unit] = []
        self._entering: list[Unit] = []
        self._leaving: list[Unit] = []
        self._backward_runs = False
        self._reductions: list[Reduction] = []  # of the unit that was complete last

    def watch(self, unit: Unit) -> None:
        """From now on the unit's module tells when it runs, its parameters when their gradients come."""
        unit.module.register_forward_pre_hook(lambda _, args, kwargs: self.before_forward(unit), prepend=True,
                                              with_kwargs=True)  # fmt: skip
        unit.module.register_forward_hook(lambda _, args, outputs: self.after_forward(unit, outputs), always_call=True)
        unit.when_gradients_come(self.arrived)

    # Forward

    def before_forward(self, unit: Unit) -> None:
        repeated = in_backward()  # by a checkpoint
        if not self._running and not repeated:
            self._begin_forward()
        self._running.append(unit)
        self._entering.append(unit)
        self._have(unit)
        if not repeated:
            self._fetch_after(unit, self._begun)
        unit.show_full()

    def _begin_forward(self) -> None:
        if self._backward_runs:
            self._clean_up()
        self._entering, self._leaving = [], []
        for unit in self.units:
            unit.free()  # kept by a forward whose backward never came: the shards may have changed since

    def after_forward(self, unit: Unit, outputs: Any) -> None:
        """Also when the forward has raised an error: then `outputs` is ``None``."""
        while self._running and self._running.pop() is not unit:
            pass
        if unit.in_backward:  # a checkpoint has repeated its forward: backward goes on with it
            return
        unit.show_pieces()
        self._leaving.append(unit)
        graph = self._expect_backward(unit, outputs)
        if not (graph and (unit.keep or in_backward())):
            unit.free()
        if not self._running and not in_backward():
            self._end_forward()

    def _expect_backward(self, unit: Unit, outputs: Any) -> bool:
        """Whether there can be a backward; the gradient of any output announces it."""
        tensors = [t for t in tensors_of(outputs) if t.requires_grad and t.grad_fn is not None]
        version = unit.version
        for tensor in tensors:
            tensor.register_hook(lambda _: self.before_backward(unit, version))
        return bool(tensors)

    def _end_forward(self) -> None:
        """The outermost unit has ended: units gathered ahead that did not run are freed."""
        for unit in self.units:
            if unit not in self._leaving:
                unit.free()
        self._begun, self._ended = list(dict.fromkeys(self._entering)), list(dict.fromkeys(self._leaving))

    # Backward

    def before_backward(self, unit: Unit, version: int) -> None:
        """The gradient of an output has come."""
        if not self._backward_runs:
            self._backward_runs = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if version != unit.version:
            raise RuntimeError(
                f"the parameters of unit {unit.number} were changed between its forward and this backward, which would "
                "gather other values than the forward has used: call backward before the optimizer's step"
            )
        for other in self.units:  # ranks on which some parameter got no gradient must not fall behind
            if other.has_gradients and unit.module not in other.inside:
                self._finish(other)
        unit.in_backward = True
        self._have(unit)
        self._fetch_after(unit, self._ended[::-1])
        unit.show_full()

    def arrived(self, unit: Unit, flat: FlatShard, index: int) -> None:
        """A parameter's gradient is complete."""
        if any(reduction.of is flat for reduction in self._reductions):
            self._finish_reductions()
        flat.collect(index)
        if unit.is_complete:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """Backward needs the unit no more."""
        unit.in_backward = False
        unit.show_pieces()
        unit.free()
        if unit.has_gradients:
            self._finish_reductions()  # of the unit before: only one is under way
            self._reductions = unit.reduce(async_op=self.prefetch > 0)
            if not self.prefetch:
                self._finish_reductions()

    def _finish_reductions(self) -> None:
        for reduction in self._reductions:
            reduction.finish()
        self._reductions = []

    def _end_backward(self) -> None:
        """Units with parameters that got no gradient are still open."""
        for unit in reversed(self._ended):
            if unit.in_backward:
                self._finish(unit)
        self._finish_reductions()
        self._backward_runs = False
        for unit in self.units:
            unit.free()

    def _clean_up(self) -> None:
        """After a backward that an error cut short."""

    # Both

    def _have(self, unit: Unit) -> None:
        unit.gather(async_op=False)
        unit.wait()

    def _fetch_after(self, unit: Unit, order: list[Unit]) -> None:
        """Gather the next units beside what runs now."""
        if unit in order:
            at = order.index(unit) + 1
            for following in order[at : at + self.prefetch]:
                following.gather(async_op=True)


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """The tensors in what a forward returned: in tuples, dictionaries, dataclasses."""
    found = []
    for leaf in tree_leaves(outputs):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found
