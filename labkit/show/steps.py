"""A collective read as steps: who sent what to whom, and whose parts each rank holds after each step.

Rank r fills an int64 tensor with 16**r and reduces it inside ``labkit.trace.watch(tensor, parts=N)``. Hex digit j of a
value then counts how often rank j's part is in it, so that an addition too many shows:

>>> counts(0x1021, 4)
(1, 2, 0, 1)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from labkit.trace import Event, Trace

MOST = 16  #: ranks whose parts fit in an int64, four bits each
_WORD = 2**64
States = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Move:
    """What one rank sent to another in one step, however many messages it took.

    Attributes:
        step: Counted from 1.
        src, dst: The ranks.
        chunks: The chunks that it carried; empty when nothing tells.
        nbytes: In all.
    """

    step: int
    src: int
    dst: int
    chunks: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Steps:
    """The steps of a collective.

    Attributes:
        ranks, chunks: How many; chunks that hold no element do not count.
        total: The number of the last step.
        moves: By step, then by sender.
        states: What each chunk of each rank held: ``states[step][rank][chunk]``, step 0 before anything was sent.
        target: What each chunk should hold in the end.
        labelled: Whether the messages say which chunk they carry.
        whole: Whether the tensor is one piece in this picture: then no chunk is named.
    """

    ranks: int
    chunks: int
    total: int
    moves: tuple[Move, ...]
    states: States
    target: tuple[int, ...]
    labelled: bool = True
    whole: bool = False

    def at(self, step: int) -> list[Move]:
        """The moves of a step."""
        return self._by_step[step]

    @cached_property
    def _by_step(self) -> dict[int, list[Move]]:
        found: dict[int, list[Move]] = {step: [] for step in range(self.total + 1)}
        for move in self.moves:
            found[move.step].append(move)
        return found

    def parts(self, step: int, rank: int, chunk: int) -> tuple[int, ...]:
        """How often each rank's part is in a chunk."""
        return counts(self.states[step][rank][chunk], self.ranks)

    def done(self, step: int, rank: int, chunk: int) -> bool:
        """Whether a rank has the chunk as it should be in the end."""
        return self.states[step][rank][chunk] == self.target[chunk] != 0

    def changed(self, step: int, rank: int) -> tuple[int, ...]:
        """The chunks of a rank that a step changed."""
        if step == 0:
            return ()
        before, after = self.states[step - 1][rank], self.states[step][rank]
        return tuple(c for c in range(self.chunks) if before[c] != after[c])

    def sent(self, step: int) -> list[int]:
        """Bytes that each rank sent up to and with a step."""
        total = [0] * self.ranks
        for move in self.moves:
            if move.step <= step:
                total[move.src] += move.nbytes
        return total

    def idle(self, step: int) -> list[int]:
        """The ranks that neither send nor receive in a step."""
        busy = {rank for move in self.at(step) for rank in (move.src, move.dst)}
        return [rank for rank in range(self.ranks) if rank not in busy]


def counts(value: int, ranks: int) -> tuple[int, ...]:
    """How often each rank's part is in a value: its hex digits, the lowest first."""
    value %= _WORD  # the highest digit of an int64 holds its sign
    return tuple(value >> 4 * rank & 15 for rank in range(ranks))


def read(trace: Trace, name: str) -> Steps:
    """The steps of a trace; `name` is the picture that asks for them.

    Raises:
        TypeError: `trace` is no `Trace`.
        ValueError: a rank's tensor was not watched, or was not filled with 16**rank.
    """
    _check(trace, name)
    rows = [_watched(trace, rank) for rank in range(trace.ranks)]
    if missing := [rank for rank, row in enumerate(rows) if not row]:
        raise ValueError(
            f"the trace does not say what rank {missing[0]} held: show.{name} needs the collective inside "
            f"`with labkit.trace.watch(tensor, parts={trace.ranks}):`"
        )
    placed = _placed(rows)
    total = max((step for row in placed for step, _ in row), default=0)
    width = max(len(e.after) for row in rows for e in row)
    if not 1 <= width <= MOST:
        raise ValueError(
            f"{width} parts were watched: expected 1 to {MOST}, such as watch(tensor, parts={trace.ranks})"
        )
    held = [[_values(e, width) for e in row] for row in rows]
    states = tuple(
        tuple(_state(row, values, step) for row, values in zip(placed, held, strict=True)) for step in range(total + 1)
    )
    _check_start(states[0])
    operation = _operation(rows[0])
    moves = tuple(_moves(placed, states, labelled="hierarchical" not in operation))  # its chunks are the node's
    target = _target(states[0], moves, operation)
    chunks = {e.labels["chunk"] for row in rows for e in row if "chunk" in e.labels}
    labelled = bool(chunks)
    if trace.ranks > 1:
        _check_seen(trace, rows, moves, states)
    if "hierarchical" not in operation and chunks:
        _check_parts(width, max(trace.ranks, max(chunks) + 1))
    return Steps(trace.ranks, width, total, moves, states, target, labelled, whole=name == "tree" and width == 1)


