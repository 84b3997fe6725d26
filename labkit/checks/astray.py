"""Where a wrong function first went astray, told from its messages and from what its tensor held after each."""

from __future__ import annotations

from typing import Any

import labkit
from labkit.checks.exercise import Case, Exercise
from labkit.checks.trial import attempt
from labkit.show import ring
from labkit.show.steps import Steps, counts, read
from labkit.show.words import count, say
from labkit.trace import Trace


def story(exercise: Exercise, case: Case, run: labkit.Run) -> tuple[tuple[str, ...], Any]:
    """Lines, and the learner's own run as a picture where it can be drawn."""
    expected, values = exercise.expected(case), [t.value for t in run.values]
    bad = exercise.compare(case, values, expected)
    rank = bad[0]
    told = exercise.tells(case, values, bad) if exercise.tells else _result(case, rank, values[rank], expected[rank])
    lines = [*(way(run.trace) if exercise.ring else []), *run.leftovers[:2], *told.splitlines()]
    early = any(e.kind == "recv" and e.end is None for e in run.trace.events)  # then what was held when is chance
    if early or not exercise.ring or case.kind != "parts":
        return tuple(lines), None
    if _is_untouched(run, rank):
        lines.insert(0, say("check.returned" if run.values[rank].returned else "check.untouched", rank=rank))
    try:
        mine = read(run.trace, "ring")
        picture = ring(run.trace)
    except ValueError:  # nothing was sent, or something else than the tensor was reduced
        return tuple(lines), None
    try:
        done = labkit.run(attempt, exercise, exercise.solution, case, ranks=case.ranks, device="cpu", timeout=10)
    except labkit.RunFailed:  # what the function did to its process outlives it
        return tuple(lines), picture
    theirs = read(done.trace, "ring")
    facts = [*_first_difference(mine, theirs), *_other_chunk(mine, theirs, rank)]
    return (*facts, *lines), picture


def _is_untouched(run: labkit.Run, rank: int) -> bool:
    """Whether messages came to a rank, and its tensor is as it was at first."""
    mine = [e for e in run.trace.of(rank) if e.after is not None]
    return any(e.kind == "recv" for e in mine) and all(e.after == mine[0].after for e in mine)


def way(trace: Trace) -> list[str]:
    """Whether messages go another way than round the ring. Of two ranks there is only one way."""
    pairs = {(e.rank, e.peer) for e in trace.events if e.kind == "send" and e.peer is not None}
    off = sorted((rank, peer) for rank, peer in pairs if (peer - rank) % trace.ranks != 1)
    if trace.ranks < 3 or not off:
        return []
    if all((rank - peer) % trace.ranks == 1 for rank, peer in pairs):
        return [say("check.turned")]
    return [say("check.way", rank=off[0][0], peer=off[0][1])]


def _other_chunk(mine: Steps, theirs: Steps, rank: int) -> list[str]:
    """Whether a rank ends with another chunk whole than the one that it was asked for."""
    have, want = (
        {c for c in range(s.chunks) if s.done(s.total, rank, c)} for s in (mine, theirs)
    )  # fmt: skip
    if have - want and want - have:
        return [say("check.other_chunk", rank=rank, have=min(have - want), want=min(want - have))]
    return []


def _first_difference(mine: Steps, theirs: Steps) -> list[str]:
    """The first step after which a rank holds something else than it should, if the two go by the same steps."""
    for step in range(1, min(mine.total, theirs.total) + 1):
        for rank in range(mine.ranks):
            for chunk in range(mine.chunks):
                have, want = mine.states[step][rank][chunk], theirs.states[step][rank][chunk]
                if have != want:
                    told = {"want": _set(want, mine.ranks), "have": _set(have, mine.ranks)}
                    return [say("check.astray", step=step, rank=rank, chunk=chunk, **told), *_twice(have, mine.ranks)]
    if mine.total != theirs.total:
        return [count("check.steps", mine.total, want=theirs.total)]
    return []


def _is_sum(value: int, ranks: int) -> bool:
    """Whether a value can be read as whose parts are in it: of each none, one or two. A mean, or memory that nobody
    has written yet, cannot."""
    return 0 <= value < 16**ranks and max(counts(value, ranks)) <= 2


def _twice(value: int, ranks: int) -> list[str]:
    if not _is_sum(value, ranks):
        return []
    return [say("check.twice", rank=rank) for rank, n in enumerate(counts(value, ranks)) if n > 1][:1]


def _set(value: int, ranks: int) -> str:
    """Whose parts are in a value, such as {0,2}."""
    if not _is_sum(value, ranks):
        return say("check.no_sum", value=value)
    return "{" + ",".join(str(rank) for rank, n in enumerate(counts(value, ranks)) for _ in range(n)) + "}"


def _result(case: Case, rank: int, have: Any, want: Any) -> str:
    """The first number of the result that is wrong; as parts, where the numbers tell them."""
    if not isinstance(have, list) or len(have) != len(want):
        return say("check.result", rank=rank, want=_short(want), have=_short(have))
    at = next(n for n, (h, w) in enumerate(zip(have, want, strict=True)) if h != w)
    if case.kind == "parts" and all(isinstance(x, int) for x in (have[at], want[at])):
        told = {"want": _set(want[at], case.ranks), "have": _set(have[at], case.ranks)}
    else:
        told = {"want": want[at], "have": have[at]}
    return say("check.element", rank=rank, element=at, **told)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
