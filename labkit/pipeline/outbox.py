"""Sends under way: gloo tells that one is over only to those who wait, so a thread does."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import torch

from labkit.trace import Branch, branch


class Outbox:
    """Keeps each tensor until it has left, and no longer."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, torch.Tensor] | None] = SimpleQueue()
        self._branch: Branch | None = None

    def add(self, work: Any, tensor: torch.Tensor) -> None:
        if self._branch is None:
            self._branch = branch("sends")
            self._thread = threading.Thread(target=self._run, args=(self._branch,), name="sends", daemon=True)
            self._thread.start()
        self._queue.put((work, tensor))

    def _run(self, here: Branch) -> None:
        try:
            with here:
                while (send := self._queue.get()) is not None:
                    send[0].wait()
                    del send
        except BaseException as error:  # it is told where somebody waits
            here.error = error

    def abandon(self) -> None:
        """Let the thread end once what is under way has ended."""
        if self._branch is not None:
            self._queue.put(None)
            self._branch.joined = True

    def close(self) -> None:
        """Wait for all.

        Raises:
            Whatever went wrong with one of them.
        """
        if self._branch is None:
            return
        self._queue.put(None)
        self._thread.join()
        self._branch.join()
        if self._branch.error is not None:
            raise self._branch.error
