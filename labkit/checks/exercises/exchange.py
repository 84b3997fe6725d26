"""2.6 · repair a deadlock: two ranks swap large tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks.exercise import Case, Cost, Exercise, Wrong
from labkit.checks.trial import brought
from labkit.show.words import say


def exchange(tensor: torch.Tensor) -> torch.Tensor:
    partner = dist.get_rank() ^ 1
    theirs = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, partner)
    receive = dist.P2POp(dist.irecv, theirs, partner)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return theirs


def both_receive_first(tensor: torch.Tensor) -> torch.Tensor:
    theirs = torch.empty_like(tensor)
    dist.recv(theirs, dist.get_rank() ^ 1)
    dist.send(tensor, dist.get_rank() ^ 1)
    return theirs


def both_send_first(tensor: torch.Tensor) -> torch.Tensor:
    """Works as long as the system's buffers take the message."""
    theirs = torch.empty_like(tensor)
    dist.send(tensor, dist.get_rank() ^ 1)
    dist.recv(theirs, dist.get_rank() ^ 1)
    return theirs


def overwrites_its_input(tensor: torch.Tensor) -> torch.Tensor:
    theirs = exchange(tensor)
    tensor.copy_(theirs)
    return theirs


def does_not_wait(tensor: torch.Tensor) -> torch.Tensor:
    theirs = torch.zeros_like(tensor)
    dist.isend(tensor, dist.get_rank() ^ 1)
    dist.irecv(theirs, dist.get_rank() ^ 1)
    return theirs


def swaps_with_the_right_neighbour(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(tensor)
    for work in [dist.isend(tensor, (rank + 1) % world), dist.irecv(theirs, (rank - 1) % world)]:
        work.wait()
    return theirs


def sends_the_size_first(tensor: torch.Tensor) -> torch.Tensor:
    partner = dist.get_rank() ^ 1
    size, theirs = torch.tensor([tensor.numel()], device=tensor.device), torch.empty_like(tensor)
    their_size = torch.empty_like(size)
    for mine, other in ((size, their_size), (tensor, theirs)):
        for work in [dist.isend(mine, partner), dist.irecv(other, partner)]:
            work.wait()
    return theirs


def calls_all_to_all(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts[dist.get_rank() ^ 1]


def call(fn: Callable[[torch.Tensor], torch.Tensor], case: Case) -> list:
    """What came, and whether the tensor that was given is as it was."""
    tensor = brought(case, dist.get_rank())
    before = tensor.clone()
    theirs: Any = fn(tensor)
    if not isinstance(theirs, torch.Tensor):
        return [say("exchange.returned", what=type(theirs).__name__)]
    return [
        *theirs[:8].tolist(),
        int(theirs.sum()),
        say("exchange.kept" if torch.equal(tensor, before) else "exchange.lost"),
    ]


def expected(case: Case) -> list[list]:
    brought_by = [brought(case, rank) for rank in range(case.ranks)]
    partners = [brought_by[rank ^ 1] for rank in range(case.ranks)]
    return [[*p[:8].tolist(), int(p.sum()), say("exchange.kept")] for p in partners]


def budget(case: Case) -> list[Cost]:
    size = case.elements * getattr(torch, case.dtype).itemsize
    return [Cost(size, 1, None, None)] * case.ranks


def legal(case: Case) -> bool:
    """Everybody has a partner, and the elements an order."""
    return case.ranks % 2 == 0 and case.elements > 1


EXERCISE = Exercise(
    name="exchange",
    number="2.6",
    cases=(Case(2, 2), Case(4, 3, "numbers"), Case(2, 2**20, "numbers"), Case(4, 5, "numbers", "float32")),
    call=call,
    expected=expected,
    budget=budget,
    solution=exchange,
    hints=lambda: (say("exchange.question"), say("exchange.state"), say("exchange.code")),
    wrong=(
        Wrong(both_receive_first, "deadlocked", "both receive first"),
        Wrong(both_send_first, "deadlocked", "both send first"),
        Wrong(overwrites_its_input, "wrong", "given"),
        Wrong(does_not_wait, "wrong"),
        Wrong(swaps_with_the_right_neighbour, "wrong", "rank 0"),
        Wrong(sends_the_size_first, "wasteful", "budget"),
        Wrong(calls_all_to_all, "borrowed", "dist.all_gather"),
    ),
    legal=legal,
)  # fmt: skip
