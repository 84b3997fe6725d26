"""2.3 · both halves of the ring."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.checks.exercise import Case, Cost, Exercise, Wrong, full_chunks
from labkit.checks.exercises import ring_all_gather as gather
from labkit.checks.exercises import ring_reduce_scatter as scatter
from labkit.checks.trial import brought, shares, watched
from labkit.show.words import say


def ring_all_reduce(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, 2 * world - 1):
        adds = step < world  # the first half adds, the second copies
        outgoing, incoming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        arriving = torch.empty_like(incoming)
        send = dist.P2POp(dist.isend, outgoing, (rank + 1) % world)
        receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % world)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        incoming.copy_(incoming + arriving if adds else arriving)


def forgets_the_second_half(tensor: torch.Tensor) -> None:
    scatter.ring_reduce_scatter(tensor)


def adds_in_the_second_half(tensor: torch.Tensor) -> None:
    scatter.ring_reduce_scatter(tensor)
    gather.adds_what_it_should_copy(tensor)


def starts_the_second_half_with_another_chunk(tensor: torch.Tensor) -> None:
    scatter.ring_reduce_scatter(tensor)
    gather.starts_with_the_next_chunk(tensor)


def sends_to_rank_0_and_back(tensor: torch.Tensor) -> None:
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


def sends_whole_tensors(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    total = tensor.clone()
    for _ in range(1, world):
        arriving = torch.empty_like(tensor)
        for work in [dist.isend(tensor, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]:
            work.wait()
        total += arriving
        tensor.copy_(arriving)
    tensor.copy_(total)


def returns_the_sum(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    ring_all_reduce(total)
    return total


def averages(tensor: torch.Tensor) -> None:
    ring_all_reduce(tensor)
    tensor.copy_(tensor // dist.get_world_size())


def calls_reduce_scatter(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def call(fn: Callable[[torch.Tensor], None], case: Case) -> list:
    tensor = brought(case, dist.get_rank())
    with watched(tensor, case):
        fn(tensor)
    return tensor.tolist()


def expected(case: Case) -> list[list]:
    total = torch.stack([brought(case, rank) for rank in range(case.ranks)]).sum(0)
    return [total.tolist()] * case.ranks


def budget(case: Case) -> list[Cost]:
    """2D, less a chunk for each half: which one depends on where the ring begins, so the smallest."""
    itemsize, n = getattr(torch, case.dtype).itemsize, case.ranks
    sizes = shares(case.elements, n)
    room = 4 * sizes[0] * itemsize if n > 1 else None
    return [Cost(2 * (case.elements - min(sizes)) * itemsize, 2 * (n - 1), 4 * (n - 1), room)] * n


EXERCISE = Exercise(
    name="ring_all_reduce",
    number="2.3",
    cases=(
        Case(2, 2), Case(3, 3), Case(4, 4), Case(3, 2), Case(3, 5, "numbers"), Case(4, 10, "numbers"),
        Case(3, 7, "numbers", "float32"), Case(4, 2**18, "numbers", "float32"), Case(1, 3),
    ),
    call=call,
    expected=expected,
    budget=budget,
    solution=ring_all_reduce,
    hints=lambda: (say("ring_all_reduce.question"), say("ring_all_reduce.state"), say("ring_all_reduce.code")),
    wrong=(
        Wrong(forgets_the_second_half, "wrong", "1 step; expected 2"),
        Wrong(adds_in_the_second_half, "wrong", "first astray: step 2"),
        Wrong(starts_the_second_half_with_another_chunk, "wrong", "first astray"),
        Wrong(sends_to_rank_0_and_back, "wrong", "rank 0 sent to rank 2; the ring goes from rank r to r + 1"),
        Wrong(sends_whole_tensors, "wasteful", "budget 1,572,864"),
        Wrong(returns_the_sum, "wrong", "what the function returns is not looked at"),
        Wrong(averages, "wrong", "rank 0, element 0"),
        Wrong(calls_reduce_scatter, "borrowed", "dist.all_reduce"),
    ),
    ring=True,
    legal=full_chunks,
)  # fmt: skip
