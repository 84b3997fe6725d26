"""labkit.pace: what a run takes on hardware that is not there, against the α–β model worked out by hand."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import programs
import programs_pace as paced
import pytest
from timing import WrongTime, on_a_busy_host, on_the_clock

import labkit
from labkit.pace import Link, Pace, section
from labkit.trace import branch, now, recorder
from labkit.world.clock import Side, VirtualClock, sleep_until, too_slow
from labkit.world.paced import PacedWork

pytestmark = pytest.mark.alone

LINK = Link(latency=1e-3, bandwidth=5e6)
FIFTIETH = 62_500  # float32 elements that take 50 ms over it


def agrees(expected, measure, tolerance=0.03, attempts=3):
    """Whether `measure()` is within `tolerance` of `expected`, or 2.5 ms; on a loaded host one more try or two."""
    got = []
    for _ in range(attempts):
        got.append(measure())
        if abs(got[-1] - expected) <= max(tolerance * expected, 2.5e-3 if tolerance >= 0.03 else 0):
            return True
    raise WrongTime(f"expected {expected:.4f} s, got {got}")


def slow(compute=None, **hardware):
    """`LINK` unless another is given, and 30 ms in which all ranks get ready: see `programs_pace.prepared`."""
    return Pace(**{"link": LINK} | hardware, compute={"prepare": 0.03} | (compute or {}))


def longest(program, *args, ranks=4, nodes=1, **hardware):
    """Seconds of the slowest rank."""
    run = labkit.run(program, *args, ranks=ranks, nodes=nodes, pace=slow(**hardware))
    return max(v if isinstance(v, float) else v[0] for v in run.values)


# The bars: a ring and a tree of four ranks

VARIANTS = {
    "plain": {},
    "link": {"slow_links": {(1, 2): 5}},
    "port": {"slow_ports": {2: 5}},
    "late": {"late": {2: 0.1}},
}
#: Elements; a message is a fourth of the ring's and all of the tree's.
SIZES = {paced.ring: 2**17, paced.tree: 2**16}
MESSAGE = {paced.ring: 2**17 / LINK.bandwidth, paced.tree: 2**18 / LINK.bandwidth}


@on_a_busy_host
@pytest.mark.parametrize(
    ("program", "variant", "steps", "factor", "more"),
    [
        (paced.ring, "plain", 6, 1, 0),
        (paced.ring, "link", 6, 5, 0),
        (paced.ring, "port", 6, 5, 0),
        (paced.ring, "late", 6, 1, 0.1),
        (paced.tree, "plain", 4, 1, 0),
        (paced.tree, "link", 4, 1, 0),
        (paced.tree, "port", 4, 5, 0),
        (paced.tree, "late", 4, 1, 0.1),
    ],
)
def test_what_a_ring_and_a_tree_take(program, variant, steps, factor, more):
    """A ring is as slow as its slowest link; a tree can miss a link, but never a rank."""
    expected = steps * (factor * MESSAGE[program] + LINK.latency) + more
    assert agrees(expected, lambda: longest(program, SIZES[program], **VARIANTS[variant]))


def test_values_are_real():
    run = labkit.run(paced.ring, 1000, ranks=4, pace=Pace(link=Link.ethernet_1g))
    assert [v[1:] for v in run.values] == [(6.0, 6.0)] * 4
    run = labkit.run(paced.tree, 1000, ranks=4, pace=Pace(link=Link.ethernet_1g))
    assert [v[1:] for v in run.values] == [(6.0, 6.0)] * 4


# Messages


@on_a_busy_host
def test_a_section_and_a_message_overlap():
    """max(40, 51) ms, not their sum; and the handle is not completed before it is."""
    seen = []

    def measure():
        run = labkit.run(paced.overlap, FIFTIETH, ranks=2, pace=slow({"forward": 0.04}))
        seen.append([v[1:] for v in run.values])
        return max(v[0] for v in run.values)

    assert agrees(0.051, measure)
    assert seen[-1] == [(False, True)] * 2


@on_a_busy_host
def test_messages_to_one_rank_queue_at_its_port():
    assert agrees(0.101, lambda: longest(paced.into_one, FIFTIETH, ranks=3))


@on_a_busy_host
def test_a_port_is_full_duplex():
    assert agrees(0.051, lambda: longest(paced.both_ways, FIFTIETH, ranks=2))


@on_a_busy_host
def test_slow_links_are_slow_in_one_direction():
    """0 → 1 is slow, 1 → 0 is not: rank 0 has everything when it has sent, 1 when it has received."""
    hardware = slow(slow_links={(0, 1): 3})
    values = []

    def measure(rank):
        values[:] = labkit.run(paced.both_ways, FIFTIETH, ranks=2, pace=hardware).values
        return values[rank]

    assert agrees(0.151, lambda: measure(1))
    assert agrees(0.150, lambda: measure(0))
    assert agrees(0.051, lambda: longest(paced.pairs, FIFTIETH, ranks=2, slow_links={(1, 0): 3}))


@on_a_busy_host
def test_nodes_are_linked_more_slowly():
    """0 and 1 are a node, 2 and 3 another: 1 → 2 crosses. Fifty ms inside, a hundred between."""
    hardware = slow(between=Link(LINK.latency, LINK.bandwidth / 2))
    values = []

    def measure(rank):
        values[:] = labkit.run(paced.pairs, FIFTIETH, ranks=4, nodes=2, pace=hardware).values
        return values[rank]

    assert agrees(0.051, lambda: measure(1))
    assert agrees(0.051 + 0.101, lambda: measure(2))


@on_a_busy_host
def test_a_message_from_anybody_is_paced():
    seen = []

    def measure():
        run = labkit.run(paced.from_anybody, FIFTIETH, ranks=2, pace=slow())
        seen.append([v[1] for v in run.values])
        return run.values[1][0]

    assert agrees(0.051, measure)
    assert seen[-1] == [1.0, 1.0]


@on_a_busy_host
def test_an_empty_message_costs_latency_only():
    hardware = {"link": Link(latency=0.05, bandwidth=1.0)}
    assert agrees(0.05, lambda: longest(paced.empty, ranks=2, **hardware), tolerance=0.06)


@on_a_busy_host
def test_a_late_receiver_holds_up_the_sender():
    """Nothing moves before it is asked for: the section after the send is as long as any."""

    def measure():
        return labkit.run(paced.held_up, FIFTIETH, ranks=2, pace=slow({"forward": 0.1})).values[0]

    assert agrees(0.1 + 0.05 + 0.1, measure)


@on_a_busy_host
def test_barriers_align_the_clocks_and_cost_nothing():
    runs = []

    def measure():
        runs.append(labkit.run(paced.barriers, ranks=3, pace=Pace(compute={"prepare": 0.05, "forward": 0.1})))
        return runs[-1].values[1][0]

    assert agrees(0.2, measure)
    assert [v[1] for v in runs[-1].values] == [True] * 3
    with on_the_clock():
        assert runs[-1].values[2][0] < 0.15, "rank 2 was in the first barrier only"
    assert labkit.run(paced.is_paced, ranks=2).values == [False] * 2


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_collectives_of_torchs_backend_are_refused(name):
    with pytest.raises(labkit.RankError, match=rf"{name} of torch's own .* labkit.collectives with algorithm='ring'"):
        labkit.run(paced.native, name, ranks=2, pace=Pace())


# Sections


@on_a_busy_host
def test_sections_do_not_add_up_what_a_sleep_is_too_long():
    hardware = slow({"forward": 0.02}, slow_compute={2: 2})
    values = []

    def measure(rank):
        values[:] = labkit.run(paced.timed_sections, 10, ranks=3, pace=hardware).values
        return values[rank]

    assert agrees(0.2, lambda: measure(0), tolerance=0.01)
    assert agrees(0.2, lambda: measure(1), tolerance=0.01)
    assert agrees(0.4, lambda: measure(2), tolerance=0.01)


@on_a_busy_host
def test_sections_are_recorded_with_and_without_seconds():
    for hardware in (None, Pace(), Pace(compute={"forward": 0.01})):
        run = labkit.run(paced.sections, 2, ranks=1, pace=hardware)
        assert [(e.kind, e.name) for e in run.trace.events] == [("compute", "forward")] * 2
        spent = sum(e.end - e.start for e in run.trace.events)
        with on_the_clock():
            assert (spent >= 0.018) == (hardware is not None and bool(hardware.compute))


@on_a_busy_host
def test_a_thread_takes_the_clock_over():
    """Two messages one after another beside a section of 60 ms: 102 ms."""
    assert agrees(0.102, lambda: longest(paced.branches, FIFTIETH, ranks=2, compute={"forward": 0.06}))


# What the run tells about itself


@on_a_busy_host
def test_the_trace_says_that_it_is_paced_and_when_messages_ended():
    run = labkit.run(paced.looked_at_late, FIFTIETH, ranks=2, pace=Pace(link=LINK, compute={"forward": 0.2}))
    assert run.trace.paced
    assert not labkit.run(programs.pass_round, ranks=2).trace.paced
    (message,) = run.trace.messages()
    begin = min(message.send.start, message.recv.start)
    with on_the_clock():
        assert 0.03 < message.send.end - begin < 0.07, "when it left the port, not when somebody waited"
        assert 0.03 < message.recv.end - begin < 0.07
        assert message.recv.end - message.send.end == pytest.approx(LINK.latency, abs=1e-4)


@on_a_busy_host
def test_work_outside_sections_is_charged_and_told():
    run = labkit.run(paced.sleep_outside, 0.1, ranks=2, pace=Pace(link=LINK))
    told = [n for n in run.notes if "outside any section" in n]
    assert len(told) == 2
    with on_the_clock():
        assert told[1].startswith("rank 1 worked 0.1")
    assert "charged" in told[1]
    assert f"{len(run.notes)} notes on the pace: run.notes" in repr(run)
    assert f"{len(run.notes)} notes on the pace: run.notes" in run._repr_html_()
    assert "0.1" not in repr(run)


@on_a_busy_host
def test_little_work_is_free_and_what_follows_the_last_operation_too():
    runs = (labkit.run(paced.sleep_outside, 0.002, 0.1, ranks=2, pace=Pace(link=LINK)) for _ in range(3))
    with on_the_clock():
        assert any(run.notes == [] for run in runs), "a loaded host may need a second try"


@on_a_busy_host
def test_a_section_that_takes_too_long_is_told():
    run = labkit.run(paced.sleep_inside, 0.08, ranks=1, pace=Pace(compute={"forward": 0.02}))
    (note,) = run.notes
    with on_the_clock():
        assert "rank 0 really took 0.08" in note
    assert "'forward' instead of 0.020 s (once)" in note
    assert "1 note on the pace: run.notes" in repr(run)


def test_a_host_that_is_slower_than_the_hardware_is_told():
    run = labkit.run(paced.many_messages, 100, ranks=2, pace=Pace(link=Link.nvlink5))
    assert any("this host cannot play it" in n for n in run.notes)
    assert too_slow([]) == []
    assert too_slow([(1.0, 1.5), (2.0, 2.001)]) == [], "one rank may be held up for real"


# When something is wrong


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Pace({}), TypeError, "positional"),
        (lambda: Pace(link=3), TypeError, "link must be a Link, not 3"),
        (lambda: Pace(link=None), TypeError, "link must be a Link"),
        (lambda: Pace(between="fast"), TypeError, "between must be a Link or None, not 'fast'"),
        (lambda: Pace(compute=[1]), TypeError, r"compute must be a dictionary, .* not \[1\]"),
        (lambda: Pace(compute={1: 1}), TypeError, "compute names 1"),
        (lambda: Pace(compute={"f": 0}), ValueError, r"compute\['f'\]=0: expected seconds, positive"),
        (lambda: Pace(compute={"f": True}), TypeError, "number of seconds, not True"),
        (lambda: Pace(late={0: -1}), ValueError, r"late\[0\]=-1: expected seconds, at least 0"),
        (lambda: Pace(late={0: float("inf")}), ValueError, "finite"),
        (lambda: Pace(slow_ports={-1: 2}), ValueError, "names rank -1"),
        (lambda: Pace(slow_ports={"a": 2}), TypeError, "names 'a': expected a rank"),
        (lambda: Pace(slow_compute={0: 0.5}), ValueError, r"slow_compute\[0\]=0.5: expected a factor of at least 1"),
        (lambda: Pace(slow_compute={0: float("nan")}), ValueError, "at least 1"),
        (lambda: Pace(slow_links={1: 2}), TypeError, r"expected \(from, to\)"),
        (lambda: Pace(slow_links={(1, 1): 2}), ValueError, "two different ranks"),
        (lambda: Pace(slow_links={(0, 1): "5"}), TypeError, "must be a factor, not '5'"),
        (lambda: Link(-1, 1), ValueError, "latency=-1: expected seconds, at least 0"),
        (lambda: Link(0, 0), ValueError, "bandwidth=0: expected bytes per second, positive"),
        (lambda: Link("a", 1), TypeError, "latency must be a number of seconds, not 'a'"),
        (lambda: section(3), TypeError, "section needs a name, not 3"),
        (lambda: labkit.run(programs.nothing, pace=Link.pcie4), TypeError, "must be a labkit.pace.Pace or None"),
        (lambda: labkit.run(programs.nothing, ranks=4, pace=Pace(late={4: 1})), ValueError,
         "pace: late names rank 4, but the run has ranks 0 to 3"),
        (lambda: labkit.run(programs.nothing, ranks=2, pace=Pace(slow_links={(0, 2): 5})), ValueError,
         "slow_links names rank 2"),
        (lambda: labkit.run(programs.nothing, pace=Pace(), record=False), ValueError, "leave out record=False"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_pace_does_not_change():
    given = {2: 5}
    pace = Pace(slow_ports=given)
    given[3] = 7
    assert pace.slow_ports == {2: 5.0}
    with pytest.raises(AttributeError):
        pace.link = Link.pcie4


def test_presets_are_what_the_data_sheets_say():
    """One direction: half of what NVIDIA says of NVLink; 8 bits a byte; PCIe's 128/130 encoding."""
    assert [Link.nvlink3.bandwidth, Link.nvlink4.bandwidth, Link.nvlink5.bandwidth] == [
        600e9 / 2,
        900e9 / 2,
        1.8e12 / 2,
    ]
    assert Link.pcie4.bandwidth == pytest.approx(16e9 * 16 * 128 / 130 / 8, rel=1e-3)
    assert Link.pcie5.bandwidth == pytest.approx(32e9 * 16 * 128 / 130 / 8, rel=1e-3)
    assert [Link.infiniband_hdr.bandwidth * 8, Link.infiniband_ndr.bandwidth * 8] == [200e9, 400e9]
    ethernet = [Link.ethernet_100g, Link.ethernet_10g, Link.ethernet_1g]
    assert [link.bandwidth * 8 for link in ethernet] == [100e9, 10e9, 1e9]
    assert Pace().link == Link.ethernet_10g


