"""Pipeline parallelism: schedules as data, checked, simulated, and run on real ranks.

    schedule = labkit.pipeline.one_f_one_b(ranks=4, micro_batches=8)
    schedule.check()
    labkit.pipeline.simulate(schedule, forward=20, backward=20, weight=20).makespan

Read `schedule` first, then `orders`. `PipelineStage`, `PipelineEngine` and `cut` need torch; they are loaded when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from labkit.pipeline.breadth import breadth_first
from labkit.pipeline.check import check, check_messages
from labkit.pipeline.dual_pipe import dual_pipe, dual_pipe_v
from labkit.pipeline.interleaving import interleaved
from labkit.pipeline.legal import IllegalSchedule
from labkit.pipeline.messages import Compute, Receive, Send, messages
from labkit.pipeline.orders import gpipe, one_f_one_b
from labkit.pipeline.partition import partition
from labkit.pipeline.schedule import Action, Message, Schedule
from labkit.pipeline.simulate import simulate
from labkit.pipeline.timeline import TimedAction, Timeline, Transfer
from labkit.pipeline.zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v

#: Public name → module that defines it, which imports torch.
_HOME = {
    "PipelineStage": "labkit.pipeline.stage", "PipelineEngine": "labkit.pipeline.engine",
    "TransformerPart": "labkit.pipeline.parts", "cut": "labkit.pipeline.parts",
}  # fmt: skip

if TYPE_CHECKING:
    from labkit.pipeline.engine import PipelineEngine
    from labkit.pipeline.parts import TransformerPart, cut
    from labkit.pipeline.stage import PipelineStage

__all__ = [
    "Action", "Compute", "IllegalSchedule", "Message", "PipelineEngine", "PipelineStage", "Receive", "Schedule", "Send",
    "TimedAction", "Timeline", "Transfer", "TransformerPart", "breadth_first", "check", "check_messages", "cut",
    "dual_pipe", "dual_pipe_v", "gpipe", "interleaved", "messages", "one_f_one_b", "partition", "simulate",
    "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"labkit.pipeline has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
