"""`show.ring` and `show.tree`: a collective step by step, and whose parts each rank holds by then."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from labkit.show import who
from labkit.show.figure import WIDE, Drawing, Figure, Table, source_of
from labkit.show.lanes import runs
from labkit.show.matrix import Film, Matrix
from labkit.show.progress import ring_finding, tree_finding
from labkit.show.steps import Move, Steps, counts, read
from labkit.show.svg import size_of, text, wrap
from labkit.show.words import count, say
from labkit.trace import Trace

DRAWN = 8  #: ranks of a circle; of more the matrix alone is drawn
Place = tuple[float, float]
Places = Callable[[float, float], list[Place] | None]


def ring(trace: Trace, title: str | None = None, source: str | None = None) -> Figure:
    """Step through a ring: who sends which chunk, and whose parts each rank's chunks hold by then.

    Rank r fills an int64 tensor with 16**r and reduces it inside ``with labkit.trace.watch(tensor, parts=N):``; of a
    rank that does not have a chunk yet (all-gather), the chunk is 0. The picture holds for whatever the ranks really
    did: a part that was added twice shows as a 2.

    Args:
        trace: What the run recorded; its messages are labelled with `step` and, where they carry one, `chunk`.
            Without labels a rank's k-th message is in step k, and its chunk is what changed at the receiver.
        title: The finding; left out, it is derived from the trace.
        source: ``"measured"``, ``"paced"`` or ``"simulated"``; left out, the trace knows.

    Returns:
        A figure that steps with the arrow keys; a click on a chunk, or its number's key, follows it.

    Raises:
        TypeError: `trace` is no `Trace`, or `title` no text.
        ValueError: the tensor was not watched or not filled with 16**rank, there are more than 16 ranks or parts,
            or `source` is unknown.

    Source: the ring of Patarasuk and Yuan (2009), section 3.

    >>> from labkit.trace import Event, Trace
    >>> def rank(r, other, last):
    ...     return [Event("state", "watch", r, 0.0, 0.0, after=[16**r] * 2, index=0),
    ...             Event("send", "send", r, 0.1, 0.2, 8, other, labels={"step": 1, "chunk": other}, index=1,
    ...                   after=last)]
    >>> print(ring(Trace(rank(0, 1, [17, 1]) + rank(1, 0, [16, 17]), 2)))
    Every rank sends at every step; after 1 of 1 steps each rank has one finished chunk [measured]
      A row is a rank, a column a chunk. Tick j of a cell: rank j's part is in it. ✓: finished.
      Step 1. 0→1 chunk 1 {0}. Now rank 1 chunk 1 = {0,1}.
      Step 1. 1→0 chunk 0 {1}. Now rank 0 chunk 0 = {0,1}.
    """
    steps = read(trace, "ring")
    found, start = ring_finding(steps)
    places = (lambda w, h: who.circle(steps.ranks, w, h)) if steps.ranks <= DRAWN else None
    return _figure(steps, _titled(title, found), start, places, False, source_of(source, trace.paced))


def tree(trace: Trace, title: str | None = None, source: str | None = None) -> Figure:
    """Step through a tree, or whatever else sends in steps: who sends, who waits, and whose parts each rank holds.

    Messages that make up a tree (binomial, or the central one's star) are drawn from the root down; others (mesh,
    halving-doubling) with the ranks in a circle. A rank that neither sends nor receives in a step is dotted.

    A tree sends the whole tensor: ``parts=1`` is enough to watch it, and then no chunk is named.

    Args, returns, raises:
        As `ring`. Of a broadcast, fill with 0 what a rank does not have yet.
    """
    steps = read(trace, "tree")
    found, start = tree_finding(steps)

    def places(width: float, height: float) -> list[Place] | None:
        standing = who.tree(steps, width, height)
        return who.circle(steps.ranks, width, height) if standing is None and steps.ranks <= DRAWN else standing

    return _figure(steps, _titled(title, found), start, places, True, source_of(source, trace.paced))


def _titled(title: object, found: str) -> str:
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title is {title!r}: expected text, or nothing to have it derived from the trace")
    return found if title is None else title


def _figure(steps: Steps, title: str, start: int, places: Places | None, senders: bool, source: str) -> Figure:
    views: dict[int, View] = {}

    def draw(width: int, frame: int | None) -> Drawing:
        if width not in views:
            views[width] = View(steps, width, places, senders)
        return views[width].draw(start if frame is None else frame)

    return Figure(title, draw, _twin(steps), source=source, notes=_notes(steps, senders), start=start,
                  sheets=("steps",), says=[_says(steps, k) for k in range(steps.total + 1)],
                  follow=[str(c) for c in range(steps.chunks)] if steps.chunks > 1 else ())  # fmt: skip


class View:
    """The picture in one layout: who sends, the matrix, the film of all steps, and the foot."""

    def __init__(self, steps: Steps, width: float, places: Places | None, senders: bool) -> None:
        self.steps, self.width, self.senders = steps, width, senders
        self.wide = width >= WIDE
        self.size = 13 if self.wide else 12
        self.short = not self.wide or steps.ranks > DRAWN
        beside = self.wide and steps.ranks <= DRAWN
        self.places = None if places is None else places(*self._panel(beside))
        left = 286 if beside and self.places else 4
        top = 0.0 if beside or not self.places else self._panel(beside)[1] + 12
        self.matrix = m = Matrix.within(steps, left, top, width - left - 4, self.size, short=self.short)
        self.frame, self.down = m.frame(self.short), 0.0
        bottom = m.y + m.height
        if self.places:
            height = max(y for _, y in self.places) + who.NODE + 12
            self.down = max(0.0, (bottom - height) / 2) if beside else 0.0
            bottom = max(bottom, height)
        self.feet = [wrap(self._foot(k), width - 16, self.size) for k in range(steps.total + 1)]
        self.floor = bottom + 24  # the foot's first line; every frame is as high as the highest
        self.height = bottom + 22 + 17 * max(map(len, self.feet))
        self.film = None
        if steps.total and steps.ranks <= DRAWN:
            self.film = Film.within(steps, 8, self.height, width - 16)
            self.height += self.film.height + 8

    def _panel(self, beside: bool) -> tuple[float, float]:
        """Room for the ranks."""
        if beside:
            return 270, 250 if self.steps.ranks <= 4 else 280
        return self.width - 8, min(self.width - 40, 236 if self.steps.ranks <= 4 else 270)

    def draw(self, step: int) -> Drawing:
        m = self.matrix
        parts = [*self.frame, *m.state(step)]
        if self.places:
            parts += who.draw(self.steps, step, self.places, 4, self.down)
        parts += [text(8, self.floor + 17 * n, line, self.size) for n, line in enumerate(self.feet[step])]
        if self.film:
            parts += [*self.film.pictures, self.film.here(step)]
        width, strip = max(self.width, m.x + m.width + 4), None
        if width > self.width + 1:
            strip = (m.label - 4, m.y + m.height, (m.names(self.short),))
        return Drawing(width, self.height, tuple(p for p in parts if p), strip, m.style)

    def _foot(self, step: int) -> str:
        s = self.steps
        done, whole = s.sent(step), s.sent(s.total)
        most = max(range(s.ranks), key=lambda r: (whole[r], -r))
        values = {"step": step, "steps": s.total, "done": size_of(done[most]), "all": size_of(whole[most])}
        alike = len(set(whole)) == 1
        told = [say("steps.foot", **values) if alike else say("steps.foot_most", rank=most, **values)]
        if self.senders and step:
            senders = len({m.src for m in s.at(step)})
            told.append(count("steps.senders", senders, ranks=s.ranks))
        return " · ".join(told)


def _notes(steps: Steps, pattern: bool) -> list[str]:
    """What the looks mean. `pattern`: of a tree or another pattern only labels tell that a tensor goes in chunks."""
    notes = [say("steps.legend_whole") if steps.whole else say("steps.legend")]
    if any(max(steps.parts(steps.total, r, c)) > 1 for r in range(steps.ranks) for c in range(steps.chunks)):
        notes.append(say("steps.legend_twice"))
    if pattern and (steps.whole or not steps.labelled):
        return notes
    if steps.chunks < steps.ranks and all(len(m.chunks) == 1 for m in steps.moves):
        notes.append(say("steps.empty", chunks=steps.chunks, ranks=steps.ranks))
    return notes


# The twin, and the announcements: a sentence a send, and what it came to


def _twin(steps: Steps) -> Table:
    columns = (say("steps.column_step"), say("steps.column_send"), say("steps.column_now"))
    rows, lines = [], []
    for move in steps.moves:
        sent, now = _sent(steps, move), _now(steps, move)
        rows.append((str(move.step), sent, now))
        lines.append(say("steps.line", step=move.step, send=sent, now=now))
    return Table(columns, rows, lines=lines)


def _says(steps: Steps, step: int) -> str:
    if step == 0:
        return say("steps.start", steps=steps.total)
    moves = steps.at(step)
    told = [say("steps.told", send=_sent(steps, m), now=_now(steps, m)) for m in moves[: 4 if len(moves) <= 4 else 3]]
    if len(told) < len(moves):
        told.append(count("steps.more", len(moves) - len(told)))
    return say("steps.announce", step=step, steps=steps.total, what=" ".join(told) or say("steps.quiet"))


def _sent(steps: Steps, move: Move) -> str:
    """ "0→1 chunk 2 {0,3}": the chunks, and whose parts the sender had in them."""
    key = "steps.holds_whole" if steps.whole else "steps.holds"
    held = _held(steps, move.step - 1, move.src, move.chunks, key) or [size_of(move.nbytes)]
    return say("steps.send", src=move.src, dst=move.dst, what=", ".join(held))


def _now(steps: Steps, move: Move) -> str:
    """What the receiver has after the step, in the chunks that were sent or that changed."""
    changed = steps.changed(move.step, move.dst)
    lone = sum(m.dst == move.dst for m in steps.at(move.step)) == 1
    chunks = sorted({*move.chunks, *changed}) if lone else move.chunks
    key = "steps.is_whole" if steps.whole else "steps.is"
    held = _held(steps, move.step, move.dst, tuple(chunks), key) or [say("steps.as_before")]
    return say("steps.now", rank=move.dst, what=", ".join(held))


def _held(steps: Steps, step: int, rank: int, chunks: tuple[int, ...], key: str) -> list[str]:
    told = []
    chunks = tuple(c for c in chunks if c < steps.chunks)
    row = steps.states[step][rank]
    for value, group in groupby(chunks, key=lambda c: row[c]):
        named = {} if steps.whole else {"chunks": _chunks(steps, tuple(group))}
        told.append(say(key, parts=_parts(value, steps.ranks), **named))
    return told


def _chunks(steps: Steps, chunks: tuple[int, ...]) -> str:
    if len(chunks) == steps.chunks > 1:
        return say("steps.all_chunks")
    key = "steps.one_chunk" if len(chunks) == 1 else "steps.some_chunks"
    return say(key, chunks=who.chunk_list(steps, chunks))


def _parts(value: int, ranks: int) -> str:
    """Whose parts, as a set: "{0,1×2,3}"; of many ranks neighbours together, "{0,2–7}"."""
    parts = counts(value, ranks)
    once = tuple(rank for rank, n in enumerate(parts) if n == 1)
    held = {rank: f"{rank}×{n}" for rank, n in enumerate(parts) if n > 1}
    for a, b in runs(once):
        short = ranks > 4 and b > a + 1
        held |= {a: f"{a}–{b}"} if short else {rank: str(rank) for rank in range(a, b + 1)}
    return "{" + ",".join(held[rank] for rank in sorted(held)) + "}"
