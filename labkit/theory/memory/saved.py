"""What a layer keeps for backward: every saved tensor by name, in bytes.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4 and
Table 2, for GPT; Shazeer, "GLU Variants Improve Transformer" (2020), and Zhang and Sennrich, "Root Mean Square Layer
Normalization" (2019), for what Llama's layer computes; Dao et al., "FlashAttention" (2022), for what the fused kernel
keeps. Checked against the saved tensors of torch 2.13 on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.theory.memory.setup import Setup
from labkit.theory.memory.shape import Shape, check_shape, check_tokens, divides, kv_width
from labkit.theory.memory.terms import Terms

PLAIN = Setup()
#: Names of the terms that grow with s²: attention's probabilities.
CORE = ("softmax", "attention dropout")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the tensors that occur again and again, on one rank."""

    config: Shape
    s: int
    b: int
    setup: Setup

    @property
    def tokens(self) -> int:
        """Tokens of the regions around the norms: s·b, divided by t under sequence parallelism."""
        return self.s * self.b // (self.setup.tensor_parallel if self.setup.sequence_parallel else 1)

    @property
    def stream(self) -> int:
        """A tensor of the residual stream, s × b × h."""
        return self.setup.width * self.tokens * self.config.hidden

    @property
    def gathered(self) -> int:
        """The input of a column-parallel product: whole, unless backward gathers it again."""
        return self.setup.width * self.s * self.b * self.config.hidden if self.setup.keep_gathered else self.stream

    @property
    def mask(self) -> int:
        """A dropout mask on the residual stream."""
        return self.setup.mask_width * self.tokens * self.config.hidden

    def cut(self, elements: int) -> int:
        """A tensor of s × b × `elements`, of which each of the t ranks has its part."""
        return self.setup.width * self.s * self.b * elements // self.setup.tensor_parallel

    @property
    def scores(self) -> int:
        """Elements of the s × s matrices of all heads, a part of which each rank has."""
        return self.config.heads * self.s**2 * self.b // self.setup.tensor_parallel


def layer_activations(config: Shape, s: int, b: int, setup: Setup = PLAIN) -> Terms[int]:
    """Bytes that one transformer layer keeps for backward, on one rank, for one micro-batch.

    GPT at 16 bits with one-byte masks: sbh(34 + 5as/h), of which attention 11sbh + 5as²b, MLP 19sbh, norms 4sbh; each
    norm's mean and reciprocal deviation, which the papers leave out, are terms of their own ("statistics").
    Llama's MLP keeps four tensors of its inner width instead of two.

    Assumptions: the residual stream has the width of the other activations; softmax is computed at that width; the
    causal mask is added, which keeps nothing; rotary angles are shared by all layers (`embedding_activations`); keys
    that several heads share are not copied for each of them; RMSNorm keeps its input and one fp32 number a token, as
    labkit's does and torch's on CUDA (torch's on a CPU keeps two fp32 copies of a 16-bit input); a dropout of 0 keeps
    nothing; fused attention keeps a fp32 log-sum-exp and no mask (with dropout inside, torch on a CPU keeps more); a
    checkpoint's random number state is not counted.

    Args:
        config: The model; see `Shape`.
        s: Tokens of a sequence.
        b: Sequences of a micro-batch.
        setup: Widths, parallelism, recomputation.

    Raises:
        TypeError: Something is missing, or no whole number.
        ValueError: Out of range; heads, ffn, vocab or (under sequence parallelism) s that t does not divide.

    >>> from labkit.model import preset
    >>> terms = layer_activations(preset("gpt_22b"), s=2048, b=4)
    >>> terms["keys"], terms["softmax output"]
    (100663296, 2147483648)
    >>> terms.without_name("statistics").total == 2048 * 4 * 6144 * 34 + 5 * 64 * 2048**2 * 4
    True
    """
    sizes = sizes_of(config, s, b, setup)
    if setup.recompute == "full":
        return Terms({"layer input": sizes.stream})
    return Terms({**_attention(sizes), **_mlp(sizes)})


def embedding_activations(config: Shape, s: int, b: int, setup: Setup = PLAIN) -> Terms[int]:
    """Bytes kept before the first layer, or for all of them: indices (int64), the dropout's mask, rotary angles.

    Indices and angles (cosines and sines of d/2 pairs a token, in fp32 at least) are whole on every rank. What the
    embeddings put out is the first layer's input and counted there.

    Raises:
        TypeError, ValueError: As `layer_activations`.

    >>> from labkit.model import preset
    >>> embedding_activations(preset("gpt2_small"), s=1024, b=1)
    {'token indices': 8192, 'position indices': 8192, 'embedding dropout mask': 786432}
    """
    sizes = sizes_of(config, s, b, setup)
    terms = Terms({"token indices": 8 * s * b})
    if config.dialect == "gpt":
        terms["position indices"] = 8 * s
    else:
        terms["rotary angles"] = _at_least_fp32(setup) * s * config.hidden // config.heads
    if config.dropout:
        terms["embedding dropout mask"] = sizes.mask
    return terms


