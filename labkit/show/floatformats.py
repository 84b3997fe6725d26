"""Floating-point formats by their bits: which numbers they have, and what another number becomes. Plain Python.

>>> FORMATS[1].nearest(1.001), FORMATS[2].nearest(1.001), FORMATS[2].nearest(1e-8), FORMATS[2].nearest(7e4)
(1.0, 1.0009765625, 0.0, inf)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import copysign, frexp, inf


@dataclass(frozen=True, slots=True)
class Format:
    """A binary format with subnormal numbers, as IEEE 754 has them.

    Attributes:
        name: As torch calls it for short.
        digits: Bits of the significand, the leading one included.
        low, high: Exponents of the smallest and the largest normal number.
    """

    name: str
    digits: int
    low: int
    high: int

    @property
    def smallest(self) -> float:
        """The smallest number above 0, a subnormal one."""
        return 2.0 ** (self.low - self.digits + 1)

    @property
    def normal(self) -> float:
        """The smallest number with all digits."""
        return 2.0**self.low

    @property
    def largest(self) -> float:
        return (2 - 2.0 ** (1 - self.digits)) * 2.0**self.high

    @property
    def overflow(self) -> float:
        """From here on a number becomes inf: half a step above the largest."""
        return self.largest + 2.0 ** (self.high - self.digits)

    def step(self, value: float) -> float:
        """From a number of this size to the next larger one."""
        exponent = max(frexp(abs(value))[1] - 1, self.low) if value else self.low
        return 2.0 ** (exponent - self.digits + 1)

    def nearest(self, value: float) -> float:
        """What `value` becomes: rounded to nearest, of two to the even one; 0 and inf beyond the ends."""
        if abs(value) >= self.overflow:
            return copysign(inf, value)
        step = self.step(value)
        return round(value / step) * step

    def add(self, one: float, other: float) -> float:
        """The sum of two numbers of the format, rounded."""
        return self.nearest(self.nearest(one) + self.nearest(other))

    def between(self, low: float, high: float, most: int) -> list[float]:
        """Its numbers from `low` to `high`, both above 0; none at all if there are more than `most`."""
        if (high - low) / self.step(low) > 2 * most:
            return []
        found, at = [], self.nearest(low)
        while at <= high:
            found += [at] if at >= low else []
            at += self.step(at)
        return found if len(found) <= most else []


FORMATS = (Format("fp32", 24, -126, 127), Format("bf16", 8, -126, 127), Format("fp16", 11, -14, 15))


class Sizes:
    """Absolute values of gradients: how many there are of each size, and what a format makes of them.

    >>> sizes = Sizes([0.0, 1e-9, -1.0, 1e-3])
    >>> len(sizes), sizes.zeros, sizes.lost(FORMATS[2]), sizes.lost(FORMATS[2], 1024), sizes.beyond(FORMATS[2], 2**17)
    (3, 1, 1, 0, 1)
    """

    def __init__(self, values: Sequence[float]) -> None:
        found = sorted(map(abs, values))
        self.zeros = bisect_right(found, 0.0)
        self.values = found[self.zeros :]

    def __len__(self) -> int:
        return len(self.values)

    def lost(self, format: Format, scale: float = 1.0) -> int:
        """How many become 0, multiplied by `scale` beforehand."""
        return bisect_right(self.values, format.smallest / 2 / scale)

    def beyond(self, format: Format, scale: float = 1.0) -> int:
        """How many become inf, multiplied by `scale` beforehand."""
        return len(self.values) - bisect_left(self.values, format.overflow / scale)

    def bins(self) -> dict[int, int]:
        """k → how many are from 2**k to 2**(k + 1)."""
        low, high = (frexp(v)[1] - 1 for v in (self.values[0], self.values[-1]))
        edges = [bisect_left(self.values, 2.0**k) for k in range(low, high + 2)]
        return {low + n: b - a for n, (a, b) in enumerate(pairwise(edges)) if b > a}
