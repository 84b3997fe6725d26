"""`show.timeline`: what each rank of a pipeline does when, how long it idles, and how much it holds meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from labkit.show.figure import SOURCES, WIDE, Table
from labkit.show.guesses import guess as noted
from labkit.show.guesses import guessed_numbers
from labkit.show.timelineplayer import TimelineFigure
from labkit.show.timelinerows import SECONDS, Variant, variants_of
from labkit.show.timelineview import Chart, idle, told
from labkit.show.words import say
from labkit.trace import Trace

if TYPE_CHECKING:
    from labkit.pipeline.timeline import Timeline

    Given = Timeline | Trace | Mapping[str, Timeline | Trace]

SETTINGS = 200  #: combinations of controls of which each is drawn beforehand


def timeline(
    timelines: Given | Callable[..., Given],
    *,
    unit: str | None = None,
    controls: Mapping[str, Sequence[Any]] | None = None,
    transfers: bool = False,
    path: bool = False,
    guess: str | Mapping[str, str] | None = None,
    axis_to: float | None = None,
    title: str | None = None,
    source: str | None = None,
) -> TimelineFigure:
    """Draw a row of blocks a rank, and under each row what it holds: several schedules, or simulated over measured.

    Args:
        timelines: A `Timeline` (``simulate(schedule)``), or the trace of a run of a `PipelineEngine`, of which the last
            step is drawn; or name → one of these, to be drawn under each other on one axis. With `controls` a function
            that gives one of these, such as ``lambda m: simulate(one_f_one_b(4, m))``.
        unit: Of the times of a `Timeline`, such as ``"ms"``. Traces are drawn in ms; beside simulated times in their
            unit, which then is one of s, ms and µs.
        controls: Argument of the function → its values, one slider each. Every combination is drawn beforehand, all on
            one axis, so that a slider answers at once, without a kernel too. Without a page that is live, the first
            value of each is shown.
        transfers: Draw a thin line for each message; of simulated timelines only.
        path: Outline the critical path: what has to get shorter for the makespan to.
        guess: The key of a `show.predict` about the makespan, drawn as a dashed line; or name → key.
        axis_to: Where the axis ends, to compare pictures; left out, it holds everything.
        title: The finding; left out, it is derived.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``, of all of them; left out, each is known.

    Returns:
        A figure. In a notebook, arrows go from block to block; what a block needs and what it unblocks are outlined.

    Raises:
        TypeError: Something is neither `Timeline` nor `Trace`; `controls` without a function, or the other way round.
        ValueError: There is nothing to draw, `unit` cannot be that of measured times, `axis_to` would cut something,
            there are too many combinations, or `source` is unknown.

    Source: Huang et al., "GPipe" (2019), figure 2; Narayanan et al. (2021), figures 3 and 4.

    >>> from labkit.pipeline import one_f_one_b, simulate
    >>> print(timeline(simulate(one_f_one_b(ranks=2, micro_batches=3), forward=20, backward=40, weight=0), unit="ms"))
    1F1B ends at 240 ms, 25 % of it idle; micro-batches that a rank holds at most: 2 [simulated]
      F (higher) forward, B (lower) backward of a micro-batch; dotted: idle. Below a row its stash, micro-batches held.
      1F1B | makespan 240 ms | bubble 33.3 % of ideal, 25.0 % of total | peaks 2 1
      r0: F0 F1 B0 F2 B1 B2 | idle 25 %
      r1: F0 B0 F1 B1 F2 B2 | idle 25 %
    """
    _check(timelines, controls, axis_to, source)
    dials = dict(controls or {})
    given = [timelines(**dict(zip(dials, values, strict=True))) if callable(timelines) else timelines
             for values in product(*dials.values())]  # fmt: skip
    settings = [variants_of(one, unit, source) for one in given]
    longest = max(v.timeline.makespan for variants, _ in settings for v in variants)
    if axis_to is not None and axis_to < longest:
        raise ValueError(f"axis_to is {axis_to!r}, but the longest takes {longest:g}: expected at least that")
    scenes = [_scene(variants, named, longest, axis_to, transfers, path, guess, title) for variants, named in settings]
    return scenes[0].controlled(dials, scenes) if dials else scenes[0]


def _check(timelines: Any, controls: Any, axis_to: Any, source: Any) -> None:
    if callable(timelines) and controls is None:
        raise TypeError("timelines is a function, which needs controls, such as {'m': [1, 2, 4, 8]}")
    if controls is not None and not callable(timelines):
        raise TypeError(f"timelines is {type(timelines).__name__}, but controls need a function of them, such as "
                        "lambda m: simulate(one_f_one_b(4, m))")  # fmt: skip
    if controls is not None:
        if not isinstance(controls, Mapping) or not all(isinstance(v, (list, tuple, range)) for v in controls.values()):
            raise TypeError(f"controls is {controls!r}: expected argument → values, such as {{'m': [1, 2, 4, 8]}}")
        number = prod(len(values) for values in controls.values())
        if not controls or not 1 <= number <= SETTINGS:
            raise ValueError(f"controls has {number} combinations of values: expected 1 to {SETTINGS}")
    if axis_to is not None:
        if isinstance(axis_to, bool) or not isinstance(axis_to, (int, float)):
            raise TypeError(f"axis_to is {axis_to!r}: expected a time, such as 800")
        if not isfinite(axis_to):
            raise ValueError(f"axis_to is {axis_to!r}: expected a time, such as 800")
    if source is not None and source not in SOURCES:
        raise ValueError(f"source is {source!r}: expected one of {', '.join(SOURCES)}")


def _scene(
    variants: list[Variant], unit: str, longest: float, axis_to: float | None, transfers: bool, path: bool,
    guess: str | Mapping[str, str] | None, title: str | None,
) -> TimelineFigure:  # fmt: skip
    names = {variant.name: variant for variant in variants}
    own, shared = guessed_numbers(guess, names, "s" if unit in SECONDS else unit)
    scale = SECONDS.get(unit, 1.0)
    own = {name: value * scale for name, value in own.items()}
    shared = None if shared is None else shared * scale
    near = [value for value in (shared, *own.values()) if value is not None and value <= 1.5 * longest]
    top = axis_to if axis_to is not None else max([longest, *near])
    chart = Chart(variants, unit, top, shared, own, transfers, path)
    figure = TimelineFigure(_finding(chart) if title is None else title, chart, _twin(chart), [])
    figure.notes = tuple(_notes(figure, guess))
    return figure


# What is written


def _finding(chart: Chart) -> str:
    variants = chart.variants
    if len(variants) == 1:
        return _alone(chart, variants[0])
    first, last = variants[0], variants[-1]
    if len(variants) == 2 and (first.source == "simulated") != (last.source == "simulated"):
        paper, real = (first, last) if first.source == "simulated" else (last, first)
        more = real.timeline.makespan / paper.timeline.makespan - 1
        key = "timeline.longer" if more >= 0 else "timeline.shorter"
        return say(key, real=real.name, paper=paper.name, percent=f"{abs(more) * 100:.1f}",
                   makespan=chart.time(real.timeline.makespan))  # fmt: skip
    if chart.same:
        makespan = chart.time(max(v.timeline.makespan for v in variants))
        if len({_most(v) for v in variants}) == 1:
            names = ", ".join(v.name for v in variants)
            return say("timeline.same_all", names=names, makespan=makespan, held=_most(first))
        held = ", ".join(say("timeline.holds", name=v.name, held=_most(v)) for v in variants)
        return say("timeline.same", makespan=makespan, held=held)
    order = sorted(variants, key=lambda v: v.timeline.makespan)
    return "; ".join(
        say("timeline.ends", name=v.name, makespan=chart.time(v.timeline.makespan), held=_most(v)) for v in order
    )


def _alone(chart: Chart, variant: Variant) -> str:
    line = variant.timeline
    return say("timeline.one", name=variant.name, makespan=chart.time(line.makespan), held=_most(variant),
               percent=f"{line.bubble_of_total * 100:.0f}")  # fmt: skip


def _most(variant: Variant) -> str:
    """The most that any rank holds, in micro-batches: of a part of a rank's layers each counts a part."""
    return told(variant.peak / variant.chunks)


