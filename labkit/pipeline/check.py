"""Can a schedule run? It can if everything is there once, in its place, and nothing waits in a circle.

Three questions, in this order: is each action there, once, on its rank? Can each go on at some time (`simulate` tries)?
And can the messages be sent: do both sides of each pair of ranks name the same ones in the same order, and do no two
ranks wait for each other's? A schedule for which the answers are yes runs on real ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from labkit.pipeline.legal import IllegalSchedule, places
from labkit.pipeline.messages import Compute, Item, Message, Receive, Send, messages
from labkit.pipeline.schedule import KINDS, Action, Schedule


def check(schedule: Schedule) -> None:
    """Raise unless the schedule can run.

    Args:
        schedule: Every micro-batch needs F and B in every stage; if there is any W, all that are not `unsplit` need
            one.

    Raises:
        IllegalSchedule: It says which action is wrong or can never run, what that waits for, and where both stand.

    >>> check(Schedule.parse("r0: F0 B0 F1 B1 \\n r1: B0 F0 F1 B1"))
    Traceback (most recent call last):
    labkit.pipeline.legal.IllegalSchedule: B0 on rank 1, at place 0, can never run: it needs F0 on rank 1, which \
stands at place 1 behind B0 itself
    """
    _complete(schedule)
    check_messages(messages(schedule))


def _complete(schedule: Schedule) -> None:
    """Every action once, in its place."""
    there = places(schedule)
    for micro_batch in range(schedule.micro_batches):
        for stage in range(schedule.stages):
            whole = not schedule.split or (micro_batch, stage) in schedule.unsplit
            for kind in KINDS[:2] if whole else KINDS:
                action = Action(kind, micro_batch, stage)
                if action not in there:
                    rank = schedule.rank_of(stage, micro_batch)
                    text = f"{schedule.word(action)} of stage {stage} is missing: rank {rank} never does it"
                    raise IllegalSchedule(text, action)
            if whole and Action("W", micro_batch, stage) in there:
                action = Action("W", micro_batch, stage)
                text = (
                    f"{schedule.word(action)} stands on rank {there[action][0]}, but its B is both gradients (unsplit)"
                )
                raise IllegalSchedule(text, action, there[action])


def check_messages(programs: Sequence[Sequence[Item]]) -> None:
    """Raise unless the messages of these programs can be sent, one after the other, whatever a backend keeps ready.

    Each send waits for its receive and each receive for its send, as on one CUDA stream, or with blocking calls and
    tensors too large for a backend to keep.

    Args:
        programs: Rank → its items in order, as `messages` makes them, or written by hand.

    Raises:
        IllegalSchedule: A message is sent and not received, or the other way round; ranks wait for each other.

    >>> there, back = Message("F", 0, 0, source=0, target=1), Message("B", 0, 1, source=1, target=0)
    >>> check_messages([[Send(there), Receive(back)], [Send(back), Receive(there)]])
    Traceback (most recent call last):
    labkit.pipeline.legal.IllegalSchedule: deadlock: rank 0 waits at place 0 to send F0.0 to 1, rank 1 waits at \
place 0 to send B0.1 to 0
    """
    _same_order(programs)
    _no_deadlock(programs)


def _same_order(programs: Sequence[Sequence[Item]]) -> None:
    """For each ordered pair of ranks, what is sent is what is received, in this order."""
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for place, item in enumerate(program):
            if isinstance(item, Compute):
                continue
            m = item.message
            mine, other = (m.source, m.target) if isinstance(item, Send) else (m.target, m.source)
            if mine != rank or other == rank or other not in range(len(programs)):
                raise IllegalSchedule(f"rank {rank} cannot {item} (place {place}): the message goes from {m.source} to "
                                      f"{m.target}, and there are {len(programs)} ranks")  # fmt: skip
            (sent if isinstance(item, Send) else received)[m.source, m.target].append(m)
    for source, target in sorted(sent.keys() | received.keys()):
        gone, come = sent[source, target], received[source, target]
        for number, (s, r) in enumerate(zip(gone, come, strict=False)):
            if s != r:
                raise IllegalSchedule(f"message {number} from rank {source} to rank {target} is sent as {s.producer}, "
                                      f"and received as {r.producer}: they are told apart by their order")  # fmt: skip
        if len(gone) != len(come):
            raise IllegalSchedule(
                f"rank {source} sends {len(gone)} messages to rank {target}, which receives {len(come)}"
            )


def _no_deadlock(programs: Sequence[Sequence[Item]]) -> None:
    """Let ranks go on, in any order, until all are done or none can."""
    at = [0] * len(programs)
    waiting: dict[int, Item] = {}  # rank → the message at which it waits
    able = list(range(len(programs)))
    while able:
        rank = able.pop()
        program = programs[rank]
        while at[rank] < len(program) and isinstance(program[at[rank]], Compute):
            at[rank] += 1
        item = program[at[rank]] if at[rank] < len(program) else None
        if item is None or isinstance(item, Compute):
            continue
        message = item.message
        other, partner = (message.target, Receive) if isinstance(item, Send) else (message.source, Send)
        if waiting.get(other) == partner(message):
            del waiting[other]
            at[rank] += 1
            at[other] += 1
            able += [rank, other]
        else:
            waiting[rank] = item
    if waiting:
        waits = (f"rank {rank} waits at place {at[rank]} to {item}" for rank, item in sorted(waiting.items()))
        raise IllegalSchedule(f"deadlock: {', '.join(waits)}")
