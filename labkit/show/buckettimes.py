"""When backward computed and when its buckets were reduced, from a trace or from plain numbers.

>>> plain = BucketTimes([(1, 0.0, 0.02), (0, 0.02, 0.04)], [(0, 8, 0.02, 0.03), (1, 8, 0.04, 0.05)])
>>> times = read("two", plain, rank=0)
>>> round(times.exposed, 3), times.buckets[0].ready
(0.01, 0.02)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from labkit.trace import Event, Trace

#: A bucket that begins within this share of the whole after the one before it ended has waited for it.
WAITED = 0.01


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """What `show.buckets` draws of one variant, as plain numbers.

    Attributes:
        backward: (layer, start, end) of each section of backward, in seconds.
        buckets: (number, bytes, start, end) of each reduction; where known, a fifth, the names of its parameters, and
            a sixth, the seconds at which its last gradient was there.
    """

    backward: Sequence[tuple[Any, float, float]]
    buckets: Sequence[tuple[Any, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Section:
    """A piece of backward; seconds since backward began."""

    layer: Any
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """A reduction; seconds since backward began.

    Attributes:
        ready: When its last gradient was there; ``None`` where that is not known.
    """

    number: int
    nbytes: int
    start: float
    end: float
    parameters: tuple[str, ...] = ()
    ready: float | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """One variant."""

    sections: tuple[Section, ...]
    buckets: tuple[Bucket, ...]

    @property
    def backward(self) -> float:
        """When backward ends."""
        return max(s.end for s in self.sections)

    @property
    def whole(self) -> float:
        """When backward and reductions have ended."""
        return max([self.backward, *(b.end for b in self.buckets)])

    @property
    def exposed(self) -> float:
        """What of the reductions comes after backward."""
        return self.whole - self.backward


def read(name: str, given: Any, rank: int, parameters: Sequence[Sequence[str]] = ()) -> Times:
    """One variant, its times counted from the beginning of backward.

    Args:
        parameters: The names in each bucket, by its number; those of plain numbers go before.

    Raises:
        TypeError: `given` is neither a trace nor `BucketTimes`, or a time is no number.
        ValueError: there is no section of backward, or none of the events belongs to a bucket.
    """
    if isinstance(given, Trace):
        sections, buckets = _of_trace(name, given, rank)
    elif isinstance(given, BucketTimes):
        sections = [Section(*_times(name, s, 3)) for s in given.backward]
        buckets = [_plain(name, b) for b in given.buckets]
    else:
        raise TypeError(f"{name!r} is {type(given).__name__}: expected a labkit.trace.Trace or show.BucketTimes")
    if not sections:
        raise ValueError(f"{name!r} has no backward: name its layers with pace.backward_sections(module, name, layer)")
    sections.sort(key=lambda s: s.start)
    zero = sections[0].start
    sections = [Section(s.layer, s.start - zero, s.end - zero) for s in sections]
    buckets = [
        replace(b, start=b.start - zero, end=b.end - zero, ready=None if b.ready is None else b.ready - zero)
        for b in buckets
    ]
    named = [replace(b, parameters=b.parameters or _named(parameters, b.number)) for b in buckets]
    return Times(tuple(sections), tuple(_in_turn(named, sections)))


def _named(parameters: Sequence[Sequence[str]], number: int) -> tuple[str, ...]:
    return tuple(map(str, parameters[number])) if 0 <= number < len(parameters) else ()


def _times(name: str, given: Any, least: int) -> tuple[Any, ...]:
    """A tuple whose last two of the first `least` are a start and an end."""
    if not isinstance(given, (tuple, list)) or len(given) < least:
        raise TypeError(f"{name!r} has {given!r}: expected (layer, start, end), or (number, bytes, start, end, names)")
    start, end = given[least - 2 : least]
    if not all(isinstance(t, (int, float)) and isfinite(t) for t in (start, end)):
        raise TypeError(f"{name!r} has {given!r}: expected its start and end as seconds")
    if end < start:
        raise ValueError(f"{name!r} has {given!r}, which ends before it starts")
    return tuple(given)


def _plain(name: str, given: Any) -> Bucket:
    number, nbytes, start, end, *more = _times(name, given, 4)
    names, ready = more[0] if more else (), more[1] if len(more) > 1 else None
    return Bucket(number, nbytes, start, end, tuple(map(str, names)), ready)


# A trace


def _of_trace(name: str, trace: Trace, rank: int) -> tuple[list[Section], list[Bucket]]:
    """The last step of a rank."""
    events = [e for e in trace.of(rank) if e.end is not None]
    heads = _heads(events)
    if not heads:
        raise ValueError(f"{name!r} has no event with the label bucket: reduce inside with trace.label(bucket=n)")
    first = min(e.labels["bucket"] for e in heads)
    begun = max(n for n, e in enumerate(heads) if e.labels["bucket"] == first)
    before = max((e.end for e in heads[:begun] if e.end is not None), default=float("-inf"))
    sections = [
        Section(e.labels.get("layer", e.name), e.start, e.end)
        for e in events if e.kind == "compute" and e.phase == "backward" and e.start >= before and e.end is not None
    ]  # fmt: skip
    return sections, [
        Bucket(e.labels["bucket"], e.nbytes, e.start, e.end) for e in heads[begun:] if e.end is not None
    ]  # fmt: skip


def _heads(events: list[Event]) -> list[Event]:
    """The reductions themselves, not what happens inside them."""
    by_index = {e.index: e for e in events}
    reductions = [e for e in events if "bucket" in e.labels and e.kind in ("collective", "span")]
    inside = {e.index for e in reductions if e.parent in by_index and "bucket" in by_index[e.parent].labels}
    return sorted((e for e in reductions if e.index not in inside), key=lambda e: (e.start, e.index))


# Which bucket waits for what


def _in_turn(buckets: list[Bucket], sections: list[Section]) -> list[Bucket]:
    """One after the other, as one link moves them, and with the moment when each was ready.

    What was asked for while the one before was under way begins when that has ended.
    """
    done: list[Bucket] = []
    near = WAITED * max([s.end for s in sections] + [b.end for b in buckets])
    for bucket in sorted(buckets, key=lambda b: (b.start, b.number)):
        free = done[-1].end if done else float("-inf")
        start = min(max(bucket.start, free), bucket.end)
        waited = abs(bucket.start - free) < near
        ready = bucket.ready
        if ready is None:
            ready = _last_gradient(bucket, sections, None if waited else bucket.start + near / 10)
        done.append(replace(bucket, start=start, ready=ready))
    return done


def _last_gradient(bucket: Bucket, sections: list[Section], asked: float | None) -> float | None:
    """The end of the section that its last gradient came from.

    That is the last one that ended before the bucket was `asked` for. Of one that had to wait only the names tell:
    ``"blocks.3.mlp.weight"`` belongs to layer 3.
    """
    if asked is not None:
        return max((s.end for s in sections if s.end <= asked), default=None)
    words = {word for name in bucket.parameters for word in name.split(".")}
    return max((s.end for s in sections if str(s.layer) in words and s.end <= bucket.start), default=None)


def variants_of(variants: Any, rank: int, parameters: Mapping[str, Sequence[Sequence[str]]] | None) -> dict[str, Times]:
    """
    Raises:
        TypeError, ValueError: `variants` is no mapping, is empty, or as `read`.
    """
    if not isinstance(variants, Mapping) or not all(isinstance(k, str) for k in variants):
        raise TypeError(f"variants is {variants!r}: expected label → trace, such as {{'25 MiB': run.trace}}")
    if not variants:
        raise ValueError("variants is empty: expected at least one label with its trace")
    if odd := [name for name in parameters or {} if name not in variants]:
        raise ValueError(f"parameters has {odd[0]!r}, but the variants are {', '.join(variants)}")
    return {name: read(name, given, rank, (parameters or {}).get(name, ())) for name, given in variants.items()}
