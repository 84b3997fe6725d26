"""A transformer whose layers are shared by ranks, and whose norms, dropout and residuals lie on s/t of the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from labkit import collectives
from labkit.collectives import again, asked, mark, placement
from labkit.collectives.placement import note_summed
from labkit.model import Transformer
from labkit.sequence_parallel.functions import Gathering, Group, Scattering, by_rank, reduce_scatter_to_sequence
from labkit.tensor_parallel.convert import Region, check_model, share
from labkit.tensor_parallel.linear import input_gradient, narrowed, weight_gradients
from labkit.tensor_parallel.seeds import SplitDropout


def parallelize(model: Transformer, group: Group = None, keep_gathered: bool = False) -> Transformer:
    """`labkit.tensor_parallel.parallelize`, and between the split parts every rank has s/N of the tokens.

    After backward call `reduce_partial_gradients(model)`: norms and the biases behind row-parallel layers see only this
    rank's tokens, so their gradients are still to be added up. Dropout draws from this rank's own stream
    (`labkit.tensor_parallel.seed`).

    Args:
        model: The same on all ranks. Changed in place.
        group: The tensor-parallel group; ``None`` is the world.
        keep_gathered: Keep the gathered input of each column-parallel layer for backward, instead of gathering again:
            fewer bytes to send, more to hold.

    Returns:
        `model`. It takes all tokens on every rank; their number must be a multiple of N.

    Raises:
        TypeError, ValueError: As `labkit.tensor_parallel.parallelize`.

    Source: Korthikanti et al. 2022, sections 4.2.2 and 4.2.3.
    """
    check_model(model, group)
    share(model, SequenceRegion(group, keep_gathered))
    if model.config.dialect == "gpt":
        model.position_embedding = Positions(model.position_embedding, group)  # type: ignore[assignment]
    for part in (model, *model.blocks):
        part.dropout = SplitDropout(part.dropout)  # type: ignore[assignment, arg-type]
    for name, param in model.named_parameters():
        if not placement(param).sharded and not name.endswith(("key.weight", "value.weight")):
            mark(param, replicated=(group,), partial=(group,))
    return model


def reduce_partial_gradients(params: torch.nn.Module | Iterable[torch.nn.Parameter]) -> None:
    """Add up the gradients of parameters that each rank has seen with its own tokens only (``partial`` in `mark`).

    Call it on every rank after backward, once, before anything reads the gradients: one all-reduce a group and element
    type.

    Raises:
        TypeError: `params` is neither a module nor parameters.
        RuntimeError: The module is split along the sequence, but none of its parameters is marked: a copy
            (`copy.deepcopy`) or a load with ``assign=True`` has lost the marks. Build the model, then `parallelize`.
    """
    module, params = params, list(params.parameters() if isinstance(params, torch.nn.Module) else params)
    for param in params:
        if not isinstance(param, torch.nn.Parameter):
            raise TypeError(f"params holds {type(param).__name__}: expected parameters, such as model.parameters()")
    _check_marks(module, params)
    waiting: dict[Any, list[torch.Tensor]] = {}
    for param in params:
        for group in placement(param).partial:
            if param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)
            if param.grad is not None:
                waiting.setdefault((group, param.dtype, param.device), []).append(param.grad)
    for (group, _, _), grads in waiting.items():
        flat = torch.cat([g.reshape(-1) for g in grads])
        collectives.all_reduce(flat, group=group)
        for grad, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(piece.view(grad.shape))
            note_summed(grad)


def _check_marks(module: Any, params: list[torch.nn.Parameter]) -> None:
    parts = module.modules() if isinstance(module, torch.nn.Module) else ()
    split = any(isinstance(getattr(part, "region", None), SequenceRegion) for part in parts)
    if split and not any(placement(param).partial for param in params):
        raise RuntimeError(
            "the module is split along the sequence, but no parameter is marked as partial: the marks were lost with "
            "the parameters that had them; build the model anew and parallelize it"
        )


class SequenceRegion(Region):
    """In place of f and g: gather the sequence, split the sum along it."""

    def __init__(self, group: Group, keep_gathered: bool) -> None:
        super().__init__(group)
        self.keep_gathered = keep_gathered

    def split(self, x: torch.Tensor, layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """x: (b, s/N, h) → (b, s, columns/N) of each layer."""
        weights, biases = zip(*(layer.part() for layer in layers), strict=True)
        both = map(narrowed, (*weights, *biases))
        return _GatheredColumns.apply(narrowed(x), self.group, self.keep_gathered, len(layers), *both)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, h), each rank's share of a sum → (b, s/N, h)."""
        return reduce_scatter_to_sequence(x, self.group)


class _GatheredColumns(torch.autograd.Function):
    """Gather, then products with several matrices.

    Backward gathers again, unless the gathered input was kept, beside the product that makes the input's gradient; and
    scatters that beside the products that make the weights'.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, keep: bool, count: int, *both: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = both[:count], both[count:]
        whole = Gathering(x, group).wait()  # (b, s, h)
        ctx.save_for_backward(whole if keep else x, *weights)
        ctx.group, ctx.keep, ctx.algorithm = group, keep, asked()
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        with again(ctx.algorithm):
            gathering = None if ctx.keep else Gathering(x, ctx.group, async_op=True)
            grad = input_gradient(grads, weights)  # (b, s, h), this rank's part of a sum
            whole = x if gathering is None else gathering.wait()
            scattering = Scattering(grad, ctx.group, async_op=True)
        of_weights, of_biases = weight_gradients(grads, whole, ctx.needs_input_grad[4:])
        return scattering.wait(), None, None, None, *of_weights, *of_biases


class Positions(torch.nn.Module):
    """The learned rows of this rank's tokens: (s,) or (b, s) → (s/N, h) or (b, s/N, h)."""

    def __init__(self, table: torch.nn.Embedding, group: Group) -> None:
        super().__init__()
        self.weight, self.group = table.weight, group

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        rows = by_rank(positions.reshape(-1, positions.shape[-1]), self.group)[:, dist.get_rank(self.group)]
        return F.embedding(rows[0] if positions.dim() == 1 else rows, self.weight)
