"""What is asked of a model: the attributes that formulas read, and that they fit together."""

from __future__ import annotations

from typing import Protocol

from labkit.theory.communication.given import whole

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "positions")
OTHERS = ("dialect", "tied", "dropout", "attention_dropout", "attention")


class Shape(Protocol):
    """A model in numbers: `labkit.model.Config`, or anything with the same attributes."""

    @property
    def dialect(self) -> str: ...  # "gpt" or "llama"
    @property
    def layers(self) -> int: ...  # L
    @property
    def hidden(self) -> int: ...  # h
    @property
    def heads(self) -> int: ...  # a
    @property
    def kv_heads(self) -> int: ...  # a, or fewer
    @property
    def ffn(self) -> int: ...  # 4h in the papers
    @property
    def vocab(self) -> int: ...  # V
    @property
    def positions(self) -> int: ...  # rows of a learned table of positions (gpt)
    @property
    def tied(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def attention(self) -> str: ...  # "explicit" or "fused"


def kv_width(config: Shape) -> int:
    """Elements of one token's keys: h where every head has its own."""
    return config.hidden // config.heads * config.kv_heads


def check_shape(config: Shape, tensor_parallel: int = 1) -> None:
    """Raise unless the model is complete, its heads are equal, and `tensor_parallel` ranks get equal parts of it."""
    for name in (*SIZES, *OTHERS):
        if not hasattr(config, name):
            raise TypeError(f"config is {config!r}, without {name}: expected a labkit.model.Config, such as preset(…)")
    for name in SIZES:
        whole(name, getattr(config, name), 1)
    one_of("dialect", config.dialect, ("gpt", "llama"))
    one_of("attention", config.attention, ("explicit", "fused"))
    divides("heads", config.heads, "hidden", config.hidden)
    divides("kv_heads", config.kv_heads, "heads", config.heads)
    whole("tensor_parallel", tensor_parallel, 1)
    for name in ("heads", "kv_heads", "ffn"):
        divides("tensor_parallel", tensor_parallel, name, getattr(config, name))
    if config.vocab % tensor_parallel:
        padded = -(-config.vocab // tensor_parallel) * tensor_parallel
        raise ValueError(
            f"tensor_parallel={tensor_parallel} does not divide vocab={config.vocab}: pad it, for example to {padded}"
        )


def check_tokens(s: int, b: int) -> None:
    whole("s (tokens of a sequence)", s, 1)
    whole("b (sequences of a micro-batch)", b, 1)


def divides(name: str, value: int, of: str, amount: int) -> None:
    if amount % value:
        raise ValueError(f"{name}={value} does not divide {of}={amount}: expected equal parts")


def one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(map(repr, known))}")
