"""`show.zero`: what each rank has of each layer while ZeRO gathers, frees and reduces, and how much that sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from labkit.show.choice import Choice
from labkit.show.figure import Drawing, Figure, Table, source_of
from labkit.show.held import Unit
from labkit.show.words import count, say
from labkit.show.zerofoot import psi
from labkit.show.zerosteps import FULL, SHARD, Play, ZeroUnit, read
from labkit.show.zeroview import Scale, View, names_of, told
from labkit.trace import Trace

Units = Mapping[int | str, ZeroUnit]
RANKS = 8  #: drawn at most


def zero(
    runs: Trace | Mapping[str, Trace],
    units: Units | Mapping[str, Units],
    *,
    first: str | None = None,
    title: str | None = None,
    source: str | None = None,
) -> Figure | Choice:
    """Step through a training step of ZeRO: rows are ranks, columns units or buckets, bars their P, G and O.

    A bar is cut in N pieces; what a rank holds of it is filled, one piece or all. Below: what the busiest rank has sent
    (1Ψ is what it sends when all parameters go round the ring once, Ψ(N−1)/N), and what the fullest rank holds, against
    plain data parallelism, dashed. All is read from the events of the run: `unit` and `bucket` labels on collectives,
    "free" spans, and the sends.

    Args:
        runs: The trace of one training step (forward, backward, step), or setting → such a trace, to choose from:
            "stage 1", "stage 3", "stage 3, prefetch" … Axes are shared. Bytes are counted from messages, so gloo's
            own all-reduce cannot be drawn: run inside ``with labkit.collectives.using("ring"):``. Where buckets are
            reduced (stages 1 and 2), backward runs in ``with labkit.trace.span("backward", phase="backward"):``.
        units: Label → `ZeroUnit`, the bytes of each unit or bucket, in the order of the columns; or setting → such a
            mapping.
        first: The setting that is shown at first; left out, the last.
        title: The finding; left out, it is derived, for each setting its own.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``; left out, the trace knows.

    Returns:
        A figure that steps with the arrow keys; of several settings a row of buttons chooses. It begins at the moment
        at which the fullest rank holds most, which is also what is shown without a kernel.

    Raises:
        TypeError: Something is no `Trace` or no `ZeroUnit`; `title` is no text.
        ValueError: There is nothing to draw: no labels, bytes that cannot be seen, more than 8 ranks or 400 moments; a
            label that `units` lacks; `first` is no setting.

    Source: Rajbhandari et al. (2020), figure 1; Zhao et al., "PyTorch FSDP" (2023), figure 1.

    >>> from labkit.trace import Event, Trace
    >>> def rank(r):
    ...     here = {"unit": 0}
    ...     return [Event("span", "all_gather ring", r, 0.0, 0.2, labels=here, index=0),
    ...             Event("send", "send", r, 0.0, 0.1, nbytes=8, peer=1 - r, labels=here, parent=0, index=1),
    ...             Event("span", "free", r, 0.3, 0.3, labels=here, index=2)]
    >>> print(zero(Trace(rank(0) + rank(1), 2), {0: ZeroUnit(16, 16, 32)}))
    At most 1 of 1 layers is full at once; a rank sends 1Ψ [measured]
      Filled: held by the rank, 1/2 or all of it. P parameters, G gradients, O optimizer. 1Ψ is Ψ(N−1)/N = 8 B.
      forward: 1Ψ sent · most held 48 B of 64 B
    """
    given = _given(runs, title)
    plays = {name: read(name, trace, _units_of(name, units)) for name, trace in given.items()}
    if first is not None and first not in plays:
        raise ValueError(f"first is {first!r}: expected one of {', '.join(map(repr, plays))}")
    scale = _scale(list(plays.values()))
    figures = {
        name: _figure(play, scale, title, source_of(source, play.paced), named=len(plays) > 1)
        for name, play in plays.items()
    }
    chosen = list(figures)[-1] if first is None else first
    return figures[chosen] if len(figures) == 1 else Choice(say("zero.setting"), figures, chosen)


def _given(runs: Any, title: object) -> dict[str, Trace]:
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title is {title!r}: expected text, or nothing to have it derived from the runs")
    named = {"": runs} if isinstance(runs, Trace) else runs
    if not isinstance(named, Mapping) or not named or not all(isinstance(trace, Trace) for trace in named.values()):
        raise TypeError(f"runs is {type(runs).__name__}: expected run.trace, or setting → trace, such as "
                        "{'stage 2': run.trace}")  # fmt: skip
    for name, trace in named.items():
        if trace.ranks > RANKS:
            raise ValueError(f"{name!r} has {trace.ranks} ranks: expected at most {RANKS}")
    return dict(named)


def _units_of(name: str, units: Any) -> Units:
    """Those of a setting."""
    mine = units.get(name, units) if isinstance(units, Mapping) and name in units else units
    if not isinstance(mine, Mapping) or not mine:
        raise TypeError(f"units is {units!r:.80}: expected label → ZeroUnit(parameters, gradients, optimizer)")
    for label, unit in mine.items():
        if not isinstance(unit, ZeroUnit):
            raise TypeError(f"units has {unit!r:.80} for {label!r}: expected its ZeroUnit(parameters, gradients, "
                            "optimizer), or for each setting a mapping of them")  # fmt: skip
    return mine


def _scale(plays: list[Play]) -> Scale:
    """Three times Ψ, and what plain data parallelism holds, or more where a run has more."""
    held = max(max(play.plain, play.peak) for play in plays)
    sent = max(max(3 * play.psi, play.sent(-1, play.busiest)) for play in plays)
    return Scale(held, sent, Unit.of(held))


def _figure(play: Play, scale: Scale, title: str | None, source: str, named: bool) -> Figure:
    totals = [play.total(moment, play.fullest) for moment in range(len(play.moments))]
    start = totals.index(max(totals))
    views: dict[int, View] = {}

    def draw(width: int, frame: int | None) -> Drawing:
        if width not in views:
            views[width] = View(play, scale, width)
        return views[width].draw(start if frame is None else frame, newest=frame is not None)

    found = _finding(play) if title is None else title
    found = say("zero.named", name=play.name, said=found) if named and title is None else found
    says = [_said(play, moment) for moment in range(len(play.moments))]
    return Figure(found, draw, _twin(play, scale.unit), source=source, notes=_notes(play, scale.unit), says=says,
                  start=start, sheets=("bars", "memory", "zero"))  # fmt: skip


# What is written


def _finding(play: Play) -> str:
    """What is full at once, and what is sent."""
    sent, every = psi(play.sent(-1, play.busiest), play), len(play.blocks)
    start = play.moments[0].cells
    if any(cell[0] == SHARD for row in start for cell in row):
        if play.most_full["P"] == every > 1:
            return say("zero.title_kept", all=every, sent=sent)
        if every < len(play.columns):
            return count("zero.title_rooted", play.most_full["P"], all=every, sent=sent)
        return count("zero.title_gathered", play.most_full["P"], all=every, sent=sent)
    if any(cell[2] == FULL for row in start for cell in row):
        return say("zero.title_plain", sent=sent)
    if play.most_full["G"] == every:
        return say("zero.title_optimizer", ranks=play.ranks, sent=sent)
    return count("zero.title_gradients", play.most_full["G"], all=every, ranks=play.ranks, sent=sent)


def _notes(play: Play, unit: Unit) -> list[str]:
    return [say("zero.legend", ranks=play.ranks, size=unit.told(play.psi))]


def _said(play: Play, moment: int) -> str:
    """What is announced: what happens, what is full, what was sent."""
    full = play.full(moment)
    names = names_of(play)
    every = len(full) == len(names) > 1
    which = say("zero.every") if every else ", ".join(names[c] for c in full) or say("zero.none")
    sent, whole = (psi(play.sent(m, play.busiest), play) for m in (moment, -1))
    return say("zero.said", what=told(play, moment), full=which, part=sent, whole=whole)


def _twin(play: Play, unit: Unit) -> Table:
    keys = ("zero.column_moment", "zero.column_what", "zero.column_full", "zero.column_sent", "zero.column_held")
    columns = tuple(say(key) for key in keys)
    names = names_of(play)
    rows = [
        (str(m), told(play, m), ", ".join(names[c] for c in play.full(m)),
         f"{psi(play.sent(m, play.busiest), play)}Ψ", unit.told(play.total(m, play.fullest)))
        for m in range(len(play.moments))
    ]  # fmt: skip
    return Table(columns, rows, lines=list(_lines(play, unit)))


def _lines(play: Play, unit: Unit) -> Iterator[str]:
    """A line a phase."""
    words = {"forward": say("zero.forward"), "backward": say("zero.backward"), "step": say("zero.step")}
    numbered = [(m.action.phase, n) for n, m in enumerate(play.moments) if m.action]
    for phase, group in groupby(numbered, key=lambda pair: pair[0]):
        moments = [n for _, n in group]
        sent = play.sent(moments[-1], play.busiest) - play.sent(moments[0] - 1, play.busiest)
        most = max(play.total(n, play.fullest) for n in moments)
        yield say("zero.line", phase=words[phase], sent=psi(sent, play), most=unit.told(most),
                  plain=unit.told(play.plain))  # fmt: skip
