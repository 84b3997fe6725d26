"""The lab in a real JupyterLab: it opens, runs, stays quiet, and asks nobody but this machine."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import labkit

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ["tiny.ipynb", *(path.name for path in ROOT.glob("notebooks/00_*.ipynb"))]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_opens_runs_and_keeps_to_itself(lab, tmp_path, notebook):
    lab.open(notebook)
    lab.run_all()
    lab.page.wait_for_timeout(2000)  # a news prompt comes late, after the server was asked
    lab.screenshot(tmp_path / "lab.png")
    assert lab.page.locator(".jp-toast, .Toastify__toast, .jp-Dialog").all_inner_texts() == []
    assert not [text for text in lab.outputs() if "Traceback (most recent call last)" in text]
    assert lab.errors == []
    assert lab.strange_hosts == set()
    assert "127.0.0.1" in lab.hosts


def test_cells_run_in_the_python_that_holds_labkit(lab):
    lab.open("tiny.ipynb")
    lab.run_all()
    assert lab.outputs() == ["42", f"'{labkit.__version__}'"]


def test_the_page_is_closed_to_whoever_lacks_the_token(server):
    parts = urlsplit(server.url)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"http://{parts.netloc}/api/contents")


def test_the_server_listens_on_loopback_only(server):
    """Every listening socket of the port is bound to 127.0.0.1."""
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("no /proc/net/tcp")
    port = f"{urlsplit(server.url).port:04X}"
    rows = [line.split() for name in ("tcp", "tcp6") for line in table.with_name(name).read_text().splitlines()[1:]]
    bound = {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")}
    assert bound == {"0100007F"}
