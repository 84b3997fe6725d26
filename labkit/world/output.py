"""What the ranks print: shown while they run, and at the end grouped by rank.

A notebook's kernel does not see what another process writes to its own standard output, so each rank has a pipe and
this process does the printing.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

#: Longer output of a rank is kept whole in `Run.output`, but shown with its middle left out.
SHOWN_LINES = 200

_REFRESH = 0.1
_QUIET_START = 0.3


class Output:
    """Collects the ranks' output of one run and shows it."""

    def __init__(self, ranks: int) -> None:
        self.raw = [bytearray() for _ in range(ranks)]
        self.display = _live_display()
        self._began = self._shown = time.monotonic()
        self._stale = False
        self._pause = _REFRESH

    def add(self, rank: int, data: bytes) -> None:
        if data:
            self.raw[rank] += data
            self._stale = True

    def refresh(self) -> None:
        """Show what there is so far, a few times a second and not for a run that is over at once."""
        at = time.monotonic()
        if self.display and self._stale and at - self._began > _QUIET_START and at - self._shown > self._pause:
            self.display.update(self.grouped())
            self._shown, self._stale = time.monotonic(), False
            self._pause = max(_REFRESH, 10 * (self._shown - at))  # much output must not hold up the run

    def finish(self) -> list[str]:
        """The last showing, grouped by rank in rank order; returns the text of each rank."""
        text = self.grouped()
        if self.display and self.display.is_open:
            self.display.update(text)
        elif text:
            print(text)
        return self.texts()

    def texts(self) -> list[str]:
        return [data.decode(errors="replace") for data in self.raw]

    def grouped(self) -> str:
        """
        >>> output = Output(2)
        >>> output.add(1, b"one\\ntwo\\n"); output.add(0, b"zero")
        >>> print(output.grouped())
        rank 0 │ zero
        rank 1 │ one
        rank 1 │ two
        """
        width = len(str(len(self.raw) - 1))
        lines = []
        for rank, text in enumerate(self.texts()):
            mine = text.replace("\r\n", "\n").split("\n")
            if mine[-1] == "":
                mine.pop()
            lines += [f"rank {rank:>{width}} │ {line}" for line in _shortened(mine)]
        return "\n".join(lines)


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= SHOWN_LINES:
        return lines
    half = SHOWN_LINES // 2
    left_out = f"… {len(lines) - 2 * half:,} lines left out; all of them are in run.output …"
    return [*lines[:half], left_out, *lines[-half:]]


class _NotebookDisplay:
    """One output area that is replaced as the run goes on."""

    def __init__(self) -> None:
        self.handle: Any = None

    @property
    def is_open(self) -> bool:
        return self.handle is not None

    def update(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text}
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)


def _live_display() -> _NotebookDisplay | None:
    """Only a notebook can replace what it has shown; a saved or executed one must not hold two versions."""
    if os.environ.get("LABKIT_STATIC") == "1" or "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    return _NotebookDisplay() if shell is not None and getattr(shell, "kernel", None) is not None else None
