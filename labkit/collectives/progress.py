"""Calls under way. With ``async_op=True`` an algorithm runs beside the rank's own work, one after another.

Algorithms are Python loops over messages, so on the CPU each asynchronous call has a thread, which first waits for the
call before it: two rings at once on one group would take each other's chunks. On NCCL messages are work on a CUDA
stream: the loop only puts them there, and no thread is needed but a stream of its own (`labkit.device.Aside`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from labkit import device
from labkit.trace import branch


class Handle:
    """What an asynchronous call returns. The tensors belong to the call until `wait` has returned."""

    def __init__(self, work: Callable[[], None], before: Handle | None, on: torch.device) -> None:
        self._branch, self._before = branch(), before
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, on), name="collective", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None], on: torch.device) -> None:
        try:
            if self._before is not None:
                self._before._thread.join()
            with self._branch, device.in_thread(on):
                work()
        except BaseException as error:  # it is the waiter's
            self._error = error
        self._before = None

    def wait(self) -> bool:
        """Until the call is done here: then the tensors may be used.

        Raises:
            Whatever went wrong in it.
        """
        self.let_pass()
        if self._error is not None:
            raise self._error
        return True

    def let_pass(self) -> None:
        """Until it is over, whether well or not."""
        self._thread.join()
        self._branch.join()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


class _Latest:
    """The last call of this process that runs in a thread: the next one waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handle: Handle | None = None

    def take(self) -> Handle | None:
        return self.handle if self.handle is not None and not self.handle.is_completed() else None


_latest = _Latest()


def start(work: Callable[[], None], on: torch.device, nccl: bool, async_op: bool) -> Handle | device.Aside | None:
    """Do `work` now, or, with `async_op`, beside what follows; in the order in which it was asked for.

    Args:
        work: The whole call.
        on: Where the tensors are.
        nccl: Whether messages are work on a CUDA stream.

    Returns:
        With `async_op` a handle to wait for.
    """
    if nccl:
        if async_op:
            return device.Aside(work, on)
        work()
        return None
    with _latest.lock:
        before = _latest.take()
        if async_op:
            _latest.handle = Handle(work, before, on)
            return _latest.handle
    if before is not None:
        before.let_pass()
    work()
    return None
