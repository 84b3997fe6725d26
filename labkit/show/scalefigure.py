"""`show.loss_scale`: how a run's loss scale grew and was backed off, which steps were skipped, and on whose account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import isfinite
from typing import Any

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.scaleview import Step, View, named, power
from labkit.show.words import say

RANKS = 16


def loss_scale(
    history: Sequence[Any],
    *,
    ranks: int | None = None,
    title: str | None = None,
    source: str = "measured",
) -> Figure:
    """Draw the loss scale of each step on a logarithmic axis, and below it what each rank did with the step.

    Args:
        history: An entry a step: (scale, ranks that overflowed), the scale being that which the step's loss was
            multiplied by; or (scale, ranks that overflowed, ranks that skipped the step). Left out, all ranks skip a
            step in which one overflows. Where ranks do not have the same scale, a list with one for each.
        ranks: How many there are; left out, as many as the history names.
        title: The finding; left out, it tells whether all ranks skipped together.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``.

    Raises:
        TypeError: an entry is no such tuple, or a scale no number.
        ValueError: there are no steps, a scale is not above 0, or a rank is unknown.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the factors are those of
    `torch.amp.GradScaler`.

    >>> print(loss_scale([(65536, []), (65536, [1]), (32768, []), (32768, [])], ranks=2))
    1 of 4 steps skipped, by every rank; each divides the scale by 2; it ends at 2¹⁵ [measured]
      step 0: scale 65,536
      step 1: scale 65,536 · overflow on rank 1 · skipped by ranks 0–1
      steps 2–3: scale 32,768
    """
    steps = _read(history, ranks)

    def draw(width: int, frame: int | None) -> Drawing:
        return View(steps, width).draw()

    found = _finding(steps) if title is None else title
    return Figure(found, draw, _twin(steps), source=source, sheets=("bars", "memory", "tricks"))


# What was given


@dataclass(frozen=True, slots=True)
class _Entry:
    """A step as it was given: scales (one, or one a rank), and who overflowed and skipped (``None``: not told)."""

    scales: tuple[float, ...]
    over: tuple[int, ...]
    skipped: tuple[int, ...] | None


def _read(history: Any, ranks: int | None) -> list[Step]:
    if not isinstance(history, (list, tuple)):
        raise TypeError(f"history is {history!r:.60}: expected a list with (scale, ranks that overflowed) of each step")
    if not history:
        raise ValueError("history is empty: expected (scale, ranks that overflowed) of at least one step")
    entries = [_entry(n, entry) for n, entry in enumerate(history)]
    named = [r for e in entries for r in (*e.over, *(e.skipped or ()))]
    known = max([1, *(len(e.scales) for e in entries), *(r + 1 for r in named)])
    world = known if ranks is None else ranks
    if isinstance(world, bool) or not isinstance(world, int) or not known <= world <= RANKS:
        raise ValueError(f"ranks is {ranks!r}: the history names {known}: expected {known} to {RANKS}")
    steps = []
    for n, e in enumerate(entries):
        if len(e.scales) not in (1, world):
            raise ValueError(f"history[{n}] has {len(e.scales)} scales: expected one, or one for each of {world} ranks")
        scales = e.scales * world if len(e.scales) == 1 else e.scales
        skipped = e.skipped if e.skipped is not None else tuple(range(world)) if e.over else ()
        steps.append(Step(scales, e.over, skipped))
    return steps


def _entry(n: int, entry: Any) -> _Entry:
    if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3):
        raise TypeError(f"history[{n}] is {entry!r:.60}: expected (scale, ranks that overflowed)")
    scales = entry[0] if isinstance(entry[0], (list, tuple)) else [entry[0]]
    for scale in scales:
        if isinstance(scale, (bool, str)) or not hasattr(scale, "__float__"):
            raise TypeError(f"history[{n}] has {scale!r} as its scale: expected a number, such as 65536")
        if not isfinite(scale) or scale <= 0:
            raise ValueError(f"history[{n}] has {scale!r} as its scale: expected a finite number above 0")
    return _Entry(tuple(map(float, scales)), *(_ranks(n, who) for who in entry[1:]), *[None] * (3 - len(entry)))


def _ranks(n: int, who: Any) -> tuple[int, ...]:
    if not isinstance(who, (list, tuple, set, frozenset)) or not all(type(r) is int and r >= 0 for r in who):
        raise TypeError(f"history[{n}] has {who!r:.60} for ranks: expected a list of them, such as [1], or []")
    return tuple(sorted(set(who)))


# What is written


def _finding(steps: Sequence[Step]) -> str:
    for n, step in enumerate(steps):
        stepped = tuple(r for r in range(len(step.scales)) if r not in step.skipped)
        if step.over and stepped:
            return say("loss_scale.title_alone", step=n, over=named(step.over), stepped=named(stepped))
    skipped = sum(bool(step.skipped) for step in steps)
    end = power(steps[-1].scales[0])
    if not skipped:
        return say("loss_scale.title_none", n=len(steps), end=end)
    factors = {a.scales[0] / b.scales[0] for a, b in pairwise(steps) if a.skipped}
    if len(factors) == 1 and min(factors) > 1:
        return say("loss_scale.title_halved", skipped=skipped, n=len(steps), factor=f"{factors.pop():g}", end=end)
    return say("loss_scale.title_skips", skipped=skipped, n=len(steps), start=power(steps[0].scales[0]), end=end)


def _scale(step: Step) -> str:
    return ", ".join(f"{s:,.10g}" for s in dict.fromkeys(step.scales))


def _twin(steps: Sequence[Step]) -> Table:
    """Steps that are alike, one after another, in one row."""
    keys = ("loss_scale.column_step", "loss_scale.column_scale", "loss_scale.column_over", "loss_scale.column_skipped")
    rows, lines = [], []
    for step, group in groupby(enumerate(steps), key=lambda pair: pair[1]):
        numbers = [n for n, _ in group]
        first, last, scale = numbers[0], numbers[-1], _scale(step)
        which = say("loss_scale.step", step=first) if first == last else (
            say("loss_scale.some_steps", first=first, last=last))  # fmt: skip
        over, skipped = (named(step.over), named(step.skipped)) if step.over or step.skipped else ("", "")
        rows.append((str(first) if first == last else f"{first}–{last}", scale, over, skipped))
        words = say("loss_scale.said", which=which, scale=scale)
        lines.append(say("loss_scale.said_over", said=words, over=over, skipped=skipped) if over else words)
    return Table(tuple(say(key) for key in keys), rows, lines=lines)
