"""5.1 · the two functions that take the place of f and g."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks import alone
from labkit.checks.alone import Made, in_short, strange
from labkit.checks.borrow import F_AND_G, SHARED_LAYERS
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import Backward, differing, taken
from labkit.checks.tokens import WIDTH, Layer
from labkit.checks.trial import watching
from labkit.checks.wire import sent_by_a_ring
from labkit.show.words import say
from labkit.trace import Trace

BATCH = 2
#: Files of torch's own collectives that have a backward.
TORCHS = frozenset(str(Path(dist.__file__).parent / f) for f in ("nn/functional.py", "_functional_collectives.py"))


def sequence_pair():
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x.contiguous())
            return torch.cat(parts, dim=1)

        @staticmethod
        def backward(ctx, grad):
            return Scatter.forward(ctx, grad)

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            parts = [part.contiguous() for part in y.chunk(dist.get_world_size(), dim=1)]
            dist.reduce_scatter(total := torch.empty_like(parts[0]), parts)
            return total

        @staticmethod
        def backward(ctx, grad):
            return Gather.forward(ctx, grad)

    return Gather.apply, Scatter.apply


def _two_ways(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A function and what stands for its derivative."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return backward(grad)

    return Both.apply


def _gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=1)


def _scattered(x: torch.Tensor) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), dim=1)]
    total = torch.empty_like(parts[0])
    dist.reduce_scatter(total, parts)
    return total


def _sliced(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone()


def _reduced_and_sliced(x: torch.Tensor) -> torch.Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return _sliced(total)


def gathers_back_a_slice() -> Any:
    return _two_ways(_gathered, _sliced), _two_ways(_scattered, _gathered)


def gathers_back_a_slice_of_an_all_reduce() -> Any:
    return _two_ways(_gathered, _reduced_and_sliced), _two_ways(_scattered, _gathered)


def scatters_by_an_all_reduce() -> Any:
    return _two_ways(_gathered, _scattered), _two_ways(_reduced_and_sliced, _gathered)


def scatters_a_slice() -> Any:
    return _two_ways(_gathered, _scattered), _two_ways(_sliced, _gathered)


def scatters_back_its_own_tokens() -> Any:
    """The derivative of a slice: its own gradient between zeros."""

    def padded(grad: torch.Tensor) -> torch.Tensor:
        zeros = [torch.zeros_like(grad) for _ in range(dist.get_world_size())]
        zeros[dist.get_rank()] = grad
        return torch.cat(zeros, dim=1)

    return _two_ways(_gathered, _scattered), _two_ways(_scattered, padded)


def scatters_back_what_it_is_given() -> Any:
    return _two_ways(_gathered, _scattered), _two_ways(_scattered, lambda grad: grad)


def joins_along_the_batch() -> Any:
    def gathered(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(_gathered(x).chunk(dist.get_world_size(), dim=1))

    return _two_ways(gathered, _scattered), _two_ways(_scattered, gathered)


def views_what_stands_rank_by_rank() -> Any:
    """The ranks' parts lie one after another, which is the order of tokens in the first sequence only."""

    def gathered(x: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(_gathered(x).chunk(dist.get_world_size(), dim=1))
        return parts.view(len(x), -1, x.shape[2])

    return _two_ways(gathered, _scattered), _two_ways(_scattered, _gathered)


def averages() -> Any:
    def mean(x: torch.Tensor) -> torch.Tensor:
        return _scattered(x) / dist.get_world_size()

    return _two_ways(_gathered, _scattered), _two_ways(mean, _gathered)


def averages_back() -> Any:
    def mean(x: torch.Tensor) -> torch.Tensor:
        return _scattered(x) / dist.get_world_size()

    return _two_ways(_gathered, mean), _two_ways(_scattered, _gathered)


def leaves_no_backward() -> Any:
    return _gathered, _scattered


def returns_classes() -> Any:
    return tuple(function.__self__ for function in sequence_pair())


def calls_labkits() -> Any:
    import labkit

    return labkit.sequence_parallel.gather_from_sequence, labkit.sequence_parallel.reduce_scatter_to_sequence


def _tokens(case: Case, seed: int) -> torch.Tensor:
    """(b, s, h)."""
    shape = (BATCH, case.ranks * case.elements, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call(fn: Callable[[], Any], case: Case) -> Made:
    """What the pair makes on the way through a layer, and the gradients."""
    rank, ranks = dist.get_rank(), case.ranks
    made = fn()
    if type(made) not in (tuple, list) or len(made) != 2 or any(isinstance(f, type) or not callable(f) for f in made):
        return say("sequence_pair.returned", have=in_short(made))
    gather, scatter = made
    layer = Layer().share(rank, ranks)
    x = _tokens(case, 1).chunk(ranks, dim=1)[rank].clone().requires_grad_()
    slope = _tokens(case, 2).chunk(ranks, dim=1)[rank]
    with watching(fn):
        whole = gather(layer.norm(x))
        if text := strange(whole, (BATCH, ranks * case.elements, WIDTH), "gather"):
            return text
        y = scatter(layer.mlp(whole))
        if text := strange(y, (BATCH, case.elements, WIDTH), "scatter"):
            return text
        ((x + y) * slope).sum().backward()
    grads = [(f"{name}.grad", t.grad) for name, t in _parameters(layer, x).items()]
    return [taken([("gather(…)", whole), ("scatter(…)", y), *grads])]


def _parameters(layer: Layer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What has a gradient, in the order in which a backward comes to it."""
    return {"down": layer.down, "up": layer.up, "norm.weight": layer.norm.weight, "x": x}


def in_one_process(case: Case, own: bool = False) -> list[Backward]:
    """What each rank should have, in float64. Its norm sees its own tokens, so it has a weight for each rank.

    Args:
        own: What a rank has without the others: its part of each sum; its own tokens' part of the weights' gradients.
    """
    ranks, shares = range(case.ranks), [Layer().double().share(r, case.ranks) for r in range(case.ranks)]
    xs = [x.clone().requires_grad_() for x in _tokens(case, 1).double().chunk(case.ranks, dim=1)]
    slopes = _tokens(case, 2).double().chunk(case.ranks, dim=1)
    whole = torch.cat([share.norm(x) for share, x in zip(shares, xs, strict=True)], dim=1)
    made = [share.mlp(whole).chunk(case.ranks, dim=1) for share in shares]  # by rank, then by tokens
    sums = [made[r][r] if own else torch.stack([m[r] for m in made]).sum(0) for r in ranks]
    losses = torch.stack([((xs[r] + sums[r]) * slopes[r]).sum() for r in ranks])
    found = []
    for r in ranks:
        loss = losses[r] if own else losses.sum()
        named = list(_parameters(shares[r], xs[r]).items())
        grads = torch.autograd.grad(loss, [t for _, t in named], retain_graph=True)
        made_of = [("gather(…)", whole), ("scatter(…)", sums[r])]
        found.append(taken([*made_of, *((f"{n}.grad", g) for (n, _), g in zip(named, grads, strict=True))]))
    return found


def expected(case: Case) -> list[list[Backward]]:
    return [[tensors] for tensors in in_one_process(case)]


def budget(case: Case) -> list[Cost]:
    """Forward and backward: a gather and a reduce-scatter, each of (b, s, h)."""
    return [Cost(calls=4, handed=4 * _whole(case))] * case.ranks


def _whole(case: Case) -> int:
    return 4 * BATCH * case.ranks * case.elements * WIDTH


def sends_too_much(case: Case, trace: Trace) -> str:
    """Whether a ring would send more for these collectives than for four halves of an all-reduce."""
    limit = 4 * _whole(case) * (case.ranks - 1) // case.ranks
    have = max(sent_by_a_ring(trace, rank) for rank in range(case.ranks))
    return say("sequence_pair.sent", have=have, limit=limit, ratio=f"{have / limit:.1f}") if have > limit else ""


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    return alone.told(values, expected(case), bad, in_one_process(case, own=True))


def where(case: Case) -> str:
    shape = f"b = {BATCH}, s = {case.ranks * case.elements}, h = {WIDTH}"
    return f"{say('check.world', ranks=case.ranks)}, {shape}"


EXERCISE = Exercise(
    name="sequence_pair",
    number="5.1",
    core=True,
    cases=(Case(2, 1), Case(2, 2), Case(3, 2), Case(4, 1), Case(1, 2)),
    call=call,
    expected=expected,
    budget=budget,
    solution=sequence_pair,
    hints=lambda: (say("sequence_pair.question"), say("sequence_pair.state"), say("sequence_pair.code")),
    wrong=(
        Wrong(gathers_back_a_slice, "wrong", "norm.weight.grad"),
        Wrong(gathers_back_a_slice_of_an_all_reduce, "wasteful", "1.2×"),
        Wrong(scatters_by_an_all_reduce, "wasteful", "1.2×"),
        Wrong(scatters_a_slice, "wrong", "rank 0's own part"),
        Wrong(scatters_back_its_own_tokens, "wrong", "down.grad"),
        Wrong(scatters_back_what_it_is_given, "crashed", "invalid gradient"),
        Wrong(joins_along_the_batch, "wrong", "(4, 1, 4); expected a tensor of shape (2, 2, 4)"),
        Wrong(views_what_stands_rank_by_rank, "wrong", "gather(…)"),
        Wrong(averages, "wrong", "0.5 × as much"),
        Wrong(averages_back, "wrong", "0.5 × as much"),
        Wrong(leaves_no_backward, "wrong", "down.grad"),
        Wrong(returns_classes, "wrong", "expected two functions"),
        Wrong(calls_labkits, "borrowed", "sequence_parallel.functions.gather_from_sequence"),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=where,
    allowed=COLLECTIVES,
    theirs=F_AND_G | SHARED_LAYERS | TORCHS,
    order=sends_too_much,
)  # fmt: skip
