"""Pictures drawn from plain data: `trace`, and `predict` for the guess that comes before them.

    labkit.show.trace(run.trace)
    labkit.show.predict("ring-bytes", "How many bytes does each rank send?", unit="B")

Nothing here imports torch; anywidget and ipywidgets are imported when something live is really shown.
"""

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.guesses import guess, predict, reveal
from labkit.show.tracefigure import trace

__all__ = ["Drawing", "Figure", "Table", "guess", "predict", "reveal", "trace"]
