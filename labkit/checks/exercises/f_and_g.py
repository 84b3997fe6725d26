"""4.1 · f and g: where a layer splits into ranks, and where it comes together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks.alone import Made, in_short, told, where
from labkit.checks.between import CUT, PLACES, WIDTH, Astray, One, Seen, block, leaf, same, tensors
from labkit.checks.borrow import F_AND_G, SHARED_LAYERS
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import Backward, differing, taken
from labkit.checks.trial import watching
from labkit.show.words import say
from labkit.tensor_parallel import copy_to_group, reduce_from_group

Pair = tuple[One, One]
#: Under this name stands of each place whether something was.
CHANGED = "changed"
UNCHANGED: Backward = {CHANGED: [0.0] * len(PLACES)}


def f_and_g():
    def total(x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    class Copy(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.view_as(x))
        backward = staticmethod(lambda ctx, grad: total(grad))

    class Reduce(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: total(x))
        backward = staticmethod(lambda ctx, grad: grad)

    return Copy.apply, Reduce.apply


def _function(forward: One, backward: One) -> One:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)

    return Function.apply


def total(x: torch.Tensor) -> torch.Tensor:
    return total_in_place(x.clone())


def total_in_place(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def mean(x: torch.Tensor) -> torch.Tensor:
    return total(x) / dist.get_world_size()


def total_of_gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts).sum(0)


def total_on_rank_0(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.reduce(x, 0)
    return x


def f_does_nothing_in_backward() -> Pair:
    return _function(same, same), _function(total, same)


def f_puts_a_hook_on_its_input() -> Pair:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(total)  # it sees what the residual connection brings as well
        return x

    return f, f_and_g()[1]


def swapped() -> Pair:
    f, g = f_and_g()
    return g, f


def f_reduces_forward_too() -> Pair:
    return _function(total, total), _function(total, same)


def g_reduces_backward_too() -> Pair:
    return _function(same, total), _function(total, total)


def g_reduces_backward_in_place() -> Pair:
    return _function(same, total), _function(total, total_in_place)


def f_averages() -> Pair:
    return _function(same, mean), _function(total, same)


def g_averages() -> Pair:
    return _function(same, total), _function(mean, same)


def g_shares_the_gradient_out() -> Pair:
    return _function(same, total), _function(total, lambda grad: grad / dist.get_world_size())


def g_reduces_in_place() -> Pair:
    return _function(same, total), _function(total_in_place, same)


def f_reduces_the_gradient_in_place() -> Pair:
    return _function(same, total_in_place), _function(total, same)


def g_reduces_to_rank_0() -> Pair:
    return _function(same, total), _function(total_on_rank_0, same)


def g_loses_the_graph() -> Pair:
    return _function(same, total), lambda x: total(x.detach())


def gathers_and_adds() -> Pair:
    return _function(same, total_of_gathered), _function(total_of_gathered, same)


def returns_one_function() -> One:
    return f_and_g()[0]


def forgets_to_return_the_sum() -> Pair:
    return f_and_g()[0], lambda x: dist.all_reduce(x.detach().clone())


def calls_labkits() -> Pair:
    return copy_to_group, reduce_from_group


def call(fn: Callable[[], Any], case: Case) -> Made:
    """Loss and gradients; and where a tensor was changed."""
    pair = fn()
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(callable, pair))):
        return say("f_and_g.returned", have=in_short(pair))
    mine, seen = tensors(case, dist.get_rank()), Seen(*pair)
    try:
        loss = block(mine, lambda x: seen.call("f", x), lambda x: seen.call("g", x))
        with watching(fn):
            loss.backward()
    except Astray as astray:
        return str(astray)
    return [_named(loss, _grads(mine)) | {CHANGED: seen.changed()}]


def _named(loss: torch.Tensor, grads: Mapping[str, torch.Tensor | None]) -> Backward:
    """From the end of forward to its beginning, which is the order of backward."""
    return taken([("loss", loss), *((f"{name}.grad", grads[name]) for name in list(grads)[::-1])])


def _grads(mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {name: t.grad for name, t in mine.items()}


def own(case: Case) -> list[Backward]:
    """What each rank would have without f: only its own part of the MLP hands gradients on."""
    whole, found = tensors(case), []
    shares: list[torch.Tensor] = []
    block(whole, same, lambda share: shares.append(share.detach()) or share)  # type: ignore[func-returns-value]
    for rank in range(case.ranks):
        mine = {name: leaf(t.detach(), case.ranks, rank, CUT.get(name)) for name, t in whole.items()}
        loss = block(mine, same, lambda share: share + (shares[0] - share).detach())
        loss.backward()
        found.append(_named(loss, _grads(mine)))
    return found


def expected(case: Case) -> list[list[Backward]]:
    """One process, in float64; of what is cut, each rank's part."""
    whole, found = tensors(case), []
    loss = block(whole, same, same)
    grads = dict(zip(whole, torch.autograd.grad(loss, list(whole.values())), strict=True))
    for rank in range(case.ranks):
        parts = {name: leaf(grad, case.ranks, rank, CUT.get(name)) for name, grad in grads.items()}
        found.append([_named(loss, parts) | UNCHANGED])
    return found


