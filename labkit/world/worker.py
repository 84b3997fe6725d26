"""A rank: join the world, then run what the kernel sends, each time from a clean start."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import tracemalloc
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from labkit import device
from labkit.pace import Pace
from labkit.trace import recorder
from labkit.world.forkserver import watch_process
from labkit.world.join import join
from labkit.world.journal import Journal
from labkit.world.paced import paced
from labkit.world.patches import Patches
from labkit.world.place import is_installed, learners_line
from labkit.world.report import LOADED, Raised, Report
from labkit.world.table import OperationTable
from labkit.world.transport import pack_value, unpack

#: What torch imports late: at the first optimizer, and at the first backward with a given gradient.
HEAVY = {"torch._dynamo", "torch.fx.experimental.symbolic_shapes"}


def main(spec: dict[str, Any], control: int, probe: int, table: int) -> None:
    """The life of a rank; called by the fork server in a fresh child. Returns when the kernel hangs up."""
    threading.Thread(target=_watch, args=(spec["kernel"], probe, threading.main_thread().ident), daemon=True).start()
    torch.set_num_threads(spec["threads"])
    warnings.filterwarnings("ignore", message=".*deprecated.*", category=FutureWarning, module="torch")
    rank, size, me = spec["rank"], spec["ranks"], os.getpid()
    connection = Connection(control)
    device.use(spec["plan"], spec["local_rank"])
    journal = Journal(rank, OperationTable(size, table)) if spec["record"] else None
    store = dist.FileStore(spec["store"], size)
    join(store, rank, size, spec["plan"], journal, loopback=True)
    connection.send_bytes(pickle.dumps("ready"))
    files = ChangeableFiles()
    start = CleanStart()
    while True:
        try:
            order = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)
        report = run_once(order, rank, journal, start, connection)
        if os.getpid() != me:  # a child of the learner's os.fork(), which came out of the function as well
            os._exit(0)
        report.run, report.files, report.heavy = order["run"], files.new(), HEAVY & sys.modules.keys()
        connection.send_bytes(_packed(report))
        del report  # a run's tensors go before the next
        gc.collect()
        gc.freeze()  # what is left are modules: later collections need not look at them again


def run_once(
    order: dict[str, Any], rank: int, journal: Journal | None, start: CleanStart, connection: Connection
) -> Report:
    """One run: set the scene, call the learner's function, take stock, put everything back."""

    def load() -> tuple:
        loaded = unpack(order["call"])
        connection.send_bytes(pickle.dumps(LOADED))
        return loaded

    start.scene(order)
    report = call(load, rank, order["seed"], order["zero"], journal, order.get("pace"))
    report.clean = start.restore()
    _flush()
    return report


def call(
    load: Callable[[], tuple], rank: int, seed: int, zero: float, journal: Journal | None, pace: Pace | None = None,
    offset: float = 0.0,
) -> Report:  # fmt: skip
    """Call the function that `load` gives, and report what came of it. Used under torchrun as well."""
    report = Report()
    device.begin_run()
    set_seed(seed + rank)  # ranks differ, as they do when nobody seeds them, but every run repeats itself
    if journal is not None:
        journal.begin()
        journal.clock.anchor()
        recorder.begin(rank)
    try:
        fn, args, kwargs = load()
        with paced(pace, rank, journal, offset) as clock:
            value = fn(*args, **kwargs)
            device.synchronize()
        report.value = pack_value(value)
        if clock is not None:
            report.notes, report.ended = clock.notes(), clock.ended()
    except BaseException as error:  # SystemExit too: a rank never ends on its own
        report.raised = describe(error)
        if "initialize the default process group twice" in report.raised.message:
            advice = "labkit.run has done it: leave out init_process_group, or ask dist.is_initialized() first"
            report.raised.notes.append(advice)
    if journal is not None:
        report.events = recorder.stop(zero, journal.clock.seconds)
        try:
            report.ledger = journal.end()
        except RuntimeError as error:
            report.raised = report.raised or describe(error)
    return report


