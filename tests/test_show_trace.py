"""The logical order, the finding, the twin, and what `show.trace` refuses."""

from __future__ import annotations

import sys
from itertools import islice, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import show
from labkit.show.lanes import Lanes
from labkit.show.order import order
from labkit.trace import Trace

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helper is beside them

import show_traces as traces
from show_traces import collective, event, recv, send


def steps(trace: Trace) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [(i.kind, i.ranks, i.first, i.last) for i in order(trace)]


def title(trace: Trace) -> str:
    return show.trace(trace).title


def test_a_ring_is_one_step_of_sends_and_one_of_receives():
    assert {(first, last) for _, _, first, last in steps(traces.ring())} == {(1, 2)}


def test_receives_posted_first_change_nothing():
    assert {(first, last) for _, _, first, last in steps(traces.posted_ring())} == {(1, 2)}


def test_a_collective_is_at_one_step_on_all_ranks_of_its_group():
    assert [s for s in steps(traces.subgroups()) if s[0] == "collective"] == [
        ("collective", (0, 2), 2, 2), ("collective", (1, 3), 2, 2), ("collective", (0, 1, 2, 3), 4, 4),
    ]  # fmt: skip


def test_ranks_that_call_different_collectives_stand_apart():
    trace = Trace([collective(0, 0), collective(1, 0, name="broadcast")], 2)
    assert [i.ranks for i in order(trace)] == [(0,), (1,)]


def test_collectives_called_in_crossed_order_still_end():
    trace = Trace([collective(0, 0, group="a"), collective(0, 1, group="b"),
                   collective(1, 0, group="b"), collective(1, 1, group="a")], 2)  # fmt: skip
    assert len(order(trace)) == 2


def test_a_span_reaches_over_what_it_holds_and_takes_no_step():
    spans = [i for i in order(traces.spans()) if i.kind == "span"]
    assert {(i.first, i.last) for i in spans} == {(1, 4)}
    assert len(spans) == 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda p: p[0] != p[1]), max_size=25), st.data())
