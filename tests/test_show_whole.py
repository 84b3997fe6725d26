"""`show.tree` of a tensor that is one piece names no chunk; and how idle ranks are counted in its title."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import labkit
from labkit import show
from labkit.show.figure import NARROW, WIDE

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import show_boxes as boxes
import show_steps as by_hand


def whole(ranks: int, plan, **more):
    """The trace of a plan whose tensor is watched as one part; messages carry a step, as labkit's tree labels them."""
    one = [[(src, dst, [0], how) for src, dst, _, how in step] for step in plan]
    trace = by_hand.replay(ranks, one, chunks=1, **more)
    for event in trace.events:
        event.labels.pop("chunk", None)
    return trace


TREES = {
    "tree_8": lambda: show.tree(whole(8, by_hand.tree(8))),
    "central_4": lambda: show.tree(whole(4, by_hand.central(4))),
    "broadcast": lambda: show.tree(whole(4, by_hand.broadcast(4), span="broadcast tree",
                                         start=lambda r, c: 1 if r == 0 else 0)),
    "twice": lambda: show.tree(whole(4, [*by_hand.reduce(4), [(1, 0, [0], "add")]])),
    "never": lambda: show.tree(whole(4, by_hand.reduce(4)[:1])),
    "exchange": lambda: show.tree(whole(2, [[(0, 1, [0], "add"), (1, 0, [0], "add")]])),
    "one_way": lambda: show.tree(whole(2, [[(1, 0, [0], "add")]])),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_no_chunk_is_named(name):
    figure = TREES[name]()
    assert "chunk" not in str(figure)
    assert not any("chunk" in said for said in figure.says)
    for width in (WIDE, NARROW):
        for step in range(len(figure.says)):
            drawing = figure.draw(width, step)
            assert not [words for _, words, _ in boxes.texts(drawing) if "chunk" in words]
            assert not any("lk-load" in part for part in drawing.parts), "an arrow bears no chunk"
            assert boxes.outside(drawing) == []
            assert boxes.overlapping(drawing) == []


def test_the_sentences_of_one_piece():
    lines = str(TREES["tree_8"]()).splitlines()
    assert lines[1] == "  A row is a rank. Tick j of it: rank j's part is in it. ✓: finished."
    assert lines[2] == "  Step 1. 1→0 {1}. Now rank 0 = {0,1}."
    assert len(lines) == 2 + 14
    assert TREES["tree_8"]().says[1].startswith("Step 1 of 6. 1→0 {1}. Now rank 0 = {0,1}. 3→2 {3}.")


@pytest.mark.parametrize(("name", "title"), [
    ("tree_8", "Half of the ranks or more are idle in 4 of 6 steps"),
    ("central_4", "Rank 0 sends 768 B, 3 times as much as any other"),
    ("broadcast", "2 of 4 ranks are idle in half of the steps"),
    ("twice", "Step 3: rank 1's part is twice in what rank 0 holds"),
    ("never", "Nobody ever has the whole result"),
    ("exchange", "Every rank sends at every step; after 1 steps each rank has the result"),
    ("one_way", "Rank 1 sends everything, 256 B"),
])  # fmt: skip
def test_titles(name, title):
    assert TREES[name]().title == title


def test_the_count_of_idle_ranks_is_the_least():
    adds = [[(1, 0), (3, 2), (5, 4)], [(2, 0)], [(4, 0)]]
    copies = [[(0, 4)], [(0, 2), (4, 5)], [(0, 1), (2, 3)]]
    plan = [[(a, b, [0], how) for a, b in step] for how, part in (("add", adds), ("copy", copies)) for step in part]
    assert show.tree(whole(6, plan)).title == "At least 2 of 6 ranks are idle in 5 of 6 steps"
    assert show.tree(whole(6, by_hand.reduce(6))).title == "4 of 6 ranks are idle in 2 of 3 steps"
    assert show.tree(whole(3, by_hand.tree(3))).title == "1 of 3 ranks is idle in every step"
    assert show.tree(whole(5, by_hand.tree(5))).title == "At least 1 of 5 ranks is idle in every step"


def test_the_note_on_empty_chunks_needs_chunks():
    note = "There are 3 chunks for 4 ranks: the others hold no element and are not sent."
    few = [[step for step in steps if step[2][0] < 3] for steps in by_hand.mesh(4)]
    assert note in show.tree(by_hand.replay(4, few, chunks=3)).notes
    assert note not in show.tree(by_hand.replay(4, few, chunks=3, label=False)).notes
    assert all("chunks for" not in n for n in show.tree(whole(8, by_hand.tree(8))).notes)


def real_tree():
    import torch
    import torch.distributed as dist

    from labkit import collectives, trace

    tensor = torch.full((64,), 16 ** dist.get_rank(), dtype=torch.int64)
    with trace.watch(tensor, parts=1):
        collectives.all_reduce(tensor, algorithm="tree")


def test_a_tree_of_real_ranks_is_the_tree_by_hand():
    real = str(show.tree(labkit.run(real_tree, ranks=4).trace))
    assert real == str(show.tree(whole(4, by_hand.tree(4))))
