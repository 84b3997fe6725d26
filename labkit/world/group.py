"""A process group that notes what it is asked to do, and hands it on.

`RecordingGroup` is a `torch.distributed.ProcessGroup` in Python around torch's own backends, registered with torch
as backend ``"labkit"``. Whatever talks to a process group is seen: a learner's `dist.all_reduce`, torch's DDP and
its C++ reducer, DTensor, FSDP2, pipelining. Only this file would change for another transport.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from labkit import device, pace
from labkit.world.journal import Entry, Journal, Sent, check_not_overwritten
from labkit.world.paced import PacedBarrier, PacedReceive, PacedSend, refuse_native
from labkit.world.table import Signature
from labkit.world.work import RecordedWork

c10d = dist.distributed_c10d

BACKEND = "labkit"


def _flat(tensors: Any) -> list[torch.Tensor]:
    """Every tensor of a tensor, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for item in tensors for t in _flat(item)]


def _first(args: tuple) -> Any:
    return args[0]


def _second(args: tuple) -> Any:
    return args[1]


#: ProcessGroup method → (the name a learner knows, the tensors whose total size all members must agree on, whether
#: they must). Of a gather or scatter that is the whole for all_gather and reduce_scatter, a rank's part otherwise.
#: Both the names of torch 2.13 and those of 2.11 are here: each torch has the ones it knows.
_COLLECTIVES: dict[str, tuple[str, Callable[[tuple], Any] | None, bool]] = {
    "allreduce": ("all_reduce", _first, True),
    "allreduce_coalesced": ("all_reduce", _first, True),
    "broadcast": ("broadcast", _first, True),
    "reduce": ("reduce", _first, True),
    "allgather": ("all_gather", _first, True),
    "allgather_coalesced": ("all_gather", _first, True),
    "_allgather_base": ("all_gather", _first, True),
    "all_gather_single": ("all_gather", _first, True),
    "all_gather_single_coalesced": ("all_gather", _first, True),
    "allgather_into_tensor_coalesced": ("all_gather", _first, True),
    "reduce_scatter": ("reduce_scatter", _second, True),
    "_reduce_scatter_base": ("reduce_scatter", _second, True),
    "reduce_scatter_single": ("reduce_scatter", _second, True),
    "reduce_scatter_single_coalesced": ("reduce_scatter", _second, True),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _second, True),
    "gather": ("gather", _second, True),
    "scatter": ("scatter", _first, True),
    "alltoall": ("all_to_all", _second, False),
    "alltoall_base": ("all_to_all", _second, False),
    "all_to_all_single": ("all_to_all", _second, False),
    "barrier": ("barrier", None, False),
    "monitored_barrier": ("barrier", None, False),
}


