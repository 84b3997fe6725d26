"""A sum that keeps its terms, and bytes as text."""

from __future__ import annotations

import math
from typing import TypeVar

from labkit.theory.communication.given import number

N = TypeVar("N", int, float)


class Terms(dict[str, N]):
    """Name → number, in a fixed order. What adds up stays visible: ``terms.total`` says how much, ``terms`` why.

    >>> Terms({"parameters": 14, "optimizer": 84}).total
    98
    """

    @property
    def total(self) -> N:
        """The sum of all terms."""
        return sum(self.values())

    def with_name(self, *words: str) -> Terms[N]:
        """The terms whose names contain one of the words.

        >>> Terms({"attention norm input": 2, "queries": 3}).with_name("norm")
        {'attention norm input': 2}
        """
        return Terms({name: value for name, value in self.items() if any(word in name for word in words)})

    def without_name(self, *words: str) -> Terms[N]:
        """The terms whose names contain none of the words."""
        return Terms({name: value for name, value in self.items() if not any(word in name for word in words)})


def gb(nbytes: float) -> str:
    """Bytes as text in GB, 10⁹ bytes: what cards and papers are measured in. Three figures, or all before the point.

    Raises:
        TypeError, ValueError: Not a number, or negative.

    >>> gb(16 * 7.5e9 / 64), gb(7_000_000_000 * 16), gb(1_128_854_618_112)
    ('1.88 GB', '112 GB', '1,129 GB')
    """
    number("nbytes", nbytes, "bytes")
    return f"{_three_figures(nbytes / 1e9)} GB"


def gib(nbytes: float) -> str:
    """Bytes as text in GiB, 2³⁰ bytes: what allocators print.

    Raises:
        TypeError, ValueError: Not a number, or negative.

    >>> gib(80e9), gib(25 * 2**20)
    ('74.5 GiB', '0.0244 GiB')
    """
    number("nbytes", nbytes, "bytes")
    return f"{_three_figures(nbytes / 2**30)} GiB"


def _three_figures(value: float) -> str:
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")
    places = max(0, 2 - math.floor(math.log10(rounded)))
    return f"{rounded if places else value:,.{places}f}"
