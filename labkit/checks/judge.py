"""From what the ranks did to a verdict."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import labkit
from labkit.checks import astray
from labkit.checks.exercise import Case, Cost, Exercise
from labkit.checks.look import FATAL, GLANCE, LIMIT, Outcome, look, look_once
from labkit.checks.shrink import smallest
from labkit.checks.trial import GIVEN, is_large
from labkit.checks.verdict import Verdict
from labkit.collectives import ALGORITHMS
from labkit.show.words import say
from labkit.trace import Event, Trace
from labkit.world.failure import Row
from labkit.world.place import shown_place

__all__ = ["LIMIT", "costs", "judge", "rounds"]

AGAIN = 3  #: times that a case is tried again whose messages came in too long a row


#: One check at a time, also where threads ask for several.
_alone = threading.RLock()


def judge(exercise: Exercise, fn: Callable[..., Any]) -> Verdict:
    """Try the function on each case, stop at the first that fails, and tell of the smallest that fails like it.

    What the ranks print is shown of that case alone, or of the first when none fails.
    """
    with _alone:  # what is printed is held back process-wide
        return _judge(exercise, fn)


def _judge(exercise: Exercise, fn: Callable[..., Any]) -> Verdict:
    seen: list[Outcome] = []
    for case in exercise.cases:
        outcome = look(exercise, fn, case)
        if outcome.kind != "right":
            shown = _smallest(exercise, fn, outcome, [o.case for o in seen])
            _print(shown)
            return _told(exercise, shown, _spent_too_much(exercise, fn, seen) if case.ranks == 1 else ())
        seen.append(outcome)
    _print(seen[0])
    if over := _spent_too_much(exercise, fn, seen) or _wasteful(exercise, seen):
        return Verdict(exercise.name, "wasteful", _all_right(exercise), over)
    spent = [(o.case, costs(o.run)) for o in seen if o.run is not None]
    lines = _all_right(exercise), *_spent(exercise, spent), *_score(exercise, seen)
    return Verdict(exercise.name, "right", "", lines)


def _smallest(exercise: Exercise, fn: Callable[..., Any], found: Outcome, passed: list[Case]) -> Outcome:
    if found.kind not in ("wrong", "crashed", "deadlocked"):
        return found
    limit = GLANCE if found.kind == "deadlocked" else LIMIT
    return smallest(found, passed, lambda case: look_once(exercise, fn, case, limit), exercise.legal)


def _print(outcome: Outcome) -> None:
    if text := outcome.output:
        print(text)


def _told(exercise: Exercise, outcome: Outcome, before: tuple[str, ...] = ()) -> Verdict:
    """A case that was not right, in words; `before`: what was seen in cases whose values are right.

    A step too many fails only where a rank is alone, and shows as messages too many elsewhere.
    """
    case, run, failure = outcome.case, outcome.run, outcome.failure
    picture, named = None, ""
    lines: tuple[str, ...] = ()
    if outcome.kind == "not_attempted":
        return Verdict(exercise.name, "not_attempted")
    if isinstance(failure, labkit.RunTimeout):
        lines = _deadlocked(failure)
        if not (failure.cycle or all(row.waits_for for row in failure.table if row.state != "returned")):
            named = say("verdict.unfinished")
    elif failure is not None:
        lines = _crashed(case, failure)
    elif outcome.kind == "borrowed":
        lines = (_borrowed(exercise, outcome.why),)
    elif outcome.why == "hasty" and run is not None:
        lines = (*[t.hasty for t in run.values if t.hasty][:1], *run.leftovers[:2])
    elif outcome.why == "way" and run is not None:
        lines = tuple(astray.way(run.trace))
    elif outcome.why == "silent":
        lines = (say("check.silent"),)
    elif run is not None and outcome.why == "leftovers":
        lines = tuple(run.leftovers[:3])
    elif run is not None:
        lines, picture = astray.story(exercise, case, run)
    if failure is not None and exercise.ring:
        lines = (*lines, *astray.way(failure.trace))
    return Verdict(exercise.name, outcome.kind, exercise.where(case), (*before, *lines), picture, named)


def _borrowed(exercise: Exercise, name: str) -> str:
    """A collective may do something else than the exercise; where only messages are allowed, none is."""
    where, _, called = name.partition(".")
    if not exercise.allowed and (where == "dist" or (where == "collectives" and called in ALGORITHMS)):
        return say("check.collective", name=name)
    return say("check.borrowed", name=name)


def costs(run: labkit.Run) -> list[Cost]:
    """What each rank spent."""
    found = []
    for rank, tried in enumerate(run.values):
        mine = [e for e in run.trace.of(rank) if GIVEN not in e.labels]
        sends, calls = [e for e in mine if e.kind == "send"], collectives(mine)
        found.append(
            Cost(
                sum(e.nbytes for e in sends), len(sends), rounds(run.trace), tried.peak,
                len(calls), sum(e.nbytes for e in calls),
            )
        )  # fmt: skip
    return found


def collectives(events: list[Event]) -> list[Event]:
    """Those that a rank was asked for: torch's, and labkit's own, whose messages are not counted as such."""
    return [
        e for e in events
        if (e.kind == "collective" and e.name != "new_group")
        or (e.kind == "span" and e.name.split(" ")[0] in ALGORITHMS)
    ]  # fmt: skip


def rounds(trace: Trace) -> int:
    """The longest chain of messages: each was sent after its rank had sent, or taken, the one before.

    >>> from labkit.trace import Event
    >>> def message(a, b, at):
    ...     return [Event("send", "send", a, at, at + 1, 8, b, index=int(at)),
    ...             Event("recv", "recv", b, at, at + 1, 8, a, index=int(at))]
    >>> rounds(Trace([*message(0, 1, 0.0), *message(1, 2, 2.0), *message(0, 2, 0.5)], 3))
    2
    """
    round_of: dict[int, int] = {}  # id of an event → the round in which its message travels
    met = {id(m.send): m.recv for m in trace.messages() if m.send is not None}
    for send in sorted((e for e in trace.events if e.kind == "send"), key=lambda e: (e.start, e.index)):
        before = [
            round_of[id(e)] for e in trace.of(send.rank)
            if id(e) in round_of and (e.index < send.index if e.kind == "send" else (e.end or 0) <= send.start)
        ]  # fmt: skip
        round_of[id(send)] = 1 + max(before, default=0)
        if (recv := met.get(id(send))) is not None:
            round_of[id(recv)] = round_of[id(send)]
    return max(round_of.values(), default=0)


def _spent_too_much(exercise: Exercise, fn: Callable[..., Any], seen: list[Outcome]) -> tuple[str, ...]:
    """A line if the budget is exceeded.

    A long row of messages may be chance, where a rank was slow and found more at its door than it had asked for. Then
    the case is tried again, and the shortest row counts.
    """
    spent = []
    for o in seen:
        found = [costs(o.run)] if o.run is not None else []
        limit = exercise.budget(o.case)[0].rounds
        while found and limit is not None and _in_a_row(found[-1]) > limit and len(found) <= AGAIN:
            run = look_once(exercise, fn, o.case, LIMIT).run
            found.append(costs(run) if run is not None else found[0])
        if found:
            spent.append((o.case, min(found, key=_in_a_row)))
    return _over_budget(exercise, spent)


def _in_a_row(by_rank: list[Cost]) -> int:
    return by_rank[0].rounds or 0


def _over_budget(exercise: Exercise, spent: list[tuple[Case, list[Cost]]]) -> tuple[str, ...]:
    """Messages first, then bytes, rounds, collectives, memory; of each the last, largest case that is over."""
    for unit in ("messages", "nbytes", "rounds", "calls", "handed", "peak"):
        for case, by_rank in reversed(spent):
            over = [
                (getattr(cost, unit) - limit, getattr(cost, unit), limit)
                for cost, allowed in zip(by_rank, exercise.budget(case), strict=True)
                if (limit := getattr(allowed, unit)) is not None and getattr(cost, unit) > limit
                if unit != "peak" or is_large(limit)
            ]
            if over:
                _, have, limit = max(over)
                return (f"{_excess(unit, have, limit)}   {exercise.where(case)}",)
    return ()


def _wasteful(exercise: Exercise, seen: list[Outcome]) -> tuple[str, ...]:
    """A line if the order of events is wasteful, or what was made."""
    for o in seen:
        if o.run is None:
            continue
        line = exercise.order(o.case, o.run.trace) if exercise.order else ""
        if line := line or (exercise.excess(o.case, [t.value for t in o.run.values]) if exercise.excess else ""):
            return (f"{line}   {exercise.where(o.case)}",)
    return ()


def _score(exercise: Exercise, seen: list[Outcome]) -> list[str]:
    last = seen[-1]
    if exercise.score is None or last.run is None:
        return []
    return [f"{exercise.score(last.case, [t.value for t in last.run.values])}   {exercise.where(last.case)}"]


def _excess(unit: str, have: int, limit: int) -> str:
    ratio = f" ({have / limit:.1f}×)" if limit else ""
    numbers = {"have": f"{have:,}", "limit": f"{limit:,}", "ratio": ratio}
    return {
        "nbytes": lambda: say("check.over_bytes", **numbers),
        "messages": lambda: say("check.over_messages", **numbers),
        "rounds": lambda: say("check.over_rounds", **numbers),
        "calls": lambda: say("check.over_calls", **numbers),
        "handed": lambda: say("check.over_handed", **numbers),
        "peak": lambda: say("check.over_peak", **numbers),
    }[unit]()


def _all_right(exercise: Exercise) -> str:
    return say("check.all", cases=len(exercise.cases))


def _spent(exercise: Exercise, spent: list[tuple[Case, list[Cost]]]) -> list[str]:
    """The largest case's bytes and messages, or collectives, for somebody who got it right."""
    for total, told in (("nbytes", _messages), ("handed", _collectives)):
        case, by_rank = max(spent, key=lambda pair: sum(getattr(c, total) or 0 for c in pair[1]))
        most = max(by_rank, key=lambda c: getattr(c, total) or 0)
        if getattr(exercise.budget(case)[0], total) is not None:
            return [told(most, exercise.where(case))]
    return []


