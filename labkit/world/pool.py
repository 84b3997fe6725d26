"""A pool: N ranks that have met and wait for work. Kept warm between runs, given up after anything unclean."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from labkit import device
from labkit.trace import now
from labkit.world.place import Place
from labkit.world.server import START_LIMIT, ForkServer, StartError, fork_server
from labkit.world.table import OperationTable

#: Ranks that may idle in all pools of a kernel together, and for how long.
IDLE_RANKS = 16
IDLE_SECONDS = 300.0


@dataclass(frozen=True)
class Shape:
    """What makes two pools interchangeable."""

    ranks: int
    nodes: int = 1
    plan: str = "cpu"
    record: bool = True


class Rank:
    """The kernel's end of one rank: its process and the three channels to it."""

    def __init__(self, server: ForkServer, spec: dict[str, Any], table: OperationTable) -> None:
        self.server = server
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(START_LIMIT), 0))
        self.probe, their_probe = socket.socketpair()
        self.output, their_output = os.pipe()
        os.set_blocking(self.output, False)
        self.connection = Connection(ours.detach())
        try:
            self.pid = server.spawn(spec, [theirs.fileno(), their_output, their_probe.fileno(), table.fd])
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            their_probe.close()
            os.close(their_output)

    def exit_status(self) -> int | None:
        """The wait status, once the process has ended."""
        return self.server.exits.get(self.pid)

    def read_output(self) -> bytes:
        """What it has printed since the last call: more than a pipe holds, not all that an endless loop prints."""
        parts: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while len(parts) < 64 and (part := os.read(self.output, 1 << 16)):
                parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self.connection.close()
        self.probe.close()
        os.close(self.output)


def where(members: dict[int, Rank], limit: float) -> dict[int, Place | None]:
    """File, line and function of the learner's code that ranks are in; ``None`` for one that cannot tell in time."""
    places: dict[int, Place | None] = dict.fromkeys(members)
    asked = {}
    for rank, member in members.items():
        with contextlib.suppress(OSError):
            member.probe.sendall(b"?")
            asked[member.probe] = rank
    end = time.monotonic() + limit
    while asked and (ready := wait(list(asked), max(0.0, end - time.monotonic()))):
        for probe in (p for p in list(asked) if p in ready):
            with contextlib.suppress(OSError, ValueError):
                place = json.loads(probe.recv(65536) or b"null")
                places[asked[probe]] = tuple(place) if place else None
            del asked[probe]
    return places


