"""`FullyShardedDataParallel`, stage 3: no rank holds the model; each block is put together when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit import device
from labkit.collectives import check
from labkit.data_parallel import agreement
from labkit.zero.conductor import Conductor
from labkit.zero.unit import Member, Slot, Unit


class FullyShardedDataParallel(torch.nn.Module):
    """Stage 3: no rank holds the model; each block is put together when it is needed."""

    def __init__(
        self, module: torch.nn.Module, group: dist.ProcessGroup | None = None,
        blocks: Sequence[torch.nn.Module] | None = None, keep_after_forward: bool = False, prefetch: int = 1,
        param_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check.member(group)
        self.module, self.group = module, group
        agreement.compare(module, group, device.current())
        agreement.spread(list(module.parameters()), group)
        parts = [module, *(_blocks(module) if blocks is None else blocks)]
        members = _members(parts)
        self.units = [
            Unit(part, number, mine, group, device.current(), param_dtype, keep_after_forward)
            for number, (part, mine) in enumerate(zip(parts, members, strict=True), start=-1) if mine
        ]  # fmt: skip
        self.conductor = Conductor(self.units, prefetch)
        for unit in self.units:
            self.conductor.watch(unit)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The elements of the outermost `ModuleList`s: a transformer's blocks."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            for element in child.children():
                if isinstance(element, torch.nn.ModuleList | torch.nn.ModuleDict):
                    yield from _blocks(element)
                else:
                    yield element
        else:
            yield from _blocks(child)


def _members(parts: Sequence[torch.nn.Module]) -> list[list[Member]]:
    """Of each part, the parameters that lie in no smaller part; one in several parts belongs to what holds them all."""
    inside = [set(part.modules()) for part in parts]
    slots: dict[torch.nn.Parameter, tuple[str, list[Slot]]] = {}
    for path, holder in parts[0].named_modules():
        for name, param in holder._parameters.items():
            if param is not None:
                slots.setdefault(param, (f"{path}.{name}".lstrip("."), []))[1].append((holder, name))
    found: list[list[Member]] = [[] for _ in parts]
    for param, (name, where) in slots.items():
        holding = [n for n in range(len(parts)) if all(holder in inside[n] for holder, _ in where)]
        smallest = min(holding, key=lambda n: len(inside[n]))
        found[smallest].append(Member(name, param, where))
    return found
