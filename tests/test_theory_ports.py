"""Ports that queue: against the formulas, against queues by hand, and against real ranks under a pace."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import labkit
from labkit.pace import Link, Pace
from labkit.theory.communication import ALGORITHMS, paced_time, plan, straggler, time

PARTED = ("reduce_scatter", "all_gather", "all_to_all")
EVERY = [(operation, algorithm) for operation, names in ALGORITHMS.items() for algorithm in names]

#: Where the formula and ports that overlap latencies agree: all but the centre, and tree for powers of two.
FORMULA_HOLDS = [
    ("all_reduce", "ring", 5), ("all_reduce", "mesh", 5), ("all_reduce", "tree", 8),
    ("all_reduce", "halving_doubling", 8), ("all_reduce", "halving_doubling", 6), ("reduce_scatter", "ring", 5),
    ("reduce_scatter", "mesh", 6), ("all_gather", "ring", 5), ("all_gather", "mesh", 6), ("all_to_all", "mesh", 6),
    ("broadcast", "tree", 8), ("reduce", "tree", 8), ("all_reduce", "ring", 1),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "algorithm", "ranks"), FORMULA_HOLDS)
@pytest.mark.parametrize("elements", [240, 240_000])
def test_ports_confirm_the_formula(operation, algorithm, ranks, elements):
    times = paced_time(plan(operation, algorithm, ranks, elements), 0.003, 1e5, gamma=2e-6)
    assert max(times) == pytest.approx(time(operation, algorithm, ranks, elements, 0.003, 1e-5, 2e-6))


@pytest.mark.parametrize("ranks", [3, 5, 7, 12])
@pytest.mark.parametrize("elements", [240, 240_000])
def test_a_cut_tree_takes_no_longer_than_its_formula(ranks, elements):
    took = max(paced_time(plan("broadcast", "tree", ranks, elements), 0.003, 1e5))
    assert took <= time("broadcast", "tree", ranks, elements, 0.003, 1e-5) * (1 + 1e-12)


def test_what_overlapped_latencies_save_the_centre():
    """Hockney's root deals with one message at a time: 2(p−1)(α + nβ). A port keeps busy: 2(α + (p−1)nβ)."""
    n, p, latency, beta = 1000, 4, 0.003, 1e-5
    took = max(paced_time(plan("all_reduce", "central", p, n), latency, 1 / beta))
    assert took == pytest.approx(2 * (latency + (p - 1) * n * beta))
    assert time("all_reduce", "central", p, n, latency, beta) == pytest.approx(2 * (p - 1) * (latency + n * beta))


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("segments", [1, 2, 3, 8])
@pytest.mark.parametrize("latency", [0.0, 1e-4, 0.02, 1.0])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_ports_confirm_the_segmented_ring(operation, segments, latency, ranks):
    elements = 24 * ranks * 100
    times = paced_time(plan(operation, "ring", ranks, elements, segments=segments), latency, 1e5)
    expected = time(operation, "ring", ranks, elements, latency, 1e-5, segments=segments)
    assert times == pytest.approx([expected] * ranks)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("node_size", [1, 2, 4, 8, 16])
def test_ports_confirm_two_levels(segments, node_size):
    made = plan("all_reduce", "hierarchical", 8, 6400, segments=segments, node_size=node_size)
    took = max(paced_time(made, 1e-4, 1e6, node_size=node_size, between=(2e-3, 1e5)))
    assert took == pytest.approx(
        time("all_reduce", "hierarchical", 8, 6400, 1e-4, 1e-6, segments=segments, node_size=node_size,
             alpha_between=2e-3, beta_between=1e-5)
    )  # fmt: skip


@given(st.integers(2, 12), st.integers(2, 12), st.sampled_from([0.0, 1e-4, 1e-1]), st.integers(1, 4))
@example(11, 6, 1e-4, 1)
@example(3, 2, 1e-4, 1)
def test_a_smaller_last_node_takes_no_longer_than_the_formula(ranks, node_size, latency, segments):
    made = plan("all_reduce", "hierarchical", ranks, 332_640, segments=segments, node_size=node_size)
    bound = time("all_reduce", "hierarchical", ranks, 332_640, latency, 1e-6, segments=segments, node_size=node_size)
    assert 0.5 * bound < max(paced_time(made, latency, 1e6)) <= bound * (1 + 1e-9)


