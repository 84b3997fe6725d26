"""Communication on paper: plans against what they must achieve, formulas against plans, fits, what is refused."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labkit.theory import communication
from labkit.theory.communication import (
    ALGORITHMS,
    Fit,
    cost,
    crossover,
    fit,
    per_message,
    per_rank_limit,
    plan,
    sent_per_rank,
    time,
)

MiB = 2**20
EVERY = [(operation, algorithm) for operation, names in ALGORITHMS.items() for algorithm in names]
PARTED = ("reduce_scatter", "all_gather", "all_to_all")
FEWER = settings(max_examples=40)  # a time for each of many algorithms
RANKS, ELEMENTS = st.integers(1, 16), st.integers(0, 200)
ALPHA, BETA = 20e-6, 1 / 1.25e9  # ten-gigabit Ethernet


def make(operation, algorithm, ranks, elements, itemsize=1, segments=1, node_size=4, root=0):
    """A plan; what does not fit the operation is put right, so that one strategy serves all of them."""
    if operation in PARTED:
        elements = elements // ranks * ranks
    elements, itemsize = (1, 1) if operation == "barrier" else (elements, itemsize)
    return plan(
        operation, algorithm, ranks, elements, itemsize,
        segments=segments if algorithm in ("ring", "hierarchical") else 1,
        node_size=node_size if algorithm == "hierarchical" else None,
        root=root % ranks if operation in ("broadcast", "reduce", "scatter", "gather") else 0,
    )  # fmt: skip


def chunk_sizes(elements, parts):
    """As `torch.tensor_split`."""
    return [elements // parts + (k < elements % parts) for k in range(parts)]


# Messages


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
@FEWER
@given(RANKS, ELEMENTS, st.integers(1, 5), st.integers(1, 20), st.integers(0, 15))
def test_what_is_sent_is_received(operation, algorithm, ranks, elements, segments, node_size, root):
    made = make(operation, algorithm, ranks, elements, 4, segments, node_size, root)
    assert sum(made.sent(r) for r in range(ranks)) == sum(made.received(r) for r in range(ranks)) == made.total
    assert all(m.nbytes > 0 and m.source != m.target for m in made.messages)
    assert max(made.sent(made.most_loaded.rank), made.received(made.most_loaded.rank)) == max(
        max(made.sent(r), made.received(r)) for r in range(ranks)
    )
    if ranks == 1:
        assert not made.messages
        assert made.steps == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@FEWER
@given(RANKS, ELEMENTS, st.integers(1, 20), st.integers(1, 5))
def test_every_all_reduce_moves_the_same_in_total(algorithm, ranks, elements, node_size, segments):
    """Each element goes p−1 times on its way to a sum, and p−1 times back: uneven sizes and any number of ranks."""
    made = make("all_reduce", algorithm, ranks, elements, 8, segments, node_size)
    assert made.total == 2 * (ranks - 1) * elements * 8


@given(st.integers(2, 16), ELEMENTS, st.integers(1, 4))
def test_a_ring_by_chunk_sizes(ranks, elements, segments):
    """Rank r never sends its own chunk in the reduce-scatter, nor its right neighbour's in the all-gather."""
    made, sizes = plan("all_reduce", "ring", ranks, elements, 2, segments), chunk_sizes(elements, ranks)
    expected = [2 * (2 * elements - sizes[r] - sizes[(r + 1) % ranks]) for r in range(ranks)]
    assert [made.sent(r) for r in range(ranks)] == expected
    assert made.steps == (2 * (ranks - 1) if elements else 0)


def play(made, elements, start):
    """The plan on sets: `start[rank][e]` says whose contributions rank holds of element e. A double add is an error."""
    held = [list(of_rank) for of_rank in start]
    for _, together in groupby(made.messages, key=lambda m: (m.phase, m.turn)):
        together = list(together)
        before = [list(of_rank) for of_rank in held]
        for m in together:
            for e in range(m.start, m.start + m.nbytes):
                if m.reduces:
                    assert not held[m.target][e] & before[m.source][e], f"{m} adds element {e} twice"
                    held[m.target][e] = held[m.target][e] | before[m.source][e]
                else:
                    held[m.target][e] = before[m.source][e]
    return held


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@FEWER
@given(RANKS, st.integers(0, 60), st.integers(1, 4), st.integers(1, 20))
@example(7, 60, 2, 4)
def test_everybody_ends_with_everybodys_contribution(algorithm, ranks, elements, segments, node_size):
    made = make("all_reduce", algorithm, ranks, elements, segments=segments, node_size=node_size)
    held = play(made, elements, [[{r}] * elements for r in range(ranks)])
    assert held == [[set(range(ranks))] * elements] * ranks


