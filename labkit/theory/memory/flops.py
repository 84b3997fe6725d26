"""Floating-point operations of a training step, and what share of the hardware's they use.

Sources: Narayanan et al. (2021), section 5.1 and eqs. 3 and 4; Korthikanti et al. (2022), section 6.3 and appendix A,
for model and hardware FLOPs; Chowdhery et al., "PaLM" (2022), appendix B, for MFU.
"""

from __future__ import annotations

from labkit.theory.communication.given import number, whole
from labkit.theory.memory.shape import Shape, check_shape, check_tokens, kv_width, one_of
from labkit.theory.memory.terms import Terms


def forward_flops(config: Shape, s: int, b: int, causal: bool = False) -> Terms[int]:
    """Operations of one forward pass, by part: projections, attention (the two s² products), mlp, head.

    Assumptions: a product of m×k and k×n takes 2mkn; nothing else counts (norms, softmax, GELU, rotary positions,
    looking up embeddings). Causal convention: the papers count the whole s × s matrix, though half of it is masked.
    With ``causal=True`` the two products count half; use it on both sides of a comparison, or on neither.

    Args:
        config: The model.
        s: Tokens of a sequence.
        b: Sequences: of a micro-batch, or of the whole batch.
        causal: Whether masked products are left out.

    Raises:
        TypeError, ValueError: As `parameters`; s or b below 1.

    >>> from labkit.model import preset
    >>> forward_flops(preset("gpt2_small"), s=1024, b=1)
    {'projections': 57982058496, 'attention': 38654705664, 'mlp': 115964116992, 'head': 79047426048}
    """
    check_tokens(s, b)
    check_shape(config)
    h, tokens = config.hidden, s * b
    products = 2 if config.dialect == "gpt" else 3
    whole_matrix = 4 * config.layers * tokens * s * h
    return Terms({
        "projections": 2 * config.layers * tokens * h * (2 * h + 2 * kv_width(config)),
        "attention": whole_matrix // 2 if causal else whole_matrix,
        "mlp": 2 * config.layers * tokens * h * config.ffn * products,
        "head": 2 * tokens * h * config.vocab,
    })  # fmt: skip


def model_flops(config: Shape, s: int, b: int, causal: bool = False) -> int:
    """Operations that a training step needs: forward once, backward twice as much. However it is implemented.

    For GPT with ffn = 4h: 72BLsh²(1 + s/6h + V/12hL); Korthikanti et al. (2022), appendix A.

    Raises:
        TypeError, ValueError: As `forward_flops`.

    >>> from labkit.model import preset
    >>> model_flops(preset("gpt_22b"), s=2048, b=4) / 1e12
    1143.560812363776
    """
    return 3 * forward_flops(config, s, b, causal).total


def hardware_flops(config: Shape, s: int, b: int, recompute: str = "none", causal: bool = False) -> int:
    """Operations that are carried out: `model_flops` and what is computed again.

    ``"full"``: every layer's forward once more; for GPT 96Bslh²(1 + s/6h + V/16lh), Narayanan et al. (2021), eq. 3.
    ``"selective"``: the two s² products once more, 4BLs²h. Korthikanti's printed formula counts three times that; see
    `korthikanti_hardware_flops`. The head is never computed again.

    Raises:
        TypeError, ValueError: As `forward_flops`; an unknown `recompute`.

    >>> from labkit.model import preset
    >>> model = preset("gpt_175b")
    >>> round(hardware_flops(model, 2048, 64, "full") / model_flops(model, 2048, 64), 3)
    1.332
    """
    one_of("recompute", recompute, ("none", "selective", "full"))
    forward = forward_flops(config, s, b, causal)
    again = {"none": 0, "selective": forward["attention"], "full": forward.total - forward["head"]}
    return 3 * forward.total + again[recompute]


def korthikanti_hardware_flops(config: Shape, s: int, b: int) -> int:
    """Hardware FLOPs with selective recomputation as printed: 72BLsh²(1 + s/3h + V/12hL).

    Their s/3h is 24BLs²h for attention's two products. Forward and backward are 12BLs²h and one more forward is 4, so
    `hardware_flops` has 16. The paper's HFU figures were made with the printed formula: compare with them by it.

    Source: Korthikanti et al. (2022), appendix A.

    Raises:
        TypeError, ValueError: As `forward_flops`.

    >>> from labkit.model import preset
    >>> seconds, peak = 1.10, 8 * 312e12
    >>> round(100 * korthikanti_hardware_flops(preset("gpt_22b"), 2048, 4) / seconds / peak, 1)
    43.8
    """
    return model_flops(config, s, b) + 3 * forward_flops(config, s, b)["attention"]


def utilization(flops: float, seconds: float, devices: int, peak: float) -> float:
    """The share of the peak that was used: MFU from `model_flops`, HFU from `hardware_flops`.

    Only MFU compares implementations: what is computed twice raises HFU and helps nobody.

    Args:
        flops: Of one step, all devices together.
        seconds: Of that step.
        devices: How many worked.
        peak: FLOP/s of one device at the width used, 312e12 for an A100 with bf16.

    Raises:
        TypeError, ValueError: No number, or out of range.

    >>> from labkit.model import preset
    >>> flops = model_flops(preset("gpt_175b"), s=2048, b=64)
    >>> round(utilization(flops, seconds=13.75, devices=64, peak=312e12), 3)
    0.514
    """
    number("flops", flops, "operations")
    number("seconds", seconds, "seconds", above=True)
    whole("devices", devices, 1)
    number("peak", peak, "operations per second", above=True)
    return flops / (seconds * devices * peak)


def training_days(
    parameters: float, tokens: float, devices: int, flops_per_second: float, recompute: bool = True
) -> float:
    """Days = 8TP/(nX): two operations a parameter and token forward, four backward, two more with full recomputation.

    Assumption: h is large, so that attention's s² products and the head are left out.

    Args:
        parameters: P.
        tokens: T, of the whole training.
        devices: n.
        flops_per_second: X, what one device achieves (not its peak), counted with what is recomputed.
        recompute: Whether every layer is computed again in backward; if not, 6 in place of 8.

    Source: Narayanan et al. (2021), eq. 4.

    Raises:
        TypeError, ValueError: No number, or out of range.

    >>> round(training_days(175e9, tokens=300e9, devices=1024, flops_per_second=140e12))
    34
    """
    number("parameters", parameters, "parameters")
    number("tokens", tokens, "tokens")
    whole("devices", devices, 1)
    number("flops_per_second", flops_per_second, "operations per second", above=True)
    return (8 if recompute else 6) * tokens * parameters / (devices * flops_per_second) / 86400
