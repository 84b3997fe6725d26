"""On CUDA: the same programs, NCCL with a GPU a rank, gloo with several ranks a GPU, and events by the GPU's clock."""

from __future__ import annotations

import programs
import programs_checkpoint
import programs_context_parallel
import programs_data_parallel
import programs_fully_sharded
import programs_mixed_precision
import programs_norm
import programs_pipeline
import programs_tensor_parallel
import programs_zero
import pytest
import torch

import labkit
from labkit import pipeline

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


@pytest.mark.parametrize("ranks", [1, 4], ids=["nccl", "gloo"])
@pytest.mark.parametrize("causal", [True, False])
def test_ring_attention(ranks, causal):
    run = labkit.run(programs_context_parallel.ring, "zigzag", causal, 2, 4, ranks=ranks)
    assert max(off for off, _ in run.values) <= 1e-12


@pytest.mark.parametrize("ranks", [1, 4], ids=["nccl", "gloo"])
@pytest.mark.parametrize("kind", [1, 2, "distributed"])
def test_sharded_optimizers(ranks, kind):
    """ZeRO 1 and 2, and the distributed optimizer; what lies in fresh memory would show as nan."""
    if ranks > 1 and torch.cuda.device_count() >= ranks:
        pytest.skip("each rank has a GPU: NCCL, as in the test of several GPUs")
    options = {"cap": 0.002, "micro_steps": 2, "grouped": True, "clip": 0.3}
    run = labkit.run(programs_zero.against_one_process, kind, "tiny_gpt", {"layers": 4}, ranks=ranks, **options)
    assert max(off for off, _ in run.values) <= 1e-12
    assert max(labkit.run(programs_zero.no_garbage, kind, ranks=ranks).values) <= 1e-12


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", [1, 2, "distributed"])
def test_sharded_optimizers_over_nccl(kind):
    run = labkit.run(programs_zero.against_one_process, kind, "tiny_gpt", {"layers": 4}, 0.002, 2, ranks=2)
    assert max(off for off, _ in run.values) <= 1e-12


def memory_of_a_step(kind):
    """The allocator's bytes that two steps of AdamW leave, and the most they had, beside the formula's."""
    from labkit import device
    from labkit.memory import MemoryMeter

    net = torch.nn.Linear(4096, 4096, bias=False, device=device.current())
    optimizer = programs_zero.made(kind, net, lr=1e-3)
    meter = MemoryMeter(net, optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(1, 4096, device=device.current())).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return sum(meter.held().values()), device.memory()["allocated"], device.memory()["allocated_peak"]


@pytest.mark.parametrize("kind", [1, 2, "distributed"])
def test_the_allocator_holds_what_the_meter_counts(kind):
    for counted, allocated, peak in labkit.run(memory_of_a_step, kind, ranks=1).values:
        assert 0 <= allocated - counted < 3 * 2**24  # blocks, and cuBLAS's work space: less than one matrix
        assert peak >= allocated


@pytest.mark.parametrize("ranks", [1, 4], ids=["nccl", "gloo"])
@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"keep_after_forward": True}], ids=str)
def test_stage_three(ranks, options):
    if ranks > 1 and torch.cuda.device_count() >= ranks:
        pytest.skip("each rank has a GPU: NCCL, as in the test of several GPUs")
    run = labkit.run(programs_fully_sharded.ten_steps, "tiny_gpt", {"layers": 4}, options, 2, 0.1, ranks=ranks)
    assert programs_fully_sharded.distance(run.values) <= 1e-12
    run = labkit.run(programs_fully_sharded.of_all_sorts, "frozen", options, ranks=ranks)
    assert programs_fully_sharded.distance(run.values) <= 1e-12


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_allocators_peak_at_stage_three(ahead):
    """Above its shards a forward has one gathered block, with prefetch two; of eight."""
    ((before, peak, block),) = labkit.run(programs_fully_sharded.allocated, 8, 2048, ahead, ranks=1).values
    assert (1 + ahead) * block <= peak - before < (2 + ahead) * block


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_next_block_is_gathered_beside_the_computation():
    run = labkit.run(programs_fully_sharded.ten_steps, "tiny_gpt", {"layers": 4}, {}, 2, 0.1, ranks=2)
    assert programs_fully_sharded.distance(run.values) <= 1e-12
    for gathers, products in labkit.run(programs_fully_sharded.kernels_of_a_step, ranks=2).values:
        assert [(a, b) for a in gathers for b in products if max(a[0], b[0]) < min(a[1], b[1])]


def fused_attention():
    """Kernels that a fused model runs in bf16, forward and backward; and how far it is from the explicit one."""
    from torch.profiler import ProfilerActivity, profile

    from labkit import device
    from labkit.model import Transformer, loss, preset

    tokens, totals, kernels = torch.arange(128, device=device.current())[None], [], []
    for attention in ("explicit", "fused"):
        torch.manual_seed(0)
        config = preset("tiny_llama", hidden=256, heads=4, positions=128, attention=attention)
        model = Transformer(config, device=device.current(), dtype=torch.bfloat16)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            total, _ = loss(model(tokens[:, :-1]), tokens[:, 1:])
            total.backward()
            torch.cuda.synchronize()
        totals.append(total.item())
        kernels.append([event.name for event in profiled.events()])
    return [[name for name in names if "flash" in name.lower()] for names in kernels], totals