def test_a_rank_that_is_killed_while_it_sleeps_is_named():
    began = time.monotonic()
    with pytest.raises(labkit.RankDied, match="rank 0 was ended by SIGKILL while in send"):
        labkit.run(paced.killed_while_asleep, 25_000_000, ranks=2, pace=Pace(link=LINK), timeout=30)
    assert time.monotonic() - began < 10


def test_time_is_up_while_ranks_sleep():
    with pytest.raises(labkit.RunTimeout, match=r"0     in send\(25,000,000 × float32\) to 1"):
        labkit.run(paced.from_anybody, 25_000_000, ranks=2, pace=Pace(link=LINK), timeout=0.5)


def test_an_error_is_blamed_on_its_rank_and_the_next_run_is_clean():
    with pytest.raises(labkit.RankError, match="boom") as failure:
        labkit.run(paced.fails_on, 1, 100, ranks=2, pace=Pace())
    assert failure.value.ranks == [1]
    assert failure.value.trace.paced
    assert labkit.run(programs.total, ranks=2).values == [3, 3]


def test_ranks_are_kept_and_clean():
    before = labkit.run(paced.what_is_left, ranks=2).values
    labkit.run(paced.both_ways, 100, ranks=2, pace=Pace())
    assert labkit.run(paced.what_is_left, ranks=2).values == before
    assert [v[1:3] for v in before] == [(None, 0)] * 2


