"""Several figures of one kind, a setting each, of which one is looked at; a row of radio buttons chooses.

The choice itself is plain HTML and CSS, so it works in an exported page and without a kernel too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from labkit.show.figure import Figure, style
from labkit.show.live import is_live
from labkit.show.player import payload
from labkit.show.svg import el, escape

_LAST = "\nfunction"  #: before the last function of a module, the one that a widget calls, and its export


class Choice:
    """Name → figure.

    Args:
        legend: What is chosen, such as "stage".
        figures: At least two, all of them players.
        first: The name of the one that is shown at first.
    """

    def __init__(self, legend: str, figures: Mapping[str, Figure], first: str) -> None:
        self.legend, self.figures, self.first = legend, dict(figures), first

    def __str__(self) -> str:
        return "\n".join(map(str, self.figures.values()))

    def __repr__(self) -> str:
        return str(self)

    def to_html(self) -> str:
        """All figures as one piece of HTML, their styles included."""
        sheets = list(dict.fromkeys(sheet for figure in self.figures.values() for sheet in figure.sheets))
        panels = [
            el("div", _without_style(figure.to_html()), class_=f"lk-panel lk-p{n}")
            for n, figure in enumerate(self.figures.values(), start=1)
        ]
        return el(
            "div",
            el("style", style(*sheets, "choice"), _rules(len(panels))),
            el("form", el("fieldset", el("legend", escape(self.legend)), *map(self._radio, self.figures))),
            *panels,
            class_="lk lk-choice",
        )

    def _radio(self, name: str) -> str:
        chosen = el("input", type="radio", name="lk-setting", checked=name == self.first,
                    data_lm_suppress_shortcuts="true")  # fmt: skip
        return el("label", chosen, escape(name))

    @cached_property
    def widget(self) -> Any:
        """The same as a widget, to stand among other widgets; made when first asked for (it needs anywidget)."""
        return _widget_class()(data={"html": self.to_html(), "players": self._players()})

    def _players(self) -> list[dict[str, Any]]:
        return [payload(figure) for figure in self.figures.values()]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        html = self.to_html()
        if is_live():
            data = json.dumps(self._players(), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
            code = _code().rpartition(_LAST)[0]
            html += el("script", f"{{{code}\nchoose(document.currentScript.previousElementSibling,{data})}}")
        return {"text/html": html, "text/plain": str(self)}


def _without_style(html: str) -> str:
    """A figure's HTML whose style another one brings."""
    before, _, rest = html.partition("<style>")
    return before + rest.partition("</style>")[2]


def _rules(count: int) -> str:
    """A figure that is not chosen is not shown."""
    return "".join(
        f".lk-choice>form:has(label:nth-of-type({n}) :checked)~.lk-panel:not(.lk-p{n}){{display:none}}"
        for n in range(1, count + 1)
    )


@cache
def _code() -> str:
    folder = Path(__file__).parent
    player = (folder / "player.js").read_text(encoding="utf-8")
    return player.rpartition(_LAST)[0] + "\n" + (folder / "choice.js").read_text(encoding="utf-8")


@cache
def _widget_class() -> type:
    """Made when first needed: importing anywidget takes longer than drawing a hundred figures."""
    import anywidget
    import traitlets

    class ChoicePlayer(anywidget.AnyWidget):
        _esm = _code()
        data = traitlets.Dict().tag(sync=True)

    return ChoicePlayer
