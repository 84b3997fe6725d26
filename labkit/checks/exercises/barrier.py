"""2.5 · a barrier from sends and receives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labkit import device
from labkit.checks.exercise import Case, Cost, Exercise, Wrong
from labkit.show.words import say
from labkit.trace import now

LATE = 0.1  #: Seconds by which one rank comes later. No verdict depends on it: it only makes a leak visible.


def barrier() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1, device=device.current())
    distance = 1
    while distance < world:  # dissemination: after k rounds a rank knows of 2^k others
        send = dist.isend(token.clone(), (rank + distance) % world)
        dist.recv(token, (rank - distance) % world)
        send.wait()
        distance *= 2


def does_nothing() -> None:
    pass


def goes_halfway_round() -> None:
    """One pass round the ring: the first to send leaves when its left neighbour's token comes, the last too early."""
    rank, world = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1, device=device.current())
    if world == 1:
        return
    send = dist.isend(token.clone(), (rank + 1) % world)
    dist.recv(token, (rank - 1) % world)
    send.wait()


def only_tells_rank_0() -> None:
    token = torch.zeros(1, device=device.current())
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            dist.recv(token, peer)
    else:
        dist.send(token, 0)


def waits_for_a_while() -> None:
    time.sleep(0.02)


def receives_first() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1, device=device.current())
    if world > 1:
        dist.recv(token, (rank - 1) % world)
        dist.send(token, (rank + 1) % world)


def asks_everybody() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = [torch.zeros(1, device=device.current()) for _ in range(world)]
    others = [peer for peer in range(world) if peer != rank]
    works = [dist.isend(tokens[rank], peer) for peer in others] + [dist.irecv(tokens[peer], peer) for peer in others]
    for work in works:
        work.wait()


def goes_round_twice() -> None:
    """Everybody waits, and for too many messages in a row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1, device=device.current())
    for _ in range(2 if world > 1 else 0):
        if rank > 0:
            dist.recv(token, rank - 1)
        dist.send(token, (rank + 1) % world)
        if rank == 0:
            dist.recv(token, world - 1)


def calls_barrier() -> None:
    dist.barrier()


def call(fn: Callable[[], None], case: Case) -> tuple[float, float]:
    """When this rank came, and when it left; one rank comes later than the others."""
    if dist.get_rank() == case.more:
        time.sleep(LATE)
    came = now()
    fn()
    return came, now()


def too_early(case: Case, values: list[Any], expected: list[Any]) -> list[int]:
    """The ranks that left before the last had come."""
    last = max(value[0] for value in values if value is not None)
    return [rank for rank, value in enumerate(values) if value is None or value[1] < last]


def left_early(case: Case, values: list[Any], bad: list[int]) -> str:
    late = max((rank for rank in range(case.ranks) if values[rank] is not None), key=lambda rank: values[rank][0])
    return say("barrier.left", rank=bad[0], late=late)


def expected(case: Case) -> list[str]:
    return [say("barrier.expected")] * case.ranks


def budget(case: Case) -> list[Cost]:
    """Doubling up and down again; whoever does so sends at most a message a level, and two in a pair."""
    levels = (case.ranks - 1).bit_length()
    messages = max(2, levels) if case.ranks > 1 else 0
    return [Cost(messages * 64, messages, 2 * levels, None)] * case.ranks


EXERCISE = Exercise(
    name="barrier",
    number="2.5",
    cases=(Case(2, 1), Case(2, 1, more=1), Case(3, 1, more=2), Case(4, 1, more=3), Case(4, 1, more=1), Case(1, 1)),
    call=call,
    expected=expected,
    budget=budget,
    solution=barrier,
    hints=lambda: (say("barrier.question"), say("barrier.state"), say("barrier.code")),
    wrong=(
        Wrong(does_nothing, "wrong", "left before"),
        Wrong(goes_halfway_round, "wrong", "left before"),
        Wrong(only_tells_rank_0, "wrong", "left before"),
        Wrong(waits_for_a_while, "wrong", "left before"),
        Wrong(receives_first, "deadlocked", "receive first"),
        Wrong(asks_everybody, "wasteful", "budget"),
        Wrong(goes_round_twice, "wasteful", "8 in a row; budget 4"),
        Wrong(calls_barrier, "borrowed", "dist.barrier"),
    ),
    compare=too_early,
    tells=left_early,
)  # fmt: skip
