"""When everything in a schedule happens, how long it takes, and who idles: event by event.

A rank does its actions in order, each as soon as what it needs is there. When an action ends, its result leaves through
the rank's port, one full-duplex port a rank on which transfers queue; `labkit.pace` does the same to real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter

from labkit.pipeline.legal import places, stuck
from labkit.pipeline.schedule import Action, Message, Schedule, needs, number
from labkit.pipeline.timeline import TimedAction, Timeline, Transfer

#: One number for all stages, or one a stage.
Durations = float | Sequence[float]


def simulate(
    schedule: Schedule, forward: Durations = 1, backward: Durations = 1, weight: Durations = 1,
    communication: float = 0, slow: Mapping[int, float] | None = None,
) -> Timeline:  # fmt: skip
    """Run a schedule on paper.

    Args:
        schedule: It may be unfinished, as long as what is there can run.
        forward, backward, weight: How long F, B and W of a stage take, in any unit of time: a number, or one a stage.
            `backward` is the gradient of the input alone. A B without a W of its own takes backward + weight, so give
            a whole backward of 40 as backward=20, weight=20, or as backward=40, weight=0.
        communication: How long a transfer between two ranks keeps both ports, in the same unit.
        slow: Rank → how many times as long its actions take.

    Raises:
        TypeError, ValueError: A duration that is no finite number, or below 0; not one a stage; a rank or a factor in
            `slow` that cannot be.
        IllegalSchedule: Some action can never run, stands twice, or on another rank than its stage.

    Assumptions: sending costs a rank itself no time; a transfer takes the same between any two ranks, and none within
    a rank; each port sends and receives in the order in which messages leave.

    Source: the schedules' papers use this model without ports; one port a rank is Hockney's (1994).

    >>> from labkit.pipeline import gpipe, one_f_one_b
    >>> for schedule in (gpipe(4, 8), one_f_one_b(4, 8)):
    ...     print([simulate(schedule, forward=20, backward=40, weight=0, communication=c).makespan for c in (0, 5)])
    [660.0, 690.0]
    [660.0, 740.0]
    """
    durations = {kind: _durations(name, given, schedule.stages) for kind, name, given in
                 (("F", "forward", forward), ("B", "backward", backward), ("W", "weight", weight))}  # fmt: skip
    number("communication", communication)
    places(schedule)
    play = _Play(schedule, durations, communication, _factors(slow or {}, schedule.ranks))
    play.to_the_end()
    return Timeline(
        name=schedule.name, ranks=schedule.ranks, micro_batches=schedule.micro_batches, stages=schedule.stages,
        events=tuple(sorted(play.events, key=attrgetter("start", "rank"))), transfers=tuple(play.transfers),
    )  # fmt: skip


class _Play:
    """Ranks and ports on one clock. What will happen stands in a heap; what happens first is taken first."""

    def __init__(
        self, schedule: Schedule, durations: dict[str, Sequence[float]], communication: float, factors: list[float]
    ) -> None:
        self.schedule, self.durations, self.communication, self.factors = schedule, durations, communication, factors
        self.events: list[TimedAction] = []
        self.transfers: list[Transfer] = []
        self.begun = [0] * schedule.ranks
        self.free = [0.0] * schedule.ranks  # when the last action that a rank has begun will be over
        self.there: list[dict[Action, float]] = [{} for _ in self.begun]  # rank → result → when it is there
        self.outgoing, self.incoming = [0.0] * schedule.ranks, [0.0] * schedule.ranks  # when the port is free
        self.coming: list[tuple[float, int, Callable[[Message, float], None], Message]] = []
        self.order = count()  # of two at the same time, the one noted first comes first

    def to_the_end(self) -> None:
        for rank in range(self.schedule.ranks):
            self.go_on(rank)
        while self.coming:
            now, _, happen, message = heappop(self.coming)
            happen(message, now)
        if any(begun < len(row) for begun, row in zip(self.begun, self.schedule.actions, strict=True)):
            raise stuck(self.schedule, self.begun)

    def note(self, time: float, happen: Callable[[Message, float], None], message: Message) -> None:
        heappush(self.coming, (time, next(self.order), happen, message))

    def go_on(self, rank: int) -> None:
        """Begin the rank's next actions, as far as it is known when what they need is there."""
        row, there = self.schedule.actions[rank], self.there[rank]
        while self.begun[rank] < len(row):
            action, start = row[self.begun[rank]], self.free[rank]
            for needed in needs(action, self.schedule.stages):
                if needed not in there:
                    return
                start = max(start, there[needed])
            end = start + self.duration(action) * self.factors[rank]
            self.events.append(TimedAction(rank, *action, start, end))
            self.begun[rank] += 1
            self.free[rank] = there[action] = end
            if message := self.schedule.message(action):
                self.note(end, self.made, message)

    def duration(self, action: Action) -> float:
        kind, micro_batch, stage = action
        both = kind == "B" and (micro_batch, stage) not in self.schedule.taken_apart
        return self.durations[kind][stage] + (self.durations["W"][stage] if both else 0)

    def made(self, message: Message, now: float) -> None:
        """It leaves when those before it have left."""
        leaves = max(now, self.outgoing[message.source])
        self.outgoing[message.source] = leaves + self.communication
        if leaves > now:
            self.note(leaves, self.leave, message)
        else:
            self.leave(message, now)

    def leave(self, message: Message, now: float) -> None:
        """It is there when those that left before it, for the same rank, are."""
        source, target, result = message.source, message.target, message.producer
        arrives = max(now, self.incoming[target]) + self.communication
        self.incoming[target] = self.there[target][result] = arrives
        self.transfers.append(Transfer(message, self.there[source][result], now, arrives))
        self.go_on(target)


def _durations(name: str, given: Durations, stages: int) -> Sequence[float]:
    if isinstance(given, Sequence):
        if len(given) != stages:
            raise ValueError(f"{name} has {len(given)} durations, but there are {stages} stages: expected one each")
        for stage, duration in enumerate(given):
            number(f"{name}[{stage}]", duration)
        return given
    number(name, given)
    return [given] * stages


def _factors(slow: Mapping[int, float], ranks: int) -> list[float]:
    factors = [1.0] * ranks
    for rank, factor in slow.items():
        if rank not in range(ranks):
            raise ValueError(f"slow has rank {rank!r}: expected one from 0 to {ranks - 1}")
        number(f"slow[{rank}]", factor)
        factors[rank] = factor
    return factors
