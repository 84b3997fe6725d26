"""4.4 · the loss of logits that no rank has all of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit.checks.alone import Made, strange, told
from labkit.checks.alone import where as of_alone
from labkit.checks.borrow import SHARED_LAYERS
from labkit.checks.exercise import COLLECTIVES, Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import Backward, differing, taken
from labkit.checks.trial import watching
from labkit.show.words import say
from labkit.tensor_parallel import gather_from_group, reduce_from_group, vocab_parallel_cross_entropy

Tensor = torch.Tensor
WORDS = 5  #: of a rank


@dataclass(frozen=True, slots=True)
class Situation:
    """How large logits are, and whether all targets are words of the last rank."""

    scale: int = 1
    last: bool = False


SITUATIONS = (Situation(), Situation(last=True), Situation(1000))


def vocab_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    words = logits.shape[1]
    m = logits.detach().amax(1)
    dist.all_reduce(m, op=dist.ReduceOp.MAX)
    z = logits - m[:, None]
    Z = reduce_from_group(z.exp().sum(1))
    local = target - dist.get_rank() * words
    here = (local >= 0) & (local < words)
    z_target = z.gather(1, local.where(here, 0)[:, None])[:, 0].where(here, 0.0)
    return Z.log() - reduce_from_group(z_target)


def _mine(z: Tensor, target: Tensor) -> Tensor:
    """z_target where it is one of this rank's words, else 0."""
    local = target - dist.get_rank() * z.shape[1]
    here = (local >= 0) & (local < z.shape[1])
    return z.gather(1, local.where(here, 0)[:, None])[:, 0].where(here, 0.0)


def _most(logits: Tensor) -> Tensor:
    m = logits.detach().amax(1)
    dist.all_reduce(m, op=dist.ReduceOp.MAX)
    return m[:, None]


def no_maximum(logits: Tensor, target: Tensor) -> Tensor:
    return reduce_from_group(logits.exp().sum(1)).log() - reduce_from_group(_mine(logits, target))


def a_maximum_each(logits: Tensor, target: Tensor) -> Tensor:
    z = logits - logits.detach().amax(1, keepdim=True)
    return reduce_from_group(z.exp().sum(1)).log() - reduce_from_group(_mine(z, target))


def adds_the_maxima(logits: Tensor, target: Tensor) -> Tensor:
    m = logits.detach().amax(1, keepdim=True)
    dist.all_reduce(m)
    return reduce_from_group((logits - m).exp().sum(1)).log() - reduce_from_group(_mine(logits - m, target))


def forgets_the_maximum_of_the_target(logits: Tensor, target: Tensor) -> Tensor:
    return reduce_from_group((logits - _most(logits)).exp().sum(1)).log() - reduce_from_group(_mine(logits, target))


def maximum_with_a_gradient(logits: Tensor, target: Tensor) -> Tensor:
    m = logits.amax(1, keepdim=True)
    with torch.no_grad():
        dist.all_reduce(m, op=dist.ReduceOp.MAX)
    return reduce_from_group((logits - m).exp().sum(1)).log() - reduce_from_group(_mine(logits - m, target))


def takes_the_number_of_the_whole(logits: Tensor, target: Tensor) -> Tensor:
    """Looks the target up among its own words, by its number among all."""
    z = logits - _most(logits)
    z_target = z.gather(1, target[:, None])[:, 0]
    return reduce_from_group(z.exp().sum(1)).log() - reduce_from_group(z_target)


def counts_from_the_end(logits: Tensor, target: Tensor) -> Tensor:
    """Python takes z[-1] for the last word."""
    z = logits - _most(logits)
    local = target - dist.get_rank() * z.shape[1]
    z_target = z[range(len(z)), local.clamp(max=z.shape[1] - 1)]
    return reduce_from_group(z.exp().sum(1)).log() - reduce_from_group(z_target)


def keeps_the_words_of_others(logits: Tensor, target: Tensor) -> Tensor:
    z = logits - _most(logits)
    z_target = z.gather(1, (target % z.shape[1])[:, None])[:, 0]
    return reduce_from_group(z.exp().sum(1)).log() - reduce_from_group(z_target)


def forgets_to_add_z(logits: Tensor, target: Tensor) -> Tensor:
    z = logits - _most(logits)
    return z.exp().sum(1).log() - reduce_from_group(_mine(z, target))


def adds_logarithms(logits: Tensor, target: Tensor) -> Tensor:
    z = logits - _most(logits)
    return reduce_from_group(z.exp().sum(1).log()) - reduce_from_group(_mine(z, target))


def takes_the_mean(logits: Tensor, target: Tensor) -> Tensor:
    return vocab_cross_entropy(logits, target).mean()


def loses_the_graph(logits: Tensor, target: Tensor) -> Tensor:
    return vocab_cross_entropy(logits.detach(), target) + 0 * logits.sum()


