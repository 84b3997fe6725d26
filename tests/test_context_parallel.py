"""Attention in tiles and round a ring: exact, in little memory, with equal work, and sending while it computes."""

from __future__ import annotations

import sys
import threading
from itertools import product
from pathlib import Path

import pytest
import torch

import labkit
from labkit import context_parallel
from labkit.context_parallel import contiguous, tiled_attention, tiles, zigzag
from labkit.memory import MemoryMeter
from labkit.model.attention import causal_mask, explicit_attention
from labkit.model.dropout import Dropout

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import programs_context_parallel as programs


@pytest.mark.parametrize(
    ("ranks", "order", "causal", "kv_heads", "tile", "each"),
    [
        (4, "zigzag", True, 4, 4, 16), (4, "zigzag", True, 1, 64, 16), (4, "strided", False, 2, 5, 7),
        (4, "contiguous", True, 2, 4, 16), (4, "contiguous", False, 4, 64, 16), (3, "zigzag", True, 2, 3, 16),
        (3, "contiguous", True, 1, 3, 5), (3, "zigzag", False, 2, 4, 16), (2, "zigzag", True, 2, 1, 4),
        (1, "zigzag", True, 4, 4, 16),
    ],
)  # fmt: skip
def test_a_ring_is_exact_in_both_directions(ranks, order, causal, kv_heads, tile, each):
    run = labkit.run(programs.ring, order, causal, kv_heads, tile, each, ranks=ranks)
    assert max(off for off, _ in run.values) <= 1e-12
    block = 2 * 2 * kv_heads * each * 8 * 8  # keys and values of a rank: 2 × (b, heads, s/N, d) of 8 bytes
    messages = 2 * (ranks - 1) + (ranks if ranks > 1 else 0)  # forward and backward, and the gradients
    assert {run.trace.bytes_sent(rank) for rank in range(ranks)} == {messages * block}


def test_a_ring_of_some_of_the_ranks():
    run = labkit.run(programs.ring, "zigzag", True, 2, 4, members=(1, 3), ranks=4)
    assert max(off for off, _ in run.values) <= 1e-12
    assert {m.send.peer for m in run.trace.messages() if m.send.rank == 1} == {3}


@pytest.mark.parametrize(("order", "tile"), [("zigzag", 3), ("zigzag", 8), ("contiguous", 5)])
def test_each_pair_that_may_look_is_in_one_tile_of_each_direction(order, tile):
    """And a tile in which nobody may look is in none."""
    ranks, s = 4, 64
    found = labkit.run(programs.ring, order, True, 2, tile, ranks=ranks).values
    for phase in ("forward", "backward"):
        times = torch.zeros(s, s, dtype=torch.int64)
        for rank, (_, places) in enumerate(found):
            mine = programs.ORDERS[order](s, rank, ranks).tolist()
            for at in (place for place in places if place.phase == phase):
                rows, columns = range(at.query, at.query + at.rows), range(at.key, at.key + at.columns)
                assert set(rows) <= set(mine)
                assert set(columns) <= set(programs.ORDERS[order](s, (rank - at.step) % ranks, ranks).tolist())
                assert columns.start <= rows[-1]
                assert max(at.rows, at.columns) <= tile
                times[rows.start : rows.stop, columns.start : columns.stop] += 1
        assert bool((times <= 1).all())
        assert bool((times.tril() == torch.ones(s, s).tril()).all())


def test_zigzag_gives_equal_work_and_contiguous_does_not():
    """Counted from the mask: of N = 4 ranks with two tiles each, rank r of contiguous ones has 4·r + 3."""
    work = {order: [len(p) for p in labkit.run(programs.places, order, 8, ranks=4).values] for order in programs.ORDERS}
    assert work == {"zigzag": [9, 9, 9, 9], "contiguous": [3, 7, 11, 15]}


@pytest.mark.parametrize("ranks", [3, 4])
def test_blocks_are_computed_while_messages_are_under_way(ranks):
    """By the order of events: all messages of a step are posted before its block, and waited for after it."""
    trace = labkit.run(programs.in_spans, ranks=ranks).trace
    for rank, work in product(range(ranks), ("attend", "attend_backward")):
        events = trace.of(rank)
        blocks = {e.labels["step"]: e for e in events if e.name == work}
        assert list(blocks) == list(range(ranks))
        last_forward = max(e.index for e in events if e.name == "attend")
        messages = [e for e in events if e.kind in ("send", "recv") and e.tag == 0]
        messages = [e for e in messages if (e.index > last_forward) == (work == "attend_backward")]
        assert len(messages) == 2 * (ranks - 1)
        for e in messages:
            block = blocks[e.labels["step"]]
            assert e.start < block.start, f"{e.name} of step {e.labels['step']} is posted before the block"
            if e.kind == "recv":
                assert e.end >= block.end, "what arrives is waited for after it"
    returns = [e for e in events if e.tag == 1 and e.kind == "recv"]  # the gradients, one step behind
    for e in returns[:-1]:
        following = blocks[e.labels["step"] + 1]
        assert e.start < following.start
        assert e.end >= following.end


