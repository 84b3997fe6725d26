"""Collectives by hand, as traces: whoever sends what to whom, replayed on lists of numbers."""

from __future__ import annotations

from collections.abc import Callable

from labkit.trace import Event, Trace

#: (sender, receiver, chunks) and what the receiver does with them: ``"add"`` or ``"copy"``.
Plan = list[list[tuple[int, int, list[int], str]]]


def replay(ranks: int, plan: Plan, nbytes: int = 256, start: Callable[[int, int], int] = lambda r, c: 16**r, *,
           chunks: int | None = None, label: bool = True, span: str = "", segments: int = 1) -> Trace:  # fmt: skip
    """What a recorder would note: every step's sends and receives, and the first element of each chunk after them."""
    width = ranks if chunks is None else chunks
    held = [[start(r, c) for c in range(width)] for r in range(ranks)]
    events: list[Event] = []
    index = [0] * ranks

    def note(kind: str, name: str, rank: int, **more) -> None:
        events.append(Event(kind, name, rank, index[rank], index[rank] + 0.5, index=index[rank],
                            after=list(held[rank]), **more))  # fmt: skip
        index[rank] += 1

    for r in range(ranks):
        note("state", "watch", r)
        if span:
            note("span", span, r)
    for step, sends in enumerate(plan, 1):
        before = [list(row) for row in held]
        seen: dict[int, list] = {r: [] for r in range(ranks)}
        for src, dst, which, how in sends:
            for c in which:
                held[dst][c] = before[src][c] if how == "copy" else held[dst][c] + before[src][c]
            seen[src].append(("send", dst, which))
            seen[dst].append(("recv", src, which))
        for r in range(ranks):
            for kind, peer, which in seen[r]:
                for _ in range(segments):
                    labels = {"step": step} if label else {}
                    if label and len(which) == 1:
                        labels["chunk"] = which[0]
                    note(kind, kind, r, peer=peer, nbytes=nbytes * len(which) // segments, labels=labels)
    return Trace(events, ranks)


def reduce_scatter(p: int) -> Plan:
    return [[(r, (r + 1) % p, [(r - s) % p], "add") for r in range(p)] for s in range(1, p)]


def all_gather(p: int) -> Plan:
    return [[(r, (r + 1) % p, [(r - s + 1) % p], "copy") for r in range(p)] for s in range(1, p)]


def ring(p: int) -> Plan:
    return reduce_scatter(p) + all_gather(p)


def broadcast(p: int, root: int = 0) -> Plan:
    plan: Plan = []
    depth = (p - 1).bit_length()
    for k in range(1, depth + 1):
        d = 2 ** (depth - k)
        plan.append([((v + root) % p, (v + d + root) % p, list(range(p)), "copy")
                     for v in range(0, p, 2 * d) if v + d < p])  # fmt: skip
    return plan


def reduce(p: int) -> Plan:
    return [[(b, a, c, "add") for a, b, c, _ in step] for step in reversed(broadcast(p))]


def tree(p: int) -> Plan:
    return reduce(p) + broadcast(p)


def central(p: int) -> Plan:
    whole = list(range(p))
    return [[(r, 0, whole, "add") for r in range(1, p)], [(0, r, whole, "copy") for r in range(1, p)]]


def mesh(p: int) -> Plan:
    pairs = [(a, b) for a in range(p) for b in range(p) if a != b]
    return [[(a, b, [b], "add") for a, b in pairs], [(a, b, [a], "copy") for a, b in pairs]]


def halving_doubling(p: int) -> Plan:
    plan: Plan = []
    d = p // 2
    while d:
        plan.append([(r, r ^ d, [c for c in range(p) if c // d == (r ^ d) // d], "add") for r in range(p)])
        d //= 2
    d = 1
    while d < p:
        plan.append([(r, r ^ d, [c for c in range(p) if c // d == r // d], "copy") for r in range(p)])
        d *= 2
    return plan


# Rings that learners write


def added_twice(p: int = 4) -> Plan:
    """The all-gather adds instead of putting in place."""
    return reduce_scatter(p) + [[(a, b, c, "add") for a, b, c, _ in step] for step in all_gather(p)]


def wrong_chunk(p: int = 4) -> Plan:
    """Every rank sends the chunk of its own number at every step."""
    return [[(r, (r + 1) % p, [r], "add") for r in range(p)] for _ in range(1, p)] + all_gather(p)


def whole_tensors(p: int = 4) -> Plan:
    """Everything goes round, and is added."""
    return [[(r, (r + 1) % p, list(range(p)), "add") for r in range(p)] for _ in range(1, p)]


def too_short(p: int = 4) -> Plan:
    """One step of the reduce-scatter is missing."""
    return reduce_scatter(p)[:-1] + all_gather(p)
