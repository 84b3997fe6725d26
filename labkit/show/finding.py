"""What a trace shows, in a sentence: the title of its picture. What went wrong comes first."""

from __future__ import annotations

from collections import Counter

from labkit.show.order import Item
from labkit.show.svg import size_of
from labkit.show.words import count, say


def finding(items: list[Item], ranks: int) -> str:
    """The plainest true thing that these items show."""
    return _wrong(items, ranks) or _right(items, ranks)


def _wrong(items: list[Item], ranks: int) -> str | None:
    lonely = [i for i in items if i.kind == "message" and len(i.events) == 1]
    waits = {i.recv.rank: i.recv.peer for i in lonely if i.recv}
    if circle := _circle(waits):
        told = ", ".join(say("finding.wait", rank=a, peer=waits[a]) for a in circle)
        return say("finding.circle", waits=told)
    if receives := [i for i in lonely if i.recv]:
        return count("finding.waiting", len(receives))
    open_calls = [i for i in items if i.kind == "collective" and i.unfinished]
    if len({i.events[0].group for i in open_calls}) > 1:
        told = "; ".join(_standing(i) for i in open_calls)
        return say("finding.split", places=told)
    for item in items:
        if item.kind == "collective" and item.unfinished:
            name, absent = item.events[0].name, set(range(ranks)) - set(item.ranks)
            if item.events[0].group == "world" and absent:
                return say("finding.missing", name=name, ranks=members(absent))
            return say("finding.unfinished", name=name, ranks=members(e.rank for e in item.events if e.end is None))
    return count("finding.unreceived", len(lonely)) if lonely else None


def _standing(call: Item) -> str:
    """Which ranks are in a collective, and of which group."""
    e = call.events[0]
    return say(
        "finding.standing", ranks=members(x.rank for x in call.events if x.end is None), name=e.name, group=e.group
    )


def _right(items: list[Item], ranks: int) -> str:
    messages = [i for i in items if i.kind == "message"]
    calls = [i for i in items if i.kind == "collective"]
    total = size_of(sum(i.events[0].nbytes for i in messages))
    if messages and calls:
        return say("finding.both", messages=count("trace.messages", len(messages)), size=total,
                   collectives=count("trace.collectives", len(calls)))  # fmt: skip
    if messages:
        return _senders(messages, ranks, total)
    if calls:
        return _calls(calls, ranks)
    return say("finding.nothing") if items else say("finding.empty")


def _senders(messages: list[Item], ranks: int, total: str) -> str:
    number = Counter(i.events[0].rank for i in messages)
    nbytes: Counter[int] = Counter()
    for i in messages:
        nbytes[i.events[0].rank] += i.events[0].nbytes
    told = count("trace.messages", len(messages))
    if len(number) == 1:
        return say("finding.single", rank=next(iter(number)), messages=told, size=total)
    if len(number) == ranks and len({(number[r], nbytes[r]) for r in number}) == 1:
        steps = {(i.events[0].peer - i.events[0].rank) % ranks for i in messages if i.events[0].peer is not None}
        if steps == {1} and ranks > 2:
            size = size_of(nbytes[0])
            if number[0] == 1:
                return say("finding.ring", size=size)
            return say("finding.ring_often", messages=count("trace.messages", number[0]), size=size)
        return say("finding.even", messages=count("trace.messages", number[0]), size=size_of(nbytes[0]))
    (top, most), (_, second) = nbytes.most_common(2)
    if most > second:
        return say("finding.most", rank=top, part=f"{number[top]:,}", messages=told, size=size_of(most), all=total)
    return say("finding.spread", messages=told, all=total, senders=len(number), ranks=ranks)


def _calls(calls: list[Item], ranks: int) -> str:
    if len(calls) > 1:
        names = Counter(i.events[0].name for i in calls)
        told = ", ".join(say("finding.times", n=n, name=name) for name, n in names.items())
        return say("finding.collectives", collectives=count("trace.collectives", len(calls)), names=told)
    e, who = calls[0].events[0], calls[0].ranks
    if len(who) == ranks:
        return say("finding.everyone", name=e.name, size=size_of(e.nbytes), ranks=ranks)
    return say("finding.some", name=e.name, size=size_of(e.nbytes), members=members(who))


def members(ranks) -> str:
    """Ranks as a list.

    >>> members({2, 0})
    '0, 2'
    """
    return ", ".join(map(str, sorted(ranks)))


def _circle(waits: dict[int, int | None]) -> list[int]:
    """Ranks that wait for each other in a circle, from the lowest; empty when there is none.

    >>> _circle({0: 1, 1: 2, 2: 1})
    [1, 2]
    """
    for start in sorted(waits):
        path, at = [start], waits[start]
        while at in waits and at not in path:
            path.append(at)
            at = waits[at]
        if at == start:
            return path
    return []
