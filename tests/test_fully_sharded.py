"""Stage 3 against one process with the whole model in float64: values, bytes held, bytes sent, and what is refused."""

from __future__ import annotations

from typing import Any

import programs_fully_sharded as programs
import pytest
import torch

import labkit


def distance(values: list[Any]) -> float:
    """Losses, their mean over ranks, and parameters, put together from the ranks' pieces: relative to one process."""
    worst = 0.0
    for step in range(len(values[0][0])):
        ours, theirs = sum(losses[step][0] for losses, _, _ in values) / len(values), values[0][0][step][1]
        worst = max(worst, abs(ours - theirs) / abs(theirs))
    for name, want in values[0][2].items():
        together = torch.cat([pieces[name] for _, pieces, _ in values])
        assert together.numel() == want.numel(), name
        worst = max(worst, ((together - want.view(-1)).abs().max() / want.abs().max()).item())
    return worst


@pytest.mark.parametrize(
    ("ranks", "name", "changes", "options", "micro_steps", "clip"),
    [
        (1, "tiny_gpt", {}, {}, 1, None),
        (2, "tiny_gpt", {"layers": 3}, {"prefetch": 0}, 1, 0.1),
        (2, "tiny_llama", {"tied": True}, {"prefetch": 2}, 3, None),
        (3, "tiny_gpt", {"ffn": 37}, {"keep_after_forward": True}, 2, 0.1),
        (3, "tiny_llama", {}, {}, 1, 0.1),
        (4, "tiny_gpt", {"vocab": 33}, {}, 2, None),
    ],
    ids=["one-rank", "no-prefetch-clipped", "two-ahead-accumulated", "kept", "llama-clipped", "four-ranks"],
)
def test_ten_steps_are_those_of_one_process(ranks, name, changes, options, micro_steps, clip):
    run = labkit.run(programs.ten_steps, name, changes, options, micro_steps, clip, ranks=ranks)
    assert distance(run.values) <= 1e-12
    assert not run.leftovers


@pytest.mark.parametrize(
    "kind",
    ["plain", "frozen", "frozen-first", "mixed", "tied", "twice", "two-forwards", "checkpoint", "reentrant",
     "inner-checkpoint", "tricks", "nested", "units", "unused"],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"keep_after_forward": True}], ids=["ahead", "none", "kept"])
def test_modules_of_all_sorts(kind, options):
    run = labkit.run(programs.of_all_sorts, kind, options, ranks=3)
    assert distance(run.values) <= (1e-6 if kind == "mixed" else 1e-12)
    assert not run.leftovers
