"""How many parameters a model has, by name, by part, and by the papers' closed form.

Sources: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), for GPT's layer; Touvron et al.,
"LLaMA" (2023), section 2.2, for Llama's; Ainslie et al., "GQA" (2023), for shared keys and values; Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters" (2021), eq. 2, for the closed form.
"""

from __future__ import annotations

from math import prod

from labkit.theory.communication.given import whole
from labkit.theory.memory.shape import Shape, check_shape, kv_width
from labkit.theory.memory.terms import Terms

#: Part → what the name of a module of it ends with.
PARTS = {
    "embedding": "token_embedding", "positions": "position_embedding", "attention": "attention", "mlp": "mlp",
    "norm": "norm", "head": "head",
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


def parameters(config: Shape, tensor_parallel: int = 1) -> int:
    """Ψ: how many parameters the model has; with `tensor_parallel` t, how many one of the t ranks holds.

    Assumptions: a tied head is the embedding and counts once; rotary positions have no parameters.

    Args:
        config: The model; see `Shape`.
        tensor_parallel: t. Matrices of attention and MLP, the embedding and the head are cut; norms, positions and
            the biases that are added after a row-parallel product are whole on every rank.

    Raises:
        TypeError: Something is missing, or no whole number.
        ValueError: A size below 1, heads that do not divide, t that does not divide.

    >>> from labkit.model import preset
    >>> parameters(preset("gpt2_small")), parameters(preset("llama3_8b"))
    (124439808, 8030261248)
    """
    return sum(map(prod, parameter_shapes(config, tensor_parallel).values()))


def parameter_parts(config: Shape, tensor_parallel: int = 1) -> Terms[int]:
    """The same count by part: embedding, positions, attention, mlp, norm, head (0 where tied).

    Raises:
        TypeError, ValueError: As `parameters`.

    >>> from labkit.model import preset
    >>> parameter_parts(preset("llama3_8b"))["head"]
    525336576
    """
    parts = Terms(dict.fromkeys(PARTS, 0))
    for name, shape in parameter_shapes(config, tensor_parallel).items():
        parts[part_of(name)] += prod(shape)
    return parts


def parameter_shapes(config: Shape, tensor_parallel: int = 1) -> Shapes:
    """Name → shape of every parameter, as ``labkit.model.Transformer(config).named_parameters()`` has them.

    One entry is one tensor of the optimizer. GPT keeps queries, keys and values in one matrix, as GPT-2 does.

    Raises:
        TypeError, ValueError: As `parameters`.

    >>> from labkit.model import preset
    >>> shapes = parameter_shapes(preset("gpt2_small"))
    >>> len(shapes), shapes["blocks.0.attention.qkv.weight"]
    (148, (2304, 768))
    """
    check_shape(config, tensor_parallel)
    h, gpt = config.hidden, config.dialect == "gpt"
    vocabulary = (config.vocab // tensor_parallel, h)
    shapes: Shapes = {"token_embedding.weight": vocabulary}
    if gpt:
        shapes["position_embedding.weight"] = (config.positions, h)
    layer = _gpt_layer(config, tensor_parallel) if gpt else _llama_layer(config, tensor_parallel)
    for i in range(config.layers):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= _norm("norm", h, gpt)
    if not config.tied:
        shapes["head.weight"] = vocabulary
    return shapes


def part_of(name: str) -> str:
    """The part that a parameter belongs to.

    >>> part_of("blocks.3.attention_norm.weight"), part_of("blocks.3.mlp.up.bias")
    ('norm', 'mlp')
    """
    return next(part for part, ending in PARTS.items() if any(word.endswith(ending) for word in name.split(".")))


def _gpt_layer(config: Shape, t: int) -> Shapes:
    h, f, qkv = config.hidden, config.ffn // t, (config.hidden + 2 * kv_width(config)) // t
    return {
        **_norm("attention_norm", h, bias=True),
        "attention.qkv.weight": (qkv, h),
        "attention.qkv.bias": (qkv,),
        "attention.output.weight": (h, h // t),
        "attention.output.bias": (h,),  # row-parallel: added once, after the reduce, so each rank has all of it
        **_norm("mlp_norm", h, bias=True),
        "mlp.up.weight": (f, h),
        "mlp.up.bias": (f,),
        "mlp.down.weight": (h, f),
        "mlp.down.bias": (h,),
    }


def _llama_layer(config: Shape, t: int) -> Shapes:
    h, f, kv = config.hidden, config.ffn // t, kv_width(config) // t
    return {
        **_norm("attention_norm", h, bias=False),
        "attention.query.weight": (h // t, h),
        "attention.key.weight": (kv, h),
        "attention.value.weight": (kv, h),
        "attention.output.weight": (h, h // t),
        **_norm("mlp_norm", h, bias=False),
        "mlp.gate.weight": (f, h),
        "mlp.up.weight": (f, h),
        "mlp.down.weight": (h, f),
    }


def _norm(name: str, h: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (h,), f"{name}.bias": (h,)} if bias else {f"{name}.weight": (h,)}


def closed_form(layers: int, hidden: int, vocab: int, s: int) -> int:
    """P = 12lh²(1 + 13/12h + (V+s)/12lh), multiplied out: 12lh² + 13lh + (V+s)h.

    Source: Narayanan et al. (2021), eq. 2. Assumptions: GPT, ffn = 4h, tied head, s learned positions; the final
    norm's 2h parameters are left out, so `parameters` gives 2h more.

    Raises:
        TypeError, ValueError: No whole number, or below 1.

    >>> round(closed_form(layers=80, hidden=12288, vocab=51200, s=2048) / 1e9, 2)
    145.62
    """
    for name, value in (("layers", layers), ("hidden", hidden), ("vocab", vocab), ("s", s)):
        whole(name, value, 1)
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + s) * hidden