# The clock by itself


def test_a_side_of_a_port_moves_one_message_at_a_time():
    """Whatever the order, no two bookings overlap, none is early, and each is in the first gap that it fits in."""

    def clash(start, length, booked):
        return any(start < end - 1e-9 and begin < start + length - 1e-9 for begin, end in booked)

    random.seed(0)
    for _ in range(50):
        side, booked = Side(), []
        for _ in range(30):
            earliest, length = random.randrange(40) / 10, random.randrange(1, 9) / 10
            start = side.book(earliest, length)
            assert start >= earliest
            assert not clash(start, length, booked)
            earlier = [t for t in [earliest, *(end for _, end in booked)] if earliest <= t < start - 1e-9]
            assert all(clash(t, length, booked) for t in earlier), "an earlier gap was long enough"
            booked.append((start, start + length))


def test_a_gap_that_fits_exactly_is_taken():
    side = Side()
    assert side.book(0.3, 1.0) == 0.3
    assert side.book(0.0, 0.1 + 0.2) == 0.0, "0.1 + 0.2 is more than 0.3, and no reason to queue"


@on_a_busy_host
def test_a_sleep_ends_in_time():
    late = []
    for _ in range(20):
        moment = now() + random.uniform(0.0, 0.005)
        sleep_until(moment)
        late.append(now() - moment)
    assert min(late) >= 0
    with on_the_clock():
        assert sorted(late)[10] < 5e-4
        assert min(late) < 4e-5, "less than a plain sleep is late by"


