"""A plan played on ranks with one port each: when every rank has finished, also when something is slow or late.

A port has an outgoing and an incoming side, each of which moves one message at a time. A message of b bytes takes
b/bandwidth on the sender's side, and as long on the receiver's, where it begins one latency later at the earliest, and
not before the receiver asks for it. A rank asks for all messages of a step and sends its own at once; it goes on when
those have come and these have left, which takes a receiver that has asked. Its port takes messages in the order in
which the rank waits for them, each in the first gap that is long enough. `labkit.pace` does the same to real messages
between real ranks.

Source: the one-port model of Hockney's α and β, as in Chan et al., "Collective communication: theory, practice, and
experience" (2007); with queues instead of the assumption that there are none.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from labkit.theory.communication.given import a_rank, number, whole
from labkit.theory.communication.planning import Message, Plan, plan


def paced_time(
    plan: Plan, latency: float, bandwidth: float, *, gamma: float = 0.0,
    slow_links: Mapping[tuple[int, int], float] | None = None, slow_ports: Mapping[int, float] | None = None,
    late: Mapping[int, float] | None = None, node_size: int | None = None,
    between: tuple[float, float] | None = None,
) -> list[float]:  # fmt: skip
    """When each rank has finished, in seconds; the largest is the operation's time.

    Args:
        plan: What `plan` made.
        latency: Seconds from a sender's port to a receiver's.
        bandwidth: Bytes per second of every port.
        gamma: Seconds per reduced byte, spent by the rank when the step's messages are there.
        slow_links: (from, to) → factor by which that direction is slower, 1 or more.
        slow_ports: Rank → factor by which its port is slower, both ways.
        late: Rank → seconds by which it begins later; it asks for no message before.
        node_size, between: Ranks of a node, and (latency, bandwidth) of messages that leave one.

    Returns:
        Seconds, one a rank.

    Raises:
        TypeError: Something is no number, rank or pair of ranks.
        ValueError: A number or a rank is out of range; only one of `node_size` and `between` is given.

    Assumptions: a message is as slow as the slowest of its link and its two ports; the network between ports is never
    full; sending costs the rank itself no time.

    >>> ring = plan("all_reduce", "ring", ranks=4, elements=4000)
    >>> [round(t, 6) for t in paced_time(ring, latency=0.001, bandwidth=1e6)]
    [0.012, 0.012, 0.012, 0.012]
    """
    network = _Network(latency, bandwidth, dict(slow_links or {}), dict(slow_ports or {}), node_size, between)
    network.check(plan.ranks)
    number("gamma", gamma, "seconds per byte")
    starts = [0.0] * plan.ranks
    for rank, seconds in (late or {}).items():
        a_rank("a rank in late", rank, plan.ranks)
        number(f"late[{rank}]", seconds, "seconds")
        starts[rank] = float(seconds)
    return _Play(plan, network, gamma, starts).finish()


@dataclass
class _Network:
    """How long messages take."""

    latency: float
    bandwidth: float
    slow_links: dict[tuple[int, int], float]
    slow_ports: dict[int, float]
    node_size: int | None
    between: tuple[float, float] | None

    def times(self, m: Message) -> tuple[float, float]:
        """Latency, and the time on a port."""
        latency, bandwidth = self.latency, self.bandwidth
        if self.node_size and self.between and m.source // self.node_size != m.target // self.node_size:
            latency, bandwidth = self.between
        ports = (self.slow_ports.get(rank, 1.0) for rank in (m.source, m.target))
        return latency, m.nbytes / bandwidth * max(self.slow_links.get((m.source, m.target), 1.0), *ports)

    def check(self, ranks: int) -> None:
        for link in (self.latency, self.bandwidth), self.between or (0.0, 1.0):
            number("a latency", link[0], "seconds")
            number("a bandwidth", link[1], "bytes per second", above=True)
        if (self.node_size is None) != (self.between is None):
            raise ValueError("node_size and between belong together: give both, or neither")
        if self.node_size is not None:
            whole("node_size", self.node_size, 1)
        for pair, factor in self.slow_links.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"slow_links has the key {pair!r}: expected two ranks, (from, to)")
            for rank in pair:
                a_rank(f"a rank of link {pair}", rank, ranks)
            number(f"slow_links[{pair}]", factor, "times as slow", 1.0)
        for rank, factor in self.slow_ports.items():
            a_rank("a rank in slow_ports", rank, ranks)
            number(f"slow_ports[{rank}]", factor, "times as slow", 1.0)


@dataclass
class _Round:
    """What a rank starts together: messages by their number in the plan."""

    phase: int
    segment: int
    sends: list[int] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)


class _Rank:
    """A rank's clock and the rounds that it still has to do."""

    def __init__(self, rounds: list[_Round], clock: float) -> None:
        self.rounds, self.clock, self.next = rounds, clock, 0
        #: Segment → what was started and not waited for.
        self.under_way: dict[int, _Round] = {}

    def awaited(self) -> list[_Round]:
        """What must be over before the next round: the one before it of its segment, or all at the end of a phase."""
        if self.next == len(self.rounds):
            return list(self.under_way.values())
        following = self.rounds[self.next]
        return [r for r in self.under_way.values() if r.phase != following.phase or r.segment == following.segment]


