"""`labkit doctor`: is this machine fit for the lab? One line a check, and for a failure what to do."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MARKS = {True: "✓", False: "✗", None: "–"}
FREE_MEMORY = 2 << 30  # eight ranks at about 45 MB, JupyterLab, and room for a chapter's tensors


@dataclass(frozen=True)
class Finding:
    """What a check saw. `ok` is None where there is nothing to judge; a failure needs a remedy."""

    ok: bool | None
    text: str
    remedy: str = ""


Check = Callable[[], Finding]


def main(work: Path) -> int:
    """Print every check as it ends; returns the exit code, 1 if one failed."""
    failed = 0
    for name, check in checks(work):
        finding = attempt(check)
        failed += finding.ok is False
        print(line(name, finding), flush=True)
    print(f"\n{failed} of the checks failed." if failed else "\nThis machine is ready.")
    return 1 if failed else 0


def line(name: str, finding: Finding) -> str:
    remedy = f"  → {finding.remedy}" if finding.ok is False else ""
    return f"{MARKS[finding.ok]} {name:14} {finding.text}{remedy}"


def attempt(check: Check) -> Finding:
    """A check that breaks is a failed check: the others still run."""
    try:
        return check()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return Finding(False, f"{type(error).__name__}: {reason}", "this check itself broke; please report it")


def checks(work: Path) -> Iterator[tuple[str, Check]]:
    """Every check in order, by name."""
    yield "python", python
    yield "packages", packages
    yield "widgets", widgets
    yield "two ranks", two_ranks
    yield "cores", cores
    yield "memory", memory
    yield "GPUs", gpus
    yield "stale ranks", stale_ranks
    yield "CJK font", cjk_font
    yield "working copy", lambda: working_copy(work)


def python() -> Finding:
    from packaging.specifiers import SpecifierSet

    wanted, found = _metadata()["Requires-Python"], platform.python_version()
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Finding(True, f"{found} at {sys.prefix}")
    return Finding(False, f"{found}, but labkit wants {wanted}", "install a newer Python, then `make clean lab`")


def packages() -> Finding:
    """The installed versions against the bounds in labkit's own metadata."""
    wrong = [problem for text in _metadata().get_all("Requires-Dist", []) if (problem := _judge(text))]
    if wrong:
        return Finding(False, "; ".join(wrong), "`make lab` installs what is missing, or pip install -e .")
    return Finding(True, f"labkit {_metadata()['Version']}, torch {importlib.metadata.version('torch')}, all in bounds")


def _judge(text: str) -> str:
    """What is wrong with one requirement; empty if nothing is."""
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return ""
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{requirement.name} {found} is not {requirement.specifier}"


def _metadata() -> importlib.metadata.PackageMetadata:
    return importlib.metadata.metadata("labkit")


def widgets() -> Finding:
    """Both widget front ends are in the page that JupyterLab serves, and nobody disabled them."""
    from jupyter_core.paths import jupyter_path
    from jupyterlab.commands import get_app_dir
    from jupyterlab_server.config import get_page_config

    page = get_page_config(jupyter_path("labextensions"), app_settings_dir=str(Path(get_app_dir(), "settings")))
    served = {extension["name"] for extension in page["federated_extensions"]}
    disabled = {name.split(":")[0] for name in page["disabledExtensions"]}
    wanted = {"@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets", "anywidget": "anywidget"}
    if missing := [package for name, package in wanted.items() if name not in served]:
        return Finding(False, f"JupyterLab lacks {' and '.join(missing)}", "pip install --force-reinstall NAME")
    if off := sorted(disabled & wanted.keys()):
        return Finding(False, f"disabled: {', '.join(off)}", "`jupyter labextension enable NAME`")
    return Finding(True, "JupyterLab serves ipywidgets and anywidget")


def all_reduce_of_ones() -> float:
    """What each of the two ranks runs."""
    import torch
    import torch.distributed as dist

    from labkit import device

    one = torch.ones(1, device=device.current())
    dist.all_reduce(one)
    return one.item()


def two_ranks() -> Finding:
    """Two real processes add up a tensor, within 20 seconds."""
    import labkit

    try:
        values = labkit.run(all_reduce_of_ones, ranks=2, timeout=20).values
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Finding(False, reason, "`labkit stop`, then again; is the loopback interface up and /tmp writable?")
    if list(values) != [2.0, 2.0]:
        return Finding(
            False, f"1 + 1 over two ranks gave {values}", "the torch installation is broken: `make clean lab`"
        )
    return Finding(True, "two processes all-reduced a tensor")


def cores() -> Finding:
    from labkit import device

    count = device.cores()
    return Finding(True, f"{count}" + (" (ranks take turns; every chapter still works)" if count < 4 else ""))


def memory() -> Finding:
    free = free_memory()
    text = f"{free / 2**30:.1f} GiB free"
    if free < FREE_MEMORY:
        return Finding(
            False, f"{text}, {FREE_MEMORY / 2**30:.0f} wanted", "close other programs, or raise the container's limit"
        )
    return Finding(True, text)


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still take: the machine's free memory, or less where a container limits it."""
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


def gpus() -> Finding:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return Finding(True, "none; ranks run on CPU cores, backend cpu:gloo")
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    return Finding(True, f"{count} × {names}; backend nccl up to {count} ranks, gloo for more")


def stale_ranks() -> Finding:
    from labkit import stop

    stale = [one for one in stop.find() if one.stale]
    if stale:
        return Finding(False, f"{len(stale)} processes whose notebook is gone", "`labkit stop --stale`")
    return Finding(True, "none")


def cjk_font() -> Finding:
    """Matplotlib draws boxes for Chinese words without such a font. Only fontconfig can tell."""
    if shutil.which("fc-list") is None:
        return Finding(None, "cannot tell: fc-list is not installed")
    fonts = subprocess.run(["fc-list", ":lang=zh", "family"], capture_output=True, text=True, timeout=30).stdout.split(
        "\n"
    )
    if not fonts[0]:
        remedy = "needed for Chinese labels only: apt install fonts-noto-cjk, or brew install font-noto-sans-cjk"
        return Finding(False, "none", remedy)
    return Finding(True, min(fonts[:-1]))


def working_copy(work: Path) -> Finding:
    """A file can be written there, or where it will be made."""
    folder = next(path for path in (work, *work.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(False, f"{work} cannot be written ({error.strerror})", "another place: labkit lab --dir PLACE")
    return Finding(True, f"{work}" if folder == work else f"{work} (made by the first `labkit lab`)")
