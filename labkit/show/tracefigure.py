"""`show.trace`: what the ranks of a run said to each other, in the order of cause and effect."""

from __future__ import annotations

from labkit.show.figure import SOURCES, Drawing, Figure, Table, source_of
from labkit.show.finding import finding, members
from labkit.show.lanes import Lanes
from labkit.show.order import Item, order
from labkit.show.svg import size_of
from labkit.show.words import count, say
from labkit.trace import Event, Trace

CAP = 60  #: steps shown when nobody asks for others
AXES = ("order", "time")


def trace(
    trace: Trace,
    title: str | None = None,
    axis: str = "order",
    steps: tuple[int, int] | None = None,
    source: str | None = None,
) -> Figure:
    """Draw a trace: a lane a rank, an arrow a message, a box a collective; step through it with the arrow keys.

    Args:
        trace: What a run recorded, such as ``run.trace``.
        title: The finding; left out, it is derived from the trace.
        axis: ``"order"``: by cause and effect, the same picture in every run. ``"time"``: by seconds, for cells
            whose output is not compared.
        steps: The first and last step to draw, counted from 1; left out, the first 60.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``; left out, the trace knows which of the first two.

    Returns:
        A figure, which a notebook shows when it is the cell's last line.

    Raises:
        TypeError: `trace` is no `Trace`, `title` no text, or `steps` no pair of whole numbers.
        ValueError: `axis` or `source` is unknown, or `steps` lies outside the trace.

    >>> from labkit.trace import Event, Trace
    >>> print(globals()["trace"](Trace([Event("send", "send", 0, 0.0, 0.1, nbytes=8, peer=1),
    ...                                 Event("recv", "recv", 1, 0.0, 0.2, nbytes=8, peer=0)], ranks=2)))
    Rank 0 sent everything: 1 message, 8 B [measured]
      step 1 · 0→1 send · 8 B
      step 2 · 0→1 receive · 8 B
    """
    _check(trace, title, axis, source)
    items = order(trace)
    total = max((i.last for i in items), default=0)
    window = _window(steps, total)
    shown = [i for i in items if i.first < window.stop and i.last >= window.start]
    tips = {id(e): _tip(e) for i in shown for e in i.events}
    layouts: dict[int, Lanes] = {}

    def draw(width: int, frame: int | None) -> Drawing:
        if width not in layouts:
            layouts[width] = Lanes(shown, trace.ranks, window, width, axis, tips)
        return layouts[width].draw(None if frame is None else window.start + frame)

    return Figure(
        finding(items, trace.ranks) if title is None else title,
        draw,
        _twin(shown, window, axis),
        source=source_of(source, trace.paced),
        notes=_notes(window, total, steps),
        says=[_says(shown, k, total) for k in window],
    )


def _check(trace: object, title: object, axis: object, source: object) -> None:
    if not isinstance(trace, Trace):
        hint = "pass its .trace" if isinstance(getattr(trace, "trace", None), Trace) else "pass run.trace"
        raise TypeError(f"show.trace draws a labkit.trace.Trace, but was given {type(trace).__name__}: {hint}")
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title is {title!r}: expected text, or nothing to have it derived from the trace")
    if axis not in AXES:
        raise ValueError(f"axis is {axis!r}: expected 'order' (the same in every run) or 'time' (seconds)")
    if source is not None and source not in SOURCES:
        raise ValueError(f"source is {source!r}: expected one of {', '.join(SOURCES)}")


def _window(steps: object, total: int) -> range:
    if steps is None:
        return range(1, min(total, CAP) + 1)
    if not (isinstance(steps, (tuple, list)) and len(steps) == 2 and all(type(s) is int for s in steps)):
        raise TypeError(f"steps is {steps!r}: expected the first and last step as two whole numbers, such as (1, 20)")
    first, last = steps
    if not 1 <= first <= last:
        raise ValueError(f"steps is {steps!r}: expected 1 <= first <= last")
    if first > total:
        raise ValueError(f"steps is {steps!r}, but this trace has {total} steps: expected first <= {total}")
    return range(first, min(last, total) + 1)


def _notes(window: range, total: int, steps: object) -> list[str]:
    notes = []
    if steps is None and total > len(window):
        notes.append(say("trace.cap", shown=len(window), all=f"{total:,}"))
    elif len(window) < total:
        notes.append(say("trace.window", first=window.start, last=f"{window.stop - 1:,}", all=f"{total:,}"))
    return notes