def _messages(most: Cost, where: str) -> str:
    return say("check.spent", nbytes=f"{most.nbytes:,}", messages=most.messages, where=where)


def _collectives(most: Cost, where: str) -> str:
    return say("check.handed", nbytes=f"{most.handed:,}", calls=most.calls, where=where)


def _deadlocked(stuck: labkit.RunTimeout) -> tuple[str, ...]:
    return (*(f"rank {row.rank}  {_standing(row)}" for row in stuck.table), stuck.verdict)


def _standing(row: Row) -> str:
    """What a rank is in, as a line of the operation table, without times."""
    at = shown_place(row.place) or ""
    if row.operation is None:
        return f"{row.state}  {at}".rstrip()
    name, other = row.operation.signature.name, row.operation.peer
    peer = "" if other is None else say("check.peer_send" if name == "send" else "check.peer_recv", peer=other)
    return " ".join(part for part in (name, peer, f" {at}" if at else "") if part)


def _crashed(case: Case, failure: labkit.RunFailed) -> tuple[str, ...]:
    """The error as the run tells it, without the frames of labkit and torch."""
    lines = [FATAL.sub("", line).rstrip() for line in str(failure).splitlines()]
    told = [line for line in lines if line and "…" not in line and "checks" not in line]
    if getattr(failure.__cause__, "is_stub", False):
        told.insert(0, say("check.unwritten", ranks=", ".join(map(str, failure.ranks)), all=case.ranks))
    return tuple(line if len(line) <= 200 else line[:199] + "…" for line in told[:8])
