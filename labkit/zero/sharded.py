"""ZeRO's stages 1 and 2: every rank holds the whole model, and the optimizer's state of one shard of it.

Read `flat` (what a shard is) and `bucket` (how one is reduced and gathered) first. Here is the order of a step; what
stage 2 does during backward is in `stage_two`.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from labkit import collectives
from labkit.collectives import check
from labkit.tricks.norm import clip_pieces_
from labkit.zero import state
from labkit.zero.bucket import FlatBucket, Listeners, make_buckets
from labkit.zero.given import (
    OPTIMIZER,
    Group,
    bucket_bytes,
    check_element_wise,
    groups_and_names,
    plain,
    refuse_averaged,
    same_options,
    take_over,
    yes_or_no,
)
from labkit.zero.stage_two import Arrivals
from labkit.zero.state import Shard


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is cut into N shards, one a rank. It averages the gradients itself.

    1. *Backward* fills gradients on each rank. Stage 1 leaves them there; stage 2 reduce-scatters each bucket as soon
       as it is full and frees it, so that a rank keeps its shard of the mean.
    2. `reduce_gradients` does what is left of that. Then each rank has the mean of its shard, and of nothing else:
       the parameters' ``.grad`` are ``None``.
    3. `clip_grad_norm_`, if wanted, over all shards.
    4. `step` updates the shard, and an all-gather brings every rank's shard into every rank's parameters.

    Each does the steps before it that were not done. A reduce-scatter and an all-gather move as many bytes as the
    all-reduce of plain data parallelism: 2Ψ(N−1)/N a step. With k micro-steps stage 1 still moves that, and stage 2
    (k+1)Ψ(N−1)/N, since each micro-step's gradients leave at once; with `no_sync` they stay, and cost their memory.

    Parameters in 16 bits get fp32 masters, sharded as the moments are: with Adam 2+2+12/N bytes a parameter at stage
    1, 2+14/N at stage 2. What is written into parameters between steps, such as loaded weights, reaches the masters.

    A parameter without a gradient brings zeros, on which momentum and weight decay go on acting, unlike in one process.
    `find_unused_parameters` leaves alone what no rank has used.

    Args:
        module_or_params: The module, never wrapped in DistributedDataParallel; or parameters, (name, parameter) pairs,
            or torch's parameter groups of either. The same on every rank; all take over the values of rank 0.
        optimizer_class: Any element-wise optimizer: `torch.optim.AdamW`, `SGD`, `RMSprop` … It works on 1-dimensional
            pieces of parameters, and is tried once: one to which a tensor's shape matters (Adafactor, Muon) is refused.
        stage: 1 or 2.
        group: The data-parallel group, next to tensor parallelism too; ``None`` is the world.
        bucket_cap_mb: MiB at which a bucket is closed.
        find_unused_parameters: Find out together, by one all-reduce of a byte a parameter, what nobody used.
        overlap: Stage 2: start a full bucket's reduce-scatter beside the rest of backward, and wait for it before the
            next one starts. Then a rank holds the full gradients of two buckets at most, where ranks agree on the
            order of gradients, not of one.
        **defaults: The optimizer's own: ``lr=3e-4``. Its `param_groups` are the whole parameters; learning-rate
            schedulers work.

    Raises:
        TypeError, ValueError: An argument cannot be used, or the ranks' parameters differ.

    Example:
        >>> optimizer = ShardedOptimizer(model, torch.optim.AdamW, stage=2, lr=3e-4)         # doctest: +SKIP
        >>> for batch in batches:                                                            # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     model(batch).mean().backward()
        ...     optimizer.clip_grad_norm_(1.0)
        ...     optimizer.step()

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections
    5.1, 5.2 and 7.
    """

    _built = False
    stage = 1
    overlap = False
    _arrivals: Arrivals | None
    _names: dict[torch.nn.Parameter, str]
    _listeners: Listeners
    buckets: list[FlatBucket]
    inner: torch.optim.Optimizer

    def __init__(
        self, module_or_params: Any, optimizer_class: type[torch.optim.Optimizer], stage: int = 1,
        group: dist.ProcessGroup | None = None, bucket_cap_mb: float = 25, find_unused_parameters: bool = False,
        overlap: bool = False, **defaults: Any,
    ) -> None:  # fmt: skip
        if type(stage) is not int or stage not in (1, 2):
            raise ValueError(f"stage={stage!r}: expected 1 or 2; stage 3 is FullyShardedDataParallel")
        yes_or_no(overlap=overlap)
        if overlap and stage == 1:
            raise ValueError("overlap=True with stage=1, which reduces when backward has ended: expected stage=2")
        self.stage, self.overlap = stage, overlap
        self._set_up(module_or_params, optimizer_class, group, bucket_cap_mb, find_unused_parameters, defaults)
        if stage == 2:
            self._arrivals = Arrivals(self.buckets, self._backward_ended, overlap)

    def _set_up(
        self, module_or_params: Any, optimizer_class: type[torch.optim.Optimizer], group: dist.ProcessGroup | None,
        bucket_cap_mb: float, find_unused: bool, defaults: dict[str, Any], grad_dtype: torch.dtype | None = None,
        keep: bool = False,
    ) -> None:  # fmt: skip
        check.member(group)
        yes_or_no(find_unused_parameters=find_unused)
        cap = bucket_bytes(bucket_cap_mb)
        groups, self._names = groups_and_names(module_or_params, group)
        self._module = weakref.ref(module_or_params) if isinstance(module_or_params, torch.nn.Module) else None
        trained = [param for param in self._names if param.requires_grad]
        check_element_wise(optimizer_class, defaults, groups, trained[0].device)
        self.group, self.find_unused_parameters = group, find_unused
        self._arrivals = None
        self._moved = self._complete = self._warned = False
        self._listeners = OrderedDict()
        take_over(module_or_params, list(self._names), group)
        same_options(
            group, trained[0].device, stage=self.stage, bucket_cap_mb=bucket_cap_mb, overlap=self.overlap,
            optimizer_class=optimizer_class.__name__, find_unused_parameters=find_unused, grad_dtype=grad_dtype,
            defaults=plain(defaults), groups=[[[self._names[p] for p in g["params"]], plain(g)] for g in groups],
        )  # fmt: skip
        self.buckets = make_buckets(trained, self._names, group, cap, grad_dtype, keep, self._listeners)
        self._make_inner(optimizer_class, groups, defaults)

    def _make_inner(
        self, optimizer_class: type[torch.optim.Optimizer], groups: list[Group], defaults: dict[str, Any]
    ) -> None:
        """The optimizer of this rank's pieces, and this one's groups of whole parameters beside it."""
        pieces = {
            bucket.params[piece.index]: tensor
            for bucket in self.buckets for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True)
        }  # fmt: skip
        mine = [{**group, "params": [pieces[p] for p in group["params"] if p in pieces]} for group in groups]
        self.inner = optimizer_class(mine, **defaults)
        super().__init__(groups, self.inner.defaults)
        self.state = self.inner.state
        self._built = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: its memory is that of the module's "
                        "parameters; state_dict() has this rank's part, labkit.zero.save saves all")  # fmt: skip

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks before it steps. It looks for gradients on the parameters, where none are left."""
        raise TypeError("torch.amp.GradScaler does not know shards, and skips a step on one rank alone: use "
                        "labkit.tricks.GradScaler")  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: buckets are cut once.

        Raises:
            RuntimeError: Later.
        """
        if self._built:
            raise RuntimeError("a sharded optimizer takes no further parameters: make a new one with all of them")
        super().add_param_group(param_group)

    # A step, in its order

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, a backward adds to local gradients only. Stage 1 works so anyway; stage 2 then holds full gradients.

        The *backward* decides: it must be inside.
        """
        arrivals = self._arrivals
        if arrivals is None:
            yield
            return
        before, arrivals.sync = arrivals.sync, False
        try:
            yield
        finally:
            arrivals.sync = before

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average over the group what gradients this rank has, each rank its shard. A collective call.

        When that was done, and no gradient has come since, nothing moves.

        Raises:
            RuntimeError: A parameter was replaced, moved, frozen or unfrozen since the optimizer was made.
        """
        params = [param for bucket in self.buckets for param in bucket.params]
        left = any(param.grad is not None for param in params)
        if left or not self._complete:
            self._check_unchanged()
        if left or not (self._moved or self._complete):
            for bucket in self.buckets:
                for member in range(len(bucket.params)):
                    bucket.take(member)
                bucket.reduce()
            self._complete = False
        if not self._complete:
            self._deliver()
            self._complete = True

    def _backward_ended(self) -> None:
        """Stage 2 has reduced a micro-step."""
        self._moved, self._complete = True, False

    def _deliver(self) -> None:
        """The pieces get their gradients; without `find_unused_parameters` each has one."""
        flags = [member in bucket.used for bucket in self.buckets for member in range(len(bucket.params))]
        if self.find_unused_parameters:
            used = torch.tensor(flags, dtype=torch.uint8, device=self.buckets[0].flat.device)
            collectives.all_reduce(used, op="max", group=self.group)
            flags = used.tolist()
        elif not all(flags) and not self._warned:
            self._warned = True
            unused = [name for name, used in zip(self._bucket_names(), flags, strict=True) if not used]
            warnings.warn(f"{len(unused)} parameters, such as {unused[0]}, had no gradient on this rank: they bring "
                          "zeros, on which momentum and decay act; find_unused_parameters=True leaves alone what no "
                          "rank used", stacklevel=4)  # fmt: skip
        rest = iter(flags)
        for bucket in self.buckets:
            bucket.deliver([bool(next(rest)) or not self.find_unused_parameters for _ in bucket.params])

    def grad_shards(self) -> list[torch.Tensor]:
        """This rank's pieces of the mean gradient, 1-dimensional, after `reduce_gradients`. Changes in place count."""
        self.reduce_gradients()
        return [tensor.grad for bucket in self.buckets for tensor in bucket.tensors if tensor.grad is not None]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
        pipeline_group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`labkit.tricks.clip_grad_norm_` of the shards: over this group, and over those of each parameter's `mark`.

        Returns:
            The norm of the mean gradient before clipping, float64, the same bits on every rank. Padding is not in it.
        """
        self.reduce_gradients()
        pieces = [piece for bucket in self.buckets for piece in bucket.placed_gradients()]
        return clip_pieces_(pieces, max_norm, norm_type, error_if_nonfinite, pipeline_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update this rank's shard, then gather all shards. A collective call.

        Args:
            closure: Computes the loss again, with its backward.

        Returns:
            What `closure` returned.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.reduce_gradients()
        for mine, theirs in zip(self.inner.param_groups, self.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})  # a scheduler's new rate
        for bucket in self.buckets:
            bucket.follow()
        self.inner.step()
        for bucket in self.buckets:
            bucket.gather()
        self._moved = self._complete = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also of a backward that an error cut short.

        Args:
            set_to_none: As in torch, for parameters outside the buckets; shards are always freed.
        """
        super().zero_grad(set_to_none)
        for bucket in self.buckets:
            bucket.clear()
        self._moved = self._complete = False
        if self._arrivals is not None:
            self._arrivals.reset()

    def _check_unchanged(self) -> None:
        refuse_averaged(self._names, OPTIMIZER)
        module = self._module() if self._module is not None else None
        for name, param in module.named_parameters() if module is not None else ():
            if param.requires_grad and param not in self._names:
                raise RuntimeError(f"{name} was put into the module since the optimizer was made, so a step would not "
                                   "reach it: change the module first, or make the optimizer anew")  # fmt: skip
        for bucket in self.buckets:
            for member, name in enumerate(bucket.names):
                if not bucket.is_intact(member):
                    raise RuntimeError(f"{name} was replaced, moved, cast or frozen since the optimizer was made, so a "
                                       "step would not reach it: change the module first")  # fmt: skip
        ours = set(self._bucket_names())
        for param, name in self._names.items():
            if param.requires_grad and name not in ours:
                raise RuntimeError(f"{name} was not trained when the optimizer was made, and has no place in a bucket: "
                                   "unfreeze it first, or make the optimizer anew")  # fmt: skip

    def _bucket_names(self) -> list[str]:
        return [name for bucket in self.buckets for name in bucket.names]

    # Saving

    def shards(self) -> list[Shard]:
        """What this rank holds of each trained parameter: its run of elements, their values and their state.

        It is all that another number of ranks needs: put each parameter's runs together in the order of the ranks,
        cut anew, and give `load_state_dict` the runs that are this rank's then.
        """
        for bucket in self.buckets:
            bucket.follow()
        return state.shards(self.buckets, self.state)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's shard, under the parameters' names; references, as in torch.

        Returns:
            ``"state"``: name → state of this rank's run, with ``"master"`` for 16-bit parameters; ``"runs"``: name →
            (offset, length); ``"param_groups"``: torch's, with names.
        """
        return state.saved(self.shards(), self.buckets, self.param_groups, self._names)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, on the same rank of as many; `shards` says what other numbers need.

        Raises:
            TypeError, ValueError: It is no such state, of other parameters, or of other runs of them.
        """
        state.load(self, state_dict)

    # For a memory meter

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(category, tensor) of what neither the module nor `state` shows: gradients and masters."""
        for bucket in self.buckets:
            yield from bucket.held()

    def register_gradient_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """`hook` is called with each buffer of gradients when it is made.

        Raises:
            TypeError: It cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"hook is {hook!r}: expected a function of one tensor")
        handle = RemovableHandle(self._listeners)
        self._listeners[handle.id] = hook
        return handle
