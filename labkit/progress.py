"""What a learner has done: one small JSON file in their home, which survives a kill at any moment.

    {"version": 1,
     "exercises": {"ring_reduce_scatter": {"verdict": "wrong", "best": "wrong", "tries": 2, "hints": 1}},
     "guesses": {"collectives.bytes": {"guess": 16.0, "answer": 15.98}}}

With ``LABKIT_CLASS_DIR`` set, a copy goes to that folder, for the instructor of a class (`labkit class`).

Two kernels may write at once: each change is made under a lock, to what the file holds at that moment, and the new file
takes the place of the old in one step. Where pictures are static (nbval, HTML) nothing is read or written: what a
committed notebook shows must not depend on who runs it.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Kinds of verdict, from "not yet" to "done"; `labkit.checks.verdict` has no others.
ORDER = ("not_attempted", "crashed", "deadlocked", "wrong", "borrowed", "wasteful", "right")


def path() -> Path:
    """``LABKIT_PROGRESS``, else ``progress.json`` in the user's data directory."""
    if given := os.environ.get("LABKIT_PROGRESS"):
        return Path(given)
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "labkit" / "progress.json"


def is_kept() -> bool:
    """Whether anything is read or written."""
    return os.environ.get("LABKIT_STATIC", "") in ("", "0")


def read() -> dict[str, Any]:
    """All that is known; nothing when there is no file yet, or none that can be read."""
    empty: dict[str, Any] = {"version": 1, "exercises": {}, "guesses": {}}
    if not is_kept():
        return empty
    try:
        found = cleaned(json.loads(path().read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return empty
    return {**empty, **found} if found is not None else empty


def cleaned(found: Any) -> dict[str, Any] | None:
    """What is well-formed in a file that somebody may have edited; ``None`` if it is no progress at all.

    >>> cleaned({"exercises": {"barrier": {}}, "guesses": {"a": 3, "b": {"guess": 1}}})
    {'exercises': {}, 'guesses': {'b': {'guess': 1}}}
    """
    if not isinstance(found, dict):
        return None
    exercises, guesses = found.get("exercises"), found.get("guesses")
    return {
        "exercises": {k: e for k, e in _items(exercises) if _is_entry(e)},
        "guesses": {k: g for k, g in _items(guesses) if isinstance(g, dict) and "guess" in g},
    }


def _items(found: Any) -> list[tuple[str, Any]]:
    return list(found.items()) if isinstance(found, dict) else []


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and {"verdict", "best", "tries", "hints"} <= entry.keys()
        and entry["best"] in ORDER
        and isinstance(entry["tries"], int)
        and isinstance(entry["hints"], int)
    )


def note_check(exercise: str, verdict: str) -> None:
    """A function was checked."""

    def change(known: dict[str, Any]) -> None:
        entry = _entry(known, exercise)
        entry["tries"] += verdict != "not_attempted"
        entry["verdict"] = verdict
        entry["best"] = max(entry["best"], verdict, key=ORDER.index)

    _update(change)


def note_hint(exercise: str, number: int) -> None:
    """A hint was given."""

    def change(known: dict[str, Any]) -> None:
        entry = _entry(known, exercise)
        entry["hints"] = max(entry["hints"], number)

    _update(change)


def note_guess(key: str, guess: Any) -> None:
    """A guess was noted; it is kept beside the answer. Once that was shown, the guess before it stays."""

    def change(known: dict[str, Any]) -> None:
        if "answer" not in (entry := known["guesses"].setdefault(key, {})):
            entry["guess"] = guess

    _update(change)


def note_answer(key: str, answer: Any) -> None:
    """The answer to a question was shown to somebody who had guessed."""

    def change(known: dict[str, Any]) -> None:
        if key in known["guesses"]:
            known["guesses"][key]["answer"] = answer

    _update(change)


def _entry(known: dict[str, Any], exercise: str) -> dict[str, Any]:
    return known["exercises"].setdefault(
        exercise, {"verdict": "not_attempted", "best": "not_attempted", "tries": 0, "hints": 0}
    )


def _update(change: Callable[[dict[str, Any]], None]) -> None:
    """Read, change and replace the file, alone. A home that cannot be written is told once, and stops nobody."""
    if not is_kept():
        return
    try:
        with _alone():
            known = read()
            change(known)
            _replace(path(), known)
        if shared := os.environ.get("LABKIT_CLASS_DIR"):  # the learner's own choice: guesses and verdicts, no code
            _replace(Path(shared) / f"{learner()}.json", known)
    except OSError as error:
        warnings.warn(f"progress is not kept: {error.strerror}; set LABKIT_PROGRESS to a file that can be written",
                      stacklevel=3)  # fmt: skip


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time; the system lifts the lock when its holder dies."""
    import fcntl

    path().parent.mkdir(parents=True, exist_ok=True)
    with open(path().with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def learner() -> str:
    """What a class calls this learner: ``LABKIT_LEARNER``, else the user's name on this host."""
    name = os.environ.get("LABKIT_LEARNER") or getpass.getuser()
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".") or "learner"


def _replace(target: Path, known: dict[str, Any]) -> None:
    """The whole new file beside the old one, on the disk, then in its place."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".progress-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # an instructor reads it in a class's folder
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
