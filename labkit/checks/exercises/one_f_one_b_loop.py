"""6.6 · the inner loop of 1F1B: one stage, its neighbours, and messages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.exercises.one_f_one_b_order import one_f_one_b_order
from labkit.checks.orders import late, over_stash, schedule_of, size, words
from labkit.checks.stage import Stage
from labkit.pipeline import one_f_one_b
from labkit.show.words import count, say

T = torch.Tensor
Forward = Callable[[int, T | None], T]
Backward = Callable[[int, T | None], T]
THEIRS = frozenset(str(path) for path in (PACKAGE / "pipeline").glob("*.py"))
_torch = importlib.util.find_spec("torch.distributed.pipelining")
if _torch is not None and _torch.origin:
    THEIRS |= frozenset(str(path) for path in Path(_torch.origin).parent.glob("*.py"))


def one_f_one_b_loop(micro_batches, forward, backward, shape):
    rank, world = dist.get_rank(), dist.get_world_size()
    works, warm_up = [], min(micro_batches, world - 1 - rank)

    def receive(peer):
        if not 0 <= peer < world:
            return None
        dist.recv(x := torch.empty(shape), peer)
        return x

    def send(x, peer):
        return [dist.isend(x, peer)] if 0 <= peer < world else []

    for i in range(micro_batches + warm_up):
        if i < micro_batches:
            works += send(forward(i, receive(rank - 1)), rank + 1)
        if i >= warm_up:
            works += send(backward(i - warm_up, receive(rank + 1)), rank - 1)
    [work.wait() for work in works]


class _Peers:
    """Receives from a neighbour, and sends to it, where there is one."""

    def __init__(self, shape: Any, blocking: bool = False) -> None:
        self.shape, self.blocking = shape, blocking
        self.works: list[Any] = []
        self.kept: dict[int, T] = {}  # one buffer for each neighbour

    def there(self, peer: int) -> bool:
        return 0 <= peer < dist.get_world_size()

    def receive(self, peer: int, reuse: bool = False) -> T | None:
        if not self.there(peer):
            return None
        x = self.kept.setdefault(peer, torch.empty(self.shape)) if reuse else torch.empty(self.shape)
        dist.recv(x, peer)
        return x

    def send(self, x: T, peer: int) -> None:
        if self.there(peer) and self.blocking:
            dist.send(x, peer)
        elif self.there(peer):
            self.works.append(dist.isend(x, peer))

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _do(order: list[str], forward: Forward, backward: Backward, peers: _Peers, reuse: bool = False) -> None:
    rank = dist.get_rank()
    for word in order:
        if word[0] == "F":
            peers.send(forward(int(word[1:]), peers.receive(rank - 1, reuse)), rank + 1)
        else:
            peers.send(backward(int(word[1:]), peers.receive(rank + 1)), rank - 1)
    peers.wait()


def _order(micro_batches: int) -> list[str]:
    return one_f_one_b_order(dist.get_rank(), dist.get_world_size(), micro_batches)


def both_send_first(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    _do(_order(micro_batches), forward, backward, _Peers(shape, blocking=True))


def reuses_its_buffer(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    _do(_order(micro_batches), forward, backward, _Peers(shape), reuse=True)


def does_all_forwards_first(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    _do([f"{kind}{i}" for kind in "FB" for i in range(micro_batches)], forward, backward, _Peers(shape))


def does_one_at_a_time(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    _do([f"{kind}{i}" for i in range(micro_batches) for kind in "FB"], forward, backward, _Peers(shape))


def warms_up_by_its_rank(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    order = one_f_one_b_order(dist.get_world_size() - 1 - dist.get_rank(), dist.get_world_size(), micro_batches)
    _do(order, forward, backward, _Peers(shape))


def forgets_the_cool_down(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    ahead = min(micro_batches, dist.get_world_size() - 1 - dist.get_rank())
    _do(_order(micro_batches)[: 2 * micro_batches - ahead], forward, backward, _Peers(shape))


def numbers_backwards_as_forwards(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    """In each pair the same number: the micro-batch that has just gone forward has not come back yet."""
    order = _order(micro_batches)
    for place, word in enumerate(order[1:], 1):
        if word[0] == "B" and order[place - 1][0] == "F":
            order[place] = f"B{order[place - 1][1:]}"
    _do(order, forward, backward, _Peers(shape))


def sends_what_it_received(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    rank, peers = dist.get_rank(), _Peers(shape)
    for word in _order(micro_batches):
        ahead = word[0] == "F"
        given = peers.receive(rank - 1 if ahead else rank + 1)
        made = (forward if ahead else backward)(int(word[1:]), given)
        peers.send(made if given is None else given, rank + 1 if ahead else rank - 1)
    peers.wait()


def gives_zeros_at_the_ends(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    def some(x: T | None) -> T:
        return torch.zeros(shape) if x is None else x

    _do(_order(micro_batches), lambda i, x: forward(i, some(x)), lambda i, g: backward(i, some(g)), _Peers(shape))


def sends_the_number_first(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    class Numbered(_Peers):
        def receive(self, peer: int, reuse: bool = False) -> T | None:
            if self.there(peer):
                dist.recv(torch.zeros(1), peer)
            return super().receive(peer)

        def send(self, x: T, peer: int) -> None:
            if self.there(peer):
                self.works.append(dist.isend(torch.ones(1), peer))
            super().send(x, peer)

    _do(_order(micro_batches), forward, backward, Numbered(shape))


def does_not_wait(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    class Hasty(_Peers):
        def receive(self, peer: int, reuse: bool = False) -> T | None:
            if not self.there(peer):
                return None
            x = torch.zeros(self.shape)
            self.works.append(dist.irecv(x, peer))
            return x

    _do(_order(micro_batches), forward, backward, Hasty(shape))


def receives_two_the_wrong_way_round(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    """Messages have no names: what is sent first comes to whoever asked first."""

    class Swapped(_Peers):
        def receive(self, peer: int, reuse: bool = False) -> T | None:
            if not self.there(peer):
                return None
            if not coming.get(peer):
                left[peer] = left.get(peer, micro_batches) - 2
                rooms = [torch.empty(shape) for _ in range(2 if left[peer] >= 0 else 1)]
                works = [dist.irecv(room, peer) for room in reversed(rooms)]
                coming[peer] = list(zip(rooms, reversed(works), strict=True))
            room, work = coming[peer].pop(0)
            work.wait()
            return room

    coming: dict[int, list[Any]] = {}
    left: dict[int, int] = {}
    _do(_order(micro_batches), forward, backward, Swapped(shape))


def broadcasts(micro_batches: int, forward: Forward, backward: Backward, shape: Any) -> None:
    for i in range(micro_batches):
        x = torch.empty(shape)
        for rank in range(dist.get_world_size()):
            x = forward(i, x if rank else None) if rank == dist.get_rank() else x
            dist.broadcast(x, rank)


def call(fn: Any, case: Case) -> tuple[list[str], str]:
    """In which order forward and backward were called, and the first fault that was noticed."""
    stage = Stage(case)
    fn(case.more, stage.forward, stage.backward, (case.elements,))
    return stage.order, stage.fault


def expected(case: Case) -> list[tuple[list[str], str]]:
    return [(row, "") for row in words(one_f_one_b(case.ranks, case.more))]


def _rows(values: list[Any]) -> list[list[str]]:
    return [order for order, _ in values]


def differing(case: Case, values: list[Any], wanted: list[Any]) -> list[int]:
    """Any order is right in which everything is done once; `excess` says what it costs."""
    rows, faulty = _rows(values), [rank for rank, (_, fault) in enumerate(values) if fault]
    return faulty or [rank for rank, (want, _) in enumerate(wanted) if sorted(rows[rank]) != sorted(want)]


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    rank = bad[0]
    order, fault = values[rank]
    return fault or say("one_f_one_b_loop.calls", rank=rank, order=" ".join(order) or say("orders.nothing"))


def excess(case: Case, values: list[Any]) -> str:
    """An order that holds more than 1F1B's, or ends later."""
    schedule, right = schedule_of(_rows(values), case.more), one_f_one_b(case.ranks, case.more)
    return over_stash(schedule, right.stash()) or late(schedule, right)


