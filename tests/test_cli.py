"""The `labkit` command: what it answers, what it hands on, and what it does to processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit import cli, lab, stop
from labkit.world.server import lock_directory


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jupyter_home: Path) -> Path:
    """Notebooks of a lab with two chapters, found by the command."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("00_start", "01_memory"):
        nbformat.write(new_notebook(cells=[new_code_cell("1 + 1")]), folder / f"{name}.ipynb")
    monkeypatch.setattr(cli, "source_dir", lambda: folder)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Instead of becoming JupyterLab: what it would have been started with."""
    calls: list[tuple] = []
    monkeypatch.setattr(lab, "start", lambda *arguments: calls.append(arguments))
    return calls


def test_help_is_instant_and_loads_nothing_heavy():
    program = "import sys; from labkit.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    program += "print({'torch', 'numpy', 'nbformat', 'psutil', 'jupyterlab', 'matplotlib'} & sys.modules.keys())"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "set()"
    assert all(word in output for word in ("lab", "reset", "doctor", "stop", "bench"))


def test_the_console_script_is_the_same_program():
    script = Path(sys.executable).with_name("labkit")
    said = subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout
    import labkit

    assert said == f"labkit {labkit.__version__}\n"


def test_lab_makes_the_working_copy_and_opens_the_first_chapter_once(source, started, tmp_path, capsys):
    work = tmp_path / "work"
    cli.main(["lab", "--dir", str(work)])
    assert started == [(work, "00_start.ipynb", "127.0.0.1", None, True)]
    assert capsys.readouterr().out == f"new in {work}: 00_start.ipynb, 01_memory.ipynb\n"
    cli.main(["lab", "--dir", str(work)])
    assert started[-1][1] is None, "later, what was open last comes back"
    assert capsys.readouterr().out == ""


def test_lab_hands_its_options_on(source, started, tmp_path):
    cli.main(["lab", "1", "--dir", str(tmp_path / "w"), "--port", "9001", "--ip", "0.0.0.0", "--no-browser"])
    assert started == [(tmp_path / "w", "01_memory.ipynb", "0.0.0.0", 9001, False)]


def test_lab_names_kept_and_unreadable_copies(source, started, tmp_path, capsys):
    work = tmp_path / "work"
    cli.main(["lab", "--dir", str(work)])
    nbformat.write(new_notebook(cells=[new_code_cell("mine")]), work / "00_start.ipynb")
    (work / "01_memory.ipynb").write_text("{")
    for name in ("00_start", "01_memory"):
        nbformat.write(new_notebook(cells=[new_code_cell("2 + 2")]), source / f"{name}.ipynb")
    capsys.readouterr()
    cli.main(["lab", "--dir", str(work)])
    kept, unreadable = capsys.readouterr().out.splitlines()
    assert kept.startswith("has a newer version, yours is kept: 00_start.ipynb")
    assert unreadable.startswith("is not a readable notebook, left alone: 01_memory.ipynb")


@pytest.mark.parametrize("command", ["lab", "reset"])
def test_an_unknown_chapter_is_one_sentence(source, started, tmp_path, capsys, command):
    assert cli.main([command, "42", "--dir", str(tmp_path / "work")]) == 2
    assert capsys.readouterr().err == "labkit: there is no chapter '42'; chapters: 00_start, 01_memory\n"
    assert not (tmp_path / "work").exists()
    assert started == []


def test_reset_says_where_the_learners_version_is(source, tmp_path, capsys):
    work = tmp_path / "work"
    cli.main(["reset", "00", "--dir", str(work)])
    cli.main(["reset", "00", "--dir", str(work)])
    first, second, hint = capsys.readouterr().out.splitlines()
    assert "Reload Notebook from Disk" in hint
    assert first == f"{work / '00_start.ipynb'} is as it was issued"
    assert second == f"{first}; yours is 00_start.mine.ipynb"


def test_jupyter_keeps_its_token_and_gets_quiet_settings():
    line = lab.command(Path("/lab"), None, "127.0.0.1", None, browser=True)
    assert "--ServerApp.ip=127.0.0.1" in line
    assert not any("token" in word or "password" in word for word in line)
    assert "--allow-root" not in line
    assert "--allow-root" in lab.command(Path("/lab"), None, "127.0.0.1", None, browser=True, root=True)
    assert lab.environment({"A": "1"}) == {"A": "1", "JUPYTER_CONFIG_PATH": str(lab.CONFIG)}
    assert lab.environment({"JUPYTER_CONFIG_PATH": "/x"})["JUPYTER_CONFIG_PATH"] == f"{lab.CONFIG}{os.pathsep}/x"


def test_jupyter_reads_the_packaged_settings(jupyter_home, monkeypatch):
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(lab.CONFIG))
    from jupyterlab.labapp import LabApp
    from jupyterlab_server.config import get_page_config
    from jupyterlab_server.settings_utils import _get_overrides

    app = LabApp()
    app.load_config_file(suppress_errors=False)
    assert app.news_url is None
    assert app.check_for_updates_class.__name__ == "NeverCheckForUpdate"
    assert app.extension_manager == "readonly"
    overrides, error = _get_overrides(str(jupyter_home))
    assert not error
    assert overrides["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    assert "@jupyterlab/apputils-extension:announcements" in get_page_config([])["disabledExtensions"]


def test_without_jupyterlab_the_answer_is_a_sentence(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["lab", "--dir", str(tmp_path / "work")]) == 2
    assert "JupyterLab is not installed" in capsys.readouterr().err


def test_a_closed_pipe_is_no_traceback():
    """As in `labkit doctor | head -1`."""
    program = "import sys; from labkit import cli, doctor; doctor.main = lambda work: print(1, flush=True)\n"
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-c", program + "sys.exit(cli.main(['doctor']))"]
    done = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_doctor_is_given_the_working_copy(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("labkit.doctor.main", lambda work: seen.append(work) or 1)
    assert cli.main(["doctor", "--dir", str(tmp_path)]) == 1
    assert seen == [tmp_path]


def test_bench_is_handed_on_with_its_own_options(monkeypatch):
    import labkit

    seen = []
    bench = types.SimpleNamespace(main=lambda arguments: seen.append(arguments))
    monkeypatch.setitem(sys.modules, "labkit.bench", bench)
    monkeypatch.setattr(labkit, "bench", bench, raising=False)
    assert cli.main(["bench", "launch", "--pairs", "11"]) == 0
    assert seen == [["launch", "--pairs", "11"]]


# Stopping ranks. The impostor is a program whose command line is that of a fork server.

IMPOSTOR = "import os, sys, time\nif '--fork' in sys.argv: os.fork()\nprint('up', flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Starts a program that looks like a fork server; only such ones, never real ones, are found by `stop`."""
    script = tmp_path / "only_this_test" / stop.SCRIPT
    script.parent.mkdir(parents=True)
    script.write_text(IMPOSTOR)
    monkeypatch.setattr(stop, "SCRIPT", str(script))
    running: list[subprocess.Popen] = []

    def begin(kernel: int, *more: str) -> subprocess.Popen:
        line = [sys.executable, str(script), "--kernel", str(kernel), *more]
        running.append(subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True))
        for _ in range(1 + ("--fork" in more)):
            running[-1].stdout.readline()
        return running[-1]

    yield begin
    for process in running:
        for child in psutil.Process(process.pid).children() if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()
        process.stdout.close()


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_stop_ends_servers_and_ranks_and_removes_private_directories(fork_server, private_tmp, capsys):
    server = fork_server(os.getpid(), "--fork")
    rank = psutil.Process(server.pid).children()[0]
    mine = private_tmp / f"labkit-{os.getuid()}-{os.getpid()}-abc"
    mine.mkdir()
    (mine / "store").write_text("x")
    other = private_tmp / f"labkit-{os.getuid() + 1}-7-abc"
    other.mkdir()
    (private_tmp / f"labkit-{os.getuid()}-7-link").symlink_to(other)
    assert cli.main(["stop"]) == 0
    assert capsys.readouterr().out == "stopped 1 rank of 1 notebook, removed 1 private directory\n"
    server.wait(5)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert not mine.exists()
    assert other.exists()