def set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class CleanStart:
    """What each run finds: the kernel's environment, torch's defaults, its own output, and no group but the world."""

    def __init__(self) -> None:
        self.dtype = torch.get_default_dtype()
        self.threads = torch.get_num_threads()
        self.world = dist.group.WORLD
        self.streams = sys.stdout, sys.stderr
        self.files = _identity(1), _identity(2)
        self.running = threading.active_count()
        self.filters = warnings.filters[:]
        self.patches = Patches()

    def scene(self, order: dict[str, Any]) -> None:
        """The kernel's environment, path and folder, as they are now; no group but the world.

        Sub-groups go now, not when the run that made them ends: by now all ranks have ended it. To close the
        connections of a group that another rank is still making would fail its `new_group`.
        """
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not self.world:
                dist.destroy_process_group(group)
        os.environ.clear()
        os.environ.update(order["environ"])
        sys.path[:] = order["path"]
        with contextlib.suppress(OSError):
            os.chdir(order["cwd"])

    def restore(self) -> bool:
        """Put torch's global state back; False when these ranks are of no more use: torch was patched, so what follows
        here may not be what it was, or the world is gone, or something of the run lives on."""
        sys.stdout, sys.stderr = self.streams
        warnings.filters[:] = self.filters  # type: ignore[index]  # a list, whatever the stub says
        signal.alarm(0)
        if self.patches.any() or tracemalloc.is_tracing():  # it slows what follows, and to end it may crash
            return False
        torch.set_default_dtype(self.dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_num_threads(self.threads)
        if torch.are_deterministic_algorithms_enabled():  # the setter imports a compiler: seconds
            torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_autocast_enabled("cpu", False)
        if not dist.is_initialized() or dist.group.WORLD is not self.world:
            return False
        return not self._lives_on() and (_identity(1), _identity(2)) == self.files

    def _lives_on(self) -> bool:
        """Whether threads or child processes of the run would act in the next."""
        if threading.active_count() > self.running:
            return True
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True


def describe(error: BaseException) -> Raised:
    """An exception as plain data, its causes included."""
    try:
        return _described(error, depth=0)
    except Exception as problem:  # whatever a learner's exception class may do
        return Raised(type(error).__name__, f"(its text cannot be had: {type(problem).__name__})")


def _described(error: BaseException, depth: int) -> Raised:
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    frames = [f for f in frames if not f[0].endswith(("labkit/world/worker.py", "labkit/world/transport.py"))]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = None
    notes = getattr(error, "__notes__", [])
    return Raised(
        type(error).__name__,
        str(error),
        frames,
        _described(cause, depth + 1) if cause and depth < 5 else None,
        pickled if depth == 0 else None,
        [str(n) for n in notes] if isinstance(notes, list) else [],
    )


def _watch(kernel: int, probe: int, main_thread: int) -> None:
    """End this process when the kernel or the fork server is gone; tell, when asked, where the main thread is.

    A thread, since the main thread may sit in a collective; `os._exit`, since that works even then.
    """
    server = os.getppid()
    ends = [watch_process(kernel), watch_process(server)]
    asked = socket.socket(fileno=probe)
    waited = [f for f in (*ends, probe) if f is not None]
    while True:
        ready = wait(waited, 1.0 if None in ends else None)
        if any(f in ready for f in ends) or os.getppid() != server:
            os._exit(1)
        if probe in ready:
            if not asked.recv(1):
                waited.remove(probe)
                continue
            place = learners_line(sys._current_frames().get(main_thread))
            with contextlib.suppress(OSError):
                asked.sendall(json.dumps(place).encode() + b"\n")


class ChangeableFiles:
    """Files of the modules imported in this rank that somebody may edit: labkit's and the learner's.

    Only modules younger than the fork are looked at, newest first: to touch the others would copy the memory that
    ranks share with the fork server.
    """

    def __init__(self) -> None:
        self.known = getattr(sys.modules["__main__"], "preloaded", 0)

    def new(self) -> dict[str, int]:
        """Path → time of change, of modules that came since the last call."""
        files = {}
        for name in list(itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - self.known))):
            path = getattr(sys.modules[name], "__file__", None)
            if isinstance(path, str) and not is_installed(path):
                with contextlib.suppress(OSError):
                    files[path] = os.stat(path).st_mtime_ns
        self.known = len(sys.modules)
        return files


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _packed(report: Report) -> bytes:
    """The report, or, if something in it cannot travel, one that says so."""
    try:
        return cloudpickle.dumps(report)
    except Exception as error:
        message = f"the trace cannot be sent: {error}. Labels must be plain data"
        raised = report.raised or Raised("TypeError", message)
        return pickle.dumps(Report(raised=raised, run=report.run, files=report.files, clean=False))


def _flush() -> None:
    """Python's buffers and C's, so that everything printed is in the pipe before the report is sent."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
