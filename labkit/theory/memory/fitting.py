"""What a rank holds in all, and whether that fits a card."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from labkit.theory.communication.given import number, whole
from labkit.theory.memory.counting import parameter_shapes
from labkit.theory.memory.saved import PLAIN, embedding_activations, head_activations, layer_activations, logits
from labkit.theory.memory.setup import Setup
from labkit.theory.memory.shape import Shape
from labkit.theory.memory.states import Recipe, as_recipe, model_states
from labkit.theory.memory.terms import Terms


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank at the worst moment.

    Attributes:
        states: parameters, gradients, master, optimizer, steps.
        activations: Kept for backward.
        buffers: What comes and goes: the loss's gradients, gathered parameters, gradients before they are reduced.
    """

    states: Terms[int]
    activations: Terms[int]
    buffers: Terms[int]

    @property
    def total(self) -> int:
        """Bytes."""
        return self.states.total + self.activations.total + self.buffers.total

    @property
    def categories(self) -> Terms[int]:
        """Bytes by the meter's categories, in its order."""
        totals = {"activations": self.activations.total, "buffers": self.buffers.total, "other": 0}
        return Terms({**self.states, **totals})

    @property
    def groups(self) -> Terms[int]:
        """Bytes as pictures and people group them: the optimizer is master weights, moments and step counters."""
        states = self.states
        return Terms({
            "parameters": states["parameters"],
            "gradients": states["gradients"],
            "optimizer": states["master"] + states["optimizer"] + states["steps"],
            "activations": self.activations.total,
            "buffers": self.buffers.total,
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fits:
    """An answer: ``if fits(…)``, and what to say of it.

    Attributes:
        capacity: Bytes of the card.
        held: What is to be held.
    """

    capacity: float
    held: Held

    def __bool__(self) -> bool:
        return self.held.total <= self.capacity

    @property
    def spare(self) -> float:
        """Bytes left; negative: missing."""
        return self.capacity - self.held.total

    @property
    def largest(self) -> tuple[str, int]:
        """The largest of `Held.groups`, and its bytes."""
        groups = self.held.groups
        name = max(groups, key=groups.__getitem__)
        return name, groups[name]


def activations(config: Shape, s: int, b: int, setup: Setup = PLAIN, layers: int | None = None) -> Terms[int]:
    """Bytes that a whole model keeps for backward: embedding, layers, head and loss.

    With recomputation, "recomputed layer" is what the one layer that backward is in fills again.

    Args:
        config, s, b, setup: As for `layer_activations`.
        layers: Layers' worth that are held; default: all. For a pipeline's stage, `layers_in_flight` says it.

    Raises:
        TypeError, ValueError: As `layer_activations`.

    >>> from labkit.model import preset
    >>> activations(preset("gpt_22b"), 2048, 4, Setup(recompute="full"))["layers"] / (2 * 2048 * 4 * 6144)
    48.0
    """
    count = config.layers if layers is None else layers
    whole("layers", count, 0)
    one = layer_activations(config, s, b, setup).total
    terms = Terms({**embedding_activations(config, s, b, setup), "layers": count * one})
    if setup.recompute != "none":
        everything = layer_activations(config, s, b, replace(setup, recompute="none")).total
        terms["recomputed layer"] = everything - (one if setup.recompute == "selective" else 0)
    return Terms({**terms, **head_activations(config, s, b, setup)})


def held(
    config: Shape, s: int, b: int, recipe: str | Recipe = "bf16_mixed", stage: int = 0, ranks: int = 1,
    setup: Setup = PLAIN,
) -> Held:  # fmt: skip
    """What one rank holds when backward begins: the worst moment, but for tiny batches, where the step is.

    Assumptions: no pipeline; activations have the width of the recipe's parameters (so `setup.width` is not used);
    backward begins (all activations, the loss's own gradients), and the parameters' gradients, which are made later,
    are counted already; stages 2 and 3 hold the gradients of one unit before they are reduced, stage 3 one gathered
    unit (no prefetching), a unit being a layer, the embedding or the head. Not counted: what operators need inside,
    gradients of activations, fragments that the allocator cannot use, the CUDA context.

    Args:
        config, s, b: The model, tokens of a sequence, sequences of a micro-batch.
        recipe: A name that `memory.recipe` knows, with Adam, or a Recipe.
        stage: ZeRO's stage, 0 to 3.
        ranks: N, data-parallel ranks; with t in `setup` there are N·t devices.
        setup: How activations are kept, and t.

    Raises:
        TypeError, ValueError: As `model_states` and `layer_activations`.

    >>> from labkit.model import preset
    >>> held(preset("llama3_8b"), s=8192, b=1, stage=3, ranks=64).categories["optimizer"]
    1003782656
    """
    made = as_recipe(recipe)
    setup = replace(setup, width=made.parameters)
    shapes = parameter_shapes(config, setup.tensor_parallel)
    states = model_states(sum(map(prod, shapes.values())), made, stage, ranks, tensors=len(shapes))
    units: Counter[str] = Counter()
    for name, shape in shapes.items():
        words = name.split(".")
        units[".".join(words[:2]) if words[0] == "blocks" else words[0]] += prod(shape)
    buffers = logits(config, s, b, setup)
    if stage >= 2 and ranks > 1:
        buffers["gradients before reduction"] = made.gradients * max(units.values())
    if stage == 3 and ranks > 1:
        buffers["gathered parameters"] = made.parameters * max(units.values())
    return Held(states, activations(config, s, b, setup), buffers)


def fits(
    capacity: float, config: Shape, s: int, b: int, recipe: str | Recipe = "bf16_mixed", stage: int = 0, ranks: int = 1,
    setup: Setup = PLAIN,
) -> Fits:  # fmt: skip
    """Whether a rank's bytes fit a card, and what fills it.

    Args:
        capacity: Bytes of the card; 80e9 is 80 GB, 80 * 2**30 is 80 GiB.
        config, s, b, recipe, stage, ranks, setup: As for `held`.

    Raises:
        TypeError, ValueError: As `held`; a capacity that is no number above 0.

    >>> from labkit.model import preset
    >>> answer = fits(80e9, preset("gpt_7_5b"), s=2048, b=1, setup=Setup(recompute="full"))
    >>> bool(answer), answer.largest[0]
    (False, 'optimizer')
    """
    number("capacity", capacity, "bytes", above=True)
    return Fits(capacity, held(config, s, b, recipe, stage, ranks, setup))


def cheapest_stage(
    capacity: float, config: Shape, s: int, b: int, recipe: str | Recipe = "bf16_mixed", ranks: int = 1,
    setup: Setup = PLAIN,
) -> int | None:  # fmt: skip
    """The lowest ZeRO stage that fits, since each stage moves as much as the one before or more; None if none does.

    Raises:
        TypeError, ValueError: As `fits`.

    >>> from labkit.model import preset
    >>> cheapest_stage(80e9, preset("llama3_70b"), s=4096, b=1, ranks=64, setup=Setup(recompute="full"))
    3
    """
    return next((z for z in range(4) if fits(capacity, config, s, b, recipe, z, ranks, setup)), None)
