"""What happened, when, and how many bytes: the events of a run.

A rank has one `Recorder`. The process group (`labkit.world.group`) tells it about every send, receive and
collective; anything else may add its own steps with `span`, and name the step it is in with `label`:

>>> with label(step=2, chunk=1):
...     current_labels()
{'step': 2, 'chunk': 1}
>>> current_labels()
{}

Nothing in this file imports torch: a notebook can load and draw a trace without it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

#: One clock for all processes of a host (CLOCK_MONOTONIC on Linux, mach_absolute_time on macOS).
now = time.perf_counter


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a rank did.

    Attributes:
        kind: ``"send"``, ``"recv"``, ``"collective"`` (what the process group was asked to do),
            ``"compute"``, ``"span"`` (a named step that holds other events), or ``"state"`` (see `watch`).
        name: The operation in torch's own words (``"isend"`` and ``"send"`` are both ``"send"``).
        rank: The rank in the whole world.
        start, end: Seconds since the run began, on one clock for all ranks. ``end`` is ``None`` when the
            operation was never seen to finish.
        nbytes: The payload handed over on this rank. For a send it is also what goes over the wire; for a
            native collective it is *not*: how torch's backend moves it cannot be seen from here.
        peer: The other rank of a send or receive, the root of a rooted collective; a rank of the world.
        group: ``"world"``, or the group's description or members, such as ``"{0,2}"``.
        lane: ``"compute"``, ``"comm"``, or the name of a CUDA stream.
        phase: ``"forward"``, ``"backward"`` or ``None``.
        parent: `index` of the span, on the same rank, in which this happened.
        after: What a tensor held after the event and before the next one of its rank, where somebody asked (`watch`).
        labels: What `label` said: step, chunk, bucket, layer, micro_batch, stage, tile …
        index: The event's place in its rank's own order of starting.
        tag: The tag of a send or receive.
        dtype, numel, op: Element type, number of elements, and reduction (``"sum"``) of the payload.
        line: The learner's own line that led here, such as ``"line 4"`` or ``"model.py:12"``.
    """

    kind: str
    name: str
    rank: int
    start: float
    end: float | None
    nbytes: int = 0
    peer: int | None = None
    group: str = "world"
    lane: str = "compute"
    phase: str | None = None
    parent: int | None = None
    after: Any = None
    labels: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    tag: int = 0
    dtype: str | None = None
    numel: int | None = None
    op: str | None = None
    line: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A send and the receive that took it; either is ``None`` when the other side never came."""

    send: Event | None
    recv: Event | None


class Trace:
    """The events of all ranks of one run, on one clock.

    >>> trace = Trace([Event("send", "send", 0, 0.0, 0.1, nbytes=8, peer=1, lane="comm"),
    ...                Event("recv", "recv", 1, 0.0, 0.2, nbytes=8, peer=0, lane="comm")], ranks=2)
    >>> trace.bytes_sent(0), trace.bytes_sent(1)
    (8, 0)
    >>> [(m.send.rank, m.recv.rank) for m in trace.messages()]
    [(0, 1)]
    """

    def __init__(self, events: list[Event], ranks: int, paced: bool = False) -> None:
        #: Every event, by time of start (ties: by rank, then by the rank's own order).
        self.events = sorted(events, key=lambda e: (e.start, e.rank, e.index))
        self.ranks = ranks
        #: Whether durations were stretched to those of other hardware (`labkit.pace`).
        self.paced = paced

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return f"<Trace: {self.ranks} ranks, {len(self.events)} events>"

    def of(self, rank: int) -> list[Event]:
        """The events of one rank, in the order in which it started them.

        Raises:
            ValueError: `rank` is not a rank of this trace.
        """
        self._check_rank(rank)
        return sorted((e for e in self.events if e.rank == rank), key=lambda e: e.index)

    def bytes_sent(self, rank: int, group: str | None = None, name: str | None = None) -> int | None:
        """Bytes that `rank` put on the wire, as far as this process could see them: the sum of its sends.

        Args:
            rank: A rank of the world.
            group: Count this group only: `Event.group`, or its description alone (``"tp"`` for ``"tp {0,1}"``).
            name: Count events of this name only, or events inside a span of this name.

        Returns:
            Bytes, or ``None`` when the selection holds a native collective: torch's backend moves those
            bytes out of sight, and a formula is not a measurement.

        Raises:
            ValueError: `rank` is not a rank of this trace.
        """
        mine = self.of(rank)
        by_index = {e.index: e for e in mine}
        chosen = [
            e for e in mine
            if (group is None or _is_of(e, group)) and (name is None or _is_named(e, name, by_index))
        ]  # fmt: skip
        if any(e.kind == "collective" for e in chosen):
            return None
        return sum(e.nbytes for e in chosen if e.kind == "send")

    def messages(self) -> list[Message]:
        """Sends paired with receives: the k-th send from a to b (same group, same tag) meets the k-th receive.

        Backends promise this order (NCCL by order alone, gloo per tag). Returned in the order of sending,
        receives that nobody answered last.
        """
        waiting: dict[tuple, deque[Event]] = defaultdict(deque)
        for rank in range(self.ranks):
            for e in self.of(rank):
                if e.kind == "recv":
                    waiting[e.peer, e.rank, e.group, e.tag].append(e)
        paired = []
        for e in self.events:
            if e.kind == "send":
                queue = waiting[e.rank, e.peer, e.group, e.tag]
                paired.append(Message(e, queue.popleft() if queue else None))
        return paired + [Message(None, e) for queue in waiting.values() for e in queue]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; `from_dict` is its inverse."""
        return {"ranks": self.ranks, "paced": self.paced, "events": [asdict(e) for e in self.events]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trace:
        return cls([Event(**e) for e in data["events"]], data["ranks"], data.get("paced", False))

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the trace in Chrome's trace format, which ui.perfetto.dev opens.

        A process a rank, a thread a lane, an arrow a message. Source: "Trace Event Format" (Google, 2016).
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": list(self._chrome_events()), "displayTimeUnit": "ms"}, file, default=str)

    def _chrome_events(self) -> Iterator[dict[str, Any]]:
        for rank in range(self.ranks):
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for e in self.events:
            end = e.start if e.end is None else e.end
            hidden = ("start", "end", "labels") if not e.labels else ("start", "end")
            args = {k: v for k, v in asdict(e).items() if v is not None and k not in hidden}
            yield {"ph": "X", "name": e.name, "cat": e.kind, "pid": e.rank, "tid": e.lane,
                   "ts": e.start * 1e6, "dur": (end - e.start) * 1e6, "args": args}  # fmt: skip
        for number, message in enumerate(self.messages()):
            if message.send and message.recv and message.recv.end is not None:
                flow = {"name": "message", "cat": "message", "id": number}
                yield flow | {"ph": "s", "pid": message.send.rank, "tid": message.send.lane,
                              "ts": message.send.start * 1e6}  # fmt: skip
                yield flow | {"ph": "f", "bp": "e", "pid": message.recv.rank, "tid": message.recv.lane,
                              "ts": message.recv.end * 1e6}  # fmt: skip

    def _check_rank(self, rank: int) -> None:
        if rank not in range(self.ranks):
            raise ValueError(f"rank {rank!r} is not in this trace: expected 0 to {self.ranks - 1}")


def _is_of(event: Event, group: str) -> bool:
    return event.group == group or event.group.startswith(group + " {")


def _is_named(event: Event | None, name: str, by_index: dict[int, Event]) -> bool:
    """Whether the event, or a span around it, bears the name."""
    while event is not None:
        if event.name == name:
            return True
        event = by_index.get(event.parent) if event.parent is not None else None
    return False


class Open:
    """An event under way. `Recorder.finish` stamps its end; until then `end` is ``None``.

    Attributes:
        index: Its place in its rank's own order of starting.
        fields: What its `Event` will have, by name, without times and `after`.
    """

    __slots__ = ("after", "end", "fields", "index", "start")

    def __init__(self, index: int, start: Any, fields: dict[str, Any]) -> None:
        self.index, self.start, self.fields = index, start, fields
        self.end: Any = None
        self.after: Any = None


_SPAN_FIELDS = {"nbytes", "peer", "group", "lane", "phase", "line"}


class Recorder:
    """Collects the events of this process. There is one, `recorder`; `labkit.run` starts and stops it."""

    def __init__(self) -> None:
        self.rank = 0
        self.on = False
        self._open: list[Open] = []
        self._lock = threading.Lock()
        self._spans: dict[int, list[int]] = defaultdict(list)
        self._labels: dict[int, dict[str, Any]] = {}
        self._look: Callable[[], list] | None = None
        #: What else belongs to a thread and travels with `branch`: see `labkit.world.clock.VirtualClock`.
        self.carriers: list[Any] = []
        #: Of this run, to see in the end which of them nobody has joined.
        self.branches: list[Branch] = []

    def begin(self, rank: int) -> None:
        """Forget everything and record from here on, as `rank`."""
        self.rank, self.on = rank, True
        self._open, self._spans, self._labels, self._look = [], defaultdict(list), {}, None
        self.branches = []

    def stop(self, zero: float, resolve=float) -> list[Event]:
        """Stop, and return the events, times in seconds since `zero` (on `now`'s clock).

        `resolve` turns a stamp into seconds on `now`'s clock; on CUDA a stamp may be a CUDA event
        (`labkit.device`).
        """
        self.on = False
        return [self._closed(o, zero, resolve) for o in self._open]

    def _closed(self, o: Open, zero: float, resolve) -> Event:
        end = None if o.end is None else resolve(o.end) - zero
        return Event(rank=self.rank, start=resolve(o.start) - zero, end=end, after=o.after, index=o.index, **o.fields)

    def start(self, kind: str, name: str, stamp: Any = None, **fields: Any) -> Open | None:
        """Begin an event; the labels and the span around it are noted. ``None`` when not recording."""
        if not self.on:
            return None
        spans = self._spans.get(threading.get_ident())
        fields.update(kind=kind, name=name, labels=self.labels(), parent=spans[-1] if spans else None)
        with self._lock:
            self._snapshot()
            entry = Open(len(self._open), now() if stamp is None else stamp, fields)
            self._open.append(entry)
        return entry

    def begun(self, since: int = 0) -> list[Open]:
        """The events that this rank has begun so far, in that order, from number `since` on; see `begun` below."""
        with self._lock:
            return self._open[since:]

    def finish(self, entry: Open | None, stamp: Any = None) -> None:
        """Stamp the end of an event, once: a later call changes nothing."""
        if entry is not None and entry.end is None:
            entry.end = now() if stamp is None else stamp

    @contextmanager
    def watch(self, tensor: Any, parts: int | None = None) -> Iterator[None]:
        if self._look is not None:
            raise RuntimeError("a tensor is watched already: trace.watch follows one at a time")
        look = _first_of_parts(tensor, parts)
        self.finish(self.start("state", "watch"))
        self._look = look
        try:
            yield
        finally:
            with self._lock:
                self._snapshot()
                self._look = None

    def _snapshot(self) -> None:
        """The event before this moment gets what the watched tensor holds now."""
        if self._look is not None and self._open:
            self._open[-1].after = self._look()

    def branch(self, name: str) -> Branch:
        made = Branch(self, name)
        if self.on:
            self.branches.append(made)
        return made

    def labels(self) -> dict[str, Any]:
        """The labels of this thread; a thread without any (autograd's, on CUDA) takes the main thread's."""
        mine = self._labels.get(threading.get_ident())
        return dict(mine if mine is not None else self._labels.get(threading.main_thread().ident or 0, {}))

    @contextmanager
    def label(self, **labels: Any) -> Iterator[None]:
        thread = threading.get_ident()
        before = self._labels.get(thread)
        self._labels[thread] = {**(before or {}), **labels}
        try:
            yield
        finally:
            if before is None:
                self._labels.pop(thread, None)
            else:
                self._labels[thread] = before

    @contextmanager
    def span(self, name: str, kind: str = "span", **fields: Any) -> Iterator[None]:
        if unknown := fields.keys() - _SPAN_FIELDS:
            raise TypeError(f"span has no field {', '.join(sorted(unknown))}: use label(…), or {sorted(_SPAN_FIELDS)}")
        entry = self.start(kind, name, **fields)
        if entry is None:
            yield
            return
        stack = self._spans[threading.get_ident()]
        stack.append(entry.index)
        try:
            yield
        finally:
            stack.pop()
            self.finish(entry)


class Branch:
    """What a thread takes over from the one that starts it: labels, the span around them, the virtual clock.

    Made where the work is asked for, entered in the thread that does it, joined where somebody waits for it.

    Attributes:
        name: What the thread does.
        joined: Whether somebody has waited for it.
        error: What went wrong in it.
    """

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.name, self.joined = name, False
        self.error: BaseException | None = None
        thread = threading.get_ident()
        self._recorder = recorder
        self._labels, self._spans = recorder.labels(), list(recorder._spans.get(thread, ()))
        self._carried = [(carrier, carrier.fork()) for carrier in recorder.carriers]

    def __enter__(self) -> Branch:
        thread = threading.get_ident()
        self._recorder._labels[thread], self._recorder._spans[thread] = dict(self._labels), list(self._spans)
        for carrier, token in self._carried:
            carrier.enter(token)
        return self

    def __exit__(self, *exc: object) -> None:
        thread = threading.get_ident()
        for carrier, token in self._carried:
            carrier.leave(token)
        self._recorder._labels.pop(thread, None)
        self._recorder._spans.pop(thread, None)

    def join(self) -> None:
        """The thread has ended, and the caller, who wanted that, goes on from there."""
        self.joined = True
        self.catch_up()

    def catch_up(self) -> None:
        """The thread has ended, and the caller goes on from there."""
        for carrier, token in self._carried:
            carrier.join(token)

    def carried(self, carrier: Any) -> Any:
        """What `carrier` gave the branch to take along."""
        return next((token for known, token in self._carried if known is carrier), None)


def _first_of_parts(tensor: Any, parts: int | None) -> Callable[[], list]:
    """How to look at a tensor: the first element of each part, cut as `torch.tensor_split` cuts; without parts all."""
    if parts is not None and (type(parts) is not int or parts < 1):
        raise ValueError(f"parts={parts!r}: expected a whole number, at least 1")
    if not hasattr(tensor, "is_contiguous"):
        raise TypeError(f"trace.watch was given {type(tensor).__name__}: expected a torch.Tensor")
    if not tensor.is_contiguous():
        raise ValueError(
            "trace.watch was given a tensor with gaps, of which only a copy could be watched: use .contiguous()"
        )
    flat = tensor.detach().view(-1)
    if parts is None:
        return flat.tolist
    size, larger = divmod(flat.numel(), parts)
    starts = [n * size + min(n, larger) for n in range(parts)]
    shown = [n for n in starts if n < flat.numel()]
    return lambda: flat[shown].tolist()


#: The one recorder of this process.
recorder = Recorder()


def label(**labels: Any):
    """Attach labels to every event recorded inside: ``with trace.label(step=2, chunk=1): …``.

    Labels nest, the inner one wins. It costs a microsecond and does nothing when nobody records.
    """
    return recorder.label(**labels)


def span(name: str, kind: str = "span", **fields: Any):
    """Record a named step that holds what happens inside: ``with trace.span("attention", kind="compute"): …``."""
    return recorder.span(name, kind, **fields)


def watch(tensor: Any, parts: int | None = None):
    """Keep what `tensor` holds after each event: ``with trace.watch(tensor, parts=4): …`` fills `Event.after`.

    An event "state" keeps what it held at first. Taken between one event of the rank and the next, so keep it small.

    Args:
        tensor: A contiguous tensor, changed in place by what happens inside.
        parts: Look at the first element of each of so many parts, cut as `torch.tensor_split` does; ``None``: at all.

    Raises:
        TypeError, ValueError: `tensor` is no contiguous tensor, or `parts` is not at least 1.
        RuntimeError: Inside another `watch`.
    """
    return recorder.watch(tensor, parts)


def begun(since: int = 0) -> list[Open]:
    """The events that this rank has begun so far, to look at them before the run is over.

    Take ``len(begun())`` before a step, and ``begun(since=that)`` after it. What is still under way has ``end=None``;
    `Open.fields` has what an `Event` will have (kind, name, nbytes, peer, parent, labels …), times aside.

    Args:
        since: So many events are left out at the beginning.
    """
    return recorder.begun(since)


def branch(name: str) -> Branch:
    """Labels, span and virtual clock of this thread, for another one to go on with; see `Branch`."""
    return recorder.branch(name)


def current_labels() -> dict[str, Any]:
    """The labels in force here."""
    return recorder.labels()
