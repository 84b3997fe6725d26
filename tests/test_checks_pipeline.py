"""Exercises and impostors of chapter 06: against published orders and numbers by hand, and what a verdict tells."""

from __future__ import annotations

import inspect
import json
import re

import pytest
import torch
import torch.distributed as dist
from programs_checks_pipeline import RIGHT, by_what_is_held

import labkit
from labkit.checks import exercises, orders, stage
from labkit.checks.exercise import Case
from labkit.checks.exercises import beat_1f1b as beat
from labkit.checks.exercises import one_f_one_b_loop as loop
from labkit.checks.exercises import one_f_one_b_order as order
from labkit.checks.exercises import peak_stash, repair, warm_up
from labkit.checks.judge import judge
from labkit.checks.lineups import pipeline as lineup
from labkit.pipeline import Schedule, simulate
from labkit.show import guesses

NAMES = [name for name, chapter in exercises.NAMES.items() if chapter == "06"]


def copied(name):
    """The solution as `labkit catchup` writes it into a notebook that imports torch, dist and labkit."""
    space = {"torch": torch, "dist": dist, "labkit": labkit, "__name__": "__main__"}
    exec(compile(inspect.getsource(exercises.get(name).solution), "<cell>", "exec"), space)
    return space[name]


def told(name, fn):
    return str(labkit.check(name, fn))


@pytest.mark.parametrize(("name", "fn"), [(name, fn) for name, fns in RIGHT.items() for fn in fns])
def test_other_ways_are_right_too(name, fn):
    verdict = labkit.check(name, fn)
    assert verdict.right, str(verdict)


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_needs_no_more_than_a_notebook_has(name):
    verdict = labkit.check(name, copied(name))
    assert verdict.right, str(verdict)
    body = inspect.getsource(exercises.get(name).solution).splitlines()[1:]
    assert sum(bool(line.strip()) for line in body) <= 15
    assert len(exercises.get(name).wrong) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_attempted(name):
    def stub(*args):
        raise NotImplementedError

    assert told(name, stub) == f"· not attempted · {name}"


# What is expected, against numbers by hand


def test_orders_are_those_of_the_papers():
    """PipeDream-Flush, figure 2: four ranks, four micro-batches; the peaks are 4, 3, 2, 1."""
    rows = ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    at = order.SITUATIONS.index((4, 4))
    assert order.expected(Case(1, 1, more=at)) == [[row.split() for row in rows]]
    assert {(4, 3), (5, 2), (1, 1)} <= set(order.SITUATIONS), "fewer micro-batches than ranks, and one rank"
    for ranks, micro_batches in order.SITUATIONS:
        schedule = orders.schedule_of([by_what_is_held(r, ranks, micro_batches) for r in range(ranks)], micro_batches)
        assert simulate(schedule).makespan == 3 * (micro_batches + ranks - 1)
        assert schedule.stash() == tuple(min(micro_batches, ranks - r) for r in range(ranks))


def test_warm_ups_are_megatrons():
    """`get_pp_rank_microbatches`: one forward less than stands before the first backward; it knows no m < p."""
    for more, (rank, ranks, micro_batches, chunks) in enumerate(warm_up.SITUATIONS):
        warm = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        assert warm_up.expected(Case(1, 1, more=more)) == [min(warm + 1, micro_batches * chunks)]


def test_a_micro_batch_is_held_from_its_forward_to_what_frees_it():
    """Counted at each place: how many F's stand at or before it, and their B, or W, at or behind it."""
    for more, words in enumerate(peak_stash.SITUATIONS):
        end = "W" if any(word[0] == "W" for word in words) else "B"
        numbers = {word[1:] for word in words}
        spans = [(words.index(f"F{n}"), words.index(f"{end}{n}")) for n in numbers]
        most = max((sum(first <= place <= last for first, last in spans) for place in range(len(words))), default=0)
        assert peak_stash.expected(Case(1, 1, more=more)) == [most]


def test_a_repaired_schedule_can_end_no_earlier():
    """The last rank begins when its first micro-batch has come through two stages; its last goes back through two."""
    text = repair.repair(repair.BROKEN)
    assert simulate(Schedule.parse(text)).makespan == 2 * 1 + 4 * (1 + 2) + 2 * 2
    assert sorted(text.split()) == sorted(repair.BROKEN.split()), "the same actions"


def test_par_is_zero_bubbles():
    assert "ends at 27; 1F1B 33, par 27; the ranks hold 4, 4, 4, 4" in told("beat_1f1b", copied("beat_1f1b"))
    by_hand = {(2, 2): "r0: F0 F1 B0 W0 B1 W1 \n r1: F0 B0 F1 B1 W0 W1"}
    assert simulate(Schedule.parse(by_hand[2, 2])).makespan == 7
    assert beat._ends(Schedule.parse(beat.beat_1f1b(2, 2))) == 7


