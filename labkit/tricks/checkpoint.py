"""`checkpoint`: keep a function's inputs for backward, and make the rest again.

Autograd keeps tensors that operations save. Hooks (`torch.autograd.graph.saved_tensors_hooks`) may keep something else
in their place. Here that is an empty `Slot`. When backward asks for the first slot of a region, the region's function
runs once more under other hooks, which put each tensor that is saved now into the slot that was made in its place: the
n-th into the n-th. Autograd lets go of a slot when it has used it, and the tensor goes with it.

Sources: Griewank and Walther 2000, "Algorithm 799: revolve"; Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost", section 4; in torch, `torch.utils.checkpoint` with ``use_reentrant=False`` works in the same way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from labkit import device
from labkit.tricks.inputs import Inputs
from labkit.tricks.surroundings import Surroundings

OPTIONS = ("offload", "preserve_rng", "early_stop")


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    offload: bool = False,
    preserve_rng: bool = True,
    early_stop: bool = False,
    **kwargs: Any,
) -> Any:
    """Call ``fn(*args, **kwargs)``; for backward keep the arguments only, and run `fn` a second time there.

    Gradients are the same bit for bit: torch's random streams (so that dropout drops the same elements), autocast, the
    default dtype and device are restored, and the streams go on afterwards as if nothing had been drawn. `fn` runs
    once more in a backward, however many outputs it has. Tensors made again are freed as backward uses them. Where
    checkpoints are nested, each runs its own function again: what lies in d of them runs 1 + d times.

    `fn` must do the same both times, and not write to its arguments. What it changes outside itself it changes twice
    (the running statistics of a BatchNorm). Not restored: ``random``, ``numpy.random``, a `torch.Generator` of its own,
    and a module's ``training``. Not seen: a tensor that is neither argument nor parameter and is changed in place
    before backward. Without grad mode `fn` is simply called.

    Args:
        fn: A module or function; its parameters stay where they are.
        *args, **kwargs: For `fn`; tensors may also lie in lists, tuples and dictionaries.
        offload: Keep the arguments on the host, in pinned memory if they come from a GPU. On a CPU a copy is made.
        preserve_rng: ``False``: `fn` draws nothing, so that 5 KB a call and some microseconds are saved.
        early_stop: Stop the second run at the last tensor that backward needs, so that what `fn` does after it (often
            a last product, in tensor parallelism a last all-reduce) is not repeated.

    Returns:
        What `fn` returns.

    Raises:
        TypeError: `fn` cannot be called; an argument is used up by the first call, such as a generator; an option is
            neither True nor False.
        ValueError: An argument lies on a GPU that is not this rank's, whose random stream is not preserved.
        RuntimeError: In backward: an argument or a parameter was changed in place since; or `fn` did something else.

    Example:
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = checkpoint(lambda x: x.sin().exp(), x)
        >>> y.sum().backward()
        >>> torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())
        True

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.
    """
    if not callable(fn):
        raise TypeError(f"fn is {type(fn).__name__}: expected a module or a function, and after it its arguments")
    check_options({"offload": offload, "preserve_rng": preserve_rng, "early_stop": early_stop})
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if preserve_rng:
        _check_devices(args, kwargs)
    region = Region(fn, Inputs(args, kwargs, offload), Surroundings(preserve_rng), early_stop)
    return region.run(*args, **kwargs)


def check_options(options: dict[str, Any]) -> None:
    """
    Raises:
        TypeError: It is none of `checkpoint`'s, or neither True nor False.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            raise TypeError(f"{name} is no option of checkpoint: expected {', '.join(OPTIONS)}")
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}: expected True or False")


def _check_devices(args: tuple, kwargs: dict[str, Any]) -> None:
    for given in (*args, *kwargs.values()):
        if isinstance(given, torch.Tensor) and given.is_cuda and given.device != device.current():
            raise ValueError(
                f"an argument is on {given.device}, but this rank's device is {device.current()}: expected tensors "
                "there (labkit.device.current()), whose random stream is preserved; or say preserve_rng=False"
            )


