"""A vocabulary shared by ranks: each knows some words."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit.collectives import check
from labkit.tensor_parallel.functions import Group, reduce_from_group
from labkit.tensor_parallel.linear import own


def rows_per_rank(vocab: int, group: Group = None) -> int:
    """⌈V/N⌉: where N does not divide V, the last ranks have rows that belong to no word (padding).

    Padding is never looked up, and `vocab_parallel_cross_entropy` gives it probability 0, so it gets no gradient.
    """
    check.member(group)
    return -(-vocab // dist.get_world_size(group))


class VocabParallelEmbedding(torch.nn.Module):
    """`torch.nn.Embedding` whose rows are split: rank r knows words r·⌈V/N⌉ up to, but not, (r+1)·⌈V/N⌉.

    A rank looks up the words that it knows, puts zeros for the others, and g adds up.

    Args:
        num_embeddings: V, any number.
        embedding_dim: h.
        group: The tensor-parallel group; ``None`` is the world.
        device, dtype: Of the parameter.

    Attributes:
        weight: (⌈V/N⌉, h); rows beyond V are zero.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, group: Group = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._take(torch.nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype), group)

    @classmethod
    def of(cls, whole: torch.nn.Embedding, group: Group = None) -> VocabParallelEmbedding:
        """This rank's part of a table that is the same on all ranks.

        Raises:
            TypeError: `whole` is no `torch.nn.Embedding`.
            ValueError: It has a padding index, a largest norm, gradients by frequency, or sparse ones.
        """
        if not isinstance(whole, torch.nn.Embedding):
            raise TypeError(f"the whole table is {type(whole).__name__}: expected a torch.nn.Embedding")
        for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(whole, name)
            if value is not None and value is not False:  # 0 is a padding index
                raise ValueError(f"the table has {name}={value}: expected one without")
        self = cls.__new__(cls)
        torch.nn.Module.__init__(self)
        self._take(whole, group)
        return self

    def _take(self, whole: torch.nn.Embedding, group: Group) -> None:
        self.num_embeddings, self.embedding_dim, self.group = whole.num_embeddings, whole.embedding_dim, group
        self.weight = own(vocab_shard(whole.weight, group), group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (…), the same on all ranks → (…, h), the same on all ranks.

        Raises:
            ValueError: On a CPU: a token is no word.
        """
        return reduce_from_group(self.lookup(tokens), self.group)

    def lookup(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of the words that this rank knows, zeros for the others: (…, h), to be added up."""
        _check(tokens, self.num_embeddings)
        rows = self.weight.shape[0]
        local = tokens - dist.get_rank(self.group) * rows
        foreign = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return found.masked_fill(foreign.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, of which {self.weight.shape[0]} here, {self.embedding_dim}"


def vocab_shard(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's rows of a (V, …) tensor; zeros where there are none."""
    rows = rows_per_rank(whole.shape[0], group)
    first = dist.get_rank(group) * rows
    part = whole.detach()[first : first + rows]
    padded = whole.new_zeros(rows, *whole.shape[1:])
    padded[: len(part)] = part
    return padded.requires_grad_(whole.requires_grad)


def _check(tokens: torch.Tensor, vocab: int) -> None:
    if not isinstance(tokens, torch.Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        said = tokens.dtype if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise TypeError(f"tokens is {said}: expected a tensor of torch.int64 or torch.int32")
    if tokens.is_cpu and tokens.numel():  # elsewhere, to look at values is to wait for the device
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab:
            raise ValueError(f"tokens holds {low if low < 0 else high}: expected 0 … {vocab - 1}")
