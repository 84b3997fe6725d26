"""What a sharded optimizer holds, by the parameters' names: to look at, to save, to load again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit.zero.bucket import FlatBucket


@dataclass(frozen=True, slots=True)
class Shard:
    """What this rank holds of one parameter, for saving and for another number of ranks.

    Attributes:
        name: The parameter's, in full if the optimizer was given a module.
        shape: The whole parameter's.
        offset, length: This rank's run of elements, the parameter laid flat. A parameter's runs on the ranks of the
            group, in order, are the whole of it. The length may be 0.
        tensor: (length,), what the optimizer updates: fp32 for 16-bit parameters. Not a copy.
        state: The optimizer's own: (length,) tensors such as ``"exp_avg"``, and what there is one of for a parameter,
            such as ``"step"``; empty before the first step, and where the length is 0. Not copies.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    length: int
    tensor: torch.Tensor
    state: Mapping[str, Any]


def shards(buckets: Sequence[FlatBucket], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> list[Shard]:
    """Of every parameter in the buckets, in their order."""
    return [
        Shard(name, tuple(param.shape), piece.offset, piece.length, tensor, state.get(tensor, {}))
        for bucket in buckets for name, param, piece, tensor in bucket.whole_list()
    ]  # fmt: skip


def saved(
    mine: Sequence[Shard], buckets: Sequence[FlatBucket], groups: Sequence[Mapping[str, Any]],
    names: Mapping[torch.nn.Parameter, str],
) -> dict[str, Any]:  # fmt: skip
    """See `ShardedOptimizer.state_dict`."""
    with_master = {name for bucket in buckets if bucket.master is not None for name in bucket.names}
    return {
        "state": {s.name: {**s.state, **({"master": s.tensor} if s.name in with_master else {})}
                  for s in mine if s.length},
        "runs": {s.name: (s.offset, s.length) for s in mine},
        "param_groups": [{**group, "params": [names[p] for p in group["params"]]} for group in groups],
    }  # fmt: skip


@torch.no_grad()
def load(optimizer: Any, given: Mapping[str, Any]) -> None:
    """See `ShardedOptimizer.load_state_dict`.

    Raises:
        TypeError, ValueError: `given` is no such state, of other parameters, or of other runs of them.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"the state is {type(given).__name__}: expected what state_dict() of a sharded optimizer gave")
    if missing := {"state", "runs", "param_groups"} - set(given):
        raise ValueError(f"the state has no {min(missing)!r}: expected what state_dict() of a sharded optimizer gave, "
                         "not of torch's own")  # fmt: skip
    mine = optimizer.state_dict()
    here, there = mine["runs"], dict(given["runs"])
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            raise ValueError(f"{name}: this rank holds (offset, length) {here.get(name)}, the state is of "
                             f"{there.get(name)}: load it on the same rank of as many")  # fmt: skip
    if [group["params"] for group in mine["param_groups"]] != [group["params"] for group in given["param_groups"]]:
        raise ValueError("the state's parameter groups hold other parameters than this optimizer's")
    for group, saved_group in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group.update({key: value for key, value in saved_group.items() if key != "params"})
    for shard in optimizer.shards():
        values = dict(given["state"].get(shard.name, {}))
        if (master := values.pop("master", None)) is not None:
            shard.tensor.copy_(master)
        if shard.length:
            optimizer.state[shard.tensor] = {key: _copy(value, shard.tensor) for key, value in values.items()}
    for bucket in optimizer.buckets:
        if bucket.master is not None:  # also where the module's weights are loaded later, or not at all
            bucket.shard.copy_(bucket.master)


def _copy(value: Any, like: torch.Tensor) -> Any:
    """A state's value of its own; counters stay where they were, as in torch."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.to(like.device, copy=True)
