"""The loss of logits that no rank has all of: three numbers a token travel, not V."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from labkit import collectives
from labkit.collectives import check
from labkit.tensor_parallel.functions import Group


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, group: Group = None, *, vocab: int | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """−log softmax(logits)[target] of each token, where each rank holds the logits of its own words.

    With m the largest logit of all words and Z = Σ exp(zᵢ − m), the loss is log Z − (z_target − m). The ranks agree on
    m, then add up Z, z_target (which one of them knows) and, for smoothing, Σz: two all-reduces of a few numbers a
    token, where gathering the logits would move V.

    Args:
        logits: (…, V/N), this rank's words; 16-bit ones are widened to fp32.
        target: (…), int64, the same on all ranks.
        group: The tensor-parallel group; ``None`` is the world.
        vocab: V, where the last ranks' logits are padded; padding counts as −∞. ``None``: no padding.
        ignore_index: Targets of this value have loss 0 and no gradient.
        label_smoothing: ε: the target is (1 − ε) of the word and ε/V of every word.

    Returns:
        (…), a loss a token, the same on all ranks.

    Raises:
        TypeError, ValueError: Shapes or types that do not fit; on a CPU also a target that is no word.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3; label smoothing: Szegedy et al. 2016, section 7.
    """
    check.member(group)
    _check_types(logits, target, vocab, ignore_index, label_smoothing)
    vocab = logits.shape[-1] * dist.get_world_size(group) if vocab is None else vocab
    _check(logits, target, vocab, ignore_index, label_smoothing, group)
    return _CrossEntropy.apply(logits, target, group, vocab, ignore_index, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: Group, vocab: int, ignore: int, smoothing: float
    ) -> torch.Tensor:
        first, words = dist.get_rank(group) * logits.shape[-1], logits.shape[-1]
        real = max(0, min(words, vocab - first))  # the rest is padding
        z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # (…, V/N)
        z[..., real:] = float("-inf")
        most = z.amax(-1)  # (…)
        collectives.all_reduce(most, op="max", group=group)
        z -= most.unsqueeze(-1)
        counted = target != ignore
        local = target - first
        here = counted & (local >= 0) & (local < real)
        local = local.masked_fill(~here, 0)
        of_target = z.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        of_all = [z[..., :real].sum(-1)] if smoothing else []
        z.exp_()
        sums = torch.stack([z.sum(-1), of_target, *of_all])  # (2 or 3, …)
        collectives.all_reduce(sums, group=group)
        total, of_target, *of_all = sums
        loss = total.log() - (1 - smoothing) * of_target
        if smoothing:
            loss -= smoothing / vocab * of_all[0]
        z /= total.unsqueeze(-1)  # now the probabilities
        ctx.save_for_backward(z, local, here, counted)
        ctx.real, ctx.smoothing, ctx.vocab, ctx.dtype = real, smoothing, vocab, logits.dtype
        return loss.masked_fill(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        probabilities, local, here, counted = ctx.saved_tensors
        slope = probabilities.clone()  # softmax − target
        slope[..., : ctx.real] -= ctx.smoothing / ctx.vocab
        slope.scatter_add_(-1, local.unsqueeze(-1), ((ctx.smoothing - 1) * here.to(slope.dtype)).unsqueeze(-1))
        slope *= grad.masked_fill(~counted, 0.0).unsqueeze(-1)
        return slope.to(ctx.dtype), None, None, None, None, None


def _check_types(logits: Any, target: Any, vocab: Any, ignore: Any, smoothing: Any) -> None:
    for name, value in (("logits", logits), ("target", target)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is {type(value).__name__}: expected a tensor")
    if not logits.is_floating_point() or not logits.dim():
        raise TypeError(f"logits is {tuple(logits.shape)} of {logits.dtype}: expected floats, (…, words of this rank)")
    if target.dtype != torch.int64:
        raise TypeError(f"target is {target.dtype}: expected torch.int64")
    for name, number in (("vocab", vocab), ("ignore_index", ignore)):
        if (number is not None or name != "vocab") and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"{name} is {number!r}: expected a whole number")
    if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)):
        raise TypeError(f"label_smoothing is {smoothing!r}: expected a share from 0 up to, but not, 1")


def _check(logits: torch.Tensor, target: torch.Tensor, vocab: int, ignore: int, smoothing: float, group: Group) -> None:
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"target has shape {tuple(target.shape)} and logits {tuple(logits.shape)}: expected logits to "
                         "be target's shape, then this rank's words")  # fmt: skip
    words, ranks = logits.shape[-1], dist.get_world_size(group)
    if not (words - 1) * ranks < vocab <= words * ranks:
        raise ValueError(f"vocab={vocab} with {words} words on each of {ranks} ranks: expected "
                         f"{(words - 1) * ranks + 1} … {words * ranks}")  # fmt: skip
    if not 0 <= smoothing < 1:
        raise ValueError(f"label_smoothing={smoothing!r}: expected a share from 0 up to, but not, 1")
    if target.is_cpu and (wrong := target[((target < 0) | (target >= vocab)) & (target != ignore)]).numel():
        raise ValueError(f"target holds {int(wrong[0])}: expected 0 … {vocab - 1}, or ignore_index={ignore}")
