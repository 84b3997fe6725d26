"""The norm of a gradient that lies on many ranks, and clipping by it.

A norm is a sum over all elements of the model, so every element must be counted, and none twice:

    where a parameter lives (`labkit.collectives.mark`)    what a rank brings           summed over
    sharded: each rank has a part                          its part                     that group
    replicated: each rank has the same                     1/N of it                    that group
    tied: the same, in several stages                      1/(number of places) of it   the pipeline group
    on this stage alone                                    all of it                    the pipeline group

Replicas of data parallelism are not marked: their gradients are equal already. Where ZeRO splits gradients among them,
its pieces are marked as sharded. Bringing 1/N from every rank, and not all from the first, costs nothing, and an inf
or nan on any rank then reaches all of them.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (replicated parameters are counted once); Pascanu et al. 2013, "On
the difficulty of training recurrent neural networks", algorithm 1 (clipping).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from hashlib import blake2b

import torch
import torch.distributed as dist

from labkit import collectives, device
from labkit.collectives import Placement, check, placement

Group = dist.ProcessGroup | None
#: A gradient, or this rank's part of it (``None``: it has none of it), and where its parameter lives.
Piece = tuple[torch.Tensor | None, Placement]
#: Ranks of the world: two groups of the same ranks are one.
Ranks = tuple[int, ...]
_CLIPPED = "_labkit_clipped"


def clip_grad_norm_(
    params: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0,
    error_if_nonfinite: bool = False, pipeline_group: Group = None,
) -> torch.Tensor:  # fmt: skip
    """As `torch.nn.utils.clip_grad_norm_`, on any mesh: scale gradients down to a norm of the whole model.

    Every rank of the model calls it, after its gradients are complete: averaged over replicas, partial ones summed
    (`labkit.sequence_parallel.reduce_partial_gradients`), unscaled (`GradScaler.unscale_`). One small all-reduce for
    each group of ranks in which parameters are sharded or replicated.

    Args:
        params: This rank's parameters, in the same order on the ranks of each group.
        max_norm: What the norm of the whole model's gradient may be at most; more than 0.
        norm_type: p of the p-norm, more than 0; ``inf`` is the largest magnitude.
        error_if_nonfinite: Raise where the norm is inf or nan; else, as in torch, all gradients are multiplied by
            0 or nan.
        pipeline_group: The ranks that hold the other stages of the model; ``None``: there are none. A rank cannot tell
            by its own parameters: without the group each stage would clip by a norm of its own.

    Returns:
        The norm before clipping: 0-dimensional, float64, the same bits on every rank.

    Raises:
        TypeError: `params` holds no tensors.
        ValueError: An argument cannot be used, or a partial gradient was not summed.
        RuntimeError: The norm is inf or nan, with `error_if_nonfinite`; on every rank.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_(weight, 1.0).item(), weight.grad
    (5.0, tensor([0.6000, 0.8000]))
    """
    if isinstance(params, torch.nn.Module):
        raise TypeError(f"params is a {type(params).__name__}: expected parameters, such as model.parameters()")
    if not isinstance(params, Iterable):
        raise TypeError(f"params is {params!r}: expected parameters, such as model.parameters()")
    found = [params] if isinstance(params, torch.Tensor) else list(params)
    for param in found:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"params holds {type(param).__name__}: expected parameters, such as model.parameters()")
    pieces = [(param.grad, placement(param)) for param in dict.fromkeys(found)]
    return clip_pieces_(pieces, max_norm, norm_type, error_if_nonfinite, pipeline_group)


def clip_pieces_(
    pieces: Iterable[Piece], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
    pipeline_group: Group = None,
) -> torch.Tensor:  # fmt: skip
    """`clip_grad_norm_` of gradients that are not in ``.grad``, such as ZeRO's shards: `pieces` as in `total_norm`."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise ValueError(f"max_norm={max_norm!r}: expected a number above 0, such as 1.0")
    pieces = _checked(pieces)
    norm = total_norm(pieces, norm_type, pipeline_group)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the gradients' norm is {norm.item()}, so they cannot be clipped: skip this step, or find "
                           "the rank whose gradient is not finite")  # fmt: skip
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's own formula
    grads = [grad for grad, _ in pieces if grad is not None]
    with torch.no_grad():
        for on in {grad.device for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.device == on], factor.to(on))
    for grad in grads:
        setattr(grad, _CLIPPED, grad._version)
    return norm


def was_clipped(grad: torch.Tensor) -> bool:
    """Whether the last change of a gradient was clipping. A loss scaler refuses to unscale it then."""
    return getattr(grad, _CLIPPED, None) == grad._version


