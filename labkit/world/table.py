"""The operation table: what each rank is doing, readable from outside even when the rank hangs or is dead.

One shared memory map for a pool, unlinked, so that nothing is left when everything dies. A rank writes to its
own slot only; the kernel reads all of them. A slot is a ring of the rank's last operations. Each record bears a
version number that is odd while it is being written: a reader that sees a change skips the record.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import zlib
from dataclasses import dataclass, field
from functools import lru_cache

KEEP = 32
RECORD = 384
_HEAD = struct.Struct("<IIIBxxxdIII")  # version, number, sequence, state, since, chain, group, text length
_MEETING = struct.Struct("<IIIBxxxdII")  # the same without the length: what `meets` looks at

_COUNTER = 8
_SLOT = _COUNTER + KEEP * RECORD

STARTED, WAITING, DONE, FAILED = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Signature:
    """What all members of a group must agree on when they meet in an operation."""

    name: str
    dtype: str | None = None
    numel: int | None = None
    op: str | None = None
    root: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.numel:,} × {self.dtype}" if self.numel is not None else self.dtype, self.op]
        parts += [f"root {self.root}"] if self.root is not None else []
        inside = ", ".join(p for p in parts if p)
        return f"{self.name}({inside})"


@dataclass(slots=True)
class Operation:
    """One operation of one rank, as the table keeps it.

    `sequence` counts the collectives of its group on this rank from 1; 0 for a send or receive. `members` are
    ranks of the world, ``None`` for all. `place` is (file, line, function) of the learner's own call.
    """

    signature: Signature
    group: str = "world"
    members: list[int] | None = None
    sequence: int = 0
    peer: int | None = None
    tag: int = 0
    place: tuple[str, int, str] | None = None
    chain: int = 0
    number: int = 0
    state: int = STARTED
    since: float = 0.0
    rank: int = field(default=-1)

    @property
    def is_collective(self) -> bool:
        return self.sequence > 0


def chained(chain: int, signature: Signature) -> int:
    """A running checksum of a group's operations: equal means that all earlier ones were equal as well."""
    return zlib.crc32(_encoded(signature), chain)


@lru_cache(maxsize=4096)  # a training loop repeats itself
def _encoded(signature: Signature) -> bytes:
    return repr(signature).encode()


class OperationTable:
    """The shared map. `OperationTable(ranks)` makes one; `OperationTable(ranks, fd)` opens it in a rank."""

    def __init__(self, ranks: int, fd: int | None = None) -> None:
        self.ranks, self.size = ranks, self.size_of(ranks)
        self.fd = _anonymous_file(self.size) if fd is None else fd
        self.map = mmap.mmap(self.fd, self.size)

    @staticmethod
    def size_of(ranks: int) -> int:
        """Bytes of a table for this many ranks."""
        return ranks * _SLOT

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)

    def clear(self, rank: int | None = None) -> None:
        """Forget all operations, or those of one rank."""
        start, size = (0, self.size) if rank is None else (rank * _SLOT, _SLOT)
        self.map[start : start + size] = bytes(size)

    def write(self, rank: int, operation: Operation) -> None:
        """Put a record into `rank`'s ring, at the place of its number."""
        o = operation
        members = None if o.members is None else tuple(o.members)
        text = _packed(o.signature, o.group, members, o.peer, o.tag, o.place)
        at = self._offset(rank, operation.number)
        version = struct.unpack_from("<I", self.map, at)[0]
        struct.pack_into("<I", self.map, at, version + 1 | 1)
        self.map[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        _HEAD.pack_into(self.map, at, (version + 2) & ~1, operation.number, operation.sequence, operation.state,
                        operation.since, operation.chain, _hash(operation.group), len(text))  # fmt: skip
        struct.pack_into("<I", self.map, self._newest(rank), operation.number)

    def set_state(self, rank: int, operation: Operation, state: int) -> None:
        """Change the state of a record, unless newer operations have taken its place."""
        operation.state = state
        at = self._offset(rank, operation.number)
        if struct.unpack_from("<I", self.map, at + 4)[0] == operation.number:
            self.map[at + 12] = state

    def conflicts(self, mine: Operation) -> bool:
        """Whether another rank stands in the same collective of the same group with something else to do.

        Each rank writes before it looks, so of two that meet at least one sees the other.
        """
        group = _hash(mine.group)
        for rank in range(self.ranks):
            number = struct.unpack_from("<I", self.map, self._newest(rank))[0]
            if rank == mine.rank or number == 0:
                continue
            version, _, sequence, _, _, chain, theirs = _MEETING.unpack_from(self.map, self._offset(rank, number))
            if theirs == group and sequence == mine.sequence and chain != mine.chain and not version % 2:
                return True
        return False

    def read(self, rank: int) -> list[Operation]:
        """`rank`'s last operations, oldest first."""
        found = []
        for slot in range(KEEP):
            at = self._offset(rank, slot)
            raw = self.map[at : at + RECORD]
            version, number, sequence, state, since, chain, _, length = _HEAD.unpack_from(raw)
            if state and not version % 2 and struct.unpack_from("<I", self.map, at)[0] == version:
                op = _unpacked(raw[_HEAD.size : _HEAD.size + length])
                op.number, op.sequence, op.state, op.since, op.chain, op.rank = (
                    number, sequence, state, since, chain, rank)  # fmt: skip
                found.append(op)
        return sorted(found, key=lambda o: o.number)

    def read_all(self) -> list[list[Operation]]:
        return [self.read(rank) for rank in range(self.ranks)]

    def _offset(self, rank: int, number: int) -> int:
        return rank * _SLOT + _COUNTER + number % KEEP * RECORD

    def _newest(self, rank: int) -> int:
        """Where the number of the rank's newest operation stands."""
        return rank * _SLOT


@lru_cache(maxsize=4096)
def _hash(group: str) -> int:
    return zlib.crc32(group.encode())


@lru_cache(maxsize=4096)
def _packed(
    s: Signature,
    group: str,
    members: tuple[int, ...] | None,
    peer: int | None,
    tag: int,
    place: tuple[str, int, str] | None,
) -> bytes:
    """The record's text, shortened until it fits: first the path, then the members."""
    fields: list = [s.name, s.dtype, s.numel, s.op, s.root, group[:60], members, peer, tag, place]
    room = RECORD - _HEAD.size
    text = json.dumps(fields, separators=(",", ":")).encode()
    if len(text) > room and place:
        fields[9] = ("…" + place[0][-60:], place[1], place[2][:40])
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > room:
        fields[5], fields[6], fields[9] = group[:20], None, None
        text = json.dumps(fields, separators=(",", ":")).encode()
    return text[:room]


def _unpacked(text: bytes) -> Operation:
    name, dtype, numel, op, root, group, members, peer, tag, place = json.loads(text)
    return Operation(Signature(name, dtype, numel, op, root), group, members, peer=peer, tag=tag,
                     place=tuple(place) if place else None)  # fmt: skip


def _anonymous_file(size: int) -> int:
    """A file descriptor of `size` zero bytes without a name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("labkit-operations", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="labkit-")
        os.unlink(path)
    os.ftruncate(fd, size)
    return fd
