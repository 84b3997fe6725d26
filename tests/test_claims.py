"""`notebooks/claims.md`: every statement of the source text has a row, and every row a cell that says what it says."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
#: Line of the source text that makes a statement, in the order of the list of claims; a line may make several.
LINES = (
    "chart 6–10 12 13 14 16 16 17 23 21–22 23 23 42–43 50 57–64 70 71 96,104 110 112–113 119–121 129 133 139 140–143 "
    "146 147–148 152 158–159 159 163 168–176 178 182 183 185 192–193 194 198 202 208–210 220 221 225 228 "
    "235 235,238 236 242 244 246 252 253 260"
)
LINK = re.compile(r"\[(\d\d) · ([a-z][a-z0-9-]*)\]\(((\d\d)_[a-z_]+\.ipynb)#cell-id=([a-z][a-z0-9-]*)\)")


class Row(NamedTuple):
    line: str
    said: str
    verdict: str
    holds: str
    where: str

    @property
    def cells(self) -> list[tuple[str, str]]:
        """The cells that the row links to, as (file, id)."""
        return [(file, cell) for _, _, file, _, cell in LINK.findall(self.where)]

    @property
    def keys(self) -> list[str]:
        """What must be found in the cells."""
        return re.findall(r"\*\*(.+?)\*\*", self.holds)


def table() -> list[Row]:
    lines = NOTEBOOKS.joinpath("claims.md").read_text(encoding="utf-8").splitlines()
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return [Row(*row) for row in rows[2:]]  # without the header and the line under it


@functools.cache
def cells_of(file: str) -> dict[str, dict]:
    return {cell["id"]: cell for cell in json.loads(NOTEBOOKS.joinpath(file).read_text(encoding="utf-8"))["cells"]}


def text_of(file: str, cell_id: str) -> str:
    """What a reader sees of a cell: its source and its output, without emphasis and line breaks."""
    cell = cells_of(file)[cell_id]
    parts = [cell["source"]]
    for output in cell.get("outputs", []):
        parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return plain("\n".join("".join(part) for part in parts))


def plain(text: str) -> str:
    return " ".join(re.sub(r"[*`]", "", text).split())


def stands_in(key: str, text: str) -> bool:
    """Whether the text has the key, and not inside a longer word or number: 4 does not stand in 14 or in 4.56."""
    return re.search(rf"(?<![\w.,]){re.escape(plain(key))}(?!\w|[.,]\d)", text) is not None


ROWS = table()
each_row = pytest.mark.parametrize("row", ROWS, ids=[f"{n}: {row.line}" for n, row in enumerate(ROWS, 1)])


def test_every_statement_has_a_row():
    assert " ".join(row.line for row in ROWS) == LINES


@each_row
def test_a_row_is_whole(row):
    assert all(row)
    assert row.verdict in {"right", "imprecise", "wrong"}


@each_row
def test_links_have_the_form_that_jupyterlab_follows(row):
    assert LINK.sub("", row.where).replace(",", "").strip() == ""
    for chapter, shown, _, number, cell in LINK.findall(row.where):
        assert (chapter, shown) == (number, cell)
    for file, cell_id in row.cells:
        assert NOTEBOOKS.joinpath(file).is_file()
        assert text_of(file, cell_id)


@each_row
def test_what_is_bold_stands_in_the_cells(row):
    texts = [text_of(*cell) for cell in row.cells]
    assert row.keys
    assert not [key for key in row.keys if not any(stands_in(key, text) for text in texts)]
    assert all(any(stands_in(key, text) for key in row.keys) for text in texts), "a cell that says none of it"


def test_a_number_does_not_stand_in_a_longer_one():
    assert stands_in("4", "takes 4 ms")
    assert stands_in("4.56 GB", "the layer: 4.56 GB, and")
    assert not any(stands_in("4", text) for text in ("14", "4.56", "4,096", "0.4", "t4"))
