"""Formulas: what to expect before anything runs. Pure Python, each with its source and its assumptions.

from labkit.theory import communication

communication.time("all_reduce", "ring", 8, 2**20, alpha=20e-6, beta=1 / 1.25e9)
"""

import labkit.theory.communication as communication

__all__ = ["communication"]
