"""When units are gathered, freed and reduced: hooks on modules and their outputs, and one order on all ranks.

Forward: a unit is gathered before its module runs, and freed after it. Backward: it is gathered again when the gradient
of its output has come; once the gradients of all its parameters are there, it is freed and they are reduced. Meanwhile
the next unit in that order is gathered beside the computation, if `prefetch` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from labkit.data_parallel.reducer import in_backward, tensors_of
from labkit.zero.flat_shard import FlatShard, Reduction
from labkit.zero.unit import Unit


class Conductor:
    """The units of one model, and what is under way.

    Args:
        units: In the order in which they are expected to run: the root first.
        prefetch: How many units ahead of the running one are gathered. 0: none, and nothing is asynchronous.
    """

    def __init__(self, units: Sequence[Unit], prefetch: int) -> None:
        self.units, self.prefetch = list(units), prefetch
        self._entered = list(units)  # the order in which the last forward entered units
        self._left = [*units[1:], units[0]]  # and left them: backward goes through it from its end
        self._running: list[Unit] = []
        self._entering: list[Unit] = []
        self._leaving: list[Unit] = []
        self._finished: list[Unit] = []
        self._backward_runs = False
        self._reductions: list[Reduction] = []  # of one unit, the last that was finished
        self._pieces = {piece for unit in units for flat in unit.flats for piece in flat.pieces}
        for number, unit in enumerate(self.units, start=-1):
            unit.number, unit.conductor = number, self

    # Forward

    def before_forward(self, unit: Unit, inputs: Any) -> bool:
        """Returns whether backward ends in the unit only when the gradients of its inputs are there."""
        repeated = in_backward()  # by a checkpoint
        if not self._running and not repeated:
            self._begin_forward()
        self._running.append(unit)
        self._have(unit)
        if not repeated:
            self._entering.append(unit)
            self._fetch_after(unit, self._entered, self._leaving)
        unit.show_full()
        waits = [t for t in tensors_of(inputs) if t.requires_grad] if unit.has_frozen and not repeated else []
        if waits and torch.is_grad_enabled():
            register_multi_grad_hook(waits, lambda _: self._inputs_done(unit))
        return bool(waits)

    def _begin_forward(self) -> None:
        cut_short = self.rest()
        for unit in self.units:
            if (name := unit.changed()) is not None:
                raise RuntimeError(
                    f"{name} was replaced, moved, cast, frozen or unfrozen since the module was sharded: change the "
                    "module first, then shard it"
                )
            if cut_short and any(piece.grad is not None for flat in unit.flats for piece in flat.pieces):
                raise RuntimeError("the backward before was cut short, so some gradients are there and some are not: "
                                   "call zero_grad() before the next forward")  # fmt: skip
            unit.free()  # kept by a forward whose backward never came: the shards may have changed since
        for added, param in self.units[0].module.named_parameters():
            if param not in self._pieces:
                raise RuntimeError(f"{added} was put into the module since that was sharded, and would not be "
                                   "averaged: change the module first, then shard it")  # fmt: skip
        self._entering, self._leaving = [], []

    def after_forward(self, unit: Unit, inputs: Any, outputs: Any, waits: bool) -> None:
        """Also when the forward has raised an error: then `outputs` is ``None``."""
        while self._running and self._running.pop() is not unit:
            pass
        if unit.in_backward:  # a checkpoint has repeated its forward, and backward goes on with it
            return
        unit.show_pieces()
        self._leaving.append(unit)
        backward_comes = self._expect_backward(unit, inputs, outputs, waits)
        if not (backward_comes and (unit.keep or in_backward())):
            unit.free()
        if not self._running and not in_backward():
            self._end_forward(backward_comes)

    def _expect_backward(self, unit: Unit, inputs: Any, outputs: Any, waits: bool) -> bool:
        """Whether there can be a backward: the gradient of any output will announce it."""
        given, version = {id(t) for t in tensors_of(inputs)}, unit.version
        made = [t for t in tensors_of(outputs) if t.grad_fn is not None and id(t) not in given]
        for tensor in made:
            tensor.register_hook(lambda _: self.before_backward(unit, version, waits))
        return bool(made)

    def _end_forward(self, backward_comes: bool) -> None:
        """The outermost unit has ended. Units gathered ahead that did not run are freed."""
        for unit in self.units:
            if unit not in self._leaving or not backward_comes:
                unit.free()
        self._entered, self._left = list(dict.fromkeys(self._entering)), list(dict.fromkeys(self._leaving))

    # Backward

    def before_backward(self, unit: Unit, version: int, waits: bool) -> None:
        """The gradient of an output has come."""
        if torch.is_grad_enabled():
            raise RuntimeError("a backward with create_graph=True, through which another backward could go, needs full "
                               "parameters that stage 3 has freed by then: use stage 1 or 2")  # fmt: skip
        if not self._backward_runs:
            self._backward_runs, self._finished = True, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if version != unit.version:
            raise RuntimeError(
                "parameters were changed between a forward and its backward, which would gather other values than the "
                "forward has used: call backward before the optimizer's step"
            )
        for other in self.units:  # a rank on which a parameter got no gradient must not fall behind the others
            if other.has_gradients and unit.module not in other.inside:
                self._finish(other)
        if not unit.in_backward:
            unit.in_backward, unit.inputs_done = True, not waits
        self._have(unit)
        self._fetch_after(unit, self._left[::-1], self._finished)
        unit.show_full()

    def arrived(self, unit: Unit, flat: FlatShard, index: int) -> None:
        """A parameter's gradient is complete."""
        if any(reduction.of is flat for reduction in self._reductions):
            self._finish_reductions()
        flat.collect(index)
        if unit.is_complete:
            self._finish(unit)

    def _inputs_done(self, unit: Unit) -> None:
        unit.inputs_done = True
        if unit.in_backward and unit.is_complete:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """Backward needs the unit no more."""
        unit.in_backward = False
        unit.show_pieces()
        unit.free()
        self._finished.append(unit)
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
        """Units with parameters that got no gradient are still open, in the same order on all ranks."""
        for unit in reversed(self._left):
            if unit.in_backward:
                self._finish(unit)
        self._finish_reductions()
        self._backward_runs = False
        for unit in self.units:
            unit.free()  # gathered ahead, and not used

    # Both

    def rest(self) -> bool:
        """Between steps nothing is under way, unless an error has cut a backward short; whether one has."""
        cut_short = self._backward_runs and not in_backward()
        if cut_short:
            for reduction in self._reductions:
                reduction.wait()
            self._reductions = []
            for unit in self.units:
                unit.forget()
            self._backward_runs = False
        return cut_short

    def _have(self, unit: Unit) -> None:
        unit.gather()
        unit.wait()

    def _fetch_after(self, unit: Unit, order: list[Unit], done: list[Unit]) -> None:
        """Gather the next units beside what runs now."""
        if self.prefetch and unit in order:
            for following in order[order.index(unit) + 1 :][: self.prefetch]:
                if following not in done:
                    following.gather(async_op=True)


def watch(unit: Unit) -> None:
    """From now on the unit's module tells its conductor when it runs, its parameters when their gradients come."""
    waits = False

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal waits
        if module is not unit.module:
            raise RuntimeError("this module is a copy of a part of a sharded one, and has pieces only: copy the bare "
                               "module before it is sharded")  # fmt: skip
        waits = unit.conductor.before_forward(unit, (args, kwargs))

    def after(_: torch.nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        unit.conductor.after_forward(unit, (args, kwargs), outputs, waits)

    unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    unit.module.register_forward_hook(after, always_call=True, with_kwargs=True)
    unit.when_gradients_come(lambda flat, index: unit.conductor.arrived(unit, flat, index))
