"""5.2 · what sequence parallelism leaves to be added up after backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labkit.checks import alone
from labkit.checks.borrow import F_AND_G, SHARED_LAYERS
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import Backward, differing, taken
from labkit.show.words import say

#: A parameter, and whether this rank has only a part of its gradient.
Params = list[tuple[torch.nn.Parameter, bool]]
SPARSE = 1  #: `Case.more`: on the last rank a parameter has no gradient
#: Name → shape, and whether its gradient is partial, in the order of the list; `Case.elements` says how many of them.
GIVEN = {"norm.weight": ((4,), True), "up": ((3, 4), False), "norm.bias": ((4,), True), "position": ((5, 4), True),
         "down": ((4, 3), False), "down.bias": ((4,), True)}  # fmt: skip


def norm_gradients(params):
    partial = [param for param, is_partial in params if is_partial]
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in partial]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for param, piece in zip(partial, flat.split([param.numel() for param in partial]), strict=True):
        param.grad = piece.view_as(param)


def averages(params: Params) -> None:
    norm_gradients(params)
    for param, partial in params:
        if partial:
            param.grad.div_(dist.get_world_size())  # type: ignore[union-attr]


def adds_the_sharded_up_too(params: Params) -> None:
    norm_gradients([(param, True) for param, _ in params])


def adds_the_sharded_up_only(params: Params) -> None:
    norm_gradients([(param, not partial) for param, partial in params])


def leaves_out_what_has_no_gradient(params: Params) -> None:
    norm_gradients([(param, partial and param.grad is not None) for param, partial in params])


def an_all_reduce_each(params: Params) -> None:
    for param, partial in params:
        if partial:
            norm_gradients([(param, True)])


def adds_the_parameters_up(params: Params) -> None:
    with torch.no_grad():
        flat = torch.cat([param.flatten() for param, partial in params if partial])
        dist.all_reduce(flat)
        for param, partial in params:
            if partial:
                param.copy_(flat[: param.numel()].view_as(param))
                flat = flat[param.numel() :]


def does_nothing(params: Params) -> None:
    pass


def forgets_to_put_the_sum_back(params: Params) -> None:
    dist.all_reduce(torch.cat([param.grad.flatten() for param, p in params if p and param.grad is not None]))  # type: ignore[union-attr]


def cuts_in_equal_parts(params: Params) -> None:
    """Right as long as all have as many elements."""
    partial = [param for param, is_partial in params if is_partial]
    flat = torch.cat([param.grad.flatten() for param in partial])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    for param, piece in zip(partial, flat.tensor_split(len(partial)), strict=True):
        param.grad = piece[: param.numel()].view_as(param)


def adds_up_on_rank_0(params: Params) -> None:
    if dist.get_rank() == 0:
        norm_gradients(params)


def takes_over_rank_0s(params: Params) -> None:
    flat = torch.cat([param.grad.flatten() for param, p in params if p and param.grad is not None])  # type: ignore[union-attr]
    dist.broadcast(flat, 0)
    for param, partial in params:
        if partial:
            param.grad = flat[: param.numel()].view_as(param)
            flat = flat[param.numel() :]


def calls_labkits(params: Params) -> None:
    from labkit.collectives import mark
    from labkit.sequence_parallel import reduce_partial_gradients

    reduce_partial_gradients(mark(param, partial=(None,)) if partial else param for param, partial in params)


def _chosen(case: Case) -> dict[str, tuple[tuple[int, ...], bool]]:
    return dict(list(GIVEN.items())[: case.elements])


def _numbers(case: Case, rank: int, name: str, what: int) -> torch.Tensor:
    """A rank's gradient of a parameter (1), or the parameter (0), which is the same on every rank if it is partial."""
    shape, partial = _chosen(case)[name]
    seed = 100 * list(GIVEN).index(name) + 10 * what + (0 if partial and not what else 1 + rank)
    return torch.randint(1, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def _is_missing(case: Case, rank: int, name: str) -> bool:
    return case.more == SPARSE and name == "position" and rank == case.ranks - 1


def call(fn: Any, case: Case) -> list[Backward]:
    """Gradients and parameters afterwards."""
    rank, params = dist.get_rank(), {}
    for name in _chosen(case):
        params[name] = torch.nn.Parameter(_numbers(case, rank, name, 0))
        params[name].grad = None if _is_missing(case, rank, name) else _numbers(case, rank, name, 1)
    fn([(param, _chosen(case)[name][1]) for name, param in params.items()])
    return [taken([*((f"{name}.grad", p.grad) for name, p in params.items()), *params.items()])]


def alone_on(case: Case, rank: int) -> Backward:
    """What a rank has before."""
    grads = {f"{name}.grad": _numbers(case, rank, name, 1).double() for name in _chosen(case)}
    for name in _chosen(case):
        if _is_missing(case, rank, name):
            grads[f"{name}.grad"].zero_()
    return taken([*grads.items(), *((name, _numbers(case, rank, name, 0)) for name in _chosen(case))])


def expected(case: Case) -> list[list[Backward]]:
    before = [alone_on(case, rank) for rank in range(case.ranks)]
    sums = {
        f"{name}.grad": [sum(numbers) for numbers in zip(*(each[f"{name}.grad"] or [] for each in before), strict=True)]
        for name, (_, partial) in _chosen(case).items() if partial
    }  # fmt: skip
    return [[{**each, **sums}] for each in before]


def budget(case: Case) -> list[Cost]:
    nbytes = sum(4 * torch.Size(shape).numel() for shape, partial in _chosen(case).values() if partial)
    return [Cost(calls=1, handed=nbytes)] * case.ranks


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    return alone.told(values, expected(case), bad, [alone_on(case, rank) for rank in range(case.ranks)])


def where(case: Case) -> str:
    names = ", ".join(name for name, (_, partial) in _chosen(case).items() if partial)
    return f"{say('check.world', ranks=case.ranks)}, {say('norm_gradients.partial', names=names)}"


EXERCISE = Exercise(
    name="norm_gradients",
    number="5.2",
    cases=(Case(2, 2), Case(1, 3), Case(2, 4), Case(3, 6, more=SPARSE), Case(4, 3)),
    call=call,
    expected=expected,
    budget=budget,
    solution=norm_gradients,
    hints=lambda: (say("norm_gradients.question"), say("norm_gradients.state"), say("norm_gradients.code")),
    wrong=(
        Wrong(averages, "wrong", "0.5 × as much"),
        Wrong(adds_the_sharded_up_too, "wrong", "up.grad"),
        Wrong(adds_the_sharded_up_only, "wrong", "norm.weight.grad"),
        Wrong(leaves_out_what_has_no_gradient, "crashed", "disagree"),
        Wrong(an_all_reduce_each, "wasteful", "budget 1"),
        Wrong(adds_the_parameters_up, "wrong", "rank 0's own part"),
        Wrong(does_nothing, "wrong", "rank 0's own part"),
        Wrong(forgets_to_put_the_sum_back, "wrong", "rank 0's own part"),
        Wrong(cuts_in_equal_parts, "crashed", "shape"),
        Wrong(adds_up_on_rank_0, "crashed"),
        Wrong(takes_over_rank_0s, "wrong"),
        Wrong(calls_labkits, "borrowed", "sequence_parallel.convert.reduce_partial_gradients"),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=where,
    allowed=COLLECTIVES,
    theirs=F_AND_G | SHARED_LAYERS,
)  # fmt: skip
