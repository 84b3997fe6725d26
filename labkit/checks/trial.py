"""What happens on a rank when a learner's function is tried."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from labkit import device
from labkit.checks.borrow import ALGORITHMS, Borrowing, is_ours
from labkit.checks.exercise import Case, Exercise
from labkit.checks.hasty import Arrivals
from labkit.trace import watch

#: The label of what an exercise does itself, on a rank: it counts as nobody's.
GIVEN = "given"
#: Bytes of a budget from which memory is judged, and NumPy's counted; Python's own needs are less.
LARGE = 2**16
#: How tensors leave torch, for NumPy or for Python itself.
LEAVING = {"__array__", "__dlpack__", "numpy", "tolist", "untyped_storage"}


@dataclass(slots=True)
class Tried:
    """What a rank saw.

    Attributes:
        value: What the function made.
        peak: The most bytes that it held at once in tensors and arrays of its own.
        borrowed: What it called that does the exercise for it.
        returned: Whether it returned something.
        hasty: What it used before it had arrived, in words; see `labkit.checks.hasty`.
    """

    value: Any = None
    peak: int = 0
    borrowed: str | None = None
    returned: bool = False
    hasty: str = ""


def attempt(exercise: Exercise, fn: Callable[..., Any], case: Case) -> Tried:
    """Call the learner's function once; run on every rank."""
    arrivals = Arrivals()
    meter = Meter(arrays=is_large(exercise.budget(case)[dist.get_rank()].peak), look=arrivals.look)
    borrowing = Borrowing(is_ours(fn), ALGORITHMS if exercise.theirs is None else exercise.theirs)
    tried = Tried()

    def observed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            with arrivals, meter, borrowing:
                made = function(*args, **kwargs)
            tried.returned |= made is not None
            return _functions_in(made, observed)

        metered.borrowing = borrowing  # type: ignore[attr-defined]  # see `watching`
        return metered

    try:
        tried.value = exercise.call(observed(fn), case)
    except NotImplementedError as error:
        error.is_stub = _is_a_stub(error, fn)  # type: ignore[attr-defined]  # it travels with the exception
        error.in_frame = _raised_in(error) in _nested(fn)  # type: ignore[attr-defined]
        raise
    tried.peak, tried.borrowed, tried.hasty = meter.peak, borrowing.name, arrivals.told
    return tried


def watching(fn: Callable[..., Any]) -> AbstractContextManager[Any]:
    """What is called inside is the learner's too, though not called by `fn`: functions that it returned, a backward."""
    return getattr(fn, "borrowing", nullcontext())


def is_large(limit: int | None) -> bool:
    """Whether memory is judged under a budget of so many bytes."""
    return limit is not None and limit >= LARGE


def _functions_in(made: Any, observed: Callable[[Any], Any]) -> Any:
    """What a function returned; functions, also in a tuple, are the learner's too, and are observed when called."""
    if type(made) in (tuple, list) and any(map(_is_a_function, made)):
        return type(made)(observed(f) if _is_a_function(f) else f for f in made)
    return observed(made) if _is_a_function(made) else made


def _is_a_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_a_stub(error: BaseException, fn: Callable[..., Any]) -> bool:
    """Whether the function itself, or a body in the frame that it is, says that it is not written yet."""
    raised = _raised_in(error)
    return raised is not None and (raised is getattr(inspect.unwrap(fn), "__code__", None) or raised in _nested(fn))


def _raised_in(error: BaseException) -> CodeType | None:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame.tb_frame.f_code if frame is not None else None


def _nested(fn: Any) -> list[CodeType]:
    """The code of the functions and classes that a function holds."""
    found, left = [], [getattr(inspect.unwrap(fn), "__code__", None)]
    while left:
        inner = [code for code in getattr(left.pop(), "co_consts", ()) if isinstance(code, CodeType)]
        found += inner
        left += inner
    return found


