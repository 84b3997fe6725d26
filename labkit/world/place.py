"""Which line of the learner's own code led here, and how to write it so that it is the same in every run."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
from functools import cache
from types import FrameType

Place = tuple[str, int, str]

_LABKIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple({p + os.sep for k, p in sysconfig.get_paths().items() if k in ("stdlib", "purelib", "platlib")})
_CELL = re.compile(r"ipykernel_|<ipython-input|ipython_edit_")


@cache
def is_library(filename: str) -> bool:
    """Whether a file belongs to Python, an installed package or labkit, and not to the learner."""
    if filename.startswith("<") and not filename.startswith("<ipython-input"):
        return True
    return filename.startswith(_LABKIT) or is_installed(filename)


def is_installed(filename: str) -> bool:
    """Whether a file belongs to Python or an installed package, and so does not change while somebody works."""
    return filename.startswith(_LIBRARIES)


def is_cell(filename: str) -> bool:
    return _CELL.search(filename) is not None


def learners_line(frame: FrameType | None) -> Place | None:
    """The innermost frame that is the learner's: (file, line, function); in a thread, what it was asked for from."""
    while frame is not None:
        code = frame.f_code
        if not is_library(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return getattr(_asked_for, "place", None)


class AskedFrom:
    """Lets a thread that works for a learner's line know it: `labkit.trace.branch` carries it along."""

    def fork(self) -> Place | None:
        return learners_line(sys._getframe(1))

    def enter(self, place: Place | None) -> None:
        _asked_for.place = place

    def leave(self, place: Place | None) -> None:
        _asked_for.place = None

    def join(self, place: Place | None) -> None:
        pass


_asked_for = threading.local()


@cache
def shown_place(place: Place | None) -> str | None:
    """``"line 4"`` for a notebook cell, ``"model.py:12"`` for a file: no path, no process number."""
    if place is None:
        return None
    filename, line, _ = place
    return f"line {line}" if is_cell(filename) else f"{os.path.basename(filename)}:{line}"


def at(place: Place | None) -> str:
    """The place in brackets, to stand behind an operation; empty if it is not known."""
    return f"  ({shown_place(place)})" if place else ""


def source(filename: str, number: int) -> str:
    """A line of a file or of a notebook cell; the kernel knows both, a rank does not."""
    return linecache.getline(filename, number).strip()