def test_the_stages_of_the_loop():
    """Three stages make 2x + 1, 2x + 2, 2x + 3 of x; and 3g + 3, 3g + 2, 3g + 1 of g."""
    case = Case(3, 2, more=2)
    assert stage.first(case, 1).tolist() == [10, 11]
    assert stage.arriving(case, "F", 1, 2).tolist() == [2 * (2 * x + 1) + 2 for x in (10, 11)]
    assert stage.arriving(case, "B", 1, 0).tolist() == [3 * (3 * g + 3) + 2 for g in (10, 11)]
    run = labkit.run(loop.call, loop.one_f_one_b_loop, case, ranks=3, device="cpu")
    assert [words for words, _ in run.values] == [by_what_is_held(rank, 3, 2) for rank in range(3)]
    assert [fault for _, fault in run.values] == [""] * 3


# What is told


def test_an_order_that_is_as_good_but_another():
    def swaps(rank, ranks, micro_batches):
        row = by_what_is_held(rank, ranks, micro_batches)
        if (rank, ranks, micro_batches) == (0, 3, 4):
            row[1:3] = row[2], row[1]
        return row

    text = told("one_f_one_b_order", swaps)
    assert text.startswith("✗ wrong · one_f_one_b_order · p = 3, m = 4\n  rank 0, place 1: expected F1, got F2\n")
    assert "makespan and stash are those of 1F1B, the order is another" in text


def test_what_comes_late_is_told():
    wrong = {w.fn.__name__: w.fn for w in exercises.get("one_f_one_b_order").wrong}
    text = str(judge(exercises.get("one_f_one_b_order"), wrong["warms_up_with_one_less"]))
    assert (
        "it ends at 12, not at 9 (F takes 1, B takes 2); what comes late first is F1 on rank 0, at 6 instead of 1"
        in text
    )
    assert "needs F0 on rank 1" in str(judge(exercises.get("one_f_one_b_order"), wrong["puts_the_backward_first"]))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("f0", "'f0' is no action; expected one of F, B and a micro-batch"),
        ("W0", "'W0' is no action"),
        ("F", "'F' is no action"),
        ("F7", "F7, but the micro-batches are 0 to 0"),
        ("B0", "B0 after 0 of 1 forwards"),
        ("F0", "B0 of stage 0 is missing"),
    ],
)
def test_a_word_that_cannot_be_read(word, says):
    assert says in told("gpipe_order", lambda rank, ranks, micro_batches: [word])


def test_nothing_returned():
    assert "rank 0: returned None; expected a list of words" in told("gpipe_order", lambda *args: None)
    assert "returned None; expected a text of 3 lines" in told("repair", lambda schedule: None)
    assert "returned None; expected a text of 2 lines" in told("beat_1f1b", lambda *args: None)
    assert "expected 1, got None" in told("warm_up", lambda *args: None)
    assert "rank 0 did nothing; expected each micro-batch once" in told("one_f_one_b_loop", lambda *args: None)


def test_a_schedule_is_as_good_as_its_text():
    fn = copied("repair")
    verdict = labkit.check("repair", lambda schedule: Schedule.parse(fn(schedule)))
    assert verdict.right
    assert "ends at 18; the ranks hold 3, 2, 1 micro-batches at their peaks   p = 3, m = 4" in str(verdict)


def test_a_backward_before_its_forward():
    def goes_back_first(micro_batches, forward, backward, shape):
        last = dist.get_rank() == dist.get_world_size() - 1
        backward(0, None if last else torch.zeros(shape))
        forward(0, torch.zeros(shape) if last else None)

    text = told("one_f_one_b_loop", goes_back_first)
    assert "B0 was given another tensor than its neighbour made for it" in text

    def goes_back_first_on_the_last(micro_batches, forward, backward, shape):
        if dist.get_rank() == dist.get_world_size() - 1:
            backward(0, None)

    text = told("one_f_one_b_loop", goes_back_first_on_the_last)
    assert "rank 1: backward of micro-batch 0 was called while it held no forward of it" in text


def test_labkits_engine_is_borrowed():
    def runs_labkits(micro_batches, forward, backward, shape):
        labkit.pipeline.one_f_one_b(dist.get_world_size(), micro_batches)

    assert labkit.check("one_f_one_b_loop", runs_labkits).kind == "borrowed"
    assert not exercises.get("one_f_one_b_loop").allowed


@pytest.mark.parametrize("name", ["repair", "beat_1f1b"])
def test_checker_and_simulator_may_be_asked(name):
    """They judge a schedule, and make none."""
    fn = copied(name)

    def asks(*args):
        made = fn(*args)
        schedule = Schedule.parse(made)
        schedule.check()
        simulate(schedule)
        return made

    assert labkit.check(name, asks).right


