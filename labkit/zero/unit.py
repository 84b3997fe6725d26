"""A unit: the part of a model, such as one block, whose parameters are gathered, used and freed together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labkit.trace import label, span
from labkit.zero.flat_shard import FlatShard, Reduction

#: Where a module keeps a parameter: tied weights have several such slots.
Slot = tuple[torch.nn.Module, str]


@dataclass(frozen=True)
class Member:
    """A parameter that a unit is to shard: its name in the model, and all slots in which it stands."""

    name: str
    param: torch.nn.Parameter
    slots: list[Slot]


class Unit:
    """The parameters of a module that belong to no smaller unit in it.

    Between its uses a unit holds its shards alone, and the module's slots show this rank's pieces. In use the slots
    show the full parameters.

    Args:
        module: Whose forward needs the parameters.
        number: In labels: 0, 1, … for blocks, −1 for what is left.
        members: Its parameters.
        group: Whose ranks share them.
        device: Where.
        param_dtype: In which floating-point parameters are gathered, and gradients reduced; ``None``: their own.
        keep: Stay gathered from forward to backward.
    """

    def __init__(
        self, module: torch.nn.Module, number: int, members: list[Member], group: dist.ProcessGroup | None,
        device: torch.device, param_dtype: torch.dtype | None, keep: bool,
    ) -> None:  # fmt: skip
        self.module, self.number, self.keep = module, number, keep
        self.inside = set(module.modules())
        self.flats: list[FlatShard] = []
        self.slots: list[tuple[Slot, torch.nn.Parameter, torch.nn.Parameter]] = []  # where, piece, full
        for (dtype, _), alike in _by_kind(members).items():
            compute = param_dtype if param_dtype is not None and dtype.is_floating_point else dtype
            flat = FlatShard([m.name for m in alike], [m.param for m in alike], group, device, compute)
            self.flats.append(flat)
            for member, piece, full in zip(alike, flat.pieces, flat.fulls, strict=True):
                self.slots += [(slot, piece, full) for slot in member.slots]
        self.trained = [flat for flat in self.flats if flat.trained]
        self.is_gathered = False
        self.in_backward = False
        self.inputs_done = True  # in backward: nothing below will ask for a frozen parameter
        self._works: list[Any] = []
        self.show_pieces()

    @property
    def version(self) -> int:
        """Counts in-place changes of the shards."""
        return sum(flat.shard._version for flat in self.flats)

    def show_pieces(self) -> None:
        """The module's parameters are this rank's pieces: what optimizers and users are to see."""
        for (module, name), piece, _ in self.slots:
            module._parameters[name] = piece

    def show_full(self) -> None:
        """The module's parameters are the full ones: what its forward is to see."""
        for (module, name), _, full in self.slots:
            module._parameters[name] = full

    def gather(self, async_op: bool) -> None:
        """Begin to gather, unless that was done."""
        if not self.is_gathered:
            with label(unit=self.number):
                self._works = [work for flat in self.flats if (work := flat.gather(async_op)) is not None]
            self.is_gathered = True

    def wait(self) -> None:
        """Until the full parameters may be used."""
        for work in self._works:
            work.wait()
        self._works = []

    def free(self) -> None:
        if self.is_gathered:
            self.wait()
            with label(unit=self.number), span("free"):
                for flat in self.flats:
                    flat.gathered.free()
            self.is_gathered = False

    def when_gradients_come(self, tell: Callable[[Unit, FlatShard, int], None]) -> None:
        """Call `tell` for each parameter's gradient, once all its uses in a backward are added up."""
        for flat in self.trained:
            for index, full in enumerate(flat.fulls):
                full.register_post_accumulate_grad_hook(lambda _, flat=flat, index=index: tell(self, flat, index))

    @property
    def has_gradients(self) -> bool:
        return any(flat.arrived for flat in self.trained)

    @property
    def is_complete(self) -> bool:
        """Whether this backward has no more use for the unit."""
        return self.inputs_done and all(len(flat.arrived) == len(flat.fulls) for flat in self.trained)

    def reduce(self, async_op: bool) -> list[Reduction]:
        """Begin to reduce the gradients; parameters without one bring zeros, so that all ranks reduce the same."""
        with label(unit=self.number):
            return [flat.reduce(async_op) for flat in self.trained]


def _by_kind(members: list[Member]) -> dict[tuple[torch.dtype, bool], list[Member]]:
    """A flat buffer has one element type, and is reduced as a whole or, frozen, not at all."""
    kinds: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in members:
        kinds.setdefault((member.param.dtype, member.param.requires_grad), []).append(member)
    return kinds
