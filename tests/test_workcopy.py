"""The working copy brings what is new and never takes what a learner wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit import workcopy
from labkit.workcopy import WorkCopyError, find_chapter, reset, update

START = "00_start.ipynb"


@pytest.fixture
def lab(tmp_path: Path, jupyter_home: Path) -> tuple[Path, Path]:
    """The lab's notebooks, one chapter, and a place for the working copy."""
    source, work = tmp_path / "notebooks", tmp_path / "work"
    source.mkdir()
    publish(source / START, "1 + 1")
    return source, work


def publish(path: Path, *sources: str) -> None:
    cells = [new_markdown_cell("# Title", id="title")]
    for number, text in enumerate(sources):
        output = new_output("execute_result", {"text/plain": "2"}, execution_count=1)
        cells.append(new_code_cell(text, id=f"cell-{number}", outputs=[output], execution_count=1))
    nbformat.write(new_notebook(cells=cells), path)


def learner_writes(path: Path, text: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].source = text
    nbformat.write(notebook, path)


def code_of(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_a_first_copy_is_issued_without_answers_and_is_trusted(lab):
    source, work = lab
    assert update(source, work).issued == [START]
    copy = nbformat.read(work / START, as_version=4)
    assert copy.cells[1].outputs == []
    assert copy.cells[1].execution_count is None
    assert code_of(work / START) == ["1 + 1"]
    assert NotebookNotary().check_signature(copy)
    assert nbformat.read(source / START, as_version=4).cells[1].outputs, "the lab's own notebook keeps its outputs"


def test_nothing_happens_when_nothing_is_new(lab):
    source, work = lab
    update(source, work)
    before = (work / START).read_bytes(), (work / START).stat().st_mtime_ns
    done = update(source, work)
    assert (done.issued, done.refreshed, done.kept, done.unreadable) == ([], [], [], [])
    assert before == ((work / START).read_bytes(), (work / START).stat().st_mtime_ns)


def test_an_unchanged_copy_is_refreshed(lab):
    source, work = lab
    update(source, work)
    publish(source / START, "2 + 2")
    assert update(source, work).refreshed == [START]
    assert code_of(work / START) == ["2 + 2"]


def test_running_a_copy_does_not_change_it(lab):
    """Outputs, counts, and the empty cell that the last Shift-Enter adds are not the learner's words."""
    source, work = lab
    update(source, work)
    notebook = nbformat.read(work / START, as_version=4)
    notebook.cells[1].outputs = [new_output("stream", text="hello\n")]
    notebook.cells[1].execution_count = 7
    notebook.cells.append(new_code_cell(""))
    nbformat.write(notebook, work / START)
    publish(source / START, "2 + 2")
    assert update(source, work).refreshed == [START]


def test_a_changed_copy_is_kept_and_named_as_long_as_it_is_behind(lab):
    source, work = lab
    update(source, work)
    learner_writes(work / START, "mine")
    assert update(source, work).kept == [], "no newer version yet, so nothing to say"
    publish(source / START, "2 + 2")
    for _ in range(2):
        assert update(source, work).kept == [START]
        assert code_of(work / START) == ["mine"]


@pytest.mark.parametrize("change", ["cell added", "cell removed", "cell type", "order"])
def test_every_kind_of_change_counts(lab, change):
    source, work = lab
    publish(source / START, "1 + 1", "a")
    update(source, work)
    notebook = nbformat.read(work / START, as_version=4)
    if change == "cell added":
        notebook.cells.append(new_markdown_cell("my note"))
    elif change == "cell removed":
        del notebook.cells[2]
    elif change == "cell type":
        notebook.cells[2] = new_markdown_cell("a")
    else:
        notebook.cells.reverse()
    nbformat.write(notebook, work / START)
    publish(source / START, "2 + 2")
    assert update(source, work).kept == [START]


def test_a_learner_who_took_over_the_new_version_is_refreshed_again(lab):
    source, work = lab
    update(source, work)
    publish(source / START, "2 + 2")
    learner_writes(work / START, "2 + 2")
    update(source, work)
    publish(source / START, "3 + 3")
    assert update(source, work).refreshed == [START]


def test_a_change_of_metadata_alone_reaches_an_unchanged_copy(lab):
    source, work = lab
    update(source, work)
    notebook = nbformat.read(source / START, as_version=4)
    notebook.cells[1].metadata["tags"] = ["nbval-ignore-output"]
    nbformat.write(notebook, source / START)
    assert update(source, work).refreshed == [START]
    assert nbformat.read(work / START, as_version=4).cells[1].metadata["tags"] == ["nbval-ignore-output"]


def test_a_new_chapter_appears(lab):
    source, work = lab
    update(source, work)
    learner_writes(work / START, "mine")
    publish(source / "01_memory.ipynb", "16")
    done = update(source, work)
    assert (done.issued, done.kept) == (["01_memory.ipynb"], [])


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"nbformat": 4, "metadata": {}}', "\x00\x01", "<<<<<<< HEAD"]
)
def test_a_file_that_is_no_notebook_is_never_overwritten(lab, content):
    source, work = lab
    update(source, work)
    (work / START).write_text(content)
    publish(source / START, "2 + 2")
    assert update(source, work).unreadable == [START]
    assert (work / START).read_text() == content


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"notebooks": 3}', '{"notebooks": {"00_start.ipynb": 3}}', b"\xff\xfe"]
)
def test_without_a_manifest_what_is_there_is_the_learners(lab, content):
    source, work = lab
    update(source, work)
    learner_writes(work / START, "mine")
    (work / workcopy.MANIFEST).write_bytes(content if isinstance(content, bytes) else content.encode())
    publish(source / START, "2 + 2")
    assert update(source, work).kept == [START]
    assert code_of(work / START) == ["mine"]
    assert json.loads((work / workcopy.MANIFEST).read_text())["version"] == 1, "the manifest is whole again"


