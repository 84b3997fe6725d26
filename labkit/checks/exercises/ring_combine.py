"""5.4 · ring attention: keys and values go round, and the pieces combine exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks import alone
from labkit.checks.alone import Made, strange
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.exercises.online_softmax import THEIRS
from labkit.checks.gradients import Backward, differing, taken
from labkit.checks.tokens import Attending, attend
from labkit.show.words import say

WIDTH = 4
LARGE = 1  #: `Case.more`: scores in the thousands
T = torch.Tensor
Attend = Callable[[T, T, T], tuple[T, T]]


def ring_combine(q, k, v, attend):
    rank, world = dist.get_rank(), dist.get_world_size()
    held = torch.stack([k, v])
    out, log_sum = attend(q, k, v)
    for _ in range(world - 1):
        arriving = torch.empty_like(held)
        for work in [dist.isend(held, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]:
            work.wait()
        held = arriving
        more, log_more = attend(q, *held)
        both = torch.logaddexp(log_sum, log_more)
        out = out * (log_sum - both).exp() + more * (log_more - both).exp()
        log_sum = both
    return out


def _passed(held: T, way: int = 1) -> T:
    """What the rank before sends, for what this one sends to the next."""
    rank, world = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(held)
    for work in [dist.isend(held, (rank + way) % world), dist.irecv(arriving, (rank - way) % world)]:
        work.wait()
    return arriving


def _combined(out: T, log_sum: T, more: T, log_more: T) -> tuple[T, T]:
    both = torch.logaddexp(log_sum, log_more)
    return out * (log_sum - both).exp() + more * (log_more - both).exp(), both


def _pieces(q: T, k: T, v: T, attend: Attend, steps: int, way: int = 1) -> list[tuple[T, T]]:
    held, pieces = torch.stack([k, v]), [attend(q, k, v)]
    for _ in range(steps):
        held = _passed(held, way)
        pieces.append(attend(q, held[0], held[1]))
    return pieces


def _all(pieces: list[tuple[T, T]]) -> T:
    out, log_sum = pieces[0]
    for more, log_more in pieces[1:]:
        out, log_sum = _combined(out, log_sum, more, log_more)
    return out


def looks_at_its_own_keys(q: T, k: T, v: T, attend: Attend) -> T:
    return attend(q, k, v)[0]


def averages(q: T, k: T, v: T, attend: Attend) -> T:
    return torch.stack([out for out, _ in _pieces(q, k, v, attend, dist.get_world_size() - 1)]).mean(0)


def weighs_by_the_logarithms(q: T, k: T, v: T, attend: Attend) -> T:
    pieces = _pieces(q, k, v, attend, dist.get_world_size() - 1)
    weighted, sums = zip(*((out * log_sum, log_sum) for out, log_sum in pieces), strict=True)
    return torch.stack(weighted).sum(0) / torch.stack(sums).sum(0)


def takes_the_exponentials(q: T, k: T, v: T, attend: Attend) -> T:
    """Right, until they are larger than a float."""
    pieces = _pieces(q, k, v, attend, dist.get_world_size() - 1)
    weighted, sums = zip(*((out * log_sum.exp(), log_sum.exp()) for out, log_sum in pieces), strict=True)
    return torch.stack(weighted).sum(0) / torch.stack(sums).sum(0)


def keeps_the_first_log_sum(q: T, k: T, v: T, attend: Attend) -> T:
    (out, log_sum), *others = _pieces(q, k, v, attend, dist.get_world_size() - 1)
    for more, log_more in others:
        out, _ = _combined(out, log_sum, more, log_more)
    return out


def sends_its_own_every_time(q: T, k: T, v: T, attend: Attend) -> T:
    pieces = [attend(q, k, v)]
    for _ in range(dist.get_world_size() - 1):
        pieces.append(attend(q, *_passed(torch.stack([k, v]))))
    return _all(pieces)


def leaves_the_values_at_home(q: T, k: T, v: T, attend: Attend) -> T:
    pieces = [attend(q, k, v)]
    for _ in range(dist.get_world_size() - 1):
        k = _passed(k)
        pieces.append(attend(q, k, v))
    return _all(pieces)


def goes_once_too_often(q: T, k: T, v: T, attend: Attend) -> T:
    return _all(_pieces(q, k, v, attend, dist.get_world_size())[:-1])


def counts_its_own_twice(q: T, k: T, v: T, attend: Attend) -> T:
    return _all(_pieces(q, k, v, attend, dist.get_world_size()))


def goes_the_other_way(q: T, k: T, v: T, attend: Attend) -> T:
    return _all(_pieces(q, k, v, attend, dist.get_world_size() - 1, way=-1))


def receives_first(q: T, k: T, v: T, attend: Attend) -> T:
    rank, world = dist.get_rank(), dist.get_world_size()
    held, pieces = torch.stack([k, v]), [attend(q, k, v)]
    for _ in range(world - 1):
        arriving = torch.empty_like(held)
        dist.recv(arriving, (rank - 1) % world)
        dist.send(held, (rank + 1) % world)
        held = arriving
        pieces.append(attend(q, *held))
    return _all(pieces)


def does_not_wait(q: T, k: T, v: T, attend: Attend) -> T:
    rank, world = dist.get_rank(), dist.get_world_size()
    held, pieces = torch.stack([k, v]), [attend(q, k, v)]
    for _ in range(world - 1):
        arriving = torch.zeros_like(held)
        works = [dist.isend(held, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]
        held = arriving
        pieces.append(attend(q, held[0], held[1]))
        for work in works:
            work.wait()
    return _all(pieces)


def gathers_all_keys(q: T, k: T, v: T, attend: Attend) -> T:
    whole = torch.empty(dist.get_world_size() * 2 * len(k), k.shape[1])
    dist.all_gather_into_tensor(whole, torch.cat([k, v]))
    keys, values = whole.unflatten(0, (-1, 2, len(k))).unbind(1)
    return attend(q, keys.flatten(0, 1), values.flatten(0, 1))[0]


def receives_into_its_keys(q: T, k: T, v: T, attend: Attend) -> T:
    out, log_sum = attend(q, k, v)
    for _ in range(dist.get_world_size() - 1):
        k.copy_(_passed(k))
        v.copy_(_passed(v))
        out, log_sum = _combined(out, log_sum, *attend(q, k, v))
    return out


def calls_labkits(q: T, k: T, v: T, attend: Attend) -> T:
    from labkit.context_parallel import ring_attention

    return ring_attention(q[None, None], k[None, None], v[None, None], causal=False)[0, 0]


def attends_to_all_at_once(q: T, k: T, v: T, attend: Attend) -> T:
    held = every = torch.stack([k, v])
    for _ in range(dist.get_world_size() - 1):
        held = _passed(held)
        every = torch.cat([every, held], dim=1)
    return attend(q, every[0], every[1])[0]


def _given(case: Case, rank: int) -> tuple[T, T, T]:
    """q, k and v of a rank's tokens, (s/N, d) each."""
    generator = torch.Generator().manual_seed(10 + rank)
    q, k, v = torch.randn(3, case.elements, WIDTH, generator=generator)
    return q * (1000.0 if case.more == LARGE else 1.0), k, v.mul(9).round()


