"""The failure table, with real processes: the right rank, the right reason, in time, and the next run works."""

from __future__ import annotations

import re
import sys
import time

import programs
import psutil
import pytest

import labkit


def failure_of(fn, *args, within=2.0, kind=labkit.RunFailed, **options):
    """Run something that must fail in time; then a run that must work."""
    labkit.run(programs.nothing, **{k: v for k, v in options.items() if k == "ranks"})  # ranks are warm
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        labkit.run(fn, *args, **options)
    took = time.monotonic() - began
    assert took < within, f"took {took:.1f} s"
    ranks = options.get("ranks", 4)
    assert labkit.run(programs.total, ranks=ranks).values == [ranks * (ranks + 1) / 2] * ranks
    return caught.value


def test_an_exception_while_the_others_wait():
    failure = failure_of(programs.raise_on, 1, kind=labkit.RankError)
    assert failure.ranks == [1]
    assert str(failure).startswith("rank 1 raised ValueError: boom\n  programs.py:")
    assert 'raise ValueError("boom")' in str(failure), "the learner's own line"
    assert isinstance(failure.__cause__, ValueError)


def test_the_same_exception_everywhere_is_told_once():
    failure = failure_of(programs.raise_everywhere, ranks=3)
    assert failure.ranks == [0, 1, 2]
    assert str(failure).count("division by zero") == 1
    assert str(failure).startswith("ranks 0, 1 and 2 raised ZeroDivisionError")


def test_library_frames_are_counted_not_shown():
    text = str(failure_of(programs.raise_from_library, ranks=1))
    assert "torch.ones(2) @ torch.ones(3)" in text
    assert "site-packages" not in text


def test_chained_exceptions_are_told():
    def chained():
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("outer") from error

    text = str(failure_of(chained, ranks=1))
    assert "ValueError: outer" in text
    assert "caused by KeyError: 'missing'" in text


@pytest.mark.parametrize("number", [9, 11, 15])
def test_a_signal_is_named(number):
    import signal

    failure = failure_of(programs.killed, 2, number, kind=labkit.world.failure.RankDied)
    assert failure.ranks == [2]
    assert failure.signal == signal.Signals(number).name
    assert failure.signal in str(failure)


def test_an_exit_is_named():
    assert "exit code 7" in str(failure_of(programs.exit_process, 1, ranks=2))
    assert "SystemExit: 3" in str(failure_of(programs.call_exit, ranks=2))


@pytest.mark.parametrize("ranks", [2, 4])
def test_different_sizes_never_give_a_number(ranks):
    failure = failure_of(programs.different_sizes, 1, ranks=ranks, kind=labkit.Disagreement)
    lines = str(failure).splitlines()
    for rank in range(ranks):
        size = 11 if rank == 1 else 10
        assert any(f"rank {rank}  all_reduce({size} × float32, sum)  (programs.py:" in line for line in lines)
    assert "terminate called" not in "".join(failure.output), "stopped before gloo aborts"


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (programs.different_types, ["int32", "float32"]),
        (programs.different_roots, ["root 0", "root 1"]),
        (programs.different_order, ["barrier()", "all_reduce(3"]),
        (programs.skip_a_broadcast, ["broadcast(3", "nothing: its function had returned, without any"]),
        (programs.lonely_async_all_reduce, ["all_reduce(4", "nothing"]),
        (programs.skip_new_group, ["new_group()", "nothing"]),
    ],
)
def test_disagreements_name_every_rank(fn, wanted):
    text = str(failure_of(fn, ranks=2, kind=labkit.Disagreement))
    assert "rank 0" in text
    assert "rank 1" in text
    for words in wanted:
        assert words in text


def test_one_rank_skips_one():
    text = str(failure_of(programs.skip_one, 1, kind=labkit.Disagreement))
    assert "collective 2 of group world" in text
    assert "rank 1  nothing: its function had returned, after all_reduce(3 × float32, sum)" in text


def test_a_disagreement_in_a_sub_group_names_its_members_only():
    failure = failure_of(programs.wrong_in_a_group, ranks=4, kind=labkit.Disagreement)
    assert failure.ranks == [0, 2]
    assert "group {0,2}" in str(failure)


def test_a_message_received_as_something_else():
    text = str(failure_of(programs.receive_as_float, ranks=2, kind=labkit.Disagreement))
    assert "send(4 × int32)" in text
    assert "recv(4 × float32)" in text


def test_both_receive_first():
    failure = failure_of(programs.both_receive, ranks=2, timeout=1, within=2.0, kind=labkit.RunTimeout)
    assert failure.cycle == [0, 1]
    assert failure.verdict == "0 waits for 1, 1 waits for 0: both receive first"
    assert [(row.rank, row.waits_for, row.place[2]) for row in failure.table] == [
        (0, [1], "both_receive"), (1, [0], "both_receive")]  # fmt: skip
    assert "dist.recv(t, src=1 - rank())" in str(failure)
    assert isinstance(failure, TimeoutError)


