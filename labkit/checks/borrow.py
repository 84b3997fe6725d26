"""Notices when a function leaves the work to somebody else's: a backend called directly, or labkit's own solution.

Collectives called through `torch.distributed` or `labkit.collectives` stand in the trace. What goes past it is seen
here, by what Python calls while the learner's function runs. Not seen: a backend's method called from C, as `map` calls
it; what another thread does; and a solution that was copied.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import labkit
from labkit.collectives.choose import EVERY

PACKAGE = Path(labkit.__file__).parent
EXERCISES, WORLD = str(PACKAGE / "checks" / "exercises"), str(PACKAGE / "world")
#: Files that do an exercise, besides the solutions: an algorithm each.
ALGORITHMS = frozenset(str(PACKAGE / "collectives" / f"{name}.py") for name in EVERY)
#: Files in which the gradients of a whole module are averaged.
DATA_PARALLEL = frozenset(
    [str(PACKAGE / "data_parallel" / f"{name}.py") for name in ("naive", "reducer", "wrapper")]
    + [spec.origin for name in ("distributed", "data_parallel")
       if (spec := importlib.util.find_spec(f"torch.nn.parallel.{name}")) and spec.origin]
)  # fmt: skip
#: Files of f and g, and of what is like them.
F_AND_G = frozenset(str(PACKAGE / room / "functions.py") for room in ("tensor_parallel", "sequence_parallel"))
#: Files in which a layer, or a loss, is shared by ranks.
SHARED_LAYERS = frozenset(
    [str(PACKAGE / "tensor_parallel" / f"{name}.py") for name in ("convert", "cross_entropy", "embedding", "linear")]
    + [str(PACKAGE / "sequence_parallel" / "convert.py")]
    + [str(Path(spec.origin).parent / "distributed" / "tensor" / "parallel" / f"{name}.py")
       for name in ("api", "loss", "style") if (spec := importlib.util.find_spec("torch")) and spec.origin]
)  # fmt: skip
#: Methods of a backend that move data. The process group that records, in `labkit.world`, is the one to call them.
METHODS = {
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_to_all_single", "allgather", "allreduce",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource",
    "reduce", "reduce_scatter", "reduce_scatter_single", "scatter", "send",
}  # fmt: skip


def is_ours(fn: Callable[..., Any]) -> bool:
    """Whether a function stands among the exercises: a solution, or one that is wrong on purpose."""
    return getattr(getattr(fn, "__code__", None), "co_filename", "").startswith(EXERCISES)


class Borrowing:
    """``with Borrowing(ours) as seen: …``: afterwards `seen.name` is the first such call, or ``None``. May be nested.

    Args:
        ours: The function is one of ours, and may call another.
        theirs: Files that do the exercise.
    """

    def __init__(self, ours: bool, theirs: frozenset[str] = ALGORITHMS) -> None:
        self.ours, self.theirs = ours, theirs
        self.name: str | None = None
        self._before: list[Any] = []

    def __enter__(self) -> Borrowing:
        self._before.append(sys.getprofile())
        sys.setprofile(self._see)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._before.pop())

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & CO_OPTIMIZED:  # a function, not a module or class that is being made
            if code.co_filename in self.theirs or (not self.ours and code.co_filename.startswith(EXERCISES)):
                module = frame.f_globals.get("__name__", "").removeprefix("labkit.")
                self.name = self.name or f"{module}.{code.co_name}"
        elif event == "c_call" and _moves_data(arg) and not frame.f_code.co_filename.startswith(WORLD):
            self.name = self.name or f"backend.{arg.__name__}"


def _moves_data(function: Any) -> bool:
    """Whether it is such a method of a backend; a tensor has methods of the same names, but not bound by pybind11."""
    return function.__name__ in METHODS and type(getattr(function, "__self__", None)).__name__.startswith("pybind11")
