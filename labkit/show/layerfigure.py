"""`show.layer`: what each rank holds in a layer that ranks share, and where they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.show.figure import Drawing, Figure, Table
from labkit.show.layerstages import PHASES, Layer, LayerStage, Shape, layers_of
from labkit.show.layerview import View, operation, told
from labkit.show.svg import size_of
from labkit.show.words import count, say


def layer(
    values: Sequence[Any] | Mapping[str, Sequence[Any]], *, title: str | None = None, source: str = "measured"
) -> Figure:
    """Draw a layer that ranks share, forward above and backward below: a lane a rank, f and g in one column each.

    A tensor that is whole on every rank is one box across all lanes if it has the same bits on all of them, and cracked
    if it has not. Shards and shares of a sum are a box a lane, shares dashed. f and g are hollow where they send
    nothing; a collective is solid and has the bytes of its whole tensor below: ◆ all-reduce, ◁ all-gather, ▷
    reduce-scatter.

    Args:
        values: What the ranks return that ran the layer inside `labkit.train.watch`, such as
            ``run.values``; or a list of `LayerStage`; or name → one of the two, to compare ("TP", "TP + SP").
        title: The finding; left out, it is derived.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``.

    Returns:
        A figure that steps from stage to stage with the arrow keys; of several layers it goes through one after the
        other. Without a kernel it shows the whole layer, the last of several.

    Raises:
        TypeError: `values` are not those of all ranks.
        ValueError: the ranks went through different stages, or the layers have different ranks or places.

    Source: Shoeybi et al. 2019, "Megatron-LM", figure 3; Korthikanti et al. 2022, figure 5.

    >>> halves, whole = ((2, 8), (2, 8)), ((2, 16), (2, 16))
    >>> print(layer([LayerStage(name="f", phase="forward"),
    ...              LayerStage(name="W₁", phase="forward", kind="columns", shapes=halves),
    ...              LayerStage(name="g", phase="forward", collective="all_reduce", nbytes=128, sent=128),
    ...              LayerStage(name="Y", phase="forward", equal=True, shapes=whole)]))
    1 collective in the layer: g in forward [measured]
      A box across all ranks: the same bits on every rank. A hollow f or g sends nothing.
      forward · attention · f · nothing is sent
      forward · attention · W₁ · shape 2×8 each · each rank has its columns
      forward · attention · g · collective all-reduce · bytes 128 B · sent 128 B
      forward · attention · Y · shape 2×16 each · the same bits on every rank
    """
    found = layers_of(values)
    tips = {name: [_said(one, n) for n in range(len(one.stages))] for name, one in found.items()}
    frames: list[tuple[str, int | None]] = []
    says: list[str] = []
    for name, one in found.items():
        frames += [(name, None), *((name, n + 1) for n in range(len(one.stages)))]
        says += [_named(name, _finding(one)), *(_named(name, tip) for tip in tips[name])]
    views: dict[int, View] = {}
    start = len(frames) - 1 - len(one.stages)

    def draw(width: int, frame: int | None) -> Drawing:
        if width not in views:
            views[width] = View(found, tips, width)
        return views[width].draw(*frames[start if frame is None else frame])

    finding = _title(found) if title is None else title
    return Figure(finding, draw, _twin(found), source=source, notes=_notes(found), says=says, start=start,
                  sheets=("layer",))  # fmt: skip


# What is written


def _named(name: str, words: str) -> str:
    return say("layer.named", name=name, said=words) if name else words


def _title(found: Mapping[str, Layer]) -> str:
    if len(found) == 1:
        return _finding(*found.values())
    return "; ".join(_named(name, _broken(one) or _volume(one)) for name, one in found.items())


def _volume(one: Layer) -> str:
    """How many collectives, and what a rank sent for them."""
    calls, sent = count("layer.collectives", len(one.calls())), one.sent()
    return say("layer.volume", count=calls, size=size_of(sent)) if sent else calls


def _broken(one: Layer) -> str | None:
    """The first tensor that should be the same on all ranks and is not."""
    cracked = next((s for s in one.stages if s.cracked), None)
    if cracked is None:
        return None
    return say("layer.cracked", name=_where(cracked))


def _finding(one: Layer) -> str:
    if broken := _broken(one):
        return broken
    if not one.calls():
        return say("layer.nothing")
    phases = [phase for phase in PHASES if any(s.phase == phase for s in one.stages)]
    where = [say("layer.in_phase", names=_gates(one, phase), phase=_phase(phase)) for phase in phases]
    return say("layer.finding", count=count("layer.collectives", len(one.calls())), where=", ".join(where))


def _gates(one: Layer, phase: str) -> str:
    """Which of f and g send in a phase."""
    names = sorted({s.name for s in one.calls(phase)})
    if not names:
        return say("layer.none")
    return names[0] if len(names) == 1 else say("layer.and", names=", ".join(names[:-1]), last=names[-1])


def _phase(phase: str) -> str:
    return say("layer.word_forward") if phase == "forward" else say("layer.word_backward")


def _part(part: str) -> str:
    return {"attention": say("layer.attention"), "mlp": say("layer.mlp")}.get(part, part)


def _where(stage: LayerStage) -> str:
    return say("layer.where", phase=_phase(stage.phase), part=_part(stage.part), name=_operation(stage))


def _operation(stage: LayerStage) -> str:
    """A place; in backward what is held there is the gradient."""
    gradient = stage.phase == "backward" and stage.shapes
    return say("layer.gradient", name=stage.name) if gradient else stage.name


def _said(one: Layer, n: int) -> str:
    """What is announced of a stage."""
    stage = one.stages[n]
    where = _where(stage)
    if stage.shapes:
        return say("layer.said_tensor", where=where, shape=_shapes(one, stage), held=_held(stage))
    if not stage.collective:
        return say("layer.said_identity", where=where, nothing=say("layer.identity"))
    done = sum(bool(s.collective) for s in one.stages[: n + 1])
    counter = say("layer.counter", done=done, all=len(one.calls()))
    return say("layer.said_collective", where=where, what=told(stage), counter=counter)


def _held(stage: LayerStage) -> str:
    if stage.wide and stage.equal is not None:
        return say("layer.same") if stage.equal else say("layer.differs")
    return {"whole": say("layer.whole"), "columns": say("layer.columns"), "tokens": say("layer.tokens"),
            "share": say("layer.share")}[stage.kind]  # fmt: skip


def _shapes(one: Layer, stage: LayerStage) -> str:
    """The shape of each rank, once where all are alike."""
    if len(set(stage.shapes)) == 1:
        return say("layer.each", shape=_written(stage.shapes[0]))
    named = zip(one.ranks, stage.shapes, strict=True)
    return ", ".join(say("layer.of_rank", rank=rank, shape=_written(shape)) for rank, shape in named)


def _written(shape: Shape) -> str:
    return "×".join(map(str, shape))


def _notes(found: Mapping[str, Layer]) -> list[str]:
    """What the looks mean that this picture has."""
    stages = [s for one in found.values() for s in one.stages]
    looks = [
        (say("layer.legend"), True),
        (say("layer.legend_cracked"), any(s.cracked for s in stages)),
        (say("layer.legend_share"), any(s.kind == "share" for s in stages)),
        (say("layer.legend_symbols"), any(s.collective in ("all_gather", "reduce_scatter") for s in stages)),
    ]
    return [" ".join(words for words, seen in looks if seen)]


def _twin(found: Mapping[str, Layer]) -> Table:
    keys = ("layer.column_variant", "layer.column_phase", "layer.column_part", "layer.column_operation",
            "layer.column_shape", "layer.column_held", "layer.column_collective", "layer.column_bytes",
            "layer.column_sent")  # fmt: skip
    columns = tuple(say(key) for key in keys)
    rows = [_row(name, one, s) for name, one in found.items() for s in one.stages]
    return Table(columns, rows, quiet=(*columns[:4], columns[5]))


def _row(name: str, one: Layer, stage: LayerStage) -> tuple[str, ...]:
    at = name, _phase(stage.phase), _part(stage.part), _operation(stage)
    if stage.shapes:
        return (*at, _shapes(one, stage), _held(stage), "", "", "")
    if not stage.collective:
        return (*at, "", say("layer.identity"), "", "", "")
    sent = "" if stage.sent is None else size_of(stage.sent)
    return (*at, "", "", operation(stage), size_of(stage.nbytes), sent)
