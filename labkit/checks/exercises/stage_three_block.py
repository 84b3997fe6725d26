"""7.4 · a block of ZeRO's third stage: gathered for as long as it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks import alone
from labkit.checks.alone import Made, in_short, strange
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import Backward, differing, taken
from labkit.checks.shards import ROWS, SHARDED, Block, in_shard, mean, rows, shard_of
from labkit.checks.trial import Meter
from labkit.checks.wire import sent_by_a_ring
from labkit.show.words import say
from labkit.trace import Trace

RATE = 0.1
HELD = "held"  #: beside what is made: the most bytes that a rank held at once
ROOM = 6  #: blocks' bytes that may be held at once beside what enters the blocks, where there are more
#: Widths of a block; `Case.more` says which.
WIDTHS = (3, 4, 12)
Pair = tuple[Callable[..., Any], Callable[..., Any]]


def stage_three_block(block, shard):
    ranks = dist.get_world_size()

    def gather():
        whole = [torch.empty_like(shard) for _ in range(ranks)]
        dist.all_gather(whole, shard)
        return torch.cat(whole)

    def forward(x):
        return block.forward(gather(), x)

    def backward(x, grad):
        grad_x, grad_flat = block.backward(gather(), x, grad)
        mine = torch.empty_like(shard)
        dist.reduce_scatter(mine, list(grad_flat.chunk(ranks)))
        return grad_x, mine / ranks

    return forward, backward


def _gathered(shard: torch.Tensor) -> torch.Tensor:
    whole = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, shard)
    return torch.cat(whole)


def _scattered(flat: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the mean."""
    parts = list(flat.chunk(dist.get_world_size()))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine / dist.get_world_size()


