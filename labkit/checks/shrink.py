"""From a case that fails to a smaller one that fails in the same way: fewer ranks, then fewer elements, then plainer.

The order is fixed and nothing is drawn by chance, so that the same function is always shown the same case.
Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (2002), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from labkit.checks.exercise import Case
from labkit.checks.look import Outcome

MOST = 40  #: runs of smaller cases; each takes about 10 ms
#: How many of them may fail, when what fails are crashes: each costs new ranks. The first that hangs ends the search.
CRASHES = 3
FEW = 8  #: up to twice so many elements are tried one by one, more by doubling and halving


class Search:
    """The smallest case known to fail, and what has been tried."""

    def __init__(self, found: Outcome, passed: Iterable[Case], look: Callable[[Case], Outcome]) -> None:
        self.best, self.passed, self.look = found, set(passed), look
        self.runs, self.fails = MOST, CRASHES if found.kind == "crashed" else MOST

    def first(self, cases: Iterable[Case]) -> bool:
        """Go through the cases up to the first that fails in the same way; whether there is one."""
        return any(self._is_like_best(case) for case in cases)

    def _is_like_best(self, case: Case) -> bool:
        if case == self.best.case or case in self.passed or not (self.runs and self.fails):
            return False
        outcome = self.look(case)
        self.runs -= 1
        self.fails -= outcome.kind != "right"
        if outcome.kind in ("deadlocked", "unclear"):
            self.fails = 0
        if not outcome.is_like(self.best):
            self.passed.add(case)
            return False
        self.best = outcome
        return True


def smallest(
    found: Outcome, passed: Iterable[Case], look: Callable[[Case], Outcome], legal: Callable[[Case], bool]
) -> Outcome:
    """The smallest case that was found to fail as `found` did.

    Args:
        found: A case that failed.
        passed: Cases that did not.
        look: Tries a case.
        legal: Whether a case may be shown.
    """
    search = Search(found, passed, look)

    def first(cases: Iterable[Case]) -> bool:
        return search.first(case for case in cases if legal(case))

    case = found.case
    sizes = [replace(case, ranks=n, more=min(case.more, n - 1)) for n in range(2, case.ranks)]
    first(same for size in sizes for same in _both(size))
    case = search.best.case
    if case.elements <= 2 * FEW:
        first(same for n in range(1, case.elements) for same in _both(replace(case, elements=n)))
    else:
        first(replace(case, elements=2**n) for n in range(FEW.bit_length(), (case.elements - 1).bit_length()))
        while first(_halfway(search)):
            pass
    case = search.best.case
    first([replace(case, kind="parts", dtype="int64"), replace(case, dtype="int64")])
    first([replace(search.best.case, more=0)])
    return search.best


def _both(case: Case) -> Iterator[Case]:
    """With elements that tell whose they are, and as it is."""
    yield replace(case, kind="parts", dtype="int64")
    yield case


def _halfway(search: Search) -> Iterator[Case]:
    """Between the largest size known to pass and the smallest known to fail."""
    case = search.best.case
    passed = [c.elements for c in search.passed if replace(c, elements=0) == replace(case, elements=0)]
    low = max((n for n in passed if n < case.elements), default=0)
    while low + 1 < case.elements:
        size = (low + case.elements) // 2
        yield replace(case, elements=size)
        low = size  # it passed, or this line is not reached