def test_fused_attention_is_the_flash_kernel():
    ((explicit, fused), totals) = labkit.run(fused_attention, ranks=1).values[0]
    assert not explicit
    assert [name for name in fused if "bwd" in name]
    assert [name for name in fused if "fwd" in name]
    assert totals[0] == pytest.approx(totals[1], rel=0.01)


def streams_of_a_wide_layer(how):
    """(start, end) of NCCL's kernels, and of the matrix products, on one clock; and the streams of each."""
    from torch.profiler import ProfilerActivity, profile

    from labkit import device

    model = programs_tensor_parallel.transformer(
        "tiny_gpt", torch.bfloat16, layers=1, hidden=4096, heads=32, positions=2048
    )
    block = programs_tensor_parallel.shared(model, how).blocks[0]
    tokens = 2048 if how == "tp" else 2048 // programs.size()
    x = torch.randn(4, tokens, 4096, dtype=torch.bfloat16, device=device.current(), requires_grad=True)
    block(x).sum().backward()  # NCCL begins, cuBLAS chooses
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        block(x).sum().backward()
        torch.cuda.synchronize()
    kernels = [(e.name.lower(), e.time_range.start, e.time_range.end) for e in profiled.events()]
    sums = [k[1:] for k in kernels if "nccl" in k[0]]
    products = [k[1:] for k in kernels if "gemm" in k[0] or "nvjet" in k[0] or "cutlass" in k[0]]
    return sums, products


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("how", ["tp", "sp"])
def test_the_input_gradient_travels_on_a_stream_of_its_own(how):
    """Some collective of backward and some product run at the same moment."""
    for sums, products in labkit.run(streams_of_a_wide_layer, how, ranks=2).values:
        together = [(a, b) for a in sums for b in products if max(a[0], b[0]) < min(a[1], b[1])]
        assert together


@pytest.mark.parametrize("schedule", [pipeline.one_f_one_b(3, 5), pipeline.zero_bubble_h1(3, 5)], ids=lambda s: s.name)
def test_a_pipeline_of_ranks_that_share_a_gpu(schedule):
    if torch.cuda.device_count() >= 3:
        pytest.skip("each rank has a GPU: NCCL, as in the test of several GPUs")
    run = labkit.run(programs_pipeline.against_one_process, schedule, 4, 7, ranks=3)
    assert max(run.values) <= 1e-12


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_pipeline_over_nccl():
    """Batches of messages, in the one order in which no rank waits for one that waits for it."""
    for schedule in (pipeline.gpipe(2, 5), pipeline.one_f_one_b(2, 5), pipeline.interleaved(2, 4, 2),
                     pipeline.zero_bubble_v(2, 4)):  # fmt: skip
        run = labkit.run(programs_pipeline.against_one_process, schedule, 5, 7, ranks=2)
        assert max(run.values) <= 1e-12


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


@pytest.mark.parametrize("p", [2.0, float("inf")])
def test_a_norm_over_ranks_that_share_a_gpu(p):
    if torch.cuda.device_count() >= 4:
        pytest.skip("each rank has a GPU: NCCL, as in the test of several GPUs")
    for *_, norm, refused in labkit.run(programs_norm.one_that_is_not_finite, float("nan"), p, ranks=4).values[0]:
        assert norm != norm
        assert refused
    run = labkit.run(programs_norm.beside_data_parallelism, "tiny_gpt", {}, "sp", p, ranks=4)
    assert len({norm for norm, _ in run.values}) == 1
    assert max(off for _, off in run.values) <= 1e-12


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_norms_and_scales_over_nccl():
    assert len({norm for norm, _ in labkit.run(programs_norm.sharded_and_replicated, 2.0, ranks=2).values}) == 1
    for p in (2.0, float("inf")):
        assert max(labkit.run(programs_norm.stages, p, True, False, ranks=2).values) <= 29**0.5 + 1e-12
    for _, scales, skipped in labkit.run(programs_mixed_precision.overflow_on, 1, ranks=2).values:
        assert (scales[1], skipped) == (512.0, 1)


@pytest.mark.parametrize("ranks", [1, torch.cuda.device_count() + 1], ids=["nccl", "gloo"])
def test_mixed_precision_on_a_gpu(ranks):
    for how, dtype in (("wrapped", torch.float16), ("no_sync", torch.bfloat16), ("group", torch.float16)):
        assert max(labkit.run(programs_mixed_precision.windows, how, 3, dtype, ranks=ranks).values) < 1e-2
    made, *_, stepped, _ = labkit.run(programs_mixed_precision.held, torch.bfloat16, ranks=1).values[0]
    assert stepped["master"] == 2 * made["parameters"] == stepped["optimizer"] / 2


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


def test_checkpoints_on_a_gpu():
    """Dropout's masks follow the GPU's stream; copies on the host are pinned; less is held for backward."""
    equal, held = labkit.run(programs_checkpoint.on_a_gpu, ranks=1).values[0]
    assert all(equal)
    none, full, _, _, selective, offload = held
    assert offload < full < selective < none


def test_a_tensor_on_a_gpu_that_is_no_ranks_is_refused():
    """Its random stream would not be put back: public fault 51 again."""
    from labkit.tricks import checkpoint

    with pytest.raises(ValueError, match="this rank's device is cpu"):
        checkpoint(torch.sin, torch.ones(3, device="cuda", requires_grad=True))
