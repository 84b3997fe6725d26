"""What ranks made together, against what one process makes alone: values and gradients by name."""

from __future__ import annotations

import re
from typing import Any

import torch

from labkit.checks.exercise import Case
from labkit.checks.gradients import Backward, Numbers, near
from labkit.show.words import count, say

#: What stands for tensors, where a function returned something else; it is what the verdict says.
Made = list[Backward] | str


def strange(value: Any, shape: tuple[int, ...], what: str) -> str:
    """In words, if a value is no tensor of that shape; ``""`` if it is one."""
    if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
        return ""
    have = say("alone.tensor", shape=tuple(value.shape)) if isinstance(value, torch.Tensor) else in_short(value)
    return say("alone.returned", what=what, want=shape, have=have)


def in_short(value: Any) -> str:
    """What Python shows of a value, but for where it lies in memory."""
    return re.sub(r" at 0x\w+", "", repr(value))[:60]


def told(values: list[Any], expected: list[list[Backward]], bad: list[int], own: list[Backward] | None = None) -> str:
    """The first number that is wrong, what else it is, and which tensors of that rank are wrong and right.

    Args:
        values, expected: A rank's, each a list of one `Backward`, or what a rank returned instead, in words.
        bad: The ranks that are wrong. Of those the one is told whose first wrong tensor comes first.
        own: What each rank's own part says of a tensor, without the other ranks'.
    """
    fitting = {rank: _fitting(values[rank], expected[rank]) for rank in bad}
    rank = min(bad, key=lambda rank: list(fitting[rank].values()).index(False))
    if isinstance(values[rank], str):
        return f"{say('alone.rank', rank=rank)}: {values[rank]}"
    (have,), (want,) = values[rank], expected[rank]
    right, (name, *others) = ([n for n, fits in fitting[rank].items() if fits is each] for each in (True, False))
    line = _first(rank, name, have[name], want[name] or [], own[rank].get(name) if own else None)
    if not right:
        return line
    line += say("alone.wrong", names=", ".join(others)) if others else ""
    return line + say("alone.right", names=", ".join(right))


def _fitting(have: Any, want: list[Backward]) -> dict[str, bool]:
    """Name → whether it is right."""
    if isinstance(have, str):
        return {"": False}
    return {name: _fits(have[0][name], numbers or []) for name, numbers in want[0].items()}


def _fits(have: list[float] | None, want: list[float]) -> bool:
    return have is not None and len(have) == len(want) and near(have, want)


def _first(rank: int, name: str, have: list[float] | None, want: list[float], own: list[float] | None) -> str:
    if have is None:
        return say("alone.nothing", rank=rank, name=name, want=f"{want[0]:.4g}")
    if len(have) != len(want):
        return say("alone.none", rank=rank, name=name, want=f"{want[0]:.4g}")
    most = max(map(abs, want))
    at = next(n for n in range(len(want)) if not near([have[n], most], [want[n], most]))
    said = {"rank": rank, "name": name, "want": f"{want[at] + 0.0:.4g}", "have": f"{have[at] + 0.0:.4g}"}  # no −0
    line = say("alone.number", **said) if len(want) == 1 else say("alone.element", element=_place(at, want), **said)
    if own is not None and near(have, own):
        return line + say("alone.own", rank=rank)
    ratio = have[at] / want[at] if want[at] else 0.0
    times = len(want) > 1 and ratio > 0 and _is_times(ratio) and near(have, [ratio * number for number in want])
    return line + say("alone.ratio", ratio=f"{ratio:.3g}") if times else line


def _place(at: int, numbers: list[float]) -> str:
    """Where a number stands in its tensor, as Python writes it: ``[1, 0]``, or ``1`` where there is one dimension."""
    shape = numbers.shape if isinstance(numbers, Numbers) else (len(numbers),)
    if len(shape) == 1:
        return str(at)
    return str([index.item() for index in torch.unravel_index(torch.tensor(at), shape)])


def _is_times(ratio: float) -> bool:
    """Whether it is 2, 3, …, or a half, a third, …, as of a sum that counts too often, or not often enough."""
    return any(round(r) > 1 and abs(r - round(r)) < 1e-3 for r in (ratio, 1 / ratio))


def where(case: Case) -> str:
    return f"{say('check.world', ranks=case.ranks)}, {count('alone.tokens', case.elements)}"
