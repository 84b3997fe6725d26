"""2.4 · broadcast by a binomial tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.checks.exercise import Case, Cost, Exercise, Wrong, in_words
from labkit.checks.trial import brought
from labkit.show.words import say


def tree_broadcast(tensor: torch.Tensor, root: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % world  # in the tree, where the root is 0
    distance = 1
    while distance < world:
        if place < distance and place + distance < world:
            dist.send(tensor, (rank + distance) % world)
        elif distance <= place < 2 * distance:
            dist.recv(tensor, (rank - distance) % world)
        distance *= 2


def sends_to_each(tensor: torch.Tensor, root: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == root:
        for peer in range(world):
            if peer != root:
                dist.send(tensor, peer)
    else:
        dist.recv(tensor, root)


def passes_along_a_chain(tensor: torch.Tensor, root: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % world
    if place > 0:
        dist.recv(tensor, (rank - 1) % world)
    if place < world - 1:
        dist.send(tensor, (rank + 1) % world)


def knows_root_0_only(tensor: torch.Tensor, root: int) -> None:
    tree_broadcast(tensor, 0)


def wants_a_power_of_two(tensor: torch.Tensor, root: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    place, distance = (rank - root) % world, 1
    while distance < world:
        peer = place ^ distance
        if place < distance:
            dist.send(tensor, (root + peer) % world)
        elif place < 2 * distance:
            dist.recv(tensor, (root + peer) % world)
        distance *= 2


def receives_twice(tensor: torch.Tensor, root: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == root:
        for peer in range(world):
            if peer != root:
                dist.send(tensor, peer)
    else:
        dist.recv(tensor, root)
        if rank == (root + 1) % world:
            dist.recv(tensor, root)


def calls_broadcast(tensor: torch.Tensor, root: int) -> None:
    dist.broadcast(tensor, root)


def call(fn: Callable[[torch.Tensor, int], None], case: Case) -> list:
    tensor = brought(case, dist.get_rank())
    fn(tensor, case.more)
    return tensor.tolist()


def expected(case: Case) -> list[list]:
    return [brought(case, case.more).tolist()] * case.ranks


def budget(case: Case) -> list[Cost]:
    """As many rounds as doubling takes, and at most a message in each."""
    rounds = (case.ranks - 1).bit_length()
    size = case.elements * getattr(torch, case.dtype).itemsize
    return [Cost(rounds * size, rounds, rounds, None)] * case.ranks


def where(case: Case) -> str:
    return f"{in_words(case)}, {say('tree_broadcast.root', root=case.more)}"


EXERCISE = Exercise(
    name="tree_broadcast",
    number="2.4",
    cases=(
        Case(2, 1), Case(2, 1, more=1), Case(4, 2), Case(3, 2, more=1), Case(4, 3, "numbers", more=2),
        Case(3, 5, "numbers", "float32", more=2), Case(4, 5, "numbers", more=3), Case(1, 2),
    ),
    call=call,
    expected=expected,
    budget=budget,
    solution=tree_broadcast,
    hints=lambda: (say("tree_broadcast.question"), say("tree_broadcast.state"), say("tree_broadcast.code")),
    wrong=(
        Wrong(sends_to_each, "wasteful", "messages of a rank: 3; budget 2 (1.5×)   world 4, 5 elements, root 3"),
        Wrong(passes_along_a_chain, "wasteful", "in a row; budget"),
        Wrong(knows_root_0_only, "wrong", "expected {1}, got {0}"),
        Wrong(wants_a_power_of_two, "deadlocked", "rank 2 waits for rank 1, which had returned already"),
        Wrong(receives_twice, "deadlocked", "which had returned already"),
        Wrong(calls_broadcast, "borrowed", "dist.broadcast"),
    ),
    where=where,
)  # fmt: skip
