"""labkit.run: what comes back, what is refused, and that every run starts clean."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc

import programs
import pytest
import torch

import labkit
from labkit.world import pool as pools_module
from labkit.world.patches import Patches
from labkit.world.pool import Shape, pools


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_values_come_in_rank_order_for_any_world(ranks):
    assert labkit.run(programs.total, ranks=ranks).values == [ranks * (ranks + 1) / 2] * ranks
    assert labkit.run(programs.pass_round, ranks=max(2, ranks)).values == [
        (r - 1) % max(2, ranks) for r in range(max(2, ranks))
    ]


def test_functions_of_a_cell_travel_with_what_they_use():
    scale = torch.tensor([2.0])

    def scaled(x, *, plus):
        return x * scale + plus + programs.rank()

    assert [v.item() for v in labkit.run(scaled, 3, plus=1, ranks=2).values] == [7.0, 8.0]


def test_tensors_come_back_whole_and_small():
    def tensors():
        large = torch.arange(1_000_000.0)
        leaf = torch.ones(2, requires_grad=True)
        return {
            "view": large[3:5], "graph": leaf * 2, "parameter": torch.nn.Parameter(torch.ones(1)),
            "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16), "scalar": torch.tensor(7),
            "empty": torch.empty(0, 3),
            "bool": torch.tensor([True, False]), "complex": torch.tensor([1 + 2j]), "sparse": torch.eye(2).to_sparse(),
        }  # fmt: skip

    got = labkit.run(tensors, ranks=1).values[0]
    assert got["view"].tolist() == [3.0, 4.0]
    assert got["view"].untyped_storage().nbytes() == 8, "a view travels as what it shows"
    assert got["graph"].tolist() == [2.0, 2.0]
    assert got["graph"].grad_fn is None
    assert isinstance(got["parameter"], torch.nn.Parameter)
    assert got["bfloat16"].dtype == torch.bfloat16
    assert got["bfloat16"].item() == 1.5
    assert got["scalar"].item() == 7
    assert got["empty"].shape == (0, 3)
    assert got["bool"].tolist() == [True, False]
    assert got["complex"].item() == 1 + 2j
    assert got["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    got["view"][0] = 0  # and can be written to


def test_output_is_grouped_by_rank_and_nothing_is_lost(capfd):
    """Public fault 59: output of child processes lost, or without saying whose it is."""

    def speak():
        for line in range(3):
            print("line", line)
            time.sleep(0.01)
        os.system("echo from a child process")
        os.write(2, b"from C\n")

    run = labkit.run(speak, ranks=2)
    expected = "line 0\nline 1\nline 2\nfrom a child process\nfrom C\n"
    assert run.output == [expected, expected]
    shown = capfd.readouterr().out.splitlines()
    assert shown == [f"rank {r} │ {line}" for r in range(2) for line in expected.splitlines()]


def test_much_output_is_kept_whole_and_shown_in_part(capsys):
    def shout():
        print("x" * 99_999)
        for number in range(10_000):
            print(number)

    run = labkit.run(shout, ranks=2)
    assert run.output[1].splitlines()[-1] == "9999"
    assert len(run.output[1].splitlines()) == 10_001
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 500
    assert "9,801 lines left out" in shown


def test_display_is_quiet_and_the_same_every_time():
    run = labkit.run(programs.pass_round, ranks=2)
    assert repr(run) == "pass_round on 2 ranks\n  rank 0  1\n  rank 1  0"
    assert "<script" not in run._repr_html_()
    evil = labkit.run(lambda: "<script>", ranks=1)
    assert "<script" not in evil._repr_html_()
    assert "0x" not in repr(labkit.run(lambda: object, ranks=1))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ranks": 0}, ValueError, "ranks=0: expected at least 1"),
        ({"ranks": -3}, ValueError, "at least 1"),
        ({"ranks": 2.0}, TypeError, "whole number, not 2.0"),
        ({"ranks": True}, TypeError, "whole number"),
        ({"ranks": 1000}, ValueError, "at most 64"),
        ({"ranks": 4, "nodes": 3}, ValueError, "do not divide"),
        ({"nodes": "2"}, TypeError, "nodes must be a whole number"),
        ({"device": "tpu"}, ValueError, "'auto', 'cpu', 'cuda'"),
        ({"timeout": 0}, ValueError, "positive"),
        ({"timeout": float("nan")}, ValueError, "positive"),
        ({"timeout": "5"}, TypeError, "number of seconds"),
        ({"pace": 3}, TypeError, "pace"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments, error, words):
    with pytest.raises(error, match=words):
        labkit.run(programs.nothing, **arguments)


def test_a_call_in_place_of_a_function_is_refused():
    with pytest.raises(TypeError, match="without \\(\\)"):
        labkit.run(3)


def test_what_cannot_travel_is_named():
    lock = threading.Lock()

    def uses_lock():
        return lock

    with pytest.raises(TypeError, match="'lock', which uses_lock uses"):
        labkit.run(uses_lock, ranks=1)
    with pytest.raises(TypeError, match=r"argument 1 .*generator"):
        labkit.run(print, 1, (i for i in "ab"), ranks=1)
    with pytest.raises(labkit.RankError, match=r"return value .*generator"):
        labkit.run(lambda: (i for i in "ab"), ranks=1)


def test_what_a_learners_function_uses_is_named_behind_a_wrapper():
    lock = threading.Lock()

    def helper():
        return [lock for _ in range(3)], other

    def other():
        return helper()

    def learners():
        return (lambda: helper())(), unbound

    with pytest.raises(TypeError, match=r"cannot send 'lock', which helper uses \(lock\) to the ranks"):
        labkit.run(programs.nothing, 7, learners, ranks=1)
    names = {"lock": lock}
    exec("def ring():\n    return [lock for _ in 'ab']", names)
    with pytest.raises(TypeError, match="cannot send 'lock', which ring uses"):
        labkit.run(programs.nothing, names["ring"], ranks=1)
    if lock.locked():
        unbound = 1


def test_a_rank_does_not_start_ranks():
    def inside():
        import labkit

        labkit.run(print)

    with pytest.raises(labkit.RankError, match="a rank does not start ranks"):
        labkit.run(inside, ranks=1)


def test_each_run_starts_clean():
    before = labkit.run(programs.state, ranks=2).values
    labkit.run(programs.leave_a_mess, ranks=2)
    after = labkit.run(programs.state, ranks=2)
    assert after.values == before
    assert before[0]["random"] != before[1]["random"], "ranks draw different numbers, as under torchrun"
    assert before[0]["folder"] == os.getcwd()


def test_sub_groups_work_in_every_run_of_a_pool():
    def part():
        group = programs.dist.new_group([0, 2])
        t = torch.ones(1)
        if programs.rank() in (0, 2):
            programs.dist.all_reduce(t, group=group)
        return t.item()

    pids = labkit.run(programs.pid, ranks=3).values
    for _ in range(3):
        run = labkit.run(part, ranks=3)
        assert run.values == [2, 1, 2]
        assert {e.group for e in run.trace.events} == {"{0,2}"}
    assert labkit.run(programs.pid, ranks=3).values == pids, "the same ranks all along"


def test_a_destroyed_world_is_made_again():
    labkit.run(programs.destroy_the_world, ranks=2)
    assert labkit.run(programs.total, ranks=2).values == [3, 3]


def test_the_kernels_environment_folder_and_path_reach_the_ranks(tmp_path, monkeypatch):
    labkit.run(programs.nothing, ranks=2)  # warm: what comes must reach ranks that live already
    monkeypatch.setenv("LABKIT_TEST_VALUE", "7")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fresh_module.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(tmp_path)

    def look():
        import fresh_module

        return os.environ["LABKIT_TEST_VALUE"], os.getcwd(), fresh_module.answer

    assert labkit.run(look, ranks=2).values == [("7", str(tmp_path), 42)] * 2


def test_ranks_see_what_torchrun_would_tell_them():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    got = labkit.run(lambda: [os.environ[n] for n in names], ranks=4, nodes=2).values
    assert got == [["0", "0", "4", "2", "0"], ["1", "1", "4", "2", "0"], ["2", "0", "4", "2", "1"],
                   ["3", "1", "4", "2", "1"]]  # fmt: skip


def test_threads_are_shared_out():
    """Public fault 62: N processes times all threads."""
    from labkit.device import cores

    for ranks in (1, 2, 4):
        threads = labkit.run(lambda: (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]), ranks=ranks).values
        expected = max(1, cores() // ranks)
        assert threads == [(expected, str(expected))] * ranks


def test_new_code_on_disk_means_new_ranks(tmp_path, monkeypatch):
    module = tmp_path / "learners_module.py"
    module.write_text("def answer(): return 1")
    monkeypatch.syspath_prepend(tmp_path)

    def ask():
        import learners_module

        return learners_module.answer()

    assert labkit.run(ask, ranks=2).values == [1, 1]
    pids = labkit.run(programs.pid, ranks=2).values
    assert labkit.run(programs.pid, ranks=2).values == pids
    module.write_text(textwrap.dedent("def answer(): return 2  # changed"))
    os.utime(module, ns=(1, 1))
    assert labkit.run(ask, ranks=2).values == [2, 2]
    assert labkit.run(programs.pid, ranks=2).values != pids


def test_pools_of_several_sizes_live_side_by_side():
    pids = {n: labkit.run(programs.pid, ranks=n).values for n in (1, 2, 3)}
    for n in (1, 2, 3):
        assert labkit.run(programs.pid, ranks=n).values == pids[n]


def test_two_threads_may_run_at_once():
    results = []
    threads = [threading.Thread(target=lambda: results.append(labkit.run(programs.total, ranks=2).values))
               for _ in range(3)]  # fmt: skip
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [[3, 3]] * 3


def test_idle_pools_are_given_up(monkeypatch):
    pids = labkit.run(programs.pid, ranks=2).values
    monkeypatch.setattr(pools_module, "IDLE_SECONDS", 0.0)
    pools.reap()
    assert _all_gone(pids)
    monkeypatch.undo()
    monkeypatch.setattr(pools_module, "IDLE_RANKS", 4)
    old = labkit.run(programs.pid, ranks=3).values
    labkit.run(programs.pid, ranks=2)
    assert _all_gone(old), "beyond IDLE_RANKS the longest idle pool goes"


def test_ranks_that_died_while_idle_are_replaced():
    pids = labkit.run(programs.pid, ranks=2).values
    os.kill(pids[0], 9)
    time.sleep(0.2)
    assert labkit.run(programs.total, ranks=2).values == [3, 3]


def test_ranks_that_trace_their_memory_are_replaced():
    """To end tracing there crashes, now and then, a thread of gloo's that lets go of a tensor in that moment."""
    traced = labkit.run(lambda: (tracemalloc.start(), os.getpid())[1], ranks=2).values
    later = labkit.run(lambda: (tracemalloc.is_tracing(), os.getpid()), ranks=2).values
    assert [tracing for tracing, _ in later] == [False, False]
    assert not set(traced) & {pid for _, pid in later}


