"""What the ranks print: shown while they run, and at the end grouped by rank.

A notebook's kernel does not see what another process writes to its own standard output, so each rank has a pipe and
this process does the printing.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

#: Bytes of a rank's output that are kept from its beginning, and at least as many from its end.
KEPT = 1_000_000
#: Longer output of a rank is shown with its middle left out, and so is a longer line.
SHOWN_LINES = 200
SHOWN_LINE = 4_000

_REFRESH = 0.1
_QUIET_START = 0.3


class Kept:
    """What a rank has printed: all of it, or, of more than a few MB, the beginning and the end.

    >>> kept = Kept()
    >>> for _ in range(400):
    ...     kept.add(b"ten bytes\\n" * 1000)
    >>> kept.lost, len(kept.text())
    ('… 1.0 MB of output left out …', 2990031)
    """

    def __init__(self) -> None:
        self._head, self._tail, self._lost = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        room = KEPT - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * KEPT:  # not at every call: it moves what is kept
            self._lost += len(self._tail) - KEPT
            del self._tail[:-KEPT]

    @property
    def lost(self) -> str:
        """A line that says how much is missing; empty when nothing is."""
        return f"… {self._lost / 1e6:,.1f} MB of output left out …" if self._lost else ""

    def text(self) -> str:
        between = f"\n{self.lost}\n".encode() if self._lost else b""
        return (self._head + between + self._tail).decode(errors="replace")


class Output:
    """Collects the ranks' output of one run and shows it."""

    def __init__(self, ranks: int) -> None:
        self.kept = [Kept() for _ in range(ranks)]
        self.display = _live_display()
        self._began = self._shown = time.monotonic()
        self._stale = False
        self._pause = _REFRESH

    def add(self, rank: int, data: bytes) -> None:
        if data:
            self.kept[rank].add(data)
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
        return [kept.text() for kept in self.kept]

    def grouped(self) -> str:
        """
        >>> output = Output(2)
        >>> output.add(1, b"one\\ntwo\\n"); output.add(0, b"zero")
        >>> print(output.grouped())
        rank 0 │ zero
        rank 1 │ one
        rank 1 │ two
        """
        width = len(str(len(self.kept) - 1))
        lines = []
        for rank, text in enumerate(self.texts()):
            mine = text.replace("\r\n", "\n").split("\n")
            if mine[-1] == "":
                mine.pop()
            lines += [f"rank {rank:>{width}} │ {line}" for line in _shortened(mine, self.kept[rank].lost)]
        return "\n".join(lines)


def _shortened(lines: list[str], lost: str) -> list[str]:
    """The lines to show. `lost`: what to say of what was not even kept."""
    if len(lines) > SHOWN_LINES:
        half = SHOWN_LINES // 2
        left_out = f"… {len(lines) - 2 * half:,} lines left out; all of them are in run.output …"
        lines = [*lines[:half], lost or left_out, *lines[-half:]]
    return [_shortened_line(line) for line in lines]


def _shortened_line(line: str) -> str:
    if len(line) <= SHOWN_LINE:
        return line
    half = SHOWN_LINE // 2
    return f"{line[:half]} … {len(line) - 2 * half:,} characters left out … {line[-half:]}"


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
