"""4.3 · a product that is cut by rows, with a bias that counts once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit.checks.alone import Made, strange, told
from labkit.checks.borrow import SHARED_LAYERS
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import Backward, differing, taken
from labkit.checks.trial import watching
from labkit.show.words import count, say
from labkit.tensor_parallel import RowParallelLinear, copy_to_group, gather_from_group, reduce_from_group

Tensor = torch.Tensor
TOKENS, OUT = 2, 3
HUNDRED = 1  #: `Case.more`: of two ranks, the shares of x·A are 1 and −1, and b is 100


def row_bias(x: torch.Tensor, A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return reduce_from_group(x @ A) + b


def added_to_each_share(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return reduce_from_group(x @ A + b)


def a_part_of_it_to_each_share(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return reduce_from_group(x @ A + b / dist.get_world_size())


def added_on_rank_0(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    share = x @ A
    if dist.get_rank() == 0:
        share = share + b
    return reduce_from_group(share)


def added_to_the_sum_on_rank_0(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    y = reduce_from_group(x @ A)
    return y + b if dist.get_rank() == 0 else y


def taken_off_again(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """The value is right: the sum counts b once. Its gradient is not."""
    return reduce_from_group(x @ A + b) - (dist.get_world_size() - 1) * b


def forgets_the_bias(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return reduce_from_group(x @ A)


def forgets_the_sum(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return x @ A + b


def takes_f_for_g(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return copy_to_group(x @ A) + b


def a_part_of_it_and_f(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return reduce_from_group(x @ A + copy_to_group(b) / dist.get_world_size())


def gathers_everything(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return gather_from_group(x) @ gather_from_group(A.t()).t() + b


def adds_the_gradients_up(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return reduce_from_group(x @ A) + copy_to_group(b)


def changes_what_is_in_the_bias(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        b /= dist.get_world_size()
    return reduce_from_group(x @ A + b)


def transposed(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return reduce_from_group(F.linear(x, A)) + b


def takes_labkits_layer(x: Tensor, A: Tensor, b: Tensor) -> Tensor:
    layer = RowParallelLinear(A.shape[0] * dist.get_world_size(), A.shape[1])
    return layer(x) + b


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """All of x, A and b. `Case.elements`: columns of x that a rank has."""
    generator = torch.Generator().manual_seed(case.elements)
    inner = case.ranks * case.elements
    x, A = torch.randn(TOKENS, inner, generator=generator), torch.randn(inner, OUT, generator=generator)
    if case.more == HUNDRED:
        return torch.ones_like(x), torch.tensor([[1.0], [-1.0]]).expand(2, OUT), torch.full((OUT,), 100.0)
    return x, A, torch.randn(OUT, generator=generator)


def loss(y: Tensor) -> Tensor:
    return (y * torch.arange(1.0, y.numel() + 1).view_as(y)).sum()


def call(fn: Callable[[Tensor, Tensor, Tensor], Tensor], case: Case) -> Made:
    x, A, b = tensors(case)
    x, A = (whole.chunk(case.ranks, dim)[dist.get_rank()].contiguous() for whole, dim in ((x, 1), (A, 0)))
    mine = [t.clone().requires_grad_() for t in (x, A, b)]
    y = fn(*mine)
    if said := strange(y, (TOKENS, OUT), say("alone.the_function")):
        return said
    total = loss(y)
    with watching(fn):
        total.backward()
    return [_named(y, mine[2], [t.grad for t in mine])]


def _named(y: Tensor, b: Tensor, grads: list[Tensor | None]) -> Backward:
    return taken([("y", y), ("b", b), *zip(("b.grad", "A.grad", "x.grad"), reversed(grads), strict=True)])


def expected(case: Case) -> list[list[Backward]]:
    """One process, in float64; of x and A a rank's part."""
    x, A, b = (t.double().requires_grad_() for t in tensors(case))
    y = x @ A + b
    loss(y).backward()
    xs, As = x.grad.chunk(case.ranks, 1), A.grad.chunk(case.ranks, 0)
    return [[_named(y, b, [xs[rank], As[rank], b.grad])] for rank in range(case.ranks)]


def budget(case: Case) -> list[Cost]:
    return [Cost(calls=1, handed=4 * TOKENS * OUT)] * case.ranks


def where(case: Case) -> str:
    told = say("row_bias.hundred") if case.more == HUNDRED else count("row_bias.rows", case.elements)
    return f"{say('check.world', ranks=case.ranks)}, {told}"


EXERCISE = Exercise(
    name="row_bias",
    number="4.3",
    cases=(Case(2, 1, more=HUNDRED), Case(2, 2), Case(3, 1), Case(4, 2)),
    call=call,
    expected=expected,
    budget=budget,
    solution=row_bias,
    hints=lambda: (say("row_bias.question"), say("row_bias.state"), say("row_bias.code")),
    wrong=(
        Wrong(forgets_the_bias, "wrong", "expected 100, got 0"),
        Wrong(added_to_each_share, "wrong", "rank 0, y, element [0, 0]: expected 100, got 200 (2 × as much)"),
        Wrong(forgets_the_sum, "wrong", "expected 100, got 101"),
        Wrong(a_part_of_it_to_each_share, "wrong", "b.grad, element 0: expected 5, got 2.5 (0.5 × as much)"),
        Wrong(takes_f_for_g, "wrong", "expected 100, got 101"),
        Wrong(added_on_rank_0, "wrong", "rank 1: b.grad is None; expected 5, …"),
        Wrong(added_to_the_sum_on_rank_0, "wrong", "rank 1, y, element [0, 0]: expected 100, got 0"),
        Wrong(adds_the_gradients_up, "wrong", "b.grad, element 0: expected 5, got 10 (2 × as much)"),
        Wrong(taken_off_again, "wrong", "b.grad, element 0: expected 5, got 0"),
        Wrong(changes_what_is_in_the_bias, "wrong", "rank 0, b, element 0: expected 100, got 50"),
        Wrong(a_part_of_it_and_f, "wasteful", "collectives of a rank: 2; budget 1"),
        Wrong(gathers_everything, "wasteful", "collectives of a rank"),
        Wrong(transposed, "crashed", "shapes cannot be multiplied"),
        Wrong(takes_labkits_layer, "borrowed", "tensor_parallel.linear"),
    ),
    legal=nothing,
    compare=differing,
    tells=lambda case, values, bad: told(values, expected(case), bad),
    where=where,
    allowed=COLLECTIVES,
    theirs=SHARED_LAYERS,
)
