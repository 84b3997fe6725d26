"""Every schedule of labkit, in many sizes; and torch's own, written as labkit's."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

from labkit.pipeline import (
    Action,
    Schedule,
    breadth_first,
    dual_pipe,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)

ONE_STAGE = (gpipe, one_f_one_b, zero_bubble_h1, zero_bubble_h2)


def of_size(p: int, m: int, chunks: tuple[int, ...] = (1, 2, 3)) -> Iterator[Schedule]:
    """All that there are for p ranks and m micro-batches."""
    yield from (make(p, m) for make in (*ONE_STAGE, zero_bubble_v))
    for v in chunks:
        yield breadth_first(p, m, v)
        yield interleaved(p, m, v)
        for group in range(1, m + 1):
            if group == m or (group >= p and (m % group == 0 or m % group >= p)):
                yield interleaved(p, m, v, group)
    if m >= 2 * p:
        yield dual_pipe_v(p, m)
        if p % 2 == m % 2 == 0:
            yield dual_pipe(p, m)


def torch_rows(name: str, p: int, m: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """The actions of a schedule of torch's. Its I is labkit's B; its B is both gradients; two that overlap follow each
    other."""
    return [[a for block in row for a in block] for row in torch_blocks(name, p, m, stages_per_rank)]


def torch_blocks(name: str, p: int, m: int, stages_per_rank: int = 1) -> list[list[tuple[Action, ...]]]:
    """The same, with the two actions of an overlap in one block; all other blocks hold one."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    def block(a) -> tuple[Action, ...]:
        parts = a.sub_actions or (a,)
        return tuple(Action(KIND_OF[x.computation_type.value], x.microbatch_index, x.stage_index) for x in parts)

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, p, None, p * stages_per_rank
    schedule_class = get_schedule_class(name)
    many = issubclass(schedule_class, PipelineScheduleMulti)
    order = schedule_class([stage] * stages_per_rank if many else stage, m).pipeline_order
    known = {*KIND_OF, "OVERLAP_F_B"}
    return [[block(a) for a in order[rank] if a and a.computation_type.value in known] for rank in range(p)]


#: torch's word → labkit's; what is not here is no computation.
KIND_OF = {"F": "F", "I": "B", "B": "B", "W": "W"}