class Pool:
    """Start N ranks and wait until they have met."""

    _numbers = itertools.count()

    def __init__(self, shape: Shape) -> None:
        self.shape, self.owner = shape, os.getpid()
        self.server = fork_server()
        self.table = OperationTable(shape.ranks)
        os.makedirs(self.server.directory, mode=0o700, exist_ok=True)  # a cleaner of /tmp may have taken it
        self.store = os.path.join(self.server.directory, f"store-{next(self._numbers)}")
        self.files: dict[str, int] = {}
        self.idle_since = time.monotonic()
        self.closed = False
        self.zero, self.runs = now(), 0
        self.members: list[Rank] = []
        try:
            for rank in range(shape.ranks):
                self.members.append(Rank(self.server, self._spec(rank), self.table))
            self._meet()
        except BaseException:
            self.close()
            raise

    def _spec(self, rank: int) -> dict[str, Any]:
        shape = self.shape
        per_node = shape.ranks // shape.nodes
        threads = max(1, device.cores() // shape.ranks)
        return {
            "rank": rank, "ranks": shape.ranks, "local_rank": rank % per_node, "plan": shape.plan,
            "record": shape.record, "store": self.store, "kernel": os.getpid(), "threads": threads,
            "environ": rank_environment(shape, rank, threads), "path": _path(), "cwd": _cwd(),
        }  # fmt: skip

    def _meet(self) -> None:
        end = time.monotonic() + START_LIMIT
        for number, member in enumerate(self.members):
            try:
                if member.connection.poll(max(0.0, end - time.monotonic())):
                    member.connection.recv_bytes()
                    continue
                problem = f"did not answer in {START_LIMIT:.0f} s"
            except (EOFError, ConnectionError):
                problem = "ended"
            said = member.read_output().decode(errors="replace")
            raise StartError(f"rank {number} {problem} before it joined the others\n{said}".rstrip())

    def start(self, order: dict[str, Any]) -> None:
        """Hand every rank its order; the run's time counts from here.

        Raises:
            ConnectionError: A rank has ended while it was idle.
            StartError: A rank takes nothing (it was stopped, or the machine is).
        """
        self.table.clear()
        self.zero = now()
        self.runs += 1
        common = {"path": _path(), "cwd": _cwd(), "seed": 0, "zero": self.zero, "run": self.runs, **order}
        threads = max(1, device.cores() // self.shape.ranks)
        for rank, member in enumerate(self.members):
            environ = rank_environment(self.shape, rank, threads)
            try:
                member.connection.send_bytes(pickle.dumps({**common, "environ": environ}))
            except BlockingIOError:
                raise StartError(f"rank {rank} did not take its order in {START_LIMIT:.0f} s") from None

    def is_usable(self) -> bool:
        """Whether the next run may have these ranks: all alive, and no file changed that they have imported."""
        if self.closed or self.owner != os.getpid() or not self.server.is_alive():
            return False
        self.server.poll()
        if any(m.exit_status() is not None for m in self.members):
            return False
        return all(_mtime(path) == mtime for path, mtime in self.files.items())

    def close(self, wait: float = 0.0) -> None:
        """End the ranks, whatever they are in."""
        if self.closed:
            return
        self.closed = True
        pids = [m.pid for m in self.members]
        if self.owner == os.getpid():
            self.server.kill(pids)
            if wait:
                self.server.wait_gone(pids, wait)
            with contextlib.suppress(OSError):
                os.unlink(self.store)
        for member in self.members:
            member.close()
        self.table.close()


def rank_environment(shape: Shape, rank: int, threads: int) -> dict[str, str]:
    """The kernel's environment, with what torchrun would set; LABKIT_RANK keeps a rank from starting ranks."""
    per_node = shape.ranks // shape.nodes
    return {
        **os.environ,
        "RANK": str(rank), "WORLD_SIZE": str(shape.ranks), "LABKIT_RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node), "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip


class Pools:
    """The pools of this kernel: an idle one is taken, used by one run, and put back."""

    def __init__(self) -> None:
        self._idle: list[Pool] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def take(self, shape: Shape) -> Pool:
        """An idle pool of this shape, or a new one."""
        with self._lock:
            for pool in reversed(self._idle):
                if pool.shape == shape:
                    self._idle.remove(pool)
                    if pool.is_usable():
                        return pool
                    pool.close()
                    break
        try:
            return Pool(shape)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        self.close()  # idle ranks hold descriptors, too
        try:
            return Pool(shape)
        except OSError as error:
            raise StartError(f"{error}: close files, or raise the limit (ulimit -n)") from None

    def put_back(self, pool: Pool) -> None:
        """Keep the pool for the next run, and give up the longest idle ones beyond `IDLE_RANKS`."""
        pool.idle_since = time.monotonic()
        with self._lock:
            self._idle.append(pool)
            while sum(p.shape.ranks for p in self._idle) > IDLE_RANKS and len(self._idle) > 1:
                self._idle.pop(0).close()
            self._schedule()

    def reap(self) -> None:
        """Give up pools that have been idle for `IDLE_SECONDS`."""
        limit = time.monotonic() - IDLE_SECONDS
        with self._lock:
            self._timer = None
            for pool in [p for p in self._idle if p.idle_since <= limit]:
                self._idle.remove(pool)
                pool.close()
            self._schedule()

    def close(self) -> None:
        with self._lock:
            for pool in self._idle:
                pool.close()
            self._idle.clear()

    def forget(self) -> None:
        """In a forked child of the kernel: the ranks are its parent's."""
        self._idle, self._lock, self._timer = [], threading.Lock(), None

    def _schedule(self) -> None:
        if self._idle and self._timer is None:
            wait = max(1.0, self._idle[0].idle_since + IDLE_SECONDS - time.monotonic())
            self._timer = threading.Timer(wait, self.reap)
            self._timer.daemon = True
            self._timer.start()


pools = Pools()
os.register_at_fork(after_in_child=pools.forget)


def _mtime(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _path() -> list[str]:
    return [str(p) for p in sys.path]  # people append pathlib's paths, too


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return tempfile.gettempdir()
