"""Torch's own parallel pieces run inside labkit.run and are seen by the recording group."""

from __future__ import annotations

from collections import Counter

import programs
import pytest

import labkit


def names(run, rank=0):
    return Counter(e.name for e in run.trace.of(rank))


def test_raw_calls_of_every_kind_are_recorded():
    def everything():
        import torch
        import torch.distributed as dist

        n, me, t = dist.get_world_size(), dist.get_rank(), torch.ones(4)
        dist.all_reduce(t)
        dist.broadcast(t, 1)
        dist.reduce(t, 0, op=dist.ReduceOp.MAX)
        parts = [torch.empty(4) for _ in range(n)]
        dist.all_gather(parts, t)
        dist.all_gather_into_tensor(torch.empty(4 * n), t)
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * n))
        dist.gather(t, parts if me == 0 else None, 0)
        dist.scatter(t, parts if me == 0 else None, 0)
        dist.all_to_all_single(torch.empty(n), torch.ones(n))
        dist.barrier()
        objects = [None] * n
        dist.all_gather_object(objects, me)
        return objects

    run = labkit.run(everything, ranks=2)
    assert run.values == [[0, 1], [0, 1]]
    counted = names(run)
    for name in ("all_reduce", "broadcast", "reduce", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier"):
        assert counted[name] == 1, name
    assert counted["all_gather"] == 4, "two of tensors, two for the objects"
    events = {e.name: e for e in run.trace.of(1)}
    assert (events["reduce"].op, events["reduce"].peer) == ("max", 0)
    assert events["broadcast"].peer == 1
    assert events["all_reduce"].nbytes == 16
    assert events["reduce_scatter"].nbytes == 16, "the whole, on every rank"
    assert all(e.end >= e.start for e in run.trace.events)
    assert run.trace.bytes_sent(0) is None, "what a native collective moves cannot be seen"


def test_ddp():
    run = labkit.run(programs.torch_ddp, ranks=2)
    assert run.values == [1.0, 1.0], "the mean over both ranks' inputs"
    assert names(run)["all_reduce"] == 1
    assert names(run)["broadcast"] >= 1


def test_tensor_parallel():
    run = labkit.run(programs.torch_tensor_parallel, ranks=2)
    assert run.values == [True, True]
    assert names(run)["all_reduce"] == 1


def test_a_mesh_names_its_groups():
    run = labkit.run(programs.torch_mesh, ranks=4)
    assert run.values == [1, 1, 5, 5]
    assert {e.group for e in run.trace.events if e.name == "all_reduce"} == {"tp {0,1}", "tp {2,3}"}


def test_fsdp2():
    run = labkit.run(programs.torch_fsdp2, ranks=2)
    assert run.values == [True, True]
    assert names(run)["reduce_scatter"] == 2
    assert names(run)["all_gather"] >= 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_pipelining(ranks):
    run = labkit.run(programs.torch_pipeline, ranks=ranks)
    assert run.values == [0] * (ranks - 1) + [4]
    pairs = run.trace.messages()
    assert all(m.send and m.recv for m in pairs)
    assert len(pairs) >= 8 * (ranks - 1), "four activations and four gradients over every border"


def test_a_group_that_asks_for_gloo_is_recorded_as_well():
    def by_name():
        import torch
        import torch.distributed as dist

        group = dist.new_group([0, 1], backend="gloo")
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
        return t.item()

    run = labkit.run(by_name, ranks=2)
    assert run.values == [2, 2]
    assert names(run)["all_reduce"] == 1


def test_a_program_that_starts_the_process_group_itself_is_told_what_to_do():
    def torchrun_style():
        import torch.distributed as dist

        dist.init_process_group("gloo")

    with pytest.raises(labkit.RankError, match=r"labkit\.run has done it"):
        labkit.run(torchrun_style, ranks=2)


def test_asynchronous_operations_end_when_they_are_done_not_when_somebody_waits():
    def late_wait():
        import time

        import torch
        import torch.distributed as dist

        handle = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.4)
        handle.wait()

    (event, _) = labkit.run(late_wait, ranks=2).trace.events
    assert event.end - event.start < 0.3


def test_every_asynchronous_operation_of_torch():
    """Gloo's reduce-scatter returns a handle without a future."""

    def all_of_them():
        import torch
        import torch.distributed as dist

        one, both = torch.ones(2), torch.ones(4)
        parts = [torch.zeros(2), torch.zeros(2)]
        calls = [
            (lambda: dist.all_reduce(one, async_op=True), one),
            (lambda: dist.broadcast(one, 1, async_op=True), one),
            (lambda: dist.reduce(one, 1, async_op=True), one),
            (lambda: dist.all_gather_into_tensor(both, torch.full((2,), 3.0), async_op=True), both),
            (lambda: dist.reduce_scatter_tensor(one, torch.full((4,), 4.0), async_op=True), one),
            (lambda: dist.all_to_all_single(both, torch.full((4,), 5.0), async_op=True), both),
            (lambda: dist.all_gather(parts, torch.full((2,), 6.0), async_op=True), parts[1]),
            (lambda: dist.reduce_scatter(one, [torch.full((2,), 7.0)] * 2, async_op=True), one),
        ]
        seen = []
        for call, filled in calls:
            call().wait()
            seen.append(filled[0].item())
        dist.barrier(async_op=True).wait()
        return seen

    run = labkit.run(all_of_them, ranks=2)
    assert run.values[1] == [2, 2, 4, 3, 8, 5, 6, 14]
    assert len(run.trace.of(0)) == 9


def test_collectives_leave_no_trace_in_autograd():
    def outputs():
        import torch
        import torch.distributed as dist

        given, out = torch.ones(4, requires_grad=True), torch.zeros(2)
        dist.reduce_scatter_tensor(out, given * 2)
        dist.reduce_scatter(parts := torch.zeros(2), list((given * 2).chunk(2)))
        dist.all_reduce(given)
        return [t.grad_fn is None and t.requires_grad == (t is given) for t in (out, parts, given)]

    assert labkit.run(outputs, ranks=2).values == [[True] * 3] * 2


def test_labels_spans_and_parents():
    def labelled():
        import torch
        import torch.distributed as dist

        from labkit import trace

        with trace.label(step=1), trace.span("exchange"):
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))

    span, inside, after = labkit.run(labelled, ranks=1).trace.of(0)
    assert (span.kind, span.name, inside.parent, after.parent) == ("span", "exchange", span.index, None)
    assert inside.labels == span.labels == {"step": 1}
    assert after.labels == {}
    assert span.start <= inside.start <= inside.end <= span.end
