"""`DistributedDataParallel`: the same module on every rank, each with its own batches, and one mean of gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.collectives import check
from labkit.data_parallel import agreement, hooks
from labkit.data_parallel.reducer import Reducer, in_backward

#: Module → its wrapper; not on the module, which may be copied and saved.
_wrapped_by: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


class DistributedDataParallel(torch.nn.Module):
    """Average the gradients of `module` over the ranks of a group, while backward runs.

    1. *Wrap*: the modules are compared, and all ranks take over the values of the group's rank 0.
    2. *Backward*: gradients fill flat buckets, from the last layer to the first; a full bucket's all-reduce starts at
       once, beside the rest of backward. ``param.grad`` is a view into its bucket.
    3. *End of backward*: one wait. Then every rank holds the same mean, and steps to the same parameters.

    The mean is over ranks. Where ranks have different numbers of tokens it is not the mean over tokens: see
    `labkit.data_parallel.token_mean`.

    Args:
        module: Any module with at least one trained parameter, dense gradients, on its device and in its element type
            before it is wrapped.
        group: The data-parallel group; ``None`` is the world.
        bucket_cap_mb, first_bucket_mb: MiB at which a bucket, and the first one, is closed: a small first one leaves
            early. After the first backward the buckets are filled again in the order in which gradients arrived.
        overlap: ``False``: start when backward has ended.
        find_unused_parameters: Parameters that a forward does not use bring zeros, instead of an error.
        broadcast_buffers: Before each forward all ranks take over rank 0's buffers (those in ``state_dict``).

    Raises:
        TypeError, ValueError: An argument cannot be used, or the ranks' modules differ.

    Example:
        >>> def step():                                               # doctest: +SKIP
        ...     model = DistributedDataParallel(torch.nn.Linear(4, 2))
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     return model.module.weight.grad                       # the same on every rank

    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
    """

    def __init__(
        self, module: torch.nn.Module, group: dist.ProcessGroup | None = None, bucket_cap_mb: float = 25,
        overlap: bool = True, find_unused_parameters: bool = False, broadcast_buffers: bool = True,
        first_bucket_mb: float = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        check.member(group)
        named = _trained(module)
        cap = _mib("bucket_cap_mb", bucket_cap_mb)
        first = min(cap, _mib("first_bucket_mb", first_bucket_mb))
        self.module, self.group, self.broadcast_buffers = module, group, broadcast_buffers
        self._on = named[0][1].device
        agreement.compare(module, group, self._on)
        agreement.spread([p for _, p in module.named_parameters()] + self._buffers_to_spread(), group)
        _wrapped_by[module] = weakref.ref(self)
        self._wrapped = _identity(module)
        self._sync, self._joining, self._source = True, False, 0
        self.reducer = Reducer(
            [name for name, _ in named], [param for _, param in named], group,
            cap, first, overlap, find_unused_parameters, hooks.average,
        )  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward.

        Raises:
            RuntimeError: A parameter was replaced, moved, frozen or unfrozen since the module was wrapped.
        """
        repeats = in_backward()
        if torch.is_grad_enabled() and not repeats:
            self._check_unchanged()
            if self._joining:
                self._announce(active=True)
            self._before(self._sync)
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled() and not repeats:
            self.reducer.expect(outputs, self._sync)
        return outputs

    def _before(self, sync: bool) -> None:
        """What the ranks do together before a forward."""
        self.reducer.settle()
        self.reducer.rebuild()
        if sync and (buffers := self._buffers_to_spread()):
            agreement.spread(buffers, self.group, self._source)

    def _buffers_to_spread(self) -> list[torch.Tensor]:
        return [b for _, b in agreement.saved_buffers(self.module)] if self.broadcast_buffers else []

    def _check_unchanged(self) -> None:
        """The hooks are on the parameters that were there: another one in their place would never be averaged."""
        now = _identity(self.module)
        if now == self._wrapped:
            return
        changed = [name for name in {**self._wrapped, **now} if self._wrapped.get(name) != now.get(name)]
        raise RuntimeError(
            f"{changed[0]} was replaced, moved, frozen or unfrozen since the module was wrapped, so its gradient would "
            "not be averaged: change the module first, then wrap it (or wrap it again)"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, a forward's backward adds to the local gradients and averages nothing.

        The *forward* decides: it must be inside. The next backward whose forward is outside averages all that was
        added.

        >>> for batch in batches[:-1]:                     # doctest: +SKIP
        ...     with model.no_sync():
        ...         loss(model(batch)).backward()
        >>> loss(model(batches[-1])).backward()            # doctest: +SKIP
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def register_comm_hook(self, hook: Callable[[torch.Tensor, dist.ProcessGroup | None], Any]) -> None:
        """Average buckets in another way, the same on all ranks; see `labkit.data_parallel.hooks`."""
        if not callable(hook):
            raise TypeError(f"the communication hook is {hook!r}: expected a function of (flat buffer, group)")
        self.reducer.hook = hook

    # Ranks with different numbers of batches

    @contextmanager
    def join(self) -> Iterator[None]:
        """Inside, ranks may have different numbers of batches: who is through takes part with zeros until all are.

        The mean stays one over all ranks of the group. In the end every rank takes over the parameters of one that was
        the last to train. Costs a small all-reduce a step.

        >>> with model.join():                             # doctest: +SKIP
        ...     for batch in batches:                      # 5 on rank 0, 4 on rank 1
        ...         train(model, batch)

        Source: Li et al. 2020, and `torch.distributed.algorithms.join`.
        """
        self._joining = True
        try:
            yield
            while (others_sync := self._announce(active=False)) is not None:
                self._before(others_sync)
                if others_sync:
                    self.reducer.shadow()
            state = [p for _, p in self.module.named_parameters()] + [
                b for _, b in agreement.saved_buffers(self.module)
            ]
            agreement.spread(state, self.group, self._source)
        finally:
            self._joining, self._source = False, 0

    def _announce(self, active: bool) -> bool | None:
        """Whether the others' next backward averages; ``None``: nobody has a batch left."""
        mine = [dist.get_rank(self.group) + 1, int(self._sync)] if active else [0, 0]
        told = torch.tensor(mine, device=self._on)
        collectives.all_reduce(told, op="max", group=self.group)
        last, sync = told.tolist()
        if last:
            self._source = last - 1
        return bool(sync) if last else None


def _mib(name: str, given: float) -> int:
    """In bytes.

    Raises:
        TypeError, ValueError: It is no size.
    """
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"{name}={given!r}: expected a number of MiB, such as 25")
    if not 0 < given < math.inf:
        raise ValueError(f"{name}={given!r}: expected more than 0; 1e-6 is a bucket a parameter")
    return max(1, int(given * 2**20))