def budget(case: Case) -> list[Cost]:
    """Each micro-batch once forward, where there is a next rank, and once back, where there is one before."""
    sends = [case.more * ((rank < case.ranks - 1) + (rank > 0)) for rank in range(case.ranks)]
    return [Cost(nbytes=4 * case.elements * n, messages=n) for n in sends]


EXERCISE = Exercise(
    name="one_f_one_b_loop",
    number="6.6",
    cases=(Case(2, 2, more=1), Case(2, 2, more=3), Case(3, 3, more=2), Case(4, 3, more=6), Case(1, 2, more=2)),
    call=call,
    expected=expected,
    budget=budget,
    solution=one_f_one_b_loop,
    hints=lambda: (say("one_f_one_b_loop.question"), say("one_f_one_b_loop.state"), say("one_f_one_b_loop.code")),
    wrong=(
        Wrong(both_send_first, "deadlocked", "both send first"),
        Wrong(reuses_its_buffer, "wrong", "overwritten"),
        Wrong(does_all_forwards_first, "wasteful", "at its peak"),
        Wrong(does_one_at_a_time, "wasteful", "ends at"),
        Wrong(warms_up_by_its_rank, "deadlocked", "recv"),
        Wrong(forgets_the_cool_down, "deadlocked", "which had returned already"),
        Wrong(numbers_backwards_as_forwards, "wrong", "B1 was given what belongs to B0"),
        Wrong(receives_two_the_wrong_way_round, "wrong", "B0 was given what belongs to B1"),
        Wrong(sends_what_it_received, "wrong", "B0 was given another tensor"),
        Wrong(gives_zeros_at_the_ends, "wrong", "F0 was given a tensor"),
        Wrong(sends_the_number_first, "wasteful", "messages of a rank"),
        Wrong(does_not_wait, "wrong", "before it had waited for it"),
        Wrong(broadcasts, "borrowed", "only messages are allowed"),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    excess=excess,
    where=lambda case: f"{size(case.ranks, case.more)}, {count('check.elements', case.elements)}",
    theirs=THEIRS,
)  # fmt: skip
