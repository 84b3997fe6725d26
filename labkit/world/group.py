"""A process group that notes what it is asked to do, and hands it on.

`RecordingGroup` is a `torch.distributed.ProcessGroup` in Python around torch's own backends, registered with torch
as backend ``"labkit"``. Whatever talks to a process group is seen: a learner's `dist.all_reduce`, torch's DDP and
its C++ reducer, DTensor, FSDP2, pipelining. Only this file would change for another transport.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from labkit import device
from labkit.trace import now
from labkit.world.journal import Entry, Journal, Sent, check_not_overwritten
from labkit.world.table import Signature

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


class RecordedWork(dist.Work):
    """A handle that tells the journal when it is waited for and when it is done."""

    def __init__(self, group: RecordingGroup, work: Any, entry: Entry) -> None:
        super().__init__()
        self.group, self.work, self.entry = group, work, entry
        entry.work = work
        self._waited = False

    def wait(self, *timeout: Any) -> bool:
        if self._waited:  # gloo would wait for a second message
            return True
        journal = self.group.journal
        journal.waiting(self.entry)
        if not timeout and journal.deadline is not None and not self.entry.on_device:
            timeout = (timedelta(seconds=max(0.01, journal.deadline - now())),)
        try:
            done = self.work.wait(*timeout)
        except BaseException:
            journal.failed(self.entry)
            raise
        self._waited = True
        self.group.completed(self.entry, self.work)
        return done

    def get_future(self) -> torch.futures.Future:
        self.entry.collected = True
        return self.work.get_future()

    def is_completed(self) -> bool:
        done = self.work.is_completed()
        self.entry.collected |= done
        return done

    def is_success(self) -> bool:
        return self.work.is_success()

    def exception(self) -> Any:
        return self.work.exception()

    def result(self) -> Any:
        return self.work.result()

    def synchronize(self) -> None:
        self.work.synchronize()

    def block_current_stream(self) -> None:
        self.entry.collected = True
        self.work.block_current_stream()

    def _source_rank(self) -> int:
        return self.work._source_rank()

    def source_rank(self) -> int:
        return self.work._source_rank()


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

    def world_rank(self, rank: int) -> int:
        return rank if self.members is None else self.members[rank]

    def completed(self, entry: Entry, work: Any) -> None:
        """An operation was waited for with success."""
        if entry.operation.signature.name == "recv" and entry.operation.peer is None:
            self.journal.met(entry, self.world_rank(work._source_rank()))
        self.journal.finished(entry)
        check_not_overwritten(entry)
        entry.sent = None

    def collective(self, method: str, *args: Any, **kwargs: Any) -> RecordedWork:
        name, payload, must_agree = _COLLECTIVES[method]
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
        work = self._call(entry, method, args, kwargs)
        if getattr(options, "asyncOp", False) and not on_cuda:
            # The moment it is done, not the moment somebody waits: overlap is what the pictures are about.
            work.get_future().add_done_callback(lambda _: self.journal.finished(entry))
        return RecordedWork(self, work, entry)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> RecordedWork:
        (tensor,) = tensors
        entry = self._message("send", tensor, dst, tag)
        entry.sent = Sent.watch(tensor)
        if tensor.is_cuda and not self.nccl:
            return RecordedWork(self, device.staged_send(self.transport, tensor, dst, tag), entry)
        return RecordedWork(self, self._call(entry, "send", (tensors, dst, tag)), entry)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> RecordedWork:
        entry = self._message("recv", tensors[0], src, tag)
        if tensors[0].is_cuda and not self.nccl:
            return RecordedWork(self, device.StagedReceive(self.transport, tensors[0], src, tag), entry)
        return RecordedWork(self, self._call(entry, "recv", (tensors, src, tag)), entry)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> RecordedWork:
        entry = self._message("recv", tensors[0], None, tag)
        if tensors[0].is_cuda and not self.nccl:
            return RecordedWork(self, device.StagedReceive(self.transport, tensors[0], None, tag), entry)
        return RecordedWork(self, self._call(entry, "recv_anysource", (tensors, tag)), entry)

    def _message(self, name: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Entry:
        if peer == self.rank() and not (self.nccl and tensor.is_cuda):
            raise ValueError(
                f"rank {self.world_rank(peer)} was to {name} to or from itself, which gloo cannot: use two ranks or "
                "more, or copy the tensor"
            )
        return self.journal.message(
            name, Signature(name, _name(tensor.dtype), tensor.numel()), self.label, self.members,
            nbytes=tensor.nbytes, peer=None if peer is None else self.world_rank(peer), tag=tag,
            on_device=self.nccl and tensor.is_cuda,
        )  # fmt: skip

    def _call(self, entry: Entry, method: str, args: tuple, kwargs: dict[str, Any] | None = None) -> Any:
        try:
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
