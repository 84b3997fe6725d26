"""Before the first step: the ranks compare their modules, then take over the first rank's values."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.data_parallel.buckets import assign

#: Bytes that one broadcast moves at most, but for a larger tensor: each needs a copy of its tensors meanwhile.
CHUNK = 25 * 2**20


def compare(module: torch.nn.Module, group: dist.ProcessGroup | None, on: torch.device) -> None:
    """Every rank must hold the same parameters and buffers, by name, shape, element type and `requires_grad`.

    Raises:
        ValueError: On every rank, naming the first difference.
    """
    told = gather_text(json.dumps(describe(module)), group, on)
    mine = json.loads(told[0])
    for rank, other in enumerate(map(json.loads, told)):
        for have, want in zip(other, mine, strict=False):
            if have != want:
                raise ValueError(f"the ranks' modules differ: rank 0 of the group has {_said(want)}, rank {rank} has "
                                 f"{_said(have)}; build the same module on every rank")  # fmt: skip
        if len(other) != len(mine):
            name = (other if len(other) > len(mine) else mine)[min(len(other), len(mine))][0]
            has, lacks = (rank, 0) if len(other) > len(mine) else (0, rank)
            raise ValueError(f"the ranks' modules differ: rank {has} of the group has {name}, rank {lacks} has not; "
                             "build the same module on every rank")  # fmt: skip


def describe(module: torch.nn.Module) -> list[tuple[str, list[int], str, bool]]:
    """Name, shape, element type, and whether it is trained, of every parameter and saved buffer."""
    found = [*module.named_parameters(), *saved_buffers(module)]
    return [(name, list(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for name, t in found]


def _said(entry: Sequence) -> str:
    name, shape, dtype, trained = entry
    return f"{name} {tuple(shape)} {dtype}" + ("" if trained else ", not trained")


def saved_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers that are part of the module's state, such as running means; not tables that it can make again."""
    saved = module.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in saved]


def gather_text(text: str, group: dist.ProcessGroup | None, on: torch.device) -> list[str]:
    """What each rank of the group says."""
    ranks = dist.get_world_size(group)
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=on)
    lengths = torch.empty(ranks, dtype=torch.int64, device=on)
    collectives.all_gather(lengths, torch.tensor([mine.numel()], device=on), group)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=on)
    padded[: mine.numel()] = mine
    together = torch.empty(ranks, padded.numel(), dtype=torch.uint8, device=on)
    collectives.all_gather(together, padded, group)
    return [bytes(row[:n].tolist()).decode() for row, n in zip(together.cpu(), lengths.tolist(), strict=True)]


@torch.no_grad()
def spread(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Every rank's tensors become those of `source`, a rank of the group: many a message."""
    kinds = [(t.dtype, t.device) for t in tensors]
    root = dist.get_global_rank(group, source) if group is not None else source
    for members in assign([t.nbytes for t in tensors], CHUNK, kinds):
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in members])
        collectives.broadcast(flat, root, group)
        if dist.get_rank(group) == source:
            continue
        for i, piece in zip(members, flat.split([tensors[i].numel() for i in members]), strict=True):
            tensors[i].data.copy_(piece.view(tensors[i].shape))  # an earlier forward's graph may have saved a buffer
