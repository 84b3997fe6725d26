"""The kernel's side of the fork server: start it, ask it for ranks, hear how they ended."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

#: Starting ranks has a limit of its own: it is not the learner's time.
START_LIMIT = 60.0

PRIVATE_PREFIX = f"labkit-{os.getuid()}-"


class StartError(RuntimeError):
    """The ranks could not be started; the message holds what the process had to say."""


class ForkServer:
    """One fork server process, started by the first run of a kernel and used by all of its pools."""

    def __init__(self) -> None:
        sweep_private_directories()
        self.owner = os.getpid()
        self.directory, self._lock_fd = make_private_directory()
        self.exits: dict[int, int] = {}
        self._lock = threading.RLock()
        self._answers: dict[str, int] = {}
        self._pending = b""
        self._preloaded: set[str] = set()
        self.is_open = True
        self.socket, theirs = socket.socketpair()
        script = Path(__file__).with_name("forkserver.py")
        log = Path(self.directory, "server.log")
        with theirs, open(log, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(script), "--kernel", str(self.owner), str(theirs.fileno()), self.directory],
                pass_fds=[theirs.fileno(), self._lock_fd], start_new_session=True, env=_server_environment(),
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        self._log, self._is_ready = log, False

    def ready(self) -> ForkServer:
        """Wait until the server has imported torch and takes orders.

        Raises:
            StartError: It did not start; the message holds what it had to say.
        """
        if not self._is_ready:
            try:
                with self._lock:
                    self._next("ready")
            except StartError as error:
                said = self._log.read_text(errors="replace") if self._log.exists() else ""
                self.close()
                raise StartError(f"the fork server did not start: {error}\n{said}".rstrip()) from None
            self._is_ready = True
        return self

    def is_alive(self) -> bool:
        return self.owner == os.getpid() and self.is_open and self.process.poll() is None

    def spawn(self, spec: dict, fds: list[int]) -> int:
        """Fork one rank; returns its pid. `fds` are control, output, probe and table."""
        with self._lock:
            try:
                socket.send_fds(self.socket, [json.dumps({"spawn": spec}).encode() + b"\n"], fds)
                return self._next("spawned")
            except OSError as error:
                raise StartError(f"the fork server is gone ({error}); run the cell again") from None
            except BaseException:  # its answer would be taken for the next rank's: give the server up
                self.is_open = False
                raise

    def kill(self, pids: list[int]) -> None:
        """SIGKILL ranks that still run; returns at once."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps({"kill": pids}).encode() + b"\n")

    def preload(self, modules: set[str]) -> None:
        """Let later ranks have what these ranks had to import; returns at once, and next time does nothing."""
        new = modules - self._preloaded
        if new and self.is_alive():
            self._preloaded |= new
            with self._lock, contextlib.suppress(OSError):
                self.socket.sendall(json.dumps({"import": sorted(new)}).encode() + b"\n")

    def poll(self) -> None:
        """Take note of ranks that ended, in `exits`: pid → wait status."""
        with self._lock:
            while self.is_open and wait([self.socket], 0):
                self._read()

    def wait_gone(self, pids: list[int], limit: float) -> bool:
        """Wait until the server has reaped these ranks."""
        end = time.monotonic() + limit
        while not self.exits.keys() >= set(pids):
            left = end - time.monotonic()
            if left <= 0 or not self.is_alive():
                return False
            wait([self.socket], left)
            self.poll()
        return True

    def close(self) -> None:
        """End the server, and with it every rank. Safe to call twice, and in a forked child of the kernel."""
        self.socket.close()
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)
        if self.owner != os.getpid():
            return
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(2)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _next(self, key: str) -> int:
        end = time.monotonic() + START_LIMIT
        while key not in self._answers:
            if not wait([self.socket], max(0.0, end - time.monotonic())):
                raise StartError(f"no answer in {START_LIMIT:.0f} s")
            self._read()
            if not self.is_open:
                raise StartError("it ended")
        return self._answers.pop(key)

    def _read(self) -> None:
        try:
            data = self.socket.recv(65536)
        except ConnectionError:
            data = b""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "exited" in message:
                self.exits[message["exited"]] = message["status"]
            else:
                self._answers.update(message)
        self.is_open = bool(data)


def _server_environment() -> dict[str, str]:
    """The server's environment is frozen when it starts, so only what its imports need is decided here.

    One OpenBLAS and OpenMP thread: a fork with threads about is not safe. Each rank sets its own number.
    """
    quiet = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **quiet}


def make_private_directory() -> tuple[str, int]:
    """A directory for this kernel alone, and the descriptor that holds it."""
    while True:
        path = tempfile.mkdtemp(prefix=f"{PRIVATE_PREFIX}{os.getpid()}-")  # mode 0700
        with contextlib.suppress(OSError):  # somebody else's sweep came between
            fd = lock_directory(path)
            if os.path.isdir(path):
                return path, fd
            os.close(fd)


def lock_directory(path: str | Path) -> int:
    """A descriptor that holds a private directory. Kernel and fork server share it: the lock goes with the last.

    Raises:
        BlockingIOError: Somebody holds it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_abandoned(path: Path) -> bool:
    """Whether nobody holds a private directory. A lock, not a process number: in a container's own list of processes
    the kernel may be missing although it lives."""
    try:
        os.close(lock_directory(path))
    except OSError:
        return False
    return True


def sweep_private_directories() -> None:
    """Remove what kernels left behind that were killed together with their fork server (an out-of-memory kill).

    Only what is a minute old: a younger one may be about to be locked.
    """
    for path in Path(tempfile.gettempdir()).glob(PRIVATE_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 60 and is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


_server: ForkServer | None = None
_server_lock = threading.Lock()


def fork_server() -> ForkServer:
    """This process's fork server, started when first asked for and again if it died."""
    return start_server().ready()


def start_server() -> ForkServer:
    """Start the fork server, if there is none, and do not wait for it."""
    global _server
    with _server_lock:
        if _server is None or not _server.is_alive():
            if _server is not None:
                _server.close()
            _server = ForkServer()
        return _server


def close_server() -> None:
    global _server
    with _server_lock:
        if _server is not None:
            _server.close()
            _server = None


atexit.register(close_server)
