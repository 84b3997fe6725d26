"""What the steps of a collective show, in a sentence, and the step at which it is seen best."""

from __future__ import annotations

from labkit.show.finding import members
from labkit.show.steps import Steps
from labkit.show.svg import size_of
from labkit.show.words import count, say


def ring_finding(s: Steps) -> tuple[str, int]:
    """The title of a ring, and the step to begin with."""
    if not s.moves:
        return say("steps.nothing"), 0
    if wrong := _wrong(s):
        return wrong
    if all(s.done(s.total, r, c) for r in range(s.ranks) for c in range(s.chunks)) or _scattered(s, s.total):
        return _right(s)
    rank, chunk = next((r, c) for r in range(s.ranks) for c in range(s.chunks) if not s.done(s.total, r, c))
    return say("steps.lacks", steps=s.total, rank=rank, chunk=chunk), s.total


def tree_finding(s: Steps) -> tuple[str, int]:
    """The title of a tree or any other pattern, and the step to begin with."""
    if not s.moves:
        return say("steps.nothing"), 0
    if wrong := _wrong(s):
        return wrong
    numbers = [len(s.idle(k)) for k in range(1, s.total + 1)]
    if any(numbers):
        least = min(n for n in numbers if n)
        part = _share(sum(n > 0 for n in numbers), s.total)
        return _idle(least, s.ranks, part, {*numbers} <= {0, least}), numbers.index(max(numbers)) + 1
    (first, top), (second, _) = sorted(((n, -r) for r, n in enumerate(s.sent(s.total))), reverse=True)[:2]
    if first > second:
        times = f"{first / second:.3g}" if second else None
        key = "steps.most" if times else "steps.alone"
        step = max(range(1, s.total + 1), key=lambda k: sum(m.nbytes for m in s.at(k) if m.src == -top))
        return say(key, rank=-top, size=size_of(first), **({"times": times} if times else {})), step
    return _right(s)


def _idle(least: int, ranks: int, part: str, exactly: bool) -> str:
    """How many ranks are idle, in part of the steps: just so many, or at the least."""
    if exactly:
        return count("steps.idle", least, ranks=ranks, part=part)
    if 2 * least == ranks:
        return say("steps.idle_half", part=part)
    return count("steps.idle_least", least, ranks=ranks, part=part)


def _share(part: int, all_: int) -> str:
    if part == all_:
        return say("steps.share_all")
    return say("steps.share_half") if 2 * part == all_ else say("steps.share", part=part, all=all_)


def _wrong(s: Steps) -> tuple[str, int] | None:
    """Parts that were added twice, and chunks that nobody ever has."""
    for step in range(s.total + 1):
        for chunk in range(s.chunks):
            for rank in range(s.ranks):
                for part, n in enumerate(s.parts(step, rank, chunk)):
                    if n > 1:
                        if s.whole:
                            return say("steps.twice_whole", step=step, part=part, rank=rank), step
                        return say("steps.twice", step=step, part=part, chunk=chunk, rank=rank), step
    if s.whole and not any(s.done(s.total, r, 0) for r in range(s.ranks)):
        return say("steps.never_whole"), s.total
    if never := [c for c in range(s.chunks) if not any(s.done(s.total, r, c) for r in range(s.ranks))]:
        key = "steps.never" if len(never) == 1 else "steps.never_some"
        return say(key, chunks=members(never)), s.total
    return None


def _right(s: Steps) -> tuple[str, int]:
    everyone = all({m.src for m in s.at(k)} == set(range(s.ranks)) for k in range(1, s.total + 1))
    lead = say("steps.everyone") if everyone else say("steps.some")
    if everyone and s.chunks > 1 and all(len(m.chunks) == s.chunks for m in s.moves):
        lead = say("steps.whole", chunks=s.chunks)
    turn = next((k for k in range(1, s.total + 1) if _one_each(s, k)), None)
    if turn is not None and not _one_each(s, 0):
        return say("steps.one_each", lead=lead, step=turn, steps=s.total), turn
    turn = next((k for k in range(1, s.total + 1) if _scattered(s, k)), None)
    if turn is not None and not _scattered(s, 0):
        if s.whole:
            return say("steps.scattered_whole", lead=lead, step=turn, steps=s.total), turn
        return say("steps.scattered", lead=lead, step=turn, steps=s.total), turn
    if s.whole:
        return say("steps.all_done_whole", lead=lead, steps=s.total), s.total
    return say("steps.all_done", lead=lead, steps=s.total, chunks=s.chunks), s.total


def _one_each(s: Steps, step: int) -> bool:
    """Whether each rank has one finished chunk."""
    return all(sum(s.done(step, r, c) for c in range(s.chunks)) == 1 for r in range(s.ranks)) and s.chunks > 1


def _scattered(s: Steps, step: int) -> bool:
    """Whether each chunk is finished on one rank."""
    return all(sum(s.done(step, r, c) for r in range(s.ranks)) == 1 for c in range(s.chunks)) and s.ranks > 1
