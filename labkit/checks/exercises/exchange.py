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


def forgets_to_return(tensor: torch.Tensor) -> None:
    exchange(tensor)


def returns_its_own(tensor: torch.Tensor) -> torch.Tensor:
    exchange(tensor)
    return tensor


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


def call(fn: Callable[[torch.Tensor], torch.Tensor], case: Case) -> tuple[Any, bool]:
    """What came, and whether the tensor that was given is as it was."""
    tensor = brought(case, dist.get_rank())
    before = tensor.clone()
    theirs: Any = fn(tensor)
    came = _seen(theirs) if isinstance(theirs, torch.Tensor) else None if theirs is None else type(theirs).__name__
    return came, torch.equal(tensor, before)


def _seen(tensor: torch.Tensor) -> tuple[list[int], list, float]:
    """Its shape, some elements, and the sum of all."""
    return list(tensor.shape), tensor.flatten()[:8].tolist(), tensor.sum().item()


def expected(case: Case) -> list[tuple[Any, bool]]:
    return [(_seen(brought(case, rank ^ 1)), True) for rank in range(case.ranks)]


def what_came(case: Case, values: list[Any], bad: list[int]) -> str:
    """The first rank's fault: nothing returned, its own tensor lost, another's tensor, or a wrong element."""
    rank, partner = bad[0], bad[0] ^ 1
    (came, kept), wanted = values[rank], _seen(brought(case, bad[0] ^ 1))
    if came is None:
        return say("exchange.nothing", rank=rank, partner=partner)
    if isinstance(came, str):
        return say("exchange.returned", rank=rank, what=came, partner=partner)
    for other in range(case.ranks):
        if other != partner and came == _seen(brought(case, other)):
            return say("exchange.whose", rank=rank, other=other, partner=partner)
    if came[0] != wanted[0]:
        return say("exchange.shape", rank=rank, have=came[0], want=wanted[0])
    at = next((n for n, (a, b) in enumerate(zip(came[1], wanted[1], strict=True)) if a != b), None)
    if not kept and came == wanted:
        return say("exchange.lost", rank=rank)
    if at is None:
        return say("exchange.later", rank=rank, partner=partner)
    return say("exchange.element", rank=rank, element=at, have=came[1][at], want=wanted[1][at], partner=partner)


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
        Wrong(forgets_to_return, "wrong", "rank 0 returned nothing; expected rank 1's tensor"),
        Wrong(returns_its_own, "wrong", "rank 0 returned what rank 0 brought; its partner is rank 1"),
        Wrong(overwrites_its_input, "wrong", "rank 0's own tensor was changed"),
        Wrong(does_not_wait, "wrong"),
        Wrong(swaps_with_the_right_neighbour, "wrong", "rank 0 returned what rank 3 brought"),
        Wrong(sends_the_size_first, "wasteful", "budget"),
        Wrong(calls_all_to_all, "borrowed", "dist.all_gather"),
    ),
    legal=legal,
    tells=what_came,
    shipped=both_receive_first,
)  # fmt: skip
