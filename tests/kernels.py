"""A real IPython kernel to run code in, as JupyterLab would start one."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

import psutil
from jupyter_client.manager import KernelManager

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Kernel:
    """A kernel and its client. `run` sends a cell and waits; `send` does not wait."""

    def __init__(self, **environment: str) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        path = os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])
        self.manager.start_kernel(env={**os.environ, "PYTHONPATH": path, **environment})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid = int(self.run("import os; print(os.getpid())"))

    def send(self, code: str) -> str:
        return self.client.execute(code, store_history=False)

    def result(self, request: str, timeout: float = 60) -> str:
        """What a sent cell printed; raises what it raised."""
        text, error = [], None
        end = time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text.append(content["text"])
            elif kind in ("display_data", "execute_result"):
                text.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                break
        if error is not None:
            raise KernelError(error)
        return "".join(text)

    def run(self, code: str, timeout: float = 60) -> str:
        return self.result(self.send(code), timeout)

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def kill(self) -> None:
        os.kill(self.pid, 9)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.client.stop_channels()
            self.manager.shutdown_kernel(now=True)


class KernelError(Exception):
    """A cell raised."""


@contextlib.contextmanager
def kernel(**environment: str) -> Iterator[Kernel]:
    started = Kernel(**environment)
    try:
        yield started
    finally:
        started.close()


def ranks_of(pid: int) -> list[int]:
    """Processes that serve this kernel: its fork server and the ranks."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command = process.info["cmdline"] or []
        if any(part.endswith("forkserver.py") for part in command) and str(pid) in command:
            found.append(process.info["pid"])
    return found


def wait_until(condition, limit: float) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
