"""ZeRO's stages 1 and 2 and the distributed optimizer, against one process in float64 and against the formulas."""

from __future__ import annotations

import programs_zero as programs
import pytest

import labkit

KINDS = [1, 2, "distributed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ten_steps_are_those_of_one_process(kind, ranks):
    run = labkit.run(programs.against_one_process, kind, "tiny_gpt", {}, ranks=ranks)
    assert max(off for off, _ in run.values) <= 1e-12
