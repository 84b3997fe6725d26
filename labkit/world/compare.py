"""Did the ranks do the same? Compare what their groups met in and what they sent each other."""

from __future__ import annotations

from typing import Any

from labkit.world.failure import Disagreement
from labkit.world.place import at
from labkit.world.table import Operation
from labkit.world.wording import counted


def compare_ledgers(ledgers: list[Any]) -> Disagreement | None:
    """After all ranks have returned: did they make the same calls, and was every message taken as what it was?"""
    if None in ledgers:  # not recorded
        return None
    histories = [g.history for g in ledgers]
    return find_disagreement(histories, set(range(len(ledgers))), len(ledgers)) or find_wrong_message(histories)


def find_disagreement(operations: list[list[Operation]], returned: set[int], world: int) -> Disagreement | None:
    """Compare what the ranks' groups met in.

    Args:
        operations: For every rank of the world its operations: all of them where it has returned, else the last.
        returned: Ranks whose function has returned: they will take part in nothing more.
        world: Number of ranks.
    """
    meetings: dict[tuple[str, int], dict[int, Operation]] = {}
    counts: dict[str, dict[int, int]] = {}
    members: dict[str, list[int]] = {}
    for rank, mine in enumerate(operations):
        for o in mine:
            if o.is_collective:
                meetings.setdefault((o.group, o.sequence), {})[rank] = o
                counts.setdefault(o.group, {})[rank] = max(o.sequence, counts.get(o.group, {}).get(rank, 0))
                members[o.group] = list(range(world)) if o.members is None else o.members
    for (group, sequence), present in sorted(meetings.items(), key=lambda kv: min(o.since for o in kv[1].values())):
        absent = [r for r in members[group] if r in returned and counts[group].get(r, 0) < sequence]
        if len({o.signature for o in present.values()}) > 1 or absent:
            found = _disagreement(group, sequence, present, absent, operations)
            found.missing = tuple(r for r in members[group] if r not in present and r not in absent)
            return found
    return None


def _disagreement(
    group: str, sequence: int, present: dict[int, Operation], absent: list[int], operations: list[list[Operation]]
) -> Disagreement:
    lines = [f"the ranks disagree in collective {sequence} of group {group}:"]
    for rank in sorted([*present, *absent]):
        if rank in present:
            o = present[rank]
            lines.append(f"  rank {rank}  {o.signature}{at(o.place)}")
        else:
            before = [o for o in operations[rank] if o.group == group and o.is_collective]
            after = f"after {before[-1].signature}{at(before[-1].place)}" if before else "without any"
            lines.append(f"  rank {rank}  nothing: its function had returned, {after}")
    lines.append("every member of a group must make the same calls, in the same order, with the same size and type")
    return Disagreement("\n".join(lines), sorted([*present, *absent]))


def find_wrong_message(operations: list[list[Operation]]) -> Disagreement | None:
    """A message that was received as something else: the k-th send from a to b against b's k-th receive from a."""
    sent, received = _messages(operations, "send"), _messages(operations, "recv")
    for key in sorted(sent.keys() & received.keys(), key=str):
        theirs = {o.chain: o for o in received[key]}
        for s in sent[key]:
            r = theirs.get(s.chain)
            if r is not None and (s.signature.dtype, s.signature.numel) != (r.signature.dtype, r.signature.numel):
                return Disagreement(
                    f"message {s.chain} from rank {s.rank} to rank {r.rank} was received as something else:\n"
                    f"  rank {s.rank}  {s.signature}{at(s.place)}\n  rank {r.rank}  {r.signature}{at(r.place)}\n"
                    "a receive needs a tensor of the size and type that was sent",
                    [s.rank, r.rank],
                )
    return None


def _messages(operations: list[list[Operation]], name: str) -> dict[tuple, list[Operation]]:
    found: dict[tuple, list[Operation]] = {}
    for o in (o for mine in operations for o in mine):
        if o.signature.name == name and not o.is_collective and o.peer is not None:
            ends = (o.rank, o.peer) if name == "send" else (o.peer, o.rank)
            found.setdefault((o.group, *ends, o.tag), []).append(o)
    return found


def leftovers(ledgers: list[Any]) -> list[str]:
    """What a run left behind that the next would stumble over, a sentence each."""
    said = []
    histories = [g.history for g in ledgers]
    sent, received = _messages(histories, "send"), _messages(histories, "recv")
    for key in sorted(sent.keys() | received.keys(), key=str):
        _, a, b, _ = key
        more = len(sent.get(key, [])) - len(received.get(key, []))
        if more > 0:
            place = at(sent[key][-more].place)
            said.append(f"rank {a} sent {counted(more, 'message')} to rank {b} that nobody received{place}")
        if more < 0:
            place = at(received[key][more].place)
            said.append(f"rank {b} still waits for {counted(-more, 'message')} from rank {a} that nobody sent{place}")
    for ledger in ledgers:
        for o in ledger.unwaited:
            if o.signature.name != "recv":
                said.append(f"rank {ledger.rank} started {o.signature} and never waited for it{at(o.place)}")
            elif o.peer is None:
                said.append(f"rank {ledger.rank} still waits for a message from any rank{at(o.place)}")
            elif (key := (o.group, o.peer, o.rank, o.tag)) in sent and len(sent[key]) >= len(received[key]):
                said.append(f"rank {ledger.rank} started a receive from rank {o.peer} and never waited{at(o.place)}")
    return said
