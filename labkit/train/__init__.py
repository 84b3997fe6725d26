"""Training with several kinds of parallelism at once: which ranks work together on what, and what a layer does.

`Mesh` has the groups; `Trainer` puts all parts of the lab together in one step; `watch` notes what the ranks hold and
send in one layer, for `labkit.show.layer`.
"""

from labkit.train.compose import Trainer
from labkit.train.mesh import AXES, Mesh
from labkit.train.watching import watch

__all__ = ["AXES", "Mesh", "Trainer", "watch"]
