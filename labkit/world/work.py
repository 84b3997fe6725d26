"""The handle of an operation under way on a recording group."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit.trace import now
from labkit.world.journal import Entry

if TYPE_CHECKING:
    from labkit.world.group import RecordingGroup


class RecordedWork(dist.Work):
    """A handle that tells the journal when it is waited for and when it is done."""

    #: When it was over, on `now`'s clock, if that is known better than by the end of the wait.
    ended: float | None = None

    def __init__(self, group: RecordingGroup, work: Any, entry: Entry) -> None:
        super().__init__()
        self.group, self.work, self.entry = group, work, entry
        entry.work = work
        self._waited = False

    def wait(self, *timeout: Any) -> bool:
        if self._waited:  # gloo would wait for a second message
            return True
        journal = self.group.journal
        journal.waiting(self.entry)
        if not timeout and journal.deadline is not None and not self.entry.on_device:
            timeout = (timedelta(seconds=max(0.01, journal.deadline - now())),)
        try:
            done = self._until_over(*timeout)
        except BaseException:
            journal.failed(self.entry)
            raise
        self._waited = True
        self.group.completed(self.entry, self.work, self.ended)
        return done

    def _until_over(self, *timeout: Any) -> bool:
        return self.work.wait(*timeout)

    def get_future(self) -> torch.futures.Future:
        self.entry.collected = True
        return self.work.get_future()

    def is_completed(self) -> bool:
        done = self.work.is_completed()
        self.entry.collected |= done
        return done

    def is_success(self) -> bool:
        return self.work.is_success()

    def exception(self) -> Any:
        return self.work.exception()

    def result(self) -> Any:
        return self.work.result()

    def synchronize(self) -> None:
        self.work.synchronize()

    def block_current_stream(self) -> None:
        self.entry.collected = True
        self.work.block_current_stream()

    def _source_rank(self) -> int:
        return self.work._source_rank()

    def source_rank(self) -> int:
        return self.work._source_rank()
