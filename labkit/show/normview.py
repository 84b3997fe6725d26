"""`show.norm` in one layout: a row a rank, a column a part, brackets where they are added up, the norm at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt

from labkit.show.figure import WIDE, Drawing
from labkit.show.normparts import STAGES, Norm, Part
from labkit.show.svg import el, fit, num, text, text_width, wrap
from labkit.show.words import say

LINE = 17
GAP = 12  #: between stages


def short(value: float) -> str:
    """Four digits.

    >>> short(29.0), short(29**0.5)
    ('29', '5.385')
    """
    return f"{value:,.4g}"


class View:
    """The matrix, and below it the right norm beside wrong ones; where it is narrow the sum stands below it as well."""

    def __init__(self, norm: Norm, wrong: Mapping[str, tuple[float, ...]], width: float) -> None:
        self.norm, self.wrong, self.width, self.wide = norm, wrong, width, width >= WIDE
        self.size = 13 if self.wide else 12
        ranks = len(norm.places)
        self.pitch, self.high = (38, 28) if self.wide else (32, 24)
        labels = [say("norm.rank", rank=ranks - 1), *(map(self._place, range(ranks)) if self.wide else ())]
        self.left = 14 + max(text_width(words, 12) for words in labels)
        self.staged = norm.mesh.get(STAGES, 1) > 1
        after = (74 if self.staged else 0) + 110 if self.wide else 46 if self.staged else 0
        self.column = min(150.0, (width - 4 - self.left - after) / len(norm.parts))
        self.cell = min(64.0, (0.58 if self.wide else 0.74) * self.column)
        self.end = self.left + self.column * len(norm.parts)
        self.names = [wrap(part.name, self.column - 6, self.size)[:2] for part in norm.parts]
        self.head = 34 + 15 * (max(map(len, self.names)) - 1)
        self.rows: dict[int, float] = {}
        y = self.head + 18.0
        for n, stage in enumerate(norm.stages()):
            y += GAP if n else 0
            for rank in stage:
                self.rows[rank] = y
                y += self.pitch
        self.bottom = y

    def _place(self, rank: int) -> str:
        return " ".join(say("norm.at", name=name, place=at) for name, at in self.norm.places[rank].items())

    def middle(self, rank: int) -> float:
        return self.rows[rank] + self.high / 2

    def draw(self) -> Drawing:
        parts = list(self._labels())
        for n in range(len(self.norm.parts)):
            parts += self._part(n)
        drawn, y = self._total()
        parts += drawn
        drawn, y = self._bars(y + 14)
        parts += drawn
        drawn, y = self._key(y + 4)
        parts += drawn
        parts.sort(key=lambda part: part.startswith("<text"))  # words last, so that no line strikes them through
        return Drawing(self.width, y, tuple(parts))

    def _labels(self) -> Iterator[str]:
        for rank in self.rows:
            y = self.middle(rank)
            if self.wide:
                yield text(4, y - 2, say("norm.rank", rank=rank), self.size)
                yield text(4, y + 13, self._place(rank), 12, None, "lk-soft")
            else:
                yield text(4, y + 4.5, say("norm.rank", rank=rank), 12)
        for stage in self.norm.stages()[1:]:
            y = min(self.rows[r] for r in stage) - (GAP + self.pitch - self.high) / 2
            yield el("line", x1=4, y1=y, x2=self.end, y2=y, class_="lk-lane")

    # One part

    def _part(self, n: int) -> Iterator[str]:
        part, x = self.norm.parts[n], self.left + n * self.column
        for k, line in enumerate(self.names[n]):
            y = self.head - 18.0 - 15 * (len(self.names[n]) - 1 - k)
            yield text(x, y, fit(line, self.column - 8, self.size), self.size, None, "lk-big")
        yield text(x, self.head, fit(self._how(part), self.column - 4, 12), 12, None, "lk-soft")
        counted = part.counted()
        for rank in part.holders:
            y, copy = self.rows[rank], rank not in counted
            look = f"lk-n{part.kind} lk-copy" if copy else f"lk-n{part.kind}"
            box = el("rect", x=x, y=y, width=self.cell, height=self.high, class_=look)
            yield el("g", box, class_="lk-part")
            told = short(part.squares[rank] or 0.0)
            words = say("norm.cell", letter=part.kind, square=told)
            words = words if text_width(words, self.size) < self.cell else fit(told, self.cell - 2, self.size)
            cls = "lk-soft" if copy else "lk-in lk-big"
            yield text(x + self.cell / 2, y + self.high / 2 + 4.5, words, self.size, "middle", cls)
        yield from self._brackets(part, x + self.cell)

    def _how(self, part: Part) -> str:
        """In which groups a part is added up, if in any."""
        if part.kind == "T" and not part.over:
            return say("norm.tied" if self.wide else "norm.tied_short")
        if part.over:
            return say("norm.over" if self.wide else "norm.over_short", groups=", ".join(part.over))
        return say("norm.once")

    def _brackets(self, part: Part, x: float) -> Iterator[str]:
        """A bracket a group; where groups lie between each other, beside each other."""
        groups = [group for group in part.groups() if len(group) > 1]
        ends: list[float] = []
        lanes = []
        for group in groups:
            top, bottom = self.middle(group[0]), self.middle(group[-1])
            lane = next((n for n, end in enumerate(ends) if top > end), len(ends))
            ends[lane : lane + 1] = [bottom]
            lanes.append(lane)
        for group, lane in zip(groups, lanes, strict=True):
            top, bottom, line = self.middle(group[0]), self.middle(group[-1]), x + 8 + 8 * lane
            first = group == part.counted()
            stubs = "".join(f"M{num(x + 1)} {num(self.middle(r))}H{num(line)}" for r in group)
            yield el("path", d=f"{stubs}M{num(line)} {num(top)}V{num(bottom)}",
                     class_="lk-join-of" if first else "lk-join-copy")  # fmt: skip
            told, after = short(sum(part.squares[r] or 0.0 for r in group)), x + 8 * len(ends) + 5
            if after + text_width(told, self.size) < x + self.column - self.cell:
                cls = "lk-big" if first else "lk-soft"
                yield text(after, (top + bottom) / 2 + 4.5, told, self.size, None, cls)

    # The sum

    def _total(self) -> tuple[list[str], float]:
        """Sums of stages, and the norm: at the right, or below where it is narrow."""
        parts: list[str] = []
        square, x = self.norm.square, self.end + 6
        middle = (min(self.rows.values()) + self.bottom - (self.pitch - self.high)) / 2
        if self.staged:
            parts += self._stages(x)
            x += 74
        terms = [self.norm.of_stage(s) for s in self.norm.stages()] if self.staged else [
            part.square for part in self.norm.parts]  # fmt: skip
        added = " + ".join(map(short, terms))
        lines = [(added, self.size, "lk-soft"), (say("norm.total", square=short(square)), 15, "lk-big"),
                 (say("norm.root", norm=short(sqrt(square))), 17, "lk-big"),
                 (say("norm.every"), 12, "lk-soft")]  # fmt: skip
        if self.wide:
            parts += [text(x, middle - 26 + 21 * n, words, size, None, cls) for n, (words, size, cls) in
                      enumerate(lines)]  # fmt: skip
            return parts, self.bottom
        words = " ".join([added, *([] if len(terms) == 1 else [say("norm.total", square=short(square))])])
        told = [words.replace("Σ ", ""), f"{lines[2][0]} {lines[3][0]}"]
        parts += [text(self.left, self.bottom + 16 + LINE * n, line, 13, None, "lk-big") for n, line in enumerate(told)]
        return parts, self.bottom + 2 * LINE + 8

    def _stages(self, x: float) -> Iterator[str]:
        """What each stage adds up to, and the bracket over the pipeline."""
        stages = self.norm.stages()
        middles = [(self.middle(s[0]) + self.middle(s[-1])) / 2 for s in stages]
        wide = 40 if self.wide else 26
        if self.wide:
            yield text(x, self.head - 18, say("norm.stage"), self.size, None, "lk-big")
        over = say("norm.over" if self.wide else "norm.over_short", groups=STAGES)
        yield text(x, self.head, over, 12, None, "lk-soft")
        for stage, y in zip(stages, middles, strict=True):
            told = short(self.norm.of_stage(stage))
            yield text(x + wide / 2, y + 4.5, told, self.size, "middle", "lk-big")
        line = x + wide + 6
        stubs = "".join(f"M{num(x + wide)} {num(y)}H{num(line)}" for y in middles)
        yield el("path", d=f"{stubs}M{num(line)} {num(middles[0])}V{num(middles[-1])}", class_="lk-join-of")
        if self.wide:
            y = (middles[0] + middles[-1]) / 2
            yield el("path", d=f"M{num(line)} {num(y)}h10", class_="lk-join-of")

    # Right and wrong

    def _bars(self, y: float) -> tuple[list[str], float]:
        """The right norm and wrong ones on one axis."""
        if not self.wrong:
            return [], y
        right = sqrt(self.norm.square)
        rows: list[tuple[str, Sequence[float]]] = [(say("norm.right"), (right,)), *self.wrong.items()]
        longest = max(v for _, values in rows for v in values) or 1.0
        room = max(text_width(self._told(v, right), self.size) for _, values in rows for v in values) * 1.08 + 8
        label = min(max(text_width(name, self.size) for name, _ in rows) + 12, 230) if self.wide else 0
        left = 4.0 + label
        scale = (self.width - left - room - 4) / longest
        parts, marks = [], ""
        for name, values in rows:
            lines = wrap(name, label - 8 if self.wide else self.width - 8, self.size)
            bars, words = 20.0 * len(values), 15.0 * len(lines)
            middle = y + max(bars, words) / 2 if self.wide else y + words / 2
            parts += [text(4, middle - words / 2 + 12 + 15 * n, line, self.size) for n, line in enumerate(lines)]
            top = middle - bars / 2 if self.wide else y + words + 2
            for n, value in enumerate(values):
                body = el("rect", x=left, y=top + 20 * n + 3, width=max(1.0, value * scale), height=14)
                parts.append(el("g", body, class_="lk-bar lk-good" if name == rows[0][0] else "lk-bar"))
                cls = "lk-big" if value == right else "lk-wrong"
                x = left + value * scale + 6
                parts.append(text(x, top + 20 * n + 14.5, self._told(value, right), self.size, None, cls))
            marks += f"M{num(left + right * scale)} {num(top - 1)}v{num(bars + 2)}"
            y = (y + max(bars, words) if self.wide else top + bars) + 6
        return [*parts, el("path", d=marks, class_="lk-best")], y + 4

    def _told(self, value: float, right: float) -> str:
        return say("norm.value" if value == right else "norm.wrong_value", value=short(value))

    def _key(self, y: float) -> tuple[list[str], float]:
        """What the letters stand for, those that are there."""
        kinds = {part.kind for part in self.norm.parts}
        names = {"S": say("norm.key_shard"), "R": say("norm.key_replica"), "T": say("norm.key_tie"),
                 "W": say("norm.key_whole")}  # fmt: skip
        entries = [(kind, words) for kind, words in names.items() if kind in kinds]
        copies = any(len(part.groups()) > 1 for part in self.norm.parts)
        entries += [("", say("norm.key_copy"))] if copies else []
        parts, x = [], 4.0
        for kind, words in entries:
            need = 30 + text_width(words, 12)
            if x > 4 and x + need > self.width - 4:
                x, y = 4.0, y + 24
            box = el("rect", x=x, y=y, width=20, height=18, class_=f"lk-n{kind}" if kind else "lk-copy")
            parts.append(el("g", box, class_="lk-part"))
            parts += [text(x + 10, y + 13.5, kind, 12, "middle", "lk-in lk-big")] if kind else []
            parts.append(text(x + 26, y + 13.5, fit(words, self.width - 34, 12), 12, None, "lk-soft"))
            x += need + 14
        return parts, y + 26
