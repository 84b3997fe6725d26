"""Bytes of the model states: parameters, gradients, master weights, optimizer, for each recipe and ZeRO stage.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3
and Table 1; Micikevicius et al., "Mixed Precision Training" (2018), for master weights; Megatron-LM's
docs on its distributed optimizer, for the recipes with fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from labkit.theory.communication.given import whole
from labkit.theory.memory.shape import one_of
from labkit.theory.memory.terms import Terms


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bytes per parameter, by what they hold.

    Attributes:
        parameters: What the forward pass computes with; activations have this width too.
        gradients: What backward fills.
        copy: A second, wider copy of the gradients that the optimizer makes for its step.
        master: fp32 parameters that the optimizer updates, where those of the forward pass are narrower.
        optimizer: Moments.
        steps: Bytes of a step counter; one for each tensor, not for each parameter.
    """

    parameters: int
    gradients: int
    copy: int
    master: int
    optimizer: int
    steps: int

    def __post_init__(self) -> None:
        for field in fields(self):
            whole(field.name, getattr(self, field.name), 0)

    @property
    def total(self) -> int:
        """Bytes per parameter on one rank; step counters left out."""
        return self.parameters + self.gradients + self.copy + self.master + self.optimizer


#: Recipe → bytes per parameter of parameters, gradients, their copy, master weights, and one moment.
PRECISIONS = {
    "fp32": (4, 4, 0, 0, 4),
    "bf16_mixed": (2, 2, 0, 4, 4),
    "bf16_fp32_gradients": (2, 4, 0, 4, 4),
    "fp16_megatron": (2, 2, 4, 4, 4),
    "bf16": (2, 2, 0, 0, 2),
}
#: Optimizer → its moments, and the bytes of a tensor's step counter as torch.optim keeps it (float32).
OPTIMIZERS = {"adam": (2, 4), "momentum": (1, 0), "sgd": (0, 0)}


def recipe(precision: str = "bf16_mixed", optimizer: str = "adam") -> Recipe:
    """Bytes per parameter of a precision recipe with an optimizer.

    =====================  ==========  =========  ====  ======  =======  =====
    with Adam              parameters  gradients  copy  master  moments  total
    =====================  ==========  =========  ====  ======  =======  =====
    fp32                   4           4                        8        16
    bf16_mixed             2           2                4       8        16
    bf16_fp32_gradients    2           4                4       8        18
    fp16_megatron          2           2          4     4       8        20
    bf16                   2           2                        4        8
    =====================  ==========  =========  ====  ======  =======  =====

    `bf16_fp32_gradients` is Megatron's default: micro-batches are added up in fp32. `bf16` has nothing in fp32: small
    updates are rounded away. momentum has half of Adam's moments, sgd none.

    Raises:
        ValueError: An unknown name.

    >>> recipe("bf16_mixed").total, recipe("fp32").total, recipe("bf16_mixed", optimizer="momentum").total
    (16, 16, 12)
    """
    one_of("precision", precision, tuple(PRECISIONS))
    one_of("optimizer", optimizer, tuple(OPTIMIZERS))
    weights, gradients, copy, master, moment = PRECISIONS[precision]
    moments, steps = OPTIMIZERS[optimizer]
    return Recipe(weights, gradients, copy, master, moment * moments, steps)


def bytes_per_parameter(recipe: str | Recipe = "bf16_mixed", stage: int = 0, ranks: int = 1) -> Terms[float]:
    """Bytes that one rank holds for each parameter of the model, by category.

    With K = master + moments + copy (12 for mixed precision with Adam), p and g the bytes of a parameter and of its
    gradient: stage 0 p+g+K; 1 p+g+K/N; 2 p+(g+K)/N; 3 (p+g+K)/N. Stage 1 is Megatron's distributed optimizer:
    6 + 12/d, 4 + 16/d and 8 + 8/d bytes for bf16_fp32_gradients, fp16_megatron and fp32.

    Assumption: N divides the parameters; `model_states` pads. Step counters are left out.

    Args:
        recipe: A name that `recipe` knows, with Adam, or a Recipe.
        stage: ZeRO's stage, 0 (plain data parallelism) to 3.
        ranks: N, the size of the data-parallel group.

    Raises:
        TypeError: `recipe` is none, a number is not whole.
        ValueError: An unknown recipe, a stage above 3, no ranks.

    >>> bytes_per_parameter("bf16_mixed", stage=1, ranks=64).total * 7.5  # GB for 7.5B parameters
    31.40625
    """
    made = _given(recipe, stage, ranks)
    optimizer, gradients, weights = (ranks if stage >= least else 1 for least in (1, 2, 3))
    return Terms({
        "parameters": made.parameters / weights,
        "gradients": made.gradients / gradients + made.copy / optimizer,
        "master": made.master / optimizer,
        "optimizer": made.optimizer / optimizer,
    })  # fmt: skip


def model_states(
    parameters: int | Sequence[int], recipe: str | Recipe = "bf16_mixed", stage: int = 0, ranks: int = 1,
    tensors: int = 0,
) -> Terms[int]:  # fmt: skip
    """Bytes that one rank holds, to the byte: parameters, gradients, master, optimizer, steps.

    Assumptions: what is sharded is flattened and padded to a multiple of N, so that every rank holds ⌈Ψ/N⌉; with a
    sequence of counts each unit is padded on its own, as FSDP's units and buckets are.

    Args:
        parameters: Ψ, or the parameters of each unit that is sharded on its own.
        recipe, stage, ranks: As in `bytes_per_parameter`.
        tensors: Tensors that this rank's optimizer has, each with a step counter if the optimizer counts steps.

    Raises:
        TypeError, ValueError: As `bytes_per_parameter`; a negative count.

    >>> model_states(124_439_808, "bf16_mixed", tensors=148)["steps"]
    592
    >>> model_states(10, "fp32", stage=3, ranks=4)["parameters"]  # 12 in 4 parts of 3
    12
    """
    made = _given(recipe, stage, ranks)
    units = list(parameters) if isinstance(parameters, Sequence) else [parameters]
    for count in units:
        whole("parameters", count, 0)
    whole("tensors", tensors, 0)
    whole_model, shard = sum(units), sum(-(-count // ranks) for count in units)
    optimizer, gradients, weights = (shard if stage >= least else whole_model for least in (1, 2, 3))
    return Terms({
        "parameters": made.parameters * weights,
        "gradients": made.gradients * gradients + made.copy * optimizer,
        "master": made.master * optimizer,
        "optimizer": made.optimizer * optimizer,
        "steps": made.steps * tensors,
    })  # fmt: skip


def as_recipe(given: str | Recipe) -> Recipe:
    if isinstance(given, Recipe):
        return given
    if not isinstance(given, str):
        raise TypeError(f"the recipe is {given!r}: expected a name, such as 'bf16_mixed', or recipe(…)")
    return recipe(given)


def _given(given: str | Recipe, stage: int, ranks: int) -> Recipe:
    whole("stage", stage, 0)
    if stage > 3:
        raise ValueError(f"stage is {stage}: ZeRO has 1, 2 and 3, and 0 is plain data parallelism")
    whole("ranks", ranks, 1)
    return as_recipe(given)