# The twin: a row an event


def _twin(items: list[Item], window: range, axis: str) -> Table:
    columns = tuple(say(f"trace.column_{name}") for name in ("step", "what", "size", "where", "more"))
    rows = [(step, row) for item in items for step, row in _rows(item, axis) if step in window]
    rows.sort(key=lambda pair: pair[0])
    return Table(columns, [(f"{step:,}", *row) for step, row in rows], quiet=columns[1:])


def _rows(item: Item, axis: str):
    if item.kind == "span":
        return
    if item.kind != "message":
        yield item.first, _row(item, item.events, axis)
        return
    for e in item.events:
        yield (item.first if e.kind == "send" else item.last), _row(item, (e,), axis)


def _row(item: Item, events: tuple[Event, ...], axis: str) -> tuple[str, ...]:
    e = events[0]
    where = ", ".join(dict.fromkeys(x.line for x in events if x.line))
    more = [f"{k}={v}" for k, v in e.labels.items()]
    more += [say("trace.inside", name=name) for name in item.names]
    if e.group != "world":
        more.append(say("trace.group", group=e.group))
    if item.unfinished:
        more.append(_trouble(item, events))
    if axis == "time":
        more.append(_seconds(events))
    size = size_of(e.nbytes) if e.nbytes or item.kind == "message" else ""
    return _what(e, item.ranks), size, where, " ".join(more)


def _trouble(item: Item, events: tuple[Event, ...]) -> str:
    if item.kind == "message" and item.send is None:
        return say("trace.waits", peer=_peer(events[0]))
    if item.kind == "message" and item.recv is None:
        return say("trace.unreceived")
    return say("trace.unfinished")


def _what(e: Event, ranks: tuple[int, ...]) -> str:
    if e.kind == "send":
        return say("trace.send", rank=e.rank, peer=_peer(e))
    if e.kind == "recv":
        return say("trace.recv", rank=e.rank, peer=_peer(e))
    if e.kind == "collective":
        return say("trace.collective", ranks=members(ranks), name=e.name)
    return say("trace.box", rank=say("trace.rank", rank=e.rank), name=e.name)


def _peer(e: Event) -> str:
    return say("trace.anyone") if e.peer is None else str(e.peer)


def _seconds(events: tuple[Event, ...]) -> str:
    start = f"{min(e.start for e in events) * 1e3:.3f}"
    ends = [e.end for e in events if e.end is not None]
    if len(ends) < len(events):
        return say("trace.open", start=start)
    return say("trace.seconds", start=start, end=f"{max(ends) * 1e3:.3f}")


def _tip(e: Event) -> str:
    """What hovering shows: all that is known about an event, but not when."""
    more = [e.line or "", " ".join(f"{k}={v}" for k, v in e.labels.items())]
    head = [say("trace.rank", rank=e.rank), e.name if e.peer is None else _what(e, (e.rank,))]
    return " · ".join(part for part in (*head, size_of(e.nbytes) if e.nbytes else "", *more) if part)


# The announcements: a sentence a step


def _says(items: list[Item], step: int, total: int) -> str:
    told = [text for item in items for text in _announce(item, step)]
    if len(told) > 4:
        told = [*told[:3], count("trace.more", len(told) - 3)]
    return say("announce.step", step=f"{step:,}", steps=f"{total:,}", what="; ".join(told))


def _announce(item: Item, step: int):
    e = item.events[0]
    if item.kind == "message":
        yield from _announce_message(item, step)
    elif item.first == step and item.kind == "collective":
        key = "announce.unfinished" if item.unfinished else "announce.collective"
        size = {} if item.unfinished else {"size": size_of(e.nbytes)}
        yield say(key, name=e.name, ranks=members(item.ranks), **size)
    elif item.first == step and item.kind == "box":
        yield say("announce.box", rank=e.rank, name=e.name)


def _announce_message(item: Item, step: int):
    send, recv = item.send, item.recv
    if send and item.first == step:
        key = "announce.send" if recv else "announce.unreceived"
        yield say(key, rank=send.rank, size=size_of(send.nbytes), peer=_peer(send))
    if recv and item.last == step:
        if send:
            yield say("announce.recv", rank=recv.rank, size=size_of(recv.nbytes), peer=_peer(recv))
        else:
            yield say("announce.waits", rank=recv.rank, peer=_peer(recv))
