"""A rank's virtual clock: when things would have happened on the hardware of a `labkit.pace.Pace`."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from labkit import pace
from labkit.trace import now, recorder

#: Seconds. Work between two operations, outside sections, is free up to here: it is the host's noise, and the adding of
#: chunks that a GPU does in no time.
FREE = 0.02
#: Seconds. A sleep may last so much longer than asked for, so the rest is slept and spun in small pieces.
_COARSE, _SPIN = 1e-3, 2e-4
_ROUNDING = 1e-9


class Side:
    """One side, outgoing or incoming, of a rank's port: it moves one message at a time.

    Bookings may come in any order, as threads and waits happen to; each takes the earliest gap that is long enough.

    >>> side = Side()
    >>> side.book(0.0, 2.0), side.book(5.0, 1.0), side.book(1.0, 3.0), side.book(0.0, 1.5)
    (0.0, 5.0, 2.0, 6.0)
    """

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def book(self, earliest: float, length: float) -> float:
        """When a message that keeps the port busy for `length` begins, at `earliest` or later."""
        if length <= 0:
            return earliest
        with self._lock:
            place, start = max(0, bisect_right(self._busy, (earliest, math.inf)) - 1), earliest
            while place < len(self._busy) and self._busy[place][0] < start + length - _ROUNDING:
                start = max(start, self._busy[place][1])
                place += 1
            self._busy.insert(place, (start, start + length))
        return start


class _Here:
    """Where one thread of a rank is in virtual time."""

    __slots__ = ("left", "sections", "v")

    def __init__(self, v: float) -> None:
        self.v = v
        self.left = now()  # when its last operation ended, really
        self.sections: list[float] = []  # real work in each section around, without the operations in it


class VirtualClock:
    """One a rank and run: virtual time `v`, in seconds since the common origin, of each thread of the rank.

    Operations bracket themselves with `begin` and `end`; `send`, `arrive` and `reach` move the clock in between. As a
    context manager it is the clock that `section` and the process groups find, and it is over when its rank has slept
    to the end. It travels to other threads with `labkit.trace.branch`.
    """

    def __init__(
        self,
        hardware: pace.Pace,
        rank: int,
        origin: float,
        per_node: int | None = None,
        synchronize: Callable = lambda: None,
    ) -> None:
        """`origin`: v = 0, on `now`'s clock. `synchronize`: wait for the rank's device."""
        self.pace, self.rank, self.origin, self.per_node = hardware, rank, origin, per_node
        self._synchronize = synchronize
        self._out, self._in = Side(), Side()
        self._threads = threading.local()
        self._threads.here = self._main = _Here(0.0)
        self._branches_end = 0.0
        self._outside: list[float] = []
        self._longer: dict[str, list[tuple[float, float]]] = {}
        self._behind = 0.0

    def __enter__(self) -> VirtualClock:
        pace.run_on(self)
        recorder.carriers.append(self)
        self.reach(self.pace.late.get(self.rank, 0.0))
        self.end()
        return self

    def __exit__(self, kind: Any, *exc: object) -> None:
        pace.run_on(None)
        recorder.carriers.remove(self)
        if kind is None:
            sleep_until(self.moment(self.v))

    @property
    def _here(self) -> _Here:
        """This thread's; one that came without a branch (autograd's, on CUDA) begins where the main thread is."""
        if not hasattr(self._threads, "here"):
            self._threads.here = _Here(self._main.v)
        return self._threads.here

    @property
    def v(self) -> float:
        """Virtual time of this thread."""
        return self._here.v

    def moment(self, v: float) -> float:
        """The moment `v` on `now`'s clock."""
        return self.origin + v

    def reach(self, v: float, limit: float | None = None) -> None:
        """This thread goes on at `v`, unless it is later for it already; sleep until then, or until `limit`."""
        here = self._here
        here.v = max(here.v, v)
        self._synchronize()
        end = self.moment(here.v)
        sleep_until(end if limit is None else min(end, limit))
        self._behind = now() - end

    # Operations

    def begin(self) -> None:
        """An operation begins: the work since the last one is charged, unless it is short or in a paced section."""
        self._synchronize()
        here = self._here
        worked = now() - here.left
        if here.sections:
            here.sections[-1] += worked
        elif worked > FREE:
            here.v += worked
            self._outside.append(worked)

    def end(self) -> None:
        """The operation is over."""
        self._here.left = now()

    def send(self, nbytes: int, target: int) -> tuple[float, float, float]:
        """A message leaves, as soon as the port is free: (when it begins to leave, seconds on the port, latency)."""
        seconds, latency = self.pace.transfer(nbytes, self.rank, target, self.per_node)
        return self._out.book(self.v, seconds), seconds, latency

    def arrive(self, first: float, seconds: float) -> float:
        """A message whose first byte could be here at `first`: when its last is."""
        return self._in.book(first, seconds) + seconds

    # Sections

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """See `labkit.pace.section`."""
        seconds = self.pace.duration(name, self.rank)
        if seconds is None:
            yield
            return
        self.begin()
        self.end()
        here = self._here
        start = here.v
        here.sections.append(0.0)
        try:
            yield
            self.begin()
        finally:
            worked = here.sections.pop()
        if worked - seconds > max(1e-3, 0.02 * seconds):
            self._longer.setdefault(name, []).append((worked, seconds))
            seconds = worked
        self.reach(start + seconds)
        self.end()

    # Threads, by `labkit.trace.branch`

    def fork(self) -> dict[str, float]:
        self.begin()
        self.end()
        return {"v": self.v}

    def enter(self, token: dict[str, float]) -> None:
        """This thread goes on from the fork, or from the end of the branch before it: branches are a queue."""
        self._threads.here = _Here(max(token["v"], self._branches_end))

    def leave(self, token: dict[str, float]) -> None:
        self.begin()
        token["end"], token["left"] = self.v, now()
        self._branches_end = max(self._branches_end, self.v)
        del self._threads.here

    def join(self, token: dict[str, float]) -> None:
        """Go on when the branch has ended. A thread that has just seen it end was waiting, not working."""
        if "end" not in token:
            return
        if now() - token["left"] > FREE:
            self.begin()
        self.reach(token["end"])
        self.end()

    # What a run should know about itself

    def notes(self) -> list[str]:
        """What was not as the pace says, a sentence each."""
        said = []
        if self._outside:
            said.append(
                f"rank {self.rank} worked {sum(self._outside):.2f} s outside any section ({_times(self._outside)}): "
                "it was charged as it was; put it into a pace.section whose seconds Pace(compute=…) gives"
            )
        for name, times in self._longer.items():
            worked, seconds = (sum(column) / len(times) for column in zip(*times, strict=True))
            said.append(
                f"rank {self.rank} really took {worked:.3f} s for section {name!r} instead of {seconds:.3f} s "
                f"({_times(times)}): its clock moved with it"
            )
        return said

    def ended(self) -> tuple[float, float]:
        """Seconds since the origin: virtual, and really, at the end of the last operation."""
        return self.v, self.v + max(0.0, self._behind)


def too_slow(ends: list[tuple[float, float]]) -> list[str]:
    """What to say when the last rank of a run came to its end later than on the hardware of the pace.

    >>> too_slow([(1.0, 1.3), (2.0, 2.01)])
    []
    """
    if not ends:
        return []
    virtual, real = max(v for v, _ in ends), max(r for _, r in ends)
    if real - virtual < max(FREE, 0.02 * virtual):
        return []
    return [f"the run took {real:.2f} s where the hardware of the pace takes {virtual:.2f} s: this host cannot play "
            "it; choose a slower link, fewer ranks or more seconds"]  # fmt: skip


def _times(happened: list) -> str:
    return "once" if len(happened) == 1 else f"{len(happened)} times"


def sleep_until(moment: float) -> None:
    """Sleep until `moment` (on `now`'s clock), to some 10 µs, and without keeping a core busy for longer than 0.2 ms.

    An absolute time, since sleeps of a given length are each a little too long and add up.
    """
    while (left := moment - now()) > 0:
        if left > 1.2 * _COARSE:
            time.sleep(left - _COARSE)
        elif left > 1.2 * _SPIN:
            time.sleep(left - _SPIN)
        else:
            time.sleep(0)  # lets other threads of this process run
