"""`labkit progress`: what a learner has done, a line an exercise."""

from __future__ import annotations

from typing import Any

from labkit import progress
from labkit.checks.exercises import NAMES
from labkit.checks.verdict import SIGNS, kind_in_words
from labkit.show.words import count, say


def text(known: dict[str, Any] | None = None) -> str:
    """The report. `known`: what `labkit.progress.read` gives; left out, what is on disk.

    >>> print(text({"exercises": {"barrier": {"verdict": "wrong", "best": "right", "tries": 3, "hints": 1}},
    ...             "guesses": {"bytes": {"guess": 4.0, "answer": 4.0}}}).splitlines()[6])
      02  barrier               ✓ right                3 tries, 1 hint
    """
    known = progress.read() if known is None else known
    width = max(map(len, NAMES)) + 3
    lines = [f"  {chapter}  {name:{width}}{_standing(known['exercises'].get(name))}" for name, chapter in NAMES.items()]
    answered = [g for g in known["guesses"].values() if "answer" in g]
    met = sum(g["guess"] == g["answer"] for g in answered)
    done = sum(known["exercises"].get(name, {}).get("best") == "right" for name in NAMES)
    head = say("progress.head", done=done, all=len(NAMES))
    last = say("progress.guesses", noted=len(known["guesses"]), answered=len(answered), met=met)
    return "\n".join([head, *(line.rstrip() for line in lines), last])


def _standing(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return ""
    told = [count("progress.tries", entry["tries"])]
    if entry["hints"]:
        told.append(count("progress.hints", entry["hints"]))
    return f"{SIGNS[entry['best']]} {kind_in_words(entry['best']):20} {', '.join(told)}"
