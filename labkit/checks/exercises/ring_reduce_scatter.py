"""2.1 · the first half of the ring."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.checks.exercise import Case, Cost, Exercise, Wrong, full_chunks
from labkit.checks.trial import brought, shares, watched
from labkit.show.words import say


def ring_reduce_scatter(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        outgoing, incoming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        arriving = torch.empty_like(incoming)
        send = dist.P2POp(dist.isend, outgoing, (rank + 1) % world)
        receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % world)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        incoming += arriving


def _run(tensor: torch.Tensor, first: int, last: int, shift: int = 0, again: int = 0) -> None:
    """The ring with one thing wrong: the steps that it does, the chunk that it starts with, a step that adds twice."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(first, last):
        outgoing, incoming = chunks[(rank - step + shift) % world], chunks[(rank - step - 1 + shift) % world]
        arriving = torch.empty_like(incoming)
        works = [dist.isend(outgoing, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]
        for work in works:
            work.wait()
        incoming += arriving
        if step == again:
            incoming += arriving


def starts_with_its_own_chunk(tensor: torch.Tensor) -> None:
    _run(tensor, 1, dist.get_world_size(), shift=1)


def forgets_the_last_step(tensor: torch.Tensor) -> None:
    _run(tensor, 1, dist.get_world_size() - 1)


def adds_twice(tensor: torch.Tensor) -> None:
    _run(tensor, 1, dist.get_world_size(), again=2)


def sends_whole_tensors(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    passing = tensor.clone()
    for _ in range(1, world):
        arriving = torch.empty_like(passing)
        works = [dist.isend(passing, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]
        for work in works:
            work.wait()
        tensor += arriving
        passing = arriving


def works_on_a_copy(tensor: torch.Tensor) -> None:
    copy = tensor.clone()
    ring_reduce_scatter(copy)
    tensor.copy_(copy)


def goes_one_step_too_far(tensor: torch.Tensor) -> None:
    _run(tensor, 1, dist.get_world_size() + 1)


def uses_what_has_not_arrived(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        outgoing, incoming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        arriving = torch.empty_like(incoming)
        works = [dist.isend(outgoing, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]
        incoming += arriving
        for work in works:
            work.wait()


def averages(tensor: torch.Tensor) -> None:
    ring_reduce_scatter(tensor)
    tensor.copy_(tensor // dist.get_world_size())


def sends_each_chunk_to_its_owner(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    others = [peer for peer in range(world) if peer != rank]
    works = [dist.isend(chunks[peer], peer) for peer in others]
    came = torch.empty_like(chunks[rank])
    for peer in others:
        dist.recv(came, peer)
        chunks[rank].add_(came)
    for work in works:
        work.wait()


def passes_a_baton(tensor: torch.Tensor) -> None:
    """One rank after the other: rank 0 sends first, and the others when they have received."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        outgoing, incoming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        arriving = torch.empty_like(incoming)
        if rank == 0:
            dist.send(outgoing, 1)
            dist.recv(arriving, world - 1)
        else:
            dist.recv(arriving, rank - 1)
            dist.send(outgoing, (rank + 1) % world)
        incoming += arriving


def meets_first(tensor: torch.Tensor) -> None:
    dist.barrier()
    ring_reduce_scatter(tensor)


def sends_in_halves(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        outgoing, incoming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        arriving = torch.empty_like(incoming)
        for mine, theirs in zip(outgoing.tensor_split(2), arriving.tensor_split(2), strict=True):
            for work in [dist.isend(mine, (rank + 1) % world), dist.irecv(theirs, (rank - 1) % world)]:
                work.wait()
        incoming += arriving


def receives_first(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        arriving = torch.empty_like(chunks[(rank - step - 1) % world])
        dist.recv(arriving, (rank - 1) % world)
        dist.send(chunks[(rank - step) % world], (rank + 1) % world)
        chunks[(rank - step - 1) % world] += arriving


def wants_sizes_that_divide(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(world, -1)
    for step in range(1, world):
        arriving = torch.empty_like(chunks[0])
        works = [
            dist.isend(chunks[(rank - step) % world], (rank + 1) % world),
            dist.irecv(arriving, (rank - 1) % world),
        ]
        for work in works:
            work.wait()
        chunks[(rank - step - 1) % world] += arriving


def receives_as_float(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        incoming = chunks[(rank - step - 1) % world]
        arriving = torch.empty(incoming.shape)
        works = [
            dist.isend(chunks[(rank - step) % world], (rank + 1) % world),
            dist.irecv(arriving, (rank - 1) % world),
        ]
        for work in works:
            work.wait()
        incoming += arriving.to(incoming.dtype)


def calls_all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def call(fn: Callable[[torch.Tensor], None], case: Case) -> list:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = brought(case, rank)
    with watched(tensor, case):
        fn(tensor)
    return tensor.tensor_split(world)[rank].tolist()


def expected(case: Case) -> list[list]:
    total = sum(brought(case, rank) for rank in range(case.ranks))
    assert isinstance(total, torch.Tensor)
    return [chunk.tolist() for chunk in total.tensor_split(case.ranks)]


def budget(case: Case) -> list[Cost]:
    """Every chunk but one's own, once; room for those that arrive and are let go of.

    In a row two messages a step: ranks may take turns, as those with odd and with even numbers.
    """
    itemsize, n = getattr(torch, case.dtype).itemsize, case.ranks
    sizes = shares(case.elements, n)
    room = 3 * sizes[0] * itemsize if n > 1 else None
    return [Cost((case.elements - sizes[rank]) * itemsize, n - 1, 2 * (n - 1), room) for rank in range(n)]


EXERCISE = Exercise(
    name="ring_reduce_scatter",
    number="2.1",
    core=True,
    cases=(
        Case(2, 2), Case(3, 3), Case(3, 5), Case(4, 4), Case(3, 2), Case(3, 5, "numbers"), Case(4, 10, "numbers"),
        Case(3, 7, "numbers", "float32"), Case(2, 7, "numbers", "uint8"), Case(4, 2**18, "numbers", "float32"),
        Case(1, 3),
    ),
    call=call,
    expected=expected,
    budget=budget,
    solution=ring_reduce_scatter,
    hints=lambda: (
        say("ring_reduce_scatter.question"), say("ring_reduce_scatter.state"), say("ring_reduce_scatter.code"),
    ),
    wrong=(
        Wrong(starts_with_its_own_chunk, "wrong", "rank 0 ends with chunk 1 whole; chunk 0 was asked for"),
        Wrong(forgets_the_last_step, "wrong", "in the end: rank 0, element 0 of the result: expected {0,1}, got {0}"),
        Wrong(adds_twice, "wrong", "'s part is in it twice"),
        Wrong(averages, "wrong", "got 8, which is no sum of what the ranks brought"),
        Wrong(uses_what_has_not_arrived, "wrong", "rank 0 used what it was to receive before it had waited for it"),
        Wrong(sends_each_chunk_to_its_owner, "wrong", "rank 0 sent to rank 2; the ring goes from rank r to r + 1"),
        Wrong(passes_a_baton, "wasteful", "12 in a row; budget 6"),
        Wrong(goes_one_step_too_far, "crashed", "messages of a rank: 4; budget 3"),
        Wrong(sends_whole_tensors, "wasteful", "budget 786,432"),
        Wrong(works_on_a_copy, "wasteful", "held by a rank in tensors of its own"),
        Wrong(sends_in_halves, "wasteful", "messages of a rank: 6; budget 3"),
        Wrong(receives_first, "deadlocked", "0 waits for 1, 1 waits for 0: both receive first"),
        Wrong(wants_sizes_that_divide, "crashed", "shape"),
        Wrong(receives_as_float, "crashed", "received as something else"),
        Wrong(calls_all_reduce, "borrowed", "dist.all_reduce"),
        Wrong(meets_first, "borrowed", "called dist.barrier, a collective; only messages are allowed here"),
    ),
    ring=True,
    legal=full_chunks,
)  # fmt: skip