def test_a_queue_by_hand():
    """Two messages to one port: the second waits. Root 0, n·β = 2 s, latency 1 s."""
    gathered = plan("gather", "central", 3, elements=2)
    assert paced_time(gathered, 1.0, 1.0) == [5.0, 2.0, 2.0]
    assert paced_time(gathered, 1.0, 1.0, late={1: 10.0}) == [13.0, 12.0, 2.0]
    assert paced_time(gathered, 1.0, 1.0, late={0: 10.0}) == [14.0, 12.0, 12.0]  # senders wait until they are asked
    assert paced_time(gathered, 1.0, 1.0, slow_links={(1, 0): 3.0}) == [9.0, 6.0, 2.0]  # both are ready at 1
    assert paced_time(gathered, 1.0, 1.0, slow_links={(0, 1): 3.0}) == [5.0, 2.0, 2.0]
    assert paced_time(gathered, 1.0, 1.0, node_size=2, between=(4.0, 0.5)) == [8.0, 2.0, 4.0]
    assert paced_time(plan("reduce", "central", 3, elements=2), 1.0, 1.0, gamma=0.5) == [7.0, 2.0, 2.0]


BIG = {"ranks": 4, "nbytes": 8_000_000, "bandwidth": 1e9}


@pytest.mark.parametrize("link", [(1, 2), (2, 1)])
def test_a_link_at_a_fifth(link):
    """Only one direction of a ring is used; a tree can miss a link in both."""
    ring, tree = (straggler(name, **BIG, latency=0, slow_links={link: 5}) for name in ("ring", "tree"))
    assert ring.ratio == pytest.approx(5 if link == (1, 2) else 1)
    assert tree.ratio == 1


PORT_AT_A_FIFTH = {
    "ring": 5,
    "tree": 5,
    "central": 7 / 3,  # two of the root's three messages keep their speed: (5 + 1 + 1) / 3
    "halving_doubling": 5,
    "mesh": 5,
}


@pytest.mark.parametrize("algorithm", PORT_AT_A_FIFTH)
def test_a_port_at_a_fifth_slows_every_algorithm(algorithm):
    found = straggler(algorithm, **BIG, latency=0, slow_ports={2: 5})
    assert found.ratio == pytest.approx(PORT_AT_A_FIFTH[algorithm])
    assert found.delay == pytest.approx(found.undisturbed * (PORT_AT_A_FIFTH[algorithm] - 1))


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("lateness", [0.1, 0.005])
def test_a_late_rank(algorithm, rank, lateness):
    """Both algorithms wait for it: no message to it or from it begins before. But latencies pass meanwhile."""
    assert straggler(algorithm, **BIG, latency=0, late={rank: lateness}).delay == pytest.approx(lateness)
    hidden = lateness - straggler(algorithm, **BIG, latency=1e-4, late={rank: lateness}).delay
    assert -1e-12 < hidden <= 6 * 1e-4


@given(st.sampled_from(ALGORITHMS["all_reduce"][:5]), st.integers(2, 9), st.integers(1, 300), st.integers(0, 8))
def test_a_slow_port_never_helps(algorithm, ranks, nbytes, slow):
    assert straggler(algorithm, ranks, nbytes, 1e-3, 1e5, slow_ports={slow % ranks: 3}).ratio >= 1


# Real ranks

REAL = [
    (operation, algorithm, n, segments, node_size, root)
    for operation, algorithm in EVERY
    for n in ((1,) if operation == "barrier" else (35,) if operation in PARTED else (3, 38))
    for segments in ((1, 3) if algorithm in ("ring", "hierarchical") else (1,))
    for node_size in ((2, 3, 8) if algorithm == "hierarchical" else (None,))
    for root in ((3,) if operation in ("broadcast", "reduce", "scatter", "gather") else (0,))
]


