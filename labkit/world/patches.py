"""What a learner's program has changed in torch itself: such ranks are not used again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


class Patches:
    """Compares the names of torch with what they were when this was made.

    The values are kept, not their ids: the id of one that is gone may belong to another soon. Takes about 0.1 ms.

    >>> known = Patches()
    >>> known.any()
    False
    """

    def __init__(self) -> None:
        self._known = [(place, dict(place)) for place in _namespaces()]

    def any(self) -> bool:
        """Whether a name is gone, new, or means something else. A module that was imported late is no change."""
        return any(_differs(place, known) for place, known in self._known)


def _namespaces() -> list[Mapping[str, Any]]:
    return [vars(torch), vars(dist), vars(torch.nn), vars(torch.nn.functional), vars(torch.Tensor)]


def _differs(place: Mapping[str, Any], known: dict[str, Any]) -> bool:
    changed = (name for name, value in known.items() if place.get(name) is not value)
    if any(not _is_torchs(place.get(name), known[name]) for name in changed):
        return True
    new = place.keys() - known.keys() if len(place) != len(known) else ()
    return any(not isinstance(place.get(name), ModuleType) for name in new)


def _is_torchs(new: Any, old: Any) -> bool:
    """Whether torch itself has put a function around one of its own: with its compiler, which optimizers import."""
    code = getattr(new, "__code__", None)
    wraps = getattr(new, "__wrapped__", None) is old
    return wraps and code is not None and code.co_filename.startswith(os.path.dirname(torch.__file__))
