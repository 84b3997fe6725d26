"""Some parameters as one flat buffer, of which each rank keeps an Nth: gather it, free it, reduce its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.collectives import mark, placement
from labkit.data_parallel.reducer import in_backward
from labkit.trace import span
from labkit.zero.flat import Piece, cut, shard_size, starts
from labkit.zero.room import Room


class FlatShard:
    """Parameters of one element type, one after the other, cut into N equal shards without regard to their borders.

    Args:
        names, params: The parameters, full, all trained or all frozen; their memory becomes that of `gathered`.
        group: Whose ranks have a shard each.
        device: Where; parameters on the meta device begin as zeros.
        compute: In which element type they are gathered, and their gradients reduced.

    Attributes:
        fulls: The full parameters, readable while `gathered` is open.
        shard: ⌈elements / N⌉ elements: this rank's, the only copy that lasts. What the last shard has beyond the end
            of the parameters is padding, always 0.
        pieces: Of each parameter, what lies in `shard`: a 1-D `Parameter`, a view; empty where this rank has nothing.
        gathered: Memory of all full parameters.
        gradients: Memory of all full gradients of one backward, until they are reduced.
        arrived: Indices of the parameters whose gradient is there.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao et al. 2023, "PyTorch FSDP", section 4.2 (FlatParameter).
    """

    def __init__(
        self, names: list[str], params: list[torch.nn.Parameter], group: dist.ProcessGroup | None,
        device: torch.device, compute: torch.dtype,
    ) -> None:  # fmt: skip
        self.names, self.group, self.trained = names, group, params[0].requires_grad
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        sizes = [p.numel() for p in params]
        size = shard_size(sum(sizes), ranks)
        self._starts, self._end = starts(sizes), sum(sizes)
        self._mine = slice(rank * size, (rank + 1) * size)
        self.shard = torch.zeros(size, dtype=params[0].dtype, device=device)
        self._cut = {piece.index: piece for piece in cut(sizes, ranks, rank)}
        self.pieces = [self._piece(self._cut.get(index), param) for index, param in enumerate(params)]
        self.gathered, self.gradients = Room(ranks * size, compute, device), Room(ranks * size, compute, device)
        self.arrived: set[int] = set()
        self.gathered.open()
        self.fulls = []
        for index, param in enumerate(params):
            if not param.is_meta:
                self.keep(index, param)
            self.fulls.append(_moved(param, self.gathered.place(self._starts[index], param.shape)))
        self.gathered.free()

    def _piece(self, place: Piece | None, param: torch.nn.Parameter) -> torch.nn.Parameter:
        at, length = (place.at, place.length) if place is not None else (0, 0)
        piece = torch.nn.Parameter(self.shard[at : at + length], requires_grad=param.requires_grad)
        lived = placement(param)
        others = tuple(group for group in lived.replicated if group is not self.group)
        return mark(piece, (*lived.sharded, self.group), others, lived.partial, lived.tied)

    def run(self, index: int) -> tuple[int, int]:
        """(offset, length) of the parameter's elements that lie in this rank's shard."""
        place = self._cut.get(index)
        return (place.offset, place.length) if place is not None else (0, 0)

    @torch.no_grad()
    def keep(self, index: int, values: torch.Tensor) -> None:
        """Of a parameter's values keep what lies in this rank's shard."""
        if (place := self._cut.get(index)) is not None:
            self.pieces[index].copy_(values.reshape(-1)[place.offset :][: place.length])

    @torch.no_grad()
    def gather(self, async_op: bool) -> Any:
        """Fill the memory of the full parameters; returns a handle with `async_op`."""
        flat = self.gathered.open()
        flat[self._mine].copy_(self.shard)
        with span("gather", phase=phase()):
            return collectives.all_gather(flat, flat[self._mine], self.group, async_op=async_op)

    @torch.no_grad()
    def collect(self, index: int) -> None:
        """A parameter's gradient has come: it goes into the flat buffer, and its own memory is free again."""
        full = self.fulls[index]
        assert full.grad is not None
        if not self.arrived:
            self.gradients.open()
        place = self._gradient(index)
        if index in self.arrived:
            place.add_(full.grad)
        else:
            place.copy_(full.grad)
        self.arrived.add(index)
        full.grad = None

    def _gradient(self, index: int) -> torch.Tensor:
        """A parameter's place among the full gradients."""
        full = self.fulls[index]
        return self.gradients.flat[self._starts[index] :][: full.numel()].view(full.shape)

    @torch.no_grad()
    def reduce(self, async_op: bool) -> Reduction:
        """Begin the mean over the group, of which each rank keeps its shard; who got no gradient brings zeros."""
        flat = self.gradients.flat if self.arrived else self.gradients.open()
        for index in range(len(self.fulls)):
            if index not in self.arrived:
                self._gradient(index).zero_()
        flat[self._end :].zero_()
        self.arrived.clear()
        mine = torch.empty_like(self.shard, dtype=flat.dtype)
        with span("reduce", phase="backward"):
            work = collectives.reduce_scatter(mine, flat, "avg", self.group, async_op=async_op)
        return Reduction(self, mine, work)


class Reduction:
    """A reduce-scatter under way.

    Args:
        of: Whose gradients.
        mine: This rank's shard of the mean, being filled.
        work: A handle, or ``None`` if it is done.
    """

    def __init__(self, of: FlatShard, mine: torch.Tensor, work: Any) -> None:
        self.of, self._mine, self._work = of, mine, work

    def wait(self) -> None:
        """Until it is done; then the full gradients are freed."""
        if self._work is not None:
            self._work.wait()
        self.of.gradients.free()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and add the mean to the pieces' own gradients."""
        self.wait()
        mine = self._mine.to(self.of.shard.dtype)
        for piece, part in zip(self.of.pieces, mine.split(self._lengths()), strict=False):
            if piece.grad is None:
                piece.grad = part
            else:
                piece.grad.add_(part)

    def _lengths(self) -> list[int]:
        """Of all pieces, and of what is left, the padding."""
        lengths = [piece.numel() for piece in self.of.pieces]
        return [*lengths, self._mine.numel() - sum(lengths)]


def phase() -> str:
    """Of an event that happens now."""
    return "backward" if in_backward() else "forward"


def _moved(param: torch.nn.Parameter, into: torch.Tensor) -> torch.nn.Parameter:
    """The same parameter, its hooks and marks included, with its memory elsewhere."""
    if not param.is_meta:
        param.data = into
        return param
    moved = torch.nn.Parameter(into, requires_grad=param.requires_grad)
    moved.__dict__.update(param.__dict__)
    return moved
