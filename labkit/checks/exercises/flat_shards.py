"""7.1 · a flat buffer, cut in equal shards regardless of the tensors' borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from labkit.checks.alone import in_short
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.shards import FLAT, SHARDED
from labkit.show.words import say

Tensors = list[torch.Tensor]
#: (shapes of the tensors, ranks); the smallest first.
SITUATIONS: tuple[tuple[tuple[tuple[int, ...], ...], int], ...] = (
    (((3,), (5,)), 2), (((2, 3),), 3), (((3,), (4,)), 2), (((2, 2), (5,), (3,)), 5), (((2,), (1,)), 7),
    (((), (3,)), 1), (((4,), (0,), (3, 1)), 4),
)  # fmt: skip


def flat_shards(tensors, ranks):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    padding = -len(flat) % ranks
    return list(torch.cat([flat, flat.new_zeros(padding)]).chunk(ranks))


def _flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def cuts_without_padding(tensors: Tensors, ranks: int) -> Any:
    return _flat(tensors).chunk(ranks)


def splits_evenly(tensors: Tensors, ranks: int) -> Any:
    """Into shards of which some are one element longer."""
    return _flat(tensors).tensor_split(ranks)


def pads_each_shard(tensors: Tensors, ranks: int) -> Any:
    shards = _flat(tensors).tensor_split(ranks)
    return [F.pad(shard, (0, len(shards[0]) - len(shard))) for shard in shards]


def pads_each_tensor(tensors: Tensors, ranks: int) -> Any:
    padded = [F.pad(tensor.flatten(), (0, -tensor.numel() % ranks)) for tensor in tensors]
    return torch.cat(padded).chunk(ranks)


def shards_each_tensor(tensors: Tensors, ranks: int) -> Any:
    """Rank r's shard is shard r of each tensor."""
    cut = [flat_shards([tensor], ranks) for tensor in tensors if tensor.numel()]
    return [torch.cat(mine) for mine in zip(*cut, strict=True)]


def gives_whole_tensors(tensors: Tensors, ranks: int) -> Any:
    shards = [torch.zeros(0) for _ in range(ranks)]
    for number, tensor in enumerate(tensors):
        shards[number % ranks] = torch.cat([shards[number % ranks], tensor.flatten()])
    return shards


def deals_them_out(tensors: Tensors, ranks: int) -> Any:
    flat = F.pad(_flat(tensors), (0, -len(_flat(tensors)) % ranks))
    return [flat[rank::ranks] for rank in range(ranks)]


def drops_the_rest(tensors: Tensors, ranks: int) -> Any:
    flat = _flat(tensors)
    size = len(flat) // ranks
    return [flat[rank * size : (rank + 1) * size] for rank in range(ranks)]


def the_last_one_takes_the_rest(tensors: Tensors, ranks: int) -> Any:
    flat = _flat(tensors)
    size = len(flat) // ranks
    return [flat[rank * size : (rank + 1) * size if rank < ranks - 1 else None] for rank in range(ranks)]


def pads_in_front(tensors: Tensors, ranks: int) -> Any:
    return F.pad(_flat(tensors), (-len(_flat(tensors)) % ranks, 0)).chunk(ranks)


def always_pads(tensors: Tensors, ranks: int) -> Any:
    return F.pad(_flat(tensors), (0, ranks - len(_flat(tensors)) % ranks)).chunk(ranks)


def pads_with_the_last_number(tensors: Tensors, ranks: int) -> Any:
    flat = _flat(tensors)
    return torch.cat([flat, flat[-1:].expand(-len(flat) % ranks)]).chunk(ranks)


def forgets_to_flatten(tensors: Tensors, ranks: int) -> Any:
    flat = torch.cat(tensors)
    return F.pad(flat, (0, -len(flat) % ranks)).chunk(ranks)


def returns_sizes(tensors: Tensors, ranks: int) -> Any:
    return [len(shard) for shard in flat_shards(tensors, ranks)]


def calls_labkits(tensors: Tensors, ranks: int) -> Any:
    from labkit.zero.flat import padded

    flat = _flat(tensors)
    return F.pad(flat, (0, padded(len(flat), ranks) - len(flat))).chunk(ranks)


