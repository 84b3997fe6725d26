"""`checkpointed`: a whole model told what to recompute."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from labkit.tricks.checkpoint import check_options, checkpoint
from labkit.tricks.segments import Segment, check_segments, split

Model = TypeVar("Model", bound=torch.nn.Module)
POLICIES = ("none", "selective", "full")


def checkpointed(model: Model, policy: str = "full", segments: int | None = None, **options: bool) -> Model:
    """Tell a model what to keep for backward; call it again to tell it something else.

    - ``"full"``: the inputs of c segments of its layers; everything inside is recomputed, one forward more (+33 % of
      the operations).
    - ``"selective"``: all but attention's core (scores, softmax, its dropout, the product with the values), which is
      what grows with s² and costs few operations.
    - ``"none"``: everything, as without this function.

    Parameters and their names stay as they are. Share the model's layers among ranks (`tensor_parallel`, `pipeline`)
    first: both put new modules in place.

    Args:
        model: For ``"full"`` it has its layers in ``model.blocks``, a ModuleList that its forward goes through in order
            (labkit's Transformer, a pipeline's part). For ``"selective"``, modules inside it have a ``run_core``, as
            `labkit.model.Attention`. Changed in place.
        policy: One of the three.
        segments: c of ``"full"``; default: every layer is a segment.
        **options: Those of `checkpoint`: offload, preserve_rng, early_stop.

    Returns:
        `model`.

    Raises:
        TypeError: `model`, `segments` or an option is something else.
        ValueError: An unknown policy; `segments` out of range, or with another policy than ``"full"``; no such modules.

    Example:
        >>> from labkit.model import Transformer, preset
        >>> model = checkpointed(Transformer(preset("tiny_gpt", layers=4)), segments=2)
        >>> len(model.blocks), [len(segment.layers) for segment in model.blocks]
        (4, [2, 2])

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 4 and 5.
    """
    _check(model, policy, segments)
    check_options(options)
    for part in _with_core(model):
        part.__dict__.pop("run_core", None)
        if policy == "selective":
            part.run_core = partial(checkpoint, **options)  # type: ignore[assignment, arg-type]
    blocks = getattr(model, "blocks", None)
    if policy == "full":
        model.blocks = _told(blocks, segments, options)  # type: ignore[arg-type]
    elif isinstance(blocks, Segments):
        model.blocks = torch.nn.ModuleList(blocks._modules.values())
    return model


def _check(model: object, policy: str, segments: int | None) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}: expected a torch.nn.Module")
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(map(repr, POLICIES))}")
    if segments is not None and policy != "full":
        raise ValueError(f"segments={segments} with policy={policy!r}: expected policy='full', or no segments")
    if policy == "selective" and not _with_core(model):
        raise ValueError("no module in the model has a run_core, as labkit.model.Attention has: expected one; or call "
                         "checkpoint round the core of its attention")  # fmt: skip
    if policy == "full":
        blocks = getattr(model, "blocks", None)
        if not isinstance(blocks, torch.nn.ModuleList) or not len(blocks):
            raise ValueError("the model has no layers in model.blocks: expected a torch.nn.ModuleList; or call "
                             "checkpoint_sequential in its forward")  # fmt: skip
        check_segments(len(blocks) if segments is None else segments, len(blocks))


def _with_core(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [part for part in model.modules() if hasattr(part, "run_core")]


class Segments(torch.nn.ModuleList):
    """Layers that are gone through in segments, each under a checkpoint; indices and names are the layers'."""

    segments: int
    options: dict[str, bool]

    def __getitem__(self, index: Any) -> Any:
        """A layer; a slice is plain layers."""
        if isinstance(index, slice):
            return torch.nn.ModuleList(list(self._modules.values())[index])
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return (Checkpointed(segment, self.options) for segment in split(list(self._modules.values()), self.segments))


class Checkpointed:
    """A segment that calls its layers under a checkpoint."""

    def __init__(self, segment: Segment, options: dict[str, bool]) -> None:
        self.layers, self._segment, self._options = segment.layers, segment, options

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return checkpoint(self._segment, *args, **kwargs, **self._options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a segment under a checkpoint has no {name!r}: share the model among ranks before "
                             "checkpointed(model), or take its layers as model.blocks[n]")  # fmt: skip


def _told(blocks: torch.nn.ModuleList, segments: int | None, options: dict[str, bool]) -> Segments:
    told = Segments(blocks._modules.values())
    told.segments, told.options = segments or len(blocks), options
    return told
