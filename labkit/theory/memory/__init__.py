"""Who holds which bytes, and how many operations a step takes: exact numbers from a model's config.

Bytes are whole numbers wherever a real model is meant, so that a meter can be held against them. A sum comes as
`Terms`, name → bytes, whose ``total`` is the sum: what adds up stays visible. Notation as in the papers: s tokens of a
sequence, b sequences of a micro-batch, h hidden, a heads, L layers, V vocabulary, t tensor-parallel ranks, N
data-parallel ranks.

- `parameters`, `parameter_parts`, `parameter_shapes`, `closed_form`: Ψ.
- `recipe`, `bytes_per_parameter`, `model_states`: why a parameter costs 16 bytes, and what ZeRO's stages shard.
- `layer_activations` and its neighbours; `segmented` and its; `layers_in_flight`: what is kept for backward.
- `held`, `fits`, `cheapest_stage`: what a rank holds in all.
- `model_flops`, `hardware_flops`, `utilization`, `training_days`: operations.
- `gb`, `gib`: 10⁹ and 2³⁰ bytes, never mixed.

>>> from labkit.model import preset
>>> gb(model_states(parameters(preset("gpt_7_5b")), "bf16_mixed", stage=1, ranks=64).total)
'31.3 GB'
"""

from labkit.theory.memory.counting import closed_form, parameter_parts, parameter_shapes, parameters, part_of
from labkit.theory.memory.fitting import Fits, Held, activations, cheapest_stage, fits, held
from labkit.theory.memory.flops import (
    forward_flops,
    hardware_flops,
    korthikanti_hardware_flops,
    model_flops,
    training_days,
    utilization,
)
from labkit.theory.memory.in_flight import layers_in_flight
from labkit.theory.memory.recompute import best_segments, every_layer_limit, segmented, segmented_terms
from labkit.theory.memory.saved import (
    attention_crossover,
    embedding_activations,
    head_activations,
    layer_activations,
    logits,
)
from labkit.theory.memory.setup import Setup
from labkit.theory.memory.shape import Shape
from labkit.theory.memory.states import Recipe, bytes_per_parameter, model_states, recipe
from labkit.theory.memory.terms import Terms, gb, gib

__all__ = [
    "Fits", "Held", "Recipe", "Setup", "Shape", "Terms", "activations", "attention_crossover", "best_segments",
    "bytes_per_parameter", "cheapest_stage", "closed_form", "embedding_activations", "every_layer_limit", "fits",
    "forward_flops", "gb", "gib", "hardware_flops", "head_activations", "held", "korthikanti_hardware_flops",
    "layer_activations", "layers_in_flight", "logits", "model_flops", "model_states", "parameter_parts",
    "parameter_shapes", "parameters", "part_of", "recipe", "segmented", "segmented_terms", "training_days",
    "utilization",
]  # fmt: skip
