"""What `show.layer` draws, as plain data: what the ranks hold at each place of a layer, and what f and g send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

PHASES = ("forward", "backward")
KINDS = ("whole", "columns", "tokens", "share")
MOST = 16  #: ranks
HINT = "pass the values of a run whose ranks return what labkit.train.watch gives"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStage:
    """One place of a layer, in forward or backward: a tensor that is held, or f or g.

    Attributes:
        name: Such as ``"QKV"`` or ``"f"``. Backward is drawn below the place of the same name in forward.
        phase: ``"forward"`` or ``"backward"``.
        part: ``"attention"`` or ``"mlp"``.
        shapes: What each rank holds, a shape a rank; empty for f and g.
        kind: ``"whole"``: the same on every rank. ``"columns"``, ``"tokens"``: each rank has its own along the last
            dimension, or along the sequence. ``"share"``: each rank has a part of a sum.
        equal: Of what is whole: whether it has the same bits on every rank; ``None``: not known.
        collective: At f and g: what was called, such as ``"all_reduce"``; ``None``: nothing is sent.
        nbytes: Bytes of the whole tensor that the collective makes or takes.
        sent: Bytes that a rank put on the wire for it (of the ranks, the most); ``None``: not seen.

    Raises:
        ValueError: `phase` or `kind` is unknown.
    """

    name: str
    phase: str
    part: str = "attention"
    shapes: tuple[Shape, ...] = ()
    kind: str = "whole"
    equal: bool | None = None
    collective: str | None = None
    nbytes: int = 0
    sent: int | None = None

    def __post_init__(self) -> None:
        for field, known in (("phase", PHASES), ("kind", KINDS)):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} of {self.name!r} is {getattr(self, field)!r}: expected {', '.join(known)}")

    @property
    def place(self) -> tuple[str, str]:
        return self.part, self.name

    @property
    def wide(self) -> bool:
        """Whether it is one box across all ranks."""
        return bool(self.shapes) and self.kind == "whole"

    @property
    def cracked(self) -> bool:
        return self.wide and self.equal is False


@dataclass(frozen=True)
class Layer:
    """The stages of one layer in order, and the numbers of its ranks."""

    ranks: tuple[int, ...]
    stages: tuple[LayerStage, ...]

    @cached_property
    def places(self) -> tuple[tuple[str, str], ...]:
        """The places of forward in order, each once."""
        return tuple(dict.fromkeys(s.place for s in self.stages if s.phase == "forward"))

    def gates(self) -> set[tuple[str, str]]:
        """Where f and g stand."""
        return {s.place for s in self.stages if not s.shapes}

    def calls(self, phase: str | None = None) -> list[LayerStage]:
        """The collectives."""
        return [s for s in self.stages if s.collective and phase in (None, s.phase)]

    def sent(self, upto: int | None = None) -> int | None:
        """Bytes a rank, of the first `upto` stages; ``None`` where some are not seen."""
        each = [s.sent for s in self.stages[:upto] if s.collective]
        known = [n for n in each if n is not None]
        return sum(known) if len(known) == len(each) else None

    def at(self, place: tuple[str, str], phase: str) -> list[LayerStage]:
        return [s for s in self.stages if s.place == place and s.phase == phase]


def layers_of(values: Any) -> dict[str, Layer]:
    """Name → layer; of one layer the name is empty.

    Raises:
        TypeError, ValueError: `values` is nothing that `show.layer` takes.
    """
    if isinstance(values, Mapping):
        if "stages" in values:
            raise TypeError("values are those of one rank: expected all ranks', such as run.values")
        if not values:
            raise ValueError("values is empty: expected name → the values of a run")
        found = {str(name): _layer(f"values[{name!r}]", one) for name, one in values.items()}
    else:
        found = {"": _layer("values", values)}
    first = next(iter(found.values()))
    for name, layer in found.items():
        if (layer.ranks, layer.places) != (first.ranks, first.places):
            raise ValueError(f"{name!r} has other ranks or places than {next(iter(found))!r}: compare one model on one "
                             "number of ranks, or draw two pictures")  # fmt: skip
    return found


def _layer(name: str, values: Any) -> Layer:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise TypeError(f"{name} is {type(values).__name__}: {HINT}")
    if all(isinstance(v, LayerStage) for v in values):
        ranks = {len(s.shapes) for s in values if s.shapes}
        if len(ranks) != 1:
            raise ValueError(f"the stages of {name} have shapes of {sorted(ranks)} ranks: expected one number")
        layer = Layer(tuple(range(*ranks)), tuple(values))
    else:
        layer = _merged(name, values)
    return _checked(name, layer)


def _checked(name: str, layer: Layer) -> Layer:
    if len(layer.ranks) > MOST:
        raise ValueError(f"{name} has {len(layer.ranks)} ranks: expected at most {MOST}")
    if odd := [s.place for s in layer.stages if s.place not in layer.places]:
        raise ValueError(f"{name} has {odd[0]} in backward only: expected each place in forward too")
    if not [s for s in layer.stages if s.shapes]:
        raise ValueError(f"{name} holds no tensor: run the layer inside watch")
    return layer


def _merged(name: str, values: Sequence[Any]) -> Layer:
    """One layer from what each rank has noted."""
    for n, one in enumerate(values):
        if not isinstance(one, Mapping) or not {"rank", "stages"} <= set(one):
            raise TypeError(f"{name}[{n}] is {type(one).__name__}: {HINT}")
    rows = [[_place(s) for s in one["stages"]] for one in values]
    for n, row in enumerate(rows):
        if row != rows[0]:
            raise ValueError(f"rank {values[n]['rank']} went through other stages than rank {values[0]['rank']}: "
                             "expected the same layer and the same collectives on all ranks")  # fmt: skip
    stages = tuple(_stage(each) for each in zip(*(one["stages"] for one in values), strict=True))
    return Layer(tuple(one["rank"] for one in values), stages)


def _place(stage: Mapping[str, Any]) -> tuple[Any, ...]:
    return stage["part"], stage["name"], stage["phase"], stage.get("collective"), "shape" in stage


def _stage(each: Sequence[Mapping[str, Any]]) -> LayerStage:
    one = each[0]
    at = {key: one[key] for key in ("name", "phase", "part")}
    if "shape" in one:
        equal = len({s["digest"] for s in each}) == 1 if one["kind"] == "whole" else None
        return LayerStage(**at, shapes=tuple(tuple(s["shape"]) for s in each), kind=one["kind"], equal=equal)
    sent = [s["sent"] for s in each]
    return LayerStage(**at, collective=one["collective"], nbytes=one["nbytes"],
                      sent=None if None in sent else max(sent))  # fmt: skip
