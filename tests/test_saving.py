"""Saves of every form, loaded at other numbers of ranks and in other forms; and what a kill leaves."""

from __future__ import annotations

import random

import programs_saving as saving
import pytest
import torch

import labkit
from labkit.zero import consolidate, latest

CLOSE = {"rel": 1e-12}


@pytest.mark.parametrize(
    ("form", "ranks", "then", "on"),
    [("stage 1", 4, "stage 1", 3), ("stage 3", 3, "stage 3", 2), ("stage 2", 2, "stage 3", 4), ("stage 3", 4, "ddp", 2),
     ("distributed", 3, "stage 2", 1)],
)  # fmt: skip
def test_a_training_goes_on_elsewhere(tmp_path, form, ranks, then, on):
    path, losses = labkit.run(saving.train_and_save, tmp_path, form, ranks=ranks).values[0]
    assert path == str(latest(tmp_path)) == str(tmp_path / "step-00000003")
    for extra, again in labkit.run(saving.load_and_train, path, then, ranks=on).values:
        assert extra == {"seen": [1, 2]}
        assert again == pytest.approx(losses, **CLOSE)


@pytest.mark.soak
@pytest.mark.parametrize("then", saving.FORMS[1:])
@pytest.mark.parametrize("form", saving.FORMS[1:])
def test_every_form_goes_on_in_every_other(tmp_path, form, then):
    for ranks in (1, 2, 3, 4):
        path, losses = labkit.run(saving.train_and_save, tmp_path / str(ranks), form, ranks=ranks).values[0]
        for on in (1, 2, 3, 4):
            _, again = labkit.run(saving.load_and_train, path, then, ranks=on).values[0]
            assert again == pytest.approx(losses, **CLOSE), (ranks, on)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("stage 1", torch.optim.AdamW),
        ("stage 3", torch.optim.SGD),
        pytest.param("stage 1", torch.optim.SGD, marks=pytest.mark.soak),
        pytest.param("stage 3", torch.optim.AdamW, marks=pytest.mark.soak),
    ],
)
def test_plain_torch_goes_on(tmp_path, form, kind):
    path, losses = labkit.run(saving.train_and_save, tmp_path, form, kind=kind, ranks=3).values[0]
    plain = consolidate(path)
    model, optimizer = saving.made("plain", seed=5, kind=kind)
    model.load_state_dict(plain["model"])  # strict: every name, tied ones too
    optimizer.load_state_dict(plain["optimizer"])
    assert plain["extra"] == {"seen": [1, 2]}
    assert saving.train(model, optimizer, 3, first=3) == pytest.approx(losses, **CLOSE)


def test_masters_are_saved_beside_narrow_parameters(tmp_path):
    path, losses = labkit.run(saving.train_and_save, tmp_path, "stage 1", torch.bfloat16, ranks=2).values[0]
    for _, again in labkit.run(saving.load_and_train, path, "stage 1", torch.bfloat16, ranks=2).values:
        assert again == losses
    plain = consolidate(path)
    master, narrow = plain["masters"]["words.weight"], plain["model"]["words.weight"]
    assert (master.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(master.bfloat16(), narrow)
    assert not torch.equal(master, narrow.float())
    wide, _ = labkit.run(saving.load_and_train, path, "stage 3", torch.float32, ranks=2).values[0]
    assert wide == {"seen": [1, 2]}


@pytest.mark.parametrize(
    ("what", "ranks", "words"),
    [("twice", 2, "is there already"), ("no optimizer", 2, "the save has no optimizer"),
     ("another model", 2, "in this model"), ("another part", 2, "holds no part 'tp1', but all"),
     ("foreign optimizer", 2, "a parameter that the module has not"),
     ("two groups, one part", 4, "are two groups, and both save part 'all'")],
)  # fmt: skip
def test_what_cannot_be_is_refused_on_every_rank(tmp_path, what, ranks, words):
    with pytest.raises(labkit.RankError, match=words) as failure:
        labkit.run(saving.refused, tmp_path, what, ranks=ranks)
    assert failure.value.ranks == list(range(ranks))


def test_each_part_of_a_mesh_comes_back(tmp_path):
    for before, after in labkit.run(saving.parts_of_a_mesh, tmp_path, ranks=4).values:
        assert torch.equal(before, after)


def test_what_was_cut_short_is_no_save(tmp_path):
    assert latest(tmp_path) is None
    (tmp_path / ".step-00000009.part" / "all").mkdir(parents=True)
    (tmp_path / "step-x").mkdir()
    assert latest(tmp_path) is None
    labkit.run(saving.train_and_save, tmp_path, "stage 1", ranks=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-x"]
    with pytest.raises(FileNotFoundError, match="holds no part 'all'"):
        consolidate(tmp_path / "step-x")


@pytest.mark.parametrize("form", ["stage 1", "stage 3"])
def test_a_save_from_before_the_first_step_leaves_no_state(tmp_path, form):
    assert labkit.run(saving.loaded_before_the_first_step, tmp_path, form, ranks=2).values == [[], []]


def die_and_go_on(directory, times):
    """What was loaded after each kill, and how many saves were cut short."""
    rng, step, found, cut_short = random.Random(0), 0, [], 0
    for _ in range(times):
        with pytest.raises(labkit.RankDied):
            labkit.run(saving.save_and_die, directory, step, rng.uniform(0.05, 1.0), ranks=3)
        cut_short += len(list(directory.glob(".step-*.part")))
        if (last := labkit.run(saving.load_latest, directory, ranks=2).values[0]) is not None:
            found.append(last)
            assert last[1] >= step - 1, "a complete save was lost"
            step = last[1] + 1
    return found, cut_short


def check_what_was_loaded(found):
    """Each is a save by its name, and goes on as a training that nobody has disturbed."""
    whole = saving.train(*saving.made("plain"), found[-1][1] + 2)
    for name, step, loss in found:
        assert name == f"step-{step:08d}"
        assert loss == pytest.approx(whole[step + 1], **CLOSE)


def test_a_kill_loses_nothing(tmp_path):
    found, _ = die_and_go_on(tmp_path, 2)
    assert found
    check_what_was_loaded(found)


@pytest.mark.soak
def test_twenty_kills_lose_nothing(tmp_path):
    found, cut_short = die_and_go_on(tmp_path, 20)
    assert len(found) > 10
    assert cut_short > 3, "the kills came between saves, and show nothing"
    check_what_was_loaded(found)