def _notes(figure: TimelineFigure, guess: Any) -> list[str]:
    variants, own = figure.chart.variants, figure.chart.guesses
    split = any(e.kind == "W" for v in variants for e in v.timeline.events)
    notes = [say("timeline.legend_split") if split else say("timeline.legend")]
    if any(len(row.stages) > 1 for v in variants for row in v.rows):
        notes.append(say("timeline.notches"))
    if any(v.chunks > 1 for v in variants):
        notes.append(say("timeline.parts"))
    if any(figure.views[WIDE].strips):
        notes.append(say("timeline.narrow"))
    if figure.chart.path:
        notes.append(say("timeline.critical"))
    if own:
        told_own = ", ".join(say("bars.one_guess", label=n, value=figure.chart.time(t)) for n, t in own.items())
        notes.append(say("bars.own_guesses", guesses=told_own))
    words = noted(guess) if isinstance(guess, str) else None
    return [*notes, say("bars.word_guess", guess=words)] if isinstance(words, str) else notes


def _twin(chart: Chart) -> Table:
    columns = tuple(say(key) for key in ("timeline.column_variant", "timeline.column_rank", "timeline.column_order",
                                         "timeline.column_idle", "timeline.column_peak"))  # fmt: skip
    rows, lines = [], []
    for variant in chart.variants:
        line = variant.timeline
        lines.append(say("timeline.line", name=variant.name, makespan=chart.time(line.makespan),
                         ideal=f"{line.bubble * 100:.1f}", total=f"{line.bubble_of_total * 100:.1f}",
                         peaks=" ".join(map(str, variant.peaks))))  # fmt: skip
        for row in variant.rows:
            order = " ".join(map(row.word, row.events))
            share = idle(variant, row)
            rows.append((variant.name, f"r{row.rank}", order, share, str(variant.peaks[row.rank])))
            lines.append(f"r{row.rank}: {order} | {share}")
    return Table(columns, rows, lines=lines)
