"""Who waits for whom: read a hung run from its operation table."""

from __future__ import annotations

import re

from labkit.trace import Event
from labkit.world.failure import Row, RunTimeout
from labkit.world.place import Place, shown_place, source
from labkit.world.table import DONE, FAILED, KEEP, STARTED, WAITING, Operation
from labkit.world.wording import named_ranks


def rows(
    operations: list[list[Operation]], returned: set[int], failed: set[int], places: dict[int, Place | None], at: float
) -> list[Row]:
    """What every rank is in, from the operation table and from where its main thread stands."""
    world = len(operations)
    table = []
    for rank, mine in enumerate(operations):
        waiting = next((o for o in reversed(mine) if o.state == WAITING), None)
        if rank in returned or rank in failed:
            table.append(Row(rank, "returned" if rank in returned else "failed"))
        elif waiting is None:
            table.append(Row(rank, "running", place=places.get(rank)))
        else:
            members = list(range(world)) if waiting.members is None else waiting.members
            if waiting.is_collective:
                late = [m for m in members if m != rank and _is_late(operations[m], waiting)]
            elif waiting.peer is None:
                late = [m for m in members if m != rank]
            else:
                late = [] if _is_under_way(operations[waiting.peer], waiting) else [waiting.peer]
            table.append(Row(rank, "waiting", waiting, late, waiting.place, at - waiting.since))
    return table


def _is_late(theirs: list[Operation], meeting: Operation) -> bool:
    """Whether a member has not come to a collective. One whose last collectives are all of other groups, with as many
    as are kept, may have been there long ago."""
    collectives = [o for o in theirs if o.is_collective]
    of_group = [o.sequence for o in collectives if o.group == meeting.group]
    if not of_group:
        return len(collectives) < KEEP
    return max(of_group) < meeting.sequence


def _is_under_way(theirs: list[Operation], mine: Operation) -> bool:
    """Whether the other end of a message has begun as well: then nobody waits for the other to come."""
    way = "send" if mine.signature.name == "recv" else "recv"
    return any(
        o.signature.name == way
        and (o.peer, o.group, o.tag) == (mine.rank, mine.group, mine.tag)
        and o.chain >= mine.chain
        for o in theirs
        if not o.is_collective
    )


def find_cycle(table: list[Row]) -> list[int]:
    """Ranks of which each waits for the next and the last for the first; empty if there is no such circle."""
    waits = {row.rank: row.waits_for for row in table if row.state == "waiting"}
    for start in sorted(waits):
        path, seen = [start], {start}
        stack = [iter(sorted(waits[start]))]
        while stack:
            following = next((n for n in stack[-1] if n == start or (n in waits and n not in seen)), None)
            if following is None:
                stack.pop()
                path.pop()
            elif following == start:
                return path
            else:
                path.append(following)
                seen.add(following)
                stack.append(iter(sorted(waits[following])))
    return []


def verdict(table: list[Row], cycle: list[int]) -> str:
    """One sentence without times: who waits for whom."""
    by_rank = {row.rank: row for row in table}
    if cycle:
        links = [f"{a} waits for {b}" for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
        kinds = {o.signature.name for r in cycle if (o := by_rank[r].operation) is not None}
        both = "both" if len(cycle) == 2 else "all"
        habit = {"recv": f": {both} receive first", "send": f": {both} send first"}.get("+".join(kinds), "")
        return ", ".join(links) + habit
    returned = {row.rank for row in table if row.state == "returned"}
    for row in table:
        if row.state == "waiting" and set(row.waits_for) <= returned and row.waits_for:
            return f"rank {row.rank} waits for {named_ranks(row.waits_for)}, which had returned already"
    if any(row.state == "waiting" and not row.waits_for for row in table):
        return "messages are under way; nobody waits in a circle"
    running = [row.rank for row in table if row.state == "running"]
    if running:
        return f"{named_ranks(running)} still ran; nobody waits in a circle"
    return "nobody waits in a circle"


def timed_out(table: list[Row], operations: list[list[Operation]], limit: float) -> RunTimeout:
    cycle = find_cycle(table)
    sentence = verdict(table, cycle)
    late = sum(row.state in ("waiting", "running") for row in table)
    head = f"{late} of {len(table)} ranks had not returned after {limit:g} s"
    return RunTimeout("\n".join([head, *table_text(table, operations), sentence]), table, cycle, sentence)


def table_text(table: list[Row], operations: list[list[Operation]], last: int = 3) -> list[str]:
    """The operation table as text: a line a rank, then each rank's last operations."""
    cells = [("rank", "state", "waits for", "since", "at")] + [_cells(row) for row in table]
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    if any(len(mine) > 1 for mine in operations):  # else the table has told it all
        lines.append("last operations")
        for rank, mine in enumerate(operations):
            done = [f"{_named(o)} {_STATES[o.state]}" for o in mine[-last:]]
            lines.append(f"  rank {rank}  " + ("; ".join(done) or "none"))
    return lines


_STATES = {STARTED: "started", WAITING: "waiting", DONE: "done", FAILED: "failed"}


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    at = f"{shown_place(row.place)}: {source(row.place[0], row.place[1])}".rstrip(": ") if row.place else ""
    if row.state != "waiting" or row.operation is None:
        return (str(row.rank), row.state, "", "", at)
    waits = ",".join(map(str, row.waits_for)) or "–"
    return (str(row.rank), "in " + _named(row.operation), waits, f"{row.seconds:.1f} s", at)


def _named(o: Operation) -> str:
    if o.is_collective:
        return str(o.signature)
    way, peer = "to" if o.signature.name == "send" else "from", "any" if o.peer is None else o.peer
    return f"{o.signature} {way} {peer}"


def seen_in_table(operations: list[Operation], zero: float) -> list[Event]:
    """What is known of a rank that could not report: its last operations, as events. When they ended is not known;
    one that is done gets no length."""
    events = []
    for index, o in enumerate(operations):
        s, start = o.signature, o.since - zero
        kind = "collective" if o.is_collective else s.name
        events.append(Event(
            kind, s.name, o.rank, start, start if o.state == DONE else None, _bytes(s.numel, s.dtype),
            s.root if o.is_collective else o.peer, o.group, "comm", index=index, tag=o.tag, dtype=s.dtype,
            numel=s.numel, op=s.op, line=shown_place(o.place),
        ))  # fmt: skip
    return events


def _bytes(numel: int | None, dtype: str | None) -> int:
    """
    >>> _bytes(10, "float32"), _bytes(10, "bfloat16"), _bytes(10, "bool"), _bytes(None, None)
    (40, 20, 10, 0)
    """
    bits = re.search(r"\d+", dtype or "")
    return (numel or 0) * (int(bits.group()) // 8 if bits else 1)