def test_a_later_run_takes_no_time_to_tidy_up():
    """What a run leaves behind is frozen: a collection does not look at a hundred thousand objects again."""

    def looked_at():
        return len(gc.get_objects())

    def imports():
        import torch.distributed.checkpoint  # noqa: F401

        return looked_at()

    first = labkit.run(imports, ranks=1).values[0]
    assert labkit.run(looked_at, ranks=1).values[0] < first / 10


def test_without_recording_nothing_is_noted():
    run = labkit.run(programs.total, ranks=2, record=False)
    assert run.values == [3, 3]
    assert len(run.trace) == 0


def test_a_pool_is_taken_by_its_whole_shape():
    pool = pools.take(Shape(2))
    try:
        other = pools.take(Shape(2))
        assert other is not pool
        pools.put_back(other)
    finally:
        pool.close()


def test_cuda_is_refused_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    with pytest.raises(ValueError, match="no GPU was found"):
        labkit.run(programs.nothing, device="cuda")


def _all_gone(pids: list[int]) -> bool:
    for _ in range(100):
        with contextlib.suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, 0)
                break
            time.sleep(0.05)
            continue
        return True
    return False


def test_the_kernel_needs_no_torch_to_run_ranks():
    """The import takes seconds; ranks have theirs from the fork server."""
    program = "import labkit, sys; print(labkit.run(print, 'hello', ranks=2).values, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[None, None] False"


