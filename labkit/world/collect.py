"""One run on a pool: gather reports and output, and find out who failed."""

from __future__ import annotations

import contextlib
import pickle
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from labkit.trace import Event, Trace, now
from labkit.world.blame import blame
from labkit.world.clock import too_slow
from labkit.world.compare import compare_ledgers, find_disagreement, leftovers
from labkit.world.failure import RankError, RunFailed, RunInterrupted, is_connection_error
from labkit.world.journal import RanksDisagree
from labkit.world.output import Output
from labkit.world.pool import Pool, where
from labkit.world.report import LOADED, Report
from labkit.world.stuck import find_cycle, rows, seen_in_table, table_text, timed_out, verdict
from labkit.world.transport import unpack

#: After the first failure, how long the other ranks may take to show theirs: the first to be heard of is often not
#: the first to fail.
GRACE = 0.4
#: How often a running world is searched for a disagreement.
LOOK = 0.1
#: The longest that ranks may take to load their function, and what it imports, before its time runs.
LOADING = 10.0


@dataclass
class Done:
    """What a run left: values and more, or, after a failure, as much as was known."""

    values: list[Any] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    trace: Trace = field(default_factory=lambda: Trace([], 0))
    leftovers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    clean: bool = True


def collect(pool: Pool, timeout: float, paced: bool = False) -> Done:
    """Wait for what a pool was started on, `paced` or not.

    Raises:
        RunFailed, RunTimeout: See `labkit.world.failure`.
        RunInterrupted: The learner pressed stop.
    """
    watch = _Watch(pool, timeout, paced)
    try:
        watch.until_over()
    except KeyboardInterrupt:
        watch.output.finish()
        raise RunInterrupted(watch.interrupted()) from None
    except RunFailed as failure:
        failure.output, failure.trace = watch.output.finish(), watch.trace()
        raise
    return watch.done()


