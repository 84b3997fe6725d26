"""Run a function on N ranks: real processes, started from a notebook or by torchrun."""
