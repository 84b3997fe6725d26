"""Hints, solutions, attempts: what a new kernel knows, what is no attempt, pseudo-code that holds as it stands."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit import progress
from labkit.checks import exercises
from labkit.checks.exercises import ring_reduce_scatter as scatter


@pytest.fixture
def another_kernel(tmp_path, monkeypatch):
    """Forgets what this kernel knows, as a restart does."""
    from labkit import checks

    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.delenv("LABKIT_STATIC", raising=False)

    def restart():
        checks._given.clear()
        checks._tried.clear()

    restart()
    return restart


def test_hints_come_one_by_one_and_the_solution_after_an_attempt(another_kernel):
    heads = [labkit.hint("exchange").splitlines()[0] for _ in range(4)]
    assert heads == ["hint 1 of 3", "hint 2 of 3", "hint 3 of 3", "hint 3 of 3"]
    assert "after an attempt" in labkit.solution("exchange")
    labkit.check("exchange", lambda tensor: tensor)
    assert labkit.solution("exchange").startswith("def exchange(")


def test_a_new_kernel_knows_hints_and_tries(another_kernel):
    assert labkit.hint("barrier").startswith("hint 1 of 3")
    labkit.check("barrier", lambda: None)
    another_kernel()
    assert labkit.hint("barrier").startswith("hint 2 of 3")
    assert labkit.solution("barrier").startswith("def barrier(")


SHIPPED = """
def exchange(tensor):
    theirs = torch.empty_like(tensor)  # a note
    dist.recv(theirs, dist.get_rank() ^ 1)

    dist.send(tensor, dist.get_rank() ^ 1)
    return theirs
"""


def written(source, name):
    space = {"torch": torch, "dist": dist, "__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), space)
    return space[name]


def test_what_the_notebook_shows_at_first_is_no_attempt(another_kernel):
    assert labkit.check("exchange", written(SHIPPED, "exchange")).kind == "deadlocked"
    assert "after an attempt" in labkit.solution("exchange")
    assert progress.read()["exercises"] == {}
    labkit.check("exchange", written(SHIPPED.replace("return theirs", "return tensor"), "exchange"))
    assert progress.read()["exercises"]["exchange"]["tries"] == 1
    assert not exercises.get("exchange").is_shipped(len)


def test_the_notebook_holds_what_is_shipped():
    cells = json.loads(
        Path(__file__).parents[1].joinpath("notebooks", "02_collectives.ipynb").read_text(encoding="utf-8")
    )["cells"]
    (source,) = ("".join(c["source"]) for c in cells if "".join(c["source"]).startswith("def exchange("))
    assert exercises.get("exchange").is_shipped(written(source.split("\n\n\n")[0], "exchange"))


#: What the pseudo-code of a hint says, as Python.
PHRASES = [
    (r" *#.*", ""), ("−", "-"), ("·", "*"), (r"(\w+) = (.*)$", r"\1 = \2"), (r"while (.*):", r"while \1:"),
    (r"for step in 1 … N-1:", "for step in range(1, N):"),
    (r"start to send a number to (.*)", r"works = [dist.isend(torch.zeros(1), \1)]"),
    (r"receive a number from (.*)", r"dist.recv(torch.zeros(1), \1)"),
    (r"^( *)send to (.*)", r"\1dist.send(tensor, \2)"), (r"^( *)receive from (.*)", r"\1dist.recv(tensor, \2)"),
    (r"start to send (.*) to the right", r"works = [dist.isend(\1, (rank + 1) % N)]"),
    (r"start to receive from the left, into a new tensor as large as (.*)",
     r"new = torch.empty_like(\1); works.append(dist.irecv(new, (rank - 1) % N))"),
    (r"start to receive into (.*) from the left", r"works.append(dist.irecv(\1, (rank - 1) % N))"),
    (r"wait for (both|the send)", "[work.wait() for work in works]"), (r"add what came to (.*)", r"\1.add_(new)"),
    (r"your ring_reduce_scatter, on the whole tensor", "ring_reduce_scatter(tensor)"),
    (r"start to send the tensor to the partner", "works = [dist.isend(tensor, rank ^ 1)]"),
    (r"start to receive into (.*) from the partner",
     r"\1 = torch.empty_like(tensor); works.append(dist.irecv(\1, rank ^ 1))"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters", "blanks"),
    [
        ("ring_reduce_scatter", "tensor", ["(rank - step - 1) % N"] * 2),
        ("ring_all_gather", "tensor", ["(rank - step + 1) % N"]),
        ("ring_all_reduce", "tensor", ["(rank - step + 1) % N", "(rank - step) % N"]),
        ("tree_broadcast", "tensor, root", ["distance"] * 2),
        ("barrier", "", ["distance"]),
        ("exchange", "tensor", ["theirs"] * 2),
    ],
)
def test_a_hint_is_right_when_its_blanks_are_filled(name, parameters, blanks):
    """Word for word: nothing is added but what each phrase says."""
    text = exercises.get(name).hints()[2].strip("\n")
    assert text.count("____") == len(blanks)
    for blank in blanks:
        text = text.replace("____", blank, 1)
    body = []
    for line in text.splitlines():
        for phrase, python in PHRASES:
            line = re.sub(phrase, python, line)
        body.append(f"    {line}")
    head = f"def {name}({parameters}):\n    rank, N = dist.get_rank(), dist.get_world_size()\n"
    helper = f"{inspect.getsource(scatter.ring_reduce_scatter)}\n" if name == "ring_all_reduce" else ""
    fn = written("\n".join([helper + head, *body]), name)
    verdict = labkit.check(name, fn)
    assert verdict.right, f"{verdict}\n" + "\n".join(body)
