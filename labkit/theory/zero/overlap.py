"""How long a step of stage 3 takes: one stream computes, one communicates, and units are gathered before their turn.

Sources: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023), sections 3.3.1 and
3.3.2, for the order; the ring's times from `labkit.theory.communication`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.theory.communication.formulas import time
from labkit.theory.communication.given import number, whole

ROOT = -1  #: number of the root unit, as in the labels of `labkit.zero`


@dataclass(frozen=True, slots=True)
class Unit:
    """What is gathered, computed and freed together: a block.

    Attributes:
        nbytes: Bytes of its gathered parameters, padding included.
        forward, backward: Seconds that its computation takes on a rank.
        gradient_bytes: Bytes that are reduce-scattered; ``None``: as many as `nbytes`.
    """

    nbytes: float
    forward: float
    backward: float
    gradient_bytes: float | None = None

    def __post_init__(self) -> None:
        number("nbytes", self.nbytes, "bytes")
        number("forward", self.forward, "seconds")
        number("backward", self.backward, "seconds")
        if self.gradient_bytes is not None:
            number("gradient_bytes", self.gradient_bytes, "bytes")


@dataclass(frozen=True, slots=True)
class Timed:
    """Something that a rank does.

    Attributes:
        name: ``"gather"``, ``"forward"``, ``"backward"`` or ``"reduce_scatter"``.
        unit: Number of the unit, from 0; `ROOT` is the root's.
        start, end: Seconds since the step began.
        lane: ``"compute"`` or ``"comm"``.
        phase: ``"forward"`` or ``"backward"``.
    """

    name: str
    unit: int
    start: float
    end: float
    lane: str
    phase: str


@dataclass(frozen=True, slots=True)
class Step:
    """A step's forward and backward on one rank; all ranks do the same at the same time.

    Attributes:
        events: In the order in which they begin; of two at once, the one that was asked for first.
    """

    events: tuple[Timed, ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last gradient is reduced."""
        return max((e.end for e in self.events), default=0.0)

    @property
    def computing(self) -> float:
        """Seconds in which the rank computes."""
        return sum(e.end - e.start for e in self.events if e.lane == "compute")

    @property
    def exposed(self) -> float:
        """Seconds in which it only waits for communication."""
        return self.makespan - self.computing


def step_time(
    units: Sequence[Unit], ranks: int, alpha: float, beta: float, *, root: Unit | None = None, prefetch: int = 1,
    keep_after_forward: bool = False,
) -> Step:  # fmt: skip
    """Play forward and backward of fully sharded units, and say when each thing happens.

    Forward takes units 0 … L−1, backward L−1 … 0. Before it computes, a unit waits for its own gather; with `prefetch`
    it then asks for the next one's, which travels while it computes. After its backward a unit waits until the
    reduce-scatter of the one before is over, and asks for its own; without `prefetch` it waits for that too. What was
    asked for is done in that order, one at a time.

    Args:
        units: In the order of forward.
        ranks: N.
        alpha: Seconds a message; beta: seconds a byte, 1/bandwidth.
        root: What lies around the units, such as an embedding and a head: gathered before them in each pass, reduced
            after them. Its forward is computed after the units', its backward before them: a head's.
        prefetch: How many units are asked for ahead; 0: each when its turn comes.
        keep_after_forward: What forward gathered stays, and backward gathers nothing.

    Raises:
        TypeError: A unit is no `Unit`; a number is none.
        ValueError: There are no units; a number is out of range.

    Assumptions: ranks in lockstep; asking takes no time; reducing and freeing neither. Gathers and
    reduce-scatters take turns on one link, rings, as formulas of `theory.communication`.

    >>> blocks = [Unit(nbytes=4e6, forward=5e-3, backward=10e-3)] * 4
    >>> [round(step_time(blocks, 4, 0, 1e-9, prefetch=n).makespan * 1e3, 3) for n in (0, 1)]  # a gather takes 3 ms
    [96.0, 69.0]
    """
    _check(units, root, prefetch)
    every = dict(enumerate(units)) | ({} if root is None else {ROOT: root})
    play = _Play(
        prefetch,
        {n: time("all_gather", "ring", ranks, unit.nbytes, alpha, beta) for n, unit in every.items()},
        {n: time("reduce_scatter", "ring", ranks, _reduced(unit), alpha, beta) for n, unit in every.items()},
    )
    outside = [] if root is None else [ROOT]
    order = list(range(len(units)))
    for n in outside + order:
        play.enter(n, outside + order, "forward")
        if n != ROOT:
            play.compute(n, every[n].forward, "forward")
    if root is not None:
        play.compute(ROOT, root.forward, "forward")
    if not keep_after_forward:
        play.gathered.clear()
    for n in outside + order[::-1]:
        play.enter(n, outside + order[::-1], "backward")
        play.compute(n, every[n].backward, "backward")
        if n != ROOT:
            play.reduce(n)
    if root is not None:
        play.reduce(ROOT)
    return Step(tuple(sorted(play.events, key=lambda e: e.start)))


def _check(units: Sequence[Unit], root: Unit | None, prefetch: int) -> None:
    if not units:
        raise ValueError("there are no units: expected one for each block, in the order of forward")
    for unit in [*units, *([] if root is None else [root])]:
        if not isinstance(unit, Unit):
            raise TypeError(f"a unit is {unit!r}: expected Unit(nbytes, forward, backward)")
    whole("prefetch", prefetch, 0)


def _reduced(unit: Unit) -> float:
    return unit.nbytes if unit.gradient_bytes is None else unit.gradient_bytes


@dataclass
class _Play:
    """A rank's clocks, and what it does by them.

    Attributes:
        prefetch: Units asked for ahead.
        gather, scatter: Unit → seconds of its all-gather, and of its reduce-scatter.
        now: Until when the rank computes or waits.
        sends: Until when its link is taken.
        scattered: When the last reduce-scatter is over.
        gathered: Unit → when its parameters are, or will be, there.
    """

    prefetch: int
    gather: dict[int, float]
    scatter: dict[int, float]
    now: float = 0.0
    sends: float = 0.0
    scattered: float = 0.0
    gathered: dict[int, float] = field(default_factory=dict)
    events: list[Timed] = field(default_factory=list)

    def enter(self, unit: int, order: list[int], phase: str) -> None:
        """Wait until a unit is there, and ask for those that follow it in `order`."""
        self._ask(unit, phase)
        self.now = max(self.now, self.gathered[unit])
        at = order.index(unit) + 1
        for ahead in order[at : at + self.prefetch]:
            self._ask(ahead, phase)

    def compute(self, unit: int, seconds: float, phase: str) -> None:
        start, self.now = self.now, self.now + seconds
        self.events.append(Timed(phase, unit, start, self.now, "compute", phase))

    def reduce(self, unit: int) -> None:
        """Ask for a reduce-scatter: one is under way at a time."""
        self.now = max(self.now, self.scattered)
        self.scattered = self._send("reduce_scatter", unit, self.scatter[unit], "backward")
        if not self.prefetch:
            self.now = self.scattered

    def _ask(self, unit: int, phase: str) -> None:
        """Gather a unit, unless it is there or on its way."""
        if unit not in self.gathered:
            self.gathered[unit] = self._send("gather", unit, self.gather[unit], phase)

    def _send(self, name: str, unit: int, seconds: float, phase: str) -> float:
        start = max(self.now, self.sends)
        self.sends = start + seconds
        self.events.append(Timed(name, unit, start, self.sends, "comm", phase))
        return self.sends