@pytest.mark.parametrize(("is_there", "v", "expected"), [(True, 0.0, True), (False, 0.0, False), (True, 9.0, False)])
def test_a_handle_is_completed_when_the_message_is_there_and_would_have_been(is_there, v, expected):
    class Ends(PacedWork):
        def _ends(self):
            return v

    work, entry = SimpleNamespace(is_completed=lambda: is_there), SimpleNamespace(collected=False)
    assert Ends(SimpleNamespace(), work, entry, VirtualClock(Pace(), 0, now())).is_completed() is expected


def in_a_thread(clock, forked, took):
    """Go on from `forked` in another thread, for so long; returns where the clock is then."""
    ends = []

    def work():
        with forked:
            clock.begin()
            clock.reach(clock.v + took)
            clock.end()
            ends.append(clock.v)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return ends[0]


def test_branches_are_a_queue_and_to_wait_for_them_is_no_work():
    with VirtualClock(Pace(), 0, now()) as clock:
        first, second = branch("first"), branch("second")
        assert in_a_thread(clock, first, 0.04) == pytest.approx(0.04)
        assert clock.v == 0.0
        first.join()
        assert clock.v == pytest.approx(0.04)
        assert in_a_thread(clock, second, 0.03) == pytest.approx(0.07), "after the first, though forked at 0"
        second.join()
        assert clock.v == pytest.approx(0.07)
        assert now() >= clock.moment(clock.v)
        assert clock.notes() == []
        third = branch("third")
        assert in_a_thread(clock, third, 0.01) == pytest.approx(0.08)
        time.sleep(0.05)
        third.join()
        assert clock.v > 0.12, "to work and join later is"
        assert len(clock.notes()) == 1


