"""The live grid of `show.builder`: its state lives in Python, the page sends commands and shows what comes back."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.pipeline.building import Refused
from labkit.show.boardfigure import refusal
from labkit.show.words import say

if TYPE_CHECKING:
    from labkit.show.boardfigure import Builder


def make(builder: Builder) -> Any:
    """The widget of a builder.

    Raises:
        ImportError: anywidget is not installed.
    """
    widget = _widget_class()(words=_words(builder), hides=builder.name, state=state(builder))

    def answer(_: Any, message: Any, buffers: Any) -> None:
        was_finished = builder.building.finished
        receive(builder, message)
        widget.state = state(builder)
        if builder.building.finished or was_finished:
            builder.show_again()

    widget.on_msg(answer)
    return widget


def receive(builder: Builder, message: dict[str, Any]) -> None:
    """Do what the page asks for: a command, a cell that was clicked, or a text."""
    match message:
        case {"command": str(command)}:
            builder.press(command)
        case {"cell": [int(rank), int(slot)]}:
            builder.point(rank, slot)
        case {"text": str(text)}:
            try:
                builder.write(text)
            except Refused as refused:
                builder.said, builder.blocker = refusal(builder.building, refused), None
            except ValueError as error:
                builder.said, builder.blocker = str(error), None


def state(builder: Builder) -> dict[str, Any]:
    """What the page shows."""
    return {"html": builder.figure(cursor=True).to_html(), "text": builder.text, "said": builder.said}


def _words(builder: Builder) -> dict[str, Any]:
    buttons: list[tuple[str, str]] = [(kind, kind) for kind in builder.building.kinds]
    buttons += [("back", say("builder.undo")), ("repeat", say("builder.repeat"))]
    return {"keys": say("builder.keys"), "board": say("builder.board"), "text": say("builder.text"),
            "write": say("builder.write"), "buttons": buttons}  # fmt: skip


@cache
def _widget_class() -> type:
    """Made when first needed, as the player's is."""
    import anywidget
    import traitlets

    class BuilderWidget(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("board.js").read_text(encoding="utf-8")
        state = traitlets.Dict().tag(sync=True)
        words = traitlets.Dict().tag(sync=True)
        hides = traitlets.Unicode().tag(sync=True)

    return BuilderWidget
