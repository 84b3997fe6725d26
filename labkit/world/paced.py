"""A process group under a pace: messages end when the hardware of the `labkit.pace.Pace` would have moved them.

With each message goes a header, sent as a message of its own beside it: when the payload could leave, for how long it
keeps a port busy, and the latency. So the receiver knows when it would have come, however late it looks. Nothing moves
before the receiver has asked for it, as with gloo and NCCL, so it answers with the moment when it did.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit import device, pace
from labkit.trace import now
from labkit.world.clock import VirtualClock
from labkit.world.journal import Entry, Journal
from labkit.world.work import RecordedWork

if TYPE_CHECKING:
    from labkit.world.group import RecordingGroup

#: Added to a message's tag, they give that of its header and that of the receiver's answer.
HEADER, ANSWER = 2**30, 2**30 + 2**29
_NUMBERS: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # whatever the learner's defaults are
#: Seconds between the meeting of the ranks and v = 0: so long, at most, the news of it may take.
HEAD_START = 0.01


@contextmanager
def paced(wanted: pace.Pace | None, rank: int, journal: Journal | None, offset: float) -> Iterator[VirtualClock | None]:
    """What happens inside goes by `wanted`; nothing changes without one.

    Args:
        rank: This rank of the world.
        offset: Seconds to add to this host's clock to get that of rank 0's.
    """
    if wanted is None or journal is None:
        yield None
        return
    importlib.import_module("labkit.collectives")  # else its first use, a tenth of a second, would count as work
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    origin = _meet(journal, offset)
    with VirtualClock(wanted, rank, origin, per_node, device.synchronize) as clock:
        yield clock


def _meet(journal: Journal, offset: float) -> float:
    """All ranks are there: the same moment, a little from now, on each one's clock."""
    world: Any = dist.group.WORLD
    if not hasattr(world, "transport"):
        raise ValueError("a pace needs the process group that labkit.run makes: leave out init_process_group")
    moment = torch.tensor([now() + offset], **_NUMBERS)
    _latest(world, moment).wait(*_time_left(journal))
    return moment.item() + HEAD_START - offset


def _latest(group: RecordingGroup, moment: torch.Tensor) -> Any:
    """Make `moment` that of the last member, on torch's own group."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return group.transport.allreduce([moment], options)


def _time_left(journal: Journal) -> tuple[timedelta, ...]:
    """A limit on a wait, as an argument, where there is one (under torchrun)."""
    return () if journal.deadline is None else (timedelta(seconds=max(0.01, journal.deadline - now())),)


def refuse_native(name: str) -> None:
    """
    Raises:
        ValueError: Torch's own collective `name` cannot be paced.
    """
    if name != "barrier":
        raise ValueError(
            f"{name} of torch's own backend cannot be paced, since what it sends cannot be seen: under a pace use "
            "labkit.collectives with algorithm='ring' (or another one of its own)"
        )


class PacedWork(RecordedWork):
    """A handle of an operation that ends at a moment of the virtual clock, which `_ends` tells.

    In the trace an operation ends when the wait for it returns; one that had ended before somebody waited, at its
    virtual moment. So an arrow of a picture ends where the message came, not where the rank looked for it.
    """

    def __init__(self, group: RecordingGroup, work: Any, entry: Entry, clock: VirtualClock) -> None:
        super().__init__(group, work, entry)
        self.clock = clock

    def _ends(self) -> float:
        raise NotImplementedError

    def wait(self, *timeout: Any) -> bool:
        self.clock.begin()
        try:
            return super().wait(*timeout)
        finally:
            self.clock.end()

    def _until_over(self, *timeout: Any) -> bool:
        asked, limit = now(), self.group.journal.deadline
        done = super()._until_over(*timeout)
        v = self._ends()
        moment = self.clock.moment(v)
        self.clock.reach(v, limit)
        if limit is not None and limit < moment:
            raise RuntimeError("timed out while a message was under way on the hardware of the pace")
        self.ended = moment if moment < asked else None
        return done

    def is_completed(self) -> bool:
        return super().is_completed() and now() >= self.clock.moment(self._ends())


class PacedSend(PacedWork):
    """It is over when the message has left the port and, if its receiver asked for it later, had then the time to."""

    def __init__(self, group: RecordingGroup, work: Any, entry: Entry, clock: VirtualClock, to: int, tag: int) -> None:
        super().__init__(group, work, entry, clock)
        self._start, self._seconds, latency = clock.send(entry.nbytes, group.world_rank(to))
        self._asked_for = torch.zeros(1, **_NUMBERS)
        header = torch.tensor([self._start, self._seconds, latency], **_NUMBERS)
        sent = group.transport.send([header], to, tag + HEADER)
        self._answer: Any = group.transport.recv([self._asked_for], to, tag + ANSWER)
        entry.header = header, sent, self._answer
        clock.end()

    def _ends(self) -> float:
        if self._answer is not None:
            self._answer.wait(*_time_left(self.group.journal))
            self._answer = None
        return max(self._start, self._asked_for.item()) + self._seconds


class PacedReceive(PacedWork):
    """It is over when the message has come through this rank's port. One from anybody is answered when waited for."""

    def __init__(
        self, group: RecordingGroup, work: Any, entry: Entry, clock: VirtualClock, source: int | None, tag: int
    ) -> None:
        super().__init__(group, work, entry, clock)
        self._header, self._asked, self._tag = torch.zeros(3, **_NUMBERS), clock.v, tag
        self._coming: Any = None
        self._arrival: float | None = None
        if source is not None:
            self._open(source)
        clock.end()

    def _open(self, source: int) -> None:
        """Ask for the header, and tell the sender since when this rank has been waiting for the message."""
        transport, asked = self.group.transport, torch.tensor([self._asked], **_NUMBERS)
        self._coming = transport.recv([self._header], source, self._tag + HEADER)
        self.entry.header = asked, self._coming, transport.send([asked], source, self._tag + ANSWER)

    def _ends(self) -> float:
        if self._arrival is None:
            if self._coming is None:  # from anybody: now it is known from whom
                self._open(self.work._source_rank())
            self._coming.wait(*_time_left(self.group.journal))
            start, seconds, latency = self._header.tolist()
            self._arrival = self.clock.arrive(max(start + latency, self._asked), seconds)
        return self._arrival


class PacedBarrier(PacedWork):
    """It is over when the last member has come to it, and costs nothing."""

    def __init__(self, group: RecordingGroup, entry: Entry, clock: VirtualClock) -> None:
        self.v = torch.tensor([clock.v], **_NUMBERS)
        super().__init__(group, _latest(group, self.v), entry, clock)
        clock.end()

    def _ends(self) -> float:
        return self.v.item()
