"""What a rank tells the kernel at the end of a run. Plain data, and no torch: the kernel may do without it."""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.trace import Event
from labkit.world.journal import Ledger

#: What a rank says before its report: it has loaded its function, and calls it now.
LOADED = "loaded"


@dataclass(slots=True)
class Raised:
    """An exception of a rank, as plain data: the kernel, which knows the cells' source, writes the traceback."""

    type: str
    message: str
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    cause: Raised | None = None
    pickled: bytes | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What a rank sends back at the end of a run."""

    value: bytes | None = None
    raised: Raised | None = None
    events: list[Event] = field(default_factory=list)
    ledger: Ledger | None = None
    notes: list[str] = field(default_factory=list)
    ended: tuple[float, float] | None = None  # under a pace: virtual and real end
    files: dict[str, int] = field(default_factory=dict)
    heavy: set[str] = field(default_factory=set)  # modules that took seconds to import
    clean: bool = True
    run: int = 0