def budget(case: Case) -> list[Cost]:
    return [Cost(calls=2, handed=2 * 4 * WIDTH * case.elements)] * case.ranks


def tells(case: Case, values: list[Any], bad: list[int]) -> str:
    """A tensor that was changed, if that is all that is wrong; else the first number that is."""
    wanted = expected(case)
    unchanged = [v if isinstance(v, str) else [v[0] | UNCHANGED] for v in values]
    if off := differing(case, unchanged, wanted):
        return told(values, [[_without(each, CHANGED)] for (each,) in wanted], off, own(case))
    which, phase = PLACES[values[bad[0]][0][CHANGED].index(1.0)]
    said = say("f_and_g.forward", which=which) if phase == "forward" else say("f_and_g.backward", which=which)
    return f"{say('alone.rank', rank=bad[0])}: {said}"


def _without(each: Backward, name: str) -> Backward:
    return {key: numbers for key, numbers in each.items() if key != name}


EXERCISE = Exercise(
    name="f_and_g",
    number="4.1",
    core=True,
    cases=(Case(2, 1), Case(2, 3), Case(3, 2), Case(4, 5)),
    call=call,
    expected=expected,
    budget=budget,
    solution=f_and_g,
    hints=lambda: (say("f_and_g.question"), say("f_and_g.state"), say("f_and_g.code")),
    wrong=(
        Wrong(f_does_nothing_in_backward, "wrong", "which is what rank 0's own part gives"),
        Wrong(f_puts_a_hook_on_its_input, "wrong", "norm.grad"),
        Wrong(swapped, "wrong", "rank 0, loss: expected"),
        Wrong(f_reduces_forward_too, "wrong", "rank 0, loss: expected"),
        Wrong(g_reduces_backward_too, "wrong", "B.grad, element [0, 0]"),
        Wrong(g_reduces_backward_in_place, "wrong", "(2 × as much)"),
        Wrong(f_averages, "wrong", "norm.grad, element 0"),
        Wrong(g_averages, "wrong", "rank 0, loss: expected"),
        Wrong(g_shares_the_gradient_out, "wrong", "(0.5 × as much)"),
        Wrong(g_reduces_in_place, "wrong", "the tensor that g was given in forward is not what it was"),
        Wrong(f_reduces_the_gradient_in_place, "wrong", "the gradient that f was given in backward is not what it was"),
        Wrong(g_reduces_to_rank_0, "wrong", "rank 1, loss"),
        Wrong(g_loses_the_graph, "wrong", "B.grad is None"),
        Wrong(gathers_and_adds, "wasteful", "handed to collectives by a rank"),
        Wrong(returns_one_function, "wrong", "expected two functions"),
        Wrong(forgets_to_return_the_sum, "wrong", "g returned None"),
        Wrong(calls_labkits, "borrowed", "tensor_parallel.functions.copy_to_group"),
    ),
    legal=nothing,
    compare=differing,
    tells=tells,
    where=where,
    allowed=COLLECTIVES,
    theirs=F_AND_G | SHARED_LAYERS,
)
