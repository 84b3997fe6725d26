"""What a training holds on this rank, by name, as it goes into a save and comes out of one, at any stage of ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from labkit.data_parallel import DistributedDataParallel
from labkit.zero.flat import Piece
from labkit.zero.fully_sharded import FullyShardedDataParallel
from labkit.zero.run_of import Run
from labkit.zero.sharded import ShardedOptimizer

#: What shows a module's parameters under a longer name.
WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, torch.nn.parallel.DistributedDataParallel)


@dataclass(frozen=True)
class Held:
    """This rank's run of one parameter or buffer, laid flat.

    Attributes:
        name: In the bare module.
        shape: The whole's.
        offset: Where the run begins in the whole.
        values: (length,), in the module's element type. A view, unless the parameter has gaps in memory.
        wide: (length,), what the optimizer steps on: an fp32 master, or `values`.
        key: Under which the optimizer keeps its state, and `like`, the shape that a moment has there.
    """

    name: str
    shape: torch.Size
    offset: int
    values: torch.Tensor
    wide: torch.Tensor
    key: torch.Tensor
    like: torch.Size

    @property
    def has_master(self) -> bool:
        return self.wide is not self.values


class Stored:
    """All that is held. Keys of a save: ``model/name``, ``state/name/exp_avg``, ``state/name/master``."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self._names: dict[torch.Tensor, str] = {}
        self._aliases: dict[str, str] = {}
        for name, tensor in tensors_of(module):
            if (first := self._names.setdefault(tensor, name)) != name:
                self._aliases[name] = first
        held = _held(module, optimizer)
        self._held = [held(name, tensor) for tensor, name in self._names.items()]
        self._reads: dict[str, Run] = {}
        self._groups = None if optimizer is None else [self._named(group) for group in optimizer.param_groups]

    def _named(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter group with names.

        Raises:
            ValueError: The optimizer steps on what is not the module's.
        """
        if any(param not in self._names for param in group["params"]):
            raise ValueError("the optimizer holds a parameter that the module has not: expected both of one model, and "
                             "an optimizer that was made after the module was wrapped")  # fmt: skip
        return {**group, "params": [self._names[param] for param in group["params"]]}

    # Into a save

    def writes(self) -> dict[str, Run]:
        """Key → this rank's run, of all that elements have one of."""
        found = {}
        for held in self._held:
            found[f"model/{held.name}"] = held.values
            if held.has_master:
                found[f"state/{held.name}/master"] = held.wide
            for key, value in self._state(held).items():
                if _is_moment(key, value, held):
                    found[f"state/{held.name}/{key}"] = value.reshape(-1)
        by_name = {held.name: held for held in self._held}
        return {key: _run(value, by_name[key.split("/")[1]]) for key, value in found.items() if value.numel()}

    def rest(self) -> dict[str, Any]:
        """What is no run: shapes, ties, parameter groups, and what there is one of for a parameter."""
        counters = {
            held.name: {k: _on_cpu(v) for k, v in self._state(held).items() if not _is_moment(k, v, held)}
            for held in self._held if self._state(held)
        }  # fmt: skip
        shapes = {held.name: tuple(held.shape) for held in self._held}
        return {"shapes": shapes, "aliases": self._aliases, "groups": self._groups, "counters": counters}

    def _state(self, held: Held) -> Mapping[str, Any]:
        return {} if self.optimizer is None else self.optimizer.state.get(held.key, {})

    # Out of one

    def expect(self, rest: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Make room for what was saved: `saved` says, for each key, in which element type.

        Raises:
            ValueError: It is of another model, or has no optimizer.
        """
        self._compare(rest)
        for held in self._held:
            master = f"state/{held.name}/master"
            self._expect(master if master in saved else f"model/{held.name}", held.wide, held)
            if self._steps_on(held):
                self._make_state(held, rest["counters"].get(held.name, {}), saved)

    def _steps_on(self, held: Held) -> bool:
        """Whether the optimizer will keep a state of this run. ShardedOptimizer leaves out what it has nothing of."""
        in_groups = self._groups is not None and any(held.name in group["params"] for group in self._groups)
        return in_groups and not (isinstance(self.optimizer, ShardedOptimizer) and not held.values.numel())

    def _make_state(self, held: Held, counters: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        prefix = f"state/{held.name}/"
        moments = {
            key.removeprefix(prefix): torch.empty(held.like, dtype=entry.properties.dtype, device=held.wide.device)
            for key, entry in saved.items() if key.startswith(prefix) and key != prefix + "master"
        }  # fmt: skip
        for key, value in moments.items():
            self._expect(prefix + key, value.view(-1), held)
        assert self.optimizer is not None
        self.optimizer.state.pop(held.key, None)  # a save from before the first step has none
        if moments or counters:
            copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in counters.items()}
            self.optimizer.state[held.key] = {**copies, **moments}

    def _expect(self, key: str, into: torch.Tensor, held: Held) -> None:
        if into.numel():
            self._reads[key] = _run(into, held)

    def _compare(self, rest: Mapping[str, Any]) -> None:
        mine, theirs = {held.name: tuple(held.shape) for held in self._held}, rest["shapes"]
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                here, there = mine.get(name, "not there"), theirs.get(name, "not there")
                raise ValueError(f"{name} is {here} in this model, {there} in the save: expected a save of the same "
                                 "model")  # fmt: skip
        if self._groups is None:
            return
        if rest["groups"] is None:
            raise ValueError("the save has no optimizer: call load without one")
        if [group["params"] for group in self._groups] != [group["params"] for group in rest["groups"]]:
            raise ValueError("the save's parameter groups hold other parameters than this optimizer's")
        for group, other in zip(self._groups, rest["groups"], strict=True):
            ours, saved = set(group) - set(other), set(other) - set(group)
            if ours & set(getattr(self.optimizer, "defaults", ())) and saved:
                raise ValueError(f"the save's optimizer has {sorted(saved)}, this one {sorted(ours)}: expected one of "
                                 "the same class")  # fmt: skip

    def reads(self) -> dict[str, Run]:
        """Key → room for this rank's run."""
        return self._reads

    @torch.no_grad()
    def finish(self, rest: Mapping[str, Any]) -> None:
        """After the runs have been read."""
        for held in self._held:
            if held.values.untyped_storage()._cdata != held.key.untyped_storage()._cdata and not held.has_master:
                held.key.copy_(held.values.view(held.shape))  # it has gaps in memory
        if self.optimizer is None:
            return
        for group, saved in zip(self.optimizer.param_groups, rest["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if isinstance(self.optimizer, ShardedOptimizer):
            for bucket in self.optimizer.buckets:
                bucket.gather()

    @staticmethod
    def put_together(whole: Mapping[str, torch.Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
        """See `labkit.zero.consolidate`: from whole tensors, each (elements,), under the keys of a save."""
        shapes, groups = rest["shapes"], rest["groups"]
        model = {name: _shaped(whole, f"model/{name}", shape) for name, shape in shapes.items()}
        model.update({alias: model[name] for alias, name in rest["aliases"].items()})
        masters = {name: _shaped(whole, f"state/{name}/master", shape) for name, shape in shapes.items()
                   if f"state/{name}/master" in whole}  # fmt: skip
        if groups is None:
            return {"model": model, "optimizer": None, "masters": masters}
        number = {name: n for n, name in enumerate(name for group in groups for name in group["params"])}
        state = {
            n: {**rest["counters"].get(name, {}),
                **{key.split("/")[2]: value.view(shapes[name]) for key, value in whole.items()
                   if key.startswith(f"state/{name}/") and not key.endswith("/master")}}
            for name, n in number.items()
        }  # fmt: skip
        plain = [{**group, "params": [number[name] for name in group["params"]]} for group in groups]
        return {"model": model, "optimizer": {"state": {n: s for n, s in state.items() if s}, "param_groups": plain},
                "masters": masters}  # fmt: skip


def tensors_of(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers under the names that they have in the bare module; tied ones under each."""
    if isinstance(module, WRAPPERS):
        yield from tensors_of(module.module, prefix)
        return
    for name, param in module._parameters.items():
        if param is not None:
            yield prefix + name, param
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, child in module._modules.items():
        if child is not None:
            yield from tensors_of(child, f"{prefix}{name}.")


def _held(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    """A function of (name, tensor) that says what this rank holds of it."""
    pieces: dict[torch.Tensor, tuple[torch.Size, int]] = {
        flat.pieces[index]: (flat.fulls[index].shape, flat.run(index)[0])
        for part in module.modules() if isinstance(part, FullyShardedDataParallel)
        for unit in part.units for _, flat, index in unit.members()
    }  # fmt: skip
    cut: dict[torch.Tensor, tuple[Piece, torch.Tensor]] = {}
    if isinstance(optimizer, ShardedOptimizer):
        cut = {param: (piece, tensor) for b in optimizer.buckets for _, param, piece, tensor in b.whole_list()}

    def held(name: str, tensor: torch.Tensor) -> Held:
        if tensor in pieces:
            shape, offset = pieces[tensor]
            mine = tensor.detach()
            return Held(name, shape, offset, mine, mine, tensor, mine.shape)
        flat = tensor.detach().reshape(-1)
        if tensor in cut:
            piece, stepped = cut[tensor]
            values = flat[piece.offset : piece.offset + piece.length]
            wide = values if stepped.dtype == tensor.dtype else stepped.detach()
            return Held(name, tensor.shape, piece.offset, values, wide, stepped, values.shape)
        return Held(name, tensor.shape, 0, flat, flat, tensor, tensor.shape)

    return held


def _run(values: torch.Tensor, held: Held) -> Run:
    return Run.of(values, held.offset, held.shape.numel())


def _is_moment(key: str, value: Any, held: Held) -> bool:
    """Whether an entry of the optimizer's state has a number for each element."""
    return key != "step" and isinstance(value, torch.Tensor) and value.shape == held.like


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _shaped(whole: Mapping[str, torch.Tensor], key: str, shape: tuple[int, ...]) -> torch.Tensor:
    return whole[key].view(shape) if key in whole else torch.empty(shape)
