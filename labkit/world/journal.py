"""What this rank's process groups were asked to do: the one record from which trace, operation table and ledger come.

The process group tells the journal when an operation is entered, waited for and finished. The journal writes the
operation table (for whoever looks at a rank that hangs), the trace (for pictures) and, at the end of a run, the
ledger (what was left over).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from labkit.device import Clock
from labkit.trace import Open, now, recorder
from labkit.world.place import AskedFrom, learners_line, shown_place
from labkit.world.table import DONE, FAILED, WAITING, Operation, OperationTable, Signature, chained


@dataclass(slots=True)
class Ledger:
    """What one rank's groups were asked to do in a run: all of it, and what was started and never waited for."""

    rank: int
    history: list[Operation]
    unwaited: list[Operation]


class RanksDisagree(RuntimeError):
    """This rank was about to meet another in a different operation, or with another size. Some backends would then
    end the process or return wrong numbers, so it goes no further; the kernel tells who wanted what."""


class Entry:
    """An operation under way on this rank."""

    __slots__ = ("collected", "event", "header", "nbytes", "on_device", "operation", "sent", "work")

    def __init__(self, operation: Operation, event: Open | None, nbytes: int, on_device: bool) -> None:
        self.operation, self.event, self.nbytes, self.on_device = operation, event, nbytes, on_device
        self.collected = False  # somebody waited for it, or took its future
        self.work: Any = None  # torch's handle, kept: gloo drops a message whose handle is gone before it was taken
        self.header: Any = None  # under a pace, kept likewise until the run is over: see `labkit.world.paced`
        self.sent: Sent | None = None


class Journal:
    """One a process. `begin` starts a run; between runs nothing is noted."""

    def __init__(self, rank: int, table: OperationTable | None = None) -> None:
        self.rank, self.table, self.on = rank, table, False
        self.clock = Clock()
        #: On `now`'s clock: waits end there with an error. Only under torchrun, where nobody ends a rank from outside.
        self.deadline: float | None = None
        self._lock = threading.Lock()
        self._asked_from = AskedFrom()
        recorder.carriers.append(self._asked_from)
        self.begin()
        self.on = False

    def begin(self) -> None:
        self.on = True
        self.number, self.slots = 0, [0, 0]  # of messages, of collectives
        self.entries: list[Entry] = []
        self._chains: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._messages: Counter[tuple] = Counter()
        self._groups: Counter[tuple[int, ...]] = Counter()

    def another_group(self, members: list[int] | None) -> int:
        """How many groups of these members there are in this run, with the one that is being made."""
        self._groups[tuple(members or ())] += 1
        return self._groups[tuple(members or ())]

    def enter(
        self, kind: str, signature: Signature, group: str, members: list[int] | None, *,
        nbytes: int = 0, peer: int | None = None, tag: int = 0, on_device: bool = False, collective: bool = True,
        traced: bool = True,
    ) -> Entry:  # fmt: skip
        """Note that an operation begins. Everything about it is known now, but its end."""
        place = learners_line(sys._getframe(1))
        with self._lock:
            self.number += 1
            operation = Operation(signature, group, members, peer=peer, tag=tag, place=place, number=self.number,
                                  since=now(), rank=self.rank)  # fmt: skip
            self.slots[collective] += 1
            operation.slot = self.slots[collective]
            if collective:
                count, chain = self._chains[group]
                operation.sequence, operation.chain = count + 1, chained(chain, signature)
                self._chains[group] = (operation.sequence, operation.chain)
            elif peer is not None:
                self._count(operation)
            if self.on and self.table is not None:
                self.table.write(self.rank, operation)
        event = None if not traced else recorder.start(
            kind, signature.name, self.clock.stamp(on_device), nbytes=nbytes, group=group, lane="comm", tag=tag,
            peer=signature.root if peer is None else peer, dtype=signature.dtype, numel=signature.numel,
            op=signature.op, line=shown_place(place),
        )  # fmt: skip
        entry = Entry(operation, event, nbytes, on_device)
        if self.on:
            self.entries.append(entry)
            if collective and self.table is not None and self.table.conflicts(operation):
                raise RanksDisagree(f"another rank is in a different collective {operation.sequence} of {group}")
        return entry

    def message(
        self, direction: str, signature: Signature, group: str, members: list[int] | None, **more: Any
    ) -> Entry:
        """Note a send or a receive; `more` is what `enter` takes."""
        return self.enter(direction, signature, group, members, collective=False, **more)

    def met(self, entry: Entry, source: int) -> None:
        """A receive from anybody has found its sender."""
        entry.operation.peer = source
        self._count(entry.operation)
        if entry.event is not None:
            entry.event.fields["peer"] = source

    def _count(self, o: Operation) -> None:
        """Which of the messages between these two it is."""
        key = (o.signature.name, o.group, o.peer, o.tag)
        self._messages[key] += 1
        o.chain = self._messages[key]

    def waiting(self, entry: Entry) -> None:
        entry.collected = True
        self._set(entry, WAITING)

    def finished(self, entry: Entry, ended: float | None = None) -> None:
        """It is over: just now, or since `ended`, on `now`'s clock."""
        if entry.operation.state != DONE:
            entry.work = None
            self._set(entry, DONE)
            recorder.finish(entry.event, self.clock.stamp(entry.on_device) if ended is None else ended)

    def failed(self, entry: Entry) -> None:
        if not self.is_over():  # else nothing failed, it only waited too long
            self._set(entry, FAILED)

    def is_over(self) -> bool:
        """Whether time is up, or was for another rank: the first whose wait ends breaks the others' connections."""
        return self.deadline is not None and now() > self.deadline - 0.25

    def _set(self, entry: Entry, state: int) -> None:
        entry.operation.state = state
        if self.on and self.table is not None:
            self.table.set_state(self.rank, entry.operation, state)

    def end(self) -> Ledger:
        """Stop, and sum up the run.

        Raises:
            RuntimeError: A tensor was changed while its send was under way, or a thread failed and nobody knows.
        """
        self.on = False
        for entry in self.entries:
            check_not_overwritten(entry)
        unwaited = [e.operation for e in self.entries if _is_left(e)]
        for branch in (b for b in recorder.branches if not b.joined):
            if branch.error is not None:
                raise RuntimeError(f"{branch.name} failed, and nobody had waited for it") from branch.error
            place = branch.carried(self._asked_from)
            unwaited.append(Operation(Signature(branch.name), place=place, rank=self.rank))
        return Ledger(self.rank, [e.operation for e in self.entries], unwaited)


