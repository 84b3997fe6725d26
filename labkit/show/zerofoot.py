"""The foot of `show.zero`: an odometer of what the busiest rank has sent, and the memory of the fullest one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from labkit.show.figure import WIDE
from labkit.show.svg import el, fit, num, text, text_width
from labkit.show.words import say
from labkit.show.zerosteps import Play

if TYPE_CHECKING:
    from labkit.show.zeroview import Scale

ORDER = ("gather_forward", "gather_backward", "reduce", "gather", "all_reduce")
STACK = "OPG"  #: from the bottom up: what does not move first
METER, LINE = 24, 130  #: heights of the odometer and of the memory line


class Foot:
    """Both in one layout.

    Args:
        play, scale: As for `View`.
        width: Of the layout.
        top: Where it begins.
    """

    def __init__(self, play: Play, scale: Scale, width: float, top: float) -> None:
        self.play, self.scale, self.width = play, scale, width
        self.size = 13 if width >= WIDE else 12
        self.meter = top + 22
        self.ceiling = self.meter + METER + 60
        self.floor = self.ceiling + LINE
        self.bottom = self.floor + 22
        self.room = width - 12
        whole = play.moments[-1].sent[play.busiest]
        self.accounts = [(name, whole[name]) for name in ORDER if whole.get(name)]
        self.column = self.room / len(play.moments)
        totals = [[play.total(m, rank) for m in range(len(play.moments))] for rank in range(play.ranks)]
        #: Lines of ranks that hold less than the fullest at some moment.
        self._others = sorted({self._edge(row) for row in totals if row != totals[play.fullest]})
        self._made: dict[tuple[object, ...], str] = {}

    def still(self) -> Iterator[str]:
        """What no moment changes."""
        yield from self._ticks()
        yield from self._areas()
        yield from self._phases()
        yield self._plain()

    def at(self, moment: int) -> Iterator[str]:
        yield from self._odometer(moment)
        yield from self._here(moment)

    # Sent

    def _x(self, nbytes: float) -> float:
        return 4 + self.room * nbytes / self.scale.sent_to if self.scale.sent_to else 4.0

    def _odometer(self, moment: int) -> Iterator[str]:
        play, unit = self.play, self.scale.unit
        sent, whole = play.sent(moment, play.busiest), play.sent(-1, play.busiest)
        alike = len({play.sent(-1, rank) for rank in range(play.ranks)}) == 1
        who = say("zero.a_rank") if alike else say("zero.the_busiest", rank=play.busiest)
        words = say("zero.sent", who=who, part=psi(sent, play), whole=psi(whole, play), size=unit.told(sent))
        yield text(4, self.meter - 7, fit(words, self.room, self.size), self.size, None, "lk-big")
        done, start = play.moments[moment].sent[play.busiest], 0
        for name, most in self.accounts:
            yield self._account(name, start, most, done.get(name, 0))
            start += most

    def _account(self, name: str, start: int, most: int, done: int) -> str:
        """A slot as long as what an operation sends in all, filled as far as it has."""
        known = name, done
        if known not in self._made:
            x, wide = self._x(start), self._x(most) - 4
            fill = (
                el("rect", x=x, y=self.meter, width=wide * done / most, height=METER, class_="lk-sent") if done else ""
            )
            words = fit(account(name, wide > 150), wide - 6, 12) if wide > 16 else ""
            label = text(x + wide / 2, self.meter + 16, words, 12, "middle", "lk-in") if words else ""
            slot = el("rect", x=x, y=self.meter, width=wide, height=METER, class_="lk-account")
            self._made[known] = el("g", fill, slot, label)
        return self._made[known]

    def _ticks(self) -> Iterator[str]:
        """How often all parameters have gone round: 0, Ψ, 2Ψ, 3Ψ."""
        y, psi_wide = self.meter + METER, self._x(self.play.psi) - 4
        whole = self._x(self.play.sent(-1, self.play.busiest))
        yield el("path", d=f"M{num(whole)} {num(y)}H{num(4 + self.room)}", class_="lk-phase")
        if not psi_wide:
            return
        lines, words = [], []
        for n in range(int(self.room / psi_wide + 1e-6) + 1):
            x = 4 + psi_wide * n
            lines.append(el("line", x1=x, y1=y, x2=x, y2=y + 5))
            anchor = "end" if x > self.room - 8 else None if n == 0 else "middle"
            words.append(text(x, y + 17, say("zero.tick", n="" if n == 1 else n) if n else "0", 12, anchor, "lk-soft"))
        yield el("g", *lines, class_="lk-peak")
        yield from words

    # Held

    def _left(self, moment: float) -> float:
        return 4 + self.column * moment

    def _y(self, nbytes: float) -> float:
        return self.floor - LINE * nbytes / self.scale.bytes_to if self.scale.bytes_to else self.floor

    def _stack(self) -> Iterator[tuple[str, list[float], list[float]]]:
        """Each letter with where it begins and ends in each moment."""
        low = [0.0] * len(self.play.moments)
        for letter in STACK:
            high = [under + self.play.held(m, self.play.fullest, letter) for m, under in enumerate(low)]
            if high != low:
                yield letter, low, high
            low = high

    def _areas(self) -> Iterator[str]:
        for letter, low, high in self._stack():
            outline = f"M{self._edge(high)}{self._edge(low, back=True)}z"
            yield el("g", el("path", d=outline, class_=f"lk-m{letter}"), class_="lk-part")
        yield from (el("path", d=f"M{line}", class_="lk-other") for line in self._others)

    def letters(self) -> str:
        """The areas' letters, over everything else."""
        return el("g", *(self._letter(letter, low, high) for letter, low, high in self._stack()))

    def _edge(self, values: list[float], back: bool = False) -> str:
        """Along the tops of the columns, or back along them."""
        runs, start = [], 0
        for value, group in groupby(values):
            end = start + len(list(group))
            runs.append((num(self._left(start)), num(self._left(end)), num(self._y(value))))
            start = end
        if back:
            return "".join(f"L{end} {y}H{start}" for start, end, y in reversed(runs))
        return "".join(f"{'L' if n else ''}{start} {y}H{end}" for n, (start, end, y) in enumerate(runs))

    def _letter(self, letter: str, low: list[float], high: list[float]) -> str:
        """In the longest stretch that is thick enough for it."""
        thick = [self._y(under) - self._y(over) >= 14 for under, over in zip(low, high, strict=True)]
        runs, start = [(0, 0)], 0
        for fits, group in groupby(thick):
            length = len(list(group))
            runs += [(length, -start)] if fits else []
            start += length
        length, start = max(runs)
        if length * self.column < 12:
            return ""
        n = length // 2 - start
        x = self._left(length / 2 - start if length % 2 else n + 0.5)
        return text(x, self._y((low[n] + high[n]) / 2) + 4.5, letter, 12, "middle", "lk-in lk-big")

    def _phases(self) -> Iterator[str]:
        """Where one ends and the next begins."""
        words = {"forward": say("zero.forward"), "backward": say("zero.backward"), "step": say("zero.step")}
        start = 0
        phases = [m.action.phase if m.action else self._first() for m in self.play.moments]
        for phase, group in groupby(phases):
            end = start + len(list(group))
            x, room = self._left(start), self.column * (end - start)
            if start:
                yield el("path", d=f"M{num(x)} {num(self.ceiling - 8)}V{num(self.floor)}", class_="lk-phase")
            if text_width(words[phase], 12) <= room:
                yield text(x + room / 2, self.floor + 15, words[phase], 12, "middle", "lk-soft")
            start = end
        yield el("path", d=f"M4 {num(self.floor)}H{num(4 + self.room)}", class_="lk-lane")

    def _first(self) -> str:
        """Nothing has happened yet: what comes first belongs to this phase."""
        return next((m.action.phase for m in self.play.moments if m.action), "forward")

    def _plain(self) -> str:
        """What a rank of plain data parallelism holds."""
        y = self._y(self.play.plain)
        words = say("zero.plain", size=self.scale.unit.told(self.play.plain))
        return el("path", d=f"M4 {num(y)}H{num(4 + self.room)}", class_="lk-line") + text(
            4 + self.room, y - 6, words, self.size, "end", "lk-soft"
        )

    def _here(self, moment: int) -> Iterator[str]:
        """This moment, and how much it is."""
        play = self.play
        held = play.total(moment, play.fullest)
        x, y = self._left(moment + 0.5), self._y(held)
        who = say("zero.a_rank") if not self._others else say("zero.the_fullest", rank=play.fullest)
        words = say("zero.held", who=who, size=self.scale.unit.told(held))
        yield text(4, self.ceiling - 22, words, self.size, None, "lk-big")
        yield el("line", x1=x, y1=y, x2=x, y2=self.floor, class_="lk-head0")
        yield el("circle", cx=x, cy=y, r=4.5, class_="lk-dot")


def psi(nbytes: float, play: Play) -> str:
    """As a multiple of what a rank sends when all parameters go round once.

    Three digits at most: "1.75".
    """
    return f"{nbytes / play.psi:.3g}" if play.psi else "0"


def account(name: str, long: bool) -> str:
    """An operation's name."""
    return {
        "gather_forward": lambda: say("zero.gather_forward" if long else "zero.gather_forward_short"),
        "gather_backward": lambda: say("zero.gather_backward" if long else "zero.gather_backward_short"),
        "reduce": lambda: say("zero.scatter" if long else "zero.scatter_short"),
        "gather": lambda: say("zero.gather" if long else "zero.gather_short"),
        "all_reduce": lambda: say("zero.all_reduce"),
    }[name]()
