"""`make notebooks`: run every notebook and save it as it is committed.

Saved bytes depend on what the cells print and draw, not on the machine: kernel and language metadata are fixed, no
time is recorded. Run with `LABKIT_STATIC=1`, so that pictures are SVG that shows where no kernel runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
    },
}


def execute(path: Path) -> str:
    """The text of the notebook after a run from top to bottom.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed that is not tagged `raises-exception`.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", record_timing=False, coalesce_streams=True, resources=resources
    )
    client.execute()
    normalise(notebook)
    return nbformat.writes(notebook) + "\n"


def normalise(notebook: Any) -> None:
    """Drop what tells of the machine: versions, times, front-end state."""
    notebook.metadata.clear()
    notebook.metadata.update(METADATA)
    for cell in notebook.cells:
        for key in ("collapsed", "execution", "scrolled", "trusted"):
            cell.metadata.pop(key, None)


def main(arguments: Sequence[str]) -> int:
    """Execute the notebooks named, or all of a folder; stops at the first that fails and leaves that one as it was."""
    from nbclient.exceptions import CellExecutionError

    for given in map(Path, arguments):
        for path in sorted(given.glob("*.ipynb")) if given.is_dir() else [given]:
            try:
                text = execute(path)
            except CellExecutionError as error:
                print(f"{path}: {error}", file=sys.stderr)
                return 1
            changed = text != path.read_text(encoding="utf-8")
            path.write_text(text, encoding="utf-8")
            print(f"{path}: {'saved' if changed else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
