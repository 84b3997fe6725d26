"""The ledger: every storage the meter knows, its category now, the totals, their peaks and their time line."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from labkit.memory.categories import ACTIVATIONS, CATEGORIES, GRADIENTS, OTHER, UNCOUNTED, storages
from labkit.trace import recorder

#: Points of a time line; when there are more, of two neighbours the higher stays.
LIMIT = 4096


class Entry(weakref.ref):
    """One storage, weakly: the ledger keeps nothing alive, and hears when a storage goes.

    A storage's Python object lives as long as its bytes do, also when only autograd holds them.
    """

    __slots__ = ("at", "claim", "key", "made", "nbytes", "round", "saves", "since")

    key: int  # the address of the storage's C++ object: unlike `data_ptr` also of meta tensors, and stable in `resize_`
    nbytes: int
    made: bool  # by an operation under the meter, so that it counts as "other" when it is nothing else
    claim: int | None  # the category in which a parameter, gradient … lives here
    round: int  # of the claims in which it was last found
    saves: int  # how many of autograd's saved tensors lie here
    at: int  # the category under which it is counted now
    since: int  # when that began, by the ledger's count of changes


@dataclass(frozen=True, slots=True)
class Point:
    """When and where: a point of the time line.

    Attributes:
        step: Training step, from 0: how many phases named ``"step"`` had ended.
        phase: What `MemoryMeter.phase` said, or ``None``.
        op: The operation that made the last storage, such as ``"aten::mm"``; ``None`` in light mode.
        layer: The submodule in whose forward or backward it was, such as ``"layers.3"``; ``None`` in light mode.
        labels: What `labkit.trace.label` said: layer, micro_batch, stage …
    """

    step: int
    phase: str | None
    op: Any = None
    layer: str | None = None
    labels: dict[str, Any] = field(default_factory=dict)


class Peak:
    """The highest total of one phase, and the highest of each category by itself."""

    __slots__ = ("change", "highest", "now", "point", "total")

    def __init__(self) -> None:
        self.total = -1
        self.now: list[int] = [0] * (len(CATEGORIES) + 1)
        self.highest = [0] * (len(CATEGORIES) + 1)
        self.change = 0
        self.point = Point(0, None)

    def set(self, ledger: Ledger) -> None:
        self.total, self.now, self.change = ledger.total, ledger.now.copy(), ledger._change
        self.point = Point(ledger.step, ledger.phase, ledger.op, ledger.layer, recorder.labels())


class Ledger:
    """Storages by category.

    There is no lock, though storages are freed in any thread (autograd has one a GPU, collectives have their own) and
    by the garbage collector in the midst of anything. `_count` changes an entry and the totals in statements that
    call nothing, and CPython passes its lock on at calls and backward jumps only; all else may happen twice.
    """

    def __init__(self) -> None:
        self.now = [0] * (len(CATEGORIES) + 1)
        self.total = 0
        self.peaks: dict[str | None, Peak] = {None: Peak()}
        self.points: list[tuple[int, str | None, tuple[int, ...]]] = []
        self.step = 0
        self.phase: str | None = None
        self.op: Any = None
        self.layer: str | None = None
        #: Whether a claimed storage other than a gradient's has died: parameters moved, a layer or a state replaced.
        self.moved = False
        self._peak = self.peaks[None]
        self._rising = True
        self._entries: dict[int, Entry] = {}
        self._claimed: list[Entry] = []
        self._change = self._round = 0
        self._on_death: Callable[[Any], None] = self._died

    # What happens to a storage

    def entry(self, storage: torch.UntypedStorage) -> Entry:
        """The storage's entry, new if it was not known."""
        key = storage._cdata
        known = self._entries.get(key)
        if known is not None:
            return known
        new = Entry(storage, self._on_death)
        new.key, new.nbytes, new.made, new.claim = key, storage.nbytes(), False, None
        new.round, new.saves, new.at, new.since = 0, 0, UNCOUNTED, self._change
        return self._entries.setdefault(key, new)

    def make(self, storage: torch.UntypedStorage) -> None:
        """An operation returned a tensor in this storage; if it is a new one, it is the operation's."""
        known = self._entries.get(storage._cdata)
        if known is None:
            known = self.entry(storage)
            known.made = True
            self._count(known, OTHER)
        elif known.nbytes != storage.nbytes():
            self._resize(known, storage.nbytes())

    def save(self, storage: torch.UntypedStorage) -> Entry:
        """Autograd keeps a tensor of this storage for backward."""
        entry = self.entry(storage)
        entry.saves += 1
        if entry.saves == 1 and entry.claim is None:
            self._count(entry, ACTIVATIONS)
        return entry

    def release(self, entry: Entry) -> None:
        """Autograd keeps one tensor less of this storage."""
        entry.saves -= 1
        if entry.saves == 0 and entry.claim is None:
            self._count(entry, OTHER if entry.made else UNCOUNTED)

    def claim(self, category: int, tensor: torch.Tensor) -> None:
        """A tensor of this category has turned up, such as a gradient during backward; an older claim stays."""
        for storage in storages(tensor):
            entry = self.entry(storage)
            if entry.claim is None:
                entry.claim = category
                self._claimed.append(entry)
                self._count(entry, category)
        if len(self._claimed) > 64 + 2 * len(self._entries):  # most of them are gone
            self._claimed = [entry for entry in self._claimed if entry.claim is not None]

    def claim_all(self, claims: Iterable[tuple[int, torch.Tensor]]) -> None:
        """All claims there are: a storage claimed twice belongs to the first, one no longer claimed to nobody."""
        self._round += 1
        self.moved = False
        before, self._claimed = self._claimed, []
        for category, tensor in claims:
            for storage in storages(tensor):
                entry = self.entry(storage)
                if entry.round != self._round:
                    self._found(entry, category, storage.nbytes())
        for entry in before:
            if entry.round != self._round and entry.claim is not None:
                entry.claim = None
                self._count(entry, ACTIVATIONS if entry.saves else OTHER if entry.made else UNCOUNTED)

    def _found(self, entry: Entry, category: int, nbytes: int) -> None:
        entry.round = self._round
        self._claimed.append(entry)
        if entry.nbytes != nbytes:
            self._resize(entry, nbytes)
        entry.claim = category
        self._count(entry, category)

    def _died(self, entry: Any) -> None:
        self._entries.pop(entry.key, None)
        if entry.claim is not None:
            self.moved = self.moved or entry.claim != GRADIENTS
            entry.claim = None
        self._count(entry, UNCOUNTED)

    def _resize(self, entry: Entry, nbytes: int) -> None:
        at = entry.at
        self._count(entry, UNCOUNTED)
        entry.nbytes = nbytes
        self._count(entry, at)

    # Totals

    def _count(self, entry: Entry, after: int) -> None:
        """Move an entry's bytes to another category: the total grows, shrinks, or stays."""
        now, peak = self.now, self._peak
        if entry.at == after:
            return
        if entry.at == UNCOUNTED:
            if not self._rising:
                self.mark(rising=True)
        elif after == UNCOUNTED:
            if self._rising:
                self.mark(rising=False)
        elif entry.at == OTHER:
            self._rename(entry, after)
        before, nbytes = entry.at, entry.nbytes  # from here to the totals: no calls
        entry.at = after
        now[before] -= nbytes
        now[after] += nbytes
        self._change = entry.since = self._change + 1
        if before == UNCOUNTED:
            self.total += nbytes
        elif after == UNCOUNTED:
            self.total -= nbytes
            return
        if self.total > peak.total:
            peak.set(self)
        if now[after] > peak.highest[after]:
            peak.highest[after] = now[after]

    def _rename(self, entry: Entry, category: int) -> None:
        """What an operation made is "other" until it is found to be a gradient, a moment …: then it always was.

        It becomes an activation when it is saved, not before; a peak that lasts is told what it has become.
        """
        if category == ACTIVATIONS:
            peaks = [self._peak] if self.total == self._peak.total else []
        else:
            peaks = list(self.peaks.values())
        for peak in peaks:
            if entry.since <= peak.change:
                peak.now[OTHER] -= entry.nbytes
                peak.now[category] += entry.nbytes

    # The time line

    def mark(self, rising: bool) -> None:
        """A point of the time line: the total turns here, or a phase begins or ends."""
        self._rising = rising
        self.points.append((self.step, self.phase, tuple(self.now)))
        if len(self.points) > LIMIT:
            self._thin()

    def _thin(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=False)
        rest = self.points[-1:] if len(self.points) % 2 else []
        self.points = [max(pair, key=lambda p: sum(p[2][:UNCOUNTED])) for pair in pairs] + rest

    def begin(self, phase: str | None) -> None:
        """From here on it is this phase."""
        self.phase, self.op, self.layer = phase, None, None
        self._peak = self.peaks.setdefault(phase, Peak())
        if self.total > self._peak.total:
            self._peak.set(self)
        self._peak.highest = [max(pair) for pair in zip(self._peak.highest, self.now, strict=True)]
        self.mark(rising=True)
