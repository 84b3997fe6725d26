"""8.1 · the norm of gradients of which each rank has some parts, and some whole."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.checks.alone import in_short
from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.given import uncounted
from labkit.checks.gradients import TOLERANCE
from labkit.collectives import Placement
from labkit.show.words import say
from labkit.tricks import total_norm

#: A gradient, and whether each rank of the group has another part of it.
Grads = list[tuple[torch.Tensor, bool]]
INF, NAN = math.inf, math.nan


class Situation(NamedTuple):
    """Gradients of a group of ranks.

    Attributes:
        sharded: Of each rank of the group: its tensors.
        replicated: Tensors that all of them have.
        dtype: Of the tensors.
        groups: Groups beside one another in the world, all of which have the same.
    """

    sharded: tuple[tuple[tuple[float, ...], ...], ...]
    replicated: tuple[tuple[float, ...], ...]
    dtype: str = "float32"
    groups: int = 1

    @property
    def squares(self) -> tuple[list[float], float]:
        """Of each rank's parts, and of what all have."""
        of_ranks = [sum(x * x for tensor in tensors for x in tensor) for tensors in self.sharded]
        return of_ranks, sum(x * x for tensor in self.replicated for x in tensor)


#: The smallest first.
SITUATIONS = (
    Situation((((3,),), ((4,),)), ((2,),)),
    Situation((((2, 3), (6,)),), ((0,),)),
    Situation((((1, 2), (2,)), ((4,), (0, 2)), ((3,), (5, 1))), ((2, 1), (4,))),
    Situation((((3,),), ((4,),)), ((2,),), groups=2),
    Situation((((3, 4),), (), ()), ((2,),)),
    Situation((((300,),), ((400,),)), ((200,),), "float16"),
    Situation((((16, 1),), ((16, 1),)), ((2,),), "bfloat16"),
    Situation((((3,),), ((INF,),)), ((2,),)),
    Situation((((NAN, 1),), ((4,),), ((1,),)), ((2,),)),
    Situation((((3,),), ((4,),)), ((-INF,),)),
    Situation((((1, 2),), ((3,),), ((4,),), ((5,), (6,))), ((7,), (8, 9))),
)  # fmt: skip


def global_norm(grads, group):
    sharded, replicated = torch.zeros(1), torch.zeros(1)
    for grad, is_sharded in grads:
        squares = sharded if is_sharded else replicated
        squares += grad.float().square().sum()
    dist.all_reduce(sharded, group=group)
    return (sharded + replicated).sqrt().item()


def _square(grads: Grads, sharded: bool) -> torch.Tensor:
    """The squares of one kind on this rank: (1,)."""
    return sum((g.float().square().sum() for g, s in grads if s is sharded), torch.zeros(1))


def counts_all_on_every_rank(grads: Grads, group: Any) -> float:
    return global_norm([(grad, True) for grad, _ in grads], group)


def never_asks_the_others(grads: Grads, group: Any) -> float:
    return (_square(grads, True) + _square(grads, False)).sqrt().item()


def leaves_out_what_is_replicated(grads: Grads, group: Any) -> float:
    return global_norm([(grad, True) for grad, sharded in grads if sharded], group)


def counts_what_is_replicated_on_rank_0(grads: Grads, group: Any) -> float:
    """Right as long as the group begins at rank 0 of the world."""
    return global_norm([(grad, True) for grad, sharded in grads if sharded or dist.get_rank() == 0], group)


def adds_up_over_the_world(grads: Grads, group: Any) -> float:
    return global_norm(grads, None)


def adds_norms_up(grads: Grads, group: Any) -> float:
    total = _square(grads, True).sqrt()
    dist.all_reduce(total, group=group)
    return (total + _square(grads, False).sqrt()).item()


def forgets_the_root(grads: Grads, group: Any) -> float:
    return global_norm(grads, group) ** 2


def averages(grads: Grads, group: Any) -> float:
    total = _square(grads, True)
    dist.all_reduce(total, group=group)
    return (total / dist.get_world_size(group) + _square(grads, False)).sqrt().item()


def squares_as_they_are(grads: Grads, group: Any) -> float:
    """300² is no number in fp16."""
    return global_norm([(grad.square().sum().sqrt(), sharded) for grad, sharded in grads], group)


