"""Numbers with their unit, as people read them, and round marks for an axis."""

from __future__ import annotations

from math import ceil, floor, log10

from labkit.show.svg import size_of


def told(value: float, unit: str) -> str:
    """A quantity: ``"B"`` in binary units to four digits, ``"s"`` in ms or s, anything else as it is.

    >>> told(12 * 2**20, "B"), told(16_756_243, "B"), told(0.0125, "s"), told(3, "")
    ('12 MiB', '15.98 MiB', '12.5 ms', '3')
    """
    if unit == "B":
        return size_of(value if value % 1 else int(value), digits=4)
    if unit == "s":
        for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value * 1e6:.3g} µs" if value else "0 s"
    return f"{value:,} {unit}".rstrip() if isinstance(value, int) else f"{value:,.6g} {unit}".rstrip()


def marks(top: float, unit: str, most: int = 4) -> list[float]:
    """Round numbers from 0 to `top`, at most `most` above 0.

    >>> marks(16 * 2**20, "B") == [0, 4 * 2**20, 8 * 2**20, 12 * 2**20, 16 * 2**20]
    True
    >>> marks(0.9, "")
    [0.0, 0.25, 0.5, 0.75]
    """
    if top <= 0:
        return [0.0]
    if unit == "B":
        step = 2.0 ** max(0, ceil(log10(top / most) / log10(2) - 1e-9))
    else:
        base = 10.0 ** floor(log10(top / most))
        step = next(base * f for f in (1, 2, 2.5, 5, 10, 20) if top / (base * f) <= most + 1e-9)
    return [n * step for n in range(int(top / step + 1e-9) + 1)]
