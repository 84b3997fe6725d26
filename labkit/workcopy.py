"""The learner's working copy of the notebooks: issued, refreshed, restored, and never lost.

A learner writes into copies, so that an update of the lab can bring new chapters without touching anyone's answers.
A copy counts as changed when its cells differ from what was issued: outputs, execution counts and empty cells (the
last Shift-Enter adds one) do not count. Whatever is in doubt, such as a file that cannot be read or one that no
manifest knows, is the learner's and stays.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = ".labkit.json"
ADVICE = "AGENTS.md"
CLAIMS = "claims.md"
_PACKAGE = Path(__file__).resolve().parent


class WorkCopyError(Exception):
    """Something the user can put right; the message says what and how."""


@dataclass
class Update:
    """What `update` did, as file names."""

    issued: list[str] = field(default_factory=list)
    refreshed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # changed by the learner, and there is a newer version
    unreadable: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Edition:
    """A notebook as it is issued: without outputs."""

    text: str
    cells: str  # fingerprint of what a learner can change

    @property
    def key(self) -> str:
        return _sha256(self.text)

    def record(self) -> dict[str, str]:
        return {"cells": self.cells, "edition": self.key}


def in_checkout() -> bool:
    """True when labkit runs from its repository, false when it was installed from a wheel."""
    return (_PACKAGE.parent / "pyproject.toml").is_file() and not (_PACKAGE / "notebooks").is_dir()


def source_dir() -> Path:
    """Where the lab's own notebooks are: beside the package in a checkout, inside it in a wheel."""
    for path in (_PACKAGE / "notebooks", _PACKAGE.parent / "notebooks"):
        if path.is_dir():
            return path
    raise WorkCopyError("labkit's notebooks are missing from this installation; install labkit again")


def default_work_dir() -> Path:
    """`work/` of the checkout, else of the current directory."""
    return (_PACKAGE.parent if in_checkout() else Path.cwd()) / "work"


def chapters(source: Path) -> list[Path]:
    return sorted(source.glob("*.ipynb"))


def find_chapter(source: Path, name: str) -> Path:
    """The notebook that `name` means: `0`, `00`, `00_start` or `00_start.ipynb`.

    Raises:
        WorkCopyError: no chapter has that name; the message lists those that exist.
    """
    stem = name.removesuffix(".ipynb")
    stem = stem.zfill(2) if stem.isdecimal() else stem
    for path in chapters(source):
        if stem in (path.stem, path.stem.split("_")[0]):
            return path
    known = ", ".join(path.stem for path in chapters(source)) or "none"
    raise WorkCopyError(f"there is no chapter {name!r}; chapters: {known}")


def update(source: Path, work: Path) -> Update:
    """Issue chapters that `work` lacks and refresh those that the learner never changed.

    Args:
        source: the lab's notebooks.
        work: the working copy; made when it does not exist.

    Raises:
        WorkCopyError: `work` cannot be written, or a notebook of the lab itself cannot be read.
    """
    _make(work)
    _issue_advice(source, work)
    manifest, result = _read_manifest(work), Update()
    _issue_claims(source, work, manifest)
    for path in chapters(source):
        edition, target = _edition(path), work / path.name
        record = manifest.get(path.name, {})
        if not os.path.lexists(target):
            _issue(edition, target)
            result.issued.append(path.name)
        elif (cells := _cells_of(target)) is None:
            result.unreadable.append(path.name)
            continue
        elif cells == record.get("cells") and edition.key != record.get("edition"):
            _issue(edition, target)
            result.refreshed.append(path.name)
        elif cells not in (edition.cells, record.get("cells")):
            if edition.key != record.get("edition"):
                result.kept.append(path.name)
            continue
        manifest[path.name] = edition.record()
    _write_manifest(work, manifest)
    return result


