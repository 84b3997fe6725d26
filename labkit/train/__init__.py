"""Training with several kinds of parallelism at once: which ranks work together on what."""

from labkit.train.mesh import AXES, Mesh

__all__ = ["AXES", "Mesh"]