def test_stop_stale_spares_those_whose_kernel_lives(fork_server, private_tmp, capsys):
    gone = dead_pid()
    living, orphan = fork_server(os.getpid()), fork_server(gone)
    for kernel in (os.getpid(), gone):
        (private_tmp / f"labkit-{os.getuid()}-{kernel}-abc").mkdir()
    held = lock_directory(private_tmp / f"labkit-{os.getuid()}-{os.getpid()}-abc")  # as a living kernel holds its own
    assert cli.main(["stop", "--stale"]) == 0
    assert capsys.readouterr().out == "stopped 0 ranks of 1 notebook, removed 1 private directory\n"
    orphan.wait(5)
    assert living.poll() is None
    assert (private_tmp / f"labkit-{os.getuid()}-{os.getpid()}-abc").is_dir()
    os.close(held)


def test_a_number_given_to_a_younger_process_is_not_the_kernel(fork_server):
    server = fork_server(os.getpid())
    time.sleep(1.2)
    younger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        one = stop.RankProcess(psutil.Process(server.pid), younger.pid, server=True)
        assert one.stale
        assert not stop.RankProcess(psutil.Process(server.pid), os.getpid(), server=True).stale
    finally:
        younger.kill()
        younger.wait()


def test_real_ranks_are_found():
    """A kernel with a pool of two: one server, two ranks, none of them stale until the kernel is gone."""
    program = "import labkit; labkit.run(print, ranks=2); print('up', flush=True); input()"
    line = [sys.executable, "-c", program]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as kernel:
        assert any(line == "up\n" for line in kernel.stdout), "the run failed"
        found = [one for one in stop.find() if one.kernel == kernel.pid]
        kernel.communicate("\n")
    assert [one.server for one in found] == [True, False, False]
    assert all(one.stale for one in found)


@pytest.mark.parametrize(
    "line",
    [
        ["vim", "labkit/world/forkserver.py"],
        ["python", "-m", "pytest", "labkit/world/forkserver.py"],
        ["grep", "labkit/world/forkserver.py", "--kernel", "x"],
        [],
    ],
)
def test_programs_that_only_mention_the_script_are_left_alone(line):
    assert stop.kernel_of(line) is None
