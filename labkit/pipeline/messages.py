"""What travels between ranks, and when each of them sends and receives.

    each rank's program     F0  send F0 to 1  F1  send F1 to 1  receive B0 from 1  B0  …

A send may wait until the other rank receives (NCCL, and gloo for large tensors), and NCCL tells messages of a pair
apart by their order alone. So both sides must name the same messages in the same order, and no ranks may wait for each
other in a circle. One rule gives both: write the actions and messages of all ranks down in *one* order, and let each
rank do its part of it. Whatever comes first in that order can always go on.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.pipeline.schedule import Action, Message, Schedule
from labkit.pipeline.simulate import simulate
from labkit.pipeline.timeline import TimedAction


@dataclass(frozen=True, slots=True)
class Compute:
    """Do this action."""

    action: Action

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Send:
    """Send this, to `message.target`."""

    message: Message

    def __str__(self) -> str:
        return f"send {self.message.producer} to {self.message.target}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive this, from `message.source`."""

    message: Message

    def __str__(self) -> str:
        return f"receive {self.message.producer} from {self.message.source}"


Item = Compute | Send | Receive


def messages(schedule: Schedule) -> list[list[Item]]:
    """Rank → its program: its actions in the schedule's order, and between them what it sends and receives.

    The one order is that of a clock on which every action takes one unit. A message is sent and received when the
    action that makes it ends, before any action that starts then. Messages that follow each other without an action in
    between can be one batch (`batch_isend_irecv`). Stages of one rank hand over without a message.

    Raises:
        IllegalSchedule: Some action can never run, stands twice, or on another rank than its stage.

    >>> from labkit.pipeline import one_f_one_b
    >>> for program in messages(one_f_one_b(ranks=2, micro_batches=2)):
    ...     print(", ".join(map(str, program)))
    F0.0, send F0.0 to 1, F1.0, send F1.0 to 1, receive B0.1 from 1, B0.0, receive B1.1 from 1, B1.0
    receive F0.0 from 0, F0.1, receive F1.0 from 0, B0.1, send B0.1 to 0, F1.1, B1.1, send B1.1 to 0
    """
    clock = simulate(schedule)
    programs: list[list[Item]] = [[] for _ in range(schedule.ranks)]
    before, after = 0, 1  # of one moment, messages that are ready come before actions that start
    moments: list[tuple[float, int, Message | TimedAction]] = [(t.ready, before, t.message) for t in clock.transfers]
    moments += [(e.start, after, e) for e in clock.events]
    for _, _, what in sorted(moments, key=lambda moment: moment[:2]):
        if isinstance(what, Message):
            programs[what.source].append(Send(what))
            programs[what.target].append(Receive(what))
        else:
            programs[what.rank].append(Compute(what.action))
    return programs
