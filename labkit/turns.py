"""One measurement at a time on a host: thirty learners who measure at once measure each other.

    with labkit.quiet():
        seconds = labkit.run(measure, ranks=4).values

Who waits has a ticket: a file in a folder that all users of the host share, named by when it was drawn, and locked as
long as its holder lives. A ticket whose lock is free belongs to somebody who is gone, and is passed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

POLL = 0.2


def folder() -> Path:
    """``LABKIT_QUEUE``, else a folder of the host's temporary files."""
    return Path(os.environ.get("LABKIT_QUEUE") or Path(tempfile.gettempdir()) / "labkit-queue")


@contextlib.contextmanager
def quiet(limit: float = 300) -> Iterator[None]:
    """Inside, nobody else on this host is inside. Who must wait is told how many are ahead.

    Args:
        limit: Seconds after which the wait ends all the same: a measurement beside others is better than none.

    Raises:
        ValueError: `limit` is not positive.
    """
    if not limit > 0:
        raise ValueError(f"limit={limit}: expected a positive number of seconds")
    try:
        ticket, lock = _draw()
    except OSError:  # a host on which nothing can be shared
        yield
        return
    try:
        _wait(ticket, limit)
        yield
    finally:
        with contextlib.suppress(OSError):
            ticket.unlink()
        os.close(lock)


def _draw() -> tuple[Path, int]:
    """A ticket, and the descriptor that holds its lock."""
    place = folder()
    if not place.is_dir():
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            place.chmod(0o1777)  # all may draw, none may take another's
    name = place / f"{time.time_ns():020d}-{os.getpid()}"
    lock = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return name, lock


def _wait(ticket: Path, limit: float) -> None:
    told, end = 0, time.monotonic() + limit
    while (ahead := _ahead(ticket)) and time.monotonic() < end:
        if ahead != told:
            print(f"labkit: {ahead} ahead of you", file=sys.stderr, flush=True)
            told = ahead
        time.sleep(POLL)


def _ahead(ticket: Path) -> int:
    """Tickets drawn earlier whose holder lives."""
    return sum(_is_held(other) for other in ticket.parent.iterdir() if other.name < ticket.name)


def _is_held(ticket: Path) -> bool:
    try:
        opened = os.open(ticket, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    with contextlib.suppress(OSError):  # nobody's any more; if it is another user's, it stays and harms nobody
        ticket.unlink()
    return False
