"""What a rank holds under each ZeRO stage: between steps, and at the worst moment of backward.

`theory.memory.model_states` says what stays; here are the buffers that come and go beside it.

Source: Rajbhandari et al. (2020), section 5; for units, Zhao et al., "PyTorch FSDP" (2023), section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.theory.communication.given import whole
from labkit.theory.memory.states import Recipe, as_recipe, model_states
from labkit.theory.memory.terms import Terms
from labkit.theory.zero.volume import check_stage, listed, padding, shards


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank.

    Attributes:
        live: When backward has ended and the optimizer has stepped once: parameters, gradients, master, optimizer,
            steps, and the padding in buffers that are not cut.
        transient: What the worst moment of backward holds besides.
    """

    live: Terms[int]
    transient: Terms[int]

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return self.live.total + self.transient.total


def held(
    units: int | Sequence[int], stage: int, ranks: int, recipe: str | Recipe = "fp32", *, root: int = 0,
    tensors: int = 0, gathered: int = 1, gathered_bytes: int | None = None,
) -> Held:  # fmt: skip
    """Bytes that a rank holds, to the byte, each cause by its name.

    ======================  ===============================================================================
    padding                 stages 1, 2: in the flat buffer of all parameters, of which each rank owns a part
    bucket                  stages 1, 2: the full gradients of the largest bucket, laid flat and padded
    gathered units          stage 3: the largest sum of `gathered` neighbours, padded, and of the root unit
    gradients of a unit     stage 3: the largest unit's, padded, before they are reduced, and the root's
    ======================  ===============================================================================

    Args:
        units: Parameters of each unit in the order of forward (stage 3) or of each bucket (below); one number is one.
        stage: ZeRO's stage, 0 to 3.
        ranks: N.
        recipe: A name that `memory.recipe` knows, with Adam, or a Recipe.
        root: Parameters of the root unit, which is gathered and has gradients as long as any other. Stage 3 only.
        tensors: Tensors of this rank's optimizer, each with a step counter.
        gathered: Units that are gathered at once besides the root: 1, or 2 with a prefetched one.
        gathered_bytes: Of a gathered parameter, and of its gradient before it is reduced; left out, the recipe's
            parameter. FSDP's mixed precision keeps fp32 shards, and gathers 2 bytes.

    Raises:
        TypeError, ValueError: As `memory.model_states`; `root` below stage 3.

    Assumptions: the bucket is counted at stage 1 too, where it is filled after backward from gradients that are all
    still there. One rank alone needs no buckets, no gathering and no padding. Activations are not counted.

    >>> held([1000, 1000, 1000], stage=3, ranks=4).transient
    {'gathered units': 4000, 'gradients of a unit': 4000}
    >>> held([1000, 1000, 1000], stage=2, ranks=4).peak
    25000
    """
    check_stage(stage)
    counts, made = listed(units, ranks), as_recipe(recipe)
    whole("root", root, 0)
    whole("gathered", gathered, 1)
    if root and stage < 3:
        raise ValueError(f"root is {root}, but stage {stage} gathers no units: count its parameters in a bucket")
    every = [*counts, root] if root else counts
    live = model_states(every, made, stage, ranks, tensors)
    if stage in (1, 2):
        live = Terms({**live, "padding": made.parameters * padding(counts, ranks)})
    if stage == 0 or ranks == 1:
        return Held(live, Terms())
    padded = [shard * ranks for shard in shards(counts, ranks)]
    if stage < 3:
        return Held(live, Terms({"bucket": made.gradients * max(padded, default=0)}))
    wide = made.parameters if gathered_bytes is None else gathered_bytes
    whole("gathered_bytes", wide, 1)
    always = shards([root], ranks)[0] * ranks
    together = max((sum(padded[n : n + gathered]) for n in range(len(padded))), default=0)
    return Held(live, Terms({
        "gathered units": wide * (always + together),
        "gradients of a unit": wide * (always + max(padded, default=0)),
    }))  # fmt: skip
