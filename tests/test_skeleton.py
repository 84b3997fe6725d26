"""What is written twice says the same, and the Makefile does what the README promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook
from packaging.requirements import Requirement

import labkit
from labkit import cli, execute

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

#: What conda calls it → what pip calls it.
CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}


def bounds(requirements: list[str]) -> dict[str, str]:
    parsed = [Requirement(text) for text in requirements]
    return {CONDA_NAMES.get(one.name, one.name): str(one.specifier) for one in parsed}


def test_conda_and_pip_install_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = bounds([one for one in environment["dependencies"] if isinstance(one, str) and one != "pip"])
    assert conda.pop("python") == PROJECT["requires-python"]
    assert conda == bounds(PROJECT["dependencies"])
    assert {"pip": ["--editable ."]} in environment["dependencies"]


def test_the_version_is_written_once():
    from importlib.metadata import version

    assert "version" in PROJECT["dynamic"]
    assert version("labkit") == labkit.__version__


def test_the_workflow_tests_the_oldest_python_that_is_supported():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert f">={matrix['python'][0]}" == PROJECT["requires-python"]
    assert any("make" in step.get("run", "") and "test" in step["run"] for step in workflow["jobs"]["test"]["steps"])


def test_the_readme_names_every_command_and_every_target_that_it_names_exists(capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE))
    assert {"lab", "reset", "doctor", "stop", "bench"} <= commands
    assert set(re.findall(r"`labkit (\w+)", readme)) <= commands
    assert {"lab", "reset", "doctor", "stop"} <= set(re.findall(r"`labkit (\w+)", readme))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"lab", "test", "lint", "soak", "notebooks", "clean"} <= targets
    assert set(re.findall(r"make ([a-z]+)", readme)) - {"with"} <= targets


def test_the_readme_lists_the_chapters_that_are_there():
    """In their order, each with a link."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`(\d\d_\w+)`\]\(notebooks/\1\.ipynb\) \|", readme, re.MULTILINE)
    assert listed == sorted(path.stem for path in ROOT.glob("notebooks/*.ipynb"))


def test_each_chapter_has_a_picture_in_the_readme():
    """Small, beside what it shows in words."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = {Path(file): words for words, file in re.findall(r"!\[(.*?)\]\((\.github/\d\d_\w+\.webp)\)", readme)}
    assert {picture.stem for picture in pictures} == {path.stem for path in ROOT.glob("notebooks/*.ipynb")}
    for picture, words in pictures.items():
        assert len(words) > 40
        assert (ROOT / picture).stat().st_size < 60_000


def test_a_wheel_carries_the_notebooks_and_finds_them(tmp_path, jupyter_home):
    """Built and unpacked: the code that runs is the wheel's, in a place where no checkout is."""
    copy, place = tmp_path / "copy", tmp_path / "place"
    shutil.copytree(ROOT / "labkit", copy / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "notebooks").mkdir()
    notebook(copy / "notebooks" / "00_start.ipynb", "1 + 1")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("labkit-*.whl"))) as wheel:
        packed = set(wheel.namelist())
        wheel.extractall(place)
    assert {str(path.relative_to(copy)) for path in copy.glob("labkit/**/*") if path.is_file()} <= packed
    assert not [name for name in packed if name.startswith("tests")]
    program = "import sys; from labkit.cli import main; sys.exit(main(['reset', '00']))"
    work = tmp_path / "elsewhere"
    work.mkdir()
    subprocess.run([sys.executable, "-c", program], cwd=work, env={**os.environ, "PYTHONPATH": str(place)}, check=True)
    assert (work / "work" / "00_start.ipynb").is_file()


# The Makefile, in a folder with nothing else: a plan (`-n`) costs no installation.


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True)


def stamp(folder: Path, kind: str) -> Path:
    place = subprocess.run("pwd | cksum | cut -d' ' -f1", shell=True, cwd=folder, capture_output=True, text=True)
    return folder / ".venv" / f".{kind}-{place.stdout.strip()}"