@pytest.mark.parametrize("algorithm", ["ring", "mesh"])
@FEWER
@given(RANKS, st.integers(0, 8), st.integers(1, 4))
def test_halves_of_an_all_reduce(algorithm, ranks, size, segments):
    elements, full, none = ranks * size, set(range(ranks)), set()
    scattered = make("reduce_scatter", algorithm, ranks, elements, segments=segments)
    held = play(scattered, elements, [[{r}] * elements for r in range(ranks)])
    assert all(held[r][r * size : (r + 1) * size] == [full] * size for r in range(ranks))

    gathered = make("all_gather", algorithm, ranks, elements, segments=segments)
    owned = [[full if e // size == r else none for e in range(elements)] for r in range(ranks)]
    assert play(gathered, elements, owned) == [[full] * elements] * ranks


@pytest.mark.parametrize("algorithm", ["tree", "central"])
@FEWER
@given(RANKS, st.integers(0, 15), st.integers(0, 3))
def test_rooted(algorithm, ranks, root, elements):
    root, full, none = root % ranks, set(range(ranks)), set()
    reduced = make("reduce", algorithm, ranks, elements, root=root)
    assert play(reduced, elements, [[{r}] * elements for r in range(ranks)])[root] == [full] * elements
    sent = make("broadcast", algorithm, ranks, elements, root=root)
    start = [[full if r == root else none] * elements for r in range(ranks)]
    assert play(sent, elements, start) == [[full] * elements] * ranks


def test_parts_go_where_they_belong():
    scattered = plan("scatter", "central", 3, elements=5, itemsize=2, root=1)
    assert [(m.source, m.target, m.nbytes, m.start) for m in scattered.messages] == [(1, 0, 10, 0), (1, 2, 10, 10)]
    gathered = plan("gather", "central", 3, elements=5, itemsize=2, root=1)
    assert [(m.source, m.target, m.nbytes, m.start) for m in gathered.messages] == [(0, 1, 10, 0), (2, 1, 10, 10)]
    exchanged = plan("all_to_all", "mesh", 3, elements=6)
    assert {(m.source, m.target, m.start, m.nbytes) for m in exchanged.messages} == {
        (a, b, 2 * b, 2) for a in range(3) for b in range(3) if a != b
    }


def test_messages_of_a_ring_in_order():
    made = plan("all_reduce", "ring", 3, elements=7, itemsize=4, segments=2)
    assert [(m.step, m.target, m.chunk, m.segment, m.nbytes) for m in made.messages_of(1)] == [
        (1, 2, 0, 0, 8), (1, 2, 0, 1, 4), (2, 2, 2, 0, 4), (2, 2, 2, 1, 4),
        (3, 2, 1, 0, 4), (3, 2, 1, 1, 4), (4, 2, 0, 0, 8), (4, 2, 0, 1, 4),
    ]  # fmt: skip
    assert [m.source for m in made.messages_to(1)] == [0] * 8


def test_edges_of_a_tree():
    """Four ranks: 0→2, then 0→1 and 2→3; the reduce is its mirror. Ranks 1 and 2 never talk."""
    edges = [(m.step, m.source, m.target) for m in plan("all_reduce", "tree", 4, 1).messages]
    assert edges == [(1, 1, 0), (1, 3, 2), (2, 2, 0), (3, 0, 2), (4, 0, 1), (4, 2, 3)]
    assert [(m.source, m.target) for m in plan("broadcast", "tree", 3, 1, root=2).messages] == [(2, 1), (2, 0)]


def test_a_mesh_does_not_crowd_one_port():
    """Each rank begins with its right neighbour, so at no moment do two of them send to the same one."""
    sent = [[m.target for m in plan("reduce_scatter", "mesh", 5, 5).messages_of(r)] for r in range(5)]
    assert all(sorted(slot) == list(range(5)) for slot in zip(*sent, strict=True))
    assert sent[3] == [4, 0, 1, 2]


def test_halving_and_doubling():
    """Five ranks: rank 4 folds into rank 0; four exchange 8, 4, 4, 8 of 16 elements."""
    made = plan("all_reduce", "halving_doubling", 5, elements=16)
    assert [(m.step, m.target, m.start, m.nbytes) for m in made.messages_of(0)] == [
        (2, 2, 8, 8), (3, 1, 4, 4), (4, 1, 0, 4), (5, 2, 0, 8), (6, 4, 0, 16)
    ]  # fmt: skip
    assert [(m.step, m.target, m.nbytes) for m in made.messages_of(4)] == [(1, 0, 16)]
    assert made.steps == 6


def test_a_smaller_last_node():
    """Nodes of 4, 4 and 2: ranks 8 and 9 hold two of four chunks each, and reduce them one after the other."""
    made = plan("all_reduce", "hierarchical", 10, elements=24, node_size=4)
    sent = [(m.step, m.target, m.start, m.nbytes) for m in made.messages_of(8)]
    assert sent == [
        (1, 9, 12, 12),
        (2, 0, 2, 2), (3, 0, 0, 2), (4, 0, 4, 2), (5, 0, 2, 2),
        (6, 1, 8, 2), (7, 1, 6, 2), (8, 1, 10, 2), (9, 1, 8, 2),
        (10, 9, 0, 12),
    ]  # fmt: skip
    assert [m.step for m in made.messages_of(0)] == list(range(1, 11))
    assert made.steps == 3 + 2 * 2 + 3


# Formulas


def test_the_published_table():
    p, log, part = 8, 3, 7 / 8
    for algorithm, expected in {
        "ring": (2 * (p - 1), 2 * part, part),
        "halving_doubling": (2 * log, 2 * part, part),
        "mesh": (2, 2 * part, part),
        "central": (2 * (p - 1), 2 * (p - 1), p - 1),
        "tree": (2 * log, 2 * log, log),
    }.items():
        found = cost("all_reduce", algorithm, p)
        assert (found.alpha, found.beta, found.gamma) == expected, algorithm
    assert time("broadcast", "tree", 8, 1000, 1.0, 0.1) == pytest.approx(3 * (1 + 100))
    assert time("reduce", "tree", 8, 1000, 1.0, 0.1, 0.01) == pytest.approx(3 * (1 + 100 + 10))
    n, a, b, g = 8e6, 1e-5, 1e-9, 1e-10
    assert time("all_reduce", "ring", 8, n, a, b, g) == pytest.approx(14 * a + 1.75 * n * b + 0.875 * n * g)
    two_levels = 6 * a + 1.5 * n * b + 0.75 * n * g + 2 * a * 3 + (1 / 4) * n * b * 5 + (1 / 8) * n * g
    assert time(
        "all_reduce", "hierarchical", 8, n, a, b, g, node_size=4, alpha_between=3 * a, beta_between=5 * b
    ) == pytest.approx(two_levels)


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
@FEWER
@given(st.integers(1, 16), st.integers(1, 17), st.integers(0, 15))
def test_formulas_and_plans_send_the_same(operation, algorithm, ranks, node_size, root):
    rooted = operation in ("broadcast", "reduce", "scatter", "gather")
    more = {"node_size": node_size} if algorithm == "hierarchical" else {"root": root % ranks} if rooted else {}
    nodes = -(-ranks // node_size)
    elements = 1 if operation == "barrier" else math.lcm(ranks, node_size * nodes, min(node_size, ranks) * nodes, 16)
    made = plan(operation, algorithm, ranks, elements, **more)
    sent = [made.sent(r) for r in range(ranks)]
    assert sent == sent_per_rank(operation, algorithm, ranks, elements, **more)
    if algorithm != "hierarchical":
        assert cost(operation, algorithm, ranks).alpha >= made.steps


def test_only_the_ring_stays_below_two_tensors():
    """One rank of 8 MiB: 12, 14, 15.98 MiB at 4, 8, 1000 ranks, while the centre's root sends 3, 7, 999 tensors."""
    sent = [sent_per_rank("all_reduce", "ring", n, 8 * MiB)[0] / MiB for n in (4, 8, 1000)]
    assert sent == pytest.approx([12, 14, 15.984], abs=1e-12)
    assert max(sent) < per_rank_limit(8 * MiB) / MiB == 16
    assert [max(sent_per_rank("all_reduce", "central", n, 8 * MiB)) / MiB for n in (4, 8, 1000)] == [24, 56, 7992]


def test_where_the_winner_changes():
    assert crossover("all_reduce", "tree", "ring", 8, ALPHA, BETA) == pytest.approx(8 * ALPHA / (4.25 * BETA))
    assert crossover("all_reduce", "ring", "tree", 8, ALPHA, BETA) is None
    assert crossover("all_reduce", "ring", "halving_doubling", 8, ALPHA, BETA) == 0
    assert crossover("all_reduce", "central", "tree", 8, ALPHA, BETA) == 0
    assert crossover("all_reduce", "halving_doubling", "ring", 8, ALPHA, BETA) is None
    assert crossover("all_reduce", "ring", "ring", 8, ALPHA, BETA) is None
    assert crossover("all_reduce", "ring", "hierarchical", 8, ALPHA, BETA, node_size=4) == 0  # 8 steps instead of 14


@given(st.sampled_from(ALGORITHMS["all_reduce"][:5]), st.sampled_from(ALGORITHMS["all_reduce"][:5]), st.integers(2, 16))
def test_a_crossover_is_one(first, second, ranks):
    size = crossover("all_reduce", first, second, ranks, ALPHA, BETA)
    above = 1e12 if size is None else 1.001 * size + 1
    took = [time("all_reduce", name, ranks, above, ALPHA, BETA) for name in (first, second)]
    assert (took[1] < took[0]) == (size is not None)
    if size:
        below = [time("all_reduce", name, ranks, 0.999 * size, ALPHA, BETA) for name in (first, second)]
        assert below[0] < below[1]


# Bandwidth and fits


def test_bus_bandwidth_of_nccl_tests():
    """The factors of doc/PERFORMANCE.md; with them a ring at full speed shows the port's own bandwidth."""
    operations = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
    assert [communication.bus_factor(o, 8) for o in operations] == [1.75, 0.875, 0.875, 0.875, 1, 1]
    for operation in operations[:3]:
        took = time(operation, "ring", 8, 1e9, 0, 1 / 4e9)
        assert communication.bus_bandwidth(operation, 1e9, took, 8) == pytest.approx(4e9)
    assert communication.algorithm_bandwidth(100, 0.5) == 200


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6))
def test_a_fit_finds_the_line(alpha, beta):
    sizes = [10**k for k in range(3, 9)]
    found = fit(sizes, [alpha + beta * n for n in sizes])
    assert [found.time(n) for n in sizes] == pytest.approx([alpha + beta * n for n in sizes], rel=1e-6)
    assert found.half_size * found.beta == pytest.approx(found.alpha)


def test_a_fit_weighs_relative_errors():
    """Ten per cent too slow at 1 kB and at 1 GB: each pulls its own end alone. Unweighted, α would follow the large."""
    sizes = [1e3, 1e4, 1e8, 1e9]
    true = [1e-4 + 1e-9 * n for n in sizes]
    found = fit(sizes, [true[0], true[1], true[2], 1.1 * true[3]])
    assert found.alpha == pytest.approx(1e-4, rel=0.01)
    assert 1e-9 < found.beta < 1.1e-9
    assert found.bandwidth == 1 / found.beta


def test_a_fit_is_the_minimum():
    sizes, seconds = [10, 200, 3000, 50_000], [1.2, 1.1, 4.5, 48.0]

    def error(alpha, beta):
        return sum(((alpha + beta * n - t) / t) ** 2 for n, t in zip(sizes, seconds, strict=True))

    found = fit(sizes, seconds)
    least = error(found.alpha, found.beta)
    around = [(a, b) for a in (0.99, 1, 1.01) for b in (0.99, 1, 1.01) if (a, b) != (1, 1)]
    assert all(error(found.alpha * a, found.beta * b) > least for a, b in around)


def test_a_fit_is_never_negative():
    assert fit([100, 200], [1.0, 3.0]) == Fit(0.0, pytest.approx((100 + 200 / 3) / (100**2 + (200 / 3) ** 2)))
    flat = fit([100, 200], [3.0, 1.0])
    assert flat == Fit(pytest.approx((1 / 3 + 1) / (1 / 9 + 1)), 0.0)
    assert flat.bandwidth == flat.half_size == math.inf


def test_per_message_gives_back_what_went_in():
    for algorithm in ALGORITHMS["all_reduce"][:5]:
        sizes = [1e3, 1e6, 1e9]
        line = fit(sizes, [time("all_reduce", algorithm, 6, n, 3e-5, 2e-9) for n in sizes])
        found = per_message(line, "all_reduce", algorithm, 6)
        assert (found.alpha, found.beta) == pytest.approx((3e-5, 2e-9))


# What is refused

WRONG = [
    (lambda: plan("allreduce", "ring", 4, 8), ValueError, "operation is 'allreduce': expected one of 'all_reduce'"),
    (lambda: plan("broadcast", "ring", 4, 8), ValueError, "broadcast has no algorithm 'ring' here: .*'tree'"),
    (lambda: plan("all_reduce", "ring", 0, 8), ValueError, "ranks is 0: expected 1 or more"),
    (lambda: plan("all_reduce", "ring", 4.0, 8), TypeError, r"ranks is 4\.0: expected a whole number"),
    (lambda: plan("all_reduce", "ring", True, 8), TypeError, "ranks is True"),
    (lambda: plan("all_reduce", "ring", 4, -1), ValueError, "elements is -1: expected 0 or more"),
    (lambda: plan("all_reduce", "ring", 4, 8, 0), ValueError, "itemsize is 0: expected 1 or more"),
    (lambda: plan("all_gather", "ring", 4, 10), ValueError, "elements is 10, which 4 ranks do not divide"),
    (lambda: plan("barrier", "tree", 4, 10), ValueError, "a barrier sends 1 element of 1 byte"),
    (lambda: plan("all_reduce", "tree", 4, 8, segments=2), ValueError, "segments is 2, but tree does not cut"),
    (lambda: plan("all_reduce", "ring", 4, 8, node_size=2), ValueError, "node_size is 2, but ring knows no nodes"),
    (lambda: plan("all_reduce", "hierarchical", 4, 8), ValueError, "hierarchical needs node_size"),
    (lambda: plan("all_reduce", "tree", 4, 8, root=1), ValueError, "root is 1, but all_reduce with tree has none"),
    (lambda: plan("broadcast", "tree", 4, 8, root=4), ValueError, "root is 4, but there are 4 ranks: expected 0 to 3"),
    (lambda: plan("all_reduce", "ring", 4, 8).sent(4), ValueError, "rank is 4, but there are 4 ranks"),
    (lambda: time("all_reduce", "ring", 4, 8, -1, 1), ValueError, "alpha is -1: expected 0 or more seconds"),
    (lambda: time("all_reduce", "ring", 4, 8, 0, "1"), TypeError, "beta is '1': expected a number of seconds per"),
    (lambda: time("all_reduce", "ring", 4, math.nan, 0, 1), ValueError, "nbytes is nan"),
    (lambda: time("all_reduce", "ring", 4, 8, 0, 1, 1, segments=2), ValueError, "segments has no gamma"),
    (lambda: time("all_reduce", "ring", 4, 8, 0, 1, alpha_between=1), ValueError, "ring knows no nodes"),
    (lambda: time("barrier", "tree", 4, 8, 0, 1), ValueError, "nbytes is 8, but a barrier sends 1 byte"),
    (lambda: crossover("all_reduce", "tree", "ring", 4, 1, 0), ValueError, "beta is 0: expected more than 0"),
    (lambda: per_rank_limit(-1), ValueError, "nbytes is -1"),
    (lambda: communication.bus_factor("barrier", 4), ValueError, "'barrier', for which there is no factor"),
    (lambda: communication.algorithm_bandwidth(1, 0), ValueError, "seconds is 0: expected more than 0"),
    (lambda: fit([1, 2], [1]), ValueError, "2 sizes and 1 seconds"),
    (lambda: fit([5, 5], [1, 1]), ValueError, "a line needs two different ones"),
    (lambda: fit([5, 6], [1, 0]), ValueError, "a time is 0: expected more than 0 seconds"),
    (lambda: per_message(3, "all_reduce", "ring", 4), TypeError, "per_message takes what fit returned"),
    (lambda: per_message(Fit(1, 1), "all_reduce", "ring", 1), ValueError, "ranks is 1: expected 2 or more"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_what_is_wrong_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
