"""Torch's own collectives under one set of names: 2.13 renamed two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CopiedBack:
    """A handle of torch's, of a call on contiguous copies: once it is done, the copies go back to the tensors."""

    def __init__(self, work: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work, self._copies = work, copies

    def wait(self) -> bool:
        done = self._work.wait()
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        self._copies = []  # to wait again changes nothing
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()


def on_contiguous(tensors: list[torch.Tensor], call: Callable[..., Any]) -> Any:
    """`call` fills contiguous tensors, and returns torch's handle or ``None``; `tensors` need not be contiguous."""
    contiguous = [tensor.contiguous() for tensor in tensors]
    work = call(*contiguous)
    copies = [(t, c) for t, c in zip(tensors, contiguous, strict=True) if t is not c]
    if work is not None:
        return CopiedBack(work, copies) if copies else work
    for tensor, copy in copies:
        tensor.copy_(copy)
    return None
