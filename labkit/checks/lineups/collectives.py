"""Chapter 02: four that claim to be a ring all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from labkit.checks.exercise import Case
from labkit.checks.exercises import get
from labkit.checks.impostors import Impostor, Lineup
from labkit.show.words import say


def a(tensor: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        arriving = torch.empty_like(tensor)
        for peer in range(1, dist.get_world_size()):
            dist.recv(arriving, peer)
            tensor += arriving
        for peer in range(1, dist.get_world_size()):
            dist.send(tensor, peer)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)


def b(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, 2 * world - 2):
        outgoing, incoming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        arriving = torch.empty_like(incoming)
        for work in [dist.isend(outgoing, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]:
            work.wait()
        incoming.copy_(incoming + arriving if step < world else arriving)


def c(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks, arrived = tensor.tensor_split(world), []
    for step in range(1, 2 * world - 1):
        outgoing, incoming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        arrived.append(torch.empty_like(incoming))
        for work in [dist.isend(outgoing, (rank + 1) % world), dist.irecv(arrived[-1], (rank - 1) % world)]:
            work.wait()
        incoming.copy_(incoming + arrived[-1] if step < world else arrived[-1])


def d(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, 2 * world - 1):
        outgoing, incoming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        arriving = torch.empty_like(incoming)
        for number in range(incoming.numel() or outgoing.numel()):
            works = []
            if number < outgoing.numel():
                works.append(dist.isend(outgoing[number], (rank + 1) % world))
            if number < incoming.numel():
                works.append(dist.irecv(arriving[number], (rank - 1) % world))
            for work in works:
                work.wait()
        incoming.copy_(incoming + arriving if step < world else arriving)


def told(case: Case) -> str:
    nbytes = case.elements * getattr(torch, case.dtype).itemsize
    return say("lineup_02.case", ranks=case.ranks, nbytes=nbytes, elements=case.elements, dtype=case.dtype)


LINEUP = Lineup(
    "02",
    get("ring_all_reduce"),
    Case(4, 64, "numbers"),
    {
        "A": Impostor(a, lambda: say("lineup_02.centre")),
        "B": Impostor(b, lambda: say("lineup_02.short")),
        "C": Impostor(c, lambda: say("lineup_02.hoards")),
        "D": Impostor(d, lambda: say("lineup_02.crumbs")),
    },
    where=told,
)
