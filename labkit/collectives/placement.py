"""Where a parameter lives: which groups shard it, replicate it, or still have to add up its gradient."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_NAME, _SUMMED = "_labkit_placement", "_labkit_summed"


@dataclass(frozen=True)
class Placement:
    """Groups of ranks, by what a parameter is to them.

    Attributes:
        sharded: Each rank holds another part of it: a norm adds up over these groups.
        replicated: Each rank holds the same: a norm counts it once.
        partial: Each rank has a part of its *gradient's sum*, which is still to be added up.
        tied: A name that parameters share which are one, such as an embedding and the output head on other ranks.
    """

    sharded: tuple[Any, ...] = ()
    replicated: tuple[Any, ...] = ()
    partial: tuple[Any, ...] = ()
    tied: Hashable = None


def mark(param: torch.Tensor, sharded: Any = (), replicated: Any = (), partial: Any = (), tied: Hashable = None) -> Any:
    """Note where a parameter lives. A second call replaces the first.

    Args:
        param: The parameter; it keeps the note, also when it is moved or cast in place.
        sharded, replicated, partial: Tuples of process groups; see `Placement`.
        tied: A name for what is one parameter in several places.

    Returns:
        `param`.

    Raises:
        TypeError: `param` is no tensor, or one of the three is no tuple.
        ValueError: A group stands under both `sharded` and `replicated`.

    >>> weight = mark(torch.nn.Parameter(torch.ones(2)), tied="embedding")
    >>> placement(weight).tied
    'embedding'
    """
    if not isinstance(param, torch.Tensor):
        raise TypeError(f"mark was given {type(param).__name__}: expected a parameter, such as linear.weight")
    for name, groups in (("sharded", sharded), ("replicated", replicated), ("partial", partial)):
        if not isinstance(groups, tuple):
            raise TypeError(f"{name} is {groups!r}: expected a tuple of process groups, such as (group,)")
        for group in groups:
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise TypeError(f"{name} holds {group!r}: expected process groups, or None for the whole world")
    if both := [g for g in sharded if any(g is r for r in replicated)]:
        raise ValueError(f"{both[0]!r} is under sharded and under replicated: a group either shards or replicates")
    setattr(param, _NAME, Placement(sharded, replicated, partial, tied))
    return param


def placement(param: torch.Tensor) -> Placement:
    """What `mark` noted; nothing noted is a parameter of this rank alone."""
    return getattr(param, _NAME, Placement())


def note_summed(grad: torch.Tensor) -> None:
    """Note that a gradient marked as partial has been added up over its groups, until it changes again."""
    setattr(grad, _SUMMED, grad._version)


def is_summed(grad: torch.Tensor) -> bool:
    """Whether the last change of a partial gradient was its sum."""
    return getattr(grad, _SUMMED, None) == grad._version
