"""A whole transformer, turned in place into this rank's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit.collectives import Placement, check, mark, placement
from labkit.model import Attention, Transformer
from labkit.model.mlp import GeluMLP, SwiGLU
from labkit.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from labkit.tensor_parallel.embedding import VocabParallelEmbedding, vocab_shard
from labkit.tensor_parallel.functions import Group, copy_to_group, reduce_from_group
from labkit.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_linears, own
from labkit.tensor_parallel.seeds import SplitDropout


def parallelize(model: Transformer, group: Group = None) -> Transformer:
    """Share the layers of `model` among the ranks of a group: attention by heads, the MLP by width, the vocabulary.

    Each layer then has four all-reduces: g after attention and after the MLP in forward, f before them in backward.
    Norms, position embedding and the biases of the row-parallel layers are whole on every rank.

    Args:
        model: The same on all ranks (built from one seed), so that the parts fit together: the parameters that all
            ranks hold are those of one device, for any number of ranks. Changed in place.
        group: The tensor-parallel group; ``None`` is the world.

    Returns:
        `model`. Its logits are then (b, s, ⌈V/N⌉), this rank's words; `loss` takes them.

    Raises:
        TypeError: `model` is no `labkit.model.Transformer`.
        ValueError: The ranks do not divide its heads or its MLP's width, or it is shared already.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """
    check_model(model, group)
    return share(model, Region(group))


def share(model: Transformer, region: Region) -> Transformer:
    """Put shared layers in place of the whole ones."""
    group, tied = region.group, model.head.weight is model.token_embedding.weight
    for block in model.blocks:
        block.attention = SharedAttention(block.attention, region)  # type: ignore[arg-type]
        block.mlp = SharedMLP(block.mlp, region)  # type: ignore[arg-type]
    whole = model.head.weight
    model.token_embedding = SharedEmbedding.within(model.token_embedding, region)  # type: ignore[assignment]
    weight = model.token_embedding.weight if tied else own(vocab_shard(whole, group), group)
    model.head = Head(weight, region)  # type: ignore[assignment, arg-type]
    for param in model.parameters():
        if placement(param) == Placement():
            mark(param, replicated=(group,))
    return model


