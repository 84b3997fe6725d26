"""How a `Run` shows itself: what each rank returned, and how much happened. Nothing that differs between two runs."""

from __future__ import annotations

import reprlib
import sys
from html import escape
from typing import TYPE_CHECKING, Any

from labkit.world.wording import counted

if TYPE_CHECKING:
    from labkit.world.launch import Run

_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 60, 60, 6, 6, 6


def short(value: Any) -> str:
    """A value in a few words; a tensor with more than a few elements as its shape and type."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() <= 8:
            return " ".join(repr(value.detach()).split())
        return f"tensor {'×'.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}"
    try:
        text = _SHORT.repr(value)
    except Exception:  # a number of thousands of digits, or a class of one's own
        return type(value).__name__
    return type(value).__name__ if " at 0x" in text else text


def summary(run: Run) -> str:
    """Plain text: a line a rank."""
    lines = [f"{run.name} on {run.ranks} ranks"]
    lines += [f"  rank {rank}  {short(value)}" for rank, value in enumerate(run.values)]
    return "\n".join(lines + _notes(run))


def _notes(run: Run) -> list[str]:
    """How many there are; they hold times, which no two runs share."""
    return [f"{counted(len(run.notes), 'note')} on the pace: run.notes"] if run.notes else []


def html(run: Run) -> str:
    """The same as a small table in the notebook's own type."""
    rows = "".join(
        f"<tr><th style='text-align:left'>rank {rank}</th><td style='text-align:left'><code>{escape(short(value))}"
        "</code></td></tr>"
        for rank, value in enumerate(run.values)
    )
    notes = "".join(f"<div>{note}</div>" for note in _notes(run))
    return f"<div><code>{escape(run.name)}</code> on {run.ranks} ranks<table>{rows}</table>{notes}</div>"
