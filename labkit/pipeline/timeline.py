"""When everything in a schedule happened: simulated, or measured on real ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from labkit.pipeline.schedule import KINDS, Action, Kind, Message, needs, stash_after
from labkit.trace import Event, Trace


class TimedAction(NamedTuple):
    """An action of a rank, from `start` to `end`."""

    rank: int
    kind: Kind
    micro_batch: int
    stage: int
    start: float
    end: float

    @property
    def action(self) -> Action:
        return Action(self.kind, self.micro_batch, self.stage)


class Transfer(NamedTuple):
    """A message between two ranks: made at `ready`, it leaves at `start`, when the port is free; there at `end`."""

    message: Message
    ready: float
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What each rank did when. Times are in the unit of the durations that were given; in seconds if measured.

    Attributes:
        name: The schedule's.
        ranks, micro_batches, stages: How many.
        events: Every action, in the order of starting.
        transfers: Every message between ranks, in the order of leaving; none where they were not measured.
    """

    name: str
    ranks: int
    micro_batches: int
    stages: int
    events: tuple[TimedAction, ...]
    transfers: tuple[Transfer, ...] = ()

    @classmethod
    def from_trace(cls, trace: Trace, name: str = "measured", step: int | None = None) -> Timeline:
        """The same from a real run: spans "F", "B" and "W" with labels `stage` and `micro_batch`. It begins at 0.

        Args:
            step: Of several steps in the trace, the one inside ``label(step=step)``.

        Raises:
            ValueError: The trace has no such span, or one that was not finished or lacks a label; or more than one
                step, or more than one pipeline.
        """
        spans = [e for e in trace.events if e.name in KINDS and step in (None, e.labels.get("step"))]
        if not spans:
            raise ValueError('the trace has no span "F", "B" or "W": run a PipelineEngine, with record=True')
        zero = min(e.start for e in spans)
        events = [_timed(e, zero) for e in spans]
        for action, times in Counter(e.action for e in events).items():
            if times > 1:
                raise ValueError(f"the trace has {action} {times} times: expected one step of one pipeline; label the "
                                 "steps, and choose one: from_trace(trace, step=1)")  # fmt: skip
        return cls(
            name=name, ranks=trace.ranks, micro_batches=1 + max(e.micro_batch for e in events),
            stages=1 + max(e.stage for e in events), events=tuple(events),
        )  # fmt: skip

    def of(self, rank: int) -> list[TimedAction]:
        """The actions of one rank, in order."""
        return self._rows[rank]

    @cached_property
    def _rows(self) -> list[list[TimedAction]]:
        rows: list[list[TimedAction]] = [[] for _ in range(self.ranks)]
        for event in self.events:
            rows[event.rank].append(event)
        return rows

    @cached_property
    def makespan(self) -> float:
        """From 0 to the end of the last action."""
        return max((e.end for e in self.events), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Rank → time in its actions."""
        return tuple(sum(e.end - e.start for e in row) for row in self._rows)

    @property
    def idle(self) -> tuple[float, ...]:
        """Rank → the rest of the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def spans(self) -> tuple[float, ...]:
        """Rank → from its first action to the end of its last.

        Where ranks need not wait for each other between two batches (Zero Bubble's optimizer step without a barrier),
        the longest is what a batch costs.
        """
        return tuple(row[-1].end - row[0].start if row else 0.0 for row in self._rows)

    @property
    def bubble(self) -> float:
        """Idle time as a share of the ideal, which is all work spread evenly: (p−1)/m for GPipe and 1F1B."""
        return sum(self.idle) / sum(self.busy) if self.events else 0.0

    @property
    def bubble_of_total(self) -> float:
        """Idle time as a share of all time: (p−1)/(m+p−1) for GPipe and 1F1B."""
        return sum(self.idle) / (self.makespan * self.ranks) if self.events else 0.0

    @property
    def peak_stash(self) -> tuple[int, ...]:
        """Rank → how many pairs (micro-batch, stage) it held at its peak; see `Schedule.stash`."""
        apart = frozenset((e.micro_batch, e.stage) for e in self.events if e.kind == "W")
        return tuple(max(stash_after([e.action for e in row], apart), default=0) for row in self._rows)

    @cached_property
    def critical_path(self) -> tuple[TimedAction | Transfer, ...]:
        """What the makespan is made of: each began when the one before it was over; a transfer counts from `ready`.

        Of what an action had to wait for, the previous action of its rank among it, the path takes what ended last.
        In a simulation the path has no gap: its length is the makespan. To end sooner, shorten something on it.
        """
        made = {e.action: e for e in self.events}
        sent = {(t.message.producer, t.message.target): t for t in self.transfers}
        before = {after.action: e for row in self._rows for e, after in pairwise(row)}
        path: list[TimedAction | Transfer] = []
        step: TimedAction | Transfer | None = max(self.events, key=lambda e: e.end, default=None)
        while step is not None:
            path.append(step)
            if isinstance(step, Transfer):
                step = made[step.message.producer]
                continue
            waited = [sent.get((a, step.rank), made.get(a)) for a in needs(step.action, self.stages)]
            step = max((w for w in (before.get(step.action), *waited) if w), key=lambda w: w.end, default=None)
        return tuple(reversed(path))


def _timed(span: Event, zero: float) -> TimedAction:
    if span.end is None or not {"stage", "micro_batch"} <= span.labels.keys():
        raise ValueError(f"span {span.name} of rank {span.rank} has labels {span.labels} and ends at {span.end}: "
                         "expected stage and micro_batch, and an end")  # fmt: skip
    micro_batch, stage = span.labels["micro_batch"], span.labels["stage"]
    return TimedAction(span.rank, span.name, micro_batch, stage, span.start - zero, span.end - zero)  # type: ignore[arg-type]