def head_activations(config: Shape, s: int, b: int, setup: Setup = PLAIN) -> Terms[int]:
    """Bytes kept after the last layer: the final norm's and the head's inputs, the loss's log-softmax and targets.

    The loss is computed in fp32, or wider; its log-softmax of s·b·V elements is what backward needs, beside targets and
    one scalar of torch's own. With t ranks each has its part of the vocabulary. Korthikanti et al. (2022), section
    4.3: 4sbh/t·(1 + V/h) in all.

    Raises:
        TypeError, ValueError: As `layer_activations`.

    >>> from labkit.model import preset
    >>> head_activations(preset("llama3_8b"), s=8192, b=1)["log-softmax"]
    4202692608
    """
    sizes = sizes_of(config, s, b, setup)
    return Terms({
        **_norm_terms("final norm", sizes),
        "head input": sizes.gathered,
        "log-softmax": _at_least_fp32(setup) * s * b * config.vocab // setup.tensor_parallel,
        "target indices": 8 * s * b,
        "loss weight": _at_least_fp32(setup),
    })  # fmt: skip


def logits(config: Shape, s: int, b: int, setup: Setup = PLAIN) -> Terms[int]:
    """Bytes that stand beside the log-softmax when backward begins, which is when most is held.

    The gradient that comes to the log-softmax, and the one that it makes of it, both in fp32 at least. (In forward it
    is less: the logits, and, if they are narrower, their fp32 copy.)

    Raises:
        TypeError, ValueError: As `layer_activations`.

    >>> from labkit.model import preset
    >>> logits(preset("llama3_8b"), s=8192, b=1).total
    8405385216
    """
    check_tokens(s, b)
    check_shape(config, setup.tensor_parallel)
    nbytes = _at_least_fp32(setup) * (s * b * config.vocab // setup.tensor_parallel)
    return Terms({"gradient of the log-softmax": nbytes, "gradient of the logits": nbytes})


def attention_crossover(config: Shape, setup: Setup = PLAIN) -> float:
    """The sequence length, in tokens, from which the s² terms outweigh the rest of a layer.

    GPT at 16 bits with dropout: s = 34h/5a. Norm statistics are left out, as in the papers.

    Raises:
        TypeError, ValueError: As `layer_activations`; fused or recomputed attention, which keeps no s² term.

    >>> from labkit.model import preset
    >>> attention_crossover(preset("gpt_7_5b"))  # heads of 128
    870.4
    """
    cut = setup.tensor_parallel if setup.sequence_parallel else 1  # the shortest sequence that can be cut
    terms = layer_activations(config, cut, 1, setup).without_name("statistics")
    square = terms.with_name(*CORE).total
    if not square:
        raise ValueError("the layer keeps no s² term: expected attention='explicit' and recompute='none'")
    return cut * (terms.total - square) / square


def _attention(sizes: Sizes) -> dict[str, int]:
    config, setup = sizes.config, sizes.setup
    keys = sizes.cut(kv_width(config))
    core = _core(sizes) if setup.recompute != "selective" else {}
    return {
        **_norm_terms("attention norm", sizes),
        "attention norm output": sizes.gathered,
        "queries": sizes.cut(config.hidden),
        "keys": keys,
        "values": keys,
        **core,
        "attention output": sizes.cut(config.hidden),
        **({"projection dropout mask": sizes.mask} if config.dropout else {}),
    }


def _core(sizes: Sizes) -> dict[str, int]:
    """Between queries·keys and the product with the values."""
    config, setup = sizes.config, sizes.setup
    if config.attention == "fused":
        return {"log-sum-exp": 4 * config.heads * sizes.s * sizes.b // setup.tensor_parallel}
    kept = {"softmax output": setup.width * sizes.scores}
    if config.attention_dropout:  # else the softmax's output is what meets the values, and is kept once
        kept["attention dropout mask"] = setup.mask_width * sizes.scores
        kept["attention dropout output"] = setup.width * sizes.scores
    return kept


def _mlp(sizes: Sizes) -> dict[str, int]:
    config, inner = sizes.config, sizes.cut(sizes.config.ffn)
    names = ("up output", "GELU output") if config.dialect == "gpt" else (
        "gate output", "SiLU output", "up output", "gated product")  # fmt: skip
    return {
        **_norm_terms("MLP norm", sizes),
        "MLP norm output": sizes.gathered,
        **dict.fromkeys(names, inner),
        **({"MLP dropout mask": sizes.mask} if config.dropout else {}),
    }


def _norm_terms(name: str, sizes: Sizes) -> dict[str, int]:
    """LayerNorm keeps a mean and a reciprocal deviation for each token; RMSNorm only the latter, in fp32 at least."""
    setup = sizes.setup
    narrow = setup.width if setup.statistics_width is None else setup.statistics_width
    each = 2 * narrow if sizes.config.dialect == "gpt" else _at_least_fp32(setup)
    return {f"{name} input": sizes.stream, f"{name} statistics": each * sizes.tokens}


def _at_least_fp32(setup: Setup) -> int:
    return max(4, setup.width)


def sizes_of(config: Shape, s: int, b: int, setup: Setup) -> Sizes:
    check_tokens(s, b)
    check_shape(config, setup.tensor_parallel)
    if setup.sequence_parallel:
        divides("tensor_parallel", setup.tensor_parallel, "s", s)
    return Sizes(config, s, b, setup)
