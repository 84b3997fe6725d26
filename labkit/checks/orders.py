"""Orders that a learner wrote, such as ["F0", "F1", "B0"] for a rank: read, checked, and told against the right one.

F takes 1 and B takes 2, unless W takes one of the two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from labkit.checks.alone import in_short
from labkit.pipeline import Action, IllegalSchedule, Schedule, Timeline, simulate
from labkit.show.words import say

#: A rank's words; or what else a function returned, in short.
Row = list[str] | str
_WORD = re.compile(r"([FBW])(\d+)")


def row_of(made: Any) -> Row:
    """What a function returned for one rank."""
    if isinstance(made, (list, tuple)) and all(isinstance(word, str) for word in made):
        return list(made)
    return in_short(made)


def words(schedule: Schedule) -> list[list[str]]:
    """Rank → its actions as words."""
    return [[schedule.word(action) for action in row] for row in schedule.actions]


def unread(rows: Sequence[Row], micro_batches: int, kinds: str = "FB") -> str:
    """In words, what is no list of actions of these kinds and micro-batches; ``""`` if all are."""
    for rank, row in enumerate(rows):
        if isinstance(row, str):
            return say("orders.returned", rank=rank, have=row)
        for place, word in enumerate(row):
            read = _WORD.fullmatch(word)
            if read is None or read[1] not in kinds:
                return say("orders.word", rank=rank, place=place, have=in_short(word), kinds=", ".join(kinds))
            if int(read[2]) >= micro_batches:
                return say("orders.number", rank=rank, place=place, have=word, last=micro_batches - 1)
    return ""


def schedule_of(rows: Sequence[Row], micro_batches: int) -> Schedule:
    """One stage a rank; `unread` says nothing of the rows."""
    actions = tuple(tuple(Action(word[0], int(word[1:]), rank) for word in row)  # type: ignore[arg-type]
                    for rank, row in enumerate(rows))  # fmt: skip
    return Schedule(name="", ranks=len(rows), micro_batches=micro_batches, stages=len(rows), actions=actions)


def text_of(made: Any) -> str:
    """A whole schedule that a function returned, one line a rank; what else it returned, in short, is none."""
    return made if isinstance(made, str) else made.text() if isinstance(made, Schedule) else in_short(made)


def unread_text(text: str, ranks: int, micro_batches: int, kinds: str) -> str:
    """In words, why a text is no schedule of so many ranks, one stage each; ``""`` if it is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) != ranks:
        return say("orders.lines", have=" / ".join(lines)[:60], want=ranks)
    try:
        return unread(words(Schedule.parse(text, stages=ranks)), micro_batches, kinds)
    except ValueError as error:
        return str(error)


def plan_of(text: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule of a text of which `unread_text` says nothing."""
    return Schedule.parse(text, micro_batches=micro_batches, stages=ranks)


def illegal(schedule: Schedule) -> str:
    """Why it cannot run, in the checker's words; ``""`` if it can."""
    try:
        schedule.check()
    except IllegalSchedule as error:
        return str(error)
    return ""


def first_difference(rows: Sequence[Row], wanted: Sequence[Row]) -> str:
    """The first action that differs, in words; ``""`` if none does."""
    for rank, (have, want) in enumerate(zip(rows, wanted, strict=True)):
        for place in range(max(len(have), len(want))):
            mine, right = (row[place] if place < len(row) else say("orders.nothing") for row in (have, want))
            if mine != right:
                return say("orders.differs", rank=rank, place=place, want=right, have=mine)
    return ""


def late(schedule: Schedule, wanted: Schedule) -> str:
    """In words, how much later than `wanted` it ends, and what comes late first; ``""`` if it ends no later."""
    have, want = simulate(schedule), simulate(wanted)
    if have.makespan <= want.makespan:
        return ""
    line = say("orders.makespan", have=f"{have.makespan:g}", want=f"{want.makespan:g}")
    return line + _first_late(have, want)


def _first_late(have: Timeline, want: Timeline) -> str:
    due = {event.action: event.start for event in want.events}
    for event in have.events:
        if event.action in due and event.start > due[event.action]:
            word, times = f"{event.kind}{event.micro_batch}", (f"{event.start:g}", f"{due[event.action]:g}")
            return say("orders.late", word=word, rank=event.rank, have=times[0], want=times[1])
    return ""


def over_stash(schedule: Schedule, limits: Sequence[int]) -> str:
    """The first rank that holds more micro-batches than its limit, in words; ``""`` if none does."""
    for rank, (have, limit) in enumerate(zip(schedule.stash(), limits, strict=True)):
        if have > limit:
            return say("orders.stash", rank=rank, have=have, limit=limit, ratio=f"{have / limit:.1f}")
    return ""


def held(schedule: Schedule) -> str:
    """What the ranks hold at their peaks."""
    return ", ".join(map(str, schedule.stash()))


def size(ranks: int, micro_batches: int) -> str:
    """A case in words."""
    return say("orders.case", ranks=ranks, micro_batches=micro_batches)
