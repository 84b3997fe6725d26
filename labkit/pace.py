"""Hardware that the learner does not own: durations are stretched, everything else is real.

A `Pace` says how fast the hardware is. Under ``labkit.run(fn, ranks=4, pace=Pace(…))`` each rank keeps a virtual clock:
a message arrives when the link would have delivered it, a `section` ends when the other processor would have been done
with it, and each rank sleeps until then. Processes, messages and values stay what they are.

>>> pace = Pace(link=Link.ethernet_1g, compute={"forward": 0.02}, slow_ports={2: 5})
>>> pace.transfer(2_000_000, 0, 1)                              # 2 MB over 1 Gb/s; then the same into a slow port
(0.016, 5e-05)
>>> pace.transfer(2_000_000, 0, 2)
(0.08, 5e-05)
>>> with section("forward"):                                    # without a run under a pace it is only recorded
...     pass

A message is charged by the α–β model, latency + bytes / bandwidth (Hockney, "The communication challenge for MPP",
1994), with one full-duplex port a rank (the one-port model).

Nothing in this file imports torch: `labkit.world.clock` and `labkit.world.paced` make a run go by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar

from labkit.trace import label, now, span


def _number(name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf, unit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of {unit}, not {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number >= least and number > above):
        raise ValueError(f"{name}={value!r}: expected {unit}, {'positive' if above == 0 else 'at least 0'} and finite")
    return number


@dataclass(frozen=True)
class Link:
    """What lies between two ranks, the same in each direction.

    The presets are what data sheets promise for one direction, before headers. A program reaches less: some 80 to 90 %.

    ======================  =========  =====================================================================
    preset                  bandwidth  source
    ======================  =========  =====================================================================
    ``nvlink3``             300 GB/s   NVIDIA A100 data sheet: 600 GB/s both directions together
    ``nvlink4``             450 GB/s   NVIDIA H100 data sheet: 900 GB/s both directions together
    ``nvlink5``             900 GB/s   NVIDIA Blackwell (B200) data sheet: 1.8 TB/s both directions together
    ``pcie4``               31.5 GB/s  PCI-SIG, PCIe 4.0: 16 GT/s × 16 lanes × 128/130
    ``pcie5``               63.0 GB/s  PCI-SIG, PCIe 5.0: 32 GT/s × 16 lanes × 128/130
    ``infiniband_hdr``      25 GB/s    NVIDIA ConnectX-6 manual: 200 Gb/s a port
    ``infiniband_ndr``      50 GB/s    NVIDIA ConnectX-7 manual: 400 Gb/s a port
    ``ethernet_100g``       12.5 GB/s  IEEE 802.3ba
    ``ethernet_10g``        1.25 GB/s  IEEE 802.3ae
    ``ethernet_1g``         125 MB/s   IEEE 802.3ab
    ======================  =========  =====================================================================

    Latencies of NVLink (3.4 µs), PCIe (5.7 µs) and InfiniBand (14 µs) are those that NCCL reckons with for a step of a
    ring at full bandwidth (NCCL 2.21, ``src/graph/tuning.cc``, ``hwLat``, ring, simple protocol). Those of Ethernet
    (15, 20 and 50 µs) are typical for TCP through the kernel, an order of magnitude: Hurwitz and Feng ("Initial
    end-to-end performance evaluation of 10-Gigabit Ethernet", 2003) measured 20 µs at 10 Gb/s.

    Attributes:
        latency: Seconds from the moment a message is sent to the moment its first byte arrives.
        bandwidth: Bytes per second, in each direction.

    Raises:
        TypeError, ValueError: A value is no number, or not one that a link can have.

    >>> Link(latency=1e-4, bandwidth=50e6)
    Link(latency=0.0001, bandwidth=50000000.0)
    """

    latency: float
    bandwidth: float

    nvlink3: ClassVar[Link]
    nvlink4: ClassVar[Link]
    nvlink5: ClassVar[Link]
    pcie4: ClassVar[Link]
    pcie5: ClassVar[Link]
    infiniband_hdr: ClassVar[Link]
    infiniband_ndr: ClassVar[Link]
    ethernet_100g: ClassVar[Link]
    ethernet_10g: ClassVar[Link]
    ethernet_1g: ClassVar[Link]

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency", _number("latency", self.latency, least=0.0, unit="seconds"))
        object.__setattr__(self, "bandwidth", _number("bandwidth", self.bandwidth, above=0.0, unit="bytes per second"))


Link.nvlink3, Link.nvlink4, Link.nvlink5 = Link(3.4e-6, 300e9), Link(3.4e-6, 450e9), Link(3.4e-6, 900e9)
Link.pcie4, Link.pcie5 = Link(5.7e-6, 31.5e9), Link(5.7e-6, 63.0e9)
Link.infiniband_hdr, Link.infiniband_ndr = Link(14e-6, 25e9), Link(14e-6, 50e9)
Link.ethernet_100g, Link.ethernet_10g = Link(15e-6, 12.5e9), Link(20e-6, 1.25e9)
Link.ethernet_1g = Link(50e-6, 125e6)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The hardware that a run is to be timed by.

    Attributes:
        compute: Section name → seconds that it takes on every rank; see `section`.
        link: Between any two ranks.
        between: Between ranks of different nodes (``labkit.run(nodes=…)``); ``None``: the same as `link`. A rank has
            one port for both.
        slow_compute: Rank → factor on the seconds of its sections.
        slow_ports: Rank → factor on the time of every message that it sends or receives.
        slow_links: (from, to) → factor on the time of the messages from one rank to the other, not back. Of several
            factors the largest counts: the narrowest place decides.
        late: Rank → seconds that it begins after the others.

    Raises:
        TypeError, ValueError: A name, rank, factor or duration is not usable.

    >>> Pace(slow_links={(1, 2): 0.2})
    Traceback (most recent call last):
    ...
    ValueError: slow_links[(1, 2)]=0.2: expected a factor of at least 1; 5 is a fifth of the speed
    """

    compute: dict[str, float] = field(default_factory=dict)
    link: Link = Link.ethernet_10g
    between: Link | None = None
    slow_compute: dict[int, float] = field(default_factory=dict)
    slow_ports: dict[int, float] = field(default_factory=dict)
    slow_links: dict[tuple[int, int], float] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, wanted in (("link", self.link, "a Link"), ("between", self.between, "a Link or None")):
            if not isinstance(value, Link) and not (name == "between" and value is None):
                raise TypeError(f"{name} must be {wanted}, not {value!r}: for example Link.ethernet_10g")
        for f in fields(self):
            if f.name not in ("link", "between"):
                object.__setattr__(self, f.name, _checked(f.name, getattr(self, f.name)))

    def check_ranks(self, ranks: int) -> None:
        """
        Raises:
            ValueError: The pace names a rank that a run of so many ranks does not have.
        """
        for name in ("slow_compute", "slow_ports", "slow_links", "late"):
            for key in getattr(self, name):
                if wrong := [r for r in (key if isinstance(key, tuple) else (key,)) if r >= ranks]:
                    raise ValueError(f"pace: {name} names rank {wrong[0]}, but the run has ranks 0 to {ranks - 1}")

    def transfer(self, nbytes: int, source: int, target: int, per_node: int | None = None) -> tuple[float, float]:
        """What a message costs: (seconds that it keeps a port busy, latency). `per_node`: ranks of a node."""
        same = per_node is None or source // per_node == target // per_node
        link = self.link if same or self.between is None else self.between
        slow = max(
            self.slow_links.get((source, target), 1.0),
            self.slow_ports.get(source, 1.0),
            self.slow_ports.get(target, 1.0),
        )
        return nbytes / link.bandwidth * slow, link.latency

    def duration(self, name: str, rank: int) -> float | None:
        """Seconds that section `name` takes on `rank`; ``None`` when the pace does not say."""
        seconds = self.compute.get(name)
        return None if seconds is None else seconds * self.slow_compute.get(rank, 1.0)


def _checked(name: str, given: Any) -> dict:
    """A copy of one of `Pace`'s dictionaries, its keys and values as they must be."""
    if not isinstance(given, dict):
        raise TypeError(f"{name} must be a dictionary, such as {_EXAMPLES[name]}, not {given!r}")
    return {_key(name, key): _value(f"{name}[{key!r}]", name, value) for key, value in given.items()}


_EXAMPLES = {"compute": "{'forward': 0.02}", "slow_compute": "{2: 5}", "slow_ports": "{2: 5}",
             "slow_links": "{(1, 2): 5}", "late": "{2: 0.1}"}  # fmt: skip


def _key(name: str, key: Any) -> Any:
    if name == "compute":
        if not isinstance(key, str):
            raise TypeError(f"compute names {key!r}: expected the name of a section, such as {_EXAMPLES[name]}")
        return key
    if name == "slow_links":
        if not isinstance(key, tuple) or len(key) != 2:
            raise TypeError(f"slow_links names {key!r}: expected (from, to), such as {_EXAMPLES[name]}")
        if key[0] == key[1]:
            raise ValueError(f"slow_links names {key!r}: expected two different ranks")
        return _rank(name, key[0]), _rank(name, key[1])
    return _rank(name, key)


def _rank(name: str, rank: Any) -> int:
    if isinstance(rank, bool) or not isinstance(rank, Integral):
        raise TypeError(f"{name} names {rank!r}: expected a rank, such as {_EXAMPLES[name]}")
    if rank < 0:
        raise ValueError(f"{name} names rank {rank}: expected 0 or more")
    return int(rank)


def _value(shown: str, name: str, value: Any) -> float:
    if name == "compute":
        return _number(shown, value, above=0.0, unit="seconds")
    if name == "late":
        return _number(shown, value, least=0.0, unit="seconds")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{shown} must be a factor, not {value!r}")
    if not 1 <= float(value) < math.inf:
        raise ValueError(f"{shown}={value!r}: expected a factor of at least 1; 5 is a fifth of the speed")
    return float(value)


def section(name: str):
    """A piece of work: ``with pace.section("forward"): …``. It is recorded as computing (`labkit.trace.span`).

    Under a pace with ``compute={"forward": 0.02}`` it ends 0.02 s, times the rank's `slow_compute`, after it began, on
    the virtual clock; the rest of the time is slept. If the real work takes longer (by more than 1 ms and 2 %), the
    clock moves with it and `Run.notes` says so. A name that the pace does not know is recorded only.
    """
    if not isinstance(name, str):
        raise TypeError(f"section needs a name, not {name!r}: with pace.section('forward'): …")
    return _section(name)


def backward_sections(module: Any, name: str, layer: Any = None) -> None:
    """Make the backward of `module` a section: it takes the time that the pace gives `name`, then its gradients come.

    The time passes before the module's real backward runs, which takes none: so a gradient is there, and a bucket may
    leave, when the section ends. Recorded as computing, with phase ``"backward"`` and the label `layer`.

    Args:
        module: A `torch.nn.Module` whose output is a tensor.
        name: Of the section, as in ``Pace(compute={name: seconds})``.
        layer: Label; ``None``: none.
    """

    def spend(_: Any) -> None:
        with label(**({} if layer is None else {"layer": layer})), _section(name, phase="backward"):
            pass

    def ask(_: Any, __: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(spend)

    module.register_forward_hook(ask)


@contextmanager
def _section(name: str, **fields: Any) -> Iterator[None]:
    with span(name, kind="compute", **fields), _running.section(name) if _running is not None else nullcontext():
        yield


def elapsed() -> float:
    """Seconds on the wall since all ranks of this run began together; `late` ranks began later.

    A rank that measures from its own first line to its last leaves out what it had been waited for.

    Raises:
        RuntimeError: There is no pace, so nothing says when the others began.
    """
    if _running is None:
        raise RuntimeError("pace.elapsed() counts from the common start of a paced run: labkit.run(…, pace=Pace(…))")
    return now() - _running.origin


#: The clock of this process, a `labkit.world.clock.VirtualClock`, while a run under a pace goes on.
_running: Any = None


def running() -> Any:
    """The virtual clock of this rank; ``None`` without a pace."""
    return _running


def run_on(clock: Any) -> None:
    """From here on `section` and the process groups go by `clock`; ``None``: by no pace."""
    global _running
    _running = clock
