"""From what the ranks did to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import labkit
from labkit.checks import astray
from labkit.checks.exercise import Case, Cost, Exercise
from labkit.checks.trial import Tried, attempt
from labkit.checks.verdict import Verdict
from labkit.collectives import ALGORITHMS
from labkit.show.words import count, say
from labkit.trace import Trace
from labkit.world.failure import Row
from labkit.world.place import shown_place

#: Seconds for a case. A right solution takes milliseconds; where nobody waits in a circle, more is granted once.
LIMIT, PATIENCE = 3.0, 30.0


def judge(exercise: Exercise, fn: Callable[..., Any]) -> Verdict:
    """Try the function on each case, smallest first, and stop at the first that fails."""
    spent: list[tuple[Case, list[Cost]]] = []
    for case in exercise.cases:
        try:
            run = _tried(exercise, fn, case)
        except labkit.RunTimeout as stuck:
            return _deadlocked(exercise, case, stuck)
        except labkit.RunFailed as failure:
            return _crashed(exercise, case, failure)
        if verdict := _wrong(exercise, case, run):
            return verdict
        spent.append((case, costs(run)))
    return _over_budget(exercise, spent) or Verdict(exercise.name, "right", "", (_all_right(exercise), *_spent(spent)))


def _tried(exercise: Exercise, fn: Callable[..., Any], case: Case) -> labkit.Run:
    """A run of one case. A time-out counts only if somebody waits for a message that is not under way."""
    try:
        return labkit.run(attempt, exercise, fn, case, ranks=case.ranks, device="cpu", timeout=LIMIT)
    except labkit.RunTimeout as stuck:
        waits = [row for row in stuck.table if row.state == "waiting" and row.waits_for]
        if waits and all(row.state != "running" for row in stuck.table):
            raise
        return labkit.run(attempt, exercise, fn, case, ranks=case.ranks, device="cpu", timeout=PATIENCE)


def where(case: Case) -> str:
    """A case in words."""
    told = [say("check.world", ranks=case.ranks), count("check.elements", case.elements)]
    return ", ".join(told if case.dtype == "int64" else [*told, case.dtype])


def _wrong(exercise: Exercise, case: Case, run: labkit.Run) -> Verdict | None:
    tried: list[Tried] = run.values
    if not any(t.attempted for t in tried):
        return Verdict(exercise.name, "not_attempted")
    if name := borrowed(run.trace):
        return Verdict(exercise.name, "borrowed", where(case), (say("check.borrowed", name=name),))
    expected = exercise.expected(case)
    bad = exercise.compare(case, [t.value for t in tried], expected)
    if bad:
        lines, picture = astray.story(exercise, case, run, expected, bad)
        return Verdict(exercise.name, "wrong", where(case), tuple(lines), picture)
    if run.leftovers:
        return Verdict(exercise.name, "wrong", where(case), tuple(run.leftovers[:3]))
    if case.ranks > 1 and case.elements and not any(e.kind == "send" for e in run.trace.events):
        return Verdict(exercise.name, "wrong", where(case), (say("check.silent"),))
    return None


def borrowed(trace: Trace) -> str | None:
    """A collective of torch's or labkit's own that the function called."""
    for e in trace.events:
        if e.kind == "collective" and e.name != "new_group":
            return f"dist.{e.name}"
        if e.kind == "span" and e.name.split(" ")[0] in ALGORITHMS:
            return f"collectives.{e.name.split(' ')[0]}"
    return None


def costs(run: labkit.Run) -> list[Cost]:
    """What each rank spent."""
    found = []
    for rank, tried in enumerate(run.values):
        sends = [e for e in run.trace.of(rank) if e.kind == "send"]
        found.append(Cost(sum(e.nbytes for e in sends), len(sends), rounds(run.trace), tried.peak))
    return found


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


def _over_budget(exercise: Exercise, spent: list[tuple[Case, list[Cost]]]) -> Verdict | None:
    """Bytes first, then messages, rounds, memory; of each the last, largest case that is over."""
    for unit in ("nbytes", "messages", "rounds", "peak"):
        for case, by_rank in reversed(spent):
            over = [
                (getattr(cost, unit) - limit, getattr(cost, unit), limit)
                for cost, allowed in zip(by_rank, exercise.budget(case), strict=True)
                if (limit := getattr(allowed, unit)) is not None and getattr(cost, unit) > limit
            ]
            if over:
                _, have, limit = max(over)
                line = f"{_excess(unit, have, limit)}   {where(case)}"
                return Verdict(exercise.name, "wasteful", _all_right(exercise), (line,))
    return None


def _excess(unit: str, have: int, limit: int) -> str:
    ratio = f" ({have / limit:.1f}×)" if limit else ""
    numbers = {"have": f"{have:,}", "limit": f"{limit:,}", "ratio": ratio}
    return {
        "nbytes": lambda: say("check.over_bytes", **numbers),
        "messages": lambda: say("check.over_messages", **numbers),
        "rounds": lambda: say("check.over_rounds", **numbers),
        "peak": lambda: say("check.over_peak", **numbers),
    }[unit]()


def _all_right(exercise: Exercise) -> str:
    return say("check.all", cases=len(exercise.cases))


def _spent(spent: list[tuple[Case, list[Cost]]]) -> list[str]:
    """The largest case's bytes and messages, for somebody who got it right."""
    case, by_rank = max(spent, key=lambda pair: sum(c.nbytes or 0 for c in pair[1]))
    most = max(by_rank, key=lambda c: c.nbytes or 0)
    return [say("check.spent", nbytes=f"{most.nbytes:,}", messages=most.messages, where=where(case))]


def _deadlocked(exercise: Exercise, case: Case, stuck: labkit.RunTimeout) -> Verdict:
    lines = [f"rank {row.rank}  {_standing(row)}" for row in stuck.table]
    return Verdict(exercise.name, "deadlocked", where(case), (*lines, stuck.verdict))


def _standing(row: Row) -> str:
    """What a rank is in, as a line of the operation table, without times."""
    at = shown_place(row.place) or ""
    if row.operation is None:
        return f"{row.state}  {at}".rstrip()
    name, other = row.operation.signature.name, row.operation.peer
    peer = "" if other is None else say("check.peer_send" if name == "send" else "check.peer_recv", peer=other)
    return " ".join(part for part in (name, peer, f" {at}" if at else "") if part)


def _crashed(exercise: Exercise, case: Case, failure: labkit.RunFailed) -> Verdict:
    """The error as the run tells it, without the frames of labkit and torch."""
    told = [line for line in str(failure).splitlines() if "…" not in line and "checks" not in line]
    return Verdict(exercise.name, "crashed", where(case), tuple(told[:8]))
