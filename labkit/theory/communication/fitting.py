"""α and β from measurements: the line time = α + β·n that comes closest.

Source: Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2" (1994): α, β and n½.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.theory.communication.formulas import cost
from labkit.theory.communication.given import number


@dataclass(frozen=True, slots=True)
class Fit:
    """Time = `alpha` + `beta`·n.

    Attributes:
        alpha: Seconds, what an empty call takes.
        beta: Seconds per byte.
    """

    alpha: float
    beta: float

    def time(self, nbytes: float) -> float:
        """Seconds."""
        return self.alpha + self.beta * nbytes

    @property
    def bandwidth(self) -> float:
        """Bytes per second of an endless message: 1/β."""
        return 1 / self.beta if self.beta else math.inf

    @property
    def half_size(self) -> float:
        """n½ = α/β, the size in bytes that gets half the bandwidth."""
        return self.alpha / self.beta if self.beta else math.inf


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """α and β of a whole operation, by least squares on the relative error: weights 1/seconds².

    Sizes span decades; unweighted, the largest would decide alone and α would come out anyhow. Neither comes out
    negative: where noise would have it so, it is 0 and the other is fitted alone.

    Args:
        sizes: Bytes; at least two different ones.
        seconds: What each took, more than 0.

    Raises:
        TypeError: Something is no number.
        ValueError: Lengths differ, fewer than two different sizes, a number out of range.

    >>> line = fit([1000, 10_000, 1_000_000], [12e-6, 30e-6, 2010e-6])
    >>> round(line.alpha * 1e6, 9), round(line.bandwidth / 1e6), round(line.half_size)
    (10.0, 500, 5000)
    """
    if len(sizes) != len(seconds):
        raise ValueError(f"there are {len(sizes)} sizes and {len(seconds)} seconds: expected a time for each size")
    for size, second in zip(sizes, seconds, strict=True):
        number("a size", size, "bytes")
        number("a time", second, "seconds", above=True)
    if len(set(sizes)) < 2:
        raise ValueError(f"sizes are {list(sizes)!r}: a line needs two different ones at least")
    # (α + βn − t)/t = αu + βv − 1, with u = 1/t and v = n/t: the normal equations are 2 × 2
    u, v = [1 / t for t in seconds], [n / t for n, t in zip(sizes, seconds, strict=True)]
    uu, vv, uv = (sum(x * y for x, y in zip(a, b, strict=True)) for a, b in ((u, u), (v, v), (u, v)))
    determinant = uu * vv - uv * uv
    alpha = (sum(u) * vv - sum(v) * uv) / determinant
    beta = (sum(v) * uu - sum(u) * uv) / determinant
    if alpha < 0:
        return Fit(0.0, sum(v) / vv)
    if beta < 0:
        return Fit(sum(u) / uu, 0.0)
    return Fit(alpha, beta)


def per_message(line: Fit, operation: str, algorithm: str, ranks: int, node_size: int | None = None) -> Fit:
    """α of a message and β of a byte on the wire, from those of a whole operation: divided by how often `cost` counts.

    Assumptions: `cost`'s, and no time for reducing.

    Raises:
        TypeError, ValueError: As `cost`; a single rank, which sends no message.

    >>> per_message(Fit(alpha=0.28, beta=1.75e-9), "all_reduce", "ring", ranks=8)
    Fit(alpha=0.02, beta=1e-09)
    """
    if not isinstance(line, Fit):
        raise TypeError(f"per_message takes what fit returned, but was given {line!r}")
    times = cost(operation, algorithm, ranks, node_size)
    if not times.alpha:
        raise ValueError(f"ranks is {ranks}: expected 2 or more, since one rank sends no message")
    return Fit(line.alpha / times.alpha, line.beta / float(times.beta))
