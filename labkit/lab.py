"""JupyterLab for the lab: its token kept, on loopback, quiet, and asking nobody on the network anything."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from labkit.workcopy import WorkCopyError

#: Read by JupyterLab beside the user's own configuration: no news, no look for updates, no extension manager.
CONFIG = Path(__file__).resolve().parent / "lab_config"


def start(
    work: Path, chapter: str | None = None, ip: str = "127.0.0.1", port: int | None = None, browser: bool = True
) -> NoReturn:
    """Become JupyterLab on `work`. The process is replaced, so that Ctrl-C and signals reach the server itself.

    Args:
        work: folder that the server shows.
        chapter: file name in it to open first; None restores what was open last.
        ip: address to listen on.
        port: first port to try; None means Jupyter's own.
        browser: open one.

    Raises:
        WorkCopyError: JupyterLab is not installed.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise WorkCopyError("JupyterLab is not installed in this Python; `make lab`, or pip install jupyterlab")
    sys.stdout.flush()
    arguments = command(work, chapter, ip, port, browser, root=os.geteuid() == 0)
    os.execve(sys.executable, arguments, environment(os.environ))


def command(work: Path, chapter: str | None, ip: str, port: int | None, browser: bool, root: bool = False) -> list[str]:
    """The command line; `-P` keeps a learner's `random.py` from being the server's."""
    line = [sys.executable, "-P", "-m", "jupyterlab"]
    line += [f"--ServerApp.root_dir={work}", f"--ServerApp.ip={ip}"]
    line += [f"--LabApp.workspaces_dir={work / '.lab' / 'workspaces'}"]  # not the tabs of the user's other projects
    if port is not None:
        line += [f"--ServerApp.port={port}"]
    if chapter is not None:
        line += [f"--LabApp.default_url=/lab/tree/{chapter}"]
    if not browser:
        line += ["--no-browser"]
    if root:
        line += ["--allow-root"]
    return line


def environment(base: Mapping[str, str]) -> dict[str, str]:
    others = [base["JUPYTER_CONFIG_PATH"]] if base.get("JUPYTER_CONFIG_PATH") else []
    return {**base, "JUPYTER_CONFIG_PATH": os.pathsep.join([str(CONFIG), *others])}
