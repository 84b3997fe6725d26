"""On CUDA: the same programs, NCCL with a GPU a rank, gloo with several ranks a GPU, and events by the GPU's clock."""

from __future__ import annotations

import programs
import programs_data_parallel
import programs_tensor_parallel
import pytest
import torch

import labkit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device_sum():
    from labkit import device

    t = torch.full((1000,), float(programs.rank() + 1), device=device.current())
    programs.dist.all_reduce(t)
    return device.current().type, t[0].item()


def on_device_ring():
    from labkit import device

    me, n = programs.rank(), programs.size()
    mine, other = (
        torch.full((5,), me, device=device.current()),
        torch.zeros(5, dtype=torch.int64, device=device.current()),
    )
    requests = programs.dist.batch_isend_irecv([
        programs.dist.P2POp(programs.dist.isend, mine, (me + 1) % n),
        programs.dist.P2POp(programs.dist.irecv, other, (me - 1) % n),
    ])  # fmt: skip
    for request in requests:
        request.wait()
    return other.tolist()


def every_all_reduce():
    """Each algorithm on this rank's GPU, blocking and asynchronous: what differs from the sum, by name."""
    from labkit import collectives, device

    rank, n, wrong = programs.rank(), programs.size(), []
    for algorithm in collectives.ALGORITHMS["all_reduce"]:
        for async_op in (False, True):
            t = torch.arange(10_001, device=device.current()) + rank
            handle = collectives.all_reduce(t, algorithm=algorithm, async_op=async_op, node_size=2)
            if async_op:
                handle.wait()
            expected = n * torch.arange(10_001, device=device.current()) + n * (n - 1) // 2
            if not torch.equal(t, expected):
                wrong.append((algorithm, async_op))
    return wrong


def two_rings_at_once():
    from labkit import collectives, device

    t = [torch.full((100_000,), programs.rank() + k, device=device.current()) for k in (0, 10)]
    handles = [collectives.all_reduce(x, algorithm="ring", async_op=True, segments=3) for x in t]
    for handle in handles:
        handle.wait()
    return [sorted(set(x.tolist())) for x in t]


def half_average():
    from labkit import collectives, device

    t = torch.tensor([65504.0, 2.0**-24], dtype=torch.float16, device=device.current())
    collectives.all_reduce(t, op="avg")
    return t.tolist()


def test_collectives_of_ranks_that_share_a_gpu():
    ranks = torch.cuda.device_count() + 3
    assert labkit.run(every_all_reduce, ranks=ranks).values == [[]] * ranks
    total = ranks * (ranks - 1) // 2
    assert labkit.run(two_rings_at_once, ranks=ranks).values == [[[total], [total + 10 * ranks]]] * ranks
    assert labkit.run(half_average, ranks=ranks).values == [[65504.0, 2.0**-24]] * ranks


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_collectives_over_nccl():
    ranks = torch.cuda.device_count()
    assert labkit.run(every_all_reduce, ranks=ranks).values == [[]] * ranks
    total = ranks * (ranks - 1) // 2
    assert labkit.run(two_rings_at_once, ranks=ranks).values == [[[total], [total + 10 * ranks]]] * ranks
    assert labkit.run(half_average, ranks=ranks).values == [[65504.0, 2.0**-24]] * ranks


def test_one_rank_over_nccl():
    run = labkit.run(on_device_sum, ranks=1)
    assert run.values == [("cuda", 1.0)]
    (event,) = run.trace.events
    assert 0 <= event.start <= event.end < 60


def test_four_ranks_share_a_gpu_over_gloo():
    ranks = torch.cuda.device_count() + 3
    assert labkit.run(on_device_sum, ranks=ranks).values == [("cuda", ranks * (ranks + 1) / 2)] * ranks
    assert labkit.run(on_device_ring, ranks=ranks).values == [[(r - 1) % ranks] * 5 for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, torch.cuda.device_count() + 3], ids=["nccl", "gloo"])
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"find_unused_parameters": True}], ids=str)
def test_data_parallel_gradients(ranks, options):
    """Many buckets in a long backward: one that was read before its average was there would show."""
    run = labkit.run(
        programs_data_parallel.against_one_process, "tiny_gpt", {"layers": 6}, 0.002, options, 2, ranks=ranks
    )
    assert max(run.values) <= 1e-12


@pytest.mark.parametrize("ranks", [1, 4], ids=["nccl", "gloo"])
@pytest.mark.parametrize("how", ["tp", "sp", "sp-keep"])
def test_tensor_parallel_steps(ranks, how):
    if ranks > 1 and torch.cuda.device_count() >= ranks:
        pytest.skip("each rank has a GPU: NCCL, as in the test of several GPUs")
    for name in ("tiny_gpt", "tiny_llama"):
        run = labkit.run(programs_tensor_parallel.against_one_process, name, {}, how, torch.float64, ranks=ranks)
        assert max(run.values) <= 1e-10


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_parallel_steps_over_nccl():
    run = labkit.run(programs_data_parallel.against_one_process, "tiny_gpt", {"layers": 6}, 0.002, {}, 2, ranks=2)
    assert max(run.values) <= 1e-12
    for how in ("tp", "sp"):
        run = labkit.run(programs_tensor_parallel.against_one_process, "tiny_gpt", {}, how, torch.float64, ranks=2)
        assert max(run.values) <= 1e-10


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_over_nccl():
    assert labkit.run(on_device_sum, ranks=2).values == [("cuda", 3.0)] * 2
    assert labkit.run(on_device_ring, ranks=2).values == [[1] * 5, [0] * 5]


def test_memory_is_named_as_what_it_is():
    def hold():
        from labkit import device

        kept = torch.ones(1 << 20, device=device.current())
        return device.memory(), kept.nbytes

    figures, nbytes = labkit.run(hold, ranks=1).values[0]
    assert nbytes <= figures["allocated"] <= figures["reserved"]


def test_cuda_in_the_kernel_does_not_reach_the_ranks():
    """Public fault 58: fork after CUDA was initialised."""
    torch.ones(1, device="cuda")
    assert labkit.run(on_device_sum, ranks=1, timeout=60).values == [("cuda", 1.0)]


def test_the_host_does_not_see_gpu_memory_where_the_cpu_is_asked_for():
    assert labkit.run(on_device_sum, ranks=1, device="cpu").values == [("cpu", 1.0)]