def test_a_fork_in_a_rank_does_not_answer_for_it():
    def forks():
        os.fork()
        return "forked"

    assert labkit.run(forks, ranks=2).values == ["forked"] * 2
    for number in range(3):
        assert labkit.run(lambda n=number: n, ranks=2).values == [number] * 2


def test_threads_of_a_run_do_not_act_in_the_next():
    def leave_a_thread():
        import threading
        import time

        def late():
            time.sleep(0.3)
            programs.dist.all_reduce(torch.ones(1))
            print("late")

        threading.Thread(target=late).start()

    labkit.run(leave_a_thread, ranks=2)

    def wait():
        time.sleep(0.6)

    run = labkit.run(wait, ranks=2)
    assert run.output == ["", ""]
    assert len(run.trace) == 0


def test_output_streams_warnings_and_alarms_are_put_back():
    def careless():
        import io
        import signal
        import warnings

        sys.stdout = io.StringIO()
        warnings.simplefilter("error")
        signal.alarm(1)

    def speak():
        import warnings

        warnings.warn("only a warning", stacklevel=1)
        time.sleep(1.2)
        print("heard")

    labkit.run(careless, ranks=1)
    assert labkit.run(speak, ranks=1).output[0].endswith("heard\n")


def test_a_rank_with_its_output_closed_is_not_used_again():
    labkit.run(lambda: os.close(1), ranks=1)
    assert labkit.run(lambda: print("heard"), ranks=1).output == ["heard\n"]


