"""Bytes, messages and steps of every algorithm, counted on real ranks, equal `theory.communication` to the byte."""

from __future__ import annotations

from collections import Counter

import programs_collectives as programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import labkit
from labkit import collectives
from labkit.theory import communication as theory

OWN = [(o, a) for o, names in collectives.ALGORITHMS.items() for a in names if a != "native"]
SEGMENTED = {("all_reduce", "ring"), ("all_reduce", "hierarchical"), ("reduce_scatter", "ring"), ("all_gather", "ring")}


def compare(operation: str, algorithm: str, ranks: int, elements: int, dtype: torch.dtype, **more) -> None:
    """`more`: segments and node_size where the algorithm has them, root where the operation has one."""
    run = labkit.run(programs.one_call, operation, algorithm, elements, dtype, more, ranks=ranks)
    itemsize = 1 if operation == "barrier" else dtype.itemsize
    plan = theory.plan(operation, algorithm, ranks, 1 if operation == "barrier" else elements, itemsize, **more)
    for rank in range(ranks):
        sent = [e for e in run.trace.of(rank) if e.kind == "send"]
        planned = plan.messages_of(rank)
        assert run.trace.bytes_sent(rank) == plan.sent(rank), (rank, run.trace.bytes_sent(rank), plan.sent(rank))
        wire = Counter((e.labels["step"], e.peer, e.nbytes) for e in sent)
        assert wire == Counter((m.step, m.target, m.nbytes) for m in planned)
        chunks = {m.chunk for m in planned if m.chunk is not None and "chunk" in (sent[0].labels if sent else {})}
        assert {e.labels["chunk"] for e in sent if "chunk" in e.labels} >= chunks
    steps = max((e.labels["step"] for e in run.trace.events if e.kind == "send"), default=0)
    assert steps == plan.steps


@pytest.mark.parametrize(("operation", "algorithm"), OWN)
def test_what_is_sent_is_what_theory_says(operation, algorithm):
    for ranks in (1, 2, 3, 4, 6, 8):
        more = {"node_size": 4} if algorithm == "hierarchical" else {}
        if operation in ("broadcast", "reduce", "scatter", "gather"):
            more["root"] = ranks - 1
        for elements in (0, ranks, 5 * ranks):
            compare(operation, algorithm, ranks, elements, torch.float32, **more)


@settings(max_examples=30)
@given(st.data())
def test_uneven_sizes_segments_and_nodes(data):
    operation, algorithm = data.draw(st.sampled_from(OWN))
    ranks = data.draw(st.integers(1, 8), "ranks")
    elements = data.draw(st.integers(0, 40), "elements")
    if operation in ("reduce_scatter", "all_gather", "all_to_all"):
        elements *= ranks
    more = {}
    if (operation, algorithm) in SEGMENTED:
        more["segments"] = data.draw(st.integers(1, 4), "segments")
    if algorithm == "hierarchical":
        more["node_size"] = data.draw(st.integers(1, 9), "node size")
    if operation in ("broadcast", "reduce", "scatter", "gather"):
        more["root"] = data.draw(st.integers(0, ranks - 1), "root")
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float64]))
    compare(operation, algorithm, ranks, elements, dtype, **more)


def test_an_average_of_half_floats_sends_no_more_than_a_sum():
    sent = []
    for op in ("sum", "avg"):
        run = labkit.run(programs.one_call, "all_reduce", "ring", 11, torch.float16, {"op": op}, ranks=3)
        sent.append([run.trace.bytes_sent(rank) for rank in range(3)])
    assert sent[0] == sent[1] == [theory.plan("all_reduce", "ring", 3, 11, 2).sent(rank) for rank in range(3)]


def test_sixteen_ranks():
    for algorithm in ("ring", "tree", "halving_doubling", "mesh", "hierarchical"):
        more = {"node_size": 5} if algorithm == "hierarchical" else {}
        compare("all_reduce", algorithm, 16, 37, torch.float32, **more)
