"""Pictures drawn from plain data, and `predict` for the guess that comes before them.

`trace` is what the ranks of a run said to each other; `ring` and `tree` a collective step by step; `holdings` what
each rank holds after each operation; `compare` predicted beside measured; `volume` what each rank sends; `bandwidth`
how fast messages of each size go; `memory` who holds which bytes, `memory_settings` one setting after another and
`memory_timeline` one event after another; `buckets` what backward hides of the reductions; `layer` a layer that ranks
share, and where they send; `tiles` the matrix of attention, tile by tile; `timeline` what each rank of a pipeline does
when, and `builder` a grid on which to build such a schedule; `zero` what each rank has of each layer under ZeRO.
`segments` is what checkpoints hold for each number of segments; `floats` which numbers fp32, bf16 and fp16 have;
`loss_scale` how a run's scale grew and fell; `norm` which groups each part of a norm crosses.

    labkit.show.trace(run.trace)
    labkit.show.predict("ring-bytes", "How many bytes does each rank send?", unit="B")

Each is loaded when it is first used, since ranks that give a verdict need no picture. Nothing here imports torch;
anywidget and ipywidgets are imported when something live is really shown, matplotlib when it draws.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

#: Public name → module that defines it.
_HOME = {
    "BucketTimes": "buckettimes",
    "Drawing": "figure",
    "Figure": "figure",
    "LayerStage": "layerstages",
    "Table": "figure",
    "ZeroUnit": "zerosteps",
    "bandwidth": "curves",
    "buckets": "bucketfigure",
    "builder": "boardfigure",
    "compare": "barfigure",
    "floats": "floatfigure",
    "guess": "guesses",
    "holdings": "holdfigure",
    "layer": "layerfigure",
    "loss_scale": "scalefigure",
    "memory": "memoryfigure",
    "memory_settings": "memoryfigure",
    "memory_timeline": "memoryline",
    "norm": "normfigure",
    "predict": "guesses",
    "reveal": "guesses",
    "ring": "stepfigure",
    "segments": "segmentfigure",
    "tiles": "tilefigure",
    "timeline": "timelinefigure",
    "trace": "tracefigure",
    "tree": "stepfigure",
    "volume": "barfigure",
    "zero": "zerofigure",
}

if TYPE_CHECKING:
    from labkit.show.barfigure import compare, volume
    from labkit.show.boardfigure import builder
    from labkit.show.bucketfigure import buckets
    from labkit.show.buckettimes import BucketTimes
    from labkit.show.curves import bandwidth
    from labkit.show.figure import Drawing, Figure, Table
    from labkit.show.floatfigure import floats
    from labkit.show.guesses import guess, predict, reveal
    from labkit.show.holdfigure import holdings
    from labkit.show.layerfigure import layer
    from labkit.show.layerstages import LayerStage
    from labkit.show.memoryfigure import memory, memory_settings
    from labkit.show.memoryline import memory_timeline
    from labkit.show.normfigure import norm
    from labkit.show.scalefigure import loss_scale
    from labkit.show.segmentfigure import segments
    from labkit.show.stepfigure import ring, tree
    from labkit.show.tilefigure import tiles
    from labkit.show.timelinefigure import timeline
    from labkit.show.tracefigure import trace
    from labkit.show.zerofigure import zero
    from labkit.show.zerosteps import ZeroUnit

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"labkit.show has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(importlib.import_module(f"labkit.show.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