class _Side:
    """One side of a port. It is busy at times that do not overlap, in order."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, float]] = []

    def book(self, ready: float, length: float) -> float:
        """When a message that is ready then has passed: it takes the first gap that is long enough."""
        begin = ready
        for start, end in self.busy:
            if start >= begin + length * (1 - 1e-9):  # but for rounding
                break
            begin = max(begin, end)
        insort(self.busy, (begin, begin + length))
        return begin + length


class _Play:
    """The ranks and their ports. A rank goes on as soon as both sides of what it waits for are known."""

    def __init__(self, plan: Plan, network: _Network, gamma: float, starts: list[float]) -> None:
        self.messages, self.network, self.gamma = plan.messages, network, gamma
        self.ranks = [_Rank(*of_rank) for of_rank in zip(_rounds(plan), starts, strict=True)]
        self.outgoing, self.incoming = [0.0] * plan.ranks, [_Side() for _ in self.ranks]
        self.sent: dict[int, float] = {}  # when it begins to leave
        self.asked: dict[int, float] = {}  # since when the target waits for it

    def finish(self) -> list[float]:
        able = list(range(len(self.ranks)))
        while able:
            able += self.go_on(self.ranks[able.pop()])
        return [rank.clock for rank in self.ranks]

    def go_on(self, rank: _Rank) -> list[int]:
        """Up to a message whose other side has not come to it yet; the ranks that may go on because of this one."""
        able: list[int] = []
        while rank.next <= len(rank.rounds):
            awaited = rank.awaited()
            if not all(n in self.sent and n in self.asked for r in awaited for n in r.sends + r.receives):
                break
            for r in awaited:
                self.wait(rank, r)
            if rank.next < len(rank.rounds):
                able += self.start(rank, rank.rounds[rank.next])
            rank.next += 1
        return able

    def start(self, rank: _Rank, r: _Round) -> list[int]:
        for n in r.sends:
            m = self.messages[n]
            self.sent[n] = max(rank.clock, self.outgoing[m.source])
            self.outgoing[m.source] = self.sent[n] + self.network.times(m)[1]
        self.asked.update(dict.fromkeys(r.receives, rank.clock))
        rank.under_way[r.segment] = r
        return [self.messages[n].target for n in r.sends] + [self.messages[n].source for n in r.receives]

    def wait(self, rank: _Rank, r: _Round) -> None:
        ends = [max(self.sent[n], self.asked[n]) + self.network.times(self.messages[n])[1] for n in r.sends]
        for n in r.receives:
            m = self.messages[n]
            latency, duration = self.network.times(m)
            ends.append(self.incoming[m.target].book(max(self.sent[n] + latency, self.asked[n]), duration))
        reduced = sum(self.messages[n].nbytes for n in r.receives if self.messages[n].reduces)
        rank.clock = max(rank.clock, *ends) + self.gamma * reduced
        del rank.under_way[r.segment]


def _rounds(plan: Plan) -> list[list[_Round]]:
    """Each rank's rounds, in order: one a turn and segment."""
    found: list[list[_Round]] = [[] for _ in range(plan.ranks)]
    order = sorted(range(len(plan.messages)), key=lambda n: _place(plan.messages[n]))
    for (phase, _, segment), together in groupby(order, key=lambda n: _place(plan.messages[n])):
        mine: dict[int, _Round] = {}
        for n in together:
            m = plan.messages[n]
            mine.setdefault(m.source, _Round(phase, segment)).sends.append(n)
            mine.setdefault(m.target, _Round(phase, segment)).receives.append(n)
        for rank, r in mine.items():
            found[rank].append(r)
    return found


def _place(m: Message) -> tuple[int, int, int]:
    return m.phase, m.turn, m.segment


@dataclass(frozen=True, slots=True)
class Straggler:
    """What a slow or late part does to an operation, in seconds."""

    time: float
    undisturbed: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes."""
        return self.time / self.undisturbed

    @property
    def delay(self) -> float:
        """How much longer it takes, in seconds."""
        return self.time - self.undisturbed


def straggler(
    algorithm: str, ranks: int, nbytes: int, latency: float, bandwidth: float, *, operation: str = "all_reduce",
    segments: int = 1, node_size: int | None = None, **what: Any,
) -> Straggler:  # fmt: skip
    """An operation with something slow or late, beside the same without it.

    Four ranks and a large tensor: a link at a fifth of its speed makes a ring five times as slow, and a tree not at
    all if it is none of its edges; a rank whose port is at a fifth makes both five times as slow; for a late rank both
    wait as long as it is late, less what latency they hide. A tree can miss a link, never a rank.

    Args:
        nbytes: A whole number of bytes, as `plan` counts `elements`.
        what: `slow_links`, `slow_ports`, `late`; also `gamma` and `between`, which stay in both.

    Raises:
        TypeError, ValueError: As `plan` and `paced_time`; a single rank, which has nothing to wait for.

    >>> for algorithm in ("ring", "tree"):
    ...     print(algorithm, [round(straggler(algorithm, 4, 8_000_000, 0, 1e9, **what).ratio, 6)
    ...                       for what in ({"slow_links": {(1, 2): 5}}, {"slow_ports": {2: 5}})])
    ring [5.0, 5.0]
    tree [1.0, 5.0]
    """
    whole("nbytes", nbytes, 1)
    whole("ranks", ranks, 2)
    hierarchical = node_size if algorithm == "hierarchical" else None
    messages = plan(operation, algorithm, ranks, nbytes, segments=segments, node_size=hierarchical)
    if "between" in what:
        what["node_size"] = node_size
    calm = {name: value for name, value in what.items() if name not in ("slow_links", "slow_ports", "late")}
    with_it, without = (max(paced_time(messages, latency, bandwidth, **given)) for given in (what, calm))
    return Straggler(with_it, without)