def call(fn: Any, case: Case) -> Made:
    q, k, v = _given(case, dist.get_rank())
    made = fn(q, k, v, seen := Attending())
    if seen.largest > case.elements:
        return say("ring_combine.at_once", have=seen.largest, want=case.elements)
    return strange(made, (case.elements, WIDTH), say("ring_combine.it")) or [_named(made, (q, k, v))]


def _named(out: T, given: tuple[T, T, T]) -> Backward:
    return taken([("out", out), *zip("qkv", given, strict=True)])


def own(case: Case) -> list[Backward]:
    """What each rank's own keys and values give."""
    each = [_given(case, rank) for rank in range(case.ranks)]
    return [_named(attend(q.double(), k.double(), v.double())[0], (q, k, v)) for q, k, v in each]


def expected(case: Case) -> list[list[Backward]]:
    """One process, in float64, with all keys at once."""
    q, k, v = (
        torch.cat(of_rank).double() for of_rank in zip(*(_given(case, r) for r in range(case.ranks)), strict=True)
    )
    outs = attend(q, k, v)[0].chunk(case.ranks)
    return [[_named(out, _given(case, rank))] for rank, out in enumerate(outs)]


def budget(case: Case) -> list[Cost]:
    """Keys and values of N−1 other ranks, in one message or two."""
    steps = case.ranks - 1
    return [Cost(nbytes=steps * 2 * 4 * case.elements * WIDTH, messages=2 * steps)] * case.ranks


def where(case: Case) -> str:
    told = say("ring_combine.tokens", ranks=case.ranks, tokens=case.ranks * case.elements, width=WIDTH)
    return told + (say("ring_combine.large") if case.more == LARGE else "")


EXERCISE = Exercise(
    name="ring_combine",
    number="5.4",
    cases=(Case(2, 1, "numbers"), Case(3, 2, "numbers"), Case(2, 3, "numbers", more=LARGE),
           Case(4, 3, "numbers")),
    call=call,
    expected=expected,
    budget=budget,
    solution=ring_combine,
    hints=lambda: (say("ring_combine.question"), say("ring_combine.state"), say("ring_combine.code")),
    wrong=(
        Wrong(looks_at_its_own_keys, "wrong", "what rank 0's own part gives"),
        Wrong(averages, "wrong", "world 2"),
        Wrong(attends_to_all_at_once, "wrong", "attend was given 2 keys at once; a rank has 1"),
        Wrong(weighs_by_the_logarithms, "wrong", "world 2"),
        Wrong(takes_the_exponentials, "wrong", "nan"),
        Wrong(keeps_the_first_log_sum, "wrong", "world 3"),
        Wrong(sends_its_own_every_time, "wrong", "world 3"),
        Wrong(leaves_the_values_at_home, "wrong", "world 2"),
        Wrong(goes_once_too_often, "wasteful", "sent by a rank"),
        Wrong(counts_its_own_twice, "wrong", "world 2"),
        Wrong(goes_the_other_way, "wrong", "every message goes from rank r to rank r − 1"),
        Wrong(receives_first, "deadlocked", "recv"),
        Wrong(does_not_wait, "wrong", "before it had waited for it"),
        Wrong(gathers_all_keys, "borrowed", "a collective; only messages are allowed here"),
        Wrong(receives_into_its_keys, "wrong", "rank 0, k, element [0, 0]"),
        Wrong(calls_labkits, "borrowed", "context_parallel.ring"),
    ),
    ring=True,
    legal=nothing,
    compare=differing,
    tells=lambda case, values, bad: alone.told(values, expected(case), bad, own(case)),
    where=where,
    theirs=THEIRS,
)  # fmt: skip