def test_a_ring_of_16_bit_tensors():
    run = labkit.run(programs.half, ranks=3)
    for dtypes, off, largest in run.values:
        assert dtypes == [torch.bfloat16] * 4
        assert off <= 2**-8 * largest
    sizes = [e.nbytes for e in run.trace.of(0) if e.kind == "send"]
    block = 2 * 2 * 2 * 16 * 8
    assert sorted(sizes) == [2 * block] * 4 + [4 * block] * 3, "keys and values in 16 bits, their gradients in 32"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("odd", "ValueError: 10 tokens on 2 ranks: expected a multiple of 4, for two chunks each"),
        ("tile", "ValueError: tile=0: expected a whole number, at least 1"),
        ("float tile", "ValueError: tile=2.0: expected a whole number"),
        ("order", "ValueError: order='striped': expected one of 'zigzag', 'contiguous'"),
        ("keys", "ValueError: q has 6 tokens, k 4: expected as many"),
        ("heads", "ValueError: q (1, 4, 6, 2), k (1, 3, 6, 2)"),
        ("shape", "TypeError: q is (4, 6, 2) of torch.float32: expected floats, (b, heads, tokens, d)"),
        ("integers", "TypeError: q is (1, 4, 6, 2) of torch.int64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_ring_is_refused(what, told):
    assert all(said.startswith(told) for said in labkit.run(programs.refused, what, ranks=2).values)


def test_every_token_is_dealt_to_one_rank():
    for ranks, order in product((1, 2, 3, 4), programs.ORDERS.values()):
        dealt = torch.cat([order(12 * ranks, rank, ranks) for rank in range(ranks)])
        assert dealt.sort().values.tolist() == list(range(12 * ranks))
    for order, told in ((context_parallel.zigzag, "multiple of 4"), (context_parallel.contiguous, "multiple of 2")):
        with pytest.raises(ValueError, match=told):
            order(5, 0, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "length", "tile"), [(4, 37, 10), (2, 16, 16), (1, 33, 64), (2, 9, 1)])
def test_tiles_are_exact_in_both_directions(causal, kv_heads, length, tile):
    given, grad = programs.whole(length, kv_heads, torch.float64)
    leaves = [x.clone().requires_grad_() for x in given]
    out = context_parallel.tiled_attention(*leaves, causal=causal, tile=tile)
    out.backward(grad)
    found = [out.detach(), *(x.grad for x in leaves)]
    for ours, theirs in zip(found, programs.reference(given, grad, causal), strict=True):
        assert (ours - theirs).abs().max() <= 1e-12


def test_large_scores_do_not_overflow():
    """exp(800) is beyond float64's range: only its ratio to others is ever formed."""
    given, grad = programs.whole(20, 4, torch.float64)
    given[0] *= 40 * 8**0.5
    given[1] *= 40
    leaves = [x.clone().requires_grad_() for x in given]
    out = context_parallel.tiled_attention(*leaves, tile=6)
    assert (out - programs.reference(given, grad, True)[0]).abs().max() <= 1e-12


def test_tiles_of_16_bit_tensors_are_summed_in_32():
    given, grad = programs.whole(64, 2, torch.bfloat16)
    leaves = [x.clone().requires_grad_() for x in given]
    out = context_parallel.tiled_attention(*leaves, tile=16)
    out.backward(grad)
    expected = programs.reference([x.double() for x in given], grad.double(), True)
    for ours, exact in zip([out.detach(), *(x.grad for x in leaves)], expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_tiles_see_keys_of_another_number_than_queries():
    q, k = torch.randn(1, 2, 7, 4, dtype=torch.float64), torch.randn(1, 2, 12, 4, dtype=torch.float64)
    out = context_parallel.tiled_attention(q, k, k, causal=False, tile=5)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, k), rtol=1e-12, atol=1e-13)


