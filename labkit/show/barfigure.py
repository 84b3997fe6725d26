"""`show.compare` and `show.volume`: what was predicted beside what was measured, and what each rank sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from typing import Any

from labkit.show.bars import Bar, Chart, Group, View, axis_top
from labkit.show.figure import Drawing, Figure, Table, source_of
from labkit.show.guesses import guess as noted
from labkit.show.guesses import guessed_numbers
from labkit.show.lanes import solid
from labkit.show.quantity import told
from labkit.show.words import say
from labkit.trace import Trace

Values = Mapping[str, Any]
MINUS = "−"
NEAR = 0.1  #: how far from its prediction, as a share of it, what is measured may lie to be called near


def compare(
    predicted: Values,
    measured: Values,
    *,
    unit: str = "B",
    title: str | None = None,
    ceiling: tuple[str, float] | None = None,
    guess: str | Mapping[str, str] | None = None,
    axis_max: float | None = None,
    source: str = "measured",
    names: tuple[str, str] | None = None,
) -> Figure:
    """Draw what was measured as bars, what was predicted as a tick on each, and write the difference.

    Args:
        predicted, measured: Label → number, or a list with a number for each rank. One predicted number may stand
            for all ranks.
        unit: ``"B"``, ``"s"``, or any word; of both.
        title: The finding; left out, it is derived.
        ceiling: A name and a number, drawn as a dashed line.
        guess: The key of a `show.predict`, drawn as a dashed line; or label → key, a line each.
        axis_max: Where the axis ends, to lock several pictures to one axis; left out, at the largest number.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``.
        names: What the two are, in the order of the arguments, where they are not a prediction and a measurement:
            ``("with f", "without f")``. Then there has to be a `title`.

    Raises:
        TypeError: something is no mapping, a value no number, or `names` no two names.
        ValueError: the labels differ, a number is negative or not finite, `axis_max` would cut a bar, or there are
            `names` and no `title`.

    >>> print(compare({"ring": 12}, {"ring": 12}))
    Measured exactly what was predicted [measured]
      Bar: measured. Tick: predicted.
      ring · measured 12 B · predicted 12 B · exactly
    """
    both, (tick, bar) = _paired(predicted, measured), _named(names, title)
    own, shared = guessed_numbers(guess, both, unit)
    groups = tuple(
        Group(label, tuple(_compared(pair, n, len(pairs), unit) for n, pair in enumerate(pairs)), own.get(label))
        for label, pairs in both.items()
    )
    numbers = [x for pairs in both.values() for pair in pairs for x in pair]
    pitch = 18 if any(len(g.bars) > 1 for g in groups) else 24
    chart = _chart(groups, unit, numbers, _ceiling(ceiling), shared, axis_max, pitch)
    columns = (say("bars.column_label"), say("bars.column_rank"), bar, tick, say("bars.column_delta"))
    rows = [
        (label, say("trace.rank", rank=n) if len(pairs) > 1 else "", told(m, unit), told(p, unit), _delta(p, m, unit))
        for label, pairs in both.items()
        for n, (p, m) in enumerate(pairs)
    ]
    quiet = (columns[0], columns[1], columns[4])
    return _figure(title if title is not None else _compare_finding(both, unit), chart, Table(columns, rows, quiet),
                   source, [say("bars.legend", bar=bar, tick=tick), *_guess_notes(guess, own, unit)])  # fmt: skip


def volume(
    sent: Mapping[str, Sequence[int] | Trace],
    *,
    title: str | None = None,
    ceiling: tuple[str, float] | None = None,
    guess: str | Mapping[str, str] | None = None,
    axis_max: float | None = None,
    source: str | None = None,
) -> Figure:
    """Draw what each rank sends as a small bar, a row an algorithm, under a ceiling that some of them burst.

    Args:
        sent: Label → bytes for each rank, or the trace of a run, whose sends are counted.
        title, ceiling, guess, axis_max: As in `compare`; numbers are bytes.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``; left out, the traces know.

    Raises:
        TypeError, ValueError: As `compare`; and a trace holds a native collective, whose bytes cannot be seen.

    >>> print(volume({"ring": [12, 12], "central": [24, 8]}, ceiling=("2D", 16)))
    Rank 0 of central sends 24 B, 1.5 × 2D; no other rank exceeds it [measured]
      A bar is a rank, rank 0 on top.
      ring · rank 0 · 12 B
      ring · rank 1 · 12 B
      central · rank 0 · 24 B
      central · rank 1 · 8 B
    """
    _mapping("sent", sent)
    loads = {label: _sent(label, value) for label, value in sent.items()}
    own, shared = guessed_numbers(guess, loads, "B")
    groups = tuple(Group(label, tuple(_loads(row)), own.get(label)) for label, row in loads.items())
    limit, numbers = _ceiling(ceiling), [n for row in loads.values() for n in row]
    pitch = 9 if max(map(len, loads.values())) > 2 else 11
    chart = _chart(groups, "B", numbers, limit, shared, axis_max, pitch)
    columns = tuple(say(key) for key in ("bars.column_label", "bars.column_rank", "bars.column_sent"))
    rows = [(label, say("trace.rank", rank=r), told(n, "B")) for label, row in loads.items() for r, n in enumerate(row)]
    paced = any(isinstance(t, Trace) and t.paced for t in sent.values())
    notes = [say("bars.legend_ranks"), *_guess_notes(guess, own, "B")]
    return _figure(title if title is not None else _volume_finding(loads, limit), chart, Table(columns, rows, columns),
                   source_of(source, paced), notes)  # fmt: skip


def _chart(groups: tuple[Group, ...], unit: str, numbers: list[float], limit: tuple[str, float] | None,
           shared: float | None, axis_max: float | None, pitch: float) -> Chart:  # fmt: skip
    guesses = [n for n in (shared, *(g.guess for g in groups)) if n is not None]
    top = axis_top(numbers, limit and limit[1], max(guesses, default=None), axis_max)
    return Chart(groups, unit, top, limit, shared, pitch)


def _figure(title: str, chart: Chart, twin: Table, source: str, notes: list[str]) -> Figure:
    def draw(width: int, frame: int | None) -> Drawing:
        return View(chart, width).draw()

    return Figure(title, draw, twin, source=source, notes=notes, sheets=("bars",))


# What was given


def _mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise TypeError(f"{name} is {value!r}: expected label → number, such as {{'ring': 12582912}}")
    if not value:
        raise ValueError(f"{name} is empty: expected at least one label with its number")


def _number(label: str, value: Any) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{label!r} has {value!r}: expected a number, or a list with one for each rank")
    value = value if isinstance(value, int) else float(value)
    if not isfinite(value) or value < 0:
        raise ValueError(f"{label!r} has {value!r}: expected a finite number, 0 or more")
    return value


def _row(label: str, value: Any) -> list[float]:
    if isinstance(value, (list, tuple, range)):
        if not value:
            raise ValueError(f"{label!r} has an empty list: expected a number for each rank")
        return [_number(label, v) for v in value]
    return [_number(label, value)]


def _paired(predicted: Values, measured: Values) -> dict[str, list[tuple[float, float]]]:
    """Label → (predicted, measured) for each rank, in the order of `measured`."""
    _mapping("predicted", predicted)
    _mapping("measured", measured)
    if odd := sorted(predicted.keys() ^ measured.keys()):
        where = "predicted" if odd[0] in measured else "measured"
        raise ValueError(f"{where} has no {odd[0]!r}: expected the same labels in both")
    both = {}
    for label, value in measured.items():
        m, p = _row(label, value), _row(label, predicted[label])
        p = p * len(m) if len(p) == 1 else p
        if len(p) != len(m):
            raise ValueError(
                f"{label!r} has {len(p)} predicted and {len(m)} measured numbers: expected one for each rank"
            )
        both[label] = list(zip(p, m, strict=True))
    return both


def _named(names: Any, title: str | None) -> tuple[str, str]:
    """What ticks are called, and bars."""
    if names is None:
        return say("bars.column_predicted"), say("bars.column_measured")
    if not isinstance(names, (tuple, list)) or len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names is {names!r}: expected two names, such as ('with f', 'without f')")
    if title is None:
        raise ValueError(f"names is {names!r}, but there is no title: expected one, since none can be derived")
    return names[0], names[1]


def _sent(label: str, value: Any) -> list[float]:
    if not isinstance(value, Trace):
        return _row(label, value)
    sent = [value.bytes_sent(rank) for rank in range(value.ranks)]
    if any(n is None for n in sent):
        raise ValueError(f"the trace of {label!r} holds a native collective, whose bytes cannot be seen from here")
    return [n for n in sent if n is not None]


def _ceiling(ceiling: Any) -> tuple[str, float] | None:
    if ceiling is None:
        return None
    if not isinstance(ceiling, (tuple, list)) or len(ceiling) != 2 or not isinstance(ceiling[0], str):
        raise TypeError(f"ceiling is {ceiling!r}: expected a name and a number, such as ('2D', 16777216)")
    return ceiling[0], _number(ceiling[0], ceiling[1])


def _guess_notes(guess: Any, own: dict[str, float], unit: str) -> list[str]:
    """What a line cannot show: guesses of single rows in words, and a guess that is no number."""
    if own:
        told_ = ", ".join(say("bars.one_guess", label=label, value=told(n, unit)) for label, n in own.items())
        return [say("bars.own_guesses", guesses=told_)]
    words = noted(guess) if isinstance(guess, str) else None
    return [say("bars.word_guess", guess=words)] if isinstance(words, str) else []


# What is written


def _compared(pair: tuple[float, float], rank: int, ranks: int, unit: str) -> Bar:
    predicted, measured = pair
    words = say("bars.words", value=solid(told(measured, unit)), delta=solid(_delta(predicted, measured, unit)))
    return Bar(measured, str(rank) if ranks > 1 else "", words, predicted)


def _delta(predicted: float, measured: float, unit: str) -> str:
    if measured == predicted:
        return say("bars.exactly")
    apart = measured - predicted
    sign = "+" if apart > 0 else MINUS
    size = f"{sign}{told(abs(apart), unit)}"
    if not predicted:
        return say("bars.delta", delta=size)
    return say("bars.delta_share", delta=size, percent=f"{sign}{100 * abs(apart) / predicted:.2g}")


def _loads(row: list[float]) -> list[Bar]:
    """A bar a rank; words at the first of the most loaded, or in the middle when all send the same."""
    most, size = max(row), told(max(row), "B")
    loaded = [rank for rank, n in enumerate(row) if n == most]
    if len(loaded) == len(row):
        middle = (len(row) - 1) // 2
        return [Bar(n, words=say("bars.each", size=size) if r == middle else "") for r, n in enumerate(row)]
    alone = len(loaded) == 1
    words = say("bars.most", rank=loaded[0], size=size) if alone else (
        say("bars.most_some", n=len(loaded), ranks=len(row), size=size))  # fmt: skip
    return [Bar(n, words=words if r == loaded[0] else "", strong=n == most) for r, n in enumerate(row)]


def _compare_finding(both: Mapping[str, list[tuple[float, float]]], unit: str) -> str:
    pairs = [(label, r, len(row), p, m) for label, row in both.items() for r, (p, m) in enumerate(row)]
    off = [pair for pair in pairs if pair[3] != pair[4]]
    if not off:
        return say("bars.exact")
    label, rank, ranks, p, m = max(off, key=lambda x: abs(x[4] - x[3]) / (x[3] or 1e-300))
    if abs(m - p) <= NEAR * p:
        return say("bars.within", percent=ceil(100 * abs(m - p) / p - 1e-9) or 1)
    name = say("bars.rank_of", rank=rank, label=label) if ranks > 1 else label
    return say("bars.off", label=name, measured=told(m, unit), predicted=told(p, unit))


def _volume_finding(loads: Mapping[str, list[float]], ceiling: tuple[str, float] | None) -> str:
    label, rank, most = max(((la, r, n) for la, row in loads.items() for r, n in enumerate(row)), key=lambda x: x[2])
    size = told(most, "B")
    if ceiling is None:
        return say("bars.most_of", rank=rank, label=label, size=size)
    name, limit = ceiling
    over = sum(n > limit for row in loads.values() for n in row)
    if not over:
        return say("bars.under", ceiling=name)
    key = "bars.over" if over == 1 else "bars.over_some"
    times = f"{most / limit:.2g}" if limit else "∞"
    how_many = {} if over == 1 else {"n": over, "ranks": sum(map(len, loads.values()))}
    return say(key, rank=rank, label=label, size=size, times=times, ceiling=name, **how_many)
