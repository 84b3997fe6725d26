"""Times of messages of many sizes, and where two series of them cross."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        label: Its name.
        points: (bytes, seconds), by size.
        seconds: What was fitted: bytes → seconds; or ``None``.
        pair: (α, β), if α + β·n was fitted.
        factor: Bus bandwidth over algorithm bandwidth.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    seconds: Callable[[float], float] | None
    pair: tuple[float, float] | None
    factor: float

    def rate(self, nbytes: float, seconds: float) -> float:
        """Bytes per second."""
        return self.factor * nbytes / seconds

    @property
    def peak(self) -> float:
        """The highest measured rate."""
        return max(self.rate(n, t) for n, t in self.points)

    @property
    def half(self) -> float | None:
        """n½ = α/β: a message of this size takes 2α, half of it latency."""
        return None if self.pair is None or self.pair[1] == 0 else self.pair[0] / self.pair[1]


def series_of(measured: Any, fitted: Any, factor: Any) -> list[Series]:
    """The curves of `show.bandwidth`'s arguments, checked."""
    for name, value in (("measured", measured), ("fitted", {} if fitted is None else fitted)):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} is {value!r}: expected label → values, such as {{'ring': [(1024, 2e-5)]}}")
    if not measured:
        raise ValueError("measured is empty: expected at least one label with its (bytes, seconds)")
    if odd := sorted(set(fitted or ()) - set(measured)):
        raise ValueError(f"fitted has {odd[0]!r}, but the labels measured are {', '.join(measured)}")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not (isfinite(factor) and factor > 0):
        raise ValueError(f"factor is {factor!r}: expected a number above 0, such as 2 * (N - 1) / N")
    found = []
    for label, values in measured.items():
        seconds, pair = _fit(label, (fitted or {}).get(label))
        found.append(Series(str(label), _points(label, values), seconds, pair, float(factor)))
    return found


def _points(label: object, values: Any) -> tuple[tuple[float, float], ...]:
    pairs = list(values.items()) if isinstance(values, Mapping) else values
    try:
        points = sorted((float(n), float(t)) for n, t in pairs)
    except (TypeError, ValueError):
        raise TypeError(f"{label!r} has {values!r}: expected a (bytes, seconds) pair for each size") from None
    if not points:
        raise ValueError(f"{label!r} has no points: expected a (bytes, seconds) pair for each size")
    if wrong := [p for p in points if not all(isfinite(x) and x > 0 for x in p)]:
        raise ValueError(f"{label!r} has {wrong[0]}: logarithmic axes show numbers above 0 only")
    return tuple(points)


def _fit(label: object, fit: Any) -> tuple[Callable[[float], float] | None, tuple[float, float] | None]:
    if fit is None or callable(fit):
        return fit, None
    try:
        alpha, beta = (float(x) for x in fit)
    except (TypeError, ValueError):
        raise TypeError(f"{label!r} is fitted by {fit!r}: expected a function, or the pair (α, β)") from None
    if not (alpha >= 0 and beta >= 0 and alpha + beta > 0):
        raise ValueError(f"{label!r} is fitted by {fit!r}: expected seconds and seconds per byte, 0 or more")
    return lambda n: alpha + beta * n, (alpha, beta)


def crossing(lines: list[Series]) -> tuple[Series, Series, float] | None:
    """Who is the fastest at the smallest common size, who at the largest, and where the order turns.

    ``None`` when the series have no sizes in common.
    """
    common = sorted(set.intersection(*({n for n, _ in s.points} for s in lines)))
    if not common:
        return None
    times = [dict(s.points) for s in lines]
    best = [min(range(len(lines)), key=lambda k: times[k][n]) for n in common]
    first, last = lines[best[0]], lines[best[-1]]
    if first is last:
        return first, last, 0.0
    turn = max(i for i, b in enumerate(best) if b != best[-1])
    between = sqrt(common[turn] * common[turn + 1])
    if first.pair and last.pair and first.pair[1] != last.pair[1]:
        fitted = (last.pair[0] - first.pair[0]) / (first.pair[1] - last.pair[1])
        if common[0] <= fitted <= common[-1]:
            return first, last, fitted
    return first, last, between
