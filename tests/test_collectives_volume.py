"""Bytes, messages and steps of every algorithm, counted on real ranks, equal `theory.communication` to the byte."""

from __future__ import annotations

from collections import Counter, defaultdict

import programs_collectives as programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import labkit
from labkit import collectives
from labkit.theory import communication as theory
from labkit.trace import Event

OWN = [(o, a) for o, names in collectives.ALGORITHMS.items() for a in names if a != "native"]
ROOTED = ("broadcast", "reduce", "scatter", "gather")
SEGMENTED = {("all_reduce", "ring"), ("all_reduce", "hierarchical"), ("reduce_scatter", "ring"), ("all_gather", "ring")}


Case = tuple[str, str, int, torch.dtype, dict]


def case(operation: str, algorithm: str, elements: int, dtype: torch.dtype, **more) -> Case:
    """`more`: segments and node_size where the algorithm has them, root where the operation has one."""
    return operation, algorithm, elements, dtype, more


def check_volume(cases: list[Case], ranks: int) -> None:
    run = labkit.run(programs.each_call, cases, ranks=ranks)
    sent: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for e in run.trace.events:
        if e.kind == "send":
            sent[e.labels["case"], e.rank].append(e)
    for number, (operation, algorithm, elements, dtype, more) in enumerate(cases):
        elements, itemsize = (1, 1) if operation == "barrier" else (elements, dtype.itemsize)
        plan = theory.plan(operation, algorithm, ranks, elements, itemsize, **more)
        steps = 0
        for rank in range(ranks):
            mine, planned = sent[number, rank], plan.messages_of(rank)
            assert sum(e.nbytes for e in mine) == plan.sent(rank), (cases[number], rank)
            wire = Counter((e.labels["step"], e.peer, e.nbytes) for e in mine)
            assert wire == Counter((m.step, m.target, m.nbytes) for m in planned), (cases[number], rank)
            if algorithm == "ring":
                assert [e.labels["chunk"] for e in mine] == [m.chunk for m in planned]
            steps = max([steps, *(e.labels["step"] for e in mine)])
        assert steps == plan.steps, cases[number]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, *(pytest.param(n, marks=pytest.mark.soak) for n in (6, 7))])
def test_what_is_sent_is_what_theory_says(ranks):
    cases = []
    for operation, algorithm in OWN:
        more = {"node_size": 3} if algorithm == "hierarchical" else {}
        if operation in ROOTED:
            more["root"] = ranks - 1
        cases += [case(operation, algorithm, n, torch.float32, **more) for n in (0, ranks, 5 * ranks)]
    check_volume(cases, ranks)


@pytest.mark.soak
@settings(max_examples=10)
@given(st.data())
def test_uneven_sizes_segments_and_nodes(data):
    ranks = data.draw(st.integers(1, 8), "ranks")
    cases = []
    for _ in range(5):
        operation, algorithm = data.draw(st.sampled_from(OWN))
        elements, more = data.draw(st.integers(0, 40)), {}
        if operation in ("reduce_scatter", "all_gather", "all_to_all"):
            elements *= ranks
        if (operation, algorithm) in SEGMENTED:
            more["segments"] = data.draw(st.integers(1, 4))
        if algorithm == "hierarchical":
            more["node_size"] = data.draw(st.integers(1, 9))
        if operation in ROOTED:
            more["root"] = data.draw(st.integers(0, ranks - 1))
        dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float64]))
        cases.append(case(operation, algorithm, elements, dtype, **more))
    check_volume(cases, ranks)


def test_an_average_of_half_floats_sends_no_more_than_a_sum():
    cases = [case("all_reduce", "ring", 11, torch.float16, op=op) for op in ("sum", "avg")]
    trace = labkit.run(programs.each_call, cases, ranks=3).trace
    planned = theory.plan("all_reduce", "ring", 3, 11, 2)
    for rank in range(3):
        for number in (0, 1):
            sent = [e.nbytes for e in trace.of(rank) if e.kind == "send" and e.labels["case"] == number]
            assert sum(sent) == planned.sent(rank)


@pytest.mark.soak
def test_sixteen_ranks():
    sixteen = [
        case("all_reduce", algorithm, 37, torch.float32) for algorithm in ("ring", "tree", "halving_doubling", "mesh")
    ]
    check_volume([*sixteen, case("all_reduce", "hierarchical", 37, torch.float32, node_size=5)], 16)