def test_ranks_send_what_was_planned():
    """Five real ranks: each message of each algorithm, its step, target and bytes, in each rank's order."""

    def program(calls):
        import torch

        from labkit import collectives as c
        from labkit import trace

        p, here = 5, torch.distributed.get_rank()
        for number, (operation, algorithm, n, segments, node_size, root) in enumerate(calls):
            t, part = torch.zeros(n), torch.zeros(n // p)
            parts = [torch.zeros(n) for _ in range(p)] if here == root else None
            given = {
                "reduce_scatter": (part, t), "all_gather": (t, part), "broadcast": (t, root), "reduce": (t, root),
                "scatter": (t, parts, root), "gather": (t, parts, root), "all_to_all": (part.new_zeros(n), t),
                "barrier": (),
            }.get(operation, (t,))  # fmt: skip
            cut = {} if segments == 1 else {"segments": segments}
            nodes = {} if node_size is None else {"node_size": node_size}
            with trace.label(call=number):
                getattr(c, operation)(*given, algorithm=algorithm, **cut, **nodes)

    run = labkit.run(program, REAL, ranks=5)
    sends = [[e for e in run.trace.of(r) if e.kind == "send"] for r in range(5)]
    for number, (operation, algorithm, n, segments, node_size, root) in enumerate(REAL):
        made = plan(operation, algorithm, 5, n, 1 if operation == "barrier" else 4, segments, node_size, root)
        for r in range(5):
            real = [(e.labels["step"], e.peer, e.nbytes) for e in sends[r] if e.labels["call"] == number]
            assert real == [(m.step, m.target, m.nbytes) for m in made.messages_of(r)], REAL[number]


@pytest.mark.parametrize(
    ("algorithm", "segments", "node_size"),
    [("ring", 3, None), ("halving_doubling", 1, None), ("mesh", 1, None), ("hierarchical", 2, 3)],
)
def test_ports_say_what_the_pace_does(algorithm, segments, node_size):
    """Four real ranks on slow hardware, some of it slower: the moment at which each rank has finished."""
    n, latency, bandwidth = 20_011, 2e-3, 4e6
    what = {"slow_ports": {1: 2}, "late": {0: 0.02}, "slow_links": {(2, 0): 3}}
    made = plan("all_reduce", algorithm, 4, n, 1, segments, node_size)
    expected = pytest.approx(paced_time(made, latency, bandwidth, **what))

    def program():
        import torch

        from labkit import collectives, pace

        ones = torch.ones(n, dtype=torch.uint8)
        collectives.all_reduce(ones, algorithm=algorithm, segments=segments, node_size=node_size)
        return pace.running().v

    hardware = Pace(link=Link(latency, bandwidth), **what)
    # A host that is busy for more than 20 ms, also with loading at the first call, moves the clock: try again
    assert any(labkit.run(program, ranks=4, pace=hardware).values == expected for _ in range(4))


# What is refused

RING = plan("all_reduce", "ring", 4, 8)
WRONG = [
    (lambda: paced_time(RING, -1, 1), ValueError, "a latency is -1"),
    (lambda: paced_time(RING, 0, 0), ValueError, "a bandwidth is 0: expected more than 0"),
    (lambda: paced_time(RING, 0, 1, slow_links={3: 2}), TypeError, r"slow_links has the key 3: expected two ranks"),
    (lambda: paced_time(RING, 0, 1, slow_links={(0, 4): 2}), ValueError, r"a rank of link \(0, 4\) is 4"),
    (lambda: paced_time(RING, 0, 1, slow_links={(0, 1): 0.2}), ValueError, r"\(0, 1\)\] is 0.2: expected 1 or more"),
    (lambda: paced_time(RING, 0, 1, slow_ports={9: 2}), ValueError, "a rank in slow_ports is 9"),
    (lambda: paced_time(RING, 0, 1, late={0: -2}), ValueError, r"late\[0\] is -2"),
    (lambda: paced_time(RING, 0, 1, node_size=2), ValueError, "node_size and between belong together"),
    (lambda: straggler("ring", 1, 8, 0, 1), ValueError, "ranks is 1: expected 2 or more"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_what_is_wrong_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