class RecordingGroup(dist.ProcessGroup):
    """Torch's backends behind a journal. `members` are ranks of the world; ``None`` is the whole world."""

    def __init__(
        self, transport: dist.ProcessGroup, backends: dict[str, tuple[Any, Any]], rank: int, size: int,
        members: list[int] | None, journal: Journal, copies: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks this overload
        self.transport, self.members, self.journal, self.copies = transport, members, journal, copies
        self.nccl = any(kind == dist.ProcessGroup.BackendType.NCCL for kind, _ in backends.values())
        # Registered here as well, for code that asks a group for its backend (FSDP2, coalescing).
        for name, (kind, backend) in backends.items():
            self._register_backend(torch.device(name), kind, backend)
        self._set_default_backend(next(reversed(backends.values()))[0])
        self._label: str | None = None

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def backend_name(self) -> str:
        """What `dist.get_backend` says: the library that serves the ranks' device."""
        return "nccl" if self.nccl else "gloo"

    @property
    def label(self) -> str:
        """``"world"``, ``"{0,2}"``, or with a description ``"tp {0,2}"``; a second group alike gets a number."""
        if self._label is None:
            if self.members is None:
                return "world"
            description = self.group_desc.removeprefix("mesh_")
            named = "" if description in ("", "undefined") else description + " "
            again = f" #{self.copies}" if self.copies > 1 else ""
            self._label = f"{named}{{{','.join(map(str, self.members))}}}{again}"
        return self._label

    @property
    def paced(self) -> bool:
        """Whether durations are stretched (`labkit.pace`): then only messages and barriers are possible."""
        return pace.running() is not None

    def world_rank(self, rank: int) -> int:
        return rank if self.members is None else self.members[rank]

    def completed(self, entry: Entry, work: Any, ended: float | None = None) -> None:
        """An operation was waited for with success; `ended`, if it is known, is the moment when it was over."""
        if entry.operation.signature.name == "recv" and entry.operation.peer is None:
            self.journal.met(entry, self.world_rank(work._source_rank()))
        self.journal.finished(entry, ended)
        check_not_overwritten(entry)
        entry.sent = None

    def collective(self, method: str, *args: Any, **kwargs: Any) -> RecordedWork:
        name, payload, must_agree = _COLLECTIVES[method]
        clock = pace.running()
        if clock is not None:
            refuse_native(name)
            clock.begin()
        tensors = _flat(payload(args)) if payload else []
        options = args[-1] if args else kwargs.get("opts")
        root = getattr(options, "rootRank", None)
        signature = Signature(
            name,
            _dtype(tensors) if "coalesced" not in method else _dtypes_and_sizes(tensors),
            sum(t.numel() for t in tensors) if must_agree else None,
            _reduction(name, options, args, kwargs),
            None if root is None else self.world_rank(root),
        )
        on_cuda = self.nccl and any(t.is_cuda for t in tensors)
        entry = self.journal.enter("collective", signature, self.label, self.members,
                                   nbytes=sum(t.nbytes for t in tensors), on_device=on_cuda)  # fmt: skip
        if clock is not None:
            barrier = PacedBarrier(self, entry, clock)
            if method == "monitored_barrier":  # for which torch does not wait
                barrier.wait()
            return barrier
        work = self._call(entry, method, args, kwargs)
        if work is None:  # monitored_barrier waits by itself
            entry.collected = True
            self.journal.finished(entry)
        if getattr(options, "asyncOp", False) and not on_cuda:
            # The moment it is done, not the moment somebody waits: overlap is what the pictures are about.
            with suppress(RuntimeError):  # gloo's reduce-scatter has no future: then the wait tells
                work.get_future().add_done_callback(lambda _: self.journal.finished(entry))
        return RecordedWork(self, work, entry)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> RecordedWork:
        (tensor,) = tensors
        entry = self._message("send", tensor, dst, tag)
        entry.sent = Sent.watch(tensor)
        if tensor.is_cuda and not self.nccl:
            work = device.staged_send(self.transport, tensor, dst, tag)
        else:
            work = self._call(entry, "send", (tensors, dst, tag))
        clock = pace.running()
        return RecordedWork(self, work, entry) if clock is None else PacedSend(self, work, entry, clock, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> RecordedWork:
        return self._receive("recv", tensors, (src,), tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> RecordedWork:
        return self._receive("recv_anysource", tensors, (), tag)

    def _receive(self, method: str, tensors: list[torch.Tensor], source: tuple[int, ...], tag: int) -> RecordedWork:
        src = source[0] if source else None
        entry = self._message("recv", tensors[0], src, tag)
        if tensors[0].is_cuda and not self.nccl:
            work = device.StagedReceive(self.transport, tensors[0], src, tag)
        else:
            work = self._call(entry, method, (tensors, *source, tag))
        clock = pace.running()
        return RecordedWork(self, work, entry) if clock is None else PacedReceive(self, work, entry, clock, src, tag)

    def _message(self, name: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Entry:
        if peer is not None and not 0 <= peer < self.size():
            raise ValueError(
                f"rank {self.world_rank(self.rank())} was to {name} {'to' if name == 'send' else 'from'} rank {peer}, "
                f"which is not there: expected one of 0 to {self.size() - 1}, the ranks of the group"
            )
        if peer == self.rank() and not (self.nccl and tensor.is_cuda):
            raise ValueError(
                f"rank {self.world_rank(peer)} was to {name} to or from itself, which gloo cannot: use two ranks or "
                "more, or copy the tensor"
            )
        clock = pace.running()
        if clock is not None:
            clock.begin()
        return self.journal.message(
            name, Signature(name, _name(tensor.dtype), tensor.numel()), self.label, self.members,
            nbytes=tensor.nbytes, peer=None if peer is None else self.world_rank(peer), tag=tag,
            on_device=self.nccl and tensor.is_cuda,
        )  # fmt: skip

    def _call(self, entry: Entry, method: str, args: tuple, kwargs: dict[str, Any] | None = None) -> Any:
        try:
            with torch.no_grad():  # gloo copies inside some of its calls; torch's own groups run below autograd
                return getattr(self.transport, method)(*args, **(kwargs or {}))
        except BaseException:
            self.journal.failed(entry)
            raise

    def shutdown(self) -> None:
        self.transport.shutdown()

    def abort(self) -> None:
        self.transport.abort()


def _define(method: str) -> None:
    def call(self: RecordingGroup, *args: Any, **kwargs: Any) -> RecordedWork:
        return self.collective(method, *args, **kwargs)

    call.__name__ = method
    setattr(RecordingGroup, method, call)


for _method in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _method):
        _define(_method)


def _dtype(tensors: list[torch.Tensor]) -> str | None:
    if len(tensors) == 1:
        return _name(tensors[0].dtype)
    return "+".join(sorted({_name(t.dtype) for t in tensors})) or None


def _dtypes_and_sizes(tensors: list[torch.Tensor]) -> str | None:
    """Of several tensors in one call each size must agree, not their sum alone."""
    sizes = "+".join(str(t.numel()) for t in tensors)
    shown = sizes if len(sizes) < 40 else f"{len(tensors)} tensors, {zlib.crc32(sizes.encode()):08x}"
    return f"{_dtype(tensors)} as {shown}" if len(tensors) > 1 else _dtype(tensors)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reduction(name: str, options: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """The reduction's name, such as ``"sum"``; ``None`` where nothing is reduced."""
    if "reduce" not in name:
        return None
    op: Any = getattr(options, "reduceOp", None)
    if op is None:  # the overloads that take the operation itself, as an argument or by default
        given = [*args, *kwargs.values()]
        op = next((a for a in given if isinstance(a, (dist.ReduceOp, dist.ReduceOp.RedOpType))), dist.ReduceOp.SUM)
    return getattr(op, "op", op).name.lower()
