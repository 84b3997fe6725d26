"""`show.floats`: which numbers fp32, bf16 and fp16 have: how far they reach, and how close they lie."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.floatformats import FORMATS, Format, Sizes
from labkit.show.floatview import Chart, View, percent, plain
from labkit.show.words import count, say

VALUES = (1e-8, 6e-5, 65504.0)  #: lost in fp16; a subnormal number of it; its largest


class FloatsFigure(Figure):
    """A figure of formats, which is computed; of gradients, if there are any, their own source."""

    gradients = False

    @property
    def origin(self) -> str:
        computed = say("memory.computed")
        return f"{computed} · {super().origin}" if self.gradients else computed


def floats(
    near: float | None = 1.0,
    add: float = 0.001,
    *,
    values: Sequence[float] = VALUES,
    gradients: Sequence[float] | None = None,
    scale: float | None = None,
    title: str | None = None,
    source: str = "measured",
) -> Figure:
    """Draw how far fp32, bf16 and fp16 reach on a logarithmic line, and their neighbours round a number.

    Args:
        near: The number whose neighbours are drawn, above 0; ``None``: the reach alone.
        add: What is added to it in each format: lost where the result is the same number.
        values: At most 5 numbers above 0 that are marked on the line, with what each format makes of them.
        gradients: Real gradients, a flat list of numbers (``torch.cat([p.grad.flatten() …]).tolist()``), drawn as a
            histogram of their sizes; those that fp16 makes 0 are hatched. Zeros are left out.
        scale: A loss scale: the histogram is drawn again, that much further right.
        title: The finding; left out, it is derived.
        source: Of the gradients: ``"measured"``, ``"paced"`` or ``"simulated"``.

    Raises:
        TypeError: something is no number, or no list of them.
        ValueError: a number is not above 0 or not finite, `gradients` are all 0, or there is a `scale` without them.

    Source: IEEE 754-2019, table 3.5; bf16 as in Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training"
    (2019); the histogram after Micikevicius et al., "Mixed Precision Training" (2018), figure 2.

    >>> print(floats())
    1 + 0.001 is 1 in bf16 and 1.00098 in fp16; 1e-8 is 0 in fp16 alone [computed]
      fp32 · smallest 1.4e-45 · all digits from 1.2e-38 · largest 3.4e38 · step at 1 1.2e-7 · 1 + 0.001 = 1.001
      bf16 · smallest 9.2e-41 · all digits from 1.2e-38 · largest 3.4e38 · step at 1 0.0078 · 1 + 0.001 = 1
      fp16 · smallest 6e-8 · all digits from 6.1e-5 · largest 65,504 · step at 1 0.00098 · 1 + 0.001 = 1.00098
      1e-8 · fp32 1e-8 · bf16 1.00117e-8 · fp16 0
      6e-5 · fp32 6e-5 · bf16 6.00815e-5 · fp16 6.00219e-5
      65,504 · fp32 65,504 · bf16 65,536 · fp16 65,504
    """
    if near is not None:
        near = _above("near", near)
    added = float(_number("add", add))
    marked = tuple(sorted({_above("values", v) for v in _list("values", values)}))
    if len(marked) > 5:
        raise ValueError(f"values has {len(marked)} numbers: expected at most 5, so that each has room")
    sizes = None if gradients is None else _sizes(gradients)
    if scale is not None and sizes is None:
        raise ValueError(f"scale is {scale!r}, but there are no gradients: expected both, or neither")
    factor = None if scale is None else _above("scale", scale)
    chart = Chart(near, added, marked, sizes, factor)
    views: dict[int, View] = {}

    def draw(width: int, frame: int | None) -> Drawing:
        if width not in views:
            views[width] = View(chart, width)
        return views[width].draw()

    figure = FloatsFigure(_finding(chart) if title is None else title, draw, _twin(chart), source=source,
                          notes=_notes(chart), sheets=("bars", "memory", "tricks"))  # fmt: skip
    figure.gradients = sizes is not None
    return figure


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {value!r}: expected a number, such as 0.001")
    if not isfinite(value):
        raise ValueError(f"{name} is {value!r}: expected a finite number")
    return float(value)


def _above(name: str, value: Any) -> float:
    if _number(name, value) <= 0:
        raise ValueError(f"{name} is {value!r}: expected a number above 0; a logarithmic line has no other")
    return float(value)


def _list(name: str, values: Any) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} is {values!r:.60}: expected a flat list of numbers")
    return list(values)


def _sizes(gradients: Any) -> Sizes:
    values = _list("gradients", gradients)
    if not set(map(type, values)) <= {int, float} or not all(map(isfinite, values)):
        for value in values:
            _number("gradients", value)  # names the one that is wrong
    found = Sizes(values)
    if not len(found):
        raise ValueError(f"gradients has {found.zeros} numbers, none other than 0: expected some to draw")
    return found


# What is written


def _finding(chart: Chart) -> str:
    half = FORMATS[2]
    if chart.sizes is not None:
        n = len(chart.sizes)
        lost = percent(chart.sizes.lost(half), n)
        if chart.scale is None:
            return say("floats.title_lost", lost=lost, bf16=percent(chart.sizes.lost(FORMATS[1]), n))
        scaled = percent(chart.sizes.lost(half, chart.scale), n)
        beyond = chart.sizes.beyond(half, chart.scale)
        if beyond:
            return say("floats.title_beyond", lost=lost, scale=plain(chart.scale), scaled=scaled,
                       beyond=percent(beyond, n))  # fmt: skip
        return say("floats.title_scaled", lost=lost, scale=plain(chart.scale), scaled=scaled)
    told = []
    if chart.near is not None and chart.add:
        results = [plain(f.add(chart.near, chart.add)) for f in FORMATS[1:]]
        told.append(say("floats.title_sum", near=plain(chart.near), add=plain(chart.add), bf16=results[0],
                        fp16=results[1]))  # fmt: skip
    alone = [v for v in chart.values if not half.nearest(v) and FORMATS[1].nearest(v)]
    told += [say("floats.title_alone", value=plain(alone[0]))] if alone else []
    return "; ".join(told) or say("floats.title_reach", bf16=plain(FORMATS[1].largest, 2), fp16=plain(half.largest))


def _notes(chart: Chart) -> list[str]:
    if chart.sizes is None:
        return []
    notes = [say("floats.legend", n=f"{len(chart.sizes):,}")]
    return [*notes, count("floats.zeros", chart.sizes.zeros)] if chart.sizes.zeros else notes


def _twin(chart: Chart) -> Table:
    keys = ("floats.column_format", "floats.column_smallest", "floats.column_normal", "floats.column_largest")
    columns = [say(key) for key in keys]
    if chart.near is not None:
        columns += [say("floats.column_step", near=plain(chart.near)),
                    say("floats.column_sum", near=plain(chart.near), add=plain(chart.add))]  # fmt: skip
    columns += [plain(v) for v in chart.values]
    if chart.sizes is not None:
        columns += [say("floats.column_lost"), say("floats.column_beyond")]
    if chart.scale is not None:
        scale = plain(chart.scale)
        columns += [say("floats.column_lost_scaled", scale=scale), say("floats.column_beyond_scaled", scale=scale)]
    rows = [_row(chart, f) for f in FORMATS]
    first = 4 if chart.near is None else 6
    last = first + len(chart.values)
    lines = [_line(columns, row, range(1, first)) for row in rows]
    for n, value in enumerate(chart.values, first):
        lines.append(" · ".join([plain(value), *(f"{row[0]} {row[n]}" for row in rows)]))
    lines += [_line(columns, row, range(last, len(columns))) for row in rows if last < len(columns)]
    return Table(tuple(columns), rows, lines=lines)


def _line(columns: list[str], row: tuple[str, ...], which: range) -> str:
    return " · ".join([row[0], *(f"{columns[n]} {row[n]}" for n in which)])


def _row(chart: Chart, f: Format) -> tuple[str, ...]:
    cells = [f.name, *(plain(v, 2 if v != 65504 else 6) for v in (f.smallest, f.normal, f.largest))]
    if chart.near is not None:
        cells += [plain(f.step(chart.near), 2), plain(f.add(chart.near, chart.add))]
    cells += [plain(f.nearest(v)) for v in chart.values]
    for scale in (1.0, chart.scale) if chart.sizes is not None else ():
        if scale is not None:
            assert chart.sizes is not None
            n = len(chart.sizes)
            cells += [percent(chart.sizes.lost(f, scale), n), percent(chart.sizes.beyond(f, scale), n)]
    return tuple(cells)
