"""The engine on real ranks against one process in float64."""

from __future__ import annotations

import programs_pipeline as programs
import pytest

import labkit
from labkit import pipeline


def schedules(ranks, m, chunks=1):
    if chunks > 1:
        return [pipeline.interleaved(ranks, m, chunks), pipeline.breadth_first(ranks, m, chunks)]
    return [pipeline.gpipe(ranks, m), pipeline.one_f_one_b(ranks, m), pipeline.zero_bubble_h1(ranks, m),
            pipeline.zero_bubble_h2(ranks, m)]  # fmt: skip


CASES = [
    (schedule, name, batched)
    for ranks, m, chunks in ((1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 5, 1), (3, 4, 1), (4, 2, 1), (4, 8, 1), (2, 4, 2), (3, 6, 2))
    for schedule in schedules(ranks, m, chunks)
    for name, batched in (("tiny_gpt", False), ("tiny_llama", True))
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "name", "batched"), CASES, ids=lambda v: getattr(v, "name", v))
def test_steps_are_those_of_one_process(schedule, name, batched):
    layers = schedule.stages + 1  # uneven
    run = labkit.run(programs.against_one_process, schedule, layers, schedule.micro_batches + 2, name,
                     batched=batched, ranks=schedule.ranks)  # fmt: skip
    assert max(run.values) <= 1e-12
