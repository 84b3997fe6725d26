"""A case tried on real ranks, and how it went."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import labkit
from labkit.checks.astray import way
from labkit.checks.exercise import Case, Exercise
from labkit.checks.trial import GIVEN, attempt
from labkit.collectives import ALGORITHMS
from labkit.trace import Trace
from labkit.world.output import Output

#: Seconds for a case. A right solution takes milliseconds; where nobody waits in a circle, more is granted once.
LIMIT, PATIENCE = 3.0, 30.0
#: Seconds for a second look at a rank that computes: if it stands where it stood, and has done nothing since, it loops.
SECOND = 6.0
#: Seconds for a smaller case that may hang as well: enough to see a circle, which is a proof however short the time.
GLANCE = 0.4

#: Before what a backend says as it gives up: the rank, the time and the place in its own source.
FATAL = re.compile(r"\[rank\d+\]:\[F\d+ [\d:.]+ [\w.]+:\d+\] ")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case went.

    Attributes:
        kind: As in `labkit.checks.verdict.Verdict`; "right" says that the values are, and "unclear" says that
            time was up.
        case: The case.
        why: Tells apart what is of one kind: the exception's name, the name of what was borrowed, what was wrong.
        run: What came back; ``None`` of a run that failed.
        failure: That of such a run.
    """

    kind: str
    case: Case
    why: str = ""
    run: labkit.Run | None = None
    failure: labkit.RunFailed | None = None

    def is_like(self, other: Outcome) -> bool:
        return (self.kind, self.why) == (other.kind, other.why)

    @property
    def output(self) -> str:
        """What the ranks printed, without the last words of a backend that gave up: the verdict says it better."""
        done = self.run if self.run is not None else self.failure
        texts = [] if done is None else done.output
        page = Output(len(texts))
        for rank, text in enumerate(texts):
            kept = [line for line in text.splitlines(keepends=True) if not _is_noise(line)]
            page.add(rank, "".join(kept).encode())
        return page.grouped()


def _is_noise(line: str) -> bool:
    words = line.split()
    return words[:2] == ["terminate", "called"] or words[:1] == ["what():"] or FATAL.match(line) is not None


def look(exercise: Exercise, fn: Callable[..., Any], case: Case) -> Outcome:
    """Try the function on one case. A time-out counts only if somebody waits for a message that is not under way."""
    try:
        run = _run(exercise, fn, case, LIMIT)
    except labkit.RunTimeout as stuck:
        if any(row.waits_for for row in stuck.table) and all(row.state != "running" for row in stuck.table):
            return Outcome("deadlocked", case, failure=stuck)
        try:
            run = _run_longer(exercise, fn, case, stuck)
        except labkit.RunTimeout as again:
            return Outcome("deadlocked", case, failure=again)
        except labkit.RunFailed as failure:
            return _failed(case, failure)
    except labkit.RunFailed as failure:
        return _failed(case, failure) if not _may_be_a_stub(case, failure) else look_once(exercise, fn, case, PATIENCE)
    return _returned(exercise, case, run)


def _may_be_a_stub(case: Case, failure: labkit.RunFailed) -> bool:
    """Whether some ranks said that it is not written: on a busy host the others may not have come to it in time."""
    return getattr(failure.__cause__, "is_stub", False) and len(failure.ranks) < case.ranks


def _run_longer(exercise: Exercise, fn: Callable[..., Any], case: Case, stuck: labkit.RunTimeout) -> labkit.Run:
    """A busy host may have kept the ranks from ending in time; a loop ends in no time.

    Raises:
        labkit.RunFailed: It failed, or ran out of time for good.
    """
    try:
        return _run(exercise, fn, case, SECOND)
    except labkit.RunTimeout as again:
        if None not in _standing(again) and _standing(again) == _standing(stuck):
            raise
    return _run(exercise, fn, case, PATIENCE)


def _standing(stuck: labkit.RunTimeout) -> list[Any]:
    """Of each rank that computes: the line that it is at, and how much it had done; ``None`` before its first line."""
    computing = [row for row in stuck.table if row.state == "running"]
    return [None if row.place is None else (row.rank, row.place, len(stuck.trace.of(row.rank))) for row in computing]


def look_once(exercise: Exercise, fn: Callable[..., Any], case: Case, limit: float) -> Outcome:
    """Try it once. That it hangs counts only if every rank that has not returned waits in vain."""
    try:
        return _returned(exercise, case, _run(exercise, fn, case, limit))
    except labkit.RunTimeout as stuck:
        in_vain = all(row.waits_for for row in stuck.table if row.state != "returned")
        return Outcome("deadlocked" if in_vain else "unclear", case, failure=stuck)
    except labkit.RunFailed as failure:
        return _failed(case, failure)


def _run(exercise: Exercise, fn: Callable[..., Any], case: Case, limit: float) -> labkit.Run:
    with _hushed():
        return labkit.run(attempt, exercise, fn, case, ranks=case.ranks, device="cpu", timeout=limit)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Keep back what the ranks print: a check runs a function dozens of times, and shows one of them."""
    static = os.environ.get("LABKIT_STATIC")
    os.environ["LABKIT_STATIC"] = "1"  # a notebook would show it while the ranks run
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if static is None:
            del os.environ["LABKIT_STATIC"]
        else:
            os.environ["LABKIT_STATIC"] = static


def _failed(case: Case, failure: labkit.RunFailed) -> Outcome:
    """A stub on every rank, before any message, is no attempt; on some of them, or later, it is a crash.

    Of a frame with several bodies some may be written already: it is no attempt as long as one is not.
    """
    is_stub = getattr(failure.__cause__, "is_stub", False) and len(failure.ranks) == case.ranks
    in_frame = getattr(failure.__cause__, "in_frame", False)
    kind = "not_attempted" if in_frame or (is_stub and not _communicates(failure.trace)) else "crashed"
    why = type(failure.__cause__).__name__ if failure.__cause__ else ""  # who noticed first that ranks differ is chance
    return Outcome(kind, case, why, failure=failure)


def _communicates(trace: Trace) -> bool:
    return any(e.kind in ("send", "recv", "collective") and GIVEN not in e.labels for e in trace.events)


def _returned(exercise: Exercise, case: Case, run: labkit.Run) -> Outcome:
    if name := borrowed(run, exercise.allowed):
        return Outcome("borrowed", case, name, run)
    if any(t.hasty for t in run.values):
        return Outcome("wrong", case, "hasty", run)
    if exercise.compare(case, [t.value for t in run.values], exercise.expected(case)):
        return Outcome("wrong", case, "values", run)
    if run.leftovers:
        return Outcome("wrong", case, "leftovers", run)
    if case.ranks > 1 and case.elements and not _communicates(run.trace):
        return Outcome("wrong", case, "silent", run)
    if exercise.ring and way(run.trace):
        return Outcome("wrong", case, "way", run)
    return Outcome("right", case, run=run)


def borrowed(run: labkit.Run, allowed: tuple[str, ...] = ()) -> str | None:
    """What the function called that does the exercise for it: a collective of torch's or of labkit's, or a solution."""
    for e in run.trace.events:
        name = e.name.split(" ")[0]
        if e.kind == "collective" and name not in ("new_group", *allowed):
            return f"dist.{name}"
        if e.kind == "span" and name in ALGORITHMS and name not in allowed:
            return f"collectives.{name}"
    return next((t.borrowed for t in run.values if t.borrowed), None)