def adds_up_as_they_are(grads: Grads, group: Any) -> float:
    total = torch.zeros(1, dtype=grads[0][0].dtype)
    for grad, sharded in grads:
        total += grad.float().square().sum() if sharded else 0
    dist.all_reduce(total, group=group)
    return (total + _square(grads, False)).sqrt().item()


def squares_in_place(grads: Grads, group: Any) -> float:
    return global_norm([(grad.pow_(2).float().sum().sqrt(), sharded) for grad, sharded in grads], group)


def passes_over_what_is_no_number(grads: Grads, group: Any) -> float:
    return global_norm([(grad.nan_to_num(0, 0, 0), sharded) for grad, sharded in grads], group)


def returns_as_soon_as_it_knows(grads: Grads, group: Any) -> float:
    if not all(grad.isfinite().all() for grad, _ in grads):
        return math.inf
    return global_norm(grads, group)


def takes_part_only_with_a_shard(grads: Grads, group: Any) -> float:
    if any(sharded for _, sharded in grads):
        return global_norm(grads, group)
    return never_asks_the_others(grads, group)


def an_all_reduce_each(grads: Grads, group: Any) -> float:
    total = _square(grads, False)
    for grad, sharded in grads:
        if sharded:
            total += global_norm([(grad, True)], group) ** 2
    return total.sqrt().item()


def asks_about_infinities_first(grads: Grads, group: Any) -> float:
    bad = torch.tensor([float(not all(grad.isfinite().all() for grad, _ in grads))])
    dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
    return global_norm(grads, group)


def one_all_reduce_a_kind(grads: Grads, group: Any) -> float:
    """What is replicated is added up, and divided again."""
    total = _square(grads, False)
    dist.all_reduce(total, group=group)
    return math.hypot(math.sqrt(total.item() / dist.get_world_size(group)),
                      global_norm([(grad, True) for grad, sharded in grads if sharded], group))  # fmt: skip


def takes_the_largest(grads: Grads, group: Any) -> float:
    total = _square(grads, True)
    dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    return (total + _square(grads, False)).sqrt().item()


def returns_a_list(grads: Grads, group: Any) -> list[float]:
    return [global_norm(grads, group)]


def calls_labkits(grads: Grads, group: Any) -> float:
    pieces = [(grad, Placement(**{"sharded" if sharded else "replicated": (group,)})) for grad, sharded in grads]
    return total_norm(pieces).item()


def _given(case: Case, rank: int) -> Grads:
    """What a rank has; whole gradients and parts in turn."""
    situation = SITUATIONS[case.more]
    dtype = getattr(torch, situation.dtype)
    mine = situation.sharded[rank % len(situation.sharded)]
    tensors = [(torch.tensor(t, dtype=dtype), s) for s, of in ((False, situation.replicated), (True, mine)) for t in of]
    return tensors[::2] + tensors[1::2]


