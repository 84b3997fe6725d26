"""Formulas: what to expect before anything runs. Pure Python, each with its source and its assumptions.

from labkit.theory import communication, memory, pipeline, zero

communication.time("all_reduce", "ring", 8, 2**20, alpha=20e-6, beta=1 / 1.25e9)
memory.gb(16 * memory.parameters(labkit.model.preset("gpt2_small")))
pipeline.bubble(ranks=4, micro_batches=8)
zero.sent(parameters, stage=3, ranks=4)
"""

import labkit.theory.communication as communication
import labkit.theory.memory as memory
import labkit.theory.pipeline as pipeline
import labkit.theory.zero as zero

__all__ = ["communication", "memory", "pipeline", "zero"]
