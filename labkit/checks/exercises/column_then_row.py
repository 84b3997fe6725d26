"""4.2 · an MLP whose first matrix is cut by columns and whose second by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit.checks.alone import Made, strange, told, where
from labkit.checks.borrow import SHARED_LAYERS
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.given import uncounted
from labkit.checks.gradients import Backward, differing, near, taken
from labkit.checks.trial import watching
from labkit.show.words import say
from labkit.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
)

Tensor = torch.Tensor
WIDTH, INNER = 12, 48
#: Tensors, by the order of their arguments; of A, a and B a rank uses a part.
SHAPES = {"x": (), "A": (WIDTH, INNER), "a": (INNER,), "B": (INNER, WIDTH), "b": (WIDTH,)}
CUT = ("A", "a", "B")


def column_then_row(
    x: torch.Tensor, A: torch.Tensor, a: torch.Tensor, B: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    A, a, B = A.chunk(t, dim=1)[rank], a.chunk(t)[rank], B.chunk(t, dim=0)[rank]
    y = F.gelu(copy_to_group(x) @ A + a)
    return reduce_from_group(y @ B) + b


def row_then_column(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    y = F.gelu(reduce_from_group(split_to_group(x) @ A.chunk(t, dim=0)[rank]) + a)
    return gather_from_group(copy_to_group(y) @ B.chunk(t, dim=1)[rank]) + b


def forgets_f(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    y = F.gelu(x @ A.chunk(t, dim=1)[rank] + a.chunk(t)[rank])
    return reduce_from_group(y @ B.chunk(t, dim=0)[rank]) + b


def forgets_g(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    y = F.gelu(copy_to_group(x) @ A.chunk(t, dim=1)[rank] + a.chunk(t)[rank])
    return y @ B.chunk(t, dim=0)[rank] + b


def f_and_g_swapped(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    y = F.gelu(reduce_from_group(x) @ A.chunk(t, dim=1)[rank] + a.chunk(t)[rank])
    return copy_to_group(y @ B.chunk(t, dim=0)[rank]) + b


def last_bias_in_the_share(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    y = F.gelu(copy_to_group(x) @ A.chunk(t, dim=1)[rank] + a.chunk(t)[rank])
    return reduce_from_group(y @ B.chunk(t, dim=0)[rank] + b)


def whole_first_bias(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    y = F.gelu(copy_to_group(x) @ A.chunk(t, dim=1)[rank] + a)
    return reduce_from_group(y @ B.chunk(t, dim=0)[rank]) + b


def gelu_of_shares(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    """A by rows, and GELU before the shares are added up."""
    t, rank = dist.get_world_size(), dist.get_rank()
    y = reduce_from_group(F.gelu(split_to_group(x) @ A.chunk(t, dim=0)[rank] + a / t))
    return reduce_from_group(split_to_group(y) @ B.chunk(t, dim=0)[rank]) + b


def both_by_columns(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    y = F.gelu(copy_to_group(x) @ A.chunk(t, dim=1)[rank] + a.chunk(t)[rank])
    return reduce_from_group(y @ B.chunk(t, dim=1)[rank]) + b


def other_rows_than_columns(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    y = F.gelu(copy_to_group(x) @ A.chunk(t, dim=1)[rank] + a.chunk(t)[rank])
    return reduce_from_group(y @ B.chunk(t, dim=0)[t - 1 - rank]) + b


def all_of_it_on_every_rank(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ A + a) @ B + b


def averages_all_of_it(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    return reduce_from_group(F.gelu(x @ A + a) @ B / dist.get_world_size()) + b


def cuts_what_is_computed(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    """Every rank makes all columns, and goes on with its own."""
    t, rank = dist.get_world_size(), dist.get_rank()
    y = F.gelu(copy_to_group(x) @ A + a).chunk(t, dim=-1)[rank]
    return reduce_from_group(y @ B.chunk(t, dim=0)[rank]) + b


def gathers_between(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    t, rank = dist.get_world_size(), dist.get_rank()
    y = gather_from_group(F.gelu(copy_to_group(x) @ A.chunk(t, dim=1)[rank] + a.chunk(t)[rank]))
    return reduce_from_group(split_to_group(y) @ B.chunk(t, dim=0)[rank]) + b


def takes_labkits_layers(x: Tensor, A: Tensor, a: Tensor, B: Tensor, b: Tensor) -> Tensor:
    first, second = ColumnParallelLinear(WIDTH, INNER), RowParallelLinear(INNER, WIDTH)
    return second(F.gelu(first(x)))


def tensors(case: Case) -> dict[str, Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(case.elements)
    return {name: torch.randn(*(shape or (case.elements, WIDTH)), generator=generator)
            for name, shape in SHAPES.items()}  # fmt: skip


def loss(z: Tensor) -> Tensor:
    return (z - 1).square().mean()


def call(fn: Callable[..., Tensor], case: Case) -> Made:
    """The output and gradients; those of A, a and B of all ranks together."""
    given = {name: t.requires_grad_() for name, t in tensors(case).items()}
    z = fn(*given.values())
    if said := strange(z, (case.elements, WIDTH), say("alone.the_function")):
        return said
    total = loss(z)
    with watching(fn):
        total.backward()
    grads = {name: t.grad for name, t in given.items()}
    with uncounted():
        grads |= {name: _of_all_ranks(given[name]) for name in CUT}
    return [_named(z, grads, given)]


def _of_all_ranks(param: Tensor) -> Tensor:
    """What the ranks' parts of a gradient add up to. A first bias that is added after a sum is whole on each."""
    grad = torch.zeros_like(param) if param.grad is None else param.grad
    parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad.contiguous())
    is_whole = param.dim() == 1 and all(near(p.tolist(), parts[0].tolist()) for p in parts)
    return parts[0] if is_whole else torch.stack(parts).sum(0)


