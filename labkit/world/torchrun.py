"""`labkit.run` under torchrun: this process is a rank already, so the function runs here.

Reports are exchanged through torchrun's store, so that every rank comes to the same verdict and a notebook turned into
a script goes on with the same `Run`, or the same failure, everywhere. Rank 0 shows it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labkit import device as devices
from labkit.pace import Pace
from labkit.trace import Trace, now
from labkit.world.blame import blame
from labkit.world.collect import Done, pace_notes, with_ends
from labkit.world.compare import compare_ledgers, leftovers
from labkit.world.failure import RunFailed, is_connection_error
from labkit.world.join import join
from labkit.world.journal import Journal
from labkit.world.output import Kept, Output
from labkit.world.place import learners_line
from labkit.world.report import Raised, Report
from labkit.world.server import START_LIMIT
from labkit.world.stuck import rows, timed_out
from labkit.world.table import OperationTable
from labkit.world.transport import unpack
from labkit.world.worker import call

#: How often two hosts' clocks are compared; the quickest answer counts.
PINGS = 8
#: After the time limit, how long a rank may still need to give its report before it counts as stuck.
PATIENCE = 5.0


def run_as_rank(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    *,
    ranks: int,
    device: str,
    pace: Pace | None,
    timeout: float,
    record: bool,
) -> Done:
    """Run `fn` as this process's rank; see `labkit.run`.

    Raises:
        ValueError: `ranks` is not torchrun's WORLD_SIZE.
        RunFailed: As without torchrun, and on every rank. A rank that hangs where nothing can reach it (a collective
            of NCCL) is ended after the time limit, and torchrun ends the others.
    """
    try:
        size = int(os.environ["WORLD_SIZE"])
        int(os.environ["RANK"])
    except ValueError:
        told = f"RANK={os.environ['RANK']!r}, WORLD_SIZE={os.environ['WORLD_SIZE']!r}"
        raise ValueError(f"{told}: expected whole numbers, as torchrun sets them; else unset both") from None
    timeout = min(timeout, 1e6)  # clocks of the libraries below cannot hold more
    if ranks != size:
        raise ValueError(f"ranks={ranks}, but torchrun started WORLD_SIZE={size} ranks: make them equal")
    return _member(device, record).run(fn, args, kwargs, pace, timeout)


@dataclass
class Told:
    """What a rank tells the others at the end of a run."""

    report: Report
    operations: list
    output: Kept
    late: bool


class Member:
    """This process as a rank of torchrun's world; made by the first run and kept for the next."""

    def __init__(self, device: str, record: bool) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.plan = devices.choose(device, int(os.environ.get("LOCAL_WORLD_SIZE", self.size)))
        devices.use(self.plan, self.local_rank)
        self.store = next(dist.rendezvous("env://"))[0]
        self.table = self._shared_table()
        self.journal = Journal(self.rank, self.table) if record else None
        self.number = 0
        self.offset = 0.0
        if not dist.is_initialized():
            self._join()
            self.offset = clock_offset(self.rank, self.size)

    def _shared_table(self) -> OperationTable:
        """One table for the ranks of this host. They meet over its name, which is gone before the first run."""
        key = f"labkit/table{os.environ.get('GROUP_RANK', 0)}/"
        fd = None
        if self.local_rank == 0:
            fd, path = tempfile.mkstemp(prefix="labkit-table-")
            os.ftruncate(fd, OperationTable.size_of(self.size))
            self.store.set(key + "path", path)
        else:
            fd = os.open(self.store.get(key + "path").decode(), os.O_RDWR | os.O_CLOEXEC)
        self.store.add(key + "opened", 1)
        if self.local_rank == 0:
            while self.store.add(key + "opened", 0) < int(os.environ.get("LOCAL_WORLD_SIZE", self.size)):
                time.sleep(0.001)
            os.unlink(path)
        return OperationTable(self.size, fd)

    def _join(self) -> None:
        place = dist.PrefixStore(f"labkit/world{self.number}", self.store)
        join(place, self.rank, self.size, self.plan, self.journal, loopback=False)

    def run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], pace: Pace | None, timeout: float
    ) -> Done:
        self.number += 1
        self.table.clear(self.rank)
        zero = torch.tensor([now()], dtype=torch.float64)
        dist.broadcast(zero, 0)  # all begin together, and count from rank 0's time
        deadline = now() + timeout
        printed = Kept()
        with _tee(printed), self._limit(deadline, timeout):
            report = call(lambda: (fn, args, kwargs), self.rank, 0, zero.item() - self.offset, self.journal, pace,
                          self.offset)  # fmt: skip
            late = self.journal.is_over() if self.journal is not None else now() > deadline
        told = self._exchange(report, printed, late, timeout)
        return self._done(told, pace is not None, timeout)

    @contextlib.contextmanager
    def _limit(self, deadline: float, timeout: float) -> Iterator[None]:
        """Waits end at the deadline. A rank that none of them holds, yet is late, is ended from a thread."""
        if self.journal is not None:
            self.journal.deadline = deadline
        main = threading.main_thread().ident
        over = threading.Event()

        def watch() -> None:
            if not over.wait(deadline + PATIENCE - now()):
                place = learners_line(sys._current_frames().get(main or 0))
                table = rows(self.table.read_all(), set(), set(), {self.rank: place}, now())
                print(f"labkit: rank {self.rank} is ended\n{timed_out(table, self.table.read_all(), timeout)}",
                      file=sys.stderr, flush=True)  # fmt: skip
                os._exit(1)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if self.journal is not None:
                self.journal.deadline = None

    def _exchange(self, report: Report, output: Kept, late: bool, timeout: float) -> list[Told]:
        """Everybody's report, in rank order, through the store: the groups may be broken."""
        mine = Told(report, self.table.read(self.rank), output, late)
        key = f"labkit/run{self.number}/"
        self.store.set_timeout(timedelta(seconds=timeout + PATIENCE + START_LIMIT))  # others may take that much longer
        self.store.set(key + str(self.rank), pickle.dumps(mine))
        if report.raised is not None and not late:
            self._leave()  # its connections break, and so whoever waits for this rank is let go
        told = [pickle.loads(self.store.get(key + str(r))) for r in range(self.size)]
        self.store.add(key + "read", 1)
        if self.rank == 0:  # the store lives on: what all have read can go
            while self.store.add(key + "read", 0) < self.size:
                time.sleep(0.001)
            for r in range(self.size):
                self.store.delete_key(key + str(r))
        return told

    def _done(self, told: list[Told], paced: bool, timeout: float) -> Done:
        output = Output(self.size)
        output.kept = [t.output for t in told]
        events = [e for t in told for e in t.report.events]
        done = Done(trace=with_ends(Trace(events, self.size, paced)))
        failure = self._failure(told, timeout)
        left = [] if failure else leftovers([t.report.ledger for t in told if t.report.ledger is not None])
        if failure is not None or left or not dist.is_initialized():
            self._start_afresh()
        if failure is not None:
            failure.output, failure.trace = output.texts(), done.trace
            raise failure
        if self.rank == 0:
            for sentence in left:
                print(f"labkit: {sentence}")
        done.values = [unpack(t.report.value) for t in told if t.report.value is not None]
        done.output, done.leftovers = output.texts(), left
        done.notes = pace_notes([t.report for t in told])
        return done

    def _failure(self, told: list[Told], timeout: float) -> RunFailed | None:
        raised: dict[int, Raised] = {r: t.report.raised for r, t in enumerate(told) if t.report.raised is not None}
        returned = set(range(self.size)) - raised.keys()
        operations = [t.report.ledger.history if t.report.ledger is not None else t.operations for t in told]
        ended_by_limit = {r for r, e in raised.items() if told[r].late and is_connection_error(e)}
        own = {r: e for r, e in raised.items() if not (ended_by_limit and is_connection_error(e))}
        failure = blame(operations, returned, own, {})
        if failure is None and ended_by_limit:
            return timed_out(rows(operations, returned, set(), {}, now()), operations, timeout)
        return failure or compare_ledgers([t.report.ledger for t in told])

    def _start_afresh(self) -> None:
        """A new world in place of a broken one."""
        self._leave()
        self._join()

    def _leave(self) -> None:
        """Destroy the groups, and let go of all that refers to them: only then are the connections closed."""
        if self.journal is not None:
            self.journal.entries.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


