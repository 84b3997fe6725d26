"""Notices when a rank uses what it receives before it has waited for it: it may be there by then, or not.

Whether the numbers come out right is then chance, so the verdict does not depend on them. Not seen: what NumPy does.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from labkit.show.words import say
from labkit.world.group import RecordingGroup
from labkit.world.journal import Entry
from labkit.world.place import at, learners_line

#: Operations that read elements; others, such as `empty_like`, only ask for sizes.
READS = {
    "__add__", "__iadd__", "__radd__", "__setitem__", "add", "add_", "cat", "clone", "copy_", "div", "div_", "hstack",
    "index_add_", "item", "mul", "mul_", "stack", "sub", "sub_", "sum", "tolist", "concat", "to",
}  # fmt: skip


class Arrivals:
    """``with Arrivals() as seen: …``: afterwards `seen.told` is the first such use, in words, or ``""``.

    Somebody must tell it of operations, by `look`: `labkit.checks.trial.Meter` sees all of them.
    """

    def __init__(self) -> None:
        self.told = ""
        self._receives: list[tuple[weakref.ref[torch.Tensor], Entry]] = []

    def __enter__(self) -> Arrivals:
        self._before = receive = RecordingGroup._receive

        def noted(group: RecordingGroup, method: str, tensors: list[torch.Tensor], *more: Any) -> Any:
            work = receive(group, method, tensors, *more)
            self._receives.append((weakref.ref(tensors[0]), work.entry))
            return work

        setattr(RecordingGroup, "_receive", noted)  # noqa: B010  # mypy lets nobody assign a method
        return self

    def __exit__(self, *exc: object) -> None:
        setattr(RecordingGroup, "_receive", self._before)  # noqa: B010

    def look(self, name: str, tensors: list[torch.Tensor]) -> None:
        """An operation is about to be done with these tensors."""
        if self.told or name not in READS:
            return
        self._receives = [(ref, entry) for ref, entry in self._receives if not entry.collected]
        for ref, entry in self._receives:
            arriving = ref()
            if arriving is not None and any(_overlap(arriving, tensor) for tensor in tensors):
                place = at(learners_line(sys._getframe(1)))
                self.told = f"{say('check.hasty', rank=entry.operation.rank)}{place}"


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    a, b = one.data_ptr(), other.data_ptr()
    return a < b + other.nbytes and b < a + one.nbytes
