"""Torch's own collectives under one set of names: 2.13 renamed two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CopiedBack:
    """A handle of torch's, of a call on a contiguous copy: once it is done, the copy goes back to the tensor."""

    def __init__(self, work: Any, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        self._work, self._tensor, self._copy = work, tensor, copy

    def wait(self) -> bool:
        done = self._work.wait()
        self._tensor.copy_(self._copy)
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()


def on_contiguous(tensor: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> Any:
    """`call` fills a contiguous tensor, and returns torch's handle or ``None``; `tensor` need not be contiguous."""
    if tensor.is_contiguous():
        return call(tensor)
    copy = tensor.contiguous()
    work = call(copy)
    if work is not None:
        return CopiedBack(work, tensor, copy)
    tensor.copy_(copy)
    return None
