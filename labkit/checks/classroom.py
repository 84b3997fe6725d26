"""`labkit class`: where a class stands, from the folder into which its learners chose to write."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from labkit import progress
from labkit.checks.exercises import NAMES
from labkit.show.words import count, say

SHOWN = 8  #: names in a line


def text(folder: Path) -> str:
    """The report: a line an exercise, with who has it right and who is at it; then a histogram a question.

    Raises:
        ValueError: There is no such folder.
    """
    folder = folder.expanduser()
    if not folder.is_dir() or folder == Path():
        raise ValueError(f"{str(folder)!r} is no folder: name the class's, or set LABKIT_CLASS_DIR to it")
    learners = _read(folder)
    lines = [count("class.learners", len(learners))]
    for name, chapter in NAMES.items():
        entries = {who: known["exercises"][name] for who, known in learners.items() if name in known["exercises"]}
        right = sorted(who for who, entry in entries.items() if entry["best"] == "right")
        busy = sorted(who for who, entry in entries.items() if entry["tries"] and entry["best"] != "right")
        lines.append(f"  {chapter}  {name:24}{say('class.head', done=len(right), all=len(learners))}")
        lines += [f"        {say('class.right')} {_names(right)}"] if right else []
        lines += [f"        {say('class.busy')} {_names(busy)}"] if busy else []
    return "\n".join([*lines, *_histograms(learners)])


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    """Learner → what is known; a file that cannot be read is left out. All can write here: take nothing for granted."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        if not file.is_file():  # a pipe would never end
            continue
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if (well_formed := progress.cleaned(known)) is not None:
            found[_one_line(file.stem)] = well_formed
    return found


def _names(who: list[str]) -> str:
    more = [say("class.more", n=len(who) - SHOWN)] if len(who) > SHOWN else []
    return ", ".join([*who[:SHOWN], *more])


def _histograms(learners: dict[str, dict[str, Any]]) -> list[str]:
    """A bar a guess, the most frequent first."""
    keys = sorted({key for known in learners.values() for key in known["guesses"]})
    lines = []
    for key in keys:
        guesses = [known["guesses"][key] for known in learners.values() if key in known["guesses"]]
        answers = [g["answer"] for g in guesses if "answer" in g]
        answer = _one_line(answers[0]) if answers else say("class.open")
        lines.append(say("class.guesses", question=_one_line(key), answer=answer))
        for guess, n in Counter(_one_line(g["guess"]) for g in guesses).most_common():
            lines.append(f"  {'█' * n} {n}  {guess}")
    return lines


def _one_line(written: Any) -> str:
    """What somebody else wrote, as it may stand on a terminal; 12 for 12.0."""
    told = f"{written:,.15g}" if isinstance(written, float) else str(written)
    return "".join(c if c.isprintable() else " " for c in told)[:80]
