"""A transformer, cut into the modules of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from labkit.collectives import mark, placement
from labkit.model import Transformer
from labkit.model.rotary import rotation


class TransformerPart(torch.nn.Module):
    """Some consecutive layers; the first part has the embedding too, the last one the final norm and the head.

    Takes tokens, (b, s), or what the part before made, (b, s, h); makes that, or logits, (b, s, V).

    Args:
        model: Its modules are used, not copied.
        layers: Which of its layers; there may be none.
        is_first, is_last: Whether it has the embedding, and the norm and head.
    """

    def __init__(self, model: Transformer, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.config, self.is_first, self.is_last = model.config, is_first, is_last
        if self.is_first:
            self.token_embedding, self.dropout = model.token_embedding, model.dropout
            if self.config.dialect == "gpt":
                self.position_embedding = model.position_embedding
        self.blocks = torch.nn.ModuleList(model.blocks[n] for n in layers)
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        if self.is_first:
            x = self.token_embedding(x)  # (b, s, h)
            if self.config.dialect == "gpt":
                x = x + self.position_embedding(at)
            x = self.dropout(x)
        angles = None if self.config.dialect == "gpt" else rotation(at, self.config.head_size, x.dtype)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x)) if self.is_last else x


def cut(model: Transformer, layers: Sequence[range]) -> list[TransformerPart]:
    """The parts of a transformer, one a stage.

    Where embedding and head are tied and end in different parts, the head gets a copy, and both are marked as one
    (``mark(param, tied=…)``), so that the engine keeps them the same.

    Args:
        model: Its modules are used, not copied.
        layers: Those of each part, such as `partition` gives them.

    Raises:
        ValueError: Some layer is in no part, in two, or out of order.

    >>> from labkit.model import preset
    >>> parts = cut(Transformer(preset("tiny_gpt", layers=3)), [range(0, 2), range(2, 3)])
    >>> [len(part.blocks) for part in parts]
    [2, 1]
    """
    if hasattr(model.blocks[0].attention, "region") and model.config.dialect == "llama":
        region = model.blocks[0].attention.region
        if hasattr(region, "keep_gathered"):
            raise ValueError(
                "the model's tokens are split along the sequence, and a part cannot tell where its own "
                "stand, which Llama's rotation asks for: use tensor_parallel.parallelize, or GPT's dialect"
            )
    if not all(isinstance(part, range) for part in layers):
        raise TypeError(f"layers is {list(layers)}: expected ranges, such as partition gives them")
    if [n for part in layers for n in part] != list(range(len(model.blocks))):
        raise ValueError(f"layers is {list(layers)}: expected each of 0 to {len(model.blocks) - 1} once, in order")
    if model.config.tied and len(layers) > 1:
        shared = model.token_embedding.weight
        lives = replace(placement(shared), tied="token_embedding")
        model.head.weight = torch.nn.Parameter(shared.detach().clone(), shared.requires_grad)
        for weight in (shared, model.head.weight):
            mark(weight, lives.sharded, lives.replicated, lives.partial, lives.tied)
    last = len(layers) - 1
    return [TransformerPart(model, part, n == 0, n == last) for n, part in enumerate(layers)]