@torch.no_grad()
def total_norm(pieces: Iterable[Piece], norm_type: float = 2.0, pipeline_group: Group = None) -> torch.Tensor:
    """The norm of a gradient whose pieces lie on many ranks. A collective call.

    Args:
        pieces: (gradient, placement) for every parameter, in one order on the ranks of each group. A rank that holds
            nothing of a parameter brings ``(None, placement)``, so that it takes part in the sums.
        norm_type: As in `clip_grad_norm_`.
        pipeline_group: As in `clip_grad_norm_`.

    Returns:
        0-dimensional, float64, on the device of the gradients; summed in float32 or better. inf and nan reach every
        rank.

    Raises:
        TypeError, ValueError: An argument cannot be used.
        ValueError: A gradient that is marked as partial differs between the ranks of that group; a parameter is tied to
            one of another rank, and there is no `pipeline_group`.

    >>> total_norm([(torch.tensor([3.0]), Placement()), (torch.tensor([4.0]), Placement())]).item()
    5.0
    """
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float) or not norm_type > 0:
        raise ValueError(f"norm_type={norm_type!r}: expected a number above 0: 2.0, 1.0 or math.inf")
    if pipeline_group is not None:
        check.member(pipeline_group)
    pieces = _checked(pieces)
    on = next((grad.device for grad, _ in pieces if grad is not None), device.current())
    measure = Measure(float(norm_type), on)
    _refuse_unsummed(pieces, measure)
    untied, tied = _within_stage(pieces, measure)
    if pipeline_group is None:
        _refuse_elsewhere(tied)
    else:
        untied, tied = _over_stages(untied, tied, measure, pipeline_group)
    return measure.root(measure.join([untied, *_each_once(tied, measure)]))


def _checked(pieces: Iterable[Piece]) -> list[Piece]:
    """
    Raises:
        TypeError: Something else is among them.
    """
    expected = "expected pairs (gradient or None, Placement), such as (param.grad, placement(param))"
    if isinstance(pieces, torch.Tensor) or not isinstance(pieces, Iterable):
        raise TypeError(f"pieces is {type(pieces).__name__}: {expected}")
    found = list(pieces)
    for piece in found:
        if not isinstance(piece, tuple) or len(piece) != 2 or not isinstance(piece[1], Placement):
            raise TypeError(f"pieces holds {type(piece).__name__}: {expected}")
        if piece[0] is not None and not isinstance(piece[0], torch.Tensor):
            raise TypeError(f"pieces holds a gradient that is {type(piece[0]).__name__}: {expected}")
    return found