def test_tiles_of_queries_and_keys_need_not_begin_together():
    """A tile whose last query sees its first key alone is computed."""
    q, k, v = (torch.randn(1, 1, 1, n, 4, dtype=torch.float64) for n in (4, 8, 8))
    out, log_sum = tiles.attend(q, k, v, 0.5, [range(1, 5)], [range(8)], tile=4, causal=True)
    unseen = torch.arange(8) > torch.arange(1, 5).unsqueeze(1)
    scores = (0.5 * q @ k.transpose(-2, -1)).masked_fill(unseen, float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(log_sum, scores.logsumexp(-1, keepdim=True), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("tile", "error"), [(0, "tile=0"), (-1, "tile=-1"), (True, "tile=True"), (2.5, "tile=2.5")])
def test_tiles_of_no_size_are_refused(tile, error):
    q = torch.zeros(1, 4, 8, 2)
    with pytest.raises(ValueError, match=error):
        context_parallel.tiled_attention(q, q, q, tile=tile)


def test_the_peak_of_tiles_is_at_most_a_tenth():
    """Forward and backward at s = 4096; the s×s mask of the explicit one is not counted."""
    mask, threads = causal_mask(torch.arange(4096), torch.float32), torch.get_num_threads()
    torch.set_num_threads(1)

    def peak(attend) -> int:
        q, k, v = (torch.randn(1, 1, 4096, 64, requires_grad=True) for _ in "qkv")
        meter = MemoryMeter(mode="full")
        with meter:
            attend(q, k, v).sum().backward()
        return sum(meter.peak.values())

    try:
        tiled = peak(lambda q, k, v: context_parallel.tiled_attention(q, k, v, tile=256))
        explicit = peak(lambda q, k, v: explicit_attention(q, k, v, mask, Dropout(0.0)))
    finally:
        torch.set_num_threads(threads)
    assert explicit >= 2 * 4096 * 4096 * 4, "at least the probabilities and their gradient"
    assert tiled <= 0.1 * explicit


def test_traffic_is_what_the_algorithm_moves():
    """FlashAttention's loops by hand: 16 tokens, 4 tiles a side, one head of 8 numbers of 8 bytes."""
    given = [x.requires_grad_() for x in (torch.randn(1, 1, 16, 8, dtype=torch.float64) for _ in "qkv")]
    tile, row = 4 * 8 * 8, 4 * 8  # bytes of a tile of q, and of a number a row
    with context_parallel.count_traffic() as forward:
        out = context_parallel.tiled_attention(*given, tile=4)
    assert forward.tiles == len(forward.places) == 10
    assert forward.read == (4 + 2 * 10) * tile
    assert forward.written == 4 * (tile + row)
    with context_parallel.count_traffic() as backward:
        out.sum().backward()
    assert [p.phase for p in backward.places] == ["backward"] * 10
    assert [(p.query, p.key) for p in backward.places[:5]] == [(0, 0), (4, 0), (8, 0), (12, 0), (4, 4)]
    assert backward.read == (4 * 2 + 10 * 3) * tile
    assert backward.written == (10 + 4 * 2) * tile


def test_a_backward_in_another_thread_is_counted():
    """As autograd's on CUDA; the innermost counter counts."""
    q = torch.zeros(1, 1, 8, 4, requires_grad=True)
    with context_parallel.count_traffic() as outer:
        out = context_parallel.tiled_attention(q, q, q, tile=4)
        with context_parallel.count_traffic() as inner:
            thread = threading.Thread(target=lambda: out.sum().backward())
            thread.start()
            thread.join()
    context_parallel.tiled_attention(q, q, q)
    assert (outer.tiles, inner.tiles) == (3, 3)
    assert {p.phase for p in outer.places} == {"forward"}
    assert {p.phase for p in inner.places} == {"backward"}


@pytest.mark.parametrize("call", [lambda: zigzag(8, 2, 2), lambda: contiguous(8, -1, 2), lambda: zigzag(8, 0, 0),
                                  lambda: zigzag(-8, 0, 2)])  # fmt: skip
def test_ranks_that_are_not_there_are_refused(call):
    with pytest.raises(ValueError, match="expected"):
        call()


def test_rows_that_have_seen_nothing_combine():
    nothing = torch.zeros(1, 2), torch.full((1, 1), float("-inf"))
    something = torch.ones(1, 2), torch.zeros(1, 1)
    assert torch.equal(tiles.combine(*nothing, *nothing)[0], nothing[0])
    assert torch.equal(tiles.combine(*nothing, *something)[0], something[0])


def test_autocast_changes_nothing_inside():
    torch.manual_seed(0)
    q, k, v = (50 * torch.randn(1, 2, 16, 8) for _ in "qkv")
    grads = []
    for enabled in (False, True):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            tiled_attention(*given, tile=4).sum().backward()
        grads.append([x.grad for x in given])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
