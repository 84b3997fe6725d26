"""`show.norm`: which group each part of a gradient's norm crosses, and what comes of counting otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import Any

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.normparts import STAGES, Norm, Part, read
from labkit.show.normview import View, short
from labkit.show.words import say


def norm(
    parts: Mapping[str, tuple[Sequence[float | None], str | Sequence[str]]],
    *,
    mesh: Mapping[str, int],
    tied: Sequence[str] = (),
    wrong: Mapping[str, float | Sequence[float]] | None = None,
    title: str | None = None,
    source: str = "measured",
) -> Figure:
    """Draw the squares that each rank holds, the groups in which they are added up, and the norm.

    A shard is added to those of its group. Of what several ranks hold alike one copy counts, the others are dashed.
    The dimension "pp" of the mesh is the pipeline: its stages hold different layers, and their sums are added last.

    Args:
        parts: Name → (the sum of squares that each rank holds, the dimensions of the mesh over which it is sharded):
            ``{"W": ([9, 16], "tp"), "bias": ([4, 4], ())}``. ``None`` where a rank has none of it. At most 4 parts.
        mesh: Dimension → ranks along it, the last one fastest, as in `torch.distributed.init_device_mesh`:
            ``{"pp": 2, "tp": 2}``. At most 8 ranks.
        tied: Names of parts that the first and the last stage share.
        wrong: Label → the norm that a wrong way gives, drawn as a bar beside the right one; a list where ranks or
            stages do not agree.
        title: The finding; left out, it is derived.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``.

    Raises:
        TypeError: `parts` or `mesh` is no mapping, or something no number.
        ValueError: a rank has no entry, a dimension is unknown, copies are not equal, or there is too much to draw.

    Source: `torch.nn.utils.clip_grad_norm_`, whose norm over all parameters of one process this is; NVIDIA/Megatron-LM,
    megatron/core/optimizer/clip_grads.py, for what is counted where.

    >>> print(norm({"W": ([9, 16], "tp"), "bias": ([4, 4], ())}, mesh={"tp": 2}, wrong={"bias twice": 33**0.5}))
    The norm is √29 = 5.385, not 5.745 (bias twice) [measured]
      W · sharded · rank 0: 9, rank 1: 16 · summed over tp · counts 25
      bias · replicated · rank 0: 4, rank 1: 4 · counts 4
      norm · counts √29 = 5.385
      bias twice · counts 5.745
    """
    found = read(parts, mesh, tied)
    others = _wrong(wrong or {})

    def draw(width: int, frame: int | None) -> Drawing:
        return View(found, others, width).draw()

    return Figure(_finding(found, others) if title is None else title, draw, _twin(found, others), source=source,
                  sheets=("bars", "memory", "tricks"))  # fmt: skip


def _wrong(wrong: Any) -> dict[str, tuple[float, ...]]:
    if not isinstance(wrong, Mapping):
        raise TypeError(f"wrong is {wrong!r:.60}: expected label → norm, such as {{'counted twice': 5.745}}")
    found = {}
    for label, given in wrong.items():
        values = given if isinstance(given, (list, tuple)) else [given]
        for value in values:
            if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
                raise TypeError(f"wrong has {value!r} for {label!r}: expected a number")
            if not isfinite(value) or value < 0:
                raise ValueError(f"wrong has {value!r} for {label!r}: expected a finite norm, 0 or more")
        if not values:
            raise ValueError(f"wrong has an empty list for {label!r}: expected a norm")
        found[str(label)] = tuple(map(float, values))
    return found


# What is written


def _finding(found: Norm, wrong: Mapping[str, tuple[float, ...]]) -> str:
    square, value = short(found.square), short(sqrt(found.square))
    if not wrong:
        return say("norm.title", square=square, norm=value)
    name, values = next(iter(wrong.items()))
    told = [short(v) for v in dict.fromkeys(values)]
    some = told[0] if len(told) == 1 else say("norm.or", some=", ".join(told[:-1]), last=told[-1])
    return say("norm.title_wrong", square=square, norm=value, value=some, name=name)


def _kind(part: Part) -> str:
    return {"S": lambda: say("norm.kind_shard"), "R": lambda: say("norm.kind_replica"),
            "T": lambda: say("norm.kind_tie"), "W": lambda: say("norm.kind_whole")}[part.kind]()  # fmt: skip


def _twin(found: Norm, wrong: Mapping[str, tuple[float, ...]]) -> Table:
    keys = ("norm.column_part", "norm.column_kind", "norm.column_held", "norm.column_groups", "norm.column_counts")
    columns = tuple(say(key) for key in keys)
    rows = [
        (part.name, _kind(part), ", ".join(say("norm.held", rank=r, square=short(part.squares[r] or 0.0))
                                           for r in part.holders), ", ".join(part.over), short(part.square))
        for part in found.parts
    ]  # fmt: skip
    last = STAGES if found.mesh.get(STAGES, 1) > 1 else ""
    rows.append((say("norm.in_all"), "", "", last, f"√{short(found.square)} = {short(sqrt(found.square))}"))
    rows += [(label, "", "", "", ", ".join(map(short, values))) for label, values in wrong.items()]
    return Table(columns, rows, quiet=columns[:3])
