"""What it costs to run ranks from a notebook: start, warm run, memory, recording; beside torchrun.

All figures come from this machine in this run; ratios are worth more than seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import labkit
from labkit.bench.measure import PAIRS, Spread, line, seconds

_FIRST_RUN = """
import json, time
t0 = time.perf_counter(); import labkit; t1 = time.perf_counter()
def noop(): pass
labkit.run(noop, ranks=4); t2 = time.perf_counter()
print(json.dumps([t1 - t0, t2 - t1]))
"""
_TORCHRUN = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.destroy_process_group()
"""


def noop() -> None:
    """What every launcher is asked to run."""


def hang() -> None:
    while True:
        pass


def main() -> None:
    imported, first = first_runs()
    line("import labkit, s", imported, "≤ 0.3")
    line("first run of 4 ranks in a fresh process, s", first, "≤ 2.5")
    labkit.run(noop, ranks=4)
    warm = Spread.of([seconds(lambda: labkit.run(noop, ranks=4)) for _ in range(50)])
    line("warm run of 4 ranks, s (median of 50)", warm, "≤ 0.010")
    cold = Spread.of([torchrun_seconds() for _ in range(3)])
    line("the same program by torchrun, s (median of 3)", cold)
    line("torchrun ÷ warm run", f"{cold.median / warm.median:.0f}", "≥ 100")
    line("new pool after a time-out, s", Spread.of([after_time_out() for _ in range(5)]), "≤ 0.5")
    with contextlib.suppress(OSError):  # Linux only
        line("memory per idle rank, MB (PSS)", Spread.of(idle_memory()), "≤ 45")
    for size, name in ((256, "1 KB"), (262_144, "1 MB")):
        line(f"recorded ÷ bare all-reduce, {name}, 4 ranks", recording_cost(size), "≤ 1.05")


def first_runs(times: int = 3) -> tuple[Spread, Spread]:
    """Seconds for the import and for the first run, each in a new Python process that has not imported torch."""
    pairs = []
    for _ in range(times):
        done = subprocess.run([sys.executable, "-c", _FIRST_RUN], check=True, capture_output=True, text=True)
        pairs.append(json.loads(done.stdout))
    imports, firsts = zip(*pairs, strict=True)
    return Spread.of(list(imports)), Spread.of(list(firsts))


def torchrun_seconds() -> float:
    """Seconds for torchrun to start 4 ranks that meet and part."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "noop.py")
        script.write_text(_TORCHRUN)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
        return seconds(lambda: subprocess.run(command, check=True, capture_output=True, env=quiet))


def after_time_out() -> float:
    """Seconds for a run whose ranks have to be started anew, since the last one timed out."""
    with contextlib.suppress(labkit.RunTimeout):
        labkit.run(hang, ranks=4, timeout=0.2)
    return seconds(lambda: labkit.run(noop, ranks=4))


def idle_memory() -> list[float]:
    """MB of each idle rank: pages shared by n processes count 1/n (PSS)."""
    pids = labkit.run(os.getpid, ranks=4).values
    found = []
    for pid in pids:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        found.append(int(rollup.split("Pss:")[1].split()[0]) * 1024 / 1e6)
    return found


def recording_cost(elements: int) -> Spread:
    """Time of an all-reduce through the recording group over that through torch's own group inside it.

    Both in the same ranks over the same connections, in turn: two pools differ by more than what is measured.
    """
    return Spread.of(labkit.run(recorded_over_bare, elements, ranks=4).values[0])


def recorded_over_bare(elements: int, pairs: int = PAIRS, each: int = 40) -> list[float]:
    """On a rank: ratios of medians, a pair at a time."""
    import torch
    import torch.distributed as dist

    recording: Any = dist.group.WORLD
    bare = recording.transport
    tensor, options = torch.ones(elements), dist.distributed_c10d.AllreduceOptions()
    options.asyncOp = False

    def time_one(group: Any, taken: list[float]) -> None:
        taken.append(seconds(lambda: group.allreduce([tensor], options).wait()))

    ratios = []
    for _ in range(pairs):
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(each):
            time_one(recording, ours)
            time_one(bare, theirs)
        ratios.append(statistics.median(ours) / statistics.median(theirs))
    return ratios
