"""One measurement at a time on a host: thirty learners who measure at once measure each other.

    with labkit.quiet():
        seconds = labkit.run(measure, ranks=4).values

Whose turn it is holds the lock on a folder that all users of the host share. Who waits has a ticket: a file in it,
named by when it was drawn, and locked as long as its holder lives. Tickets give the order, and the number of who is
ahead; a clock that was set back can mix up the order, and no more. A ticket whose lock is free belongs to somebody who
is gone, and is passed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

POLL = 0.2
_thread = threading.local()


def folder() -> Path:
    """``LABKIT_QUEUE``, else a folder of the host's temporary files."""
    return Path(os.environ.get("LABKIT_QUEUE") or Path(tempfile.gettempdir()) / "labkit-queue")


@contextlib.contextmanager
def quiet(limit: float = 300) -> Iterator[None]:
    """Inside, nobody else on this host is inside. Who must wait is told how many are ahead.

    Where there can be no queue, such as in a folder that cannot be written, that is told, and nobody waits. Inside
    another `quiet` of the same thread, it does nothing.

    Args:
        limit: Seconds after which the wait ends all the same: a measurement beside others is better than none.

    Raises:
        ValueError: `limit` is not positive.
    """
    if not limit > 0:
        raise ValueError(f"limit={limit}: expected a positive number of seconds")
    if getattr(_thread, "is_inside", False):
        yield
        return
    with contextlib.ExitStack() as ours:
        try:
            _take_turn(ours, limit)
        except OSError as error:
            _tell(f"no queue for measurements: {error}")
        _thread.is_inside = True
        try:
            yield
        finally:
            _thread.is_inside = False


def _take_turn(ours: contextlib.ExitStack, limit: float) -> None:
    """Draw a ticket and wait; `ours` gives back at the end what we hold."""
    place = _place()
    ticket, lock = _draw(place)
    ours.callback(_give_back, lock, ticket)
    turn = os.open(place, os.O_RDONLY)
    ours.callback(_give_back, turn)
    _wait(ticket, turn, limit)


def _give_back(lock: int, ticket: Path | None = None) -> None:
    """Unlock explicitly: a process that was forked meanwhile has the descriptor too, and would hold the lock on."""
    with contextlib.suppress(OSError):
        if ticket is not None:
            ticket.unlink()
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _place() -> Path:
    place = folder()
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            place.chmod(0o1777)  # all may draw, none may take another's
    return place


def _draw(place: Path) -> tuple[Path, int]:
    """A ticket, and the descriptor that holds its lock."""
    while True:
        name = place / f"{time.time_ns():020d}-{os.getpid()}"
        lock = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        try:
            os.fchmod(lock, 0o644)  # whatever the umask: others must see that it is held
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            name.unlink(missing_ok=True)
            os.close(lock)
            raise
        if os.fstat(lock).st_nlink:
            return name, lock
        os.close(lock)  # somebody came between the two lines above, and took it for a dead one's


def _wait(ticket: Path, turn: int, limit: float) -> None:
    """Until nobody is ahead and the lock on the folder is ours, or for `limit` seconds."""
    told, end = 0, time.monotonic() + limit
    while True:
        ahead = _ahead(ticket)
        if not ahead and _locked(turn):
            return
        if max(ahead, 1) != told:  # at least who is inside
            told = max(ahead, 1)
            _tell(f"{told} ahead of you")
        if time.monotonic() >= end:
            return
        time.sleep(POLL)


def _locked(turn: int) -> bool:
    """Lock it, if nobody has."""
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ahead(ticket: Path) -> int:
    """Tickets drawn earlier whose holder lives."""
    return sum(_is_held(other) for other in ticket.parent.iterdir() if other.name < ticket.name)


def _is_held(ticket: Path) -> bool:
    try:
        opened = os.open(ticket, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # nobody's any more; if it is another user's, it stays and harms nobody
            ticket.unlink()
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False


def _tell(what: str) -> None:
    print(f"labkit: {what}", file=sys.stderr, flush=True)