def calls_torchs(tensors: Tensors, ranks: int) -> Any:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    return [FlatParamHandle._get_shard(_flat(tensors), rank, ranks)[0] for rank in range(ranks)]


def given(case: Case) -> tuple[Tensors, int]:
    """Tensors that hold 1, 2, 3, … one after the other, and the number of ranks."""
    shapes, ranks = SITUATIONS[case.more]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.arange(1, sum(sizes) + 1).float().split(sizes)
    return [part.view(shape).clone() for part, shape in zip(parts, shapes, strict=True)], ranks


def call(fn: Callable[..., Any], case: Case) -> Any:
    """The shards as lists of numbers, or what else was returned."""
    made: Any = fn(*given(case))
    try:
        shards = list(made)
    except TypeError:
        return in_short(made)
    if not all(isinstance(shard, torch.Tensor) and shard.dim() == 1 for shard in shards):
        return in_short(made)
    return [shard.tolist() for shard in shards]


def expected(case: Case) -> list[list[list[float]]]:
    shapes, ranks = SITUATIONS[case.more]
    numbers = [float(n + 1) for n in range(sum(torch.Size(shape).numel() for shape in shapes))]
    while len(numbers) % ranks:
        numbers.append(0.0)
    size = len(numbers) // ranks
    return [[numbers[rank * size : (rank + 1) * size] for rank in range(ranks)]]


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    """The first shard that is not the expected one."""
    have, (want,) = values[0], expected(case)
    if isinstance(have, str):
        return say("flat_shards.returned", have=have, want=len(want))
    if len(have) != len(want):
        return say("flat_shards.count", have=len(have), want=len(want))
    number = next(n for n in range(len(want)) if have[n] != want[n])
    wrong = sum(mine != right for mine, right in zip(have, want, strict=True))
    both = {"want": _shown(want[number]), "have": _shown(have[number])}
    return say("flat_shards.shard", number=number, **both, wrong=wrong, all=len(want))


def _shown(numbers: list[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"


def where(case: Case) -> str:
    shapes, ranks = SITUATIONS[case.more]
    return say("flat_shards.case", shapes=" ".join(map(str, shapes)), ranks=ranks)


EXERCISE = Exercise(
    name="flat_shards",
    number="7.1",
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=flat_shards,
    hints=lambda: (say("flat_shards.question"), say("flat_shards.state"), say("flat_shards.code")),
    wrong=(
        Wrong(cuts_without_padding, "wrong", "shard 1: expected [5, 6, 7, 0], got [5, 6, 7]"),
        Wrong(splits_evenly, "wrong", "shard 1: expected [5, 6, 7, 0], got [5, 6, 7]"),
        Wrong(pads_each_shard, "wrong", "shapes (2, 2) (5,) (3,)"),
        Wrong(pads_each_tensor, "wrong", "shard 0: expected [1, 2, 3, 4], got [1, 2, 3, 0, 4]"),
        Wrong(shards_each_tensor, "wrong", "shard 0: expected [1, 2, 3, 4], got [1, 2, 4, 5, 6]"),
        Wrong(gives_whole_tensors, "wrong", "got [1, 2, 3]; wrong shards: 2 of 2"),
        Wrong(deals_them_out, "wrong", "got [1, 3, 5, 7]"),
        Wrong(drops_the_rest, "wrong", "got [1, 2, 3]"),
        Wrong(the_last_one_takes_the_rest, "wrong", "got [1, 2, 3]"),
        Wrong(pads_in_front, "wrong", "got [0, 1, 2, 3]"),
        Wrong(always_pads, "wrong", "got [1, 2, 3, 4, 5]"),
        Wrong(pads_with_the_last_number, "wrong", "got [5, 6, 7, 7]"),
        Wrong(forgets_to_flatten, "wrong", "expected 3 tensors"),
        Wrong(returns_sizes, "wrong", "returned [4, 4]"),
        Wrong(calls_labkits, "borrowed", "zero.flat."),
        Wrong(calls_torchs, "borrowed", "torch.distributed.fsdp._flat_param._get_shard"),
    ),
    legal=nothing,
    tells=told,
    where=where,
    theirs=SHARDED | {FLAT},
)  # fmt: skip
