"""Calls under way. With ``async_op=True`` an algorithm runs beside the rank's own work, one after another.

Algorithms are Python loops over messages, so on the CPU each asynchronous call has a thread. Of one group they run one
after another, blocking calls included: two rings at once on one group would take each other's chunks. On NCCL messages
are work on a CUDA stream: the loop only puts them there, and no thread is needed but a stream of its own
(`labkit.device.Aside`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from labkit import device
from labkit.trace import Branch, branch


class Turn:
    """A call's place in the order of its group: it begins when the call before it is over."""

    def __init__(self, before: Turn | None) -> None:
        self._before, self._over = before, threading.Event()
        self.branch: Branch | None = None  # of a call in a thread

    def __enter__(self) -> None:
        if self._before is not None:
            self._before._over.wait()
            if self._before.branch is not None:
                self._before.branch.catch_up()
            self._before = None

    def __exit__(self, *exc: object) -> None:
        self._over.set()


#: Group → the turn of its last call. Groups do not wait for each other, as they do not in torch.
_last: WeakKeyDictionary[Any, Turn] = WeakKeyDictionary()
_lock = threading.Lock()


def _next_turn(group: Any) -> Turn:
    with _lock:
        _last[group] = turn = Turn(_last.get(group))
    return turn


class Handle:
    """What an asynchronous call returns. The tensors belong to the call until `wait` has returned."""

    def __init__(self, work: Callable[[], None], name: str, turn: Turn, on: torch.device) -> None:
        self._branch = turn.branch = branch(name)
        self._inference = torch.is_inference_mode_enabled()
        self._thread = threading.Thread(target=self._run, args=(work, turn, on), name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None], turn: Turn, on: torch.device) -> None:
        try:
            with turn, self._branch, device.in_thread(on), torch.inference_mode(self._inference):
                work()
        except BaseException as error:  # it is the waiter's
            self._branch.error = error

    def wait(self) -> bool:
        """Until the call is done here: then the tensors may be used.

        Raises:
            Whatever went wrong in it.
        """
        self._thread.join()
        self._branch.join()
        if self._branch.error is not None:
            raise self._branch.error
        return True

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


def start(
    work: Callable[[], None], name: str, group: Any, on: torch.device, nccl: bool, async_op: bool
) -> Handle | device.Aside | None:
    """Do `work` now, or, with `async_op`, beside what follows; of one group in the order in which it was asked for.

    Args:
        work: The whole call.
        name: What it is called.
        group: Whose call.
        on: Where the tensors are.
        nccl: Whether messages are work on a CUDA stream.

    Returns:
        With `async_op` a handle to wait for.
    """
    if nccl and async_op:
        return device.Aside(work, on)
    if not nccl:
        turn = _next_turn(group if group is not None else dist.group.WORLD)
        if async_op:
            return Handle(work, name, turn, on)
        with turn:
            work()
        return None
    work()
    return None