def test_one_element_views_travel_and_are_sent():
    def view():
        t = torch.arange(6.0).reshape(2, 3)[:1, 1]
        got = torch.zeros(1)
        programs.dist.send(t, 1) if programs.rank() == 0 else programs.dist.recv(got, 0)
        return t

    assert [v.item() for v in labkit.run(view, ranks=2).values] == [1.0, 1.0]


def test_the_backend_is_called_by_its_own_name():
    def name():
        programs.dist.monitored_barrier()
        group = programs.dist.new_group([0, 1])
        return programs.dist.get_backend(), programs.dist.get_backend(group)

    assert labkit.run(name, ranks=2).values == [("gloo", "gloo")] * 2


def test_labels_may_be_anything():
    def label():
        from labkit import trace

        with trace.label(step=lambda: 1):
            programs.total()
        with pytest.raises(TypeError, match="span has no field bogus"), trace.span("x", bogus=1):
            pass

    assert len(labkit.run(label, ranks=1).trace) == 1


def test_long_numbers_are_shown_by_their_type():
    assert "int" in repr(labkit.run(lambda: 10**5000, ranks=1))


def test_paths_of_pathlib_may_stand_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert labkit.run(programs.total, ranks=2).values == [3, 3]


def test_a_monitored_barrier_leaves_nothing_over():
    assert labkit.run(programs.monitored_barrier, ranks=2).leftovers == []


@pytest.mark.parametrize("change", [
    "dist.isend = lambda *a: None", "dist.P2POp = None", "torch.empty_like = torch.zeros_like", "del torch.manual_seed",
    "torch.Tensor.copy_ = lambda *a: None", "torch.Tensor.__add__ = None", "torch.set_default_dtype = None",
    "torch.nn.functional.relu = None", "torch.helper = 3",
])  # fmt: skip
def test_a_patch_of_torch_ends_with_its_run(change):
    def patch():
        exec(change, {"torch": torch, "dist": programs.dist})
        return os.getpid()

    old = labkit.run(patch, ranks=1).values
    assert labkit.run(programs.pid, ranks=1).values != old
    assert labkit.run(programs.total, ranks=1).values == [1]


def test_only_torchs_own_wrapper_is_no_patch(monkeypatch):
    from torch._compile import _disable_dynamo

    known = Patches()
    monkeypatch.setattr(torch, "manual_seed", _disable_dynamo(torch.manual_seed))  # as an import of its compiler does
    assert not known.any()
    monkeypatch.setattr(torch, "ones", functools.wraps(torch.ones)(lambda *a: None))
    assert known.any()


@pytest.mark.soak  # the import takes seconds
def test_what_torch_imports_late_is_no_patch():
    def late():
        import torch.distributed.pipelining
        import torch.nn.utils.prune
        import torch.utils.checkpoint

        optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
        optimizer.step()
        return os.getpid()

    pids = labkit.run(late, ranks=1).values
    assert labkit.run(programs.pid, ranks=1).values == pids


def test_what_ranks_had_to_import_later_ones_have_from_the_start():
    def needs_a_compiler():
        import torch

        torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])

    def has_it():
        return "torch._dynamo" in sys.modules

    labkit.run(needs_a_compiler, ranks=1)
    with pytest.raises(labkit.RankError):
        labkit.run(programs.raise_on, 0, ranks=2)  # the next two are new
    assert labkit.run(has_it, ranks=2).values == [True, True]