def _is_left(entry: Entry) -> bool:
    """A collective or a receive that nobody waited for. A send that was received is only careless."""
    return not entry.collected and entry.operation.signature.name != "send"


class Sent:
    """The tensor of a send under way. It belongs to the transport until the send was waited for.

    Torch counts the changes of a tensor, but a tensor shares its count with every view of the same storage, and a ring
    rightly changes one chunk while another travels. So the count only says when to look: at a sample of the content.
    """

    SAMPLE = 256

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.version = weakref.ref(tensor), tensor._version
        self.content = self._sample(tensor)

    def _sample(self, tensor: Any) -> bytes:
        torch = sys.modules["torch"]
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // self.SAMPLE)].clone(memory_format=torch.contiguous_format)
        return sample.view(torch.uint8).numpy().tobytes()

    def is_changed(self) -> bool:
        tensor = self.tensor()
        return tensor is not None and tensor._version != self.version and self._sample(tensor) != self.content

    @classmethod
    def watch(cls, tensor: Any) -> Sent | None:
        """``None`` where looking would be wrong or dear: on a GPU, and for tensors that do not count changes."""
        return None if tensor.is_cuda or tensor.is_inference() else cls(tensor)


def check_not_overwritten(entry: Entry) -> None:
    """
    Raises:
        RuntimeError: A tensor was changed between its send and the wait: the receiver may see old values or new.
    """
    if entry.sent is not None and entry.sent.is_changed():
        o = entry.operation
        raise RuntimeError(
            f"rank {o.rank} changed a tensor while its isend to rank {o.peer} ({shown_place(o.place)}) was under way: "
            "the receiver may get old values, new ones or a mix. Call .wait() on the send first, or send a clone"
        )
