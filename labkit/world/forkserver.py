"""The fork server: a process that has imported torch and turns into ranks on demand.

Run as a script, by path, so that it never imports labkit: a changed labkit or learner's module then only needs
new ranks, not a new server. It imports third-party modules, runs no torch operation and never touches CUDA
(a fork after either hangs or crashes), and has one thread.

It is also the janitor. It lives in its own session, so an interrupt of the notebook does not reach it, and it
watches the notebook's kernel: when that is gone, however it went, the server kills every rank, removes the
private directory and ends.

Protocol, on one Unix stream socket, JSON lines: the kernel sends ``{"spawn": {...}}`` with four file
descriptors (control, output, probe, table), ``{"kill": [pid, …]}``, or ``{"import": [module, …]}``, what ranks had to
import themselves and later ones are to share; the server answers ``{"spawned": pid}`` and reports
``{"exited": pid, "status": wait status}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Iterable

#: How many modules a rank has before it imports any itself.
preloaded = 0

PRELOAD = (
    "cloudpickle",
    "fcntl",
    "linecache",
    "mmap",
    "multiprocessing.connection",
    "numpy",
    "numpy.random",
    "sysconfig",
    "tempfile",
    "torch",
    "torch.distributed",
)


def watch_process(pid: int) -> int | None:
    """A file descriptor that becomes readable when the process ends, or ``None`` where there is no such thing.

    Linux has pidfd_open. Joining the parent is not enough: a forked child of the kernel would keep pipes open.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    if sys.platform == "darwin":  # macOS: a kqueue is itself a file that select can wait for
        queue = select.kqueue()
        event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        queue.control([event], 0)
        _kept.append(queue)
        return queue.fileno()
    return None


_kept: list = []


def die_with_parent() -> None:
    """On Linux the kernel ends this process when its parent ends, even if it never comes to look."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Server:
    def __init__(self, control: socket.socket, kernel: int) -> None:
        self.control, self.kernel = control, kernel
        self.kernel_end = watch_process(kernel)
        self.children: set[int] = set()
        self.wake_r, self.wake_w = os.pipe()
        os.set_blocking(self.wake_w, False)
        os.set_blocking(self.wake_r, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        self.pending = b""
        self.fds: list[int] = []

    def serve(self) -> None:
        waited = [f for f in (self.control.fileno(), self.wake_r, self.kernel_end) if f is not None]
        while True:
            # The time limit is only for systems without a descriptor for the kernel's end.
            ready, _, _ = select.select(waited, [], [], 1.0 if self.kernel_end is None else None)
            if self.kernel_end in ready or (self.kernel_end is None and not is_alive(self.kernel)):
                return
            if self.wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_r, 4096)
                self.reap()
            if self.control.fileno() in ready and not self.read_requests():
                return

    def read_requests(self) -> bool:
        """Handle what has arrived; False when the kernel closed the connection."""
        try:
            data, fds, _, _ = socket.recv_fds(self.control, 65536, 64)
        except ConnectionError:
            return False
        if not data:
            return False
        self.fds += fds
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "spawn" in request:
                fds, self.fds = self.fds[:4], self.fds[4:]
                self.spawn(request["spawn"], fds)
            elif "import" in request:
                with contextlib.suppress(ImportError):  # ranks can still import it themselves
                    load(request["import"])
            else:
                self.kill(request["kill"])
        return True

    def spawn(self, spec: dict, fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self.become_rank(spec, fds)  # never returns
        self.children.add(pid)
        for fd in fds:
            os.close(fd)
        self.say({"spawned": pid})

    def become_rank(self, spec: dict, fds: list[int]) -> None:
        """In the child: its own session, its own output, then labkit's worker."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the kernel's to decide on
            os.setsid()
            die_with_parent()
            self.control.close()
            for fd in (self.wake_r, self.wake_w, self.kernel_end):
                if fd is not None:
                    os.close(fd)
            os.dup2(fds[1], 1)
            os.dup2(fds[1], 2)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            os.environ.clear()
            os.environ.update(spec["environ"])
            sys.path[:] = spec["path"]
            os.chdir(spec["cwd"])
            from labkit.world.worker import main

            main(spec, control=fds[0], probe=fds[2], table=fds[3])
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def reap(self) -> None:
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.children.discard(pid)
            self.say({"exited": pid, "status": status})

    def kill(self, pids: list[int]) -> None:
        for pid in self.children.intersection(pids):  # not yet reaped, so the number still is that process
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # and what it has started: a rank leads its own session

    def say(self, message: dict) -> None:
        with contextlib.suppress(OSError):  # the kernel is going away; `serve` will notice
            self.control.sendall(json.dumps(message).encode() + b"\n")


def load(names: Iterable[str]) -> None:
    """Import what ranks are to have from the start, in memory that they share."""
    global preloaded
    for name in names:
        importlib.import_module(name)
    preloaded = len(sys.modules)
    gc.collect()
    gc.freeze()  # so that a collection in a rank does not touch, and so copy, the pages shared with it


def main() -> None:
    kernel, control, directory = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The script's own folder must not be on the path: it holds modules that shadow nothing today, but might.
    sys.path.pop(0)
    load(PRELOAD)
    sys.modules["sysconfig"].get_paths()  # it loads a large table on the first call; ranks are to share it
    try:
        server = Server(socket.socket(fileno=control), kernel)
        server.say({"ready": os.getpid()})
        try:
            server.serve()
        finally:
            server.kill(list(server.children))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
