"""How a full bucket is averaged: communication hooks.

A hook is called with a flat buffer and the group, starts to average the buffer over the group, in place, and returns a
handle whose ``wait()`` ends that. Every rank calls it for the same buckets in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives


def average(flat: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """The mean over the group; of 16-bit floats without overflow (a running mean, see `labkit.collectives`)."""
    return collectives.all_reduce(flat, op="avg", group=group, async_op=True)


def compressed_bf16(flat: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """The mean of gradients rounded to bf16: half the bytes of fp32, and 8 bits of mantissa.

    >>> model.register_comm_hook(compressed_bf16)      # doctest: +SKIP
    """
    if not flat.is_floating_point() or flat.element_size() <= 2:
        return average(flat, group)
    return _Compressed(flat, group)


class _Compressed:
    def __init__(self, flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self._flat, self._small = flat, flat.to(torch.bfloat16)
        self._handle = average(self._small, group)

    def wait(self) -> None:
        self._handle.wait()
        self._flat.copy_(self._small)
