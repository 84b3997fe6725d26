"""The one file that tells CUDA from CPU.

A notebook's rank creates every tensor on `current()`, so that the same cell runs on GPUs:

>>> import torch
>>> torch.ones(3, device=current()).device.type
'cpu'

torch is imported when a function needs it, never by importing this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from labkit.trace import now

if TYPE_CHECKING:
    import torch

CHOICES = ("auto", "cpu", "cuda")

_current: torch.device | None = None
#: How many runs this process has begun.
runs = 0


def current() -> torch.device:
    """This rank's device: ``cpu``, or ``cuda:i`` where `labkit.run` chose one. Outside a rank, the CPU."""
    import torch

    return _current if _current is not None else torch.device("cpu")


def cores() -> int:
    """Processor cores that this process may use, container limits (cgroup v2) included."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            available = min(available, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return available


def gpu_count() -> int:
    """GPUs of this host, asked through NVML so that CUDA is not initialised and a later fork stays safe."""
    import torch

    if not torch.backends.cuda.is_built():
        return 0
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count()


def choose(wanted: str, ranks: int) -> str:
    """``"cpu"``, ``"nccl"`` (a GPU a rank) or ``"shared"`` (fewer GPUs than ranks, over gloo).

    Args:
        wanted: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        ranks: Ranks on this host.

    Raises:
        ValueError: ``"cuda"`` was asked for and there is no GPU.
    """
    if wanted == "cpu":
        return "cpu"
    count = _visible_gpus()
    if count == 0:
        if wanted == "cuda":
            raise ValueError("device='cuda', but no GPU was found: use device='auto' or 'cpu', or see `labkit doctor`")
        return "cpu"
    return "nccl" if count >= ranks else "shared"


@lru_cache(maxsize=1)
def _visible_gpus() -> int:
    """`gpu_count`, without importing torch on a host that has no NVIDIA driver at all."""
    if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/dxg"):  # the latter: WSL
        return 0
    return gpu_count()


def use(plan: str, local_rank: int) -> torch.device:
    """Called once in a rank: make `plan` (see `choose`) this process's device."""
    global _current
    import torch

    if plan == "cpu":
        _current = torch.device("cpu")
    else:
        _current = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(_current)
    return _current


def synchronize() -> None:
    """Wait until this rank's device has done everything it was given; on the CPU it always has."""
    if _current is not None and _current.type == "cuda":
        import torch

        torch.cuda.synchronize(_current)


def begin_run() -> None:
    """At the start of a run: memory peaks count from here, and what belonged to the run before is void."""
    global runs
    runs += 1
    if _current is not None and _current.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(_current)


def memory() -> dict[str, int]:
    """Bytes on this rank's device by the allocator's own names; empty on the CPU.

    ``allocated`` is held by tensors, ``reserved`` by PyTorch's caching allocator (always at least as much), each
    with its peak since the run began. nvidia-smi shows more: the CUDA context as well.
    """
    if _current is None or _current.type != "cuda":
        return {}
    import torch

    return {
        "allocated": torch.cuda.memory_allocated(_current),
        "allocated_peak": torch.cuda.max_memory_allocated(_current),
        "reserved": torch.cuda.memory_reserved(_current),
        "reserved_peak": torch.cuda.max_memory_reserved(_current),
    }


def rng_state() -> dict[str, torch.Tensor]:
    """Where torch's random streams stand: the CPU's, and that of this rank's GPU if it has one."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if _current is not None and _current.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(_current)
    return states


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Go on from where `rng_state` stood."""
    import torch

    torch.set_rng_state(state["cpu"])
    if "cuda" in state and _current is not None and _current.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], _current)


class Clock:
    """Stamps for events. On the CPU a stamp is host time; on CUDA it is a CUDA event on the current stream.

    `anchor` ties the two clocks together: once the device is idle, an event is recorded and host time read.
    """

    def __init__(self) -> None:
        self._anchor: tuple[Any, float] | None = None

    def anchor(self) -> None:
        """At the start of a run: from here on, stamps of CUDA work can be turned into host time."""
        if _current is None or _current.type != "cuda":
            self._anchor = None
            return
        import torch

        torch.cuda.synchronize(_current)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        self._anchor = (event, now())

    def stamp(self, on_device: bool) -> Any:
        """Now: in host time, or, for work queued on a stream (`on_device`), as an event of that stream."""
        if not on_device or self._anchor is None:
            return now()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: Any) -> float:
        """A stamp as seconds on `labkit.trace.now`'s clock."""
        if isinstance(stamp, float):
            return stamp
        assert self._anchor is not None, "a CUDA stamp without an anchor"
        event, at = self._anchor
        stamp.synchronize()
        return at + event.elapsed_time(stamp) / 1e3


@contextmanager
def in_thread(on: torch.device) -> Iterator[None]:
    """Inside, on a thread of its own: this rank's GPU is the current one. A new thread starts with GPU 0."""
    if on.type == "cuda":
        import torch

        with torch.cuda.device(on):
            yield
    else:
        yield


class Aside:
    """Work put on a CUDA stream beside the current one; all of a rank's in one stream, so in the order of asking.

    `wait` makes the current stream wait; Python goes on at once, as with torch's own handles on NCCL.
    """

    _streams: ClassVar[dict[torch.device, Any]] = {}

    def __init__(self, work: Callable[[], None], on: torch.device) -> None:
        import torch

        stream = self._streams.setdefault(on, torch.cuda.Stream(on))
        stream.wait_stream(torch.cuda.current_stream(on))
        with torch.cuda.stream(stream):
            work()
        self._on, self._done, self._work = on, stream.record_event(), work  # `work` holds the tensors until the wait

    def wait(self) -> bool:
        import torch

        torch.cuda.current_stream(self._on).wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done.query()


def staged_send(transport: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
    """Send a CUDA tensor over gloo, which only sends host memory: through a pinned host buffer."""
    import torch

    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    buffer.copy_(tensor)
    return transport.send([buffer], peer, tag)


class StagedReceive:
    """A receive of a CUDA tensor over gloo: into a pinned host buffer, then, once it is there, onto the device."""

    def __init__(self, transport: Any, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        import torch

        self._tensor = tensor
        self._buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        received = [self._buffer]
        self._work = transport.recv_anysource(received, tag) if peer is None else transport.recv(received, peer, tag)
        self._copied = False

    def wait(self, *timeout: Any) -> bool:
        done = self._work.wait(*timeout)
        if not self._copied:
            self._tensor.copy_(self._buffer)
            self._copied = True
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def _source_rank(self) -> int:
        return self._work._source_rank()