def call(fn: Any, case: Case) -> tuple[float | str, bool]:
    """The norm, or what else was returned; and whether the gradients are as they were."""
    rank, size = dist.get_rank(), len(SITUATIONS[case.more].sharded)
    with uncounted():
        groups = [dist.new_group(list(range(at, at + size))) for at in range(0, case.ranks, size)]
    grads = _given(case, rank)
    made = fn(list(grads), groups[rank // size])
    kept = all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for (a, _), (b, _) in zip(grads, _given(case, rank), strict=True)
    )
    is_number = type(made) in (int, float) or (isinstance(made, torch.Tensor) and made.numel() == 1)
    return float(made) if is_number else in_short(made), kept


def expected(case: Case) -> list[tuple[float, bool]]:
    shards, replicated = SITUATIONS[case.more].squares
    return [(math.sqrt(sum(shards) + replicated), True)] * case.ranks


def differing(case: Case, values: list[Any], wanted: list[Any]) -> list[int]:
    """Who is off; and who has another number than the first of its group, be it in the last digit."""
    return [
        rank for rank, ((have, kept), (want, _)) in enumerate(zip(values, wanted, strict=True))
        if isinstance(have, str) or not kept or not _near(have, want) or not _is(have, _first(case, values, rank))
    ]  # fmt: skip


def _first(case: Case, values: list[Any], rank: int) -> Any:
    """What the first rank of a rank's group has."""
    size = len(SITUATIONS[case.more].sharded)
    return values[rank // size * size][0]


def _is(have: Any, want: Any) -> bool:
    return have == want or (have != have and want != want)


def _near(have: float, want: float) -> bool:
    return _is(have, want) or abs(have - want) <= TOLERANCE * want < INF


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    rank = bad[0]
    (have, _), want = values[rank], expected(case)[rank][0]
    if isinstance(have, str):
        return say("global_norm.returned", rank=rank, have=have)
    if _near(have, want) and not _is(have, first := _first(case, values, rank)):
        return say("global_norm.apart", rank=rank, have=repr(have), first=repr(first))
    if _near(have, want):
        return say("global_norm.changed", rank=rank)
    return say("global_norm.norm", rank=rank, want=f"{want:.4g}", have=f"{have:.4g}") + _what(case, rank, have)


def _what(case: Case, rank: int, have: float) -> str:
    """What else the number is."""
    situation = SITUATIONS[case.more]
    shards, replicated = situation.squares
    total, times = sum(shards), len(shards)
    told = {
        say("global_norm.own", rank=rank): shards[rank % times] + replicated,
        say("global_norm.times", times=times): total + times * replicated,
        say("global_norm.without"): total,
        say("global_norm.groups", groups=situation.groups): situation.groups * total + replicated,
        say("global_norm.no_root"): (total + replicated) ** 2,
    }
    return next((text for text, square in told.items() if _near(have, math.sqrt(square))), "")


def budget(case: Case) -> list[Cost]:
    """A scalar, in fp32 or fp64, from each rank of a group, so that it may be gathered too."""
    return [Cost(calls=1, handed=8 * len(SITUATIONS[case.more].sharded))] * case.ranks


def where(case: Case) -> str:
    situation = SITUATIONS[case.more]
    shards, replicated = situation.squares
    told = {"sharded": " | ".join(f"{x:g}" for x in shards), "replicated": f"{replicated:g}"}
    parts = [say("check.world", ranks=case.ranks), say("global_norm.squares", **told)]
    parts += [say("global_norm.in_groups", size=len(shards))] if situation.groups > 1 else []
    return ", ".join([*parts, *([situation.dtype] if situation.dtype != "float32" else [])])


EXERCISE = Exercise(
    name="global_norm",
    number="8.1",
    core=True,
    cases=tuple(Case(len(s.sharded) * s.groups, 1, more=n) for n, s in enumerate(SITUATIONS)),
    call=call,
    expected=expected,
    budget=budget,
    solution=global_norm,
    hints=lambda: (say("global_norm.question"), say("global_norm.state"), say("global_norm.code")),
    wrong=(
        Wrong(counts_all_on_every_rank, "wrong", "got 5.745: the squares of what is replicated are in it 2"),
        Wrong(never_asks_the_others, "wrong", "expected 5.385, got 3.606, which is what rank 0's own"),
        Wrong(leaves_out_what_is_replicated, "wrong", "expected 5.385, got 5: nothing of what is replicated"),
        Wrong(counts_what_is_replicated_on_rank_0, "wrong", "rank 2: expected 5.385, got 5"),
        Wrong(adds_up_over_the_world, "wrong", "got 7.348: the squares of what is sharded are in it 2"),
        Wrong(adds_norms_up, "wrong", "got 9"),
        Wrong(forgets_the_root, "wrong", "got 29: no root"),
        Wrong(averages, "wrong", "got 4.062"),
        Wrong(squares_as_they_are, "wrong", "expected 538.5, got inf"),
        Wrong(adds_up_as_they_are, "wrong", "float16"),
        Wrong(squares_in_place, "wrong", "are not what they were"),
        Wrong(passes_over_what_is_no_number, "wrong", "expected inf, got 3.606"),
        Wrong(returns_as_soon_as_it_knows, "crashed", "nothing: its function had returned"),
        Wrong(takes_part_only_with_a_shard, "crashed", "nothing: its function had returned"),
        Wrong(an_all_reduce_each, "crashed", "sharded 25 | 0 | 0"),
        Wrong(asks_about_infinities_first, "wasteful", "collectives of a rank: 2; budget 1"),
        Wrong(one_all_reduce_a_kind, "wasteful", "collectives of a rank: 2; budget 1"),
        Wrong(takes_the_largest, "wrong", "got 4.472"),
        Wrong(returns_a_list, "wrong", "expected a number"),
        Wrong(calls_labkits, "borrowed", "tricks.norm.total_norm"),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=where,
    allowed=COLLECTIVES,
    theirs=frozenset({str(PACKAGE / "tricks" / "norm.py")}),
)  # fmt: skip
