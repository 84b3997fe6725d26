"""How functions and values travel between the kernel and its ranks."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle


def pack_call(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> bytes:
    """The function and its arguments, by cloudpickle: a cell's function travels by value, a module's by name.

    Raises:
        TypeError: Something cannot travel; the message says which argument or which name the function uses.
    """
    buffer = io.BytesIO()
    try:
        _ToRank(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump((fn, args, kwargs))
        return buffer.getvalue()
    except Exception as error:
        culprit = _culprit(fn, args, kwargs)
        raise TypeError(
            f"cannot send {culprit} to the ranks: {error}. A rank is another process: pass plain data, tensors or "
            "functions, and create files, locks, widgets and process groups inside the function"
        ) from None


class _ToRank(cloudpickle.Pickler):
    """cloudpickle, but a function keeps the name of its file: tracebacks and the operation table show the line."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            make, fields = self.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if f == "<dynamic-code>" else f for f in fields)
        return super().reducer_override(obj)


def _culprit(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> str:
    """What cannot be sent: an argument, or what the function, or one that is an argument, uses."""
    given = {f"argument {i}": a for i, a in enumerate(args)} | {f"argument {k}=": v for k, v in kwargs.items()}
    return _first_stuck({**given, **_used(fn)}, {id(fn)}) or str(getattr(fn, "__name__", repr(fn)))


def _first_stuck(named: dict[str, Any], seen: set[int]) -> str | None:
    """The first value that cannot be sent; of a function what it uses, if that is the reason."""
    for name, value in named.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            if id(value) in seen:  # functions that use each other
                continue
            return _first_stuck(_used(value), seen | {id(value)}) or f"{name} ({type(value).__name__})"
    return None


def _used(fn: Any) -> dict[str, Any]:
    """The globals and the variables of outer functions that a function uses; nothing of anything else."""
    if not isinstance(fn, types.FunctionType):
        return {}
    words = ", which " + fn.__name__ + " uses"
    used = {f"{n!r}{words}": fn.__globals__[n] for n in _names(fn.__code__) if n in fn.__globals__}
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)
    return used | {f"{n!r}{words}": c.cell_contents for n, c in cells if c != types.CellType()}  # not the empty ones


def _names(code: types.CodeType) -> list[str]:
    """The names in a function's code, and in that of functions inside it."""
    inner = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in _names(c)]
    return [*code.co_names, *inner]


class _ToKernel(cloudpickle.Pickler):
    """Sends a tensor as a CPU tensor without its graph, and a view as what it shows, not the storage behind it."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        if isinstance(obj, torch.Tensor) and hasattr(obj, "placements"):
            raise TypeError("a DTensor belongs to its mesh: return its .to_local() or .full_tensor()")
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout == torch.strided and not obj.is_quantized:
            flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            if flat.numel() == 1:  # contiguous by definition, whatever its stride, which `view` does not like
                flat = flat.clone(memory_format=torch.contiguous_format)
            flat = flat.view(torch.uint8)
            is_parameter = type(obj) is torch.nn.Parameter
            return _tensor, (flat.numpy(), obj.dtype, tuple(obj.shape), is_parameter, obj.requires_grad)
        if isinstance(obj, type) and obj.__module__ == "__main__" and obj.__qualname__ == obj.__name__:
            # A cell's class goes home by its name: by value it would overwrite the class that the kernel has.
            return _class_of_a_cell, (obj.__name__,)
        return super().reducer_override(obj)


def _class_of_a_cell(name: str) -> type:
    return getattr(sys.modules["__main__"], name)


def _tensor(flat: Any, dtype: Any, shape: tuple[int, ...], is_parameter: bool, requires_grad: bool) -> Any:
    """The other end of `_ToKernel`: a tensor from its bytes."""
    import torch

    tensor = torch.from_numpy(flat).view(dtype).reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def pack_value(value: Any) -> bytes:
    """A rank's return value; tensors come back on the CPU.

    Raises:
        TypeError: The value cannot leave its process.
    """
    buffer = io.BytesIO()
    try:
        _ToKernel(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        raise TypeError(
            f"the return value ({type(value).__name__}) cannot be sent back: {error}. Return plain data or tensors"
        ) from None
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return pickle.loads(data)
