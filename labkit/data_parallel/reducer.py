"""When a bucket leaves: hooks on the parameters, and the order in which full buckets are averaged.

Backward runs through the layers from the last to the first. Each parameter's hook fires when its gradient is complete;
it puts the gradient into its bucket, and a full bucket is averaged at once, beside the rest of backward. Two rules keep
the ranks together: buckets leave in one order on all ranks, whatever order gradients arrive in, and backward does not
end before all of them are back.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from labkit import collectives
from labkit.data_parallel.agreement import spread
from labkit.data_parallel.buckets import Bucket, assign
from labkit.trace import label


class Reducer:
    """Averages the gradients of some parameters, a bucket at a time, during backward.

    Args:
        names, params: The trained parameters, in the order in which the module registered them.
        group: Whose mean it is.
        cap, first: Bytes at which a bucket, and the first one, is closed.
        overlap: Average a bucket when it is full; ``False``: all of them when backward has ended.
        find_unused: Look in the graph for parameters that a forward did not use; they bring zeros.
        hook: Averages a flat buffer (`labkit.data_parallel.hooks`).
    """

    def __init__(
        self, names: list[str], params: list[torch.nn.Parameter], group: dist.ProcessGroup | None, cap: int, first: int,
        overlap: bool, find_unused: bool, hook: Callable[..., Any],
    ) -> None:  # fmt: skip
        self.names, self.params, self.group = names, params, group
        self.cap, self.first, self.overlap, self.find_unused, self.hook = cap, first, overlap, find_unused, hook
        self.sync = True
        self._order: list[int] = []  # in which the gradients of this backward arrived
        self._rebuilt = find_unused  # which parameters are used may change, and with them the order
        self._averaged = False
        self._backward = -1  # id of the backward that is under way, or was last
        self._unused: list[int] = []
        self._without_gradient: set[int] = set()
        self._next = 0
        self._works: list[Any] = []
        self._fill(list(reversed(range(len(params)))))
        me = weakref.ref(self)  # a parameter outlives its wrapper, and must not keep it
        for index, param in enumerate(params):
            param.register_post_accumulate_grad_hook(lambda _, index=index: _tell(me, index))

    def _fill(self, order: list[int]) -> None:
        """Make the buckets for gradients that arrive in this order."""
        self.buckets: list[Bucket] = []  # the old ones go first: the new ones take their memory
        sizes, kinds = (
            [self.params[i].nbytes for i in order],
            [(self.params[i].dtype, self.params[i].device) for i in order],
        )
        self.buckets = [
            Bucket([order[n] for n in members], self.params) for members in assign(sizes, self.cap, kinds, self.first)
        ]
        self._home = {i: bucket for bucket in self.buckets for i in bucket.members}
        for i, param in enumerate(self.params):
            if param.grad is not None:
                self._home[i].take(i, param)

    # Before and in a forward

    def settle(self) -> None:
        """Buckets of a backward that was cut short by an error are still under way, into buffers to be used again.

        Raises:
            RuntimeError: Gradients that they may have changed are still there.
        """
        if not self._works or in_backward():
            return
        self._wait()
        if any(param.grad is not None for param in self.params):
            raise RuntimeError("the backward before was cut short, so some gradients are averages and some are not: "
                               "call zero_grad() before the next forward")  # fmt: skip

    def rebuild(self) -> None:
        """Once, after the first backward: fill the buckets in the order in which the first rank's gradients arrived."""
        if self._rebuilt or not self._averaged:
            return
        self._rebuilt = True
        first = list(reversed(range(len(self.params))))
        order = torch.tensor(self._order if len(self._order) == len(first) else first, device=self.params[0].device)
        spread([order], self.group)
        if order.tolist() != [i for bucket in self.buckets for i in bucket.members]:
            self._fill(order.tolist())

    def expect(self, outputs: Any, sync: bool) -> None:
        """A forward has made `outputs`; their backward averages the gradients, if `sync`."""
        tensors, unused = [t for t in tensors_of(outputs) if t.requires_grad], []
        if sync and self.find_unused:
            used = _leaves([t.grad_fn for t in tensors if t.grad_fn is not None]) | {id(t) for t in tensors}
            unused = [i for i, param in enumerate(self.params) if id(param) not in used]
        self.sync, self._unused = sync, unused
        for tensor in tensors:  # it is this forward's backward, whatever other forwards came in between
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._begin(sync, unused))

    # In a backward

    def _begin(self, sync: bool | None = None, unused: list[int] | None = None) -> None:
        """The first sign of a backward: of the forward that says so, else of the last one."""
        if self._backward == (now := torch._C._current_graph_task_id()):
            return
        self._backward = now
        if sync is not None:
            self.sync, self._unused = sync, unused or []
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._wait()  # for buckets of a backward that an error cut short: there was no forward since
        self._order, self._next = [], 0
        for bucket in self.buckets:
            bucket.waits_for = set(bucket.members)
        if self.sync:
            self._without_gradient = {i for i in self._unused if self.params[i].grad is None}
            for i in self._without_gradient:
                self._home[i].views[i].zero_()
            for i in self._unused:
                self._home[i].waits_for.discard(i)
                if i not in self._without_gradient:
                    self._home[i].take(i, self.params[i])

    def arrived(self, index: int) -> None:
        """A parameter's gradient is complete: all its uses in this backward are added up."""
        self._begin()
        param, bucket = self.params[index], self._home[index]
        _check_gradient(self.names[index], param.grad)
        if self.sync and index not in bucket.waits_for:
            raise RuntimeError(
                f"the gradient of {self.names[index]} came twice in one backward, or after it was taken for unused: "
                "use the parameter inside the module's forward, and checkpoint(…, use_reentrant=False)"
            )
        bucket.take(index, param)
        bucket.waits_for.discard(index)
        self._order.append(index)
        if self.sync and self.overlap:
            self._send_full()

    def _send_full(self, at_the_end: bool = False) -> None:
        """Average full buckets, each after the one before it."""
        while (self.overlap or at_the_end) and self._next < len(self.buckets) and self.buckets[self._next].is_full:
            self._send(self._next, self.buckets[self._next].flat)
            self._next += 1

    def _send(self, number: int, flat: torch.Tensor) -> None:
        with label(bucket=number), torch.no_grad():
            work = self.hook(flat, self.group)
        if not callable(getattr(work, "wait", None)):
            raise TypeError(f"the communication hook returned {work!r}: expected a handle with wait()")
        self._works.append(work)

    def _end(self) -> None:
        """Backward has ended on this rank."""
        if not self.sync or (not self._order and len(self._unused) < len(self.params)):
            return  # nothing to average: local gradients only, or gradients of inputs only
        missing = [self.names[i] for bucket in self.buckets for i in sorted(bucket.waits_for)]
        if missing:
            hint = "" if self.find_unused else "; find_unused_parameters=True lets it bring zeros"
            raise RuntimeError(
                f"backward made no gradient for {_some(missing)}, so the ranks cannot average it: the forward did not "
                f"use it, the loss does not depend on it, or it is inside checkpoint(…, use_reentrant=True){hint}"
            )
        self._send_full(at_the_end=True)
        used = [i not in self._without_gradient for i in range(len(self.params))] if self.find_unused else []
        self._finish(used)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def _finish(self, used: list[bool]) -> None:
        """Wait for every bucket. A parameter that no rank used keeps no gradient: an optimizer then leaves it alone."""
        self._wait()
        self._averaged = True
        if used:
            somewhere = torch.tensor(used, dtype=torch.uint8, device=self.params[0].device)
            collectives.all_reduce(somewhere, op="max", group=self.group)
            for i in self._without_gradient:
                self.params[i].grad = self._home[i].views[i] if somewhere[i] else None

    def shadow(self) -> None:
        """Take part in a backward of the others with zeros: this rank has no more batches."""
        self._without_gradient = set()
        for number, bucket in enumerate(self.buckets):
            self._send(number, torch.zeros_like(bucket.flat))
        self._finish([False] * len(self.params) if self.find_unused else [])


