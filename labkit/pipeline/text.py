"""Schedules written as text: one line a rank, one word an action."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from labkit.pipeline.schedule import Action, Kind

_LINE = re.compile(r"r(\d+)\s*:(.*)")
_WORD = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


class Word(NamedTuple):
    """An action as it is written; without its stage where a rank hosts one."""

    kind: Kind
    micro_batch: int
    stage: int | None
    where: str

    def action(self, rank: int, hosted: Sequence[int]) -> Action:
        if self.stage is not None:
            return Action(self.kind, self.micro_batch, self.stage)
        if len(hosted) != 1:
            raise ValueError(f"{self.where} names no stage, but rank {rank} hosts {len(hosted)}: write it as in 'F3.1'")
        return Action(self.kind, self.micro_batch, hosted[0])


def read(text: str) -> list[list[Word]]:
    """The words of each line."""
    rows: list[list[Word]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or int(found[1]) != len(rows):
            raise ValueError(f"line {number} is {line.strip()!r}: expected 'r{len(rows)}: F0 F1 …', the next rank's")
        rows.append([])
        for place, word in enumerate(found[2].split(), 1):
            where = f"line {number}, word {place}: {word!r}"
            match = _WORD.fullmatch(word)
            if match is None:
                raise ValueError(f"{where} is no action: expected F, B or W and a micro-batch, such as 'F3' or 'F3.1'")
            kind, micro_batch, stage = match.groups()
            if max(len(micro_batch), len(stage or "")) > 6:
                raise ValueError(f"{where} has a number of more than six digits: expected a smaller one")
            rows[-1].append(Word(kind, int(micro_batch), None if stage is None else int(stage), where))  # type: ignore[arg-type]
    if not rows:
        raise ValueError("the text has no line: expected one a rank, such as 'r0: F0 B0'")
    return rows
