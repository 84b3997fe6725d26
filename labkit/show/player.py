"""The frame player: Python makes every frame, the browser plays them, also while the kernel is busy.

A frame is a list of SVG parts. Frames share most of theirs, so each different part is sent once and a frame is a
list of numbers: forty frames of a ring are 30 KB.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from labkit.show.figure import NARROW, WIDE, Figure
from labkit.show.words import say

#: Milliseconds between frames while playing; longer where the system asks for less motion.
PACE, CALM_PACE = 900, 1800


def make(figure: Figure) -> Any:
    """A live player for a figure of several frames.

    Raises:
        ImportError: anywidget is not installed.
    """
    return _widget_class()(data=payload(figure))


def payload(figure: Figure) -> dict[str, Any]:
    """All that the browser needs, as plain data."""
    return {
        "html": figure.to_html(),
        "wide": pack([figure.draw(WIDE, k).parts for k in range(len(figure.says))]),
        "narrow": pack([figure.draw(NARROW, k).parts for k in range(len(figure.says))]),
        "says": list(figure.says),
        "pace": [PACE, CALM_PACE],
        "words": {name: say(f"player.{name}") for name in _WORDS},
    }


def pack(frames: list[tuple[str, ...]]) -> dict[str, Any]:
    """Different parts once, frames as lists of their numbers.

    >>> pack([("a", "b"), ("a", "c")])
    {'parts': ['a', 'b', 'c'], 'frames': [[0, 1], [0, 2]]}
    """
    number: dict[str, int] = {}
    listed = [[number.setdefault(part, len(number)) for part in frame if part] for frame in frames]
    return {"parts": list(number), "frames": listed}


_WORDS = ("controls", "first", "back", "play", "pause", "next", "last", "slider", "keys")


@cache
def _widget_class() -> type:
    """Made when first needed: importing anywidget takes longer than drawing a hundred figures."""
    import anywidget
    import traitlets

    class Player(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("player.js").read_text(encoding="utf-8")
        data = traitlets.Dict().tag(sync=True)

    return Player