def fake_environment(folder: Path) -> None:
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(shutil.which("true") or "/bin/true")


def test_a_fresh_checkout_makes_an_environment_and_installs(checkout):
    plan = make(checkout, "-n", "lab").stdout
    assert [word for word in ("-m venv", "pip install -qq --editable .", "labkit.cli lab") if word not in plan] == []
    assert "--editable '.[test]'" in make(checkout, "-n", "test").stdout


def test_a_second_time_installs_nothing_and_lab_after_test_neither(checkout):
    fake_environment(checkout)
    assert make(checkout, "test").returncode == 0
    assert stamp(checkout, "test").exists()
    for target in ("test", "lab"):
        assert "pip install" not in make(checkout, "-n", target).stdout


def test_test_after_lab_installs_what_the_tests_need(checkout):
    fake_environment(checkout)
    assert make(checkout, "lab").returncode == 0
    assert "--editable '.[test]'" in make(checkout, "-n", "test").stdout


def test_a_changed_pyproject_and_a_moved_checkout_install_again(checkout):
    fake_environment(checkout)
    make(checkout, "lab")
    project = checkout / "pyproject.toml"
    then, later = project.stat().st_mtime, time.time() + 60
    os.utime(project, (later, later))
    assert "pip install" in make(checkout, "-n", "lab").stdout
    os.utime(project, (then, then))
    assert "pip install" not in make(checkout, "-n", "lab").stdout
    moved = checkout.rename(checkout.with_name("moved"))
    assert "pip install" in make(moved, "-n", "lab").stdout


@pytest.mark.parametrize("script", ["echo Python 3.9.2; exit 1", "exit 127"])
def test_a_python_that_will_not_do_is_a_sentence_and_leaves_nothing(checkout, script):
    old = checkout / "python-old"
    old.write_text(f"#!/bin/sh\n{script}\n")
    old.chmod(0o755)
    done = make(checkout, f"PYTHON={old}", "lab")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer with its venv module; found: " in done.stderr
    assert "3.9.2" in done.stderr or "3.9.2" not in script
    assert not (checkout / ".venv").exists()


def test_an_old_python3_gives_way_to_a_newer_one(checkout, monkeypatch):
    """As on macOS, where python3 is 3.9 and another was installed beside it."""
    tools = checkout / "bin"
    tools.mkdir()
    for name, script in {"python3": "exit 1", "python3.14": "exit 1", "python3.13": "exit 0"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    assert "'python3.13' -m venv" in make(checkout, "-n", "lab").stdout


# `make notebooks`


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_committed_as_make_notebooks_saves_them(path):
    """Otherwise JupyterLab asks a learner which kernel to take."""
    committed = nbformat.read(path, as_version=4)
    assert committed.metadata == execute.METADATA
    execute.normalise(committed)
    assert nbformat.writes(committed) + "\n" == path.read_text(encoding="utf-8")


def notebook(path: Path, *sources: str) -> Path:
    cells = [new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources)]
    nbformat.write(new_notebook(cells=cells, metadata={"language_info": {"name": "python", "version": "0"}}), path)
    return path


def test_executing_again_gives_the_same_bytes(tmp_path, jupyter_home):
    path = notebook(tmp_path / "a.ipynb", "for i in range(3): print(i, flush=True)", "import sys\n1 + 1")
    assert execute.main([str(tmp_path)]) == 0
    first = path.read_bytes()
    assert execute.main([str(path)]) == 0
    assert path.read_bytes() == first
    saved = nbformat.read(path, as_version=4)
    assert saved.cells[0].outputs[0].text == "0\n1\n2\n"
    assert saved.metadata == execute.METADATA
    assert all("execution" not in cell.metadata for cell in saved.cells)


def test_a_cell_that_fails_fails_the_target_and_saves_nothing(tmp_path, jupyter_home, capsys):
    path = notebook(tmp_path / "a.ipynb", "print(1)", "1 / 0")
    before = path.read_bytes()
    assert execute.main([str(path)]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert path.read_bytes() == before
