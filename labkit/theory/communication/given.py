"""What may be given: the algorithms of each operation, and checks that name the value and what was expected."""

from __future__ import annotations

import math

#: Operation → the algorithms whose messages are known; what torch's own backends do inside is not.
ALGORITHMS = {
    "all_reduce": ("ring", "tree", "central", "mesh", "halving_doubling", "hierarchical"),
    "reduce_scatter": ("ring", "mesh"),
    "all_gather": ("ring", "mesh"),
    "broadcast": ("tree", "central"),
    "reduce": ("tree", "central"),
    "scatter": ("central",),
    "gather": ("central",),
    "all_to_all": ("mesh",),
    "barrier": ("tree",),
}
ROOTED = ("broadcast", "reduce", "scatter", "gather")
SEGMENTED = ("ring", "hierarchical")


def check_call(
    operation: str, algorithm: str, ranks: int, segments: int = 1, node_size: int | None = None, root: int = 0
) -> None:
    """Raise unless the operation has the algorithm, and the algorithm has what else was given."""
    check_operation(operation)
    if algorithm not in ALGORITHMS[operation]:
        known = ", ".join(map(repr, ALGORITHMS[operation]))
        raise ValueError(f"{operation} has no algorithm {algorithm!r} here: expected one of {known}")
    whole("ranks", ranks, 1)
    whole("segments", segments, 1)
    if segments > 1 and algorithm not in SEGMENTED:
        raise ValueError(f"segments is {segments}, but {algorithm} does not cut its messages: leave it at 1")
    if algorithm == "hierarchical":
        if node_size is None:
            raise ValueError("hierarchical needs node_size, the number of ranks of a node, such as node_size=8")
        whole("node_size", node_size, 1)
    elif node_size is not None:
        raise ValueError(f"node_size is {node_size}, but {algorithm} knows no nodes: leave it out, or use hierarchical")
    a_rank("root", root, ranks)
    if root and operation not in ROOTED:
        raise ValueError(f"root is {root}, but {operation} with {algorithm} has none to choose: leave it at 0")


def check_operation(operation: str) -> None:
    if operation not in ALGORITHMS:
        raise ValueError(f"operation is {operation!r}: expected one of {', '.join(map(repr, ALGORITHMS))}")


def whole(name: str, value: object, least: int) -> None:
    """Raise unless the value is a whole number, `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: expected a whole number")
    if value < least:
        raise ValueError(f"{name} is {value}: expected {least} or more")


def a_rank(name: str, value: object, ranks: int) -> None:
    """Raise unless the value is a rank."""
    whole(name, value, 0)
    if value not in range(ranks):
        raise ValueError(f"{name} is {value}, but there are {ranks} ranks: expected 0 to {ranks - 1}")


def number(name: str, value: object, unit: str, least: float = 0.0, *, above: bool = False) -> None:
    """Raise unless the value is a finite number, `least` or more (with `above`: more than that)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: expected a number of {unit}")
    if not math.isfinite(value) or value < least or (above and value == least):
        bound = f"more than {least:g}" if above else f"{least:g} or more"
        raise ValueError(f"{name} is {value!r}: expected {bound} {unit}")
