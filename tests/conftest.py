"""What every test shares: markers for hardware, hypothesis without luck, Jupyter's own files kept apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# A test that draws its examples draws the same ones each time, so that a change fails for what it changed; `make soak`
# looks for new ones. No deadline: ranks on a loaded host take their time.
settings.register_profile("labkit", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=500)
settings.load_profile("labkit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs GPUs where there are none; torch is imported only if a test asks for one."""
    needed = {"gpu": 1, "multi_gpu": 2}
    wanting = [(item, needed[name]) for item in items for name in needed if item.get_closest_marker(name)]
    if not wanting:
        return
    import torch

    for item, count in wanting:
        if torch.cuda.device_count() < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} GPU{'s' * (count > 1)}"))


@pytest.fixture(autouse=True, scope="session")
def progress_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a test notes as a learner's progress is not the user's own."""
    os.environ["LABKIT_PROGRESS"] = str(tmp_path_factory.mktemp("progress") / "progress.json")


@pytest.fixture
def jupyter_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jupyter's configuration, signatures and runtime files in a folder of this test, not in the user's home."""
    home = tmp_path / "jupyter"
    for variable in ("CONFIG", "DATA", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{variable}_DIR", str(home / variable.lower()))
    monkeypatch.delenv("JUPYTER_CONFIG_PATH", raising=False)
    return home
