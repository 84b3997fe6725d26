"""The arguments of a call, kept so that the call can be made again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten


class Inputs:
    """Arguments whose tensors autograd keeps, as it keeps those of any operation.

    So hooks on saved tensors see them (a meter counts them, a checkpoint round this one drops them and makes them
    again), and autograd refuses to hand them out when somebody has written to them since. Tensors are found in lists,
    tuples and dictionaries too. Parameters are left where they are.

    Args:
        args, kwargs: Of the call.
        offload: Keep copies on the host, and free the tensors.

    Raises:
        TypeError: An argument can be used once only.
    """

    def __init__(self, args: tuple, kwargs: Mapping[str, Any], offload: bool) -> None:
        leaves, self._tree = tree_flatten((args, dict(kwargs)))
        for leaf in leaves:
            if isinstance(leaf, (Iterator, torch.Generator)):
                raise TypeError(f"an argument is a {type(leaf).__name__}, from which the second call would get what "
                                "comes after the first call's: expected a list, or a seed")  # fmt: skip
        self._places = [n for n, leaf in enumerate(leaves) if _is_kept(leaf)]
        tensors = [leaves[n] for n in self._places]
        self._needs = [tensor.requires_grad for tensor in tensors]
        self._rest = [None if _is_kept(leaf) else leaf for leaf in leaves]
        moved: AbstractContextManager = saved_tensors_hooks(OnHost, OnHost.back) if offload else nullcontext()
        with moved:
            self._keeper: Any = _Keep.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn

    def again(self) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs), their tensors cut from the graph that made them.

        Raises:
            RuntimeError: One of the tensors was changed in place since.
        """
        leaves = list(self._rest)
        for n, needs, tensor in zip(self._places, self._needs, self._keeper.saved_tensors, strict=True):
            leaves[n] = tensor.detach().requires_grad_(needs)
        return tree_unflatten(leaves, self._tree)


def _is_kept(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)


class _Keep(torch.autograd.Function):
    """An operation that computes nothing and saves its inputs. It needs one that asks for a gradient: the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("nothing hangs on the result")


class OnHost:
    """A tensor's copy in the host's memory: pinned if it comes from a GPU, so that it travels beside computation.

    On a CPU the copy lies where the tensor lay: nothing is saved, and everything else can be tried.

    >>> OnHost(torch.ones(2)).back()
    tensor([1., 1.])
    """

    __slots__ = ("copy", "device")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self.copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.copy.copy_(tensor, non_blocking=True)

    def back(self) -> torch.Tensor:
        """On the device that it came from; a copy also there, since a function may write to it."""
        return self.copy.to(self.device, non_blocking=True, copy=True)
