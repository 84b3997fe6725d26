"""What a model is made of, in numbers: no torch here, so that theory and pictures can read it.

Sources of the presets: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), Table 2; Narayanan
et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), Table 1; Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), Table 3; Grattafiori et al., "The Llama 3 Herd of Models"
(2024), Table 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

DIALECTS = ("gpt", "llama")
ATTENTIONS = ("explicit", "fused")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A decoder-only transformer.

    What is left out is filled in at once, so a reader of a Config finds a number everywhere. Hence
    ``dataclasses.replace(config, hidden=…)`` keeps the old `ffn`: use ``preset(name, hidden=…)``, which does not.

    Args:
        dialect: ``"gpt"``: learned positions, LayerNorm, GELU, biases. ``"llama"``: rotary positions, RMSNorm, SwiGLU,
            grouped-query attention, no biases.
        layers: L.
        hidden: h, the width of the residual stream.
        heads: a; each has hidden/heads elements.
        kv_heads: Key and value heads, each shared by heads/kv_heads query heads; default: as many as `heads`.
        ffn: Width inside the MLP; default 4·hidden, for llama 8/3·hidden rounded up to a multiple of 8 (three matrices
            of that width hold what GPT's two hold).
        vocab: V.
        positions: The longest sequence; GPT learns a table of that many rows.
        tied: Head and token embedding are one parameter; default: in the GPT dialect.
        dropout: On the embedding and on what each attention and MLP adds to the residual stream.
        attention_dropout: On attention probabilities; default: as `dropout`.
        attention: ``"explicit"``: the s×s matrix exists and can be measured. ``"fused"``:
            `torch.nn.functional.scaled_dot_product_attention`, which keeps one number a row of it.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size below 1, heads that do not divide, a dropout outside [0, 1), an unknown name.

    Example:
        >>> Config(dialect="gpt", layers=2, hidden=64, heads=4, vocab=256, positions=128).ffn
        256
    """

    dialect: str
    layers: int
    hidden: int
    heads: int
    # None means "the default" in the next three and in attention_dropout; __post_init__ leaves none of them None.
    kv_heads: int = None  # type: ignore[assignment]
    ffn: int = None  # type: ignore[assignment]
    vocab: int
    positions: int
    tied: bool = None  # type: ignore[assignment]
    dropout: float = 0.0
    attention_dropout: float = None  # type: ignore[assignment]
    attention: str = "explicit"

    def __post_init__(self) -> None:
        one_of("dialect", self.dialect, DIALECTS)
        one_of("attention", self.attention, ATTENTIONS)
        for name in ("layers", "hidden", "heads", "vocab", "positions"):
            _size(name, getattr(self, name))
        ffn = 4 * self.hidden if self.dialect == "gpt" else -(-8 * self.hidden // 24) * 8
        self._default(kv_heads=self.heads, ffn=ffn, tied=self.dialect == "gpt", attention_dropout=self.dropout)
        for name in ("kv_heads", "ffn"):
            _size(name, getattr(self, name))
        for name in ("dropout", "attention_dropout"):
            _probability(name, getattr(self, name))
        self._heads_divide()

    def _default(self, **defaults: Any) -> None:
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # the dataclass is frozen from here on

    def _heads_divide(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}: expected equal heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}: expected equal groups")
        if self.dialect == "gpt" and self.kv_heads != self.heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} with heads={self.heads}: dialect 'gpt' has a key head for every query head; "
                "leave kv_heads out, or take dialect 'llama'"
            )
        if self.dialect == "llama" and self.head_size % 2:
            raise ValueError(
                f"hidden={self.hidden} over heads={self.heads} is {self.head_size} elements a head: expected an even "
                "number, since rotary positions turn pairs"
            )

    @property
    def head_size(self) -> int:
        """Elements of one head: hidden/heads."""
        return self.hidden // self.heads


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuse a word that is not among `known`, and say which one was probably meant."""
    if value not in known:
        near = get_close_matches(str(value), known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}{hint}")


def _size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: expected a whole number")
    if value < 1:
        raise ValueError(f"{name}={value}: expected at least 1")


def _probability(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}: expected a number")
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value}: expected a share from 0 up to, but not, 1")


_TINY: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "positions": 128}
#: Narayanan's and Korthikanti's models, with Megatron-LM's default dropout.
_PAPER: dict[str, Any] = {"dialect": "gpt", "vocab": 51200, "positions": 2048, "dropout": 0.1}
_LLAMA3: dict[str, Any] = {"dialect": "llama", "kv_heads": 8, "vocab": 128256, "positions": 8192}

#: What each preset gives; the rest are Config's defaults.
_GIVEN: dict[str, dict[str, Any]] = {
    "tiny_gpt": {"dialect": "gpt", **_TINY},
    "tiny_llama": {"dialect": "llama", "kv_heads": 2, **_TINY},
    "gpt2_small": {
        "dialect": "gpt", "layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "positions": 1024, "dropout": 0.1,
    },
    "gpt_7_5b": {"layers": 36, "hidden": 4096, "heads": 32, **_PAPER},
    "gpt_22b": {"layers": 48, "hidden": 6144, "heads": 64, **_PAPER},
    "gpt_175b": {"layers": 96, "hidden": 12288, "heads": 96, **_PAPER},
    "gpt_530b": {"layers": 105, "hidden": 20480, "heads": 128, **_PAPER},
    "gpt_1t": {"layers": 128, "hidden": 25600, "heads": 160, **_PAPER},
    "llama3_8b": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, **_LLAMA3},
    "llama3_70b": {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672, **_LLAMA3},
    "llama3_405b": {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248, **_LLAMA3},
}  # fmt: skip

#: Name → Config, as published; the tiny ones learn bytes within seconds on a CPU.
PRESETS: dict[str, Config] = {name: Config(**given) for name, given in _GIVEN.items()}


def preset(name: str, **changes: Any) -> Config:
    """A named model, with what you change.

    Args:
        name: One of `PRESETS`.
        changes: Any of Config's fields. What depends on them (`ffn` on `hidden`) follows, unless the preset gives it.

    Raises:
        ValueError: No such preset, or Config refuses a change.

    Example:
        >>> preset("llama3_8b").kv_heads
        8
        >>> preset("tiny_gpt", hidden=128).ffn
        512
    """
    one_of("preset", name, tuple(PRESETS))
    return Config(**{**_GIVEN[name], **changes})
