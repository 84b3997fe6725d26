"""What happens to a step's gradients once they are complete: added up among replicas and ties, divided, added on."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives, device
from labkit.collectives import placement


class Kept:
    """Gradients that were there before a step. They are laid aside, so that only the step's own are divided."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self._before = [(param, param.grad) for param in params]
        for param in params:
            param.grad = None

    @torch.no_grad()
    def add_back(self, divided_by: float) -> None:
        """Divide the step's gradients, and add them to those from before."""
        for param, before in self._before:
            if param.grad is None:
                param.grad = before
                continue
            param.grad /= divided_by
            if before is not None:
                before += param.grad
                param.grad = before

    def put_back(self) -> None:
        """As if there had been no step."""
        for param, before in self._before:
            param.grad = before


def add_up_over(group: dist.ProcessGroup, module: torch.nn.Module) -> list[Any]:
    """Begin to add up a stage's gradients over its replicas: one all-reduce for each element type.

    Returns:
        Handles; after ``wait()`` each ``grad`` is the sum.
    """
    by_type: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for param in module.parameters():
        if param.requires_grad:
            by_type.setdefault(param.dtype, []).append(param)
    return [_Sum(group, params) for params in by_type.values()]


class _Sum:
    """An all-reduce of many gradients as one flat tensor, under way. A replica without a gradient brings zeros."""

    def __init__(self, group: dist.ProcessGroup, params: list[torch.nn.Parameter]) -> None:
        self._params = params
        self._flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params])
        self._work = collectives.all_reduce(self._flat, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        for param, piece in zip(self._params, self._flat.split([p.numel() for p in self._params]), strict=True):
            param.grad = piece.view(param.shape)


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that lives in several places.

    Attributes:
        params: Those on this rank.
        ranks: All ranks of the pipeline that have one, the first of which adds up.
    """

    params: list[torch.nn.Parameter]
    ranks: list[int]


def tied_parameters(params: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None) -> list[Tied]:
    """The parameters that `labkit.collectives.mark` calls tied, if they are in several places; all take one value.

    Raises:
        ValueError: Two of one name differ in shape or type, or only one of them is trained.
    """
    here: dict[Hashable, list[torch.nn.Parameter]] = {}
    for param in params:
        if (name := placement(param).tied) is not None:
            here.setdefault(name, []).append(param)
    looks = {name: [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in found] for name, found in here.items()}
    everywhere = _told(looks, group)
    ties = []
    for name in sorted({name for names in everywhere for name in names}, key=repr):
        ranks = [rank for rank, names in enumerate(everywhere) if name in names]
        kinds = sorted({kind for rank in ranks for kind in everywhere[rank][name]}, key=repr)
        if len(kinds) > 1:
            raise ValueError(f"parameters tied as {name!r} are (shape, type, trained) {kinds}: expected one kind")
        if name in here and (len(ranks) > 1 or len(here[name]) > 1):
            tied = Tied(here[name], ranks)
            with torch.no_grad():
                value = _from_first(tied.params[0].detach(), tied, group)
                for param in tied.params:
                    param.copy_(value)
            ties.append(tied)
    return ties


def _told(what: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What each rank says, on all ranks."""
    ranks, here = dist.get_world_size(group), device.current()
    said = torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8).to(here)
    sizes = torch.empty(ranks, dtype=torch.int64, device=here)
    collectives.all_gather(sizes, torch.tensor([len(said)], device=here), group=group)
    rows = torch.zeros(ranks, int(sizes.max()), dtype=torch.uint8, device=here)
    mine = rows[dist.get_rank(group)].clone()
    mine[: len(said)] = said
    collectives.all_gather(rows, mine, group=group)
    return [pickle.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]


@torch.no_grad()
def add_up_tied(ties: list[Tied], group: dist.ProcessGroup | None) -> None:
    """Each place of a tied parameter gets the sum of all places' gradients, the same bits everywhere."""
    me = dist.get_rank(group)
    for tied in ties:
        if not tied.params[0].requires_grad:
            continue
        total = torch.zeros_like(tied.params[0])
        for param in tied.params:
            if param.grad is not None:
                total += param.grad
        if me != tied.ranks[0]:
            collectives.send(total, _global(group, tied.ranks[0]), group)
        else:
            for rank in tied.ranks[1:]:
                more = torch.empty_like(total)
                collectives.recv(more, _global(group, rank), group)
                total += more
        total = _from_first(total, tied, group)
        for param in tied.params:
            param.grad = total.clone()


def _from_first(value: torch.Tensor, tied: Tied, group: dist.ProcessGroup | None) -> torch.Tensor:
    """What the first of the places has."""
    first, me = tied.ranks[0], dist.get_rank(group)
    if me == first:
        for rank in tied.ranks[1:]:
            collectives.send(value, _global(group, rank), group)
        return value
    came = torch.empty_like(value)
    collectives.recv(came, _global(group, first), group)
    return came


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