def in_backward() -> bool:
    """Whether this thread is inside a backward, as a forward is that a checkpoint repeats."""
    return torch._C._current_graph_task_id() != -1


def _tell(reducer: Callable[[], Reducer | None], index: int) -> None:
    if (alive := reducer()) is not None:
        alive.arrived(index)


def _check_gradient(name: str, grad: torch.Tensor | None) -> None:
    if grad is None:
        raise RuntimeError(f"the gradient of {name} was taken away by another hook before it was averaged: add such "
                           "hooks after wrapping")  # fmt: skip
    if grad.layout is not torch.strided:
        raise TypeError(f"the gradient of {name} is {grad.layout}: expected a dense one; build Embedding(sparse=False)")
    if grad.requires_grad:
        raise RuntimeError(f"the gradient of {name} has a graph of its own (create_graph=True), which averaging in "
                           "place would break: use torch.autograd.grad on the bare module")  # fmt: skip


def tensors_of(given: Any) -> list[torch.Tensor]:
    """The tensors in what a module takes or returns: in tuples, dictionaries, dataclasses."""
    found = []
    for leaf in tree_leaves(given):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


def _leaves(roots: list[Node]) -> set[int]:
    """Ids of the tensors whose gradients a backward from `roots` fills."""
    seen, stack, found = set(roots), list(roots), set()
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        fresh = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= fresh
        stack.extend(fresh)
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
