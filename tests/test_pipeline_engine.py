"""The engine on real ranks against one process in float64, the theory's bytes, the simulator's clock."""

from __future__ import annotations

import random

import programs_pipeline as programs
import pytest
import torch
from timing import on_a_busy_host, on_the_clock

import labkit
from labkit import pipeline
from labkit.pace import Link, Pace
from labkit.pipeline.schedule import Action, needs


def every(ranks: int, m: int, chunks: int = 1) -> list[pipeline.Schedule]:
    if chunks > 1:
        found = [pipeline.interleaved(ranks, m, chunks), pipeline.breadth_first(ranks, m, chunks)]
        return [*found, pipeline.zero_bubble_v(ranks, m)] if chunks == 2 else found
    return [pipeline.gpipe(ranks, m), pipeline.one_f_one_b(ranks, m), pipeline.zero_bubble_h1(ranks, m),
            pipeline.zero_bubble_h2(ranks, m)]  # fmt: skip


#: Ranks, micro-batches, stages a rank; those tried every time, and those in the soak.
OFTEN = ((1, 3, 1), (2, 5, 1), (3, 4, 1), (2, 4, 2))
SELDOM = (
    (3, 6, 2),
    (1, 1, 1),
    (1, 2, 2),
    (2, 1, 1),
    (2, 2, 1),
    (2, 8, 2),
    (2, 3, 3),
    (3, 1, 1),
    (4, 2, 1),
    (4, 8, 1),
    (4, 8, 2),
)
CASES = [
    pytest.param(schedule, name, batched, marks=[pytest.mark.soak] * (sizes in SELDOM),
                 id=f"{schedule.name}-{sizes}-{name}")
    for sizes in OFTEN + SELDOM
    for schedule in every(*sizes)
    for name, batched in (("tiny_gpt", False), ("tiny_llama", True))
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "name", "batched"), CASES)
def test_steps_are_those_of_one_process(schedule, name, batched):
    """Two steps that add up, then an evaluation: uneven layers, micro-batches and token counts, tied; faults 13, 28, 31
    and 35. Every other model's messages travel in batches, as over NCCL."""
    layers = schedule.stages + 1
    run = labkit.run(programs.against_one_process, schedule, layers, schedule.micro_batches + 2, name,
                     batched=batched, ranks=schedule.ranks)  # fmt: skip
    assert max(run.values) <= 1e-12


def at_random(seed: int, ranks: int) -> pipeline.Schedule:
    """Any legal order: one action after the other, of those that could begin."""
    draw = random.Random(seed)
    chunks, m, split = draw.choice((1, 2, 3)), draw.randint(1, 4), draw.random() < 0.5
    stages, rows, done = ranks * chunks, [[] for _ in range(ranks)], set()
    placement = tuple(draw.sample([r for r in range(ranks) for _ in range(chunks)], stages))
    left = {Action(kind, n, s) for kind in ("FBW" if split else "FB") for n in range(m) for s in range(stages)}
    while left:
        ready = sorted(a for a in left if all(needed in done for needed in needs(a, stages)))
        action = draw.choice(ready)
        rows[placement[action.stage]].append(action)
        done.add(action)
        left.remove(action)
    return pipeline.Schedule(name=f"at random, {seed}", ranks=ranks, micro_batches=m, stages=stages, actions=rows,
                             placement=placement)  # fmt: skip


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 108), marks=pytest.mark.soak)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_check_accepts_runs(ranks, seeds):
    """Any placement, any number of stages a rank; next and previous rank may be the same (fault 31)."""
    schedules = [at_random(seed, ranks) for seed in seeds]
    for schedule in schedules:
        schedule.check()
    assert max(max(off) for off in labkit.run(programs.each_of, schedules, ranks=ranks, timeout=300).values) <= 1e-12


@pytest.mark.parametrize("schedule", [pipeline.one_f_one_b(2, 3), pipeline.zero_bubble_h1(2, 3)], ids=lambda s: s.name)
def test_beside_data_parallelism(schedule):
    run = labkit.run(programs.against_one_process, schedule, 3, 4, dp=2, ranks=4)
    assert max(run.values) <= 1e-12
    reduced = [e for e in run.trace.of(0) if e.name == "all_reduce" and e.group.startswith("dp")]
    assert len([e for e in reduced if e.nbytes > 16]) == 2, "one a stage and step"


def test_tied_embeddings_stay_the_same_bits():
    values = labkit.run(programs.tied_after_training, 10, ranks=3).values
    assert torch.equal(values[0][0], values[2][1])


def test_stages_may_hand_on_several_tensors():
    assert max(labkit.run(programs.several_tensors, ranks=3).values) <= 1e-12


@pytest.mark.parametrize("schedule", [pipeline.gpipe(3, 5), pipeline.one_f_one_b(3, 5)], ids=lambda s: s.name)
def test_the_stash_is_so_many_micro_batches_to_the_byte(schedule):
    """m of GPipe's, min(m, p − r) of 1F1B's, by the memory meter."""
    values = labkit.run(programs.peak_activations, schedule, 10, ranks=3).values
    assert [held / one for held, one in values] == list(schedule.stash())