def _check(trace: object, name: str) -> None:
    if not isinstance(trace, Trace):
        hint = "pass its .trace" if isinstance(getattr(trace, "trace", None), Trace) else "pass run.trace"
        raise TypeError(f"show.{name} draws a labkit.trace.Trace, but was given {type(trace).__name__}: {hint}")
    if trace.ranks > MOST:
        raise ValueError(f"the trace has {trace.ranks} ranks: show.{name} tells the parts of at most {MOST} apart")


def _watched(trace: Trace, rank: int) -> list[Event]:
    """The events of a rank during its first watch."""
    row = [e for e in trace.of(rank) if e.after is not None]
    starts = [i for i, e in enumerate(row) if (e.kind, e.name) == ("state", "watch")]
    return row[starts[0] : starts[1] if len(starts) > 1 else None] if starts else []


def _placed(rows: list[list[Event]]) -> list[list[tuple[int, Event]]]:
    """Each event with its step: its label; without any label, a rank's k-th send and k-th receive are in step k.

    What has no label (a span, the watch itself) belongs to the step before it. Steps count from 1 whatever the
    labels begin with.
    """
    labels = [e.labels["step"] for row in rows for e in row if "step" in e.labels]
    if wrong := [label for label in labels if type(label) is not int]:
        raise ValueError(f"a message is labelled step={wrong[0]!r}: expected a whole number, counted from 1")
    first = min(labels, default=1)
    placed = []
    for row in rows:
        at, seen, here = 0, Counter[str](), []
        for e in row:
            if "step" in e.labels:
                at = e.labels["step"] - first + 1
            elif not labels and e.kind in ("send", "recv"):
                seen[e.kind] += 1
                at = seen[e.kind]
            here.append((at, e))
        placed.append(here)
    return placed


def _values(e: Event, width: int) -> tuple[int, ...]:
    if any(isinstance(v, bool) or v != v or v != int(v) for v in e.after):
        raise ValueError(f"rank {e.rank} holds {e.after}: fill an int64 tensor with 16**rank, so that parts show")
    return tuple(int(v) for v in e.after) + (0,) * (width - len(e.after))


def _state(row: list[tuple[int, Event]], values: list[tuple[int, ...]], step: int) -> tuple[int, ...]:
    """What a rank held once everything of a step was done."""
    last = max((i for i, (at, _) in enumerate(row) if at <= step), default=0)
    return values[last]


def _check_parts(width: int, chunks: int) -> None:
    """Chunks that hold no element are not watched, so fewer parts are right; more are another cut."""
    if width > chunks:
        raise ValueError(
            f"{width} parts were watched, but the ranks cut the tensor into {chunks} chunks: "
            f"use watch(tensor, parts={chunks})"
        )


def _check_seen(trace: Trace, rows: list[list[Event]], moves: tuple[Move, ...], states: States) -> None:
    """Refuse what would be drawn as if nothing had happened."""
    if not moves:
        if native := [e.name for row in rows for e in row if e.kind == "collective"]:
            raise ValueError(
                f"the messages of torch's own {native[0]} cannot be seen: use labkit.collectives, algorithm='ring'"
            )
        if any(e.kind == "send" for e in trace.events):
            raise ValueError("all messages came after the watch or before it: wait for the collective inside the watch")
    elif all(row == states[0] for row in states):
        raise ValueError("the watched tensor never changed, though messages came: watch the one that is reduced")


def _check_start(start: tuple[tuple[int, ...], ...]) -> None:
    """Every rank begins with its own part, once; a chunk that it does not have yet is 0."""
    for rank, row in enumerate(start):
        for value in row:
            if value and counts(value, len(start))[rank] != 1:
                raise ValueError(f"rank {rank} starts with {value}: fill an int64 tensor with 16**rank = {16**rank}")


def _moves(placed: list[list[tuple[int, Event]]], states: States, labelled: bool) -> Iterator[Move]:
    """Messages of one step between the same two ranks as one; their chunks as labelled, or else what they changed."""
    sizes: dict[tuple[int, int, int], int] = defaultdict(int)
    chunks: dict[tuple[int, int, int], set] = defaultdict(set)
    for row in placed:
        for step, e in row:
            if e.kind == "send" and e.peer is not None:
                key = step, e.rank, e.peer
                sizes[key] += e.nbytes
                chunks[key].add(e.labels.get("chunk"))
    for key in sorted(sizes):
        step, src, dst = key
        known = chunks[key]
        if not labelled or not all(type(c) is int for c in known):
            before, after = states[step - 1][dst], states[step][dst]
            known = {c for c in range(len(after)) if before[c] != after[c]}
        yield Move(step, src, dst, tuple(sorted(known)), sizes[key])


def _operation(row: list[Event]) -> str:
    """The name of the outermost span, such as ``"broadcast tree"``."""
    return next((e.name for e in row if e.kind == "span"), "")


def _target(start: tuple[tuple[int, ...], ...], moves: tuple[Move, ...], operation: str) -> tuple[int, ...]:
    """What each chunk should become: the sum of what the ranks began with; of a broadcast, what its root began with."""
    if operation.startswith("broadcast") and moves:
        return start[moves[0].src]
    if operation.startswith("all_gather") and len(start[0]) <= len(start):
        return tuple(start[c][c] for c in range(len(start[0])))
    return tuple(sum(row[c] for row in start) for c in range(len(start[0])))
