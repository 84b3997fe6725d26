"""Formulas: what to expect before anything runs. Pure Python, each with its source and its assumptions.

from labkit.theory import communication, memory

communication.time("all_reduce", "ring", 8, 2**20, alpha=20e-6, beta=1 / 1.25e9)
memory.gb(16 * memory.parameters(labkit.model.preset("gpt2_small")))
"""

import labkit.theory.communication as communication
import labkit.theory.memory as memory

__all__ = ["communication", "memory"]
