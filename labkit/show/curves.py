"""`show.bandwidth`: how fast messages of each size go, on logarithmic axes; drawn by matplotlib.

The figure is matplotlib's own, to be changed or saved at will. A notebook shows it inside the frame of all pictures:
its words take the page's font and colours, so that it reads on light and on dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from math import ceil, floor, log2, log10
from typing import Any

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.figure import Figure as Picture
from labkit.show.quantity import told
from labkit.show.series import Series, crossing, series_of
from labkit.show.svg import el, fit, size_of, text_width, wrap
from labkit.show.words import say

#: Okabe and Ito's colours, a marker and a dash pattern each: no two series differ by colour alone.
LOOKS = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", "-."), ("#cc79a7", "D", ":"),
         ("#56b4e9", "v", (0, (6, 2, 1, 2, 1, 2))), ("#e69f00", "P", (0, (1, 1))))  # fmt: skip
INK, LINES = "#767676", "#a0a0a1"  #: greys that show on white and on black
HEIGHTS = {720: 380, 300: 320}


def bandwidth(
    measured: Mapping[str, Any],
    fitted: Mapping[str, Any] | None = None,
    *,
    operation: str,
    ranks: int,
    factor: float = 1.0,
    title: str | None = None,
    source: str = "measured",
) -> Any:
    """Draw bandwidth against message size, on logarithmic axes.

    Args:
        measured: Label → (bytes, seconds) of each message size.
        fitted: Label → what was fitted: a function from bytes to seconds, or the pair (α seconds, β seconds per
            byte) of α + β·n. Of a pair n½ = α/β is marked, where half of the bandwidth is reached.
        operation, ranks: What was measured, for the axis.
        factor: Bus bandwidth over algorithm bandwidth, such as 2(N−1)/N for all-reduce.
        title: The finding; left out, it is derived.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``.

    Returns:
        A `matplotlib.figure.Figure` whose `picture` is the figure that a notebook shows.

    Raises:
        TypeError: something is no mapping, or no pairs of numbers.
        ValueError: a size or time is not above 0, there are more than 6 series, or `fitted` has another label.

    Source: bus bandwidth as in nccl-tests, PERFORMANCE.md; n½ of Hockney (1994).

    >>> points = [(1000, 2e-6), (1_000_000, 1.001e-3)]
    >>> print(bandwidth({"ring": points}, {"ring": (1e-6, 1e-9)}, operation="all_reduce", ranks=2).picture)
    ring: fitted limit 1 GB/s, half of it at 1000 B [measured]
      Points: measured. Lines: fitted. n½: the size that reaches half of the bandwidth.
      ring · 1000 B · 2 µs · 0.5 GB/s · fitted 0.5 GB/s
      ring · 977 KiB · 1 ms · 0.999 GB/s · fitted 0.999 GB/s
    """
    lines = series_of(measured, fitted, factor)
    if len(lines) > len(LOOKS):
        raise ValueError(f"measured has {len(lines)} series: expected at most {len(LOOKS)}, to tell them apart")
    key = "curves.algorithm" if factor == 1 else "curves.bus"
    over = {} if factor == 1 else {"factor": f"{factor:.3g}"}
    axis = say(key, operation=operation, ranks=ranks, **over)

    def draw(width: int, frame: int | None) -> Drawing:
        return _drawing(lines, axis, width)

    picture = Figure(_finding(lines) if title is None else title, draw, _twin(lines), source=source,
                     notes=_notes(lines), sheets=("curves",))  # fmt: skip
    return _plot(lines, axis, 720, picture)


def _finding(lines: list[Series]) -> str:
    order = crossing(lines) if len(lines) > 1 else None
    if order is not None and order[0] is order[1]:
        return say("curves.fastest", label=order[0].label)
    if order is not None:
        return say("curves.crossing", small=order[0].label, large=order[1].label, size=_size(order[2]))
    best = max(lines, key=lambda s: s.peak)
    if len(lines) > 1 or best.half is None:
        return say("curves.peak", label=best.label, rate=_rate(best.peak))
    assert best.seconds is not None
    limit = 2 * best.rate(best.half, best.seconds(best.half))
    return say("curves.reaches", label=best.label, rate=_rate(limit), size=_size(best.half))


def _notes(lines: list[Series]) -> list[str]:
    low, high = _extent(lines)
    far = [s for s in lines if s.half is not None and not low <= s.half <= high]
    outside = [say("curves.half_outside", label=s.label, size=_size(s.half or 0)) for s in far]
    legend = "curves.legend_fitted" if any(s.seconds for s in lines) else "curves.legend"
    return [say(legend), *outside]


def _twin(lines: list[Series]) -> Table:
    keys = ("curves.column_label", "curves.column_size", "curves.column_time", "curves.column_rate",
            "curves.column_fitted")  # fmt: skip
    columns = tuple(say(key) for key in keys)
    rows = [
        (s.label, _size(n), told(t, "s"), _rate(s.rate(n, t)), _rate(s.rate(n, s.seconds(n))) if s.seconds else "")
        for s in lines for n, t in s.points
    ]  # fmt: skip
    return Table(columns, rows, quiet=columns[:4])


def _rate(bytes_per_second: float) -> str:
    return say("curves.rate", value=f"{bytes_per_second / 1e9:.3g}")


def _size(nbytes: float) -> str:
    return size_of(round(nbytes))


def _extent(lines: list[Series]) -> tuple[float, float]:
    sizes = [n for s in lines for n, _ in s.points]
    return 0.999 * min(sizes), 1.001 * max(sizes)


# The picture


@cache
def _figure_class() -> type:
    """Made when first needed: importing matplotlib takes longer than drawing a hundred figures."""
    from matplotlib.figure import Figure as Base

    class Curves(Base):
        """A matplotlib figure that a notebook shows as one of the lab's pictures."""

        picture: Picture

        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
            return self.picture._repr_mimebundle_(include, exclude)

    return Curves


