"""Hand-made traces for the tests of pictures: small, and each with one thing to see."""

from __future__ import annotations

from labkit.trace import Event, Trace


def event(kind: str, name: str, rank: int, index: int, peer: int | None = None, nbytes: int = 8, **more) -> Event:
    """An event at a time that depends on its place; ``done=False`` leaves it unfinished."""
    start = index * 0.001 + rank * 0.0002
    end = start + 0.0008 if more.pop("done", True) else None
    return Event(kind, name, rank, start, end, nbytes=nbytes, peer=peer, lane="comm", index=index, **more)


def send(rank: int, index: int, peer: int, nbytes: int = 8, **more) -> Event:
    return event("send", "send", rank, index, peer, nbytes, **more)


def recv(rank: int, index: int, peer: int, nbytes: int = 8, **more) -> Event:
    return event("recv", "recv", rank, index, peer, nbytes, **more)


def ring(ranks: int = 4, rounds: int = 1, nbytes: int = 8) -> Trace:
    return Trace([
        one for r in range(ranks) for k in range(rounds) for one in (
            send(r, 2 * k, (r + 1) % ranks, nbytes, line="line 4", labels={"chunk": k}),
            recv(r, 2 * k + 1, (r - 1) % ranks, nbytes, line="line 5", labels={"chunk": k}),
        )
    ], ranks)  # fmt: skip


def posted_ring(ranks: int = 4) -> Trace:
    """Every rank posts its receive first (irecv), then sends: no deadlock."""
    return Trace([e for r in range(ranks) for e in (recv(r, 0, (r - 1) % ranks), send(r, 1, (r + 1) % ranks))], ranks)


def collective(rank: int, index: int, nbytes: int = 40, **more) -> Event:
    return event("collective", more.pop("name", "all_reduce"), rank, index, nbytes=nbytes, **more)


def all_reduce(ranks: int = 4) -> Trace:
    return Trace([collective(r, 0, op="sum", line="line 3") for r in range(ranks)], ranks)


def subgroups() -> Trace:
    """Forward, an all-reduce in each of two crossing groups, backward, an all-gather of the world."""
    events = []
    for r in range(4):
        events += [
            event("compute", "matmul", r, 0, nbytes=0, phase="forward"),
            collective(r, 1, group="{0,2}" if r % 2 == 0 else "{1,3}"),
            event("compute", "matmul", r, 2, nbytes=0, phase="backward"),
            collective(r, 3, 2 * 2**20, name="all_gather"),
        ]
    return Trace(events, 4)


def deadlock() -> Trace:
    return Trace([recv(0, 0, 1, done=False, line="line 3"), recv(1, 0, 0, done=False, line="line 3")], 2)


def unreceived() -> Trace:
    return Trace([send(0, 0, 1, 1536), send(0, 1, 1, 1536), recv(1, 0, 0, 1536)], 2)


def missing() -> Trace:
    """Rank 3 never calls the all-reduce."""
    return Trace([collective(r, 0, done=False) for r in range(3)], 4)


def spans() -> Trace:
    """A ring inside a named step."""
    events = []
    for r in range(4):
        events.append(event("span", "reduce_scatter", r, 0, nbytes=0))
        for k in range(2):
            events += [send(r, 2 * k + 1, (r + 1) % 4, 1536, parent=0), recv(r, 2 * k + 2, (r - 1) % 4, 1536, parent=0)]
    return Trace(events, 4)


def hostile() -> Trace:
    """Names and labels that would run if they were not escaped."""
    evil = '<script>alert("x")</script>'
    return Trace([
        event("compute", evil, 0, 0, nbytes=0, labels={evil: evil}, line=evil),
        collective(0, 1, name=evil, group=evil), send(0, 2, 0), event("span", evil, 0, 3, nbytes=0),
        send(0, 4, 0, parent=3, labels={"a": "\x00&"}),
    ], 1)  # fmt: skip


def empty() -> Trace:
    return Trace([], 4)


def single() -> Trace:
    return Trace([event("compute", "matmul", 0, 0, nbytes=0)], 1)


EVERY = {
    "ring": ring, "ring_rounds": lambda: ring(4, 3, 2**20), "posted_ring": posted_ring, "all_reduce": all_reduce,
    "subgroups": subgroups, "deadlock": deadlock, "unreceived": unreceived, "missing": missing, "spans": spans,
    "hostile": hostile, "empty": empty, "single": single, "ring_16": lambda: ring(16, 2),
    "long": lambda: ring(4, 40),
}  # fmt: skip
