"""The figure of `show.timeline`: a block can be focused, and controls swap one setting's picture for another's.

As with the frame player, Python makes every picture beforehand and the browser only swaps them, also while the kernel
is busy, and after it is gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from labkit.show.figure import NARROW, WIDE, Drawing, Figure, Table
from labkit.show.live import is_live
from labkit.show.svg import el
from labkit.show.timelineview import Chart, View
from labkit.show.words import say


class TimelineFigure(Figure):
    """One setting's picture; `scenes` are those of all settings, itself the first of them."""

    def __init__(self, title: str, chart: Chart, twin: Table, notes: Sequence[str]) -> None:
        self.chart = chart
        self.views = {width: View(chart, width) for width in (WIDE, NARROW)}
        self.scenes: list[TimelineFigure] = [self]
        self.dials: dict[str, list[str]] = {}
        super().__init__(
            title, self._drawn, twin, source=chart.variants[0].source, notes=notes, sheets=("bars", "timeline")
        )

    def _drawn(self, width: int, frame: int | None) -> Drawing:
        return self.views[width].draw()

    @property
    def origin(self) -> str:
        """Where the data is from: "simulated · measured" where one stands over the other."""
        keys = {"measured": "figure.measured", "paced": "figure.paced", "simulated": "figure.simulated"}
        return " · ".join(say(key) for key in dict.fromkeys(keys[v.source] for v in self.chart.variants))

    def controlled(self, dials: Mapping[str, Sequence[Any]], scenes: list[TimelineFigure]) -> TimelineFigure:
        """This figure with a control for each of `dials`; `scenes`: one a combination, the last name fastest."""
        self.dials = {name: [str(value) for value in values] for name, values in dials.items()}
        self.scenes = [self, *scenes[1:]]
        return self

    @cached_property
    def widget(self) -> Any:
        return _widget_class()(data={"html": self.to_html(), **payload(self)})

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        html = self.to_html()
        return {"text/html": html + script(self) if is_live() else html, "text/plain": str(self)}


def script(figure: TimelineFigure) -> str:
    """What makes the figure's HTML, just before it, answer to keys and controls."""
    code = _code().replace("export default { render };", "")
    data = json.dumps(payload(figure), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return el("script", f"{{{code}attach(document.currentScript.previousElementSibling,{data})}}")


def payload(figure: TimelineFigure) -> dict[str, Any]:
    """All that the browser needs besides the figure itself, as plain data."""
    several = len(figure.scenes) > 1
    return {
        "scenes": [{"html": scene.to_html().partition("</style>")[2] if several else "", "focus": _focus(scene)}
                   for scene in figure.scenes],
        "dials": [{"name": name, "values": values} for name, values in figure.dials.items()],
        "words": {**_words(), "unit": figure.chart.unit},
    }  # fmt: skip


def _words() -> dict[str, str]:
    """Sentences whose placeholders the browser fills in."""
    said = {n: f"{{{n}}}" for n in ("variant", "word", "rank", "start", "end", "needs", "frees")}
    return {
        "said": say("timeline.said", **said),
        "on": say("timeline.on", word="{word}", rank="{rank}"),
        "nothing": say("timeline.nothing"),
        "dial": say("timeline.dial", name="{name}", value="{value}"),
        "keys": say("timeline.keys"),
    }


def _focus(figure: TimelineFigure) -> dict[str, Any]:
    """The blocks, and where each layout has drawn them."""
    places = {}
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        view = figure.views[width]
        places[name] = {"left": view.left, "scale": view.scale, "tops": view.tops, "block": view.block}
    variants = [
        {
            "name": variant.name,
            "several": [len(row.stages) > 1 for row in variant.rows],
            "rows": [[(e.kind, e.micro_batch, e.stage, _short(e.start), _short(e.end)) for e in row.events]
                     for row in variant.rows],
        } for variant in figure.chart.variants
    ]  # fmt: skip
    return {"variants": variants, **places}


def _short(time: float) -> float:
    """Five digits tell where a block stands."""
    return float(f"{time:.5g}")


@cache
def _code() -> str:
    return Path(__file__).with_name("timeline.js").read_text(encoding="utf-8")


@cache
def _widget_class() -> type:
    """Made when first needed: importing anywidget takes longer than drawing a hundred figures."""
    import anywidget
    import traitlets

    class TimelinePlayer(anywidget.AnyWidget):
        _esm = _code()
        data = traitlets.Dict().tag(sync=True)

    return TimelinePlayer
