"""Mixed precision: compute in 16 bits, update and add up in 32.

bf16 keeps 8 bits of a number, so 1.0 + 0.001 is 1.0: what is added a thousand times is lost a thousand times. The
forward and backward passes bear that, sums do not. So each parameter has two copies, and two places for its gradient:

    bytes a parameter              kept in    what it is for
    2  working copy                16 bits    forward and backward
    2  its gradient                16 bits    made by backward, then given up
    4  sum of gradients            fp32       over micro-batches, and ranks if asked for
    4  master copy                 fp32       what the optimizer updates, then rounded into the working copy
    8  Adam's two moments          fp32

Source: Micikevicius et al. 2018, "Mixed Precision Training", sections 3.1 (master weights) and 3.2 (loss scaling).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from labkit import collectives
from labkit.collectives import check, mark, placement
from labkit.tricks.norm import Group, clip_grad_norm_
from labkit.tricks.scaler import GradScaler

#: Element types in which a module may compute.
HALVES = (torch.bfloat16, torch.float16)


class MixedPrecision:
    """Turn a module into its 16-bit working copy, and an optimizer to fp32 master copies of its parameters.

    1. `backward` makes 16-bit gradients of the working copy and adds them to the masters' ``grad``, in fp32.
    2. `clip_grad_norm_`, if wanted: complete, unscaled, of the whole model.
    3. `step` updates the masters, unless a gradient overflowed on any rank, and rounds them into the working copy.

    Wrap the module in `labkit.data_parallel.DistributedDataParallel` afterwards, not before: the wrapper takes the
    element type from the parameters. It averages 16-bit gradients, in each backward. Where it does not, inside its
    ``no_sync()``, or where there is no wrapper, give `data_parallel_group`: the fp32 sums are averaged, once a step.
    (What a wrapper has averaged already is the same on all ranks, so that its mean is itself.) All ranks begin with the
    same parameters: masters are made here, before a wrapper spreads rank 0's.

    Args:
        module: In fp32. Its parameters and floating-point buffers are rounded in place; they stay the same objects,
            with their marks. Its inputs and activations are 16-bit from now on, and what it keeps count of in buffers
            (a BatchNorm's running statistics) too.
        optimizer: Of torch, made for parameters of `module`. Its parameters are replaced by masters.
        dtype: ``torch.bfloat16``, with the range of fp32; or ``torch.float16``, with three more bits and a range that
            needs a `scaler`.
        scaler: Multiplies the loss; its ``update()`` is called by `step`.
        data_parallel_group: Ranks whose fp32 sums of gradients are averaged; ``None``: that is done, or there is one.

    Attributes:
        masters: The fp32 parameters that the optimizer has.

    Raises:
        TypeError, ValueError: An argument cannot be used.

    Example:
        >>> module = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(module.weight)
        >>> mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), lr=0.001))
        >>> for step in range(1000):
        ...     mixed.zero_grad()
        ...     mixed.backward(-module(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        ...     _ = mixed.step()
        >>> module.weight.item()                                    # in bf16 alone it would still be 1.0
        2.0

    Source: as this file's.
    """

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.bfloat16,
        scaler: GradScaler | None = None, data_parallel_group: Group = None,
    ) -> None:  # fmt: skip
        _check(module, optimizer, dtype, scaler)
        if data_parallel_group is not None:
            check.member(data_parallel_group)
        self.module, self.optimizer, self.dtype = module, optimizer, dtype
        self.scaler = scaler if scaler is not None else GradScaler(enabled=False)
        self.data_parallel_group = data_parallel_group
        self._pairs = [
            _with_master(optimizer, params, n)
            for params in (group["params"] for group in optimizer.param_groups)
            for n in range(len(params))
        ]
        self.masters = [master for _, master in self._pairs]
        self._complete = self._stepped = False
        module.to(dtype)
        self._versions = [-1] * len(self._pairs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch, scaled; its gradients are added to the masters'.

        Args:
            loss: A scalar. Where k of them make up a step, each is divided already: by k, or by the tokens of all.
        """
        self.scaler.scale(loss).backward()
        self.collect()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For `labkit.tricks.accumulate`, which asks for it: over `data_parallel_group` it is averaged once a step."""
        yield

    @torch.no_grad()
    def collect(self) -> None:
        """Add the working copy's gradients to the masters', and give them up. `backward` and `step` do it.

        After a backward that something else began, such as a pipeline's engine, call it before the next one.

        Raises:
            RuntimeError: The step's gradients are complete already; or somebody wrote to the working copy.
        """
        self._begin_anew()
        self._refuse_others_weights()
        for working, master in self._pairs:
            master.requires_grad_(working.requires_grad)
            if (grad := working.grad) is None:
                continue
            if self._complete:
                raise RuntimeError("there are gradients of another backward, but those of this step are averaged and "
                                   "unscaled already: call step() and zero_grad() before it")  # fmt: skip
            if master.grad is None:
                master.grad = grad.to(master.dtype, memory_format=torch.preserve_format, copy=True)
            else:
                master.grad += grad
            working.grad = None

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, pipeline_group: Group = None
    ) -> torch.Tensor:
        """As `labkit.tricks.clip_grad_norm_`, of the masters' gradients, once they are averaged and unscaled."""
        self._make_complete()
        return clip_grad_norm_(self.masters, max_norm, norm_type, error_if_nonfinite, pipeline_group)

    def step(self) -> bool:
        """Update the masters and the working copy, and the scaler.

        Returns:
            Whether it was done: ``False`` if a gradient overflowed on any rank. The same on all ranks.

        Raises:
            RuntimeError: The gradients were used in a step already; or as `collect`.
        """
        self._make_complete()
        if self._stepped:
            raise RuntimeError("step() was called already with these gradients: call zero_grad() after each step")
        skipped = self.scaler.skipped_steps
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._stepped = True
        self._round()
        return self.scaler.skipped_steps == skipped

    def zero_grad(self) -> None:
        """Give up all gradients, of the working copy and of the masters."""
        self.module.zero_grad()
        self.optimizer.zero_grad()
        self._complete = self._stepped = False

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the masters (the module's own state has them rounded), optimizer, scaler."""
        masters = [master.detach() for master in self.masters]
        return {"masters": masters, "optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken; the working copy is rounded anew.

        Raises:
            ValueError: The masters are others, or some of the state is missing.
        """
        if not isinstance(state, dict) or set(state) != {"masters", "optimizer", "scaler"}:
            raise ValueError(f"state is {sorted(state) if isinstance(state, dict) else state!r}: expected what "
                             "state_dict() of a MixedPrecision gives: masters, optimizer, scaler")  # fmt: skip
        have, want = ([tuple(m.shape) for m in masters] for masters in (state["masters"], self.masters))
        if have != want:
            raise ValueError(f"state has masters of shapes {have}: expected {want}")
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for working, master in self._pairs:
            working.copy_(master)
        self._versions = [working._version for working, _ in self._pairs]

    def _begin_anew(self) -> None:
        """After a step, when its gradients were given up, by whichever zero_grad."""
        if self._stepped and all(master.grad is None for master in self.masters):
            self._complete = self._stepped = False

    def _refuse_others_weights(self) -> None:
        """Whoever writes to the working copy writes nothing that lasts: the next step puts the master there.

        At first all values are compared, since a wrapper may write behind autograd's back; then those of a new version.
        """
        for n, (working, master) in enumerate(self._pairs):
            if working._version == self._versions[n]:
                continue
            if not torch.equal(working, master.to(working.dtype)):
                raise RuntimeError(
                    f"a parameter of shape {tuple(working.shape)} was written to (by load_state_dict, or by a wrapper "
                    "that takes over rank 0's), and its master does not know: load weights, and make them equal on all "
                    "ranks, before MixedPrecision; or use its own load_state_dict()"
                )
            self._versions[n] = working._version

    def _make_complete(self) -> None:
        """Once a step: collected, averaged, unscaled."""
        self.collect()
        if self._complete:
            return
        if self.data_parallel_group is not None:
            _average(self.masters, self.data_parallel_group)
        self.scaler.unscale_(self.optimizer)
        self._complete = True


def _check(module: Any, optimizer: Any, dtype: Any, scaler: Any) -> None:
    if dtype not in HALVES:
        raise ValueError(f"dtype={dtype!r}: expected torch.bfloat16 or torch.float16")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is {type(module).__name__}: expected a torch.nn.Module")
    if hasattr(module, "no_sync"):
        raise TypeError(f"module is {type(module).__name__}, whose buckets are fp32: expected the module inside; wrap "
                        "it after MixedPrecision")  # fmt: skip
    if hasattr(optimizer, "grad_shards"):
        raise TypeError(f"{type(optimizer).__name__} keeps masters of its own: cast the module, and use it without "
                        "MixedPrecision")  # fmt: skip
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {optimizer!r}: expected one of torch.optim, such as AdamW(module.parameters())")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler is {scaler!r}: expected labkit.tricks.GradScaler(), or None")
    own = set(module.parameters())
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in own:
                raise ValueError(f"the optimizer has a parameter of shape {tuple(param.shape)} that module has not: "
                                 "make it as AdamW(module.parameters())")  # fmt: skip
            if not param.is_floating_point():
                raise ValueError(f"the optimizer has a parameter of {param.dtype}: expected floating-point ones")


def _with_master(
    optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], n: int
) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Put a master in the n-th parameter's place; it lives where that one lives, and takes over its state."""
    working = params[n]
    wide = torch.promote_types(working.dtype, torch.float32)
    master = torch.nn.Parameter(working.detach().to(wide, copy=True), working.requires_grad)
    lives = placement(working)
    params[n] = mark(master, lives.sharded, lives.replicated, lives.partial, lives.tied)
    if working in optimizer.state:
        optimizer.state[master] = optimizer.state.pop(working)
    return working, master


@torch.no_grad()
def _average(masters: list[torch.nn.Parameter], group: Group) -> None:
    """Average gradients over a group: one all-reduce a kind. A rank without one of them brings zeros."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for master in masters:
        if master.requires_grad:
            kinds.setdefault((master.dtype, master.device), []).append(master)
    for params in kinds.values():
        has = torch.tensor([param.grad is not None for param in params], dtype=params[0].dtype, device=params[0].device)
        flat = torch.cat([has, *((torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params)])
        collectives.all_reduce(flat, op="avg", group=group)
        anywhere, *grads = flat.split([len(params), *(param.numel() for param in params)])
        for param, grad, somewhere in zip(params, grads, anywhere.tolist(), strict=True):
            param.grad = grad.view(param.shape).clone() if somewhere else None
