"""The trace as plain data."""

from __future__ import annotations

import json
import threading

import programs
import pytest

import labkit
from labkit.trace import Event, Recorder, Trace


def send(rank, peer, start, nbytes=8, index=0, **more):
    return Event("send", "send", rank, start, start + 1, nbytes, peer, index=index, **more)


def recv(rank, peer, start, nbytes=8, index=0, **more):
    return Event("recv", "recv", rank, start, start + 1, nbytes, peer, index=index, **more)


def test_messages_pair_in_order_per_peer_group_and_tag():
    trace = Trace([send(0, 1, 0.0, index=0), send(0, 1, 1.0, index=1, tag=5), send(0, 1, 2.0, index=2),
                   recv(1, 0, 0.0, index=0, tag=5), recv(1, 0, 1.0, index=1), recv(1, 0, 2.0, index=2),
                   recv(1, 0, 3.0, index=3)], ranks=2)  # fmt: skip
    pairs = [(m.send and m.send.index, m.recv.index) for m in trace.messages()]
    assert pairs == [(0, 1), (1, 0), (2, 2), (None, 3)]


def test_bytes_sent_by_group_and_name():
    span = Event("span", "ring", 0, 0.0, 9.0, index=0)
    trace = Trace([span, send(0, 1, 1.0, 10, index=1, parent=0), send(0, 1, 2.0, 20, index=2, group="{0,1}"),
                   send(0, 1, 3.0, 40, index=3, group="tp {0,1}"),
                   Event("collective", "all_reduce", 0, 4.0, 5.0, 99, index=4)], ranks=2)  # fmt: skip
    assert trace.bytes_sent(0) is None, "a native collective is among them"
    assert trace.bytes_sent(0, name="send") == 70
    assert trace.bytes_sent(0, name="ring") == 10
    assert trace.bytes_sent(0, group="{0,1}") == 20
    assert trace.bytes_sent(0, group="tp") == 40
    assert trace.bytes_sent(1) == 0
    with pytest.raises(ValueError, match="rank 7"):
        trace.bytes_sent(7)


def test_round_trip_and_chrome(tmp_path):
    run = labkit.run(programs.pass_round, ranks=3)
    again = Trace.from_dict(json.loads(json.dumps(run.trace.to_dict())))
    assert again.events == run.trace.events
    path = tmp_path / "trace.json"
    run.trace.to_chrome(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2}
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == 3
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_one_clock_for_all_ranks():
    """A receive cannot end before its send began, on whichever rank."""
    run = labkit.run(programs.pass_round, ranks=4)
    assert all(m.recv.end >= m.send.start for m in run.trace.messages())
    assert all(0 <= e.start < 60 for e in run.trace.events)
    assert run.trace.bytes_sent(2) == 8


def test_nothing_is_recorded_outside_a_run():
    recorder = Recorder()
    assert recorder.start("send", "send") is None
    with recorder.span("x"):
        pass
    recorder.begin(0)
    with recorder.span("y"):
        pass
    assert [e.name for e in recorder.stop(0.0)] == ["y"]


def test_labels_nest_and_end_with_an_exception():
    recorder = Recorder()

    def fail():
        with recorder.label(b=2):
            assert recorder.labels() == {"a": 1, "b": 2}
            raise KeyError

    with recorder.label(a=1, b=1):
        with pytest.raises(KeyError):
            fail()
        assert recorder.labels() == {"a": 1, "b": 1}
    assert recorder.labels() == {}


class Numbers(list):
    """Stands in for a flat tensor."""

    is_contiguous = detach = view = lambda self, *_: self
    numel = list.__len__
    tolist = lambda self: list(self)  # noqa: E731

    def __getitem__(self, where):
        return Numbers(list.__getitem__(self, n) for n in where)


def test_what_has_begun_can_be_read_before_the_run_is_over():
    recorder = Recorder()
    assert recorder.begun() == []
    recorder.begin(0)
    with recorder.span("step"), recorder.label(step=3):
        before = len(recorder.begun())
        entry = recorder.start("send", "isend", nbytes=8)
        (seen,) = recorder.begun(before)
        assert (seen.index, seen.end, seen.fields["kind"], seen.fields["parent"]) == (1, None, "send", 0)
        assert (seen.fields["nbytes"], seen.fields["labels"]) == (8, {"step": 3})
        recorder.finish(entry)
        assert seen.end is not None
    recorder.begun().clear()
    assert len(recorder.begun()) == len(recorder.stop(0.0)) == 2, "what is read is a copy"


def test_watch_keeps_what_a_tensor_held_between_one_event_and_the_next():
    recorder, t = Recorder(), Numbers([1, 2, 3, 4, 5])
    recorder.begin(0)
    recorder.start("send", "before")
    with recorder.watch(t, parts=2):
        recorder.start("send", "a")
        recorder.start("recv", "b")
        t[3] = 40
        recorder.start("send", "c")
        t[0] = 10
    recorder.start("send", "after")
    assert [(e.name, e.after) for e in recorder.stop(0.0)] == [
        ("before", None), ("watch", [1, 4]), ("a", [1, 4]), ("b", [1, 40]), ("c", [10, 40]), ("after", None),
    ]  # fmt: skip


def test_a_branch_takes_labels_spans_and_carried_things_to_another_thread():
    recorder, told = Recorder(), []

    class Carrier:
        fork = staticmethod(lambda: "token")
        enter = leave = join = staticmethod(told.append)

    recorder.begin(0)
    recorder.carriers.append(Carrier)
    with recorder.label(step=1), recorder.span("outer"):
        branch = recorder.branch("work")

    def work():
        with branch:
            recorder.start("send", "inside")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    branch.join()
    outer, inside = recorder.stop(0.0)
    assert (inside.labels, inside.parent) == ({"step": 1}, outer.index)
    assert told == ["token"] * 3


def test_watch_refuses_what_it_cannot_follow():
    recorder, t = Recorder(), Numbers([1, 2])
    recorder.begin(0)
    for parts in (0, -2, 2.5, True):
        with pytest.raises(ValueError, match="at least 1"), recorder.watch(t, parts):
            pass
    with pytest.raises(TypeError, match="list"), recorder.watch([1.0]):
        pass
    with pytest.raises(RuntimeError, match="one at a time"), recorder.watch(t), recorder.watch(t):
        pass