class Measure:
    """How a p-norm is put together: sums of |x|ᵖ, and at the end the root; for p = ∞ the maximum, and no root."""

    def __init__(self, p: float, on: torch.device) -> None:
        self.p, self.on, self.largest = p, on, math.isinf(p)

    def of(self, grads: Iterable[torch.Tensor | None]) -> torch.Tensor:
        """Of all of them together: the norm of each, those of one kind in one call, and then of these."""
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for grad in grads:
            if grad is not None and grad.numel():
                alike.setdefault((grad.dtype, grad.device), []).append(_elements(grad))
        if not alike:
            return torch.zeros((), dtype=torch.float64, device=self.on)
        together = torch.cat([self._each(many, dtype) for (dtype, _), many in alike.items()])
        return together.amax() if self.largest else (together**self.p).sum()

    def _each(self, grads: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        norms = torch._foreach_norm(grads, self.p, dtype=torch.promote_types(dtype, torch.float32))
        return torch.stack(norms).to(self.on, torch.float64)

    def share(self, value: torch.Tensor, of: int) -> torch.Tensor:
        """What one of `of` equal copies brings."""
        return value if self.largest else value / of

    def join(self, values: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(values)
        return stacked.amax() if self.largest else stacked.sum()

    def over(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        """Each of `values`, over the ranks of a group; the same bits on all of them."""
        if not self.largest:
            collectives.all_reduce(values, group=group)
            return values
        nan = values.isnan()  # a backend's maximum may pass over it
        both = torch.stack([values.nan_to_num(nan=math.inf, posinf=math.inf), nan.to(values.dtype)])
        collectives.all_reduce(both, op="max", group=group)
        return both[0].masked_fill(both[1] > 0, math.nan)

    def root(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.largest else value ** (1 / self.p)


def _elements(grad: torch.Tensor) -> torch.Tensor:
    """Of a sparse gradient those that it holds, each added up."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _ranks(group: Group) -> Ranks:
    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def _crossed(where: Placement) -> tuple[dict[Ranks, Group], int]:
    """The groups over which a piece's share is summed, and the number of equal copies that there are in them."""
    sharded = {_ranks(group): group for group in where.sharded}
    copies = {_ranks(group): group for group in (*where.replicated, *where.partial)}
    count = math.prod(len(ranks) for ranks in copies if ranks not in sharded)
    return {ranks: group for ranks, group in {**sharded, **copies}.items() if len(ranks) > 1}, count


#: Pieces that are counted alike: over which groups, how many copies there are in them, and the name of their tie.
Kind = tuple[frozenset[Ranks], int, Hashable]
#: Name of a tie → (what its places here bring in all, number of places here).
Ties = dict[Hashable, tuple[torch.Tensor, int]]


def _within_stage(pieces: list[Piece], measure: Measure) -> tuple[torch.Tensor, Ties]:
    """Summed over the groups of each piece: all that is not tied, and what is, by name."""
    groups: dict[Ranks, Group] = {}
    kinds: dict[Kind, list[torch.Tensor | None]] = {}
    for grad, where in pieces:
        crossed, copies = _crossed(where)
        groups.update(crossed)
        kinds.setdefault((frozenset(crossed), copies, where.tied), []).append(grad)
    sums = {kind: measure.share(measure.of(grads), kind[1]) for kind, grads in kinds.items()}
    for ranks, group in groups.items():  # in the order of the parameters, so the same on all ranks of a group
        here = [kind for kind in sums if ranks in kind[0]]
        sums.update(zip(here, measure.over(torch.stack([sums[kind] for kind in here]), group), strict=True))
    untied = [measure.of([])]
    ties: Ties = {}
    for kind, value in sums.items():
        if (name := kind[2]) is None:
            untied.append(value)
        else:
            before, places = ties.get(name, (measure.of([]), 0))
            ties[name] = (measure.join([before, value]), places + len(kinds[kind]))
    return measure.join(untied), ties


def _over_stages(untied: torch.Tensor, tied: Ties, measure: Measure, group: Group) -> tuple[torch.Tensor, Ties]:
    """The same of all stages. First how many ties each rank has, then a table of them, one row each."""
    mine = torch.stack([untied, measure.of([]) + len(tied)])
    told = torch.empty(dist.get_world_size(group), 2, dtype=torch.float64, device=measure.on)
    collectives.all_gather(told, mine, group=group)
    counts = [int(count) for count in told[:, 1].tolist()]
    ties: Ties = {}
    if sum(counts):
        table = torch.zeros(sum(counts), 3, dtype=torch.float64, device=measure.on)
        first = sum(counts[: dist.get_rank(group)])
        for row, (name, (value, places)) in enumerate(tied.items(), start=first):
            table[row, 0], table[row, 1], table[row, 2] = _digest(name), places, value
        collectives.all_reduce(table, group=group)
        for (name, places, _), value in zip(table.tolist(), table[:, 2], strict=True):
            before = ties.get(name, (measure.of([]), 0))
            ties[name] = (measure.join([before[0], value]), before[1] + int(places))
    return measure.join(list(told[:, 0])), ties


def _digest(name: Hashable) -> int:
    """A name as a whole number that float64 holds exactly, the same on every rank (``hash`` of a string is not)."""
    return int.from_bytes(blake2b(repr(name).encode(), digest_size=6).digest())


def _each_once(tied: Ties, measure: Measure) -> list[torch.Tensor]:
    return [measure.share(value, places) for value, places in tied.values()]


def _refuse_elsewhere(tied: Ties) -> None:
    """What is tied to nothing here is tied to a parameter of another stage, whose gradients would be left out."""
    if alone := [name for name, (_, places) in tied.items() if places == 1]:
        raise ValueError(
            f"{alone[0]!r} is tied, and its other place is on another rank: pass pipeline_group, the ranks that hold "
            "the other stages, or each stage is clipped by a norm of its own"
        )


def _refuse_unsummed(pieces: list[Piece], measure: Measure) -> None:
    """After the sum over its group a partial gradient is the same on all ranks of it; before, it is not."""
    by_group: dict[Ranks, tuple[Group, list[torch.Tensor | None]]] = {}
    for grad, where in pieces:
        for group in where.partial:
            if len(ranks := _ranks(group)) > 1:
                by_group.setdefault(ranks, (group, []))[1].append(grad)
    for ranks, (group, grads) in by_group.items():
        mine = measure.of(grads)
        ends = torch.stack([mine, -mine])
        collectives.all_reduce(ends, op="max", group=group)
        largest, smallest = ends[0].item(), -ends[1].item()
        if math.isfinite(largest) and largest - smallest > 1e-6 * largest:
            raise ValueError(
                f"gradients marked as partial differ on ranks {list(ranks)}: each has a part of their sum; call "
                "labkit.sequence_parallel.reduce_partial_gradients(model) first"
            )
