"""End ranks from outside: those of a notebook that hangs, or those whose notebook is gone.

A fork server's command line names the kernel that it serves, and its ranks, being forks, keep that line. So one look
at the process table finds all of them, without a file that could be out of date.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit.world.server import PRIVATE_PREFIX, is_abandoned

SCRIPT = os.path.join("labkit", "world", "forkserver.py")


@dataclass(frozen=True)
class RankProcess:
    process: psutil.Process
    kernel: int
    server: bool  # the fork server itself, which is no rank

    @property
    def stale(self) -> bool:
        """The kernel is gone: no such process, or a younger one that was given its number."""
        try:
            kernel = psutil.Process(self.kernel)
            if kernel.status() == psutil.STATUS_ZOMBIE:
                return True
            return kernel.create_time() > self.process.create_time() + 1  # the clock of /proc ticks in 10 ms
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


@dataclass(frozen=True)
class Stopped:
    ranks: int
    servers: int
    directories: int


def find() -> list[RankProcess]:
    """This user's fork servers and ranks, servers first."""
    kernels = {}
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and (kernel := kernel_of(process.cmdline())) is not None:
                kernels[process.pid] = (process, kernel, process.ppid())
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    found = [RankProcess(process, kernel, parent not in kernels) for process, kernel, parent in kernels.values()]
    return sorted(found, key=lambda one: not one.server)


def kernel_of(command_line: list[str]) -> int | None:
    """The kernel that a fork server's command line names; None for any other program, an editor included.

    >>> kernel_of(["/usr/bin/python3", "/x/labkit/world/forkserver.py", "--kernel", "42", "7", "/tmp/d"])
    42
    >>> kernel_of(["vim", "labkit/world/forkserver.py"])
    """
    for script, flag, pid in zip(command_line, command_line[1:], command_line[2:], strict=False):
        if script.endswith(SCRIPT) and flag == "--kernel" and pid.isdecimal():
            return int(pid)
    return None


def stop(stale_only: bool = False) -> Stopped:
    """Kill ranks and their fork servers, then remove the private directories that nobody holds any more.

    Args:
        stale_only: only those whose kernel is gone.
    """
    chosen = [one for one in find() if one.stale or not stale_only]
    for one in chosen:  # servers first: a server must not see its ranks die and act on it
        with contextlib.suppress(psutil.NoSuchProcess):
            one.process.kill()
    psutil.wait_procs([one.process for one in chosen], timeout=5)
    removed = sum(_remove(path) for path in private_directories() if is_abandoned(path))
    servers = sum(one.server for one in chosen)
    return Stopped(len(chosen) - servers, servers, removed)


def private_directories() -> list[Path]:
    """`labkit-<uid>-<kernel>-…` below the temporary directory, if they really are this user's."""
    mine = [
        Path(entry.path)
        for entry in os.scandir(tempfile.gettempdir())
        if entry.name.startswith(PRIVATE_PREFIX)
        and entry.is_dir(follow_symlinks=False)
        and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    ]
    return sorted(mine)


def _remove(directory: Path) -> bool:
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()
