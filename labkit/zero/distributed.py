"""Megatron's distributed optimizer: one contiguous gradient buffer, wider than the parameters, cut into shards.

It is stage 1 in another form. Gradients do not stay where autograd makes them, but are added at once to a buffer in
fp32 that lives as long as the optimizer: micro-batches are added up in fp32, at 4 bytes a parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labkit.zero.given import float_type
from labkit.zero.sharded import ShardedOptimizer


class DistributedOptimizer(ShardedOptimizer):
    """`ShardedOptimizer` with one persistent gradient buffer, reduced as a whole.

    With bf16 parameters and Adam a rank holds 2 + 4 bytes a parameter, and 12/d of masters and moments, d the size of
    the *data-parallel* group. Shards are cut over that group, also next to tensor parallelism, whose ranks have nothing
    in common that could be cut.

    A gradient leaves its parameter as soon as it is there: ``.grad`` is ``None`` after backward. `zero_grad` must come
    before the next step's first backward.

    Args:
        module_or_params, optimizer_class, group, find_unused_parameters, **defaults: As in `ShardedOptimizer`.
        grad_dtype: Of the gradient buffer, where parameters are not wider.

    Raises:
        TypeError, ValueError: As `ShardedOptimizer`.

    Example:
        >>> optimizer = DistributedOptimizer(model, torch.optim.AdamW, group=mesh.group("dp"))  # doctest: +SKIP

    Source: Megatron-LM, docs/api-guide/core/dist_optimizer: bytes a parameter, and the data flow.
    """

    def __init__(
        self, module_or_params: Any, optimizer_class: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None, grad_dtype: torch.dtype = torch.float32,
        find_unused_parameters: bool = False, **defaults: Any,
    ) -> None:  # fmt: skip
        float_type("grad_dtype", grad_dtype, "torch.float32")
        self._set_up(
            module_or_params, optimizer_class, group, float("inf"), find_unused_parameters, defaults, grad_dtype, True
        )
        for bucket in self.buckets:
            me = weakref.ref(bucket)
            for member, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(lambda _, me=me, member=member: _take(me, member))


@torch.no_grad()
def _take(bucket: Callable[[], Any], member: int) -> None:
    if (alive := bucket()) is not None and alive.is_intact(member):
        alive.take(member)