def is_averaged(params: Iterable[torch.nn.Parameter]) -> bool:
    """Whether a module under `DistributedDataParallel` holds any of these, so that it averages their gradients."""
    ours = set(params)
    return any(wrapper() is not None and not ours.isdisjoint(module.parameters())
               for module, wrapper in list(_wrapped_by.items()))  # fmt: skip


def _trained(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters to average, once each.

    Raises:
        TypeError, ValueError: `module` cannot be wrapped.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is {type(module).__name__}: expected a torch.nn.Module")
    for part in module.modules():
        wrapper = _wrapped_by.get(part, lambda: None)()
        if wrapper is not None or isinstance(part, DistributedDataParallel | torch.nn.parallel.DistributedDataParallel):
            raise ValueError("the module, or a part of it, is wrapped already: its gradients would be averaged twice")
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the module has no trained parameter: there is no gradient to average")
    for name, param in module.named_parameters():
        if param.is_meta:
            raise ValueError(f"{name} is on the meta device and holds no values: give the module memory first "
                             "(module.to_empty(device=…), then initialise it)")  # fmt: skip
    return named


def _identity(module: torch.nn.Module) -> dict[str, tuple]:
    """Of every parameter: which tensor it is, where, of which type, and whether it is trained."""
    return {name: (id(p), p.device, p.dtype, p.requires_grad) for name, p in module.named_parameters()}