#: What the pseudo-code of 6.1's and 6.4's third hints says, as Python.
PHRASES = [
    ("−", "-"), (r"the smaller of (.*) and (.*)", r"min(\1, \2)"), (r"the larger of (.*) and (.*)", r"max(\1, \2)"),
    (r"the warm-up: F0 … F\((.*) - 1\)", r"order = [f'F{i}' for i in range(\1)]"),
    (r"for i in 0 … (.*) - 1:", r"for i in range(\1):"), (r"F\((.*)\), then B\(i\)", r"order += [f'F{\1}', f'B{i}']"),
    (r"the cool-down: B\((.*)\) … B\((.*) - 1\)", r"return order + [f'B{i}' for i in range(\1, \2)]"),
    (r"free = W if there is any W, else (\w)", r"free = 'W' if any(word[0] == 'W' for word in words) else '\1'"),
    (r"held, peak = 0, 0", "held = peak = 0"), (r"for each word:", "for word in words:"),
    (r"(F|free): +held (.) 1", r"if word[0] == '\1': held = held \2 1"), ("'free'", "free"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "blanks", "end"),
    [
        ("one_f_one_b_order", ["micro_batches", "warm_up + i", "micro_batches - warm_up"], ""),
        ("peak_stash", ["B", "free"], "    return peak"),
    ],
)
def test_a_hint_is_right_when_its_blanks_are_filled(name, blanks, end):
    exercise = exercises.get(name)
    code = exercise.hints()[2].strip()
    assert code.count("____") == len(blanks)
    for blank in blanks:
        code = code.replace("____", blank, 1)
    for phrase, python in PHRASES:
        code = re.sub(phrase, python, code)
    body = "\n".join(f"    {line}" for line in code.splitlines())
    space = {}
    exec(f"def {name}({', '.join(inspect.signature(exercise.solution).parameters)}):\n{body}\n{end}", space)
    verdict = labkit.check(name, space[name])
    assert verdict.right, f"{verdict}\n{body}"


# Impostors


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setenv("LABKIT_STATIC", "1")
    return labkit.impostors("06")


@pytest.mark.soak  # nbval of 06 takes them too
def test_each_impostor_has_symptoms_of_its_own(line):
    verdict = judge(line.exercise, line.exercise.solution)
    assert verdict.right, str(verdict)
    rows = {row[0]: row[1:] for row in line.symptoms}
    *_, allowed = line.symptoms
    assert rows["A"] == ("deadlocked", "", "", "")
    assert {letter: rows[letter][1] for letter in "BCD"} == {
        "B": "5 of 5 layers",
        "C": "5 of 5 layers, each 0.25 ×",
        "D": "4 of 5 layers; layer 4 has none",
    }
    assert all(row[0].endswith("; one process 0.594 → 0.509") for letter, row in rows.items() if letter in "BCD")
    assert rows["C"][0].startswith("0.594 →"), "the first loss is right, what is learnt from it is not"
    assert all(rows[letter][2:] == allowed[3:] == ("24", "576") for letter in "BCD")
    assert len({json.dumps(row) for row in rows.values()}) == 5
    assert len({len(row) for row in line.symptoms} | {len(line.columns)}) == 1
    assert "2 ranks, 4 stages, 5 layers, m = 4" in line._repr_mimebundle_()["text/html"]


def test_one_process_is_torchs(line):
    """The loss and gradients of the whole batch, by `torch.nn.Sequential`."""
    net = lineup.Net().double()
    model = torch.nn.Sequential(*(torch.nn.Sequential(layer, torch.nn.Tanh()) for layer in net.layers))
    inputs, targets = (t.double() for t in lineup.data()[0])
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    whole = lineup.in_one_process()
    assert whole["losses"][0] == pytest.approx(loss.item(), rel=1e-12)
    for n, layer in enumerate(net.layers):
        want = torch.cat([layer.weight.grad.flatten(), layer.bias.grad])
        assert torch.allclose(torch.tensor(whole[str(n)], dtype=torch.float64), want, rtol=1e-12)
    assert lineup.first_gradients(line.case, lineup.expected(line.case), lineup.expected(line.case)) == "none"
    assert [set(each) for each in lineup.expected(line.case)] == [{"losses", "0", "1", "3"}, {"losses", "2", "4"}]


def test_a_diagnosis(line):
    assert len(line.ask("A").choices) == 4
    line.ask("B").note("a rank receives in another order than the other one sends")
    assert line.open("B").startswith("That is it")
    assert "for action in sorted(pair)" in line.open("B")
    line.ask("D").note("the gradients are divided by m twice")
    assert line.open("D").startswith("No: every stage gets L // 4 layers")
    assert "LAYERS // STAGES" in line.open("D")