def gathers_the_logits(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(gather_from_group(logits), target, reduction="none")


def a_token_at_a_time(logits: Tensor, target: Tensor) -> Tensor:
    return torch.cat([vocab_cross_entropy(z[None], y[None]) for z, y in zip(logits, target, strict=True)])


def takes_labkits(logits: Tensor, target: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(logits, target)


def tensors(case: Case) -> tuple[Tensor, Tensor]:
    """All logits, (tokens, words), and targets, (tokens). `Case.elements`: tokens."""
    generator, situation = torch.Generator().manual_seed(case.elements), SITUATIONS[case.more]
    words = case.ranks * WORDS
    logits = situation.scale * torch.randn(case.elements, words, generator=generator)
    first = words - WORDS if situation.last else 0
    return logits, torch.randint(first, words, (case.elements,), generator=generator)


def weighed(losses: Tensor) -> Tensor:
    return (losses * torch.arange(1.0, len(losses) + 1)).sum()


def changes_the_logits(logits: Tensor, target: Tensor) -> Tensor:
    losses = vocab_cross_entropy(logits.clone(), target)
    with torch.no_grad():
        logits -= logits.max()
    return losses


def call(fn: Callable[[Tensor, Tensor], Tensor], case: Case) -> Made:
    logits, target = tensors(case)
    mine = logits.chunk(case.ranks, 1)[dist.get_rank()].contiguous().requires_grad_()
    losses = fn(mine, target)
    if said := strange(losses, (case.elements,), say("alone.the_function")):
        return said
    total = weighed(losses)
    with watching(fn):
        total.backward()
    return [_named(losses, mine.grad, mine)]


def _named(losses: Tensor, grad: Tensor | None, logits: Tensor) -> Backward:
    """The logits are to stay what they were."""
    return taken([("loss", losses), ("logits.grad", grad), ("logits", logits)])


def expected(case: Case) -> list[list[Backward]]:
    """torch's own on all logits, in float64; of the gradient each rank's part."""
    logits, target = tensors(case)
    logits = logits.double().requires_grad_()
    losses = F.cross_entropy(logits, target, reduction="none")
    weighed(losses).backward()
    parts = zip(logits.grad.chunk(case.ranks, 1), logits.chunk(case.ranks, 1), strict=True)  # type: ignore[union-attr]
    return [[_named(losses, *part)] for part in parts]


def budget(case: Case) -> list[Cost]:
    return [Cost(calls=3, handed=3 * 4 * case.elements)] * case.ranks


def where(case: Case) -> str:
    situation, said = SITUATIONS[case.more], of_alone(case)
    said += f", {say('vocab_cross_entropy.times', scale=situation.scale)}" if situation.scale > 1 else ""
    return said + (f", {say('vocab_cross_entropy.last')}" if situation.last else "")


EXERCISE = Exercise(
    name="vocab_cross_entropy",
    number="4.4",
    cases=(Case(2, 1), Case(2, 3), Case(2, 2, more=1), Case(3, 4), Case(2, 3, more=2), Case(4, 6, more=2)),
    call=call,
    expected=expected,
    budget=budget,
    solution=vocab_cross_entropy,
    hints=lambda: (
        say("vocab_cross_entropy.question"), say("vocab_cross_entropy.state"), say("vocab_cross_entropy.code"),
    ),
    wrong=(
        Wrong(changes_the_logits, "wrong", "rank 0, logits, element"),
        Wrong(a_maximum_each, "wrong", "loss"),
        Wrong(no_maximum, "wrong", "logits × 1000"),
        Wrong(adds_the_maxima, "wrong", "logits × 1000"),
        Wrong(forgets_the_maximum_of_the_target, "wrong", "loss"),
        Wrong(takes_the_number_of_the_whole, "wrong", "loss"),
        Wrong(maximum_with_a_gradient, "wrong", "logits.grad"),
        Wrong(counts_from_the_end, "wrong", "loss"),
        Wrong(keeps_the_words_of_others, "wrong", "loss"),
        Wrong(forgets_to_add_z, "wrong", "loss"),
        Wrong(adds_logarithms, "wrong", "loss"),
        Wrong(takes_the_mean, "wrong", "a tensor of shape ()"),
        Wrong(loses_the_graph, "wrong", "logits.grad"),
        Wrong(a_token_at_a_time, "wasteful", "budget 3"),
        Wrong(gathers_the_logits, "wasteful", "handed to collectives by a rank"),
        Wrong(takes_labkits, "borrowed", "tensor_parallel.cross_entropy"),
    ),
    legal=nothing,
    compare=differing,
    tells=lambda case, values, bad: told(values, expected(case), bad),
    where=where,
    allowed=COLLECTIVES,
    theirs=SHARED_LAYERS,
)  # fmt: skip
