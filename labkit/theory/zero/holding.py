"""What a rank holds under each ZeRO stage: between steps, and at the worst moment of backward.

`theory.memory.model_states` says what stays; here are the buffers that come and go beside it.

Source: Rajbhandari et al. (2020), section 5; for units, Zhao et al., "PyTorch FSDP" (2023), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.theory.communication.given import whole
from labkit.theory.memory.states import Recipe, as_recipe, model_states
from labkit.theory.memory.terms import Terms
from labkit.theory.zero.volume import check_stage, listed, padding, shards


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank; activations are not counted.

    Attributes:
        live: After backward, before the gradients are set to nothing: parameters, gradients, master, optimizer, steps,
            and the padding in buffers that are not cut.
        worst: The same at the worst moment of backward, when not all gradients need be there, with what comes and goes.
    """

    live: Terms[int]
    worst: Terms[int]

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return self.worst.total


def held(
    units: int | Sequence[int], stage: int, ranks: int, recipe: str | Recipe = "fp32", *, root: int = 0,
    tensors: int = 0, prefetch: int = 0, gathered_bytes: int | None = None, largest: int = 0,
    accumulated: bool = False,
) -> Held:  # fmt: skip
    """Bytes that a rank holds, to the byte, each cause by its name.

    ====================  =================================================================================
    padding               stages 1, 2: in the flat buffer of all parameters, of which each rank owns a part
    bucket                stages 1, 2: the full gradients of a bucket, laid flat and padded
    gathered units        stage 3: the root, the unit that is in backward, and those that are prefetched
    full gradients        stage 3: of the root, of the unit, and of the one before whose reduce-scatter is under way
    reduced shard         what a reduce-scatter has made and is still to be added to the shard that is there
    arriving gradient     of one parameter, which exists once more while it is laid into the flat buffer
    ====================  =================================================================================

    Args:
        units: Parameters of each unit in the order of forward (stage 3), or of each bucket in the order in which
            they are reduced (below); one number is one.
        stage: ZeRO's stage, 0 to 3.
        ranks: N.
        recipe: A name that `memory.recipe` knows, with Adam, or a Recipe.
        root: Parameters of the root unit, which is gathered and has gradients as long as any other. Stage 3 only.
        tensors: Tensors of this rank's optimizer, each with a step counter.
        prefetch: Stage 3: units gathered ahead. With any, a unit's reduce-scatter goes on beside the next backward.
        gathered_bytes: Of a gathered parameter, and of its gradient before it is reduced; left out, the recipe's
            parameter. FSDP's mixed precision keeps fp32 shards, and gathers 2 bytes.
        largest: Elements of the parameter that arrives at the worst moment; the largest one is an upper bound.
        accumulated: An earlier micro-batch has left its gradients.

    Raises:
        TypeError, ValueError: As `memory.model_states`; `root` or `prefetch` below stage 3.

    Assumptions: stage 1 fills a bucket when backward has ended and all gradients are there. One rank alone needs no
    buckets and no gathering.

    >>> held([1000, 1000, 1000], stage=3, ranks=4).worst.without_name("master", "steps")
    {'parameters': 3000, 'gradients': 2000, 'optimizer': 6000, 'gathered units': 4000, 'full gradients': 4000}
    >>> held([1000, 1000, 1000], stage=2, ranks=4).peak, held([1000, 1000, 1000], stage=1, ranks=4).peak
    (25000, 34000)
    """
    check_stage(stage)
    counts, made = listed(units, ranks), as_recipe(recipe)
    for name, value in (("root", root), ("prefetch", prefetch), ("largest", largest)):
        whole(name, value, 0)
        if value and stage < 3 and name != "largest":
            raise ValueError(f"{name} is {value}, but stage {stage} gathers no units: leave it out")
    live = model_states([*counts, root] if root else counts, made, stage, ranks, tensors)
    if stage in (1, 2):
        live = Terms({**live, "padding": made.parameters * padding(counts, ranks)})
    if stage == 0 or ranks == 1:
        return Held(live, live)
    wide = made.parameters if gathered_bytes is None else gathered_bytes
    whole("gathered_bytes", wide, 1)
    if stage < 3:
        moments = _buckets(counts, stage, ranks, made.gradients, largest, accumulated)
    else:
        moments = _units(counts, root, ranks, (made.gradients, wide), largest, prefetch, accumulated)
    worst = max(moments, key=lambda moment: moment.total)
    return Held(live, Terms({**live, **{name: n for name, n in worst.items() if n or name in live}}))


def _buckets(
    counts: list[int], stage: int, ranks: int, width: int, largest: int, accumulated: bool
) -> Iterator[Terms[int]]:
    """What each bucket's turn adds: when its last gradient comes, and when it is reduced."""
    parts, kept = shards(counts, ranks), accumulated and stage == 2
    for n, part in enumerate(parts):
        bucket = width * part * ranks
        if stage == 1:  # this bucket's gradients leave it one by one, the others' are all there
            yield Terms({"gradients": width * (sum(parts[:n]) + sum(counts[n:])), "bucket": bucket})
            continue
        there = width * sum(parts if kept else parts[:n])
        yield Terms({"gradients": there, "bucket": bucket, "arriving gradient": width * largest})
        yield Terms({"gradients": there, "bucket": bucket, "reduced shard": width * part})


def _units(
    counts: list[int], root: int, ranks: int, widths: tuple[int, int], largest: int, prefetch: int, accumulated: bool
) -> Iterator[Terms[int]]:
    """What the end of each unit's backward adds, before it is freed; widths: of a shard's gradient, of what is full."""
    width, wide = widths
    parts, rest = shards(counts, ranks), shards([root], ranks)[0]
    for n in range(len(parts)):
        under_way = parts[n + 1 : n + 2] if prefetch else []
        ready = sum(parts) + rest if accumulated else sum(parts[n + 1 + len(under_way) :])
        yield Terms({
            "gradients": width * ready,
            "gathered units": wide * ranks * (rest + sum(parts[max(0, n - prefetch) : n + 1])),
            "full gradients": wide * ranks * (rest + parts[n] + sum(under_way)),
            "reduced shard": wide * sum(under_way),
            "arriving gradient": wide * largest,
        })  # fmt: skip
