"""What a learner has done: one small JSON file in their home, which survives a kill at any moment.

    {"version": 1,
     "exercises": {"ring_reduce_scatter": {"verdict": "wrong", "best": "wrong", "tries": 2, "hints": 1}},
     "guesses": {"collectives.bytes": {"guess": 16.0, "answer": 15.98}}}

With ``LABKIT_CLASS_DIR`` set, a copy goes to that folder, for the instructor of a class (`labkit class`). What a file
holds besides, from a later version, stays in it.

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
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Kinds of verdict, from "not yet" to "done"; `labkit.checks.verdict` has no others.
ORDER = ("not_attempted", "crashed", "deadlocked", "wrong", "borrowed", "wasteful", "right")
_PREFIX = ".progress-"  #: of a file that is being written


def path() -> Path:
    """``LABKIT_PROGRESS``, else ``progress.json`` in the user's data directory."""
    if given := os.environ.get("LABKIT_PROGRESS"):
        return Path(given).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "labkit" / "progress.json"


def is_kept() -> bool:
    """Whether anything is read or written."""
    return os.environ.get("LABKIT_STATIC", "") in ("", "0")


def read() -> dict[str, Any]:
    """All that is known; nothing when there is no file yet, or none that can be read."""
    found = None
    if is_kept():
        with contextlib.suppress(Exception):  # whatever the file holds, and wherever it is said to be
            found = cleaned(json.loads(path().read_bytes()))
    return {"version": 1, **(found or {"exercises": {}, "guesses": {}})}


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
    """Read, change and replace the file, alone. What goes wrong is told, and stops nobody: it is not the exercise."""
    if not is_kept():
        return
    try:
        with _alone():
            whole = _whole()
            known = {"version": 1, **(cleaned(whole) or {})}
            change(known)
            for part in ("exercises", "guesses"):
                whole[part] = {**whole.get(part, {}), **known[part]}
            _replace(path(), {"version": 1, **whole})
    except Exception as error:
        _warn(f"progress is not kept: {_reason(error)}; set LABKIT_PROGRESS to a file that can be written")
        return
    if shared := os.environ.get("LABKIT_CLASS_DIR"):  # the learner's own choice: guesses and verdicts, no code
        try:
            _replace(Path(shared).expanduser() / f"{learner()}.json", known)
        except Exception as error:
            _warn(f"progress is kept, but not its copy for the class, in LABKIT_CLASS_DIR={shared}: {_reason(error)}")


def _whole() -> dict[str, Any]:
    """All that the file holds. One that is no progress is put aside, so that it is not lost, and told of.

    Raises:
        OSError: There is a file, and it cannot be read: it must not be replaced.
    """
    try:
        found = json.loads(path().read_bytes())
        if all(isinstance(part, dict) for part in (found, found.get("exercises", {}), found.get("guesses", {}))):
            return found
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError, AttributeError):
        pass
    bad = path().with_name(path().name + ".bad")
    os.replace(path(), bad)
    _warn(f"{path()} could not be read as progress: it is {bad.name} now, and progress begins anew")
    return {}


def _warn(told: str) -> None:
    warnings.warn(told, stacklevel=4)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time; the system lifts the lock when its holder dies."""
    import fcntl

    path().parent.mkdir(parents=True, exist_ok=True)
    with open(path().with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def learner() -> str:
    """What a class calls this learner: ``LABKIT_LEARNER``, else the user's name, JupyterHub's or this host's."""
    name = os.environ.get("LABKIT_LEARNER") or os.environ.get("JUPYTERHUB_USER") or getpass.getuser()
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".") or "learner"


def _replace(target: Path, known: dict[str, Any]) -> None:
    """The whole new file beside the old one, on the disk, then in its place."""
    _sweep(target.parent)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_PREFIX)
    try:
        # Half a character is written as JSON has it, \ud83d.
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # an instructor reads it in a class's folder
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _sweep(folder: Path) -> None:
    """Remove what writers left that were killed an hour ago or earlier."""
    for left in folder.glob(_PREFIX + "[a-z0-9_]" * 8):  # as `tempfile` names them
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > 3600:
                left.unlink()