def test_the_clock_is_gone_after_an_error():
    before = list(recorder.carriers)

    def fail():
        with VirtualClock(Pace(late={0: 0.01}), 0, now()) as clock:
            assert recorder.carriers == [*before, clock]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert recorder.carriers == before
    assert labkit.pace.running() is None


# Under torchrun


@pytest.mark.soak
def test_under_torchrun(tmp_path):
    from test_torchrun import TELL, told, torchrun

    program = (
        TELL
        + """
    import programs_pace as paced
    from labkit.pace import Link, Pace
    hardware = Pace(link=Link(1e-3, 5e6), compute={"prepare": 0.03})
    run = labkit.run(paced.ring, 2**16, ranks=2, pace=hardware)
    tell([v[0] for v in run.values], run.trace.paced, run.values[0][1:])
    try:
        labkit.run(paced.from_anybody, 25_000_000, ranks=2, pace=hardware, timeout=0.5)
    except labkit.RunTimeout as error:
        tell("in send(25,000,000 × float32) to 1" in str(error))
    tell(labkit.run(programs.total, ranks=2).values)
    """
    )
    done = torchrun(tmp_path, program, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    by_rank = told(tmp_path)
    assert by_rank[0] == by_rank[1]
    (seconds, is_paced, values), timed_out, after = by_rank[0]
    assert is_paced
    assert values == [1.0, 1.0]
    assert max(seconds) == pytest.approx(2 * (2**17 / 5e6 + 1e-3), rel=0.2)
    assert timed_out == [True]
    assert after == [[3.0, 3.0]]


@on_a_busy_host
def test_elapsed_counts_from_the_common_start():
    """A late rank's own work is over later by what it was late, also for itself."""
    run = labkit.run(paced.elapsed_at_the_end, ranks=2, pace=Pace(compute={"work": 0.1}, late={1: 0.1}))
    assert run.values[0] >= 0.1
    assert run.values[1] >= 0.2
    with on_the_clock():
        assert run.values[0] < 0.15
        assert run.values[1] < 0.25
    with pytest.raises(RuntimeError, match="common start"):
        labkit.pace.elapsed()


def test_messages_under_way_are_no_deadlock():
    """Each rank waits for a message that was sent to it: slow, but no circle of waiting."""
    with pytest.raises(labkit.RunTimeout, match="messages are under way; nobody waits in a circle"):
        labkit.run(programs.pass_round, ranks=3, timeout=1, pace=Pace(link=Link(30.0, 1e6)))
