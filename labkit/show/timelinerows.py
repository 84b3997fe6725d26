"""What `show.timeline` was given, as variants with one row a rank, all in one unit of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from labkit.trace import Event, Trace

if TYPE_CHECKING:
    from labkit.pipeline.timeline import TimedAction, Timeline

#: Units in which measured seconds can be shown.
SECONDS = {"s": 1.0, "ms": 1e3, "µs": 1e6}


@dataclass(frozen=True)
class Row:
    """What one rank did.

    Attributes:
        rank: Its number.
        events: Its actions, in order.
        stages: Those that it hosts, in order: the k-th is its chunk k.
        apart: Pairs (micro-batch, stage) that have a W, until which they are held.
    """

    rank: int
    events: tuple[TimedAction, ...]
    stages: tuple[int, ...]
    apart: frozenset[tuple[int, int]]

    def chunk(self, event: TimedAction) -> int:
        return self.stages.index(event.stage)

    def word(self, event: TimedAction) -> str:
        """As `Schedule.text` writes it: "F3", or "F3.1" on a rank that hosts several stages."""
        short = f"{event.kind}{event.micro_batch}"
        return f"{short}.{event.stage}" if len(self.stages) > 1 else short

    @cached_property
    def stash(self) -> list[tuple[float, int]]:
        """(time, pairs held from then on): from the start of an F until the end of its B, or of its W."""
        changes: dict[float, int] = {}
        for event in self.events:
            if event.kind == "F":
                changes[event.start] = changes.get(event.start, 0) + 1
            elif event.kind == ("W" if (event.micro_batch, event.stage) in self.apart else "B"):
                changes[event.end] = changes.get(event.end, 0) - 1
        held, steps = 0, []
        for time in sorted(changes):
            held += changes[time]
            steps.append((time, held))
        return steps


@dataclass(frozen=True)
class Variant:
    """One of the timelines of a picture.

    Attributes:
        name: What it is called.
        timeline: Its times are in the unit of the picture.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``.
    """

    name: str
    timeline: Timeline
    source: str

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        apart = frozenset((e.micro_batch, e.stage) for e in self.timeline.events if e.kind == "W")
        rows = (self.timeline.of(rank) for rank in range(self.timeline.ranks))
        return tuple(Row(n, tuple(row), tuple(sorted({e.stage for e in row})), apart) for n, row in enumerate(rows))

    @cached_property
    def chunks(self) -> int:
        """Into how many parts a rank's share of the model is cut: a pair in the stash is one part's."""
        return max(1, self.timeline.stages // self.timeline.ranks)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Rank → how many pairs (micro-batch, stage) it holds at its peak."""
        return self.timeline.peak_stash

    @property
    def peak(self) -> int:
        return max(self.peaks)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Rank → the share of the makespan in which it does nothing."""
        return tuple(time / self.timeline.makespan for time in self.timeline.idle)


def variants_of(given: Any, unit: str | None, source: str | None) -> tuple[list[Variant], str]:
    """The variants, and the unit of their times.

    Raises:
        TypeError: Something is neither `Timeline` nor `Trace`.
        ValueError: There is nothing to draw, or simulated and measured times have no unit in common.
    """
    from labkit.pipeline.timeline import Timeline

    named = given if isinstance(given, Mapping) else {"": given}
    if not named:
        raise ValueError("there is no timeline: expected name → Timeline or Trace, such as {'1F1B': simulate(…)}")
    for value in named.values():
        if not isinstance(value, (Timeline, Trace)):
            hint = "pass its .trace" if isinstance(getattr(value, "trace", None), Trace) else "pass simulate(schedule)"
            raise TypeError(f"show.timeline draws a Timeline or a Trace, but was given {type(value).__name__}: {hint}")
    if unit is not None and not isinstance(unit, str):
        raise TypeError(f"unit is {unit!r}: expected text, such as 'ms'")
    traced = [isinstance(value, Trace) for value in named.values()]
    if any(traced) and (unit not in SECONDS if unit is not None else not all(traced)):
        raise ValueError(f"unit is {unit!r}, but measured times are seconds: expected the unit of the simulated ones, "
                         f"one of {', '.join(SECONDS)}")  # fmt: skip
    unit = ("ms" if all(traced) else "") if unit is None else unit
    found = []
    for name, value in named.items():
        if isinstance(value, Trace):
            found.append(_measured(str(name), value, unit, source))
        else:
            found.append(Variant(str(name) or value.name, value, source or "simulated"))
    if empty := [variant.name for variant in found if not variant.timeline.events]:
        raise ValueError(f"{empty[0]!r} has no action: expected a schedule that does something")
    return found, unit


def _measured(name: str, trace: Trace, unit: str, source: str | None) -> Variant:
    from labkit.pipeline.timeline import Timeline

    seconds = Timeline.from_trace(Trace(_last_step(trace), trace.ranks, trace.paced))
    scale = SECONDS[unit]
    events = tuple(e._replace(start=e.start * scale, end=e.end * scale) for e in seconds.events)
    return Variant(name or seconds.name, replace(seconds, events=events),
                   source or ("paced" if trace.paced else "measured"))  # fmt: skip


def _last_step(trace: Trace) -> list[Event]:
    """The actions of the last step of a trace: of each F, B and W the last one, an F without its B left out."""
    forward: dict[tuple[Any, ...], Event] = {}
    kept: dict[tuple[Any, ...], Event] = {}
    for event in trace.events:
        key = event.rank, event.labels.get("stage"), event.labels.get("micro_batch")
        if event.name == "F":
            forward[key] = event
        elif event.name in ("B", "W"):
            kept[(event.name, *key)] = event
            if event.name == "B" and key in forward:
                kept[("F", *key)] = forward[key]
    return list(kept.values() or forward.values())
