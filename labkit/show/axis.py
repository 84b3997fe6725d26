"""Where things stand along the lanes: by logical step, or by seconds."""

from __future__ import annotations

from labkit.show.order import Item
from labkit.trace import Event


class OrderAxis:
    """A column a step, each as long as what is written in it.

    Args:
        steps: The steps shown.
        need: Pixels that a step's words need; steps without an entry take `least`.
        start: Where the first column begins.
        room: Columns grow evenly up to this length in all, and up to `most` each.
    """

    def __init__(self, steps: range, need: dict[int, float], start: float, room: float, least: float, most: float):
        lengths = [max(least, need.get(k, 0)) for k in steps]
        spare = max(0.0, room - sum(lengths)) / max(1, len(lengths))
        lengths = [max(n, min(n + spare, most)) for n in lengths]
        self.steps, self.start = steps, start
        self.edges = [start]
        for n in lengths:
            self.edges.append(self.edges[-1] + n)
        self.end = self.edges[-1]

    def band(self, step: int) -> tuple[float, float] | None:
        """The column of a step."""
        if step not in self.steps:
            return None
        i = step - self.steps.start
        return self.edges[i], self.edges[i + 1]

    def at(self, step: int) -> float:
        """The middle of a column; the nearest edge for a step that is not shown."""
        if step < self.steps.start:
            return self.start
        column = self.band(step)
        return self.end if column is None else sum(column) / 2

    def message(self, item: Item) -> tuple[float, float]:
        return self.at(item.first), self.at(item.last)

    def box(self, item: Item, event: Event) -> tuple[float, float]:
        first, last = self.band(item.first), self.band(item.last)
        return (first[0] if first else self.start) + 6, (last[1] if last else self.end) - 6

    def ticks(self) -> list[tuple[float, str]]:
        return [(self.at(k), f"{k:,}") for k in self.steps]


class TimeAxis:
    """Seconds since the run began, one scale for all lanes."""

    def __init__(self, events: list[Event], start: float, room: float):
        stamps = [t for e in events for t in (e.start, e.end) if t is not None]
        self.zero = min(stamps, default=0.0)
        self.until = max(stamps, default=1.0)
        if any(e.end is None for e in events):  # what never ended runs on to the edge of the picture
            self.until += 0.15 * (self.until - self.zero) or 1e-3
        self.start, self.end = start, start + room
        self.scale = room / ((self.until - self.zero) or 1.0)

    def at(self, seconds: float) -> float:
        return self.start + (seconds - self.zero) * self.scale

    def band(self, step: int) -> None:
        """A step is no stretch of time."""
        return

    def message(self, item: Item) -> tuple[float, float]:
        send, recv = item.send, item.recv
        left = self.at(item.events[0].start)
        if send is None or recv is None:
            return left, left
        return left, self.at(self.until if recv.end is None else recv.end)

    def box(self, item: Item, event: Event) -> tuple[float, float]:
        left, right = self.at(event.start), self.at(self.until if event.end is None else event.end)
        return left, max(right, left + 3)

    def ticks(self) -> list[tuple[float, str]]:
        """About five round numbers of milliseconds."""
        span = (self.until - self.zero) * 1e3 or 1.0
        unit = 10.0 ** len(f"{span:.0f}") / 100
        step = next(unit * f for f in (1, 2, 5, 10, 20, 50, 100) if span / (unit * f) <= 5)
        return [(self.at(self.zero + n * step / 1e3), f"{n * step:g} ms") for n in range(int(span / step) + 1)]
