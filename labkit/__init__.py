"""labkit: real ranks in a notebook, and pictures drawn from what they did.

`import labkit` is quick: each name is loaded when it is first used, and torch only when something needs it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Public name → module that defines it. A module listed under its own name is the module itself.
_HOME = {
    "run": "labkit.world.launch",
    "Run": "labkit.world.launch",
    "RunFailed": "labkit.world.failure",
    "RunTimeout": "labkit.world.failure",
    "RankError": "labkit.world.failure",
    "RankDied": "labkit.world.failure",
    "ConnectionLost": "labkit.world.failure",
    "Disagreement": "labkit.world.failure",
    "collectives": "labkit.collectives",
    "context_parallel": "labkit.context_parallel",
    "data_parallel": "labkit.data_parallel",
    "pipeline": "labkit.pipeline",
    "sequence_parallel": "labkit.sequence_parallel",
    "tensor_parallel": "labkit.tensor_parallel",
    "check": "labkit.checks",
    "impostors": "labkit.checks.impostors",
    "quiet": "labkit.turns",
    "hint": "labkit.checks",
    "solution": "labkit.checks",
    "show": "labkit.show",
    "trace": "labkit.trace",
    "device": "labkit.device",
    "memory": "labkit.memory",
    "model": "labkit.model",
    "theory": "labkit.theory",
    "train": "labkit.train",
    "tricks": "labkit.tricks",
    "zero": "labkit.zero",
    "pace": "labkit.pace",
}

if TYPE_CHECKING:
    from labkit import (
        collectives,
        data_parallel,
        device,
        memory,
        model,
        pace,
        pipeline,
        show,
        theory,
        trace,
        train,
        tricks,
        zero,
    )
    from labkit.checks import check, hint, solution
    from labkit.checks.impostors import impostors
    from labkit.turns import quiet
    from labkit.world.failure import ConnectionLost, Disagreement, RankDied, RankError, RunFailed, RunTimeout
    from labkit.world.launch import Run, run

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"labkit has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    module = importlib.import_module(_HOME[name])
    value = module if _HOME[name] == f"labkit.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def _start_early() -> None:
    """In a notebook, begin to load torch for the ranks now, while the set-up cell loads it for the kernel."""
    if "ipykernel" in sys.modules and not os.environ.keys() & {"LABKIT_RANK", "RANK"}:
        from labkit.world.server import start_server

        start_server()


def __dir__() -> list[str]:
    return sorted(__all__)


_start_early()