def _plot(lines: list[Series], axis: str, width: int, picture: Picture | None = None) -> Any:
    """A figure of so many points (1/72 inch) as the picture has pixels."""
    height, size = HEIGHTS[width], 13 if width == 720 else 12
    figure = _figure_class()(figsize=(width / 72, height / 72), dpi=144)
    figure.picture = picture
    figure.patch.set_alpha(0)
    names = [fit(s.label, 0.3 * width, size) for s in lines]
    right = max(text_width(name, size) for name in names) + 14
    head = wrap(axis, width - 12, size)
    top = 14 + 16 * len(head)
    axes = figure.add_axes((46 / width, 46 / height, (width - 46 - right) / width, (height - 46 - top) / height))
    for n, line in enumerate(head):  # level, where it reads best
        figure.text(6 / width, 1 - (16 + 16 * n) / height, line, color=INK, fontsize=size)
    axes.patch.set_alpha(0)
    axes.set(xscale="log", yscale="log")
    ends = []
    for curve, (color, marker, dash) in zip(lines, LOOKS, strict=False):
        ends.append(_curve(axes, curve, _extent(lines), color, marker, dash))
        _half(axes, curve, _extent(lines), color, size)
    _dress(axes, lines, size)
    _label(axes, names, ends, size)
    return figure


def _curve(axes: Any, line: Series, extent: tuple[float, float], color: str, marker: str, dash: Any) -> float:
    """Points, and what was fitted over the whole picture; gives the height of the right end."""
    sizes, rates = zip(*((n, line.rate(n, t)) for n, t in line.points), strict=True)
    axes.plot(sizes, rates, linestyle="none" if line.seconds else dash, marker=marker, markersize=6, color=color,
              markeredgewidth=1.4, markerfacecolor=color if marker == "o" else "none", linewidth=1.8)  # fmt: skip
    if line.seconds is None:
        return rates[-1]
    low, high = extent
    fine = [low * (high / low) ** (k / 80) for k in range(81)]
    fitted = [line.rate(n, line.seconds(n)) for n in fine]
    axes.plot(fine, fitted, linestyle=dash, color=color, linewidth=1.8)
    return fitted[-1]


