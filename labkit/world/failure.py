"""What went wrong in a run, and which rank did it first.

When one rank fails, the others fail too: their connections break or they wait for ever. The order of blame is

1. a disagreement in the operation table: two ranks met in different operations, or with different sizes;
2. a signal: the system, or somebody, ended a rank;
3. any other exception;
4. a lost connection, which is only ever a consequence.
"""

from __future__ import annotations

import pickle
import re
import signal
from dataclasses import dataclass, field
from typing import Any

from labkit.world.place import Place, at, is_library, shown_place, source
from labkit.world.table import WAITING, Operation
from labkit.world.wording import counted, named_ranks


class RunFailed(RuntimeError):
    """A run that ended without values. `str()` of it is the whole story.

    Attributes:
        ranks: The ranks that are to blame.
        output: What every rank had printed, as `Run.output`.
        trace: What had been recorded by the ranks that still could report, a `labkit.trace.Trace`.
    """

    ranks: list[int]
    output: list[str]
    trace: Any

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks, self.output, self.trace = ranks, [], None

    def _render_traceback_(self) -> list[str]:
        """For Jupyter: the story without labkit's own frames."""
        return [f"{type(self).__name__}: {self}"]


class Disagreement(RunFailed):
    """Ranks met in different operations, or in the same with different sizes, types or roots.

    `missing` are members that had not come there yet, nor returned.
    """

    missing: tuple[int, ...] = ()


class RankDied(RunFailed):
    """A rank was ended by a signal, or left without an exception. `signal` is its name, or ``None``."""

    def __init__(self, message: str, ranks: list[int], signal: str | None) -> None:
        super().__init__(message, ranks)
        self.signal = signal


class RankError(RunFailed):
    """A rank raised an exception; it is `__cause__` as well, where it could travel."""


class ConnectionLost(RunFailed):
    """Ranks lost each other and none of them told why."""


class RunTimeout(RunFailed, TimeoutError):
    """The run took longer than `timeout`.

    Attributes:
        table: One `Row` a rank: what it was in when time was up.
        cycle: Ranks that wait for each other in a circle, such as ``[0, 1]``; empty if there is none.
        verdict: The same in a sentence, without times.
    """

    def __init__(self, message: str, table: list[Row], cycle: list[int], verdict: str) -> None:
        super().__init__(message, [row.rank for row in table if row.state != "returned"])
        self.table, self.cycle, self.verdict = table, cycle, verdict


class RunInterrupted(KeyboardInterrupt):
    """The learner pressed stop; the message says where the ranks were."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True, slots=True)
class Row:
    """One rank in the table of a run that was cut short."""

    rank: int
    state: str  # "waiting", "running", "returned", "failed"
    operation: Operation | None = None
    waits_for: list[int] = field(default_factory=list)
    place: Place | None = None
    seconds: float = 0.0


_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|lost)|socket (closed|timeout)|broken pipe|remote process exited"
    r"|timed out|connectFullMesh|ncclRemoteError|NCCL (error|communicator was aborted)|Read error|writev",
    re.IGNORECASE,
)


def is_connection_error(raised: Any) -> bool:
    """Whether an exception only says that another rank is gone: raised by torch, or at the group around it."""
    if not raised.frames or not re.search(r"torch/|labkit/world/", raised.frames[-1][0].replace("\\", "/")):
        return False
    if raised.type in ("BrokenPipeError", "ConnectionResetError", "EOFError"):
        return True
    return raised.type in ("RuntimeError", "DistBackendError", "DistNetworkError") and bool(
        _CONNECTION.search(raised.message)
    )


def died(rank: int, status: int, last: list[Operation]) -> RankDied:
    """A rank's process ended although its function had not."""
    during = next((o for o in reversed(last) if o.state == WAITING), None)
    where = f" while in {during.signature}{at(during.place)}" if during else ""
    if status & 0x7F:
        name = signal_name(status & 0x7F)
        hint = ": out of memory, perhaps (see `labkit doctor`)" if name == "SIGKILL" else ""
        return RankDied(f"rank {rank} was ended by {name}{where}{hint}", [rank], name)
    return RankDied(f"rank {rank} ended with exit code {status >> 8}{where}: something called os._exit",
                    [rank], None)  # fmt: skip


def signal_name(number: int) -> str:
    """
    >>> signal_name(9), signal_name(64 - 20)
    ('SIGKILL', 'signal 44')
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def raised_error(raised: dict[int, Any]) -> RunFailed:
    """The exceptions of one or more ranks as one error; ranks that say the same share a traceback."""
    connection = {r: e for r, e in raised.items() if is_connection_error(e)}
    own = {r: e for r, e in raised.items() if r not in connection}
    kind = RankError if own else ConnectionLost
    stories: dict[str, list[int]] = {}
    for rank, error in sorted((own or connection).items()):
        stories.setdefault(_story(error), []).append(rank)
    text = "\n".join(f"{named_ranks(ranks)} raised {story}" for story, ranks in stories.items())
    failure = kind(text, sorted(own or connection))
    first = (own or connection)[failure.ranks[0]]
    if first.pickled is not None:
        try:
            failure.__cause__ = pickle.loads(first.pickled)
        except Exception:  # its class does not exist here, or does not unpickle
            failure.__cause__ = None
    return failure


def _story(raised: Any) -> str:
    """Type, message and the learner's own lines, newest last; library frames are counted, not shown."""
    lines = [f"{raised.type}: {raised.message}" if raised.message else raised.type, *raised.notes]
    hidden = 0
    for filename, number, function in raised.frames:
        if is_library(filename):
            hidden += 1
            continue
        lines.append(f"  {shown_place((filename, number, function))}, in {function}:  {source(filename, number)}")
        hidden = 0
    if hidden:
        library = raised.frames[-1][0].replace("\\", "/").rsplit("/", 2)
        lines.append(f"  … {counted(hidden, 'frame')} below, in {'/'.join(library[-2:])}")
    if raised.cause is not None:
        lines.append("caused by " + _story(raised.cause).replace("\n", "\n  "))
    return "\n".join(lines)