def loss(
    logits: torch.Tensor, targets: torch.Tensor, vocab: int, group: Group = None, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `labkit.model.loss`, of logits that are split: (sum, count), the same on all ranks."""
    each = vocab_parallel_cross_entropy(logits, targets, group, vocab=vocab, ignore_index=ignore_index)
    return each.sum(), (targets != ignore_index).sum()


class Region:
    """Where a layer splits into ranks and where it comes together again: f and g.

    Sequence parallelism is the same layers with another pair (`labkit.sequence_parallel`).
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def split(self, x: torch.Tensor, layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """f, then this rank's columns of each layer, whose matrix and bias `part()` gives."""
        return column_linears(x, [layer.part() for layer in layers], self.group)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """g: the sum of the ranks' shares."""
        return reduce_from_group(x, self.group)


class Rows(RowParallelLinear):
    """A row-parallel layer whose shares a region joins."""

    region: Region

    @classmethod
    def within(cls, whole: torch.nn.Linear, region: Region) -> Rows:
        self = cls.of(whole, region.group)
        assert isinstance(self, Rows)
        self.region = region
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.region.join(self.share(x))
        return y if self.bias is None else y + self.bias


class SharedEmbedding(VocabParallelEmbedding):
    """An embedding whose rows a region joins."""

    region: Region

    @classmethod
    def within(cls, whole: torch.nn.Embedding, region: Region) -> SharedEmbedding:
        self = cls.of(whole, region.group)
        assert isinstance(self, SharedEmbedding)
        self.region = region
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.region.join(self.lookup(tokens))


class SharedAttention(Attention):
    """Each rank has some heads: their queries, keys and values by columns, what they add to the output by rows."""

    def __init__(self, whole: Attention, region: Region) -> None:
        torch.nn.Module.__init__(self)
        self.head_size, self.fused, self.one_projection = whole.head_size, whole.fused, whole.one_projection
        self.region, group = region, region.group
        if self.one_projection:
            self.qkv = ColumnParallelLinear.of(_by_heads(whole.qkv, group), group=group)  # type: ignore[assignment]
        else:
            self.query = ColumnParallelLinear.of(whole.query, group=group)  # type: ignore[assignment]
            for name in ("key", "value"):
                layer = getattr(whole, name)
                few = layer.out_features // self.head_size < dist.get_world_size(group)
                made = SharedHeads(layer, self.head_size, group) if few else ColumnParallelLinear.of(layer, group=group)
                setattr(self, name, made)
        self.output = Rows.within(whole.output, region)  # type: ignore[assignment]
        self.dropout = SplitDropout(whole.dropout)  # type: ignore[assignment]

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's queries, keys and values: (b, s, a/N, d), then twice (b, s, its kv heads, d)."""
        if self.one_projection:
            (y,) = self.region.split(x, [self.qkv])
            return y.unflatten(-1, (3, -1, self.head_size)).unbind(2)
        projected = self.region.split(x, [self.query, self.key, self.value])
        return tuple(y.unflatten(-1, (-1, self.head_size)) for y in projected)


class SharedMLP(torch.nn.Module):
    """Up by columns, down by rows; SwiGLU's gate by the same columns as up, which it meets one by one."""

    def __init__(self, whole: GeluMLP | SwiGLU, region: Region) -> None:
        super().__init__()
        self.region = region
        self.up = ColumnParallelLinear.of(whole.up, group=region.group)
        self.gate = ColumnParallelLinear.of(whole.gate, group=region.group) if isinstance(whole, SwiGLU) else None
        self.down = Rows.within(whole.down, region)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            (y,) = self.region.split(x, [self.up])  # (b, s, ffn/N)
            y = F.gelu(y)
        else:
            gate, y = self.region.split(x, [self.gate, self.up])
            y = F.silu(gate) * y
        return self.down(y)


class SharedHeads(torch.nn.Module):
    """Key or value heads that are fewer than ranks: several ranks' query heads look at the same one.

    Every rank holds the whole (small) matrix and uses the head that its queries belong to. f on the *matrix* adds up
    what the ranks find for it, so its gradient, and the parameter, stay the same on all of them.

    Args:
        whole: The projection, the same on all ranks.
        head_size: Elements of a head; the number of heads must divide that of ranks.
        group: The tensor-parallel group.
    """

    def __init__(self, whole: torch.nn.Linear, head_size: int, group: Group) -> None:
        super().__init__()
        heads = whole.out_features // head_size
        self.weight, self.group = mark(whole.weight, replicated=(group,)), group
        first = dist.get_rank(group) * heads // dist.get_world_size(group) * head_size
        self.rows = slice(first, first + head_size)

    def part(self) -> tuple[torch.Tensor, None]:
        """This rank's head: (d, h)."""
        return copy_to_group(self.weight, self.group)[self.rows], None


class Head(torch.nn.Module):
    """Scores of the words that this rank knows.

    Args:
        weight: (⌈V/N⌉, h): the embedding's own, if the two are tied.
    """

    def __init__(self, weight: torch.nn.Parameter, region: Region) -> None:
        super().__init__()
        self.weight, self.region = weight, region

    def part(self) -> tuple[torch.Tensor, None]:
        return self.weight, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, h) → (b, s, ⌈V/N⌉)."""
        (logits,) = self.region.split(x, [self])
        return logits


def _by_heads(qkv: torch.nn.Linear, group: Group) -> torch.nn.Linear:
    """The rows in an order such that the r-th of N equal parts is rank r's queries, keys and values."""
    ranks = dist.get_world_size(group)

    def arranged(rows: torch.Tensor) -> torch.nn.Parameter:
        by_rank = rows.detach().unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)  # (N, 3, h/N, …) → (3h, …)
        return torch.nn.Parameter(by_rank, rows.requires_grad)

    whole = torch.nn.Linear(qkv.in_features, qkv.out_features, device="meta")
    whole.weight, whole.bias = arranged(qkv.weight), arranged(qkv.bias)
    return whole


def check_model(model: Transformer, group: Group) -> None:
    check.member(group)
    if not isinstance(model, Transformer):
        raise TypeError(f"model is {type(model).__name__}: expected a labkit.model.Transformer")
    if not isinstance(model.token_embedding, torch.nn.Embedding):
        raise ValueError("the model is shared among ranks already")
    config, ranks = model.config, dist.get_world_size(group)
    for name, size in (("heads", config.heads), ("ffn", config.ffn)):
        if size % ranks:
            raise ValueError(f"{name}={size} on {ranks} ranks: expected a multiple, since each rank gets as many")
    if config.kv_heads % ranks and ranks % config.kv_heads:
        raise ValueError(f"kv_heads={config.kv_heads} on {ranks} ranks: expected a multiple or a divisor of {ranks}")
