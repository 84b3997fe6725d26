"""One flat bucket: parameters laid side by side, of which this rank updates a shard.

Read `flat` first. A bucket holds up to three buffers, each of its own length and life:

    `flat`       all parameters, always; the module's parameters are views into it
    `full`       their gradients on this rank, while they are being collected
    `gradient`   this rank's shard of the mean, from the reduce-scatter until ``zero_grad``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.collectives import Placement, placement
from labkit.collectives.placement import is_summed
from labkit.data_parallel import assign
from labkit.trace import label
from labkit.zero import flat as layout
from labkit.zero.partial import sum_partial

#: Element types too coarse to add small updates to: the optimizer works on an fp32 copy, the master.
NARROW = (torch.float16, torch.bfloat16)


#: Functions that want to know of gradient buffers, by number.
Listeners = MutableMapping[int, Callable[[torch.Tensor], None]]


class FlatBucket:
    """Parameters of one element type and device, and this rank's shard of them.

    Args:
        number: Which bucket, for the trace's ``label(bucket=…)``.
        names, params: What lies in it, in this order. The parameters become views into `flat`.
        group: Its ranks hold a shard each.
        grad_dtype: Element type in which gradients are collected, at least as wide as a parameter's own.
        keep: Hold the gradient buffer all the time, and the shard inside it (Megatron's form); else `full` is made when
            a first gradient comes, and freed once it is reduced.
        listeners: Told of each gradient buffer when it is made.

    Attributes:
        pieces: What this rank holds, piece by piece; `tensors` has the 1-dimensional tensor of each, which the
            optimizer updates: a view into `flat`, or into `master`.
        master: (shard), fp32, of 16-bit parameters; else ``None``.
    """

    def __init__(
        self, number: int, names: Sequence[str], params: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None,
        grad_dtype: torch.dtype | None = None, keep: bool = False, listeners: Listeners | None = None,
    ) -> None:  # fmt: skip
        first, ranks, rank = params[0], dist.get_world_size(group), dist.get_rank(group)
        self.number, self.names, self.params, self.group = number, list(names), list(params), group
        self.dtype, self.keep, self._listeners = first.dtype, keep, {} if listeners is None else listeners
        self.grad_dtype = first.dtype if grad_dtype is None else torch.promote_types(first.dtype, grad_dtype)
        sizes = [param.numel() for param in params]
        self.elements, self.size = sum(sizes), layout.shard_size(sum(sizes), ranks)
        self._own = slice(rank * self.size, (rank + 1) * self.size)
        self.flat = torch.empty(self.size * ranks, dtype=first.dtype, device=first.device)
        self._places = list(zip(layout.starts(sizes), sizes, strict=True))
        self._lay_down()
        self.pieces = layout.cut(sizes, ranks, rank)
        self.shard = self.flat[self._own]
        self.master = self.shard.float() if first.dtype in NARROW else None
        held = self.shard if self.master is None else self.master
        self.tensors = [held[piece.at : piece.at + piece.length] for piece in self.pieces]
        self.full: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None
        self._under_way: tuple[torch.Tensor, Any] | None = None  # the shard that a reduce-scatter fills, and its handle
        self._filled: set[int] = set()  # members whose gradient is in `full`
        self._summed: set[int] = set()  # of them, partial ones that `reduce_partial_gradients` has added up
        self.used: set[int] = set()  # members that had a gradient since the last `clear`
        if keep:
            self._open()

    @torch.no_grad()
    def _lay_down(self) -> None:
        """The parameters move into the buffer, one after the other; each frees the memory that it had."""
        self.flat[self.elements :].zero_()
        for param, (start, size) in zip(self.params, self._places, strict=True):
            view = self.flat[start : start + size].view(param.shape)
            view.copy_(param)
            param.data = view

    def is_intact(self, member: int) -> bool:
        """Whether the parameter still is what it was when it was laid into the buffer."""
        param, (start, _) = self.params[member], self._places[member]
        place = self.flat.data_ptr() + start * self.flat.element_size()
        return param.requires_grad and param.dtype == self.dtype and (param.data_ptr() == place or not param.numel())

    # Gradients

    def _open(self) -> torch.Tensor:
        if self.full is None:
            self.full = torch.empty(self.flat.numel(), dtype=self.grad_dtype, device=self.flat.device)
            self._made(self.full)
        return self.full

    def _made(self, gradient: torch.Tensor) -> None:
        for listener in self._listeners.values():
            listener(gradient)

    def take(self, member: int) -> None:
        """Move a parameter's gradient into the full buffer; what is there already is added to."""
        grad, (start, size) = self.params[member].grad, self._places[member]
        if grad is None:
            return
        if self.keep and self.gradient is not None:
            raise RuntimeError("the gradient buffer holds the mean of the step before: call zero_grad() first")
        if grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {self.names[member]} is {grad.layout}: expected a dense one; build "
                            "Embedding(sparse=False)")  # fmt: skip
        place = self._open()[start : start + size].view(grad.shape)
        if member in self._filled:
            place.add_(grad)
        else:
            place.copy_(grad)
        if is_summed(grad):
            self._summed.add(member)
        self.params[member].grad = None
        self._filled.add(member)
        self.used.add(member)

    def reduce(self, async_op: bool = False) -> None:
        """Average the full gradients over the group, and keep this rank's shard. A collective call.

        A member without a gradient brings zeros, and so does the padding. With `async_op` it is begun, and `finish`
        must come before anything else is asked of the bucket.
        """
        full = self._open()
        for member, (start, size) in enumerate(self._places):
            if member not in self._filled:
                full[start : start + size].zero_()
        full[self.elements :].zero_()
        shard = torch.empty(self.size, dtype=full.dtype, device=full.device)
        self._made(shard)
        with label(bucket=self.number):
            work = collectives.reduce_scatter(shard, full, op="avg", group=self.group, async_op=async_op)
        self._under_way = shard, work
        self._filled.clear()
        if not async_op:
            del full
            self.finish()

    def finish(self) -> None:
        """Wait for what `reduce` has begun; then the full gradients are freed."""
        if self._under_way is None:
            return
        (shard, work), self._under_way = self._under_way, None
        if work is not None:
            work.wait()
        parts = [piece for piece in self.pieces if piece.index not in self._summed]
        sum_partial((shard[p.at : p.at + p.length], placement(self.params[p.index])) for p in parts)
        self._summed.clear()
        if self.keep:
            self.gradient = self._open()[self._own].copy_(shard)
            return
        self.full = None
        self.gradient = shard if self.gradient is None else self.gradient.add_(shard)

    def deliver(self, wanted: Sequence[bool]) -> None:
        """Give each piece its part of the shard, as wide as the piece itself.

        Args:
            wanted: Whether a member is to have a gradient, one each.
        """
        if self.gradient is None:
            return
        if self.master is not None and self.gradient.dtype != self.master.dtype:
            self.gradient = self.gradient.to(self.master.dtype)
            self._made(self.gradient)
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            if not wanted[piece.index]:
                tensor.grad = None
            elif not _lies_in(tensor.grad, self.gradient):
                tensor.grad = self.gradient[piece.at : piece.at + piece.length]

    def clear(self) -> None:
        """Forget all gradients."""
        self.finish()  # an error has cut short the backward that began it
        self.gradient = None
        if not self.keep:
            self.full = None
        self._filled.clear()
        self._summed.clear()
        self.used.clear()
        for tensor in self.tensors:
            tensor.grad = None

    def placed_gradients(self) -> Iterator[tuple[torch.Tensor | None, Placement]]:
        """What this rank has of each member's gradient, and where that lives: `group` shards it, besides its mark."""
        parts = {piece.index: tensor.grad for piece, tensor in zip(self.pieces, self.tensors, strict=True)}
        for member, param in enumerate(self.params):
            where = placement(param)
            yield parts.get(member), replace(where, sharded=(*where.sharded, self.group))

    # Parameters

    def whole_list(self) -> Iterator[tuple[str, torch.nn.Parameter, layout.Piece, torch.Tensor]]:
        """(name, parameter, piece, its tensor) of every member, of which this rank may hold nothing."""
        parts = {piece.index: (piece, tensor) for piece, tensor in zip(self.pieces, self.tensors, strict=True)}
        empty = (self.shard if self.master is None else self.master)[:0]
        for member, (name, param) in enumerate(zip(self.names, self.params, strict=True)):
            nothing = layout.Piece(member, 0, 0, 0), empty
            yield name, param, *parts.get(member, nothing)

    def follow(self) -> None:
        """The master takes over what was written into 16-bit parameters since they were gathered: weights, a clamp."""
        if self.master is not None:
            torch.where(self.shard == self.master.to(self.dtype), self.master, self.shard, out=self.master)

    def gather(self) -> None:
        """Every rank's updated shard, into every rank's parameters. A collective call."""
        if self.master is not None:
            self.shard.copy_(self.master)
        with label(bucket=self.number):
            collectives.all_gather(self.flat, self.shard, group=self.group)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(category of `labkit.memory`, tensor) of what no module and no optimizer state shows."""
        for tensor in (self.full, self.gradient, self._under_way[0] if self._under_way is not None else None):
            if tensor is not None:
                yield "gradients", tensor
        if self.master is not None:
            yield "master", self.master


def make_buckets(
    params: Sequence[torch.nn.Parameter], names: Mapping[torch.nn.Parameter, str], group: dist.ProcessGroup | None,
    cap: int, grad_dtype: torch.dtype | None, keep: bool, listeners: Listeners,
) -> list[FlatBucket]:  # fmt: skip
    """Buckets of at least `cap` bytes, in the order of backward, where the last parameter's gradient comes first.

    What is tied to a parameter of another pipeline stage has a bucket of its own: cut alike there and here, the two are
    summed by the same ranks in the same order, and stay the same bits.
    """
    last_first = params[::-1]
    kinds = [(param.dtype, param.device, placement(param).tied) for param in last_first]
    found = [[last_first[i] for i in some] for some in assign([param.nbytes for param in last_first], cap, kinds)]
    return [
        FlatBucket(number, [names[param] for param in some], some, group, grad_dtype, keep, listeners)
        for number, some in enumerate(found)
    ]


def _lies_in(view: torch.Tensor | None, buffer: torch.Tensor) -> bool:
    return view is not None and view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