def reset(source: Path, work: Path, name: str) -> tuple[Path, Path | None]:
    """Issue a chapter afresh; returns its copy and where the learner's version is now, if there was one."""
    path = find_chapter(source, name)
    _make(work)
    edition, target, kept = _edition(path), work / path.name, None
    if os.path.lexists(target):
        kept = _free_name(target)
        _rename(target, kept)
    _issue(edition, target)
    _write_manifest(work, {**_read_manifest(work), path.name: edition.record()})
    return target, kept


def _make(work: Path) -> None:
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkCopyError(f"the working copy cannot be made: {error}; choose another place with --dir") from None
    if not os.access(work, os.W_OK | os.X_OK):
        raise WorkCopyError(f"the working copy {work} cannot be written; choose another place with --dir")


def _issue_advice(source: Path, work: Path) -> None:
    """What an assistant in this folder should know: to hint and not to solve. Issued once, and theirs from then on."""
    advice = source / ADVICE
    if advice.is_file() and not os.path.lexists(work / ADVICE):
        (work / ADVICE).write_bytes(advice.read_bytes())


def _issue_claims(source: Path, work: Path, manifest: dict[str, dict[str, str]]) -> None:
    """The table of claims, whose links open the copies. Refreshed, unless it is not what was issued."""
    claims, target = source / CLAIMS, work / CLAIMS
    if not claims.is_file():
        return
    issued = manifest.get(CLAIMS, {}).get("edition")
    if not os.path.lexists(target) or (target.is_file() and _sha256_of(target) == issued):
        _write(target, claims.read_text(encoding="utf-8"))
        manifest[CLAIMS] = {"edition": _sha256_of(claims)}


def _edition(path: Path) -> _Edition:
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        notebook.metadata.pop("widgets", None)
        return _Edition(nbformat.writes(notebook) + "\n", _fingerprint(notebook))
    except Exception as error:
        raise WorkCopyError(f"the lab's own notebook {path.name} cannot be read: {error}") from None


def _cells_of(path: Path) -> str | None:
    """The fingerprint of a learner's file; None when it is no notebook, whatever the reason."""
    import nbformat

    try:
        return _fingerprint(nbformat.read(path, as_version=4))
    except Exception:
        return None


def _fingerprint(notebook: Any) -> str:
    cells = [[cell.cell_type, cell.source] for cell in notebook.cells if cell.source.strip()]
    return _sha256(json.dumps(cells))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _issue(edition: _Edition, target: Path) -> None:
    _write(target, edition.text)
    _trust(edition.text)


def _trust(text: str) -> None:
    """Sign the notebook as JupyterLab would after running it, so that its HTML shows."""
    import nbformat
    from nbformat.sign import NotebookNotary

    try:
        notary = NotebookNotary()
        notary.sign(nbformat.reads(text, as_version=4))
        notary.store.close()
    except OSError:  # a home directory that cannot be written: the learner can still trust by hand
        return


def _free_name(target: Path) -> Path:
    """`00_start.mine.ipynb`, or `00_start.mine-2.ipynb` and so on when that is taken."""
    number, name = 1, target.with_name(f"{target.stem}.mine.ipynb")
    while os.path.lexists(name):
        number += 1
        name = target.with_name(f"{target.stem}.mine-{number}.ipynb")
    return name


def _read_manifest(work: Path) -> dict[str, dict[str, str]]:
    """What was issued; entries that make no sense are left out, so that their files count as the learner's."""
    try:
        entries = json.loads((work / MANIFEST).read_text(encoding="utf-8"))["notebooks"]
        return {name: dict(record) for name, record in entries.items() if isinstance(record, dict)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_manifest(work: Path, entries: dict[str, dict[str, str]]) -> None:
    _write(work / MANIFEST, json.dumps({"version": 1, "notebooks": entries}, indent=1, sort_keys=True) + "\n")


def _rename(path: Path, new: Path) -> None:
    try:
        path.rename(new)
    except OSError as error:
        raise WorkCopyError(f"{path} cannot be renamed: {error}") from None


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: after a crash it is the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WorkCopyError(f"{path} cannot be written: {error}") from None
