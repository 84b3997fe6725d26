"""A schedule: what each rank does, in which order. Plain data that knows no tensor, no process and no clock.

Four readers share it: `check` says whether it can run, `simulate` when everything happens, the engine runs it on real
ranks, and the pictures draw it.

    kind   what it is                                          needs
    F      forward of one micro-batch through one stage        F of the stage before
    B      backward: the gradient of the stage's input         F of this stage, and B of the stage after
    W      the gradient of the stage's weights                 B of this stage

Without W, B is both gradients. Only zero-bubble schedules take them apart: nobody waits for a W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
#: From a stage to the one that waits for the result: forward to the next, backward to the one before, W to none.
STEP = {"F": 1, "B": -1, "W": 0}


class Action(NamedTuple):
    """One block of a schedule: forward, backward or weight gradient of a micro-batch through a stage.

    A named tuple, as messages are: a slider that redraws a simulated schedule makes thousands of them.

    >>> print(Action("F", 3, 1))  # micro-batch 3 through stage 1
    F3.1
    """

    kind: Kind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.stage}"


class Message(NamedTuple):
    """What one stage hands to the next: a forward's output ("F"), or a backward's input gradient ("B").

    Attributes:
        stage: Of the producer.
        source, target: Ranks.
    """

    kind: Kind
    micro_batch: int
    stage: int
    source: int
    target: int

    @property
    def producer(self) -> Action:
        """The action that makes what travels."""
        return Action(self.kind, self.micro_batch, self.stage)

    @property
    def consumer(self) -> Action:
        """The action that waits for it."""
        return Action(self.kind, self.micro_batch, self.stage + STEP[self.kind])

    def __str__(self) -> str:
        return f"{self.producer} {self.source}→{self.target}"


def needs(action: Action, stages: int) -> list[Action]:
    """What must have ended before: F follows the stage before; B its own F, and the stage after; W its B.

    >>> [str(a) for a in needs(Action("B", 0, 1), stages=4)]
    ['F0.1', 'B0.2']
    """
    kind, micro_batch, stage = action
    if kind == "F":
        return [Action("F", micro_batch, stage - 1)] if stage else []
    if kind == "W":
        return [Action("B", micro_batch, stage)]
    own = Action("F", micro_batch, stage)
    return [own] if stage == stages - 1 else [own, Action("B", micro_batch, stage + 1)]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each rank does, in order.

    A custom schedule takes a few lines. Two ranks, two micro-batches:

    >>> schedule = Schedule.parse('''
    ...     r0: F0 F1 B0 B1
    ...     r1: F0 B0 F1 B1
    ... ''')
    >>> schedule.check()
    >>> schedule.stash()
    (2, 1)

    Attributes:
        name: What it is called.
        ranks, micro_batches, stages: How many.
        actions: Rank → its actions, in the order in which it does them.
        placement: Stage → its rank, as a tuple; or a function of stage and micro-batch, where that depends on the
            micro-batch (DualPipe). Default: stage s on rank s modulo ranks.
        unsplit: Pairs (micro-batch, stage) whose B is both gradients although the schedule has W for others (DualPipe).
        assumptions: Under which the schedule does what its source says of it.
        source: Where it was published.

    Raises:
        TypeError, ValueError: A number that is no whole number or below 1; not one row of actions a rank; an action of
            an unknown kind, or whose micro-batch or stage does not exist; a placement that has not one of the ranks
            for each stage.
    """

    name: str
    ranks: int
    micro_batches: int
    stages: int
    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...] | Callable[[int, int], int] | None = None
    unsplit: frozenset[tuple[int, int]] = frozenset()
    assumptions: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("ranks", "micro_batches", "stages"):
            whole(name, getattr(self, name), 1)
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))
        if len(self.actions) != self.ranks:
            raise ValueError(
                f"actions has {len(self.actions)} rows, but there are {self.ranks} ranks: expected one each"
            )
        for action in chain.from_iterable(self.actions):
            self._known(action)
        if self.placement is None:
            object.__setattr__(self, "placement", tuple(stage % self.ranks for stage in range(self.stages)))
        elif not callable(self.placement):
            object.__setattr__(self, "placement", tuple(self.placement))
            if len(self.placement) != self.stages or not set(self.placement) <= set(range(self.ranks)):
                raise ValueError(f"placement is {self.placement}: expected a rank from 0 to {self.ranks - 1} for each "
                                 f"of the {self.stages} stages")  # fmt: skip

    def _known(self, action: Action) -> None:
        if not isinstance(action, Action):
            raise TypeError(f"actions holds {action!r}: expected an Action, such as Action('F', 0, 0)")
        if action.kind not in KINDS:
            raise ValueError(f"{action!r}: expected kind 'F', 'B' or 'W'")
        for name, value, number in (("micro-batch", action.micro_batch, self.micro_batches),
                                    ("stage", action.stage, self.stages)):  # fmt: skip
            if value not in range(number):
                raise ValueError(f"{action!r}: there is no {name} {value}, expected 0 to {number - 1}")

    def rank_of(self, stage: int, micro_batch: int = 0) -> int:
        """The rank that has the stage.

        It depends on the micro-batch where two copies of the model run against each other (DualPipe), nowhere else.
        """
        return self.placement(stage, micro_batch) if callable(self.placement) else self.placement[stage]  # type: ignore[index]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank hosts, in order."""
        return self._hosted[rank]

    @cached_property
    def _hosted(self) -> tuple[tuple[int, ...], ...]:
        hosted: list[set[int]] = [set() for _ in range(self.ranks)]
        for stage in range(self.stages):
            for micro_batch in range(self.micro_batches if callable(self.placement) else 1):
                hosted[self.rank_of(stage, micro_batch)].add(stage)
        return tuple(tuple(sorted(stages)) for stages in hosted)

    @cached_property
    def taken_apart(self) -> frozenset[tuple[int, int]]:
        """Pairs (micro-batch, stage) that have a W: their B is the input gradient alone."""
        return frozenset((a.micro_batch, a.stage) for row in self.actions for a in row if a.kind == "W")

    @property
    def split(self) -> bool:
        """Whether the gradient of the weights is taken apart from B anywhere."""
        return bool(self.taken_apart)

    def message(self, action: Action) -> Message | None:
        """What is sent when the action has ended; ``None`` where no other rank waits for it."""
        kind, micro_batch, stage = action
        neighbour = stage + STEP[kind]
        if kind == "W" or not 0 <= neighbour < self.stages:
            return None
        source, target = self.rank_of(stage, micro_batch), self.rank_of(neighbour, micro_batch)
        return None if source == target else Message(kind, micro_batch, stage, source, target)

    def stash(self) -> tuple[int, ...]:
        """Rank → how many pairs (micro-batch, stage) it holds at its peak.

        A pair is held from its F until its B, or until its W where it has one. Multiply with the bytes that autograd
        saves for one micro-batch in one stage.
        """
        return tuple(max(stash_after(row, self.taken_apart), default=0) for row in self.actions)

    def check(self) -> None:
        """Raise `IllegalSchedule`, which says what is wrong and where, unless the schedule can run; see `check`."""
        from labkit.pipeline.check import check

        check(self)

    def word(self, action: Action) -> str:
        """The action in short: "F3", or "F3.1" on a rank that hosts several stages."""
        rank = self.rank_of(action.stage, action.micro_batch)
        return str(action) if len(self.stages_of(rank)) > 1 else f"{action.kind}{action.micro_batch}"

    def text(self) -> str:
        """One line a rank; `parse` reads it.

        >>> from labkit.pipeline import one_f_one_b
        >>> print(one_f_one_b(ranks=2, micro_batches=3).text())
        r0: F0 F1 B0 F2 B1 B2
        r1: F0 B0 F1 B1 F2 B2
        """
        return "\n".join(f"r{rank}: {' '.join(map(self.word, row))}".rstrip() for rank, row in enumerate(self.actions))

    @classmethod
    def parse(
        cls, text: str, *, name: str = "by hand", micro_batches: int | None = None, stages: int | None = None,
        placement: tuple[int, ...] | Callable[[int, int], int] | None = None,
    ) -> Schedule:  # fmt: skip
        """A schedule from lines such as "r0: F0 F1 B0 B1", one a rank. It may be illegal: `check` tells.

        A word is a kind and a micro-batch; where a rank hosts several stages, a stage follows after a dot: "F3.1".

        Args:
            micro_batches: Default: one more than the largest in the text.
            stages: Default: one more than the largest in the text, at least one a rank.
            placement: As in `Schedule`.

        Raises:
            ValueError: A line or a word that cannot be read, with its number.

        >>> print(Schedule.parse("r0: F0.0 F0.1 B0.1 B0.0").text())
        r0: F0.0 F0.1 B0.1 B0.0
        """
        from labkit.pipeline.text import read

        rows = read(text)
        words = list(chain.from_iterable(rows))
        last = max((w.stage for w in words if w.stage is not None), default=0)
        empty = cls(
            name=name, ranks=len(rows), stages=stages or max(last + 1, len(rows)), actions=((),) * len(rows),
            micro_batches=micro_batches or 1 + max((w.micro_batch for w in words), default=0), placement=placement,
        )  # fmt: skip
        actions = tuple(tuple(w.action(rank, empty.stages_of(rank)) for w in row) for rank, row in enumerate(rows))
        return replace(empty, actions=actions)


def stash_after(row: Sequence[Action], taken_apart: frozenset[tuple[int, int]]) -> list[int]:
    """How many pairs (micro-batch, stage) a rank holds during each of its actions; the last one is freed at its end."""
    held, after = 0, []
    for action in row:
        held += action.kind == "F"
        after.append(held)
        held -= action.kind == ("W" if (action.micro_batch, action.stage) in taken_apart else "B")
    return after


def whole(name: str, value: object, least: int) -> None:
    """Raise unless the value is a whole number, `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: expected a whole number")
    if value < least:
        raise ValueError(f"{name} is {value}: expected {least} or more")


def number(name: str, value: object) -> None:
    """Raise unless the value is a finite number, 0 or more."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: expected a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}: expected 0 or more")