def test_a_lost_manifest_is_regained_from_copies_that_match(lab):
    source, work = lab
    update(source, work)
    (work / workcopy.MANIFEST).unlink()
    update(source, work)
    publish(source / START, "2 + 2")
    assert update(source, work).refreshed == [START]


def test_a_crash_between_notebook_and_manifest_heals(lab, monkeypatch):
    source, work = lab
    update(source, work)
    publish(source / START, "2 + 2")
    with monkeypatch.context() as patch:
        patch.setattr(workcopy, "_write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            update(source, work)
    assert update(source, work).kept == []
    publish(source / START, "3 + 3")
    assert update(source, work).refreshed == [START]


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(lab, monkeypatch):
    source, work = lab
    update(source, work)
    before = (work / START).read_bytes()
    publish(source / START, "2 + 2")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(WorkCopyError, match="disk full"):
        update(source, work)
    assert (work / START).read_bytes() == before
    assert sorted(path.name for path in work.iterdir()) == [workcopy.MANIFEST, START]


def test_reset_restores_and_keeps_each_version_of_the_learner(lab):
    source, work = lab
    update(source, work)
    for number, name in enumerate(["00_start.mine.ipynb", "00_start.mine-2.ipynb", "00_start.mine-3.ipynb"]):
        learner_writes(work / START, f"mine {number}")
        target, kept = reset(source, work, "00")
        assert (target, kept) == (work / START, work / name)
        assert code_of(work / START) == ["1 + 1"]
        assert code_of(work / name) == [f"mine {number}"]
    publish(source / START, "2 + 2")
    assert update(source, work).refreshed == [START], "a restored copy is unchanged"


def test_reset_moves_even_a_broken_file_aside_and_forgets_no_other_chapter(lab):
    source, work = lab
    publish(source / "01_memory.ipynb", "16")
    update(source, work)
    (work / START).write_text("{ half a file")
    _, kept = reset(source, work, "0")
    assert kept is not None
    assert kept.read_text() == "{ half a file"
    publish(source / "01_memory.ipynb", "18")
    assert update(source, work).refreshed == ["01_memory.ipynb"]


def test_reset_works_before_the_lab_was_ever_opened(lab):
    source, work = lab
    assert reset(source, work, "00") == (work / START, None)
    assert code_of(work / START) == ["1 + 1"]


@pytest.mark.parametrize("name", ["0", "00", "00_start", "00_start.ipynb"])
def test_a_chapter_has_several_names(lab, name):
    assert find_chapter(lab[0], name).name == START


@pytest.mark.parametrize("name", ["7", "start", "../00_start", ""])
def test_an_unknown_chapter_is_answered_with_those_that_exist(lab, name):
    with pytest.raises(WorkCopyError, match=r"chapters: 00_start$"):
        find_chapter(lab[0], name)


def test_a_place_that_is_a_file_is_refused(lab, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WorkCopyError, match="--dir"):
        update(lab[0], tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_is_refused(lab, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(WorkCopyError, match="--dir"):
        update(lab[0], tmp_path / "locked")


def test_a_broken_notebook_of_the_lab_is_named(lab):
    source, work = lab
    (source / "01_memory.ipynb").write_text("{")
    with pytest.raises(WorkCopyError, match=r"01_memory\.ipynb"):
        update(source, work)


EVENTS = ["learner a", "learner b", "publish a", "publish b", "update", "reset"]


@settings(max_examples=50)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=12))
def test_no_sequence_of_events_loses_what_a_learner_wrote(tmp_path_factory, events):
    """Whatever the learner wrote last is in the working copy, under its name or beside it."""
    base = tmp_path_factory.mktemp("history")
    source, work, written = base / "notebooks", base / "work", None
    source.mkdir()
    publish(source / START, "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workcopy, "_trust", lambda text: None)
        update(source, work)
        for event in events:
            verb, _, text = event.partition(" ")
            if verb == "learner":
                learner_writes(work / START, written := f"mine {text}")
            elif verb == "publish":
                publish(source / START, text)
            elif verb == "update":
                update(source, work)
            else:
                reset(source, work, "00")
            assert written is None or any(written in code_of(path) for path in work.glob("*.ipynb"))


def test_an_assistant_is_told_to_hint_and_the_learner_may_tell_it_otherwise(tmp_path):
    work = tmp_path / "work"
    update(workcopy.source_dir(), work)
    assert "do not solve" in (work / "AGENTS.md").read_text(encoding="utf-8")
    (work / "AGENTS.md").write_text("mine")
    update(workcopy.source_dir(), work)
    assert (work / "AGENTS.md").read_text() == "mine"


def test_the_table_of_claims_is_refreshed_unless_the_learner_wrote_into_it(lab):
    source, work = lab
    for text in ("first", "second"):
        (source / "claims.md").write_text(text)
        update(source, work)
        assert (work / "claims.md").read_text() == text
    (work / "claims.md").write_text("mine")
    (source / "claims.md").write_text("third")
    update(source, work)
    assert (work / "claims.md").read_text() == "mine"