def test_causes_come_before_effects(pairs, data):
    """Random programs: each rank's receives in the order of sending, shuffled start times."""
    count, events = [0] * 4, []
    for a, b in pairs:
        for rank, make, peer in ((a, send, b), (b, recv, a)):
            events.append(make(rank, count[rank], peer, tag=len(events) // 2))
            count[rank] += 1
    items = order(Trace(data.draw(st.permutations(events)), 4))
    assert len(items) == len(pairs)
    at = {}
    for i in items:
        assert i.first < i.last, "a receive is after its send"
        at[i.send.rank, i.send.index], at[i.recv.rank, i.recv.index] = i.first, i.last
    for (rank, index), step in at.items():
        assert (rank, index + 1) not in at or step < at[rank, index + 1], "a rank's own order holds"


def test_the_order_does_not_depend_on_who_was_first():
    events = traces.ring(3, 2).events
    for shuffled in islice(permutations(events), 0, 5000, 100):
        assert steps(Trace(list(shuffled), 3)) == steps(Trace(events, 3))


@pytest.mark.parametrize(("name", "said"), [
    ("ring", "Every rank sent 8 B to its right neighbour"),
    ("ring_rounds", "Every rank sent 3 messages to its right neighbour, 3 MiB in all"),
    ("all_reduce", "all_reduce of 40 B, all 4 ranks in it"),
    ("subgroups", "3 collectives: 2 × all_reduce, 1 × all_gather"),
    ("deadlock", "0 waits for 1, 1 waits for 0: a circle, so nobody goes on"),
    ("unreceived", "1 message was sent that nobody received"),
    ("missing", "all_reduce never finished: rank 3 did not call it"),
    ("empty", "Nothing was recorded"),
    ("single", "Nothing was sent"),
])  # fmt: skip
def test_the_title_states_the_finding(name, said):
    assert title(traces.EVERY[name]()) == said


def test_more_findings():
    assert title(Trace([send(1, 0, 0), recv(0, 0, 1), send(1, 1, 2), recv(2, 0, 1)], 3)) == (
        "Rank 1 sent everything: 2 messages, 16 B")  # fmt: skip
    lop = [send(0, 0, 1, 32), recv(1, 0, 0, 32), send(1, 1, 0, 8), recv(0, 1, 1, 8)]
    assert title(Trace(lop, 2)) == "Rank 0 sent most: 1 of 2 messages, 32 B of 40 B"
    assert title(Trace(lop, 3)) == "Rank 0 sent most: 1 of 2 messages, 32 B of 40 B"
    equal = [send(0, 0, 1), recv(1, 0, 0), send(1, 1, 0), recv(0, 1, 1)]
    assert title(Trace(equal, 3)) == "2 messages, 16 B in all, from 2 of 3 ranks"
    assert title(Trace([*equal, collective(0, 2), collective(1, 2)], 2)) == "2 messages, 16 B, and 1 collective"
    assert title(Trace([collective(0, 0), collective(2, 0)], 4)) == "all_reduce of 40 B on ranks 0, 2"
    assert title(Trace([recv(1, 0, 0, done=False)], 2)) == "1 receive waits for a message that never came"
    assert title(Trace([collective(0, 0), collective(1, 0, done=False)], 2)) == "all_reduce never finished on rank 1"


def test_the_twin_has_a_row_an_event_with_line_and_labels():
    rows = str(show.trace(traces.ring())).splitlines()
    assert rows[0] == "Every rank sent 8 B to its right neighbour [measured]"
    assert rows[1] == "  step 1 · 0→1 send · 8 B · line 4 · chunk=0"
    assert rows[-1] == "  step 2 · 3→0 receive · 8 B · line 5 · chunk=0"
    assert len(rows) == 9
    assert "  step 1 · 1→0 receive · 8 B · line 3 · waits for 1" in str(show.trace(traces.deadlock()))
    assert "  step 2 · 0, 2 all_reduce · 40 B · group {0,2}" in str(show.trace(traces.subgroups()))
    assert "in reduce_scatter" in str(show.trace(traces.spans()))


def test_line_and_labels_show_in_the_tooltip():
    assert "<title>rank 0 · 0→1 send · 8 B · line 4 · chunk=0\n" in show.trace(traces.ring()).to_html()


def test_sixteen_ranks_have_sixteen_lanes():
    for width in (720, 300):
        drawing = show.trace(traces.ring(16)).draw(width, None)
        assert drawing.parts[0].count("<line") == 16
        assert sum("<polygon" in p for p in drawing.parts) == 16


def test_what_dangles_is_dashed_and_says_so():
    html = show.trace(traces.deadlock()).to_html()
    assert html.count('class="lk-open lk-message"') == 4  # two receives, two layouts
    assert "waits for 0" in html
    assert "not received" in show.trace(traces.unreceived()).to_html()
    assert "missing" in show.trace(traces.missing()).to_html()


def test_long_traces_are_cut_and_say_so():
    figure = show.trace(traces.ring(2, 2_500))
    assert figure.notes == ("First 60 of 5,000 steps; pass steps=(a, b) for others.",)
    assert len(figure.says) == 60
    assert max(int(row[0]) for row in figure.twin.rows) == 60
    part = show.trace(traces.ring(2, 2_500), steps=(101, 104))
    assert part.notes == ("Steps 101 to 104 of 5,000.",)
    assert {row[0] for row in part.twin.rows} == {"101", "102", "103", "104"}


def test_a_window_that_cuts_a_message_shows_its_part():
    figure = show.trace(traces.ring(), steps=(2, 2))
    assert [row[1] for row in figure.twin.rows] == ["0→1 receive", "1→2 receive", "2→3 receive", "3→0 receive"]
    assert 'class="lk-message"' in figure.to_html()


def test_frames_grow_and_a_message_flies_until_it_is_received():
    figure = show.trace(traces.ring())
    first, second = (figure.draw(720, k).parts for k in (0, 1))
    assert not any("<polygon" in p for p in first)
    assert sum("<polygon" in p for p in second) == 4
    assert any("step 1 of 2 · sent 32 B of 32 B" in p for p in first)
    assert figure.says[0].startswith("Step 1 of 2: rank 0 sends 8 B to 1; rank 1 sends 8 B to 2")


def test_an_announcement_of_many_events_is_short():
    assert show.trace(traces.ring(16)).says[0].endswith("and 13 more.")


def test_time_is_drawn_to_scale():
    trace = Trace([event("compute", "a", 0, 0), event("compute", "b", 0, 2)], 1)
    view = Lanes(order(trace), 1, range(1, 3), 720, "time", {id(e): "" for e in trace.events})
    (a, b), (c, d) = (view.axis.box(i, i.events[0]) for i in view.items)
    assert b - a == pytest.approx(d - c)
    assert (c - a) / (b - a) == pytest.approx(2.5)
    assert "ms" in str(show.trace(trace, axis="time"))
    assert "ms" not in str(show.trace(trace))


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"trace": 3}, TypeError, "was given int"),
    ({"title": 3}, TypeError, "title is 3: expected text"),
    ({"title": " "}, ValueError, "title is ' '"),
    ({"axis": "x"}, ValueError, "axis is 'x': expected 'order'"),
    ({"source": "x"}, ValueError, "source is 'x': expected one of measured"),
    ({"steps": 3}, TypeError, "steps is 3: expected the first and last"),
    ({"steps": (1, 2.0)}, TypeError, "whole numbers"),
    ({"steps": (True, 2)}, TypeError, "whole numbers"),
    ({"steps": (2, 1)}, ValueError, "1 <= first <= last"),
    ({"steps": (0, 1)}, ValueError, "1 <= first <= last"),
    ({"steps": (3, 4)}, ValueError, "this trace has 2 steps"),
])  # fmt: skip
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        show.trace(**{"trace": traces.ring(), **arguments})


def test_a_run_is_pointed_to_its_trace():
    class Run:
        trace = traces.ring()

    with pytest.raises(TypeError, match=r"given Run: pass its \.trace"):
        show.trace(Run())


def test_ranks_that_wait_in_two_groups_are_told_apart():
    """Two collectives in two orders: nobody is missing, each rank is somewhere else."""
    calls = [collective(0, 0, done=False, group="{0,1}")]
    calls += [collective(r, 0, done=False) for r in (1, 2, 3)]
    figure = show.trace(Trace(calls, 4))
    assert figure.title == "Ranks wait in different groups: 0 in all_reduce of {0,1}; 1, 2, 3 in all_reduce of world"
    assert "lk-gone" not in figure.to_html().split("</style>")[1]