def _named(z: Tensor, grads: dict[str, Tensor | None], given: dict[str, Tensor]) -> Backward:
    """What was given is to stay what it was."""
    names = {name: say("alone.of_all", name=f"{name}.grad") if name in CUT else f"{name}.grad" for name in SHAPES}
    return taken([("z", z), *((names[name], grads[name]) for name in ("b", "B", "a", "A", "x")), *given.items()])


def expected(case: Case) -> list[list[Backward]]:
    """One process, in float64."""
    whole = {name: t.double().requires_grad_() for name, t in tensors(case).items()}
    z = all_of_it_on_every_rank(*whole.values())
    loss(z).backward()
    return [[_named(z, {name: t.grad for name, t in whole.items()}, whole)]] * case.ranks


def budget(case: Case) -> list[Cost]:
    """Two all-reduces of x's bytes; memory for the columns of one rank, the share, the sum and a copy of the parts."""
    size = 4 * WIDTH * case.elements
    room = 3 * size * INNER // WIDTH // case.ranks + 4 * size + 4 * 2 * WIDTH * INNER
    return [Cost(calls=2, handed=2 * size, peak=room)] * case.ranks


def tells(case: Case, values: list[Any], bad: list[int]) -> str:
    """The first number that is wrong; and whether z is what a bias in each rank's share makes of it."""
    wanted, rank = expected(case), bad[0]
    line = told(values, wanted, bad)
    if isinstance(values[rank], str):
        return line
    z, b = torch.tensor(wanted[rank][0]["z"]).view(case.elements, WIDTH), tensors(case)["b"]
    often = near(values[rank][0]["z"], (z + (case.ranks - 1) * b).flatten().tolist())
    return line + say("column_then_row.times", times=case.ranks) if often else line


EXERCISE = Exercise(
    name="column_then_row",
    number="4.2",
    cases=(Case(2, 1), Case(2, 3), Case(3, 2), Case(4, 1024)),
    call=call,
    expected=expected,
    budget=budget,
    solution=column_then_row,
    hints=lambda: (say("column_then_row.question"), say("column_then_row.state"), say("column_then_row.code")),
    wrong=(
        Wrong(forgets_g, "wrong", "rank 0, z, element [0, 0]"),
        Wrong(row_then_column, "wasteful", "collectives of a rank: 4; budget 2"),
        Wrong(f_and_g_swapped, "wrong", "rank 0, z, element [0, 0]"),
        Wrong(forgets_f, "wrong", "x.grad, element [0, 0]"),
        Wrong(gelu_of_shares, "wrong", "rank 0, z, element [0, 0]"),
        Wrong(last_bias_in_the_share, "wrong", "z is what comes out if b is added 2 times"),
        Wrong(both_by_columns, "crashed", "cannot be multiplied"),
        Wrong(whole_first_bias, "crashed", "must match"),
        Wrong(other_rows_than_columns, "wrong", "rank 0, z, element [0, 0]"),
        Wrong(all_of_it_on_every_rank, "wrong", "of all ranks"),
        Wrong(averages_all_of_it, "wrong"),
        Wrong(cuts_what_is_computed, "wasteful", "held by a rank"),
        Wrong(gathers_between, "wasteful", "collectives of a rank"),
        Wrong(takes_labkits_layers, "borrowed", "tensor_parallel.linear"),
    ),
    legal=nothing,
    compare=differing,
    tells=tells,
    where=where,
    allowed=COLLECTIVES,
    theirs=SHARED_LAYERS,
)
