"""Loss scaling: small gradients are lifted into what fp16 can hold, and a step that overflows is skipped everywhere.

fp16 holds 6·10⁻⁸ to 65504. Gradients are often below that, and then 0. Multiplying the loss by a scale multiplies
every gradient by it; before the optimizer sees them they are divided again, in fp32. The scale is kept as large as it
can be: it is halved when a gradient overflows, and doubled after many steps in which none did.

Whether to skip a step must be one decision. An inf may be on one rank only: of tensor parallelism, of the pipeline, of
ZeRO. If that rank skips alone, it holds other parameters and another scale from then on.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives, device
from labkit.collectives import check
from labkit.tricks.norm import Group, Measure, was_clipped

#: The loss is multiplied in fp32, and the gradients by one over it: between these the scale stays.
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


class GradScaler:
    """As `torch.amp.GradScaler`, with one verdict on overflow for all ranks.

    `unscale_`, or `step` where it was not called, asks all ranks of `group`: each calls it at the same point.

    Args:
        init_scale: By which the loss is multiplied at first.
        growth_factor: By which the scale is multiplied after `growth_interval` steps without overflow; more than 1.
        backoff_factor: By which it is multiplied after a step with overflow; between 0 and 1.
        growth_interval: In steps.
        enabled: ``False``: `scale` changes nothing, and `step` only steps, as without a scaler.
        group: The ranks that decide together: all that hold a part or a replica of the model. ``None`` is the world.

    Attributes:
        skipped_steps: How many times `step` left the optimizer alone.

    Raises:
        TypeError, ValueError: An argument cannot be used.

    Example:
        >>> scaler = GradScaler(init_scale=1024.0)
        >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scaler.scale(3 * weight.sum()).backward()
        >>> weight.grad
        tensor([3072.])
        >>> scaler.unscale_(optimizer)                      # before clipping
        >>> weight.grad
        tensor([3.])
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.item(), scaler.get_scale(), scaler.skipped_steps
        (-1.0, 1024.0, 0)

    Source: as this file's.
    """

    def __init__(
        self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000, enabled: bool = True, group: Group = None,
    ) -> None:  # fmt: skip
        if group is not None:
            check.member(group)
        self._scale = _number("init_scale", init_scale, 0, LARGEST)
        self.growth_factor = _number("growth_factor", growth_factor, 1, math.inf)
        self.backoff_factor = _number("backoff_factor", backoff_factor, 0, 1)
        self.growth_interval = check.whole_number("growth_interval", growth_interval)
        self.enabled, self.group = enabled, group
        self.skipped_steps = 0
        self._good_steps = 0
        #: Of this step: optimizer → whether its gradients overflowed anywhere; those that have stepped.
        self._overflow: dict[Any, bool] = {}
        self._stepped: set[Any] = set()

    def get_scale(self) -> float:
        """By what the loss is multiplied now."""
        return self._scale if self.enabled else 1.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, times the scale, in float32 at least: call ``backward()`` on it."""
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"the loss is {type(loss).__name__}: expected a tensor")
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self._scale if self.enabled else loss

    @torch.no_grad()
    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale again, and decide with all ranks whether any of them overflowed.

        Clip after it, and before `step`.

        Args:
            optimizer: Of torch, or `labkit.zero.ShardedOptimizer`, whose gradients are reduced first.

        Raises:
            TypeError: `optimizer` is none.
            RuntimeError: It was called already in this step; the gradients were clipped while they were scaled.
            ValueError: The gradients are fp16, in which what was lifted falls back to 0.
        """
        if not self.enabled:
            return
        if optimizer in self._overflow:
            raise RuntimeError("the gradients of this optimizer are unscaled already, or it has stepped: call "
                               "unscale_ once between two calls of update()")  # fmt: skip
        grads = _gradients_of(optimizer)
        self._refuse(grads)
        if grads:
            torch._foreach_mul_(grads, 1 / self._scale)
        self._overflow[optimizer] = self._anywhere(grads)

    def _refuse(self, grads: list[torch.Tensor]) -> None:
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("gradients are torch.float16, in which small ones fall back to 0 when they are unscaled: "
                             "use labkit.tricks.MixedPrecision, or autocast with float32 parameters")  # fmt: skip
        if any(was_clipped(grad) for grad in grads):
            raise RuntimeError(
                f"the gradients were clipped while they were {self._scale:g} times too large, so that nearly nothing "
                "is left of them: call scaler.unscale_(optimizer) first, then clip"
            )

    def _anywhere(self, grads: list[torch.Tensor]) -> bool:
        """Whether any element is inf or nan on any rank of the group: the largest magnitude passes both on."""
        largest = Measure(math.inf, device.current()).of(grads)
        overflow = (~largest.isfinite()).to(torch.float32)
        if dist.is_initialized():
            collectives.all_reduce(overflow, op="max", group=self.group)
        return bool(overflow.item())

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)``, unless a gradient overflowed on any rank; unscales if that was not done.

        Returns:
            What the optimizer's step returned; ``None`` if it was skipped.

        Raises:
            RuntimeError: It was called already in this step.
        """
        if not self.enabled:
            return optimizer.step(*args, **kwargs)
        if optimizer in self._stepped:
            raise RuntimeError("step was called twice with this optimizer: call update() after each step")
        if optimizer not in self._overflow:
            self.unscale_(optimizer)
        self._stepped.add(optimizer)
        if self._overflow[optimizer]:
            self.skipped_steps += 1
            return None
        return optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """At the end of a step, once: back off if there was an overflow, grow after enough steps without one.

        Raises:
            RuntimeError: Nothing was unscaled since the last call.
        """
        if not self.enabled:
            return
        if not self._overflow:
            raise RuntimeError("no gradients were unscaled since the last update(): call step(optimizer) first")
        if any(self._overflow.values()):
            scale, self._good_steps = self._scale * self.backoff_factor, 0
        else:
            scale, self._good_steps = self._scale, self._good_steps + 1
            if self._good_steps >= self.growth_interval:
                scale, self._good_steps = scale * self.growth_factor, 0
        if SMALLEST <= scale <= LARGEST:
            self._scale = scale
        self._overflow, self._stepped = {}, set()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the scale, the steps without overflow, the steps skipped."""
        return {"scale": self._scale, "good_steps": self._good_steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken.

        Raises:
            TypeError, ValueError: `state` was not taken from this class.
        """
        if not isinstance(state, dict) or set(state) != set(self.state_dict()):
            raise ValueError(f"state is {sorted(state) if isinstance(state, dict) else state!r}: expected what "
                             f"state_dict() of labkit's GradScaler gives, {sorted(self.state_dict())}")  # fmt: skip
        scale = _number("scale", state["scale"], 0, LARGEST)
        steps = [check.whole_number(name, state[name], least=0) for name in ("good_steps", "skipped_steps")]
        self._scale, (self._good_steps, self.skipped_steps) = scale, steps


def _number(name: str, value: Any, above: float, below: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}: expected a number")
    if not above < value < below:
        raise ValueError(f"{name}={value}: expected a number above {above}, and below {below}")
    return float(value)


def _gradients_of(optimizer: Any) -> list[torch.Tensor]:
    """Of a sharded optimizer its shards, complete; of another the parameters' gradients."""
    if hasattr(optimizer, "grad_shards"):
        optimizer.reduce_gradients()
        return [grad for grad in optimizer.grad_shards() if grad is not None]
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer is {optimizer!r}: expected one of torch.optim, or a ShardedOptimizer")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param.grad for param in params if param.grad is not None]
