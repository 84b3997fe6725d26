"""A figure: a title that states the finding, a picture in two layouts, and the same data as a table.

A room that draws gives plain data and a function; everything that all pictures share is here:

>>> from labkit.show import svg
>>> def draw(width, frame):
...     return Drawing(width, 40, (svg.text(0, 20, "12 ms", 13),))
>>> figure = Figure("The last bucket waits 12 ms", draw, Table(("bucket", "waits"), (("b3", "12 ms"),)))
>>> print(figure)
The last bucket waits 12 ms [measured]
  bucket b3 · waits 12 ms
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from labkit.show.live import is_live
from labkit.show.svg import el, escape, num
from labkit.show.words import say

#: Pixels of the two layouts. The wide one gives way at 12/13 of its width, so its text, 13 px, never gets below 12.
WIDE, NARROW = 720, 300
SOURCES = ("measured", "paced", "simulated")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture of one layout.

    Attributes:
        width, height: In pixels. Wider than the layout: it scrolls inside the figure, unscaled.
        parts: SVG markup, in painting order. Frames of a player share equal parts, so cut where frames differ.
        strip: What stays in view while the rest scrolls: (width, height, parts), at the top left.
        style: What all frames of the layout share, as CSS of the picture.
    """

    width: float
    height: float
    parts: tuple[str, ...]
    strip: tuple[float, float, tuple[str, ...]] | None = None
    style: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """The text twin: the data of the picture as words.

    Attributes:
        columns, rows: The table.
        quiet: Columns that are written without their heading in text.
        lines: The same as text, where sentences read better than cells.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    quiet: tuple[str, ...] = ()
    lines: Sequence[str] = ()

    def to_html(self) -> str:
        used = [n for n in range(len(self.columns)) if any(row[n] for row in self.rows)]
        head = el("tr", *(el("th", escape(self.columns[n]), scope="col") for n in used))
        body = [el("tr", *(el("td", escape(row[n])) for n in used)) for row in self.rows]
        return el("table", el("thead", head), el("tbody", *body))

    def to_text(self) -> str:
        return "\n".join(f"  {line}" for line in self.lines or (" · ".join(self._cells(row)) for row in self.rows))

    def _cells(self, row: tuple[str, ...]) -> list[str]:
        named = zip(self.columns, row, strict=True)
        return [cell if column in self.quiet else f"{column} {cell}" for column, cell in named if cell]


class Figure:
    """A picture with its title, its origin and its twin; with several frames it steps and plays.

    Args:
        title: The finding, as a sentence ("every rank sends at every step"), not the topic.
        draw: ``draw(width, frame)`` gives a `Drawing`; `width` is `WIDE` or `NARROW`, `frame` counts from 0, and
            ``None`` asks for the whole picture without a newest part.
        twin: The same data as a `Table`.
        source: Where the data is from: ``"measured"``, ``"paced"`` (measured under a pace) or ``"simulated"``.
        notes: Sentences under the picture.
        says: One announcement a frame; more than one makes the figure a player.
        start: The frame to begin with, which is also what ``None`` draws; left out, the last.
        follow: What the player can be asked to follow: values of ``data-chunk`` in the parts.
        sheets: Style sheets besides figure.css, by name.

    Raises:
        ValueError: the title is empty, or `source` is not one of the three.
    """

    def __init__(
        self,
        title: str,
        draw: Callable[[int, int | None], Drawing],
        twin: Table,
        *,
        source: str = "measured",
        notes: Sequence[str] = (),
        says: Sequence[str] = (),
        start: int | None = None,
        follow: Sequence[str] = (),
        sheets: Sequence[str] = (),
    ) -> None:
        if not isinstance(title, str) or not title.strip():
            raise ValueError(f"a figure's title is {title!r}: expected a sentence that states what the figure shows")
        if source not in SOURCES:
            raise ValueError(f"source is {source!r}: expected one of {', '.join(SOURCES)}")
        self.title, self.draw, self.twin, self.source = title, draw, twin, source
        self.notes, self.says = tuple(notes), tuple(says)
        self.start = len(self.says) - 1 if start is None else start
        self.follow, self.sheets = tuple(follow), tuple(sheets)

    def __str__(self) -> str:
        head = f"{self.title} [{self.origin}]"
        return "\n".join(line for line in (head, *(f"  {n}" for n in self.notes), self.twin.to_text()) if line)

    def __repr__(self) -> str:
        return str(self)

    @property
    def origin(self) -> str:
        return _origin(self.source)

    def to_html(self) -> str:
        """The whole figure as one piece of HTML with inline SVG, its style included."""
        return el(
            "div",
            el("style", style(*self.sheets)),
            el("p", escape(self.title), " ", el("span", escape(self.origin), class_="lk-pill"), class_="lk-title"),
            _stage(self.draw(WIDE, None), "lk-wide", WIDE, self.title),
            _stage(self.draw(NARROW, None), "lk-narrow", NARROW, self.title),
            el("div", class_="lk-player") if len(self.says) > 1 else "",
            *(el("p", escape(note), class_="lk-note") for note in self.notes),
            el("details", el("summary", escape(say("figure.twin"))), el("div", self.twin.to_html(), class_="lk-twin")),
            class_="lk",
            role="figure",
            aria_label=self.title,
        )

    @cached_property
    def widget(self) -> Any:
        """The figure as a widget, to stand among other widgets; made when first asked for (it needs anywidget)."""
        from labkit.show.player import make

        return make(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        html = self.to_html()
        if len(self.says) > 1 and is_live():
            from labkit.show.player import script

            html += script(self)
        return {"text/html": html, "text/plain": str(self)}


def source_of(source: str | None, paced: bool) -> str:
    """The source that was asked for; when none was, what the trace knows."""
    return source if source is not None else "paced" if paced else "measured"


def _origin(source: str) -> str:
    return {
        "measured": lambda: say("figure.measured"),
        "paced": lambda: say("figure.paced"),
        "simulated": lambda: say("figure.simulated"),
    }[source]()


def _stage(drawing: Drawing, layout: str, width: float, title: str) -> str:
    """The SVG of one layout, in the box in which it scrolls if it must."""
    scrolls = drawing.width > width + 1 or drawing.strip is not None
    svg = _svg(
        drawing.width, drawing.height, el("g", *drawing.parts, class_="lk-frame"), "lk-svg", title, drawing.style
    )
    if not scrolls:
        return el("div", svg, class_=f"lk-stage {layout}")
    strip = ""
    if drawing.strip is not None:
        w, h, parts = drawing.strip
        strip = _svg(w, h, "".join(parts), "lk-strip", None, f"margin:0 {num(-w)}px {num(-h)}px 0")
    return el("div", strip, svg, class_=f"lk-stage lk-scroll {layout}", tabindex="0", role="region",
              aria_label=say("figure.scroll"))  # fmt: skip


def _svg(width: float, height: float, body: str, cls: str, label: str | None, style_: str | None = None) -> str:
    return el("svg", body, viewBox=f"0 0 {num(width)} {num(height)}", width=width, height=height, class_=cls,
              role="img" if label else None, aria_label=label, aria_hidden=None if label else "true",
              style=style_)  # fmt: skip


@cache
def style(*sheets: str) -> str:
    """The style sheet and those of `sheets`, without what only their readers need."""
    css = "".join(Path(__file__).with_name(f"{s}.css").read_text(encoding="utf-8") for s in ("figure", *sheets))
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    css = re.sub(r"\s+", " ", css)
    return re.sub(r" ?([{};,]) ?", r"\1", css).replace(";}", "}").strip()
