"""A unit: the part of a model, such as one block, whose parameters are gathered, used and freed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labkit.trace import label, span
from labkit.zero.flat_shard import FlatShard, Reduction, phase


@dataclass(frozen=True)
class Member:
    """A parameter that a unit is to shard.

    Attributes:
        name: In the model.
        param: Full.
        slots: Where it stands, as (module, name in it); tied weights have several.
    """

    name: str
    param: torch.nn.Parameter
    slots: list[tuple[torch.nn.Module, str]]

    def put(self, param: torch.nn.Parameter) -> None:
        """Let the modules see this one in all its slots."""
        for module, name in self.slots:
            module._parameters[name] = param


class Unit:
    """The parameters of a module that belong to no smaller unit in it.

    Between its uses a unit holds its shards alone, and the module shows this rank's pieces as its parameters. In use
    the module shows the full ones.

    Args:
        module: Whose forward needs the parameters.
        members: The parameters.
        group: Whose ranks share them.
        device: Where.
        param_dtype: In which floating-point parameters are gathered, and gradients reduced; ``None``: their own.
        keep: Stay gathered from forward to backward.

    Attributes:
        number: In labels: 0, 1, … for blocks in their order, −1 for the root, which has what is left.
        flats: One a kind of parameter: an element type, trained or frozen. Most units have one.
        is_gathered: Whether its full parameters are there, or on their way.
        in_backward: Whether backward is in the unit.
        conductor: Who says when it is gathered and freed.
        inputs_done: Whether no part of backward will ask for a frozen parameter any more.
    """

    def __init__(
        self, module: torch.nn.Module, members: list[Member], group: dist.ProcessGroup | None, device: torch.device,
        param_dtype: torch.dtype | None, keep: bool,
    ) -> None:  # fmt: skip
        self.module, self.keep, self.number = module, keep, -1
        self.inside = set(module.modules())
        self.flats: list[FlatShard] = []
        self._members: list[tuple[Member, FlatShard, int]] = []
        for (dtype, _), alike in _by_kind(members).items():
            compute = param_dtype if param_dtype is not None and dtype.is_floating_point else dtype
            flat = FlatShard([m.name for m in alike], [m.param for m in alike], group, device, compute)
            self.flats.append(flat)
            self._members += [(member, flat, index) for index, member in enumerate(alike)]
        self.trained = [flat for flat in self.flats if flat.trained]
        self.has_frozen = len(self.trained) < len(self.flats)
        self.is_gathered = self.in_backward = False
        self.inputs_done = True
        self._works: list[Any] = []
        self.conductor: Any = None
        self.show_pieces()

    # What the module sees

    def show_pieces(self) -> None:
        for member, flat, index in self._members:
            member.put(flat.pieces[index])

    def show_full(self) -> None:
        for member, flat, index in self._members:
            member.put(flat.fulls[index])

    def members(self) -> Iterator[tuple[Member, FlatShard, int]]:
        """Each parameter: what it was, and where it is now, as (member, flat shard, index in it)."""
        yield from self._members

    def changed(self) -> str | None:
        """The name of a parameter that is not in its place any more, where hooks and shards would not know it."""
        for member, flat, index in self._members:
            piece = flat.pieces[index]
            in_place = all(module._parameters.get(name) is piece for module, name in member.slots)
            same_memory = piece.untyped_storage()._cdata == flat.shard.untyped_storage()._cdata
            if not in_place or not same_memory or piece.requires_grad != flat.trained:
                return member.name
        return None

    @property
    def version(self) -> int:
        """Grows with each in-place change of the parameters."""
        return sum(flat.shard._version for flat in self.flats)

    # Parameters

    def gather(self, async_op: bool = False) -> None:
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
        """Have the shards alone."""
        if self.is_gathered:
            self.wait()
            if self.flats:  # an empty root has nothing to free, and says nothing
                with label(unit=self.number), span("free", phase=phase()):
                    for flat in self.flats:
                        flat.gathered.free()
            self.is_gathered = False

    # Gradients

    def when_gradients_come(self, tell: Callable[[FlatShard, int], None]) -> None:
        """Call `tell` for each parameter's gradient, once all its uses in a backward are added up."""
        for flat in self.trained:
            for index, full in enumerate(flat.fulls):
                full.register_post_accumulate_grad_hook(lambda _, flat=flat, index=index: tell(flat, index))

    @property
    def has_gradients(self) -> bool:
        return any(flat.arrived for flat in self.trained)

    @property
    def is_complete(self) -> bool:
        """Whether this backward has no more use for the unit."""
        return self.inputs_done and all(len(flat.arrived) == len(flat.fulls) for flat in self.trained)

    def reduce(self, async_op: bool) -> list[Reduction]:
        """Begin to reduce all gradients."""
        with label(unit=self.number):
            return [flat.reduce(async_op) for flat in self.trained]

    def forget(self) -> None:
        """Drop the gradients of a backward that was cut short."""
        self.in_backward = False
        self.show_pieces()
        self.free()
        for flat in self.trained:
            flat.arrived.clear()
            flat.gradients.free()


def _by_kind(members: list[Member]) -> dict[tuple[torch.dtype, bool], list[Member]]:
    """A flat buffer has one element type, and is reduced as a whole or, frozen, not at all."""
    kinds: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in members:
        kinds.setdefault((member.param.dtype, member.param.requires_grad), []).append(member)
    return kinds
