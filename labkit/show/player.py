"""The frame player: Python makes every frame, the browser plays them, also while the kernel is busy.

A frame is a list of SVG parts. Frames share most of theirs, so each different part is sent once and a frame is a
list of numbers: forty frames of a ring are 30 KB.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from labkit.show.figure import NARROW, WIDE, Figure
from labkit.show.svg import el
from labkit.show.words import say

#: Milliseconds between frames while playing; longer where the system asks for less motion.
PACE, CALM_PACE = 900, 1800


def script(figure: Figure) -> str:
    """The player as a script that follows the figure's HTML.

    A notebook stores it in the same output as the picture, so the player works wherever that page is opened, with
    or without a kernel. A widget's view alone would not: JupyterLab then shows "model not found" in its place.
    """
    code = _code().replace("export default { render };", "")
    data = json.dumps(payload(figure), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return el("script", f"{{{code}attach(document.currentScript.previousElementSibling,{data})}}")


def make(figure: Figure) -> Any:
    """The same player as a widget, to stand among other widgets.

    Raises:
        ImportError: anywidget is not installed.
    """
    return _widget_class()(data={"html": figure.to_html(), **payload(figure)})


def payload(figure: Figure) -> dict[str, Any]:
    """All that the browser needs besides the figure itself, as plain data."""
    return {
        "wide": pack([figure.draw(WIDE, k).parts for k in range(len(figure.says))]),
        "narrow": pack([figure.draw(NARROW, k).parts for k in range(len(figure.says))]),
        "says": list(figure.says),
        "start": figure.start,
        "follow": list(figure.follow),
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


_WORDS = ("controls", "first", "back", "play", "pause", "next", "last", "slider", "keys", "follow", "follow_keys")


@cache
def _code() -> str:
    return Path(__file__).with_name("player.js").read_text(encoding="utf-8")


@cache
def _widget_class() -> type:
    """Made when first needed: importing anywidget takes longer than drawing a hundred figures."""
    import anywidget
    import traitlets

    class Player(anywidget.AnyWidget):
        _esm = _code()
        data = traitlets.Dict().tag(sync=True)

    return Player