def _half(axes: Any, line: Series, extent: tuple[float, float], color: str, size: int) -> None:
    """n½, where the curve has half of its height."""
    if line.half is None or line.seconds is None or not extent[0] <= line.half <= extent[1]:
        return
    rate = line.rate(line.half, line.seconds(line.half))
    axes.plot([line.half], [rate], marker="|", markersize=18, markeredgewidth=2.5, color=color, linestyle="none")
    _write(axes, axes.transData, (line.half, rate), (7, -size - 3), say("curves.half", size=_size(line.half)), size)


def _write(axes: Any, where: Any, at: tuple[float, float], aside: tuple[float, float], words: str, size: int) -> None:
    """Words beside a place, so many points to the right and up."""
    from matplotlib.transforms import offset_copy

    moved = offset_copy(where, axes.figure, *aside, units="points")
    axes.text(*at, words, transform=moved, color=INK, fontsize=size, va="center", clip_on=False)


def _dress(axes: Any, lines: list[Series], size: int) -> None:
    """Round marks, thin lines, no box."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    wide = axes.figure.get_figwidth() > 6
    low, high = _extent(lines)
    axes.set_xlim(low / 1.3, high * 1.15)
    step = max(1, ceil((log2(high) - log2(low)) / (8 if wide else 3)))
    first = ceil(log2(low) - 1e-9)
    axes.xaxis.set_major_locator(FixedLocator([2.0**k for k in range(first, floor(log2(high) + 1e-9) + 1, step)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _size(x)))
    bottom, top = axes.get_ylim()
    decades = [10.0**k for k in range(floor(log10(bottom)), ceil(log10(top)) + 1)]
    steps = (1,) if top / bottom > 200 else (1, 2, 5)
    axes.yaxis.set_major_locator(FixedLocator([d * s for d in decades for s in steps if bottom <= d * s <= top]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y / 1e9:g}"))
    for scale in (axes.xaxis, axes.yaxis):
        scale.set_minor_locator(NullLocator())
        scale.set_tick_params(colors=INK, labelsize=12, length=3)
    axes.grid(color=LINES, linewidth=0.6, alpha=0.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axes.set_xlabel(say("curves.size"), color=INK, fontsize=size)


def _label(axes: Any, names: list[str], ends: list[float], size: int) -> None:
    """Each name at the right end of its curve, apart from each other."""
    places = axes.transData.transform([(1.0, end) for end in ends])[:, 1] / 2  # 144 dpi: two dots a point
    last = float("-inf")
    for n in sorted(range(len(names)), key=lambda n: places[n]):
        last = max(last + size + 3, places[n])
        _write(axes, axes.transAxes, (1, 0), (8, last - axes.bbox.y0 / 2), names[n], size)


def _drawing(lines: list[Series], axis: str, width: int) -> Drawing:
    """The figure as SVG that takes the page's colours and font.

    Its ids are salted with what it shows: one that is hidden must not lend its clip paths to one that is not.
    """
    import matplotlib

    salt = sha256(repr([(s.label, s.points, s.half) for s in lines] + [axis, width]).encode()).hexdigest()
    page = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        _plot(lines, axis, width).savefig(page, format="svg", transparent=True)
    body = page.getvalue().split("<svg", 1)[1].split(">", 1)[1]
    body = re.sub(r"</svg>\s*$|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r"font: (?:(\d+) )?([\d.]+)px [^;\"]*", r"font-size: \2px", body)
    body = re.sub(r' id="(?!\w*[0-9a-f]{10}")[^"]*"', "", body)
    body = body.replace(INK, "var(--lk-ink)").replace(LINES, "var(--lk-line)").replace("#0072b2", "var(--lk-new)")
    return Drawing(width, HEIGHTS[width], (el("g", re.sub(r"\s*\n\s*", " ", body), class_="lk-curves"),))
