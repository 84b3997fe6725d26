"""Some parameters as one flat buffer, of which each rank keeps an Nth: gather it, free it, reduce its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.collectives import mark, placement
from labkit.trace import span
from labkit.zero.room import Room


class FlatShard:
    """Parameters of one element type, one after the other, cut into N equal shards without regard to their borders.

    Attributes:
        names, fulls: The parameters, full; their memory is `gathered`, and there only while it is gathered.
        starts: Where each begins in the flat buffer.
        size: Elements of one shard: ⌈elements / N⌉. What the last shard has beyond the end is padding, always 0.
        shard: (size), this rank's. The only copy that lasts, and the one that an optimizer changes.
        pieces: Of each parameter what lies in `shard`: a 1-D `Parameter`, a view, empty where this rank has nothing.
        gathered: Memory of all parameters, in the type in which they compute.
        gradients: Memory of all gradients of one backward, until they are reduced.
        arrived: Indices of the parameters whose gradient is there.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao et al. 2023, "PyTorch FSDP", section 4.2 (FlatParameter).
    """

    def __init__(
        self, names: list[str], params: list[torch.nn.Parameter], group: dist.ProcessGroup | None,
        device: torch.device, compute: torch.dtype,
    ) -> None:  # fmt: skip
        self.names, self.group = names, group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        sizes = [p.numel() for p in params]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.size = -(-sum(sizes) // ranks)
        self.first = rank * self.size  # of this rank's shard, in the flat buffer
        self.trained = params[0].requires_grad
        self.shard = torch.zeros(self.size, dtype=params[0].dtype, device=device)
        self.pieces = [self._piece(start, p) for start, p in zip(self.starts, params, strict=True)]
        self.gathered = Room(ranks * self.size, self.shard, compute)
        self.gradients = Room(ranks * self.size, self.shard, compute)
        self.gradients.free()
        self.fulls = []
        for index, param in enumerate(params):
            if not param.is_meta:
                self.keep(index, param)
            self.fulls.append(_moved(param, self.gathered.place(self.starts[index], param.shape)))
        self.gathered.free()
        self.arrived: set[int] = set()

    def _piece(self, start: int, param: torch.nn.Parameter) -> torch.nn.Parameter:
        low, high = self._inside(start), self._inside(start + param.numel())
        piece = torch.nn.Parameter(self.shard[low:high], requires_grad=param.requires_grad)
        lived = placement(param)
        if any(group is self.group for group in lived.sharded):
            raise ValueError(f"a parameter of shape {tuple(param.shape)} is sharded over this group already: give the "
                             "data-parallel group as group=, not the tensor-parallel one")  # fmt: skip
        others = tuple(group for group in lived.replicated if group is not self.group)
        return mark(piece, (*lived.sharded, self.group), others, lived.partial, lived.tied)

    def _inside(self, position: int) -> int:
        """A place in the flat buffer as one in this rank's shard, or the nearest end of it."""
        return min(max(position - self.first, 0), self.size)

    @torch.no_grad()
    def keep(self, index: int, values: torch.Tensor) -> None:
        """Of a parameter's values keep what lies in this rank's shard."""
        start, piece = self.starts[index], self.pieces[index]
        skip = max(self.first - start, 0)
        piece.copy_(values.reshape(-1)[skip : skip + piece.numel()])

    @torch.no_grad()
    def gather(self, async_op: bool) -> Any:
        """Fill the memory of all parameters; with `async_op` a handle is returned."""
        flat = self.gathered.open()
        mine = flat[self.first : self.first + self.size]
        mine.copy_(self.shard)
        with span("gather"):
            return collectives.all_gather(flat, mine, self.group, async_op=async_op)

    @torch.no_grad()
    def collect(self, index: int) -> None:
        """A parameter's gradient has come: it goes into the flat buffer, and its own memory is free again."""
        full = self.fulls[index]
        flat = self.gradients.flat if self.arrived else self.gradients.open()
        place = flat[self.starts[index] :][: full.numel()].view(full.shape)
        if index in self.arrived:
            place.add_(full.grad)
        else:
            place.copy_(full.grad)
        self.arrived.add(index)
        full.grad = None

    @torch.no_grad()
    def reduce(self, async_op: bool) -> Reduction:
        """The mean over the group of all gradients, each rank keeping its shard; who got none brings zeros."""
        flat = self.gradients.flat if self.arrived else self.gradients.open()
        for index, full in enumerate(self.fulls):
            if index not in self.arrived:
                flat[self.starts[index] :][: full.numel()].zero_()
        flat[self.starts[-1] + self.fulls[-1].numel() :].zero_()
        self.arrived.clear()
        mine = torch.empty(self.size, dtype=flat.dtype, device=flat.device)
        with span("reduce"):
            work = collectives.reduce_scatter(mine, flat, "avg", self.group, async_op=async_op)
        return Reduction(self, mine, work)


class Reduction:
    """A reduce-scatter under way. `finish` waits, frees the full gradients, and adds the mean to the pieces' own."""

    def __init__(self, of: FlatShard, mine: torch.Tensor, work: Any) -> None:
        self.of, self._mine, self._work = of, mine, work

    @torch.no_grad()
    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
        self.of.gradients.free()
        mine, start = self._mine.to(self.of.shard.dtype), 0
        for piece in self.of.pieces:
            part = mine[start : start + piece.numel()]
            start += piece.numel()
            if piece.grad is None:
                piece.grad = part
            else:
                piece.grad.add_(part)


def _moved(param: torch.nn.Parameter, into: torch.Tensor) -> torch.nn.Parameter:
    """The same parameter, its hooks and marks included, with its memory elsewhere."""
    if not param.is_meta:
        param.data = into
        return param
    moved = torch.nn.Parameter(into, requires_grad=param.requires_grad)
    moved.__dict__.update(param.__dict__)
    return moved
