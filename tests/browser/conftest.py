"""A real JupyterLab, started as a learner starts it, and a real Chromium that looks at it.

The server and the browser are started once a file and gone after it; each test gets a fresh page. `Lab` notes what
a page must not do: errors on the console, and requests to anybody but this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

#: Without these Chromium itself talks to its makers, and needs a sandbox that containers do not allow.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

KERNEL_IS_IDLE = """() => document.querySelector('.jp-NotebookPanel [data-status="idle"]')
    && document.querySelector(".jp-Toolbar-kernelName").textContent !== "No Kernel" """

#: True when every code cell that holds something has a number, and another one than before.
ALL_HAVE_RUN = r"""before => [...document.querySelectorAll(".jp-Notebook .jp-CodeCell")].every((cell, index) => {
    const prompt = cell.querySelector(".jp-InputPrompt").textContent;
    return !cell.querySelector(".cm-content").textContent.trim() || (/\d/.test(prompt) && prompt !== before[index]);
})"""

REQUIRED = os.environ.get("CI") == "true" or os.environ.get("LABKIT_REQUIRE_BROWSER") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@dataclass(frozen=True)
class Server:
    """A running `labkit lab`."""

    url: str  # with the token
    work: Path

    def address(self, notebook: str) -> str:
        """Where a notebook opens alone: `reset` closes the tabs that another test left."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}/lab/tree/{notebook}?reset&{parts.query}"


@dataclass
class Lab:
    """A page of JupyterLab, and what it did that it must not."""

    page: Page
    server: Server
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._note_host(request.url))
        self.page.on("websocket", lambda socket: self._note_host(socket.url))

    @property
    def strange_hosts(self) -> set[str]:
        """Whom the page asked besides this machine."""
        return self.hosts - {"127.0.0.1", "localhost"}

    def open(self, notebook: str) -> None:
        """Open a notebook and wait until its kernel is there."""
        self.page.goto(self.server.address(notebook))
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.wait_until_idle()

    def run_all(self, timeout: float = 120) -> None:
        """Run → Run All Cells, and wait for the last; a cell that fails ends in a time-out."""
        before = self.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts()
        self.page.click('.lm-MenuBar-itemLabel:text-is("Run")', timeout=5000)
        self.page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
        self.page.wait_for_function(ALL_HAVE_RUN, arg=before, timeout=timeout * 1000)
        self.wait_until_idle()

    def wait_until_idle(self, timeout: float = 60) -> None:
        """Wait for a kernel that has nothing to do; before there is one, the page says idle too."""
        self.page.wait_for_function(KERNEL_IS_IDLE, timeout=timeout * 1000)

    def outputs(self) -> list[str]:
        """The text of every output on the page, in order."""
        return [text.rstrip() for text in self.page.locator(".jp-Notebook .jp-OutputArea-output").all_inner_texts()]

    def screenshot(self, path: Path) -> Path:
        self.page.screenshot(path=path)
        return path

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _note_host(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https", "ws", "wss"):
            self.hosts.add(parts.hostname or "")


@pytest.fixture(scope="module")
def chromium() -> str:
    """Chromium's path; where there is none the tests are skipped, or fail where they were asked for."""
    for name in ("chromium", "google-chrome", "chromium-browser"):
        if path := shutil.which(name):
            return path
    if REQUIRED:
        pytest.fail("no Chromium, but CI=true or LABKIT_REQUIRE_BROWSER=1 asks for the browser tests")
    pytest.skip("no Chromium on this machine")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield instance
        instance.close()


@pytest.fixture(scope="module")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`labkit lab --no-browser` with a home of its own, so that no setting of this user matters."""
    base = tmp_path_factory.mktemp("lab")
    work = base / "work"
    work.mkdir()
    show_all_cells(base)
    line = [sys.executable, "-m", "labkit.cli", "lab", "--no-browser", "--dir", str(work), "--port", str(free_port())]
    log = base / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=clean_environment(base),
            start_new_session=True,
        )
    try:
        yield Server(wait_for_address(process, log), work)
    finally:
        end(process)


@pytest.fixture
def lab(browser: Browser, server: Server) -> Iterator[Lab]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield Lab(context.new_page(), server)
    context.close()


def show_all_cells(home: Path) -> None:
    """Keep cells outside the window in the page, where a test can see them; usually JupyterLab takes them out."""
    settings = home / ".jupyter/lab/user-settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}')


def clean_environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "LABKIT", "IPYTHON"))}
    return {**kept, "HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "XDG_DATA_HOME": str(home / "data")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_address(process: subprocess.Popen, log: Path, limit: float = 60) -> str:
    """The address with its token, as the server prints it for a person."""
    end_at = time.monotonic() + limit
    while time.monotonic() < end_at and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+", log.read_text(errors="replace")):
            return found.group()
        time.sleep(0.1)
    pytest.fail(f"labkit lab did not start:\n{log.read_text(errors='replace')}")


def end(process: subprocess.Popen) -> None:
    """Two Ctrl-C would do as well; SIGTERM lets the server end its kernels."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
