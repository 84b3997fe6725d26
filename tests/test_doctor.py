"""Each check of `labkit doctor` must be able to fail, and say what to do then."""

from __future__ import annotations

import importlib.metadata
import sys
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import doctor
from labkit.doctor import Finding


def metadata(monkeypatch: pytest.MonkeyPatch, python: str = ">=3.11", requires: tuple[str, ...] = ()) -> None:
    message = Message()
    message["Version"], message["Requires-Python"] = "0.1.0", python
    for requirement in requires:
        message["Requires-Dist"] = requirement
    monkeypatch.setattr(doctor, "_metadata", lambda: message)


def test_this_installation_is_in_its_own_bounds():
    assert doctor.python().ok
    assert doctor.packages().ok


def test_a_python_out_of_bounds_is_named(monkeypatch):
    metadata(monkeypatch, python=">=4")
    finding = doctor.python()
    assert finding.ok is False
    assert ">=4" in finding.text


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("torch<2", "is not <2"),
        ("no-such-package-of-labkit>=1", "no-such-package-of-labkit is missing"),
    ],
)
def test_a_package_out_of_bounds_or_missing_is_named(monkeypatch, requirement, said):
    metadata(monkeypatch, requires=("numpy>=1", requirement))
    finding = doctor.packages()
    assert finding.ok is False
    assert said in finding.text
    assert "numpy" not in finding.text


def test_what_only_the_tests_need_is_not_asked_for(monkeypatch):
    metadata(monkeypatch, requires=('no-such-package-of-labkit; extra == "test"',))
    assert doctor.packages().ok


def test_a_local_build_of_torch_counts_as_its_version(monkeypatch):
    metadata(monkeypatch, requires=("torch>=2.11,<2.14",))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130")
    assert doctor.packages().ok


def test_the_widget_front_ends_are_served(jupyter_home):
    assert doctor.widgets().ok


def test_a_disabled_widget_front_end_is_named(jupyter_home):
    config = jupyter_home / "config" / "labconfig"
    config.mkdir(parents=True)
    (config / "page_config.json").write_text('{"disabledExtensions": {"anywidget": true}}')
    finding = doctor.widgets()
    assert finding.ok is False
    assert "anywidget" in finding.text


def test_a_missing_widget_front_end_is_named(monkeypatch):
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *_: [])
    finding = doctor.widgets()
    assert finding.ok is False
    assert "jupyterlab_widgets and anywidget" in finding.text


@pytest.mark.parametrize(
    ("run", "ok"),
    [
        (lambda *_, **__: SimpleNamespace(values=[2.0, 2.0]), True),
        (lambda *_, **__: SimpleNamespace(values=[2.0, 1.0]), False),
        (lambda *_, **__: (_ for _ in ()).throw(RuntimeError("time-out\nand a table")), False),
    ],
)
def test_two_ranks_are_judged_by_their_sum(monkeypatch, run, ok):
    import labkit

    monkeypatch.setitem(labkit.__dict__, "run", run)
    assert doctor.two_ranks().ok is ok


def test_two_real_ranks_add_up():
    finding = doctor.two_ranks()
    assert finding.ok, finding.text


@pytest.mark.parametrize(("limit", "used", "ok"), [("max", "0", True), (str(1 << 30), str(1 << 29), False)])
def test_memory_heeds_a_containers_limit(tmp_path, limit, used, ok):
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    free = doctor.free_memory(tmp_path)
    assert (free > 1 << 29) is ok
    assert doctor.free_memory(tmp_path / "nowhere") > 1 << 29


def test_little_memory_fails(monkeypatch):
    monkeypatch.setattr(doctor, "free_memory", lambda: 1 << 30)
    assert doctor.memory().text == "1.0 GiB free, 2 wanted"


def test_stale_ranks_are_counted(monkeypatch):
    found = [SimpleNamespace(stale=True), SimpleNamespace(stale=False)]
    monkeypatch.setattr("labkit.stop.find", lambda: found)
    finding = doctor.stale_ranks()
    assert (finding.ok, finding.remedy) == (False, "`labkit stop --stale`")
    found.pop(0)
    assert doctor.stale_ranks().ok


@pytest.mark.parametrize(("script", "ok"), [("echo Noto Sans CJK", True), ("true", False), (None, None)])
def test_a_cjk_font_is_asked_of_fontconfig(monkeypatch, tmp_path, script, ok):
    if script is not None:
        (tmp_path / "fc-list").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "fc-list").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert doctor.cjk_font().ok is ok


def test_the_working_copy_may_be_made_later_but_its_place_must_be_writable(tmp_path):
    assert doctor.working_copy(tmp_path / "a" / "b").ok
    assert not (tmp_path / "a").exists(), "a check makes nothing"
    (tmp_path / "file").write_text("")
    assert doctor.working_copy(tmp_path / "file").ok is False


def test_a_check_that_breaks_is_a_failure_and_the_rest_still_runs(monkeypatch, capsys, tmp_path):
    broken = ("broken", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "checks", lambda work: iter([broken, ("fine", lambda: Finding(True, "yes"))]))
    assert doctor.main(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✗ broken         ZeroDivisionError: division by zero  → ")
    assert lines[1] == "✓ fine           yes"
    assert lines[-1] == "1 of the checks failed."


def test_one_line_a_check_and_success_is_exit_code_zero(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "checks", lambda work: iter([("font", lambda: Finding(None, "cannot tell"))]))
    assert doctor.main(tmp_path) == 0
    assert capsys.readouterr().out == "– font           cannot tell\n\nThis machine is ready.\n"


def test_every_failure_in_the_source_has_a_remedy():
    import ast

    tree = ast.parse(Path(doctor.__file__).read_text(encoding="utf-8"))
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"
    ]
    failing = [call for call in calls if isinstance(call.args[0], ast.Constant) and call.args[0].value is False]
    assert len(failing) >= 8
    assert all(len(call.args) == 3 for call in failing)


@pytest.mark.skipif(sys.platform != "linux", reason="sched_getaffinity")
def test_cores_are_those_this_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 5, 7, 9})
    assert doctor.cores().text == "4"
