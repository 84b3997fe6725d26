"""Stage 2 during backward: a bucket that is full is reduce-scattered at once, and its full gradients are freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from labkit.zero.bucket import FlatBucket


class Arrivals:
    """Hooks on the parameters: each moves its gradient into its bucket, and full buckets are reduced.

    Buckets leave in one order on all ranks, whatever order gradients arrive in: one that is full waits for those
    before it. At the end of backward the rest leaves, with zeros where no gradient came.

    Args:
        buckets: In the order in which they leave.
        ended: Called when a backward has ended and every bucket has been reduced.
        overlap: A bucket is reduced beside the rest of backward, until the next one is to leave.

    Attributes:
        sync: Whether a backward reduces; ``False``: gradients stay on the parameters.
    """

    def __init__(self, buckets: Sequence[FlatBucket], ended: Callable[[], None], overlap: bool) -> None:
        self.buckets, self._ended, self._overlap = buckets, ended, overlap
        self.sync = True
        self._waits_for: list[set[int]] = []
        self._next = 0
        self._backward: int | None = None  # id of the backward that is under way
        me = weakref.ref(self)  # a parameter outlives its optimizer, and must not keep it
        for number, bucket in enumerate(buckets):
            for member, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(
                    lambda _, number=number, member=member: _tell(me, number, member)
                )

    def reset(self) -> None:
        """Forget a backward that an error cut short."""
        self._backward = None

    @torch.no_grad()
    def arrived(self, number: int, member: int) -> None:
        """A parameter's gradient is complete: all its uses in this backward are added up."""
        if not self.sync or not self.buckets[number].is_intact(member):
            return  # it is to stay; or the parameter was moved, which the step will tell
        self._begin()
        self.buckets[number].take(member)
        self._waits_for[number].discard(member)
        while self._next < len(self.buckets) and not self._waits_for[self._next]:
            self._reduce_next()

    def _begin(self) -> None:
        """The first gradient of a backward."""
        now = torch._C._current_graph_task_id()
        if self._backward == now:
            return
        if self._backward is not None:
            raise RuntimeError(
                "a backward began inside another one, or after one that an error cut short: use checkpoint(…, "
                "use_reentrant=False), and zero_grad() after an error"
            )
        self._backward, self._next = now, 0
        self._waits_for = [set(range(len(bucket.params))) for bucket in self.buckets]
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _reduce_next(self) -> None:
        self._finish()
        self.buckets[self._next].reduce(async_op=self._overlap)
        self._next += 1

    def _finish(self) -> None:
        """Of the bucket before."""
        if self._overlap and self._next:
            self.buckets[self._next - 1].finish()

    @torch.no_grad()
    def _end(self) -> None:
        while self._next < len(self.buckets):
            for member in self._waits_for[self._next]:  # what a backward under `no_sync` has left
                self.buckets[self._next].take(member)
            self._reduce_next()
        self._finish()
        self._backward = None
        self._ended()


def _tell(arrivals: Callable[[], Arrivals | None], number: int, member: int) -> None:
    if (alive := arrivals()) is not None:
        alive.arrived(number, member)
