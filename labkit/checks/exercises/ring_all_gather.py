"""2.2 · the second half of the ring."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.checks.exercise import Case, Cost, Exercise, Wrong, full_chunks
from labkit.checks.trial import brought, shares, watched
from labkit.show.words import say


def ring_all_gather(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        outgoing, incoming = chunks[(rank - step + 1) % world], chunks[(rank - step) % world]
        send = dist.P2POp(dist.isend, outgoing, (rank + 1) % world)
        receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % world)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()


def _run(tensor: torch.Tensor, first: int, last: int, shift: int = 0, add: bool = False) -> None:
    """The ring with one thing wrong: the steps that it does, the chunk that it starts with, adding for copying."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(first, last):
        incoming = chunks[(rank - step + shift) % world]
        arriving = torch.empty_like(incoming)
        outgoing = chunks[(rank - step + 1 + shift) % world]
        for work in [dist.isend(outgoing, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]:
            work.wait()
        incoming.copy_(incoming + arriving if add else arriving)


def forgets_the_last_step(tensor: torch.Tensor) -> None:
    _run(tensor, 1, dist.get_world_size() - 1)


def starts_with_the_next_chunk(tensor: torch.Tensor) -> None:
    _run(tensor, 1, dist.get_world_size(), shift=1)


def adds_what_it_should_copy(tensor: torch.Tensor) -> None:
    _run(tensor, 1, dist.get_world_size() + 1, add=True)


def sends_whole_tensors(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in range(1, world):
        arriving = torch.empty_like(tensor)
        for work in [dist.isend(tensor, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]:
            work.wait()
        for number, (mine, theirs) in enumerate(
            zip(tensor.tensor_split(world), arriving.tensor_split(world), strict=True)
        ):
            if number != rank and not mine.any():
                mine.copy_(theirs)


def sends_its_chunk_to_all(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    others = [peer for peer in range(world) if peer != rank]
    works = [dist.isend(chunks[rank], peer) for peer in others] + [dist.irecv(chunks[peer], peer) for peer in others]
    for work in works:
        work.wait()


def joins_what_it_kept(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = [chunk.clone() for chunk in tensor.tensor_split(world)]
    for step in range(1, world):
        outgoing, incoming = chunks[(rank - step + 1) % world], chunks[(rank - step) % world]
        for work in [dist.isend(outgoing, (rank + 1) % world), dist.irecv(incoming, (rank - 1) % world)]:
            work.wait()
    tensor.copy_(torch.cat(chunks))


def sends_first(tensor: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        dist.recv(chunks[(rank - step) % world], (rank - 1) % world)
        dist.send(chunks[(rank - step + 1) % world], (rank + 1) % world)


def knows_four_ranks_only(tensor: torch.Tensor) -> None:
    rank = dist.get_rank()
    chunks = tensor.tensor_split(dist.get_world_size())
    for step in range(1, 4):
        incoming = chunks[(rank - step) % len(chunks)]
        for work in [
            dist.isend(chunks[(rank - step + 1) % len(chunks)], (rank + 1) % len(chunks)),
            dist.irecv(incoming, (rank - 1) % len(chunks)),
        ]:
            work.wait()


def calls_all_gather(tensor: torch.Tensor) -> None:
    chunks = list(tensor.tensor_split(dist.get_world_size()))
    dist.all_gather(chunks, chunks[dist.get_rank()].clone())


def call(fn: Callable[[torch.Tensor], None], case: Case) -> list:
    """Every rank begins with its own chunk; the others are 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = brought(case, rank)
    for number, chunk in enumerate(tensor.tensor_split(world)):
        if number != rank:
            chunk.zero_()
    with watched(tensor, case):
        fn(tensor)
    return tensor.tolist()


def expected(case: Case) -> list[list]:
    chunks = [brought(case, rank).tensor_split(case.ranks)[rank] for rank in range(case.ranks)]
    return [torch.cat(chunks).tolist()] * case.ranks


def budget(case: Case) -> list[Cost]:
    """N − 1 chunks, of which the largest may be one's own; and room for those that arrive and are let go of."""
    itemsize, n = getattr(torch, case.dtype).itemsize, case.ranks
    sizes = shares(case.elements, n)
    room = 3 * sizes[0] * itemsize if n > 1 else None
    return [Cost((n - 1) * sizes[0] * itemsize, n - 1, 2 * (n - 1), room)] * n


EXERCISE = Exercise(
    name="ring_all_gather",
    number="2.2",
    cases=(
        Case(2, 2), Case(3, 3), Case(4, 4), Case(3, 2), Case(3, 5, "numbers"), Case(4, 10, "numbers"),
        Case(3, 7, "numbers", "float32"), Case(4, 2**18, "numbers", "float32"), Case(1, 3),
    ),
    call=call,
    expected=expected,
    budget=budget,
    solution=ring_all_gather,
    hints=lambda: (say("ring_all_gather.question"), say("ring_all_gather.state"), say("ring_all_gather.code")),
    wrong=(
        Wrong(forgets_the_last_step, "wrong", "expected {1}, got {}"),
        Wrong(starts_with_the_next_chunk, "wrong", "first astray: step 1"),
        Wrong(adds_what_it_should_copy, "wrong", "2 steps; expected 1"),
        Wrong(sends_its_chunk_to_all, "wrong", "rank 0 sent to rank 2; the ring goes from rank r to r + 1"),
        Wrong(sends_whole_tensors, "wasteful", "budget"),
        Wrong(joins_what_it_kept, "wasteful", "held by a rank in tensors of its own"),
        Wrong(sends_first, "deadlocked", "both receive first"),
        Wrong(knows_four_ranks_only, "crashed", "to or from itself"),
        Wrong(calls_all_gather, "borrowed", "dist.all_gather"),
    ),
    ring=True,
    legal=full_chunks,
)  # fmt: skip
