"""`show.buckets`: when each bucket's reduction runs beside backward, and how much of it comes after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from labkit.show.buckettimes import Bucket, BucketTimes, Times, variants_of
from labkit.show.bucketview import WIRES, Chart, View, ms
from labkit.show.figure import NARROW, Drawing, Figure, Table, source_of
from labkit.show.guesses import guess as noted
from labkit.show.guesses import guessed_numbers
from labkit.show.svg import size_of
from labkit.show.words import count, say
from labkit.trace import Trace

NAMED = 6  #: parameters that an announcement names
LISTED = 16  #: buckets of a variant that are listed in plain text


def buckets(
    variants: Mapping[str, Trace | BucketTimes],
    *,
    rank: int = 0,
    sizes: Mapping[str, float] | None = None,
    parameters: Mapping[str, Sequence[Sequence[str]]] | None = None,
    guess: str | Mapping[str, str] | None = None,
    axis_to: float | None = None,
    title: str | None = None,
    source: str | None = None,
) -> Figure:
    """Draw backward and, below it, the reductions of its buckets; in red what of them is left when backward has ended.

    A line leads from a bucket's last gradient to the start of its reduction. Of reductions that were asked for while
    another one was under way the picture shows when their turn came.

    Args:
        variants: Label → the trace of a paced run, or `BucketTimes`. In a trace, backward is made of events of kind
            "compute" with phase "backward" (`pace.backward_sections`), a reduction is a collective or span with the
            label `bucket`. Of several steps the last is drawn.
        rank: Whose events.
        sizes: Label → bytes of a bucket, for the curve of time against size; left out, those of the largest bucket.
            Variants that are not in it are no points of the curve.
        parameters: Label → the names in each bucket, in the order of their numbers.
        guess: The key of a `show.predict` about the time of backward and reductions, drawn as a dashed line; or
            label → key.
        axis_to: Seconds at which the axis ends, to compare pictures; left out, it holds everything.
        title: The finding; left out, it is derived.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``; left out, the traces know.

    Returns:
        A figure that steps from bucket to bucket with the arrow keys and names the parameters of each.

    Raises:
        TypeError: a variant is neither trace nor `BucketTimes`, or a number none.
        ValueError: a variant has no backward or no buckets, a label is unknown, or `axis_to` would cut something.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020), section 3.2.

    >>> backward = [(1, 0.0, 0.020), (0, 0.020, 0.040)]
    >>> print(buckets({"two": BucketTimes(backward, [(0, 2**20, 0.020, 0.035), (1, 2**20, 0.040, 0.055)])}))
    15.0 ms of 30.0 ms of reductions are exposed: backward has ended by then [measured]
      B: backward, a box a layer or several. b: buckets; a line leads from a bucket's last gradient to its start.
      two: 55.0 ms, backward 40.0 ms, exposed 15.0 ms, 2 buckets
      two · b0 · 1 MiB · ready 20.0 ms · starts 20.0 ms · ends 35.0 ms
      two · b1 · 1 MiB · ready 40.0 ms · starts 40.0 ms · ends 55.0 ms
    """
    found = variants_of(variants, rank, parameters)
    own, shared = guessed_numbers(guess, found, "s")
    tips = {name: {b.number: _said(name, b) for b in times.buckets} for name, times in found.items()}
    chart = Chart(found, _sizes(sizes, found), _top(found, axis_to, [shared, *own.values()]), shared, own, tips)
    views: dict[int, View] = {}
    chosen = [(name, b) for name, times in found.items() for b in times.buckets]

    def view(width: int) -> View:
        if width not in views:
            views[width] = View(chart, width)
        return views[width]

    def draw(width: int, frame: int | None) -> Drawing:
        return view(width).draw(chosen[frame - 1] if frame else None)

    paced = any(isinstance(t, Trace) and t.paced for t in variants.values())
    return Figure(
        _finding(found) if title is None else title, draw, _twin(found), source=source_of(source, paced),
        notes=_notes(found, view(NARROW), guess, own), sheets=("bars", "buckets"), start=0,
        says=[say("buckets.overview", said=_finding(found)), *(tips[name][b.number] for name, b in chosen)],
    )  # fmt: skip


def _top(found: Mapping[str, Times], axis_to: Any, guesses: list[float | None]) -> float:
    longest = max(times.whole for times in found.values())
    if axis_to is not None:
        if isinstance(axis_to, (bool, str)) or not hasattr(axis_to, "__float__"):
            raise TypeError(f"axis_to is {axis_to!r}: expected seconds, such as 0.1")
        if not isfinite(axis_to) or axis_to < longest:
            raise ValueError(f"axis_to is {axis_to!r}, but there are {longest:g} s to show: expected at least that")
        return float(axis_to)
    near = [g for g in guesses if g is not None and g <= 2 * longest]
    return max([longest, *near])


def _sizes(sizes: Any, found: Mapping[str, Times]) -> dict[str, float]:
    """The bytes of a bucket of each variant that is a point of the curve."""
    if sizes is None:
        return {n: max(b.nbytes for b in t.buckets) for n, t in found.items() if any(b.nbytes for b in t.buckets)}
    if not isinstance(sizes, Mapping):
        raise TypeError(f"sizes is {sizes!r}: expected label → bytes of a bucket")
    for name, n in sizes.items():
        if name not in found:
            raise ValueError(f"sizes has {name!r}, but the variants are {', '.join(found)}")
        if isinstance(n, (bool, str)) or not hasattr(n, "__float__") or not isfinite(n) or n <= 0:
            raise ValueError(f"sizes has {n!r} for {name!r}: expected a number of bytes above 0")
    return dict(sizes)


# What is written


def _finding(found: Mapping[str, Times]) -> str:
    if len(found) == 1:
        (times,) = found.values()
        busy = sum(b.end - b.start for b in times.buckets)
        key = "buckets.one" if times.exposed else "buckets.one_hidden"
        values = {"exposed": ms(times.exposed)} if times.exposed else {}
        return say(key, busy=ms(busy), **values)
    order = sorted(found, key=lambda name: found[name].whole)
    best, worst = order[0], order[-1]
    return say("buckets.best", best=best, time=ms(found[best].whole), exposed=ms(found[best].exposed), worst=worst,
               most=ms(found[worst].whole), cost=ms(found[worst].exposed))  # fmt: skip


def _notes(found: Mapping[str, Times], view: View, guess: Any, own: Mapping[str, float]) -> list[str]:
    notes = [say("buckets.legend")]
    if any(view.unnamed(times) for times in found.values()):
        notes.append(say("buckets.unnamed"))
    if any(len(times.buckets) > WIRES for times in found.values()):
        notes.append(say("buckets.wires"))
    if any(b.ready is None for times in found.values() for b in times.buckets):
        notes.append(say("buckets.unready"))
    if own:
        told = ", ".join(say("bars.one_guess", label=name, value=ms(n)) for name, n in own.items())
        notes.append(say("bars.own_guesses", guesses=told))
    words = noted(guess) if isinstance(guess, str) else None
    return [*notes, say("bars.word_guess", guess=words)] if isinstance(words, str) else notes


def _said(name: str, b: Bucket) -> str:
    """What is announced of a bucket."""
    key = "buckets.said" if b.ready is not None else "buckets.said_unready"
    ready = {"ready": ms(b.ready)} if b.ready is not None else {}
    told = say(key, variant=name, n=b.number, size=size_of(b.nbytes), start=ms(b.start), end=ms(b.end), **ready)
    if not b.parameters:
        return told
    names = list(b.parameters[:NAMED])
    if len(b.parameters) > NAMED:
        names.append(count("buckets.more", len(b.parameters) - NAMED))
    return say("buckets.said_parameters", said=told, names=", ".join(names))


def _twin(found: Mapping[str, Times]) -> Table:
    keys = ("buckets.column_variant", "buckets.column_bucket", "buckets.column_size", "buckets.column_ready",
            "buckets.column_start", "buckets.column_end", "buckets.column_parameters")  # fmt: skip
    columns = tuple(say(key) for key in keys)
    rows, lines = [], []
    for name, times in found.items():
        held = count("buckets.count", len(times.buckets))
        lines.append(say("buckets.line", variant=name, whole=ms(times.whole), backward=ms(times.backward),
                         exposed=ms(times.exposed), count=held))  # fmt: skip
        told = [_row(name, b) for b in times.buckets]
        rows += told
        if len(told) <= LISTED:
            lines += [_line(columns, row) for row in told]
    return Table(columns, rows, lines=lines)


def _row(name: str, b: Bucket) -> tuple[str, ...]:
    ready = "" if b.ready is None else ms(b.ready)
    return (name, say("buckets.number", n=b.number), size_of(b.nbytes), ready, ms(b.start), ms(b.end),
            ", ".join(b.parameters))  # fmt: skip


def _line(columns: tuple[str, ...], row: tuple[str, ...]) -> str:
    named = zip(columns[3:6], row[3:6], strict=True)
    return " · ".join([*row[:3], *(f"{column} {cell}" for column, cell in named if cell), *row[6:]]).removesuffix(" · ")