class Slot:
    """What autograd holds in place of a saved tensor; empty until the region has been run again.

    Attributes:
        seen: What is known of the tensor in forward: shape, dtype, device.
        version: Of a parameter, or a view of one; others' versions only tell how often `fn` wrote to them.
        value: Returns the tensor.
    """

    __slots__ = ("__weakref__", "seen", "value", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        root = tensor if tensor._base is None else tensor._base
        self.seen = _seen(tensor)
        self.version = tensor._version if isinstance(root, torch.nn.Parameter) else None
        self.value: Callable[[], torch.Tensor] | None = None

    def fill(self, tensor: torch.Tensor, below: Hooks | None) -> None:
        """Keep the tensor as autograd would have kept it: by the hooks that are there, such as a meter's.

        Raises:
            RuntimeError: It is another one than in forward.
        """
        if self.seen != _seen(tensor):
            raise RuntimeError(_other(self.seen, _seen(tensor)))
        if self.version not in (None, tensor._version):
            raise RuntimeError(_written(tensor, self.version))
        tensor = tensor.detach()
        if below is not None:
            pack, unpack = below
            packed = pack(tensor)
            self.value = lambda: unpack(packed)
        else:
            version = tensor._version
            self.value = lambda: _unchanged(tensor, version)


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Region:
    """One call of `checkpoint`. It lives as long as autograd holds one of its slots, and its inputs with it."""

    def __init__(self, fn: Callable[..., Any], inputs: Inputs, surroundings: Surroundings, early_stop: bool) -> None:
        self._fn, self._inputs, self._surroundings, self._early_stop = fn, inputs, surroundings, early_stop
        self._slots: list[weakref.ref[Slot]] = []
        self._complete = False
        self._captured = 0
        self._below: Hooks | None = None
        self._lock = threading.RLock()  # on a GPU, backward asks from several threads

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Forward: each tensor that an operation saves becomes an empty slot."""
        with saved_tensors_hooks(self.drop, self.restore):
            result = self._fn(*args, **kwargs)
        self._complete = True
        return result

    def drop(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def restore(self, slot: Slot) -> torch.Tensor:
        """Backward: the first slot that is asked for fills all."""
        with self._lock:
            if slot.value is None:
                self._recompute()
            assert slot.value is not None
            return slot.value()

    def _recompute(self) -> None:
        args, kwargs = self._inputs.again()
        self._below, self._captured = _hooks_below(), 0
        self._forget_when_backward_ends()
        try:
            hooks = saved_tensors_hooks(self._capture, lambda tensor: tensor)
            with self._surroundings.restored(), torch.enable_grad(), hooks:
                self._fn(*args, **kwargs)
            if self._captured != len(self._slots):
                raise RuntimeError(_fewer_or_more(len(self._slots), self._captured))
        except _Enough:
            pass
        except BaseException:
            self._forget()
            raise

    def _capture(self, tensor: torch.Tensor) -> torch.Tensor:
        """The n-th tensor saved in the second run belongs into the n-th slot, if autograd still holds that."""
        if self._captured < len(self._slots):
            slot = self._slots[self._captured]()
            if slot is not None:
                slot.fill(tensor, self._below)
        self._captured += 1
        if self._captured == len(self._slots) and (self._early_stop or not self._complete):
            raise _Enough
        return tensor.detach()  # for a backward that fn itself runs

    def _forget_when_backward_ends(self) -> None:
        """With ``retain_graph=True`` autograd keeps the slots: they are emptied then, and filled again if need be."""
        if torch._C._current_graph_task_id() != -1:
            me = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _forget(me()))

    def _forget(self) -> None:
        for ref in self._slots:
            if (slot := ref()) is not None:
                slot.value = None


def _forget(region: Region | None) -> None:
    if region is not None:
        region._forget()


class _Enough(Exception):
    """Nothing that comes after is needed."""


def _hooks_below() -> Hooks | None:
    """The hooks that would have been called without this checkpoint; those of another checkpoint want no part of it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None or isinstance(getattr(hooks[0], "__self__", None), Region) else hooks


def _seen(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _other(*seen: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    before, after = (f"{list(shape)} {dtype} on {on}" for shape, dtype, on in seen)
    return f"checkpoint: in backward, fn saved {after} where it had saved {before} in forward. {_SAME}"


def _fewer_or_more(before: int, after: int) -> str:
    return f"checkpoint: in backward, fn saved {after} tensors, but {before} in forward. {_SAME}"


_SAME = "It must do the same both times: look for what depends on anything but its arguments and torch's random streams"


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """With hooks, autograd leaves this check to them."""
    if tensor._version != version:
        raise RuntimeError(_written(tensor, version))
    return tensor


def _written(tensor: torch.Tensor, version: int | None) -> str:
    """In autograd's own words."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}], saved inside a checkpoint, is at version {tensor._version}; expected "
        f"version {version} instead. Call backward() before the optimizer's step()"
    )