@pytest.mark.parametrize("schedule", [pipeline.one_f_one_b(3, 4), pipeline.interleaved(2, 4, 2), pipeline.gpipe(2, 3)])
def test_bytes_between_stages(schedule):
    """Each border is crossed m times forward and m times backward, by b/m·s·h elements of 8 bytes."""
    rows = 2 * schedule.micro_batches
    trace = labkit.run(programs.traffic, schedule, rows, ranks=schedule.ranks).trace
    for rank in range(schedule.ranks):
        sends = [e for e in trace.of(rank) if e.kind == "send" and e.labels.get("training_step") == 1]
        made = [m for a in schedule.actions[rank] if (m := schedule.message(a))]
        assert [e.nbytes for e in sends] == [2 * 6 * 8 * 8] * len(made)
        assert [e.peer for e in sends] == [m.target for m in made]


FREE, SLOW = Link(latency=0.0, bandwidth=1e12), Link(latency=0.0, bandwidth=16 / 0.005)  # 16 bytes in 5 ms


@on_a_busy_host
@pytest.mark.alone
@pytest.mark.parametrize(
    ("schedule", "link", "expected"),
    [
        (pipeline.gpipe(4, 8), FREE, 660), (pipeline.one_f_one_b(4, 8), SLOW, 740),
        *(pytest.param(s, link, None, marks=pytest.mark.soak) for link in (FREE, SLOW) for s in
          (pipeline.gpipe(4, 8), pipeline.one_f_one_b(4, 8), pipeline.interleaved(4, 8, 2),
           pipeline.zero_bubble_h1(4, 8))),
    ],
)  # fmt: skip
def test_paced_makespans_are_the_simulators(schedule, link, expected):
    """F 20, B 40 ms (20 and 20 where it is split), four ranks on whatever this host has."""
    backward, weight = (0.020, 0.020) if schedule.split else (0.040, 0.0)
    communication = 0.005 if link is SLOW else 0.0
    planned = pipeline.simulate(schedule, 0.020, backward, weight, communication)
    if expected:
        assert planned.makespan == pytest.approx(expected / 1000)
    compute = {"set-up": 1.0, "F": 0.020, "B": backward} | ({"W": weight} if weight else {})
    hardware = Pace(compute=compute, link=link)
    run = labkit.run(programs.paced, schedule, ranks=4, pace=hardware)
    second = [e for e in run.trace.events if e.labels.get("training_step") == 1 and e.name in ("F", "B", "W")]
    took = max(e.end for e in second) - min(e.start for e in second)
    with on_the_clock():
        assert took == pytest.approx(planned.makespan, rel=0.03)


def test_a_step_cut_short_leaves_no_trace():
    said, off = labkit.run(programs.cut_short, ranks=1).values[0]
    assert said == "no loss"
    assert off <= 1e-12


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("ranks", "the schedule is for 3 ranks, and the group has 2"),
        ("stages", "expected a dictionary with stages [1]"),
        ("module", "is str: expected a module"), ("wrapped", "give the module itself, and data_parallel_group"),
        ("illegal", "IllegalSchedule"), ("dual", "puts a stage on several ranks"),
        ("few", "1 inputs and 1 targets in 2 micro-batches"), ("targets", "4 inputs and 3 targets"),
        ("type", "TypeError: inputs is list"), ("gradient", "pass inputs.detach()"),
        ("loss", "TypeError: loss_fn returned Tensor"), ("shared stage", "one PipelineStage stands for several stages"),
        ("tied", "parameters tied as 'one'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(what, told):
    assert any(told in said for said in labkit.run(programs.refused, what, ranks=2).values)


@pytest.mark.parametrize("kind", ["", "weight", "gradient", "hook", "checkpoint, reentrant", "checkpoint", "narrow"])
def test_a_backward_in_two_halves_is_the_whole(kind):
    """Only the module's own weights are put off, and only in the engine's backward."""
    assert max(labkit.run(programs.in_two_halves, kind, ranks=2).values) <= (1e-2 if kind == "narrow" else 1e-12)


@pytest.mark.parametrize(("count", "dtype", "rows"), [(0.05, "float64", 7), (1, "float16", 70000)])
def test_counts_are_what_loss_fn_says(count, dtype, rows):
    """Below 1, and above the largest number of the gradients' type (whose sum of 140 micro-batches is off by 1.6 %)."""
    ((loss, grad),) = labkit.run(programs.small_counts, count, dtype, rows, ranks=1).values
    assert abs(loss) <= (1e-12 if dtype == "float64" else 1e-3)
    assert grad <= (1e-12 if dtype == "float64" else 0.02)


def test_a_frozen_tie_gets_no_gradient():
    assert all(all(found) for found in labkit.run(programs.frozen_tie, ranks=2).values)


def test_parts_may_have_no_layer():
    assert labkit.run(programs.parts_without_layers, ranks=1).values == [0.0]


def test_after_a_step_cut_short_another_is_refused():
    """Rank 0 had sent, and fails; rank 1 fails before it has received."""
    for first, second in labkit.run(programs.after_a_step_cut_short, ranks=2, timeout=20).values:
        assert first == "no"
        assert "an earlier step was cut short" in second


def test_batches_of_two_sizes_are_named():
    with pytest.raises(labkit.RunFailed, match="has 3 sequences on this rank and 2 on the one before"):
        labkit.run(programs.other_batches, ranks=2, timeout=20)


def test_another_shape_than_agreed_is_an_error():
    """Of micro-batches of one shape; the other rank is not left waiting."""
    with pytest.raises(labkit.RunFailed, match=r"stage 0 made \(4, 4\).*agreed on \(2, 4\)"):
        labkit.run(programs.grows, ranks=2)
