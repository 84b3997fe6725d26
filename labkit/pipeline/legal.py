"""Why a schedule cannot run: an action in the wrong place, or ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.pipeline.schedule import Action, Schedule, needs

#: Where an action stands: its rank, and its place in that rank's order, both from 0.
Place = tuple[int, int]


class IllegalSchedule(ValueError):
    """A schedule that cannot run. Its text says what is wrong and where.

    Attributes:
        action: The action that is wrong, or that can never run; ``None`` if it is about messages.
        at: Where it stands: (rank, place), both from 0; ``None`` if it stands nowhere.
        blocker: The action that it waits for, if it does.
        blocker_at: Where that stands; ``None`` if it stands nowhere.
    """

    def __init__(
        self, text: str, action: Action | None = None, at: Place | None = None,
        blocker: Action | None = None, blocker_at: Place | None = None,
    ) -> None:  # fmt: skip
        super().__init__(text)
        self.action, self.at, self.blocker, self.blocker_at = action, at, blocker, blocker_at


def places(schedule: Schedule) -> dict[Action, Place]:
    """Where each action stands.

    Raises:
        IllegalSchedule: It stands twice, or on a rank that has not its stage.
    """
    found: dict[Action, Place] = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            home = schedule.rank_of(action.stage, action.micro_batch)
            if rank != home:
                raise _misplaced(schedule, action, (rank, place), f"but rank {home} has that stage")
            if action in found:
                raise _misplaced(schedule, action, (rank, place), f"but also at place {found[action][1]}")
            found[action] = rank, place
    return found


def _misplaced(schedule: Schedule, action: Action, at: Place, but: str) -> IllegalSchedule:
    text = f"{schedule.word(action)} of stage {action.stage} stands on rank {at[0]} at place {at[1]}, {but}"
    return IllegalSchedule(text, action, at)


def stuck(schedule: Schedule, begun: Sequence[int]) -> IllegalSchedule:
    """What to raise when rank r has begun ``begun[r]`` actions, and no rank can go on.

    Those that are not done wait for each other in a circle, or for something that nobody does; the sentence follows
    that from rank to rank.
    """
    where = places(schedule)
    done = {action for row, number in zip(schedule.actions, begun, strict=True) for action in row[:number]}
    waits = {
        rank: next(a for a in needs(row[begun[rank]], schedule.stages) if a not in done)
        for rank, row in enumerate(schedule.actions) if begun[rank] < len(row)
    }  # fmt: skip
    circle = _circle(waits, where)
    heads = [schedule.actions[rank][begun[rank]] for rank in circle]
    parts = []
    for rank, behind, after in zip(circle, heads[1:] + heads[:1], circle[1:] + circle[:1], strict=True):
        blocker = waits[rank]
        if blocker not in where:
            parts.append(f"needs {schedule.word(blocker)} of stage {blocker.stage}, which no rank does")
            continue
        itself = " itself" if after == circle[0] else f" (place {begun[after]})"
        parts.append(f"needs {schedule.word(blocker)} on rank {after}, which stands at place {where[blocker][1]} "
                     f"behind {schedule.word(behind)}{itself}")  # fmt: skip
    first, blocker = circle[0], waits[circle[0]]
    text = f"{schedule.word(heads[0])} on rank {first}, at place {begun[first]}, can never run: it "
    text += ", which ".join(parts)
    return IllegalSchedule(text, heads[0], (first, begun[first]), blocker, where.get(blocker))


def _circle(waits: dict[int, Action], where: dict[Action, Place]) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first; or one that waits for what nobody does."""
    rank = min(waits)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        if waits[rank] not in where:
            return [rank]
        rank = where[waits[rank]][0]
    circle = path[path.index(rank) :]
    lowest = circle.index(min(circle))
    return circle[lowest:] + circle[:lowest]
