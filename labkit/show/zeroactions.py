"""What one rank did to its units and buckets, in the order in which it asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from labkit.trace import Event, Trace

#: How a collective's span begins → what it does to a column.
KINDS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all_reduce"}


@dataclass(frozen=True, slots=True)
class Column:
    """What is moved together: ``kind`` is "unit" or "bucket", ``label`` its number or name."""

    kind: str
    label: int | str


@dataclass(frozen=True, slots=True)
class Action:
    """Something that changes what a rank holds.

    Attributes:
        kind: ``"gather"``, ``"free"``, ``"reduce"`` (a reduce-scatter begins), ``"reduced"`` (it is over),
            ``"all_reduce"``, or ``"backward"``: backward is over.
        column: Whose; ``None`` for the end of backward.
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
        nbytes: What the rank sent for it.
    """

    kind: str
    column: Column | None
    phase: str
    nbytes: int = 0

    @property
    def operation(self) -> str:
        """On which account its bytes are."""
        if self.kind == "gather" and self.phase in ("forward", "backward"):
            return f"gather_{self.phase}"
        return "reduce" if self.kind == "reduced" else self.kind


def actions_of(trace: Trace, rank: int, name: str) -> dict[tuple, Action]:
    """A rank's actions, each under (kind, column, how often before); `name` is the run's, for messages.

    Raises:
        ValueError: As `labkit.show.zerosteps.read`.
    """
    line = _Line(trace, rank, name)
    found = _phased(name, _in_order(list(line.actions())))
    seen: Counter[tuple] = Counter()
    numbered = {}
    for action in found:
        key = action.kind, action.column
        numbered[*key, seen[key]] = action
        seen[key] += 1
    return numbered


class _Line:
    """The events of a rank, and who is inside whom."""

    def __init__(self, trace: Trace, rank: int, name: str) -> None:
        self.name = name
        self.events = trace.of(rank)
        self.by_index = {e.index: e for e in self.events}
        self.sent: Counter[int] = Counter()
        for e in self.events:
            if e.kind == "send" and (inside := self._collective(e)) is not None:
                self.sent[inside.index] += e.nbytes

    def actions(self) -> Iterator[tuple[int, Action]]:
        """(number of the event with which it was asked for, action); a reduce-scatter begins and ends."""
        backwards = {e.index: e.index for e in self.events if e.kind == "span" and self._is_backward(e)}
        for e in self.events:
            column = column_of(e)
            if column is None:
                continue
            if e.kind == "collective":
                raise ValueError(f"{self.name!r} moves {column.kind} {column.label!r} with torch's own {e.name}, "
                                 "which hides its messages: use `with labkit.collectives.using('ring'):`")  # fmt: skip
            asked = self._asked(e, column)
            for holder in self._around(e):
                if holder.index in backwards:  # it is not over before what was asked for inside it
                    backwards[holder.index] = max(backwards[holder.index], asked.index)
            for action in self._made(e, column, asked):
                yield asked.index, action
        for last in backwards.values():
            yield last, Action("backward", None, "backward")

    def _made(self, e: Event, column: Column, asked: Event) -> Iterator[Action]:
        phase, kind, nbytes = self._phase(e), _kind(e), self.sent[e.index]
        if e.kind == "span" and e.name == "free":
            yield Action("free", column, phase)
        elif kind == "reduce":
            # beside the rank's own work it goes on after the span in which it was asked for has ended
            late = asked is not e and (e.end is None or asked.end is None or e.end > asked.end)
            yield Action("reduce", column, phase)
            yield Action("late" if late else "reduced", column, phase, nbytes)
        elif kind is not None:
            yield Action(kind, column, phase, nbytes)

    def _is_backward(self, e: Event) -> bool:
        """Whether it is a whole backward, no part of one."""
        return e.phase == "backward" and not column_of(e) and all(o.phase != "backward" for o in self._around(e))

    def _around(self, e: Event) -> Iterator[Event]:
        """What holds an event, from the inside."""
        while e.parent is not None and e.parent in self.by_index:
            e = self.by_index[e.parent]
            yield e

    def _collective(self, e: Event) -> Event | None:
        return next((holder for holder in self._around(e) if column_of(holder) and _kind(holder)), None)

    def _asked(self, e: Event, column: Column) -> Event:
        """The outermost span around an event that is about the same column: made where the rank asked for it."""
        for holder in self._around(e):
            if column_of(holder) != column:
                break
            e = holder
        return e

    def _phase(self, e: Event) -> str:
        return next((holder.phase for holder in (e, *self._around(e)) if holder.phase), "")


def column_of(e: Event) -> Column | None:
    """What an event is labelled with; a unit counts before a bucket."""
    return next((Column(kind, e.labels[kind]) for kind in ("unit", "bucket") if kind in e.labels), None)


def _kind(e: Event) -> str | None:
    if e.kind != "span":
        return None
    return next((kind for start, kind in KINDS.items() if e.name.startswith(start)), None)


def _in_order(asked: Sequence[tuple[int, Action]]) -> list[Action]:
    """By when they were asked for; what is done to a column in several pieces is one action.

    A reduce-scatter that runs beside the rank's own work is over before the next one begins, or when backward is. The
    gradients of a unit are there before its parameters are freed, also where they are sent after that.
    """
    order: list[Action] = []
    late: list[Action] = []
    for _, action in sorted(asked, key=lambda pair: pair[0]):
        last = order[-1] if order else Action("", None, "")
        reduced = [a.column for a in late or [last] if a.kind == "reduced"]
        over = late if action.kind in ("reduce", "backward") and action.column not in reduced else []
        if action.kind == "late":
            late = [_together(late, replace(action, kind="reduced"))]
        elif (last.kind, last.column) == (action.kind, action.column):
            order[-1] = _together([last], action)
        elif action.kind == "reduce" and action.column in reduced:
            continue  # its second piece
        elif action.kind == "reduce" and (last.kind, last.column) == ("free", action.column):
            order[-1:] = [action, last, *over]
        else:
            order += [*over, action]
        if over:
            late = []
    return order + late


def _together(before: Sequence[Action], action: Action) -> Action:
    return replace(action, nbytes=action.nbytes + sum(other.nbytes for other in before))


def _phased(name: str, actions: list[Action]) -> list[Action]:
    """Each with its phase; where no span tells it, the actions themselves do."""
    buckets = [a for a in actions if a.kind == "reduce" and a.column is not None and a.column.kind == "bucket"]
    if buckets and not any(a.phase for a in actions):
        raise ValueError(f"{name!r} reduce-scatters buckets, and nothing says whether inside backward: run it in "
                         "`with labkit.trace.span('backward', phase='backward'):`")  # fmt: skip
    if buckets:
        return [replace(a, phase=a.phase or "step") for a in actions]
    told = zip(actions, _guessed(actions), strict=True)
    return [replace(action, phase=action.phase or phase) for action, phase in told]


def _guessed(actions: Sequence[Action]) -> Iterator[str]:
    """A unit that is gathered a second time, or reduced: backward has begun. One that was reduced: the next forward."""
    phase = "forward"
    gathered: set[Column | None] = set()
    reduced: set[Column | None] = set()
    for action in actions:
        again = action.kind == "gather" and action.column in (gathered if phase == "forward" else reduced)
        if again and phase == "backward":
            phase = "forward"
            gathered, reduced = set(), set()
        elif again or action.kind in ("reduce", "all_reduce", "backward"):
            phase = "backward"
        if action.kind in ("gather", "reduce"):
            (gathered if action.kind == "gather" else reduced).add(action.column)
        bucket = action.column is not None and action.column.kind == "bucket" and action.kind == "gather"
        yield "step" if bucket else phase
