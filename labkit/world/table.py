"""The operation table: what each rank is doing, readable from outside even when the rank hangs or is dead.

One shared memory map for a pool, unlinked, so that nothing is left when everything dies. A rank writes to its own slot
only; the kernel reads all of them. A slot holds two rings, of the rank's last collectives and of its last messages, so
that many messages do not push out what a group met in. Each record bears a version: zero while it is being written,
and different after each writing, so that a reader who sees it change throws away what it read.
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
RECORD = 640
_VERSION = struct.Struct("<I")
_HEAD = struct.Struct("<IIBxxxdIII")  # number, sequence, state, since, chain, group, text length
_TEXT = _VERSION.size + _HEAD.size
_COUNTER = 8
_RING = KEEP * RECORD
_SLOT = _COUNTER + 2 * _RING

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
        return f"{self.name}({inside})" if inside or self.name.isidentifier() else self.name


@dataclass(slots=True)
class Operation:
    """One operation of one rank, as the table keeps it.

    `sequence` counts the collectives of its group on this rank from 1; 0 for a send or receive, which are counted by
    `chain`: the k-th between these two ranks with this tag, that way. `number` counts all operations of the rank,
    `slot` its collectives or its messages. `members` are ranks of the world, ``None`` for all, empty if not known.
    `place` is (file, line, function) of the learner's own call.
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
    slot: int = 0
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
        """Put a record into one of `rank`'s rings, at the place of its number."""
        o, at = operation, self._offset(rank, operation)
        text = _packed(o.signature, o.group, None if o.members is None else tuple(o.members), o.peer, o.tag, o.place)
        _VERSION.pack_into(self.map, at, 0)
        _HEAD.pack_into(self.map, at + _VERSION.size, o.number, o.sequence, o.state, o.since, o.chain, _hash(o.group),
                        len(text))  # fmt: skip
        self.map[at + _TEXT : at + _TEXT + len(text)] = text
        _VERSION.pack_into(self.map, at, o.number)  # last, and in one store: from here on the record is whole
        if o.is_collective:
            _VERSION.pack_into(self.map, rank * _SLOT, o.slot)

    def set_state(self, rank: int, operation: Operation, state: int) -> None:
        """Change the state of a record, unless newer operations have taken its place."""
        operation.state = state
        at = self._offset(rank, operation)
        if _VERSION.unpack_from(self.map, at)[0] == operation.number:
            self.map[at + _VERSION.size + 8] = state

    def conflicts(self, mine: Operation) -> bool:
        """Whether another rank stands in the same collective of the same group with something else to do.

        Each rank writes before it looks, so of two that meet at least one sees the other.
        """
        group = _hash(mine.group)
        for rank in range(self.ranks):
            if rank == mine.rank:
                continue
            at = rank * _SLOT + _COUNTER + _VERSION.unpack_from(self.map, rank * _SLOT)[0] % KEEP * RECORD
            version = _VERSION.unpack_from(self.map, at)[0]
            _, sequence, _, _, chain, theirs, _ = _HEAD.unpack_from(self.map, at + _VERSION.size)
            whole = version != 0 and version == _VERSION.unpack_from(self.map, at)[0]
            if whole and theirs == group and sequence == mine.sequence and chain != mine.chain:
                return True
        return False

    def read(self, rank: int) -> list[Operation]:
        """`rank`'s last operations of either kind, oldest first."""
        start = rank * _SLOT + _COUNTER
        found = [self._record(rank, start + n * RECORD) for n in range(2 * KEEP)]
        return sorted((o for o in found if o is not None), key=lambda o: o.number)

    def read_all(self) -> list[list[Operation]]:
        return [self.read(rank) for rank in range(self.ranks)]

    def _record(self, rank: int, at: int) -> Operation | None:
        """One record; ``None`` if there is none, or if it was being written meanwhile."""
        for _ in range(3):
            version = _VERSION.unpack_from(self.map, at)[0]
            raw = self.map[at : at + RECORD]
            if _VERSION.unpack_from(self.map, at)[0] == version == _VERSION.unpack_from(raw)[0]:
                break
        else:
            return None
        if version == 0:
            return None
        number, sequence, state, since, chain, _, length = _HEAD.unpack_from(raw, _VERSION.size)
        try:
            o = _unpacked(raw[_TEXT : _TEXT + length])
        except ValueError:  # the writer came between two looks after all
            return None
        o.number, o.sequence, o.state, o.since, o.chain, o.rank = number, sequence, state, since, chain, rank
        return o

    def _offset(self, rank: int, operation: Operation) -> int:
        ring = 0 if operation.is_collective else _RING
        return rank * _SLOT + _COUNTER + ring + operation.slot % KEEP * RECORD


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
    """The record's text. What does not fit is shortened: the place, then the place is left out, then the members
    (``[]``: not known). A long group's name ends in its checksum, so that two never look alike."""
    room = RECORD - _TEXT
    name = group if len(group) <= 60 else f"{group[:50]}…{_hash(group):08x}"
    short = ("…" + place[0][-60:], place[1], place[2][:40]) if place else None
    for where, who in ((place, members), (short, members), (None, members), (None, ())):
        fields = [s.name, s.dtype, s.numel, s.op, s.root, name, who, peer, tag, where]
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        if len(text) <= room:
            return text
    raise ValueError(f"an operation of {len(text)} bytes does not fit into a record of {room}")


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