_the_member: Member | None = None


def _member(device: str, record: bool) -> Member:
    global _the_member
    if _the_member is None:
        _the_member = Member(device, record)
    elif (_the_member.journal is not None) != record:
        raise ValueError(f"record={record}: under torchrun all runs of a program record, or none; the first decides")
    return _the_member


def clock_offset(rank: int, size: int) -> float:
    """Seconds to add to this host's clock to get rank 0's.

    Rank r notes when it asks and when the answer comes; rank 0's time belongs to the middle. Of several tries the
    quickest has the smallest error, at most half its round trip. Source: Cristian, "Probabilistic clock
    synchronization", 1989.
    """
    quickest, offset = float("inf"), 0.0
    for other in range(1, size):
        for _ in range(PINGS):
            if rank == other:
                asked = now()
                dist.send(torch.zeros(1), 0)
                answer = torch.zeros(1, dtype=torch.float64)
                dist.recv(answer, 0)
                took = now() - asked
                if took < quickest:
                    quickest, offset = took, answer.item() - (asked + took / 2)
            elif rank == 0:
                dist.recv(torch.zeros(1), other)
                dist.send(torch.tensor([now()], dtype=torch.float64), other)
    return offset


class _Tee:
    """Writes on, and keeps a copy."""

    def __init__(self, stream: Any, kept: Kept) -> None:
        self._stream, self._kept = stream, kept

    def write(self, text: str) -> int:
        self._kept.add(text.encode(errors="replace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _tee(kept: Kept) -> Iterator[None]:
    with contextlib.redirect_stdout(_Tee(sys.stdout, kept)):
        yield
