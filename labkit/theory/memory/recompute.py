"""Checkpoints: how many segments to cut the layers into, so that what is kept and what is recomputed take least.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4, for segments; Korthikanti et
al. (2022), section 5, for the bytes.
"""

from __future__ import annotations

from math import sqrt

from labkit.theory.communication.given import number, whole
from labkit.theory.memory.terms import Terms


def segmented(layers: int, segments: int, kept: float, inside: float) -> float:
    """What c segments of L layers hold at most: c·A_in + ⌈L/c⌉·A_int, in the unit of the two numbers.

    The inputs of all segments, and everything inside the one that backward is in. Assumption: layers all alike.

    Args:
        layers: L.
        segments: c, from 1 (recompute everything at once) to L (each layer keeps its own input).
        kept: A_in, a layer's input: 2sbh bytes at 16 bits.
        inside: A_int, what a layer keeps without checkpoints: 34sbh bytes with fused attention, or
            ``layer_activations(…).total``.

    Raises:
        TypeError: No number.
        ValueError: Out of range, more segments than layers.

    >>> [segmented(64, c, kept=2, inside=34) for c in (8, 32, 64)]  # in sbh
    [288, 132, 162]
    """
    _check(layers, segments, kept, inside)
    return segments * kept + -(-layers // segments) * inside


def segmented_terms(layers: int, segments: int, kept: float, inside: float) -> Terms[float]:
    """What `labkit.tricks.checkpoint_sequential` holds at most, to the byte: A_in less than `segmented` says.

    What a segment keeps inside includes its own input, which `segmented` adds a second time. The peak is the beginning
    of backward: all inputs are there, and the last segment is one of the longest.

    Args:
        layers, segments, kept, inside: As in `segmented`.

    Returns:
        "inputs of other segments" and "inside one segment", at the peak.

    Raises:
        TypeError, ValueError: As `segmented`.

    >>> segmented_terms(64, 32, kept=2, inside=34)
    {'inputs of other segments': 62, 'inside one segment': 68}
    >>> [segmented_terms(64, c, kept=2, inside=34).total for c in (32, 40, 64)], segmented(64, 40, kept=2, inside=34)
    ([130, 146, 160], 148)
    """
    _check(layers, segments, kept, inside)
    longest = -(-layers // segments)
    return Terms({"inputs of other segments": (segments - 1) * kept, "inside one segment": longest * inside})


def _check(layers: int, segments: int, kept: float, inside: float) -> None:
    whole("layers", layers, 1)
    whole("segments", segments, 1)
    if segments > layers:
        raise ValueError(f"segments is {segments}, but there are {layers} layers: expected 1 to {layers}")
    number("kept", kept, "bytes")
    number("inside", inside, "bytes")


def best_segments(layers: int, kept: float, inside: float) -> float:
    """c = √(L·A_int/A_in), where `segmented` is least if c may be any number; it is √L only if A_in = A_int.

    For a transformer √(17L). Above L the answer is L: each layer keeps its own input.

    Raises:
        TypeError, ValueError: As `segmented`; 0 bytes.

    >>> round(best_segments(64, kept=2, inside=34), 1)
    33.0
    """
    whole("layers", layers, 1)
    number("kept", kept, "bytes", above=True)
    number("inside", inside, "bytes", above=True)
    return min(float(layers), max(1.0, sqrt(layers * inside / kept)))


def every_layer_limit(kept: float, inside: float) -> float:
    """The L below which checkpointing every layer holds less than √L segments do: (A_int/A_in)².

    L·A_in + A_int = √L·(A_in + A_int) has the solutions L = 1 and L = (A_int/A_in)².

    Raises:
        TypeError, ValueError: As `best_segments`.

    >>> every_layer_limit(kept=2, inside=34)
    289.0
    """
    number("kept", kept, "bytes", above=True)
    number("inside", inside, "bytes", above=True)
    return (inside / kept) ** 2