def test_both_send_first():
    """Public fault 32: small messages may pass, large ones wait for their receiver. Time-out, peer and cycle."""
    failure = failure_of(programs.both_send, 10_000_000, ranks=2, timeout=1, within=2.0, kind=labkit.RunTimeout)
    assert failure.verdict == "0 waits for 1, 1 waits for 0: both send first"
    assert "send(10,000,000 × float32) to 1" in str(failure)


def test_a_circle_of_three():
    failure = failure_of(programs.all_receive, ranks=3, timeout=0.5, kind=labkit.RunTimeout)
    assert failure.cycle == [0, 1, 2]
    assert failure.verdict.endswith("all receive first")


def test_an_endless_loop_shows_its_line():
    failure = failure_of(programs.loop_for_ever, 1, ranks=2, timeout=0.5, kind=labkit.RunTimeout)
    assert failure.ranks == [1]
    assert failure.table[0].state == "returned"
    assert failure.table[1].place[2] == "loop_for_ever"


def test_a_rank_that_waits_for_one_that_returned():
    def lonely():
        if programs.rank() == 0:
            programs.dist.recv(programs.torch.ones(1), 1)

    failure = failure_of(lonely, ranks=2, timeout=0.5, kind=labkit.RunTimeout)
    assert failure.verdict == "rank 0 waits for rank 1, which had returned already"


@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        (programs.lonely_isend, "rank 0 sent 1 message to rank 1 that nobody received"),
        (programs.lonely_irecv, "rank 0 still waits for 1 message from rank 1 that nobody sent"),
        (programs.lonely_irecv_from_anybody, "rank 0 still waits for a message from any rank"),
        (programs.forgotten_all_reduce, "rank 0 started all_reduce(4 × float32, sum) and never waited for it"),
    ],
)
def test_leftovers_are_reported_and_do_not_reach_the_next_run(fn, sentence, capsys):
    run = labkit.run(fn, ranks=2)
    assert run.values == [None, None]
    assert any(left.startswith(sentence) for left in run.leftovers)
    assert f"labkit: {sentence}" in capsys.readouterr().out
    following = labkit.run(programs.pass_round, ranks=2)
    assert following.values == [1, 0]
    assert following.leftovers == []


def test_a_send_that_was_received_is_no_leftover_although_nobody_waited():
    def careless():
        t = programs.torch.ones(2)
        if programs.rank() == 0:
            programs.dist.isend(t, 1)
        else:
            programs.dist.recv(t, 0)

    run = labkit.run(careless, ranks=2)
    assert run.leftovers == []
    assert all(e.end is not None for e in run.trace.events)


def test_a_tensor_changed_while_it_is_sent():
    """Public fault 34: the send buffer is overwritten before the send has completed."""
    assert labkit.run(programs.overwrite_after_isend, True, ranks=2).values[1] == [7.0]
    failure = failure_of(programs.overwrite_after_isend, False, ranks=2, kind=labkit.RankError)
    assert failure.ranks == [0]
    assert "changed a tensor while its isend to rank 1 (programs.py:" in str(failure)
    assert "Call .wait() on the send first" in str(failure)


def test_another_chunk_may_change_while_one_is_sent():
    got = labkit.run(programs.change_another_chunk_while_sending, ranks=2).values
    assert got == [[0, 1, 2, 3, 8, 10, 12, 14], [0, 2, 4, 6, 4, 5, 6, 7]]


def test_failures_carry_output_and_trace():
    def speak_and_fail():
        print("before")
        programs.total()
        if programs.rank() == 1:
            raise ValueError("after")

    with pytest.raises(labkit.RankError) as caught:
        labkit.run(speak_and_fail, ranks=2)
    assert caught.value.output == ["before\n", "before\n"]
    assert [e.name for e in caught.value.trace.events] == ["all_reduce", "all_reduce"]


def test_a_failed_rank_that_prints_without_end_is_stopped():
    def flood():
        while True:
            print("x" * 1000)

    failure = failure_of(flood, ranks=2, timeout=0.5, kind=labkit.RunTimeout)
    assert failure.ranks == [0, 1]
    assert all(text.startswith("x" * 1000) for text in failure.output)


def test_a_killed_fork_server_takes_its_ranks_along_and_is_replaced():
    import os

    from kernels import ranks_of, wait_until

    from labkit.world.server import fork_server

    labkit.run(programs.nothing, ranks=2)
    server = fork_server().process

    def kill_the_server(pid):
        if programs.rank() == 0:
            os.kill(pid, 9)
        time.sleep(60)

    with pytest.raises(labkit.RunFailed, match="the fork server, from which all ranks descend, was ended"):
        labkit.run(kill_the_server, server.pid, ranks=2)
    assert wait_until(lambda: not ranks_of(os.getpid()), 2)
    assert labkit.run(programs.total, ranks=2).values == [3, 3]


def test_a_rank_that_returned_after_many_messages_is_not_blamed():
    """Messages must not push out of sight that all ranks met in the barrier."""

    def pairs(boom):
        import time

        programs.dist.barrier()
        me, t = programs.rank(), programs.torch.ones(1)
        if me == 1:
            time.sleep(0.5)
            if boom:
                raise ValueError("the real reason")
        else:
            for _ in range(50):
                programs.dist.send(t, 2) if me == 0 else programs.dist.recv(t, 0)
        return me

    assert labkit.run(pairs, False, ranks=3).values == [0, 1, 2]
    assert "the real reason" in str(failure_of(pairs, True, ranks=3, kind=labkit.RankError))


