"""labkit.run under a real torchrun: nothing is started, and the same program gives the same answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def torchrun(tmp_path, program: str, ranks: int, limit: float = 60) -> subprocess.CompletedProcess:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    path = os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)],
        capture_output=True, text=True, timeout=limit, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )  # fmt: skip


def told(tmp_path) -> dict[int, list]:
    """What each rank told, a JSON line a time, in a file of its own: ranks share one standard output."""
    return {int(f.stem): [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.told")}


TELL = """
    import json, os
    import labkit, programs

    def tell(*what):
        with open(os.path.join(os.path.dirname(__file__), os.environ["RANK"] + ".told"), "a") as file:
            file.write(json.dumps(what) + "\\n")
"""
PROGRAM = (
    TELL
    + """

    def attempt(fn, *args, **options):
        try:
            run = labkit.run(fn, *args, ranks=int(os.environ["WORLD_SIZE"]), **options)
            tell(fn.__name__, run.values, run.leftovers)
        except labkit.RunFailed as failure:
            tell(fn.__name__, type(failure).__name__, failure.ranks)

    run = labkit.run(programs.pass_round, ranks=3)
    tell(run.values, len(run.trace.messages()), all(m.recv.end >= m.send.start for m in run.trace.messages()))
    tell(labkit.run(programs.hello, ranks=3).output)
    attempt(programs.both_receive_in_pairs, timeout=1)
    attempt(programs.total)
    attempt(programs.raise_on, 1)
    attempt(programs.total)
    attempt(programs.different_sizes, 1)
    attempt(programs.lonely_isend)
    attempt(programs.skip_one, 1, timeout=1)
    attempt(programs.state_of_world)
    try:
        labkit.run(programs.total, ranks=4)
    except ValueError as error:
        tell(str(error))
"""
)


def test_the_same_answers_on_every_rank(tmp_path):
    done = torchrun(tmp_path, PROGRAM, 3)
    assert done.returncode == 0, done.stderr[-3000:]
    by_rank = told(tmp_path)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert by_rank[0] == [
        [[2, 0, 1], 3, True],
        [["hello from 0\n", "hello from 1\n", "hello from 2\n"]],
        ["both_receive_in_pairs", "RunTimeout", [0, 1, 2]],
        ["total", [6, 6, 6], []],
        ["raise_on", "RankError", [1]],
        ["total", [6, 6, 6], []],
        ["different_sizes", "Disagreement", [0, 1, 2]],
        ["lonely_isend", [None] * 3, by_rank[0][7][2]],
        ["skip_one", "Disagreement", [0, 1, 2]],
        ["state_of_world", [[r, 3, 1] for r in range(3)], []],
        ["ranks=4, but torchrun started WORLD_SIZE=3 ranks: make them equal"],
    ]
    assert by_rank[0][7][2][0].startswith("rank 0 sent 1 message to rank 1 that nobody received")
    assert done.stdout.count("hello from") == 3, "it goes on to torchrun's own output, where lines may mix"
    assert done.stdout.count("labkit: rank 0 sent") == 1, "rank 0 shows it, once"


@pytest.mark.soak
def test_a_rank_that_nothing_can_reach_ends_the_job_with_its_table(tmp_path, monkeypatch):
    program = """
        import labkit, programs
        from labkit.world import torchrun
        torchrun.PATIENCE = 0.5
        labkit.run(programs.loop_for_ever, 1, ranks=2, timeout=0.5)
    """
    done = torchrun(tmp_path, program, 2)
    assert done.returncode != 0
    assert "labkit: rank 1 is ended" in done.stderr
    assert "while rank() == who" in done.stderr


@pytest.mark.soak
def test_one_rank_is_no_special_program():
    """What torchrun sets, and nothing else: other launchers set the same."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-c", "import labkit, programs; print(labkit.run(programs.total, ranks=1).values)"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **alone, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[1.0]" in done.stdout


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "many")])
def test_a_strange_environment_is_named(monkeypatch, name, value):
    import labkit

    for key, usual in (("RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(key, value if key == name else usual)
    with pytest.raises(ValueError, match="expected whole numbers, as torchrun sets them"):
        labkit.run(print)


#: Chapters that compare worlds of several sizes, and what they print before the first that is not of four ranks.
OTHER_WORLDS = {
    "01_memory": "the peak is in backward, in aten::_log_softmax_backward_data",  # then an exercise checks one rank
    "02_collectives": "in hexadecimal, on every rank: ['1111', '1111', '1111', '1111']",
    "03_data_parallel": "ranks 0 to 3 hold the same gradients, bit for bit: True",
    "04_tensor_parallel": "",  # its first world has two ranks
    "05_sequence_parallel": "4 tensors of 2 bytes an element, 2 of 1 byte: 10sbh",
    "06_pipeline_parallel": "m = 16: the fullest rank holds 16 (GPipe), 4 (1F1B)",
    "07_zero": "padding of 9: norm² 172",
    "08_tricks": "c = 8, 32, 64 hold 288, 132, 162 sbh",  # then two ranks of impostors
}


@pytest.mark.soak
@pytest.mark.parametrize("notebook", sorted(Path(ROOT, "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_runs_unchanged_as_a_script(tmp_path, notebook):
    from nbconvert import PythonExporter

    text, _ = PythonExporter().from_filename(str(notebook))
    done = torchrun(tmp_path, text, 4, limit=120)
    if notebook.stem in OTHER_WORLDS:  # a cluster has one size: the first cell that wants another says so, and ends it
        assert done.returncode != 0
        assert re.search(r"ranks=[123], but torchrun started WORLD_SIZE=4", done.stderr)
        assert OTHER_WORLDS[notebook.stem] in done.stdout
        return
    assert done.returncode == 0, done.stderr[-3000:]
    if notebook.stem == "00_start":
        assert done.stdout.count("all receive first") >= 1
        assert "what ranks 0 to 3 got: [3, 0, 1, 2]" in done.stdout