class _Watch:
    """The state of a run as the kernel sees it."""

    def __init__(self, pool: Pool, timeout: float, paced: bool) -> None:
        self.pool, self.world, self.timeout, self.paced = pool, pool.shape.ranks, timeout, paced
        self.output = Output(self.world)
        self.reports: dict[int, Any] = {}
        self.hung_up: set[int] = set()
        self.loaded: set[int] = set()
        self.looked = time.monotonic()
        self.over_at = self.looked + LOADING + timeout
        self.failed_at: float | None = None

    # What has arrived

    def until_over(self) -> None:
        """Return when every rank has reported success; raise what went wrong otherwise."""
        channels = {m.connection.fileno(): r for r, m in enumerate(self.pool.members)}
        outputs = {m.output: r for r, m in enumerate(self.pool.members)}
        exits = self.pool.server.socket.fileno()
        while len(self.reports) < self.world:
            waited = [f for f, r in channels.items() if r not in self.reports and r not in self.hung_up]
            server = [exits] if self.pool.server.is_alive() else []
            for fd in wait([*waited, *outputs, *server], self._pause()):
                if fd in channels:
                    self._hear(channels[fd])
                elif fd in outputs and not self._print(outputs[fd]):
                    del outputs[fd]
            self.pool.server.poll()
            self.output.refresh()
            self._judge()
        self._drain()
        self.pool.server.preload({name for report in self.reports.values() for name in report.heavy})
        if self._raised():
            self._blame()
        failure = compare_ledgers([self.reports[r].ledger for r in range(self.world)])
        if failure is not None:
            raise failure

    def _pause(self) -> float:
        if self.failed_at is not None:
            return 0.02
        return max(0.0, min(LOOK, self.over_at - time.monotonic()))

    def _hear(self, rank: int) -> None:
        try:
            report = pickle.loads(self.pool.members[rank].connection.recv_bytes())
        except (EOFError, OSError):
            self.hung_up.add(rank)
        else:
            if report == LOADED:
                self._note_loaded(rank)
            elif report.run == self.pool.runs:  # else a child of a rank's os.fork() had its say
                self.reports[rank] = report
                self.pool.files.update(report.files)

    def _note_loaded(self, rank: int) -> None:
        """The time that a run may take begins when its last rank does."""
        self.loaded.add(rank)
        if len(self.loaded) == self.world:
            self.over_at = min(self.over_at, time.monotonic() + self.timeout)

    def _print(self, rank: int) -> bool:
        """Take a rank's output; False when it will print no more."""
        data = self.pool.members[rank].read_output()
        self.output.add(rank, data)
        return bool(data)

    def _drain(self) -> None:
        for rank in range(self.world):
            self._print(rank)

    # What it means

    def _judge(self) -> None:
        """Raise if the run has failed and the reason is as clear as it will get."""
        at = time.monotonic()
        self._note_failure(at)
        if at - self.looked > (LOOK if self.failed_at is None else 0):
            self.looked = at
            self._raise_disagreement(at)
        if self.failed_at is not None and self._all_ended_or(at - self.failed_at > GRACE):
            self._blame()
        if self.failed_at is None and at > self.over_at:
            self._time_out()

    def _note_failure(self, at: float) -> None:
        if self.failed_at is None and (self.hung_up or self._raised()):
            self.failed_at = at

    def _all_ended_or(self, patience_is_over: bool) -> bool:
        """Everybody has ended and is accounted for. A bare connection error may wait for its cause a little longer."""
        if len(self.reports) + len(self._exits()) >= self.world:
            return True
        only_consequences = not self.hung_up and all(_may_have_a_cause(e) for e in self._raised().values())
        return patience_is_over and (not only_consequences or time.monotonic() - (self.failed_at or 0) > 3 * GRACE)

    def _blame(self) -> None:
        self._drain()
        operations = self._operations()
        if not self.pool.server.is_alive():
            raise RunFailed("the fork server, from which all ranks descend, was ended; the next run starts another", [])
        # A channel that is closed although the process lives counts as an exit: something closed descriptors.
        exits = self._exits() or dict.fromkeys(self.hung_up, 0)
        failure = blame(operations, self._returned(), self._raised(), exits)
        assert failure is not None, "a run counts as failed, and nothing has failed"
        raise failure

    def _operations(self) -> list:
        """What every rank did: all of it where the rank has reported, else what the operation table keeps."""
        table = self.pool.table.read_all()
        for rank, report in self.reports.items():
            if report.ledger is not None:
                table[rank] = report.ledger.history
        return table

    def _raise_disagreement(self, at: float) -> None:
        """A disagreement is raised as soon as all members are there to be named, or have had the time to come."""
        if not self.pool.shape.record:
            return
        found = find_disagreement(self._operations(), self._returned(), self.world)
        if found is None:
            return
        self.failed_at = self.failed_at or at
        if not found.missing or at - self.failed_at > 3 * GRACE:
            self._drain()
            raise found

    def _time_out(self) -> None:
        self._drain()
        operations = self._operations()
        raise timed_out(self._rows(operations), operations, self.timeout)

    def interrupted(self) -> str:
        """Where everybody was when the learner pressed stop."""
        with contextlib.suppress(Exception):
            operations = self._operations()
            table = self._rows(operations)
            told = [*table_text(table, operations), verdict(table, find_cycle(table))]
            return "\n".join(["interrupted; the ranks were stopped", *told])
        return "interrupted; the ranks were stopped"

    def _rows(self, operations: list) -> list:
        """A line a rank. The probe asks ranks that are in no operation where they are."""
        table = rows(operations, self._returned(), set(self._raised()), {}, now())
        running = {r.rank: self.pool.members[r.rank] for r in table if r.state == "running"}
        places = where(running, 0.3)
        return [replace(r, place=places[r.rank]) if places.get(r.rank) else r for r in table]

    def _exits(self) -> dict[int, int]:
        found = {r: m.exit_status() for r, m in enumerate(self.pool.members) if r not in self.reports}
        return {r: s for r, s in found.items() if s is not None}

    def _raised(self) -> dict[int, Any]:
        return {r: p.raised for r, p in self.reports.items() if p.raised is not None}

    def _returned(self) -> set[int]:
        return {r for r, p in self.reports.items() if p.raised is None}

    # What came back

    def trace(self) -> Trace:
        """The events of the ranks that reported, and what the operation table knows of the others."""
        events = [e for p in self.reports.values() for e in p.events]
        for rank in set(range(self.world)) - self.reports.keys():
            events += seen_in_table(self.pool.table.read(rank), self.pool.zero)
        return Trace(events, self.world, self.paced)

    def done(self) -> Done:
        reports = [self.reports[r] for r in range(self.world)]
        left = leftovers([p.ledger for p in reports if p.ledger is not None])
        output = self.output.finish()
        for sentence in left:
            print(f"labkit: {sentence}")
        values = [self._value(rank) for rank in range(self.world)]
        clean = not left and all(p.clean for p in reports)
        return Done(values, output, with_ends(self.trace()), left, pace_notes(reports), clean)

    def _value(self, rank: int) -> Any:
        try:
            return unpack(self.reports[rank].value)
        except Exception as error:
            raise RankError(
                f"rank {rank}'s return value cannot be rebuilt in this process: {type(error).__name__}: {error}. "
                "Return plain data or tensors",
                [rank],
            ) from error


def pace_notes(reports: list[Report]) -> list[str]:
    """What did not go by the pace, a sentence each."""
    return [n for p in reports for n in p.notes] + too_slow([p.ended for p in reports if p.ended is not None])


def _may_have_a_cause(raised: Any) -> bool:
    """Whether an exception only says that something is wrong with another rank."""
    return is_connection_error(raised) or raised.type == RanksDisagree.__name__


def with_ends(trace: Trace) -> Trace:
    """A send that nobody waited for has ended when its message was received."""
    ends = {(m.send.rank, m.send.index): m.recv.end for m in trace.messages() if m.send and m.recv}

    def closed(e: Event) -> Event:
        return replace(e, end=ends.get((e.rank, e.index))) if e.end is None and e.kind == "send" else e

    return Trace([closed(e) for e in trace.events], trace.ranks, trace.paced)