def brought(case: Case, rank: int) -> torch.Tensor:
    """What a rank brings: (elements,)."""
    dtype = getattr(torch, case.dtype)
    if case.kind == "parts":
        return torch.full((case.elements,), 16**rank, dtype=dtype, device=device.current())
    numbers = 7 * torch.arange(case.elements, device=device.current()) + 3 * rank + 1
    return numbers.remainder(101).to(dtype)


def watched(tensor: torch.Tensor, case: Case) -> Any:
    """Keep what the tensor holds after each message, where parts are told apart."""
    return watch(tensor, parts=dist.get_world_size()) if case.kind == "parts" and case.elements else nullcontext()


class Meter(TorchFunctionMode):
    """Counts the bytes of tensors that are made inside and not yet let go of, and keeps the most there were.

    It sees every call of torch from Python, which is where a learner's tensors come from. (`TorchDispatchMode` sees
    more, and imports a compiler.) With `arrays` it counts what Python itself allocates as well, beyond `LARGE` bytes:
    NumPy's arrays and lists of numbers, from the first tensor on that leaves torch. `look` is told of each call before
    it is made.

    Python's tracing, once begun, goes on, and these ranks are replaced after the run: where a thread of gloo's lets go
    of a tensor while tracing ends, the process crashes (https://github.com/python/cpython/issues/128679).
    """

    def __init__(self, arrays: bool = False, look: Callable[[str, list[torch.Tensor]], None] | None = None) -> None:
        super().__init__()
        self.arrays, self.look, self.held, self.peak = arrays, look, 0, 0
        self._before = 0  # bytes that Python had when counting began, and may use itself
        self._sizes: dict[int, int] = {}  # storage → its bytes, as counted in `held`
        self._handed: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # what the learner may resize

    def __enter__(self) -> Meter:
        if tracemalloc.is_tracing():
            self._trace()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if tracemalloc.is_tracing():
            self.peak = max(self.peak, tracemalloc.get_traced_memory()[1] - self._before)

    def _trace(self) -> None:
        tracemalloc.start()  # does nothing where it runs
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0] + LARGE

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_world = _asked_by_world(sys._getframe(1))
        args_and_more = [*args, *(kwargs or {}).values()]
        if self.look is not None and not by_world:
            self.look(func.__name__, _tensors(args_and_more))
        if self.arrays and not by_world and func.__name__ in LEAVING and not tracemalloc.is_tracing():
            self._trace()
        made = func(*args, **(kwargs or {}))
        if by_world:
            return made
        if isinstance(made, torch.UntypedStorage):
            self._handed.add(made)
        given = {t.untyped_storage().data_ptr() for t in _tensors(args_and_more)}
        given |= {a.ctypes.data for a in args if isinstance(a, np.ndarray)}  # a view of an array, which is counted
        for tensor in _tensors((made,)):
            if tensor.untyped_storage().data_ptr() not in given:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            weakref.finalize(storage, self._sized, storage._cdata, None)
            for resizable in (storage, *self._handed):
                self._sized(resizable._cdata, resizable.nbytes())
            python = max(0, tracemalloc.get_traced_memory()[0] - self._before)
            self.peak = max(self.peak, self.held + python)

    def _sized(self, key: int, nbytes: int | None) -> None:
        """A storage that is counted has so many bytes now; ``None``: it is gone."""
        if key in self._sizes:
            self.held += (nbytes or 0) - self._sizes.pop(key)
            if nbytes is not None:
                self._sizes[key] = nbytes


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among values, and in lists of them."""
    inner = [v if isinstance(v, (list, tuple)) else (v,) for v in values]
    return [t for row in inner for t in row if isinstance(t, torch.Tensor)]


def _asked_by_world(frame: FrameType | None) -> bool:
    """Whether the process group asks for itself: it looks at samples of what is sent."""
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and f"{os.sep}labkit{os.sep}world{os.sep}" in frame.f_code.co_filename


def shares(length: int, ranks: int) -> list[int]:
    """Sizes of the chunks, as `torch.tensor_split` cuts.

    >>> shares(5, 3)
    [2, 2, 1]
    """
    return [math.ceil((length - n) / ranks) for n in range(ranks)]
