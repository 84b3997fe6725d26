"""`labkit.run`: call a function on N ranks and bring back what they returned, printed and did."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labkit import device as devices
from labkit.pace import Pace
from labkit.trace import Trace
from labkit.world.collect import Done, collect
from labkit.world.interrupts import Interrupts
from labkit.world.pool import Pool, Shape, pools
from labkit.world.server import StartError
from labkit.world.transport import pack_call

MOST_RANKS = 64


@dataclass(frozen=True, eq=False)
class Run:
    """What came back from `labkit.run`.

    Attributes:
        values: What the function returned on rank 0, 1, …; tensors are on the CPU.
        output: What rank r printed; of more than 2 MB perhaps the beginning and the end only, with a line between.
        trace: The events of all ranks on one clock, a `labkit.trace.Trace`.
        leftovers: Messages that nobody received and operations that nobody waited for, a sentence each.
        notes: Under a pace, what did not go by it, a sentence each.
    """

    name: str
    values: list[Any]
    output: list[str]
    trace: Trace
    leftovers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        from labkit.world.shown import summary

        return summary(self)

    def _repr_html_(self) -> str:
        from labkit.world.shown import html

        return html(self)


def run(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 4,
    nodes: int = 1,
    device: str = "auto",
    pace: Pace | None = None,
    timeout: float = 60,
    record: bool = True,
    **kwargs: Any,
) -> Run:
    """Call ``fn(*args, **kwargs)`` on every rank of a world of processes.

    `fn` is an ordinary function, defined in a cell or anywhere, that calls `torch.distributed` as any torchrun
    program does: the process group exists already. Each run starts clean: seeded (0 + rank), torch's defaults
    restored, no sub-groups. Ranks stay warm between runs and are replaced after anything unclean, or when a module
    that they have imported changed on disk.

    Under torchrun (RANK and WORLD_SIZE are set) nothing is started: `fn` runs as this process's rank.

    Args:
        fn: The function; it and its arguments travel by cloudpickle.
        ranks: Number of ranks.
        nodes: Pretended hosts; ranks are split evenly among them, in order (LOCAL_RANK, GROUP_RANK).
        device: ``"auto"`` (a GPU a rank where there are any), ``"cpu"`` or ``"cuda"``.
        pace: Hardware the learner does not own, a `labkit.pace.Pace`; ``None`` is as fast as it goes. Messages,
            sections and barriers take what they would there; torch's own collectives raise ValueError.
        timeout: Seconds for `fn`; starting the ranks has a limit of its own.
        record: Note every operation. ``False`` uses torch's bare backends: no trace, no disagreement found.

    Returns:
        A `Run`.

    Raises:
        ValueError, TypeError: An argument is not usable; nothing was started.
        RunFailed: A rank failed: `Disagreement`, `RankDied`, `RankError` or `ConnectionLost`.
        RunTimeout: `timeout` is over; the message holds the operation table.

    Example:
        >>> import torch, torch.distributed as dist
        >>> def total():
        ...     t = torch.tensor([dist.get_rank() + 1])
        ...     dist.all_reduce(t)
        ...     return t.item()
        >>> labkit.run(total, ranks=3).values       # doctest: +SKIP
        [6, 6, 6]
    """
    _check(fn, ranks, nodes, device, timeout)
    _check_pace(pace, ranks, record)
    _check_not_a_rank()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from labkit.world.torchrun import run_as_rank

        done = run_as_rank(fn, args, kwargs, ranks=ranks, device=device, pace=pace, timeout=timeout, record=record)
    else:
        shape = Shape(ranks, nodes, devices.choose(device, ranks), record)
        done = _run_on_pool(shape, {"call": pack_call(fn, args, kwargs), "pace": pace}, timeout)
    name = getattr(fn, "__name__", type(fn).__name__)
    return Run(name, done.values, done.output, done.trace, done.leftovers, done.notes)


def _check_not_a_rank() -> None:
    if "LABKIT_RANK" in os.environ:
        raise RuntimeError(
            f"labkit.run was called inside rank {os.environ['LABKIT_RANK']} of a run: a rank does not start ranks. "
            "Call it from the notebook, or use torch.distributed.new_group for a part of the ranks"
        )


def _run_on_pool(shape: Shape, order: dict[str, Any], timeout: float) -> Done:
    """Take a pool, run, and keep the pool only if it is as good as new."""
    with Interrupts() as gate:
        pool = _started(shape, order)
        clean = False
        try:
            with gate.opened():
                done = collect(pool, timeout, order["pace"] is not None)
            clean = done.clean
        finally:
            if clean:
                pools.put_back(pool)
            else:
                pool.close()
    return done


def _started(shape: Shape, order: dict[str, Any]) -> Pool:
    """A pool that has been given the order."""
    for _ in range(3):
        pool = pools.take(shape)
        try:
            pool.start(order)
        except BaseException as error:
            pool.close()
            if not isinstance(error, ConnectionError):  # that one: ranks that were ended while they idled
                raise
        else:
            return pool
    raise StartError("the ranks end as soon as they have started; see `labkit doctor`")


def _check(fn: Any, ranks: Any, nodes: Any, device: Any, timeout: Any) -> None:
    """Refuse what cannot work, before anything is started."""
    if not callable(fn):
        raise TypeError(f"fn must be a function to call on every rank, not {fn!r}: pass the function, without ()")
    for name, value in (("ranks", ranks), ("nodes", nodes)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, not {value!r}")
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks={ranks}: expected at most {MOST_RANKS} on one host; use torchrun for more")
    if ranks % nodes:
        raise ValueError(f"ranks={ranks} do not divide among nodes={nodes}: choose a multiple")
    if device not in devices.CHOICES:
        raise ValueError(f"device={device!r}: expected one of {', '.join(map(repr, devices.CHOICES))}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout}: expected a positive number of seconds")


def _check_pace(pace: Any, ranks: int, record: bool) -> None:
    if pace is None:
        return
    if not isinstance(pace, Pace):
        raise TypeError(f"pace must be a labkit.pace.Pace or None, not {pace!r}")
    pace.check_ranks(ranks)
    if not record:
        raise ValueError("record=False with a pace: the recording process group applies it; leave out record=False")
