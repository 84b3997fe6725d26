"""Layers in c segments: the inputs of all segments are kept, and the inside of the one that backward is in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from labkit.tricks.checkpoint import check_options, checkpoint

Layer = Callable[..., torch.Tensor]


def checkpoint_sequential(
    layers: Sequence[Layer], segments: int, x: torch.Tensor, *args: Any, **options: bool
) -> torch.Tensor:
    """Call layers one after another, in c segments, each under a `checkpoint`.

    With L layers alike it holds c inputs and the inside of ⌈L/c⌉ layers at most, `labkit.theory.memory.segmented`: when
    backward begins, in the last segment, which is one of the longest. (With the longest ones first less would be held
    where c does not divide L: they would have their turn when other inputs are gone.) ``segments=len(layers)`` keeps
    each layer's input; ``segments=1`` only `x`.

    Args:
        layers: Each takes (x, *args) and returns the next one's x.
        segments: c, from 1 to L. The last L mod c segments have a layer more.
        x: Of the first layer.
        *args: Of every layer, such as a mask.
        **options: Those of `checkpoint`: offload, preserve_rng, early_stop.

    Returns:
        What the last layer returns.

    Raises:
        TypeError, ValueError: `segments` is no whole number from 1 to L, `layers` no list of what can be called, or an
            option is none.

    Example:
        >>> layers = [torch.nn.Linear(4, 4) for _ in range(6)]
        >>> checkpoint_sequential(layers, 2, torch.ones(1, 4)).shape
        torch.Size([1, 4])

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1; with this name in torch.
    """
    found = _checked(layers)
    check_options(options)
    for segment in split(found, segments):
        x = checkpoint(segment, x, *args, **options)
    return x


def _checked(layers: Any) -> list[Layer]:
    """
    Raises:
        TypeError: It is no list of what can be called.
    """
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers is {type(layers).__name__}: expected a list of layers, such as model.blocks")
    found = list(layers)
    for layer in found:
        if not callable(layer):
            raise TypeError(f"layers holds {type(layer).__name__}: expected modules or functions")
    return found


class Segment:
    """Some layers, called one after another.

    >>> Segment([torch.sin, torch.cos])(torch.zeros(1))
    tensor([1.])
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


def split(layers: Sequence[Layer], segments: int) -> list[Segment]:
    """c segments of ⌊L/c⌋ layers, then of ⌈L/c⌉.

    >>> [len(segment.layers) for segment in split([torch.sin] * 16, 5)]
    [3, 3, 3, 3, 4]
    """
    check_segments(segments, len(layers))
    size, longer = divmod(len(layers), segments)
    shorter = segments - longer
    starts = [n * size + max(0, n - shorter) for n in range(segments + 1)]
    return [Segment(layers[a:b]) for a, b in pairwise(starts)]


def check_segments(segments: int, layers: int) -> None:
    """
    Raises:
        TypeError, ValueError: It is no number of segments.
    """
    if isinstance(segments, bool) or not isinstance(segments, int):
        raise TypeError(f"segments is {segments!r}: expected a whole number")
    if not layers:
        raise ValueError("there are no layers: expected at least one")
    if not 1 <= segments <= layers:
        raise ValueError(f"segments={segments}: expected 1 to {layers}, the number of layers")
