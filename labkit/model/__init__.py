"""A decoder-only transformer in two dialects, its loss, and something to read.

    model = labkit.model.Transformer(labkit.model.preset("tiny_gpt"))
    corpus = labkit.model.Corpus(batch=4, length=64)

`config` says what a model is made of and needs no torch; the rest is loaded when it is first used. Read `transformer`
first: a model from top to bottom.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from labkit.model.config import PRESETS, Config, preset

#: Public name → module that defines it, which imports torch.
_HOME = {
    "Transformer": "labkit.model.transformer",
    "Block": "labkit.model.transformer",
    "Attention": "labkit.model.attention",
    "loss": "labkit.model.cross_entropy",
    "Corpus": "labkit.model.corpus",
}

if TYPE_CHECKING:
    from labkit.model.attention import Attention
    from labkit.model.corpus import Corpus
    from labkit.model.cross_entropy import loss
    from labkit.model.transformer import Block, Transformer

__all__ = ["PRESETS", "Attention", "Block", "Config", "Corpus", "Transformer", "loss", "preset"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"labkit.model has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
