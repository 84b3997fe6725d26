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
    named = {f"argument {i}": a for i, a in enumerate(args)} | {f"argument {k}=": v for k, v in kwargs.items()}
    code = getattr(fn, "__code__", None)
    if code is not None:
        known = getattr(fn, "__globals__", {})
        named |= {f"{n!r}, which {fn.__name__} uses": known[n] for n in code.co_names if n in known}
        cells = zip(code.co_freevars, fn.__closure__ or (), strict=False)
        named |= {f"{n!r}, which {fn.__name__} uses": c.cell_contents for n, c in cells}
    for name, value in named.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"{name} ({type(value).__name__})"
    return getattr(fn, "__name__", repr(fn))


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
