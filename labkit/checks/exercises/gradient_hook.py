"""3.2 · a hook that averages a gradient over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.checks.borrow import DATA_PARALLEL
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.given import uncounted
from labkit.checks.gradients import Backward, differing, mean, taken, told
from labkit.show.words import say

BACKWARDS = 2
TWICE = 1  #: `Case.more`: the parameter is used twice


def gradient_hook(param: torch.nn.Parameter) -> None:
    def average(param):
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()

    param.register_post_accumulate_grad_hook(average)


def reduces_the_parameter(param: torch.nn.Parameter) -> None:
    def average(param):
        with torch.no_grad():
            dist.all_reduce(param)
            param /= dist.get_world_size()

    param.register_post_accumulate_grad_hook(average)


def sums(param: torch.nn.Parameter) -> None:
    param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad))


def divides_by_the_rank(param: torch.nn.Parameter) -> None:
    def average(param):
        param.grad /= max(1, dist.get_rank())
        dist.all_reduce(param.grad)

    param.register_post_accumulate_grad_hook(average)


def divides_by_two(param: torch.nn.Parameter) -> None:
    def average(param):
        param.grad /= 2
        dist.all_reduce(param.grad)

    param.register_post_accumulate_grad_hook(average)


def divides_twice(param: torch.nn.Parameter) -> None:
    def average(param):
        param.grad /= dist.get_world_size()
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()

    param.register_post_accumulate_grad_hook(average)


def averages_a_copy(param: torch.nn.Parameter) -> None:
    def average(grad: torch.Tensor) -> None:
        copy = grad / dist.get_world_size()
        dist.all_reduce(copy)

    param.register_hook(average)


def averages_on_rank_0(param: torch.nn.Parameter) -> None:
    def average(param):
        grad = param.grad / dist.get_world_size()
        dist.reduce(grad, 0)
        if dist.get_rank() == 0:
            param.grad.copy_(grad)

    param.register_post_accumulate_grad_hook(average)


def takes_over_rank_0s(param: torch.nn.Parameter) -> None:
    param.register_post_accumulate_grad_hook(lambda param: dist.broadcast(param.grad, 0))


def averages_before_there_is_a_gradient(param: torch.nn.Parameter) -> None:
    if param.grad is not None:
        dist.all_reduce(param.grad)


def averages_once(param: torch.nn.Parameter) -> None:
    def average(param):
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
        handle.remove()

    handle = param.register_post_accumulate_grad_hook(average)


def averages_only_on_rank_0(param: torch.nn.Parameter) -> None:
    if dist.get_rank() == 0:
        gradient_hook(param)


def gathers_all_gradients(param: torch.nn.Parameter) -> None:
    def average(grad: torch.Tensor) -> torch.Tensor:
        grads = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, grad)
        return torch.stack(grads).mean(0)

    param.register_hook(average)


def averages_each_number(param: torch.nn.Parameter) -> None:
    def average(param):
        for number in param.grad:
            dist.all_reduce(number)
            number /= dist.get_world_size()

    param.register_post_accumulate_grad_hook(average)


def calls_labkit(param: torch.nn.Parameter) -> None:
    from labkit.data_parallel import average_gradients

    holder = torch.nn.ParameterList([param])
    average_gradients(holder)
    param.register_post_accumulate_grad_hook(lambda _: average_gradients(holder))


def call(fn: Callable[[torch.nn.Parameter], None], case: Case) -> list[Backward]:
    param = torch.nn.Parameter(torch.arange(case.elements) / 4)
    with uncounted():
        fn(param)
    seen = []
    for step in range(BACKWARDS):
        param.grad = None
        _loss(param, case, dist.get_rank(), step).backward()
        seen.append(taken([("param.grad", param.grad), ("param", param)]))
    return seen


def _loss(param: torch.Tensor, case: Case, rank: int, step: int) -> torch.Tensor:
    """Its gradient is 3 + 4·rank, and more for later elements and steps."""
    numbers = 3.0 + 4 * rank + step + torch.arange(case.elements)
    loss = (param * numbers).sum()
    return loss + (param * param).sum() if case.more == TWICE else loss


def own(case: Case) -> list[list[Backward]]:
    """What each rank would have alone."""
    found = []
    for rank in range(case.ranks):
        param = (torch.arange(case.elements).double() / 4).requires_grad_()
        grads = [torch.autograd.grad(_loss(param, case, rank, step), param)[0] for step in range(BACKWARDS)]
        found.append([taken([("param.grad", grad), ("param", param)]) for grad in grads])
    return found


def expected(case: Case) -> list[list[Backward]]:
    return [mean(own(case))] * case.ranks


def budget(case: Case) -> list[Cost]:
    return [Cost(calls=BACKWARDS, handed=BACKWARDS * 4 * case.elements)] * case.ranks


EXERCISE = Exercise(
    name="gradient_hook",
    number="3.2",
    cases=(Case(2, 1), Case(2, 3), Case(3, 2), Case(2, 2, more=TWICE), Case(1, 2), Case(4, 5)),
    call=call,
    expected=expected,
    budget=budget,
    solution=gradient_hook,
    hints=lambda: (say("gradient_hook.question"), say("gradient_hook.state"), say("gradient_hook.code")),
    wrong=(
        Wrong(reduces_the_parameter, "wrong", "param.grad, element 0: expected 5, got 3, which is rank 0's own"),
        Wrong(sums, "wrong", "expected 5, got 10 (2 × as much)"),
        Wrong(divides_by_the_rank, "wrong", "2 × as much"),
        Wrong(divides_by_two, "wrong", "world 3"),
        Wrong(divides_twice, "wrong", "0.5 × as much"),
        Wrong(averages_a_copy, "wrong", "rank 0's own"),
        Wrong(averages_on_rank_0, "wrong", "rank 1"),
        Wrong(takes_over_rank_0s, "wrong", "expected 5, got 3"),
        Wrong(averages_before_there_is_a_gradient, "wrong", "rank 0's own"),
        Wrong(averages_once, "wrong", "the second backward"),
        Wrong(averages_only_on_rank_0, "crashed", "nothing: its function had returned"),
        Wrong(gathers_all_gradients, "wasteful", "B; budget 40"),
        Wrong(averages_each_number, "wasteful", "budget 2"),
        Wrong(calls_labkit, "borrowed", "data_parallel.naive.average_gradients"),
    ),
    legal=nothing,
    compare=differing,
    tells=lambda case, values, bad: told(values, expected(case), own(case), bad[0]),
    allowed=COLLECTIVES,
    theirs=DATA_PARALLEL,
)  # fmt: skip
