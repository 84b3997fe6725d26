"""Pictures drawn from plain data, and `predict` for the guess that comes before them.

`trace` is what the ranks of a run said to each other; `ring` and `tree` a collective step by step; `holdings` what
each rank holds after each operation; `compare` predicted beside measured; `volume` what each rank sends; `bandwidth`
how fast messages of each size go.

    labkit.show.trace(run.trace)
    labkit.show.predict("ring-bytes", "How many bytes does each rank send?", unit="B")

Nothing here imports torch; anywidget and ipywidgets are imported when something live is really shown,
matplotlib when it draws.
"""

from labkit.show.barfigure import compare, volume
from labkit.show.curves import bandwidth
from labkit.show.figure import Drawing, Figure, Table
from labkit.show.guesses import guess, predict, reveal
from labkit.show.holdfigure import holdings
from labkit.show.stepfigure import ring, tree
from labkit.show.tracefigure import trace

__all__ = ["Drawing", "Figure", "Table", "bandwidth", "compare", "guess", "holdings", "predict", "reveal", "ring",
           "trace", "tree", "volume"]  # fmt: skip
