"""A model built on the meta device gets its first values one parameter at a time, so that no rank holds it whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from labkit.data_parallel.agreement import spread
from labkit.zero.flat_shard import FlatShard
from labkit.zero.unit import Unit


class Materialising(TorchDispatchMode):
    """Inside, an operation on a meta tensor of the model is done on real memory.

    The first operation that reads or writes a parameter makes it real; the first one that needs another parameter
    leaves of it what lies in this rank's shard. If the initialisation comes back to a parameter it is gathered. All
    ranks do the same, and the values are those of the group's rank 0. What nobody has written is nan, and refused:
    some of `torch.nn.init` (trunc_normal_, orthogonal_, sparse_, dirac_) does nothing to a meta tensor.

    Args:
        homes: Key of each meta parameter (`key`) → where its values go.
        buffers: Key of each meta buffer → the real one.
        group: Whose ranks hold the shards.
        device: Where.
    """

    def __init__(
        self, homes: dict[int, tuple[Unit, FlatShard, int]], buffers: dict[int, torch.Tensor],
        group: dist.ProcessGroup | None, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self._homes, self._buffers, self._group, self._device = homes, buffers, group, device
        self._real: dict[int, torch.Tensor] = {}
        self.touched: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        ours = {key(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and self._is_ours(t)}
        if not ours or _is_view(func):
            return func(*args, **kwargs)
        self.keep_all_but(set(ours))
        back: dict[int, torch.Tensor] = {}

        def real(given: Any) -> Any:
            if not (isinstance(given, torch.Tensor) and self._is_ours(given)):
                return given
            made = self._memory(key(given)).as_strided(given.shape, given.stride(), given.storage_offset())
            back[id(made)] = given
            return made

        made = func(*tree_map(real, args), **tree_map(real, kwargs))
        return tree_map(lambda t: back.get(id(t), t), made)

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and (key(tensor) in self._homes or key(tensor) in self._buffers)

    def _memory(self, of: int) -> torch.Tensor:
        """The real memory of a parameter or buffer, laid flat."""
        if of in self._buffers:
            self.touched.add(of)
            return self._buffers[of]
        if of not in self._real:
            unit, flat, index = self._homes[of]
            full = flat.fulls[index]
            nothing_yet = float("nan") if flat.shard.dtype.is_floating_point else 0
            self._real[of] = torch.full((full.numel(),), nothing_yet, dtype=flat.shard.dtype, device=self._device)
            if of in self.touched:
                unit.gather()
                self._real[of].copy_(full.detach().view(-1))
                unit.free()
        self.touched.add(of)
        return self._real[of]

    def keep_all_but(self, needed: set[int]) -> None:
        """Of parameters that are real and not needed now, keep this rank's part."""
        for of in [of for of in self._real if of not in needed]:
            _, flat, index = self._homes[of]
            values = self._real.pop(of)
            if values.isnan().any():
                raise ValueError(
                    f"{flat.names[index]} was built on the meta device and is not wholly initialised: give init=, "
                    "which writes all of it; trunc_normal_ and orthogonal_ of torch.nn.init do nothing on that device"
                )
            spread([values], self._group)
            flat.keep(index, values)


def key(tensor: torch.Tensor) -> int:
    """Tells whose memory a tensor lies in, also on the meta device: views of a tensor have its key."""
    return tensor.untyped_storage()._cdata


def _is_view(func: Any) -> bool:
    """Whether an operation only looks at the same memory in another way."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def materialise(
    module: torch.nn.Module, units: list[Unit], init: Callable[[torch.nn.Module], Any] | None,
    group: dist.ProcessGroup | None, device: torch.device,
) -> None:  # fmt: skip
    """Initialise the parameters and buffers of `module` that are on the meta device.

    Args:
        module: Its meta parameters belong to `units`, which show the real pieces afterwards.
        units: Built from these meta parameters.
        init: Called with `module`; ``None``: `reset_parameters` of its outermost modules that have one.
        group, device: As of the units.

    Raises:
        ValueError: Something was not initialised.
    """
    found = [(member, unit, flat, index) for unit in units for member, flat, index in unit.members()
             if member.param.is_meta]  # fmt: skip
    homes = {key(member.param): (unit, flat, index) for member, unit, flat, index in found}
    names = {key(member.param): member.name for member, *_ in found}
    metas = [(holder, name, buffer) for holder in module.modules() for name, buffer in holder._buffers.items()
             if buffer is not None and buffer.is_meta]  # fmt: skip
    buffers = {key(b): torch.empty(b.untyped_storage().nbytes() // b.element_size(), dtype=b.dtype, device=device)
               for _, _, b in metas}  # fmt: skip
    names |= {key(buffer): name for _, name, buffer in metas}
    mode = Materialising(homes, buffers, group, device)
    for member, *_ in found:
        member.put(member.param)
    try:
        with mode, torch.no_grad():
            (init or (lambda whole: _reset(whole, mode)))(module)
        mode.keep_all_but(set())
    finally:
        for unit in units:
            unit.show_pieces()
    if left := [name for of, name in names.items() if of not in mode.touched]:
        raise ValueError(f"{left[0]} was built on the meta device and nothing has initialised it: give init=, a "
                         "function that initialises the module, or the module a reset_parameters()")  # fmt: skip
    for holder, name, buffer in metas:
        holder._buffers[name] = buffers[key(buffer)].as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())


def refuse_init(module: torch.nn.Module, init: Any) -> None:
    """
    Raises:
        TypeError, ValueError: It cannot be called, or there is nothing for it to do.
    """
    if init is None:
        return
    if not callable(init):
        raise TypeError(f"init is {init!r}: expected a function of the module")
    if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        raise ValueError("init= is for a module on the meta device, and this one has its values: leave init out")


def _reset(module: torch.nn.Module, mode: Materialising) -> None:
    """From the outside in, until everything has values: a transformer's own initialisation goes before its layers'."""
    for part in module.modules():
        tensors = [*part.parameters(), *part.buffers()]
        if hasattr(part, "reset_parameters") and any(mode._is_ours(t) and key(t) not in mode.touched for t in tensors):
            part.reset_parameters()  # type: ignore[operator]