def _block(
    block: Block, shard: torch.Tensor, gather: Callable[..., torch.Tensor] = _gathered,
    scatter: Callable[..., torch.Tensor] = _scattered,
) -> Pair:  # fmt: skip
    """The solution, with another gather, or another way from the flat gradient to what is returned."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return block.forward(gather(shard), x)

    def backward(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grad_x, grad_flat = block.backward(gather(shard), x, grad)
        return grad_x, scatter(grad_flat)

    return forward, backward


def keeps_what_it_gathered(block: Block, shard: torch.Tensor) -> Pair:
    """Until backward: two thirds of the bytes, and all blocks are held at once."""
    kept: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        kept.append(_gathered(shard))
        return block.forward(kept[0], x)

    def backward(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grad_x, grad_flat = block.backward(kept.pop(), x, grad)
        return grad_x, _scattered(grad_flat)

    return forward, backward


def gathers_once(block: Block, shard: torch.Tensor) -> Pair:
    """Right until the shards change."""
    whole = _gathered(shard)
    return _block(block, shard, gather=lambda _: whole)


def keeps_the_gradient(block: Block, shard: torch.Tensor) -> Pair:
    grads: list[torch.Tensor] = []

    def scatter(flat: torch.Tensor) -> torch.Tensor:
        grads[:] = [flat]
        return _scattered(flat)

    return _block(block, shard, scatter=scatter)


def reduces_by_an_all_reduce(block: Block, shard: torch.Tensor) -> Pair:
    def scatter(flat: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(flat)
        return flat.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()

    return _block(block, shard, scatter=scatter)


def gathers_by_an_all_reduce(block: Block, shard: torch.Tensor) -> Pair:
    def gather(shard: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(dist.get_world_size(), len(shard))
        whole[dist.get_rank()] = shard
        dist.all_reduce(whole)
        return whole.flatten()

    return _block(block, shard, gather=gather)


def gathers_for_each_gradient(block: Block, shard: torch.Tensor) -> Pair:
    forward, backward = _block(block, shard)

    def twice(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return block.backward(_gathered(shard), x, grad)[0], backward(x, grad)[1]

    return forward, twice


def broadcasts_each_shard(block: Block, shard: torch.Tensor) -> Pair:
    def gather(shard: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        parts[dist.get_rank()].copy_(shard)
        for rank, part in enumerate(parts):
            dist.broadcast(part, rank)
        return torch.cat(parts)

    return _block(block, shard, gather=gather)


def sums(block: Block, shard: torch.Tensor) -> Pair:
    return _block(block, shard, scatter=lambda flat: _scattered(flat) * dist.get_world_size())


def divides_twice(block: Block, shard: torch.Tensor) -> Pair:
    return _block(block, shard, scatter=lambda flat: _scattered(flat) / dist.get_world_size())


def averages_the_input_gradient_too(block: Block, shard: torch.Tensor) -> Pair:
    forward, backward = _block(block, shard)

    def both(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grad_x, mine = backward(x, grad)
        dist.all_reduce(grad_x)
        return grad_x / dist.get_world_size(), mine

    return forward, both


def takes_its_own_slice(block: Block, shard: torch.Tensor) -> Pair:
    return _block(block, shard, scatter=lambda flat: flat.chunk(dist.get_world_size())[dist.get_rank()].clone())


def returns_the_whole_gradient(block: Block, shard: torch.Tensor) -> Pair:
    def scatter(flat: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(flat)
        return flat / dist.get_world_size()

    return _block(block, shard, scatter=scatter)


def interleaves_the_shards(block: Block, shard: torch.Tensor) -> Pair:
    def gather(shard: torch.Tensor) -> torch.Tensor:
        return _gathered(shard).view(dist.get_world_size(), -1).T.flatten()

    return _block(block, shard, gather=gather)


def computes_with_its_shard(block: Block, shard: torch.Tensor) -> Pair:
    return _block(block, shard, gather=lambda shard: shard)


def gathers_in_forward_only(block: Block, shard: torch.Tensor) -> Pair:
    """Backward is given zeros where the other ranks' shards should be."""

    def alone_in_zeros() -> torch.Tensor:
        parts = [torch.zeros_like(shard) for _ in range(dist.get_world_size())]
        parts[dist.get_rank()] = shard
        return torch.cat(parts)

    def backward(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grad_x, grad_flat = block.backward(alone_in_zeros(), x, grad)
        return grad_x, _scattered(grad_flat)

    return _block(block, shard)[0], backward


def returns_one_function(block: Block, shard: torch.Tensor) -> Any:
    return _block(block, shard)[0]


def calls_labkits(block: Block, shard: torch.Tensor) -> Any:
    from labkit.zero import FullyShardedDataParallel

    module = FullyShardedDataParallel(torch.nn.Linear(len(shard), 1))
    return lambda x: module(shard) + x, lambda x, grad: (grad, shard)


def _blocks(case: Case) -> list[Block]:
    return [Block(WIDTHS[case.more], number) for number in range(case.elements)]


def _steps(case: Case) -> int:
    """Of a training; one where memory is what counts."""
    return 1 if case.elements > ROOM else 2


def call(fn: Callable[..., Any], case: Case) -> Made:
    """What the blocks make, forwards and backwards, in each step; after each gradient its shard changes."""
    rank, blocks = dist.get_rank(), _blocks(case)
    shards = [shard_of(block.parameters(), rank, case.ranks) for block in blocks]
    with (meter := Meter()):
        pairs = [fn(block, shard) for block, shard in zip(blocks, shards, strict=True)]
    for pair in pairs:
        if type(pair) not in (tuple, list) or len(pair) != 2 or not all(callable(f) for f in pair):
            return say("stage_three_block.returned", have=in_short(pair))
    seen: Backward = {}
    for step in range(1, _steps(case) + 1):
        with meter:
            said = _step(pairs, shards, rows(case, rank, step, WIDTHS[case.more]), step, seen)
        if said:
            return said
    return [{**seen, HELD: [meter.peak]}]


def _step(pairs: list[Pair], shards: list[torch.Tensor], x: torch.Tensor, step: int, seen: Backward) -> str:
    """A forward and a backward of all blocks; what is no tensor of the right shape, in words."""
    inputs = []
    for number, (forward, _) in enumerate(pairs):
        inputs.append(x)
        x = forward(x)
        if said := strange(x, tuple(inputs[-1].shape), "forward"):
            return said
        seen |= taken([(say("stage_three_block.out", block=number, step=step), x)])
    grad = 2 * x  # the loss is the sum of squares
    for number, (_, backward) in reversed(list(enumerate(pairs))):
        made = backward(inputs[number], grad)
        if type(made) not in (tuple, list) or len(made) != 2:
            return say("stage_three_block.backward", have=in_short(made))
        for value, like in zip(made, (grad, shards[number]), strict=True):
            if said := strange(value, tuple(like.shape), "backward"):
                return said
        grad = made[0]
        seen |= taken([(say("stage_three_block.shard", block=number, step=step), made[1])])
        seen |= taken([(say("stage_three_block.x", block=number, step=step), grad)])
        shards[number] -= RATE * made[1]
    return ""


def expected(case: Case, own: bool = False) -> list[list[Backward]]:
    """The blocks one after the other on each rank's rows, by autograd, with the same parameters, in float64.

    Args:
        own: Each rank's gradient of a shard is its own, not the mean.
    """
    ranks, blocks = range(case.ranks), _blocks(case)
    flats = [block.parameters().double() for block in blocks]
    seen: list[list[tuple[str, torch.Tensor]]] = [[] for _ in ranks]
    for step in range(1, _steps(case) + 1):
        by_rank = [_by_autograd(blocks, flats, rows(case, rank, step, WIDTHS[case.more]).double()) for rank in ranks]
        for rank, (outs, _, _) in enumerate(by_rank):
            seen[rank] += [(say("stage_three_block.out", block=n, step=step), out) for n, out in enumerate(outs)]
        for n in reversed(range(len(blocks))):
            grad = mean([of_flats[n] for _, _, of_flats in by_rank])
            for rank, (_, of_xs, of_flats) in enumerate(by_rank):
                mine = shard_of(of_flats[n] if own else grad, rank, case.ranks)
                seen[rank].append((say("stage_three_block.shard", block=n, step=step), mine))
                seen[rank].append((say("stage_three_block.x", block=n, step=step), of_xs[n]))
            flats[n] = flats[n] - RATE * grad
    return [[taken(of_rank)] for of_rank in seen]


def _by_autograd(blocks: list[Block], flats: list[torch.Tensor], x: torch.Tensor) -> tuple[Any, Any, Any]:
    """What leaves each block; gradients of what enters it; gradients of its parameters."""
    leaves, inputs = [flat.clone().requires_grad_() for flat in flats], [x.requires_grad_()]
    for block, flat in zip(blocks, leaves, strict=True):
        inputs.append(block.forward(flat, inputs[-1]))
    grads = torch.autograd.grad(inputs[-1].square().sum(), [*inputs[:-1], *leaves])
    return inputs[1:], grads[: len(blocks)], grads[len(blocks) :]


def _bytes(case: Case) -> int:
    """Of a block, padding included."""
    return 4 * case.ranks * in_shard(_blocks(case)[0].numel, case.ranks)


def budget(case: Case) -> list[Cost]:
    """Two gathers and a reduce-scatter a block and step."""
    times = _steps(case) * case.elements * 3
    return [Cost(calls=times, handed=times * _bytes(case))] * case.ranks


def sends_too_much(case: Case, trace: Trace) -> str:
    """Whether a ring would send more for these collectives than for two gathers and a reduce-scatter."""
    limit = _steps(case) * case.elements * 3 * _bytes(case) * (case.ranks - 1) // case.ranks
    have = max(sent_by_a_ring(trace, rank) for rank in range(case.ranks))
    if have <= limit:
        return ""
    return say("stage_three_block.sent", have=f"{have:,}", limit=f"{limit:,}", ratio=f"{have / limit:.2g}")


def holds_too_much(case: Case, values: list[Any]) -> str:
    """Whether many blocks were held at once; judged where there are many."""
    inputs = 4 * ROWS * WIDTHS[case.more] * case.elements
    limit, have = ROOM * _bytes(case) + inputs, max(int(rank[0][HELD][0]) for rank in values)
    if case.elements <= ROOM or have <= limit:
        return ""
    return say("stage_three_block.held", have=f"{have:,}", limit=f"{limit:,}", ratio=f"{have / limit:.1f}")


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    alone_on = [rank[0] for rank in expected(case, own=True)]
    return alone.told(values, expected(case), bad, alone_on)


def where(case: Case) -> str:
    told = say("stage_three_block.case", blocks=case.elements, numel=f"{_blocks(case)[0].numel:,}")
    return f"{say('check.world', ranks=case.ranks)}, {told}"


EXERCISE = Exercise(
    name="stage_three_block",
    number="7.4",
    cases=(Case(2, 1), Case(2, 2), Case(3, 2, more=1), Case(4, 1), Case(1, 2), Case(2, 8, more=2)),
    call=call,
    expected=expected,
    budget=budget,
    solution=stage_three_block,
    hints=lambda: (say("stage_three_block.question"), say("stage_three_block.state"), say("stage_three_block.code")),
    wrong=(
        Wrong(keeps_what_it_gathered, "wasteful", "held by a rank at once"),
        Wrong(gathers_once, "wrong", "step 2"),
        Wrong(keeps_the_gradient, "wasteful", "held by a rank at once"),
        Wrong(reduces_by_an_all_reduce, "wasteful", "(1.3×)"),
        Wrong(gathers_by_an_all_reduce, "wasteful", "(1.7×)"),
        Wrong(gathers_for_each_gradient, "wasteful", "collectives of a rank"),
        Wrong(broadcasts_each_shard, "wasteful", "collectives of a rank"),
        Wrong(sums, "wrong", "2 × as much"),
        Wrong(divides_twice, "wrong", "0.5 × as much"),
        Wrong(averages_the_input_gradient_too, "wrong", "gradient of block 0's input"),
        Wrong(takes_its_own_slice, "wrong", "rank 0's own part"),
        Wrong(returns_the_whole_gradient, "wrong", "expected a tensor of shape"),
        Wrong(interleaves_the_shards, "wrong", "block 0's output"),
        Wrong(computes_with_its_shard, "crashed"),
        Wrong(gathers_in_forward_only, "wrong", "step 1"),
        Wrong(returns_one_function, "wrong", "expected two functions"),
        Wrong(calls_labkits, "borrowed", "zero."),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=where,
    allowed=COLLECTIVES,
    theirs=SHARDED,
    order=sends_too_much,
    excess=holds_too_much,
)  # fmt: skip
