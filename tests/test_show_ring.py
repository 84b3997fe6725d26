"""`show.ring` and `show.tree`: what they read from a trace, what they say, and what they draw."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit import show
from labkit.show import who
from labkit.show.figure import NARROW, WIDE, style
from labkit.show.player import payload, script
from labkit.show.stepfigure import _parts
from labkit.show.steps import counts, read
from labkit.trace import Event, Trace

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import show_boxes as boxes
import show_steps as by_hand
from show_steps import replay

FIGURES = Path(__file__).parent / "figures"

EVERY = {
    "ring_2": lambda: show.ring(replay(2, by_hand.ring(2))),
    "ring_4": lambda: show.ring(replay(4, by_hand.ring(4), 2**18)),
    "ring_8": lambda: show.ring(replay(8, by_hand.ring(8))),
    "ring_16": lambda: show.ring(replay(16, by_hand.ring(16))),
    "reduce_scatter": lambda: show.ring(replay(4, by_hand.reduce_scatter(4))),
    "added_twice": lambda: show.ring(replay(4, by_hand.added_twice())),
    "wrong_chunk": lambda: show.ring(replay(4, by_hand.wrong_chunk())),
    "whole_tensors": lambda: show.ring(replay(4, by_hand.whole_tensors())),
    "too_short": lambda: show.ring(replay(4, by_hand.too_short())),
    "tree_4": lambda: show.tree(replay(4, by_hand.tree(4))),
    "tree_8": lambda: show.tree(replay(8, by_hand.tree(8))),
    "tree_16": lambda: show.tree(replay(16, by_hand.tree(16))),
    "central_8": lambda: show.tree(replay(8, by_hand.central(8))),
    "central_16": lambda: show.tree(replay(16, by_hand.central(16))),
    "mesh_4": lambda: show.tree(replay(4, by_hand.mesh(4))),
    "halving_8": lambda: show.tree(replay(8, by_hand.halving_doubling(8))),
    "alone": lambda: show.ring(replay(1, [])),
}


# What is read


@given(st.integers(1, 16), st.data())
def test_a_value_counts_each_ranks_parts(ranks, data):
    n = data.draw(st.lists(st.integers(0, 7), min_size=ranks, max_size=ranks))
    value = sum(k * 16**r for r, k in enumerate(n))
    stored = int.from_bytes((value % 2**64).to_bytes(8, "little"), "little", signed=True)  # as an int64 holds it
    assert counts(stored, ranks) == tuple(n)


@pytest.mark.parametrize("p", range(2, 17))
def test_a_ring_is_read_as_the_paper_has_it(p):
    """Patarasuk and Yuan: after p−1 steps rank r has chunk r, after 2(p−1) everything; 2(p−1) chunks sent by each."""
    s = read(replay(p, by_hand.ring(p), nbytes=8), "ring")
    assert (s.ranks, s.chunks, s.total) == (p, p, 2 * (p - 1))
    assert {(r, c) for r in range(p) for c in range(p) if s.done(p - 1, r, c)} == {(r, r) for r in range(p)}
    assert all(s.done(s.total, r, c) for r in range(p) for c in range(p))
    assert s.sent(s.total) == [2 * (p - 1) * 8] * p
    assert s.sent(0) == [0] * p
    assert all(m.dst == (m.src + 1) % p and len(m.chunks) == 1 for m in s.moves)


def test_the_state_after_a_step_is_what_the_next_one_finds():
    s = read(replay(4, by_hand.ring(4)), "ring")
    assert s.parts(0, 2, 1) == (0, 0, 1, 0)
    assert s.parts(2, 1, 2) == (1, 1, 0, 1)
    assert s.changed(2, 1) == (2,)
    assert [(m.src, m.dst, m.chunks) for m in s.at(2)] == [(0, 1, (2,)), (1, 2, (3,)), (2, 3, (0,)), (3, 0, (1,))]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_without_labels_the_steps_and_chunks_are_found_all_the_same(p):
    labelled, bare = (read(replay(p, by_hand.ring(p), label=label), "ring") for label in (True, False))
    assert bare.states == labelled.states
    assert bare.moves == labelled.moves


def test_segments_of_a_chunk_are_one_move():
    whole, cut = (read(replay(4, by_hand.ring(4), segments=n), "ring") for n in (1, 4))
    assert cut.moves == whole.moves
    assert cut.states == whole.states


def test_steps_may_begin_with_any_number():
    trace = replay(4, by_hand.ring(4))
    later = [dataclasses.replace(e, labels={**e.labels, "step": e.labels["step"] + 6} if e.labels else {})
             for e in trace.events]  # fmt: skip
    assert read(Trace(later, 4), "ring") == read(trace, "ring")


def test_halves_and_whole_tensors_are_moves_of_many_chunks():
    halving = read(replay(8, by_hand.halving_doubling(8)), "tree")
    assert {len(m.chunks) for m in halving.at(1)} == {4}
    assert {len(m.chunks) for m in halving.at(3)} == {1}
    assert {m.chunks for m in read(replay(4, by_hand.tree(4)), "tree").moves} == {(0, 1, 2, 3)}


def test_only_the_first_watch_is_drawn():
    trace = replay(4, by_hand.ring(4))
    again = [dataclasses.replace(e, index=e.index + 100, start=e.start + 100) for e in trace.events]
    assert read(Trace([*trace.events, *again], 4), "ring") == read(trace, "ring")


def test_what_a_chunk_should_become_depends_on_the_collective():
    broadcast = read(replay(4, by_hand.broadcast(4, root=1), span="broadcast tree"), "tree")
    assert broadcast.target == (16, 16, 16, 16)
    assert all(broadcast.done(2, r, c) for r in range(4) for c in range(4))
    gather = replay(4, by_hand.all_gather(4), start=lambda r, c: 16**r if r == c else 0)
    assert read(gather, "ring").target == (1, 16, 256, 4096)


# What is said


@pytest.mark.parametrize(("name", "said"), [
    ("ring_2", "Every rank sends at every step; after 1 of 2 steps each rank has one finished chunk"),
    ("ring_4", "Every rank sends at every step; after 3 of 6 steps each rank has one finished chunk"),
    ("ring_16", "Every rank sends at every step; after 15 of 30 steps each rank has one finished chunk"),
    ("reduce_scatter", "Every rank sends at every step; after 3 of 3 steps each rank has one finished chunk"),
    ("added_twice", "Step 4: rank 1's part is twice in chunk 0 of rank 1"),
    ("wrong_chunk", "Step 2: rank 0's part is twice in chunk 0 of rank 1"),
    ("whole_tensors", "Step 2: rank 3's part is twice in chunk 0 of rank 0"),
    ("too_short", "Nobody ever finishes chunks 0, 1, 2, 3"),
    ("tree_4", "2 of 4 ranks are idle in half of the steps"),
    ("tree_8", "Half of the ranks or more are idle in 4 of 6 steps"),
    ("central_8", "Rank 0 sends 14 KiB, 7 times as much as any other"),
    ("mesh_4", "Every rank sends at every step; after 1 of 2 steps each rank has one finished chunk"),
    ("halving_8", "Every rank sends at every step; after 3 of 6 steps each rank has one finished chunk"),
    ("alone", "Nobody sends: there is nothing to do"),
])  # fmt: skip
def test_the_title_states_the_finding(name, said):
    assert EVERY[name]().title == said


def test_more_findings():
    gather = replay(4, by_hand.all_gather(4), start=lambda r, c: 16**r if r == c else 0)
    assert show.ring(gather).title == "Every rank sends at every step; after 3 steps each rank has all 4 chunks"
    lacking = by_hand.reduce_scatter(4) + by_hand.all_gather(4)[:-1]
    assert show.ring(replay(4, lacking)).title == "After all 5 steps rank 0 still lacks chunk 1"
    one = [step if n < 2 else [s for s in step if s[2] != [0]] for n, step in enumerate(by_hand.reduce_scatter(4))]
    assert show.ring(replay(4, one + by_hand.all_gather(4))).title == "Nobody ever finishes chunk 0"
    few = [[s for s in step if s[2][0] < 3] for step in by_hand.ring(4)]
    figure = show.ring(replay(4, few, chunks=3))
    assert figure.title == "Not every rank sends at every step; after 3 of 6 steps each chunk is finished on one rank"
    assert "There are 3 chunks for 4 ranks" in figure.notes[1]
    reduce = show.tree(replay(4, by_hand.reduce(4)))
    assert reduce.title == "2 of 4 ranks are idle in half of the steps"


def test_the_twin_has_a_sentence_a_send():
    lines = str(show.ring(replay(4, by_hand.ring(4)))).splitlines()
    assert "  Step 2. 0→1 chunk 2 {0,3}. Now rank 1 chunk 2 = {0,1,3}." in lines
    assert len(lines) == 2 + 6 * 4
    tree = str(show.tree(replay(4, by_hand.tree(4))))
    assert "  Step 1. 1→0 all chunks {1}. Now rank 0 all chunks = {0,1}." in tree
    assert "= {0,1×2,2,3}" in str(EVERY["added_twice"]())


def test_parts_of_many_ranks_are_told_in_short():
    assert _parts(0x1111, 4) == "{0,1,2,3}"
    assert _parts(0x11111101, 8) == "{0,2–7}"
    assert _parts(0x21, 2) == "{0,1×2}"
    assert _parts(0, 4) == "{}"


def test_the_announcement_of_many_sends_is_short():
    says = EVERY["ring_16"]().says
    assert says[0] == "Before the first of 30 steps: what each rank begins with."
    assert says[1].endswith("And 13 more.")
    assert says[1].count("→") == 3


def test_the_foot_counts_bytes_of_one_rank():
    def foot(figure, step):
        return next(t for _, t, _ in boxes.texts(figure.draw(WIDE, step)) if t.startswith("step "))

    assert foot(EVERY["ring_4"](), 3) == "step 3/6 · sent 768 KiB of 1.5 MiB"
    assert foot(EVERY["tree_4"](), 3) == "step 3/4 · busiest sender, rank 0: 1 KiB of 2 KiB · 1 of 4 ranks sends"


def test_the_source_is_the_traces():
    trace = replay(4, by_hand.ring(4))
    paced = Trace(trace.events, 4, paced=True)
    for draw in (show.ring, show.tree, show.trace):
        assert draw(trace).source == "measured"
        assert draw(paced).source == "paced"
        assert draw(paced, source="simulated").source == "simulated"


# What is drawn


def cells(figure, width=WIDE, step=None):
    return boxes.tree(figure.draw(width, step))


def test_a_full_cell_has_a_bold_outline_and_a_mark():
    figure = EVERY["ring_4"]()
    for step, full in ((0, 0), (2, 0), (3, 4), (4, 8), (6, 16)):
        classes = [n.get("class") for n in cells(figure, step=step).iter("path")]
        assert classes.count("lk-full") == classes.count("lk-check") == full, step


def test_the_picture_begins_where_the_finding_is_seen():
    assert EVERY["ring_4"]().start == 3
    assert EVERY["ring_8"]().start == 7
    assert EVERY["added_twice"]().start == 4
    assert EVERY["tree_8"]().start == 3
    figure = EVERY["ring_4"]()
    assert figure.draw(WIDE, None) == figure.draw(WIDE, 3)
    assert payload(figure)["start"] == 3


def test_a_part_that_is_in_twice_shows_its_number():
    figure = EVERY["added_twice"]()
    assert [n for n in cells(figure, step=3).iter("text") if n.get("class") == "lk-twice"] == []
    twice = [n.text for n in cells(figure, step=4).iter("text") if n.get("class") == "lk-twice"]
    assert twice == ["2"] * 4
    assert "A digit in place of a tick" in figure.notes[1]


def test_an_arrow_a_send_with_its_chunk_on_it():
    tree = cells(EVERY["ring_8"](), step=5)
    assert sum(n.get("class") == "lk-now lk-send" for n in tree.iter("g")) == 8
    loads = [n for n in tree.iter("g") if n.get("class") == "lk-load"]
    assert sorted(n.find("text").text for n in loads) == list("01234567")
    assert all(n.get("data-chunk") == n.find("text").text for n in loads)
    assert sum(n.get("class") == "lk-now lk-send" for n in cells(EVERY["ring_8"](), step=0).iter("g")) == 0


def test_idle_ranks_are_dotted():
    for step, idle in ((0, 0), (1, 0), (2, 4), (3, 6), (4, 6), (5, 4), (6, 0)):
        tree = cells(EVERY["tree_8"](), step=step)
        assert sum("lk-idle" in n.get("class", "") for n in tree.iter("g")) == idle, step


def test_a_tree_stands_on_its_root():
    for p in (2, 3, 4, 7, 8, 16):
        for root in (0, p - 1):
            parents = who.family(read(replay(p, by_hand.broadcast(p, root), span="broadcast tree"), "tree"))
            assert [r for r, parent in enumerate(parents) if parent is None] == [root] or p == 2
            places = who.tree(read(replay(p, by_hand.broadcast(p, root)), "tree"), 700, 300)
            assert min(y for _, y in places) == places[root][1] or p == 2
    assert who.family(read(replay(4, by_hand.reduce(4)), "tree")) == [None, 0, 0, 2]
    assert who.family(read(replay(4, by_hand.tree(4)), "tree")) == [None, 0, 0, 2]
    assert who.family(read(replay(4, by_hand.central(4)), "tree")) == [None, 0, 0, 0]
    assert who.family(read(replay(4, by_hand.ring(4)), "tree")) is None
    assert who.family(read(replay(8, by_hand.halving_doubling(8)), "tree")) is None


def test_above_eight_ranks_the_matrix_stands_alone():
    assert not any("lk-node" in part for part in EVERY["ring_16"]().draw(WIDE, 3).parts)
    assert sum("lk-node" in part for part in EVERY["ring_8"]().draw(WIDE, 3).parts) == 8


@pytest.mark.parametrize("name", EVERY)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    figure = EVERY[name]()
    for width in (WIDE, NARROW):
        for step in {0, 1, figure.start, len(figure.says) - 1} & set(range(len(figure.says))):
            drawing = figure.draw(width, step)
            assert drawing.width <= width + 1 or drawing.strip, "wider than the page, and it does not scroll"
            assert boxes.outside(drawing) == []
            if not drawing.strip:
                assert boxes.overlapping(drawing) == []


@pytest.mark.parametrize("name", ["ring_4", "added_twice", "tree_8"])
def test_a_picture_is_the_one_on_file(name):
    html = EVERY[name]().to_html().replace(style("steps"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"steps_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


def test_the_picture_does_not_show_when_things_happened():
    trace = replay(4, by_hand.ring(4))
    later = Trace([dataclasses.replace(e, start=50 - e.start, end=60) for e in trace.events], 4)
    assert show.ring(later).to_html() == show.ring(trace).to_html()


def test_every_rule_of_every_sheet_stays_inside_the_figure():
    css = re.sub(r"@(media|container)[^{]*{((?:[^{}]*{[^{}]*})*)}", r"\2", style("steps", "bars", "curves"))
    for selector in re.findall(r"([^{}]+){", css):
        assert all(one.strip().startswith(".lk") for one in selector.split(",")), selector


# The player


@pytest.mark.parametrize(("name", "limit"), [("ring_4", 45_000), ("ring_8", 150_000), ("ring_16", 700_000)])
def test_the_payload_stays_small(name, limit):
    assert len(json.dumps(payload(EVERY[name]()), ensure_ascii=False)) < limit


def test_chunks_can_be_followed():
    data = payload(EVERY["ring_4"]())
    assert data["follow"] == ["0", "1", "2", "3"]
    assert any('data-chunk="3"' in part for part in data["wide"]["parts"])
    assert payload(show.trace(replay(4, by_hand.ring(4))))["follow"] == []
    assert "aria-pressed" in script(EVERY["ring_4"]())


@pytest.mark.parametrize("name", EVERY)
def test_every_frame_has_the_size_of_the_first(name):
    """The browser swaps what is inside the picture, not its frame: a higher one would be cut off."""
    figure = EVERY[name]()
    for width in (WIDE, NARROW):
        sizes = {(d.width, d.height) for d in (figure.draw(width, k) for k in range(len(figure.says)))}
        assert len(sizes) == 1


# What is refused


def test_a_trace_without_states_is_told_to_watch():
    bare = [dataclasses.replace(e, after=None) for e in replay(4, by_hand.ring(4)).events]
    with pytest.raises(ValueError, match=r"rank 0 held: show.ring needs .*labkit.trace.watch\(tensor, parts=4\)"):
        show.ring(Trace(bare, 4))
    half = [dataclasses.replace(e, after=None) if e.rank == 2 else e for e in replay(4, by_hand.ring(4)).events]
    with pytest.raises(ValueError, match=r"what rank 2 held: show\.tree needs"):
        show.tree(Trace(half, 4))


@pytest.mark.parametrize(("trace", "error", "message"), [
    (lambda: 3, TypeError, "was given int"),
    (lambda: replay(4, by_hand.ring(4), start=lambda r, c: 1), ValueError, r"rank 1 starts with 1: .*16\*\*rank = 16"),
    (lambda: replay(4, by_hand.ring(4), start=lambda r, c: 0.5), ValueError, "rank 0 holds .*fill an int64"),
    (lambda: replay(17, [], start=lambda r, c: 0), ValueError, "the trace has 17 ranks"),
    (lambda: replay(2, [], chunks=20), ValueError, "20 parts were watched: expected 1 to 16"),
])  # fmt: skip
def test_bad_traces_are_named(trace, error, message):
    with pytest.raises(error, match=message):
        show.ring(trace())


def test_bad_arguments_are_named():
    trace = replay(2, by_hand.ring(2))
    with pytest.raises(TypeError, match="title is 3"):
        show.ring(trace, title=3)
    with pytest.raises(ValueError, match="source is 'guessed'"):
        show.ring(trace, source="guessed")
    odd = [dataclasses.replace(e, labels={"step": "one"}) if e.labels else e for e in trace.events]
    with pytest.raises(ValueError, match="labelled step='one'"):
        show.ring(Trace(odd, 2))


# Real ranks


def ring_by_hand(n, segments):
    import torch
    import torch.distributed as dist

    from labkit import trace

    rank, p = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((n,), 16**rank, dtype=torch.int64)
    chunks = tensor.tensor_split(p)
    buffer = torch.empty_like(chunks[0])
    with trace.watch(tensor, parts=p):
        for step in range(1, 2 * p - 1):
            out = (rank - step) % p if step < p else (rank - step + p) % p
            into = (out - 1) % p
            with trace.label(step=step, chunk=out):
                here = buffer[: chunks[into].numel()]
                sends = [dist.P2POp(dist.isend, s, (rank + 1) % p) for s in chunks[out].tensor_split(segments)]
                receives = [dist.P2POp(dist.irecv, s, (rank - 1) % p) for s in here.tensor_split(segments)]
                for work in dist.batch_isend_irecv(sends + receives):
                    work.wait()
                if step < p:
                    chunks[into].add_(here)
                else:
                    chunks[into].copy_(here)


def test_a_ring_of_real_ranks_is_the_ring_by_hand():
    for p, segments in ((2, 1), (4, 3)):
        trace = labkit.run(ring_by_hand, 64, segments, ranks=p).trace
        real, hand = read(trace, "ring"), read(replay(p, by_hand.ring(p), nbytes=64 // p * 8), "ring")
        assert real == hand
        assert show.ring(trace).to_html() == show.ring(replay(p, by_hand.ring(p), nbytes=64 // p * 8)).to_html()


def bare(*, sends=(), parts=2, native=False, after=None) -> Trace:
    """Two ranks that watch so many parts; `sends`: (rank, chunk), `after`: what all of them hold from then on."""
    events = []
    for rank in range(2):
        start = [16**rank] * parts
        events.append(Event("state", "watch", rank, 0.0, 0.0, after=start, index=0))
        if native:
            events.append(Event("collective", "all_reduce", rank, 0.1, 0.2, 8, after=start, index=1))
        events += [
            Event("send", "send", r, 0.1, 0.2, 8, 1 - r, labels={"step": 1, "chunk": c}, after=after or start, index=1)
            for r, c in sends
            if r == rank
        ]
    return Trace(events, 2)


def test_what_cannot_be_seen_is_not_drawn_as_if_nothing_had_happened():
    with pytest.raises(ValueError, match="torch's own all_reduce cannot be seen"):
        show.ring(bare(native=True))
    with pytest.raises(ValueError, match="never changed"):
        show.ring(bare(sends=[(0, 1), (1, 0)]))
    with pytest.raises(ValueError, match=r"4 parts were watched.*into 2 chunks: use watch\(tensor, parts=2\)"):
        show.ring(bare(sends=[(0, 1), (1, 0)], parts=4, after=[17, 17, 1, 1]))
    late = bare()
    late.events.append(Event("send", "send", 0, 1.0, 1.1, 8, 1, labels={"step": 1}, index=9))
    with pytest.raises(ValueError, match="inside the watch"):
        show.ring(late)
