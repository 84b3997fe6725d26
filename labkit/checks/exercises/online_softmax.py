"""5.3 · softmax in pieces: attention over tiles that come once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from labkit.checks.alone import Made, strange
from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import differing, near, taken
from labkit.checks.tokens import LARGE, MANY, MASKED, PLAIN, tiles
from labkit.show.words import count, say

Tiles = Iterator[tuple[torch.Tensor, torch.Tensor]]
ROOM = 10  #: tiles' bytes that may be held at once, of 64
THEIRS = frozenset(str(PACKAGE / "context_parallel" / f"{name}.py") for name in ("tiles", "tiled", "ring"))


def online_softmax(tiles):
    out, total, highest = 0, 0, torch.tensor(float("-inf"))
    for scores, values in tiles:
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        safe = higher.masked_fill(higher == float("-inf"), 0)  # a row that has seen no key yet
        weights, shrink = (scores - safe).exp(), (highest - safe).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ values
        highest = higher
    return out / total


def subtracts_no_maximum(tiles: Tiles) -> Any:
    out: Any = 0
    total: Any = 0
    for scores, values in tiles:
        total = total + scores.exp().sum(-1, keepdim=True)
        out = out + scores.exp() @ values
    return out / total


def subtracts_each_tiles_own(tiles: Tiles) -> Any:
    """What was summed before is not made smaller."""
    out: Any = 0
    total: Any = 0
    for scores, values in tiles:
        weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
        total = total + weights.sum(-1, keepdim=True)
        out = out + weights @ values
    return out / total


def shrinks_the_sum_only(tiles: Tiles) -> Any:
    out: Any = 0
    total: Any = 0
    highest: Any = torch.tensor(-1e30)
    for scores, values in tiles:
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights = (scores - higher).exp()
        total = total * (highest - higher).exp() + weights.sum(-1, keepdim=True)
        out = out + weights @ values
        highest = higher
    return out / total


def keeps_the_first_maximum(tiles: Tiles) -> Any:
    out: Any = 0
    total: Any = 0
    highest: Any = None
    for scores, values in tiles:
        highest = scores.amax(-1, keepdim=True).clamp(min=-1e30) if highest is None else highest
        total = total + (scores - highest).exp().sum(-1, keepdim=True)
        out = out + (scores - highest).exp() @ values
    return out / total


def takes_one_maximum_for_all_rows(tiles: Tiles) -> Any:
    out: Any = 0
    total: Any = 0
    highest: Any = torch.tensor(float("-inf"))
    for scores, values in tiles:
        higher = torch.maximum(highest, scores.max())
        total = total * (highest - higher).exp() + (scores - higher).exp().sum(-1, keepdim=True)
        out = out * (highest - higher).exp() + (scores - higher).exp() @ values
        highest = higher
    return out / total


def subtracts_infinity(tiles: Tiles) -> Any:
    """−∞ − (−∞), where a row has seen no key yet."""
    out: Any = 0
    total: Any = 0
    highest: Any = torch.tensor(float("-inf"))
    for scores, values in tiles:
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        total = total * (highest - higher).exp() + (scores - higher).exp().sum(-1, keepdim=True)
        out = out * (highest - higher).exp() + (scores - higher).exp() @ values
        highest = higher
    return out / total


def averages_the_tiles(tiles: Tiles) -> Any:
    outs = [torch.softmax(scores, -1) @ values for scores, values in tiles]
    return torch.stack(outs).mean(0)


def adds_the_tiles(tiles: Tiles) -> Any:
    return sum(torch.softmax(scores, -1) @ values for scores, values in tiles)


def forgets_to_divide(tiles: Tiles) -> Any:
    seen = []

    def once() -> Tiles:
        for tile in tiles:
            seen.append(tile[0])
            yield tile

    out = online_softmax(once())
    return out * torch.logsumexp(torch.cat(seen, -1), -1, keepdim=True).exp()


def joins_them_first(tiles: Tiles) -> Any:
    scores, values = zip(*tiles, strict=True)
    return torch.softmax(torch.cat(scores, -1), -1) @ torch.cat(values)


def goes_through_them_twice(tiles: Tiles) -> Any:
    highest = torch.stack([scores.amax(-1, keepdim=True) for scores, _ in tiles]).amax(0)
    out, total = torch.zeros(1), torch.zeros_like(highest)
    for scores, values in tiles:
        total = total + (scores - highest).exp().sum(-1, keepdim=True)
        out = out + (scores - highest).exp() @ values
    return out / total


def returns_the_sum_too(tiles: Tiles) -> Any:
    return online_softmax(tiles), 1.0


def calls_labkits(tiles: Tiles) -> Any:
    from labkit.context_parallel import combine

    out, log_sum = torch.zeros(1), torch.tensor(float("-inf"))
    for scores, values in tiles:
        out, log_sum = combine(out, log_sum, torch.softmax(scores, -1) @ values, scores.logsumexp(-1, keepdim=True))
    return out


def call(fn: Any, case: Case) -> Made:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiles are small: on a loaded host threads that wait for each other take seconds
    try:
        made = fn(tiles(case.elements, case.more))
    finally:
        torch.set_num_threads(threads)
    return strange(made, tuple(_whole(case).shape), say("online_softmax.it")) or [taken([("out", made)])]


def _whole(case: Case) -> torch.Tensor:
    """All scores at once, in float64."""
    scores, values = zip(*tiles(case.elements, case.more), strict=True)
    return torch.softmax(torch.cat(scores, -1).double(), -1) @ torch.cat(values).double()


def expected(case: Case) -> list[Made]:
    return [[taken([("out", _whole(case))])]]


def budget(case: Case) -> list[Cost]:
    """Memory for a few tiles, however many there are."""
    nbytes = sum(t.nbytes for t in next(tiles(1, case.more)))
    return [Cost(peak=ROOM * nbytes if case.more == MANY else None)]


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    """The first row that is wrong, and how many are."""
    if isinstance(values[0], str):
        return values[0]
    want = _whole(case)
    have = torch.tensor(values[0][0]["out"], dtype=torch.float64).view_as(want)
    rows = [
        n for n, (mine, right) in enumerate(zip(have.tolist(), want.tolist(), strict=True)) if not near(mine, right)
    ]
    row = rows[0] if rows else 0
    numbers = {"want": _numbers(want[row]), "have": _numbers(have[row])}
    return say("online_softmax.row", row=row, **numbers, wrong=len(rows), all=len(want))


def _numbers(row: torch.Tensor) -> str:
    return ", ".join(f"{round(number, 4) + 0:.4g}" for number in row[:3].tolist())  # + 0: not −0


def where(case: Case) -> str:
    told = {
        PLAIN: lambda: "",
        LARGE: lambda: say("online_softmax.large"),
        MASKED: lambda: say("online_softmax.masked"),
        MANY: lambda: say("online_softmax.many"),
    }[case.more]()
    return count("online_softmax.tiles", case.elements) + told


EXERCISE = Exercise(
    name="online_softmax",
    number="5.3",
    cases=(Case(1, 1), Case(1, 2), Case(1, 5), Case(1, 4, more=LARGE), Case(1, 3, more=MASKED), Case(1, 64, more=MANY)),
    call=call,
    expected=expected,
    budget=budget,
    solution=online_softmax,
    hints=lambda: (say("online_softmax.question"), say("online_softmax.state"), say("online_softmax.code")),
    wrong=(
        Wrong(subtracts_no_maximum, "wrong", "nan"),
        Wrong(subtracts_each_tiles_own, "wrong", "2 tiles"),
        Wrong(shrinks_the_sum_only, "wrong", "2 tiles"),
        Wrong(keeps_the_first_maximum, "wrong", "nan"),
        Wrong(takes_one_maximum_for_all_rows, "wrong", "nan"),
        Wrong(subtracts_infinity, "wrong", "row 0 sees none of the first tile's keys"),
        Wrong(averages_the_tiles, "wrong", "2 tiles"),
        Wrong(adds_the_tiles, "wrong", "2 tiles"),
        Wrong(forgets_to_divide, "wrong", "1 tile"),
        Wrong(joins_them_first, "wasteful", "held by a rank"),
        Wrong(goes_through_them_twice, "wrong", "a tensor of shape (3, 1); expected"),
        Wrong(returns_the_sum_too, "wrong", "expected a tensor of shape (3, 4)"),
        Wrong(calls_labkits, "borrowed", "context_parallel.tiles.combine"),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=where,
    theirs=THEIRS,
)  # fmt: skip