def test_a_message_too_large_for_its_receiver_is_a_disagreement_not_a_crash():
    def too_large():
        t = programs.torch.ones(10 if programs.rank() == 0 else 5)
        programs.dist.send(t, 1) if programs.rank() == 0 else programs.dist.recv(t, 0)

    text = str(failure_of(too_large, ranks=2, kind=labkit.Disagreement))
    assert "send(10 × float32)" in text
    assert "recv(5 × float32)" in text


def test_several_tensors_in_one_call_must_agree_one_by_one():
    def coalesced():
        import warnings

        warnings.simplefilter("ignore")
        sizes = (3, 1) if programs.rank() == 0 else (1, 3)
        programs.dist.all_reduce_coalesced([programs.torch.ones(n) for n in sizes])

    text = str(failure_of(coalesced, ranks=2, kind=labkit.Disagreement))
    assert "3+1" in text
    assert "1+3" in text


def test_the_learners_own_eof_is_no_lost_connection():
    def read_input():
        input()

    assert "EOFError" in str(failure_of(read_input, ranks=2, kind=labkit.RankError))


def test_an_exception_that_cannot_tell_its_text_is_named():
    def strange():
        class Strange(Exception):
            def __str__(self):
                raise RuntimeError

        raise Strange

    assert "Strange" in str(failure_of(strange, ranks=1, kind=labkit.RankError))


def test_an_exception_that_causes_itself_is_told():
    def circle():
        error = ValueError("one")
        error.__cause__ = ValueError("two")
        error.__cause__.__cause__ = error
        raise error

    assert "ValueError: one" in str(failure_of(circle, ranks=1, kind=labkit.RankError))


def test_a_forgotten_all_reduce_is_reported_although_it_has_ended():
    def late():
        import time

        t = programs.torch.ones(10)
        programs.dist.all_reduce(t, async_op=True)
        time.sleep(0.2)

    left = labkit.run(late, ranks=2).leftovers
    assert [s.split(" started")[0] for s in left] == ["rank 0", "rank 1"]


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    import psutil

    def start_a_process(path):
        import subprocess
        import time

        child = subprocess.Popen(["sleep", "60"])
        (path / str(programs.rank())).write_text(str(child.pid))
        time.sleep(60)

    failure_of(start_a_process, tmp_path, ranks=2, timeout=1, kind=labkit.RunTimeout)
    pids = [int(f.read_text()) for f in tmp_path.iterdir()]
    assert len(pids) == 2
    time.sleep(0.2)
    assert not [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def test_a_message_to_oneself_is_refused_with_a_reason():
    def to_myself():
        programs.dist.isend(programs.torch.ones(1), 0)

    assert "itself" in str(failure_of(to_myself, ranks=1, kind=labkit.RankError))


@pytest.mark.parametrize(
    ("program", "told"),
    [("send_beyond", "rank 1 was to send to rank 2"), ("recv_below", "rank 0 was to recv from rank -1")],
)
def test_a_rank_that_is_not_there_is_named_at_once(program, told):
    with pytest.raises(labkit.RankError, match=told):
        labkit.run(getattr(programs, program), ranks=2, timeout=30)


def test_endless_printing_is_kept_within_bounds(capsys):
    def endless():
        while True:
            sys.stdout.write("0123456789\n" * 10_000)

    before = psutil.Process().memory_info().rss
    failure = failure_of(endless, ranks=2, timeout=0.5, within=2.5, kind=labkit.RunTimeout)
    assert psutil.Process().memory_info().rss - before < 200e6
    for text in failure.output:
        assert text.startswith("0123456789\n")
        assert re.search(r"\n… [\d,.]+ MB of output left out …\n", text)
        assert len(text) < 3.1e6
    shown = capsys.readouterr().out
    assert "MB of output left out" in shown
    assert len(shown) < 20_000


def test_a_line_without_end_is_kept_and_shown_within_bounds(capsys):
    def endless():
        while True:
            sys.stdout.write("x" * 100_000)

    failure = failure_of(endless, ranks=1, timeout=0.5, kind=labkit.RunTimeout)
    assert len(failure.output[0]) < 3.1e6
    assert len(capsys.readouterr().out) < 20_000


class _LoadsSlowly:
    """What takes its time when a rank unpacks it, as a first import does."""

    def __reduce__(self):
        return time.sleep, (0.6,)


def test_the_limit_counts_from_when_the_function_is_loaded():
    started = time.monotonic()
    assert labkit.run(lambda _: 1, _LoadsSlowly(), ranks=2, timeout=0.5).values == [1, 1]
    with pytest.raises(labkit.RunTimeout, match=r"after 0\.5 s"):
        labkit.run(lambda _: time.sleep(60), _LoadsSlowly(), ranks=2, timeout=0.5)
    assert time.monotonic() - started < 20
