"""`show.segments`: what checkpoints hold for each number of segments, and of what that is made."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, isfinite, sqrt
from typing import Any

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.guesses import guess as noted
from labkit.show.guesses import guessed
from labkit.show.held import Unit
from labkit.show.segmentview import Chart, View
from labkit.show.words import count, say

MOST = 512  #: layers
CUT = 3.0  #: where the axis ends, in multiples of the least: √L segments hold 2.2 times the least, one holds far more


class SegmentsFigure(Figure):
    """A figure whose curve is computed and whose points, if there are any, are measured."""

    points = False

    @property
    def origin(self) -> str:
        computed = say("memory.computed")
        return f"{computed} · {say('figure.measured')}" if self.points else computed


def segments(
    predicted: Mapping[int, float],
    *,
    kept: float,
    inside: float,
    best: float,
    measured: Mapping[int, float] | None = None,
    limit: float | None = None,
    capacity: float | None = None,
    guess: str | None = None,
    start: int | None = None,
    axis_to: float | None = None,
    unit: str = "B",
    title: str | None = None,
) -> Figure:
    """Draw what L layers in c segments hold, K kept inputs and R recomputed insides, and step from c to c.

    Below the curve the layers stand in their segments: of each its input is kept, and everything inside the one that
    backward is in.

    Args:
        predicted: c → bytes, for every c from 1 to L: ``{c: segmented(L, c, kept, inside) for c in range(1, L + 1)}``
            with `labkit.theory.memory.segmented`.
        kept: A_in, bytes of a layer's input.
        inside: A_int, bytes of what a layer keeps without checkpoints.
        best: Where the least is if c may be any number, `labkit.theory.memory.best_segments`.
        measured: c → bytes, drawn as points.
        limit: Up to how many layers every layer by itself holds less than √L segments
            (`labkit.theory.memory.every_layer_limit`); written below the picture.
        capacity: Bytes that may be held, drawn as a line.
        guess: The key of a `show.predict` about the best c (without a unit), drawn as a dashed line.
        start: The c to begin with, which is also what stands where no kernel runs; left out, the one that holds least.
        axis_to: Bytes at which the axis ends, to compare pictures; left out, three times the least.
        unit: ``"B"``, or what else all numbers count, such as ``"sbh"``.
        title: The finding; left out, it says which c holds least, and what √L segments hold.

    Returns:
        A figure that steps through c = 1 … L with the slider, the arrow keys, Home and End.

    Raises:
        TypeError: `predicted` or `measured` is no mapping, or a number none.
        ValueError: a c is missing or unknown, or a number is not above 0.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4; the bytes of a layer:
    Korthikanti et al. (2022), section 5.

    >>> held = {c: 2 * c + 34 * -(-4 // c) for c in range(1, 5)}
    >>> print(segments(held, kept=2, inside=34, best=4, unit="sbh"))
    Of 4 layers, every layer by itself holds least: 42 sbh; √L = 2 segments hold 72 sbh, 1.7 times as much [computed]
      Steps: the longest of c segments has ⌈L/c⌉ layers.
      1 segment · kept inputs 2 sbh · inside of 4 layers 136 sbh · in all 138 sbh
      2 segments · kept inputs 4 sbh · inside of 2 layers 68 sbh · in all 72 sbh
      4 segments · kept inputs 8 sbh · inside of 1 layer 34 sbh · in all 42 sbh
    """
    held = _held("predicted", predicted)
    layers = len(held)
    if sorted(held) != list(range(1, layers + 1)) or not 2 <= layers <= MOST:
        raise ValueError(f"predicted has {list(held)!r:.60}: expected bytes for each c from 1 to L, at most {MOST}")
    points = _held("measured", measured or {})
    if odd := [c for c in points if c not in held]:
        raise ValueError(f"measured has {odd[0]!r} segments: expected 1 to {layers}, the number of layers")
    least = min(held, key=lambda c: held[c])
    begin = least if start is None else start
    if begin not in held:
        raise ValueError(f"start is {start!r}: expected a number of segments, 1 to {layers}")
    card = None if capacity is None else _number("capacity", capacity)
    own = None if guess is None else guessed(guess, "")
    top = _top(held, points, card) if axis_to is None else _number("axis_to", axis_to)
    chart = Chart(held, _number("kept", kept), _number("inside", inside), _number("best", best), least, points,
                  top, Unit.of(top) if unit == "B" else Unit(1, unit), card, own)  # fmt: skip
    views: dict[int, View] = {}

    def draw(width: int, frame: int | None) -> Drawing:
        if width not in views:
            views[width] = View(chart, width)
        return views[width].draw(begin if frame is None else frame + 1)

    figure = SegmentsFigure(_finding(chart) if title is None else title, draw, _twin(chart, begin),
                            notes=_notes(chart, limit, guess), says=[said(chart, c) for c in held], start=begin - 1,
                            sheets=("bars", "memory", "tricks"))  # fmt: skip
    figure.points = bool(points)
    return figure


def _held(name: str, held: Any) -> dict[int, float]:
    """c → bytes, by c."""
    if not isinstance(held, Mapping):
        raise TypeError(f"{name} is {held!r:.60}: expected number of segments → bytes, such as {{1: 2178, 2: 1092}}")
    if odd := [c for c in held if isinstance(c, bool) or not isinstance(c, int)]:
        raise TypeError(f"{name} has {odd[0]!r}: expected a whole number of segments")
    return {c: _number(f"{name}[{c}]", held[c]) for c in sorted(held)}


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {value!r}: expected a number, such as 2e6")
    if not isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}: expected a finite number above 0")
    return float(value)


def _top(held: Mapping[int, float], points: Mapping[int, float], card: float | None) -> float:
    """The axis holds the least, √L, every layer, all points, and the line; fewer segments may reach beyond it."""
    least, layers = min(held.values()), len(held)
    inside = [CUT * least, 1.05 * held[layers], 1.05 * held[root(layers)], 1.05 * (card or 0)]
    return max([*inside, *(1.05 * n for n in points.values() if n <= 2 * CUT * least)])


def root(layers: int) -> int:
    """√L, to the nearest whole number."""
    return round(sqrt(layers))


# What is written


def _finding(chart: Chart) -> str:
    layers, unit = chart.layers, chart.unit
    c = root(layers)
    values = {"layers": layers, "size": unit.told(chart.held[chart.least]), "root": c,
              "more": unit.told(chart.held[c]), "times": f"{chart.held[c] / chart.held[chart.least]:.2g}"}  # fmt: skip
    if chart.least == c:
        return say("segments.title_root", layers=layers, root=c, size=values["size"])
    if chart.least == layers:
        return say("segments.title_every", **values)
    return say("segments.title", best=chart.least, **values)


def said(chart: Chart, c: int) -> str:
    """What is announced of c segments."""
    unit, full, least = chart.unit, chart.held[c], chart.held[chart.least]
    share = say("segments.times", times=f"{full / least:.3g}") if full > least else say("segments.least")
    words = say("segments.said", c=c, kept=count("segments.inputs", c), inputs=unit.told(chart.inputs(c)),
                layers=chart.layers_words(c), inside=unit.told(full - chart.inputs(c)), size=unit.told(full),
                share=share)  # fmt: skip
    if chart.capacity is None:
        return words
    verdict = say("segments.fits" if full <= chart.capacity else "segments.over")
    return say("segments.said_card", said=words, verdict=verdict)


def _notes(chart: Chart, limit: float | None, guess: str | None) -> list[str]:
    notes = [say("segments.steps")] if chart.layers > 2 else []
    if chart.measured:
        off = max(abs(n - chart.held[c]) for c, n in chart.measured.items())
        points = count("segments.points", len(chart.measured))
        notes.append(say("segments.measured_off", points=points, delta=f"{off:,.6g} {chart.unit_of_one}") if off else
                     say("segments.measured_exact", points=points))  # fmt: skip
    if limit is not None:
        notes.append(say("segments.limit", limit=f"{ceil(_number('limit', limit) - 1e-9):,}"))
    words = noted(guess) if guess is not None else None
    return [*notes, say("bars.word_guess", guess=words)] if isinstance(words, str) else notes


def _twin(chart: Chart, begin: int) -> Table:
    keys = ("segments.column_c", "segments.column_kept", "segments.column_inside", "segments.column_all",
            "segments.column_measured", "segments.column_delta")  # fmt: skip
    rows = [_row(chart, c) for c in chart.held]
    marked = sorted({1, root(chart.layers), chart.least, chart.layers, begin, *chart.measured})
    return Table(tuple(say(key) for key in keys), rows, lines=[_line(chart, c) for c in marked])


def _row(chart: Chart, c: int) -> tuple[str, ...]:
    full, inputs, point = chart.held[c], chart.inputs(c), chart.measured.get(c)
    told = [f"{n:,.10g} {chart.unit_of_one}" for n in (inputs, full - inputs, full)]
    if point is None:
        return (str(c), *told, "", "")
    return (str(c), *told, f"{point:,.10g} {chart.unit_of_one}", _apart(chart, c))


def _line(chart: Chart, c: int) -> str:
    unit, full = chart.unit, chart.held[c]
    segments_, layers = chart.segments_words(c), chart.layers_words(c)
    words = say("segments.line", segments=segments_, inputs=unit.told(chart.inputs(c)), layers=layers,
                inside=unit.told(full - chart.inputs(c)), size=unit.told(full))  # fmt: skip
    if c not in chart.measured:
        return words
    return say("segments.line_measured", line=words, size=unit.told(chart.measured[c]), delta=_apart(chart, c))


def _apart(chart: Chart, c: int) -> str:
    apart = chart.measured[c] - chart.held[c]
    sign = "+" if apart > 0 else "−" if apart < 0 else ""
    return say("segments.delta", delta=f"{sign}{abs(apart):,.10g} {chart.unit_of_one}")
