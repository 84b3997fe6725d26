"""The logical order of a trace: which step each event belongs to, the same in every run.

A step is a place in the order of cause and effect, not a time: an event comes after what its rank did before,
a receive after its send (Lamport, 1978), and a collective is at one step on all ranks of its group.

>>> from labkit.trace import Event, Trace
>>> trace = Trace([Event("recv", "recv", 1, 0.0, 0.2, nbytes=8, peer=0),
...                Event("send", "send", 0, 0.0, 0.1, nbytes=8, peer=1)], ranks=2)
>>> [(item.kind, item.first, item.last) for item in order(trace)]
[('message', 1, 2)]
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from labkit.trace import Event, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One thing to draw.

    Attributes:
        kind: ``"message"``, ``"collective"``, ``"box"`` (computation, a named step) or ``"span"`` (what holds others).
        events: Its events; of a message the send, the receive, or both.
        first, last: The steps at which it begins and ends.
        names: The spans around it, outermost first.
    """

    kind: str
    events: tuple[Event, ...]
    first: int
    last: int
    names: tuple[str, ...] = ()

    @property
    def send(self) -> Event | None:
        return next((e for e in self.events if e.kind == "send"), None)

    @property
    def recv(self) -> Event | None:
        return next((e for e in self.events if e.kind == "recv"), None)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({e.rank for e in self.events}))

    @property
    def unfinished(self) -> bool:
        """Some rank was never seen to get out of it, or a message lacks one of its ends."""
        alone = self.kind == "message" and len(self.events) == 1
        return alone or any(e.end is None for e in self.events)


def order(trace: Trace) -> list[Item]:
    """The things to draw, by the step at which they begin (ties: by rank)."""
    spans = _Spans(trace)
    walk = _Walk(trace, spans.leaves)
    step = walk.run()
    items = [
        Item("message", tuple(e for e in (m.send, m.recv) if e), *_ends(step, m.send, m.recv),
             spans.names(m.send or m.recv))
        for m in walk.messages
    ]  # fmt: skip
    for events in walk.collectives:
        at = step[id(events[0])]
        items.append(Item("collective", tuple(events), at, at, spans.names(events[0])))
    for e in (e for row in spans.leaves for e in row if e.kind not in ("send", "recv", "collective")):
        items.append(Item("box", (e,), step[id(e)], step[id(e)], spans.names(e)))
    items += spans.items(step)
    return sorted(items, key=lambda i: (i.first, i.events[0].rank, i.last))


def _ends(step: dict[int, int], send: Event | None, recv: Event | None) -> tuple[int, int]:
    at = [step[id(e)] for e in (send, recv) if e]
    return at[0], at[-1]


class _Spans:
    """Who is inside whom. A span, or anything else with children, holds events and takes no step of its own."""

    def __init__(self, trace: Trace) -> None:
        self.rows = [[e for e in trace.of(rank) if e.kind != "state"] for rank in range(trace.ranks)]
        self.by_index = [{e.index: e for e in row} for row in self.rows]
        holders = {id(self.parent(e)) for row in self.rows for e in row}
        self.leaves = [[e for e in row if id(e) not in holders] for row in self.rows]

    def parent(self, e: Event) -> Event | None:
        return None if e.parent is None or e.parent == e.index else self.by_index[e.rank].get(e.parent)

    def around(self, e: Event | None) -> list[Event]:
        """The spans around an event, outermost first."""
        chain: list[Event] = []
        span = e and self.parent(e)
        while span is not None and all(span is not known for known in chain):
            chain.append(span)
            span = self.parent(span)
        return chain[::-1]

    def names(self, e: Event | None) -> tuple[str, ...]:
        return tuple(s.name for s in self.around(e))

    def items(self, step: dict[int, int]) -> list[Item]:
        """The outermost spans; inner ones are named in the twin."""
        reach: dict[int, list[int]] = defaultdict(list)
        outer: dict[int, Event] = {}
        for e in (e for row in self.leaves for e in row):
            for span in self.around(e)[:1]:
                outer[id(span)] = span
                reach[id(span)].append(step[id(e)])
        return [Item("span", (span,), min(reach[key]), max(reach[key])) for key, span in outer.items()]


@dataclass(slots=True)
class _Rank:
    """How far a rank has come."""

    queue: list[Event]
    head: int = 0
    clock: int = 0
    posted: list[Event] = field(default_factory=list)


class _Walk:
    """Replays the ranks, one event a rank a round, without looking at any time."""

    def __init__(self, trace: Trace, leaves: list[list[Event]]) -> None:
        self.step: dict[int, int] = {}
        self.ranks = [_Rank(list(row)) for row in leaves]
        leaf = {id(e) for row in leaves for e in row}
        self.messages = [m for m in trace.messages() if id(m.send or m.recv) in leaf]
        self.source = {id(m.recv): m.send for m in self.messages if m.send and m.recv}
        self.collectives = self._collectives(leaves)
        self.company = {id(e): events for events in self.collectives for e in events}

    @staticmethod
    def _collectives(leaves: list[list[Event]]) -> list[list[Event]]:
        """The k-th collective of a group on each rank is one; ranks that disagree on its name stand apart."""
        together: dict[tuple, list[Event]] = defaultdict(list)
        for row in leaves:
            seen: dict[str, int] = defaultdict(int)
            for e in row:
                if e.kind == "collective":
                    together[e.group, seen[e.group], e.name].append(e)
                    seen[e.group] += 1
        return list(together.values())

    def run(self) -> dict[int, int]:
        while any(r.head < len(r.queue) or r.posted for r in self.ranks):
            ready = [self._ready(r) for r in self.ranks]  # looked at first, placed then: no rank gains by its number
            for events in ready:
                if events and id(events[0]) not in self.step:
                    self._place(events)
            if not any(ready):
                self._unlock()
        return self.step

    def _ready(self, r: _Rank) -> list[Event]:
        """What this rank can do next: a posted receive whose message is there, or the event in front."""
        for e in r.posted:
            if id(self.source[id(e)]) in self.step:
                r.posted.remove(e)
                return [e]
        head = self._next(r)
        if head is None:
            return []
        if head.kind == "collective":
            company = self.company[id(head)]
            return company if all(self._next(self.ranks[c.rank]) is c for c in company) else []
        sent = self.source.get(id(head))
        return [head] if sent is None or id(sent) in self.step else []

    def _next(self, r: _Rank) -> Event | None:
        while r.head < len(r.queue) and id(r.queue[r.head]) in self.step:
            r.head += 1
        return r.queue[r.head] if r.head < len(r.queue) else None

    def _place(self, events: list[Event]) -> None:
        """At the first step that is after everything these depend on."""
        after = [self.ranks[e.rank].clock for e in events]
        after += [self.step[id(s)] for e in events if (s := self.source.get(id(e)))]
        for e in events:
            self.step[id(e)] = self.ranks[e.rank].clock = max(after) + 1

    def _unlock(self) -> None:
        """Nobody can go on: the receives in front were only posted (irecv), or collectives cross each other."""
        heads = [(r, e) for r in self.ranks if (e := self._next(r))]
        receives = [(r, e) for r, e in heads if e.kind == "recv"]
        for r, e in receives:
            r.posted.append(e)
            r.head += 1
        if not receives and heads:
            self._place(self.company[id(heads[0][1])])
