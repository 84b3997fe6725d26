"""8.4 · accumulation in windows, of which nothing is lost: no token, no small gradient, no last window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from labkit.checks import stepped
from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.checks.gradients import near
from labkit.checks.stepped import Accumulating, Batch
from labkit.show.words import count, say
from labkit.tricks import accumulate

Params = list[torch.nn.Parameter]
Backward = Callable[[Any], int]
Step = Callable[[list[torch.Tensor]], None]


class Situation(NamedTuple):
    """Micro-batches, k to a window; parameters of so many numbers."""

    batches: tuple[Batch, ...]
    k: int
    size: int = 3


#: The smallest first. The fourth: 256 + 1 is 256 in bf16. The last is about memory.
SITUATIONS = (
    Situation((Batch(2, 1.0), Batch(10, 4.0)), 2),
    Situation((Batch(3, 2.0), Batch(3, 5.0), Batch(1, 7.0)), 2),
    Situation((Batch(4, 1.0), Batch(2, 3.0), Batch(5, 2.0), Batch(1, 6.0)), 2),
    Situation((Batch(1, 256.0), *[Batch(1, 1.0)] * 7), 8),
    Situation((Batch(2, 3.0), Batch(4, 1.0, touches=False), Batch(3, 2.0, touches=False)), 2),
    Situation((Batch(2, 3.0), Batch(0), Batch(0), Batch(0), Batch(5, 2.0)), 2),
    Situation((Batch(2, 3.0), Batch(3, 2.0), Batch(1, 5.0)), 1),
    Situation((Batch(2, 3.0), Batch(3, 8.0)), 5),
    Situation((), 2),
    Situation(tuple(Batch(1 + n % 3, 1.0 + n % 4) for n in range(40)), 32, 2**15),
)  # fmt: skip


def accumulate_all(params, batches, k, backward, step):
    for start in range(0, len(batches), k):
        sums = [torch.zeros_like(param, dtype=torch.float32) for param in params]
        tokens = 0
        for batch in batches[start : start + k]:
            tokens += backward(batch)
            for total, param in zip(sums, params, strict=True):
                if param.grad is not None:
                    total += param.grad
                param.grad = None
        if tokens:
            step([total / tokens for total in sums])


def _windows(batches: list[Any], k: int) -> Iterator[list[Any]]:
    for start in range(0, len(batches), k):
        yield batches[start : start + k]


def _taken(params: Params) -> list[torch.Tensor]:
    """Gradients in fp32, which are forgotten."""
    grads = [torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float() for p in params]
    for param in params:
        param.grad = None
    return grads


def _summed(params: Params, window: list[Any], backward: Backward) -> tuple[list[torch.Tensor], int]:
    """Sum of a window's gradients, and its tokens."""
    sums, tokens = [torch.zeros_like(p, dtype=torch.float32) for p in params], 0
    for batch in window:
        tokens += backward(batch)
        for total, grad in zip(sums, _taken(params), strict=True):
            total += grad
    return sums, tokens


def divides_by_k(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    for window in _windows(batches, k):
        sums, tokens = _summed(params, window, backward)
        if tokens:
            step([total / k for total in sums])


def takes_the_mean_of_means(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    for window in _windows(batches, k):
        sums, all_tokens = [torch.zeros_like(p, dtype=torch.float32) for p in params], 0
        for batch in window:
            tokens = backward(batch)
            all_tokens += tokens
            for total, grad in zip(sums, _taken(params), strict=True):
                total += grad / max(1, tokens) / len(window)
        if all_tokens:
            step(sums)


def forgets_to_divide(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    for window in _windows(batches, k):
        sums, tokens = _summed(params, window, backward)
        if tokens:
            step(sums)


def drops_the_rest(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    accumulate_all(params, batches[: len(batches) // k * k], k, backward, step)


def forgets_to_step_for_the_rest(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    sums, tokens = [torch.zeros_like(p, dtype=torch.float32) for p in params], 0
    for number, batch in enumerate(batches, 1):
        tokens += backward(batch)
        for total, grad in zip(sums, _taken(params), strict=True):
            total += grad
        if number % k == 0:
            if tokens:
                step([total / tokens for total in sums])
            sums, tokens = [torch.zeros_like(total) for total in sums], 0


def always_steps_at_the_end(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    """Also where nothing is left."""
    accumulate_all(params, batches, k, backward, step)
    if len(batches) % k == 0:
        step([torch.zeros_like(p, dtype=torch.float32) for p in params])


def takes_the_rest_into_the_last(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    whole = max(1, len(batches) // k)
    for number in range(whole):
        end = len(batches) if number == whole - 1 else (number + 1) * k
        sums, tokens = _summed(params, batches[number * k : end], backward)
        if tokens:
            step([total / tokens for total in sums])


def accumulates_in_bf16(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    for window in _windows(batches, k):
        tokens = sum([backward(batch) for batch in window])
        grads = _taken(params)
        if tokens:
            step([grad / tokens for grad in grads])


def hands_over_bf16(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    accumulate_all(params, batches, k, backward, lambda grads: step([grad.bfloat16() for grad in grads]))


def forgets_to_forget(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    """Adds up what autograd has added up already."""
    for window in _windows(batches, k):
        sums, tokens = [torch.zeros_like(p, dtype=torch.float32) for p in params], 0
        for batch in window:
            tokens += backward(batch)
            for total, param in zip(sums, params, strict=True):
                total += 0 if param.grad is None else param.grad
        if tokens:
            step([total / tokens for total in sums])


def keeps_what_a_window_added_up(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    for window in _windows(batches, k):
        more, tokens = _summed(params, window, backward)
        for total, grad in zip(sums, more, strict=True):
            total += grad
        if tokens:
            step([total / tokens for total in sums])


def counts_all_tokens_so_far(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    so_far = 0
    for window in _windows(batches, k):
        sums, tokens = _summed(params, window, backward)
        so_far += tokens
        if tokens:
            step([total / so_far for total in sums])


def steps_after_each(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    accumulate_all(params, batches, 1, backward, step)


def steps_once(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    accumulate_all(params, batches, len(batches) or 1, backward, step)


def divides_by_no_tokens(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    for window in _windows(batches, k):
        sums, tokens = _summed(params, window, backward)
        step([total / tokens for total in sums])


def steps_with_zeros(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    """Adam moves at a step of zeros, too."""
    for window in _windows(batches, k):
        sums, tokens = _summed(params, window, backward)
        step([total / max(1, tokens) for total in sums])


def passes_over_micro_batches_without_tokens(
    params: Params, batches: list[Any], k: int, backward: Backward, step: Step
) -> None:
    """The windows are others then."""
    accumulate_all(params, [batch for batch in batches if batch.tokens], k, backward, step)


def needs_every_gradient(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    for window in _windows(batches, k):
        sums, tokens = [torch.zeros_like(p, dtype=torch.float32) for p in params], 0
        for batch in window:
            tokens += backward(batch)
            for total, param in zip(sums, params, strict=True):
                total += param.grad.float()  # type: ignore[union-attr]
                param.grad = None
        if tokens:
            step([total / tokens for total in sums])


def keeps_every_gradient(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    for window in _windows(batches, k):
        kept, tokens = [], 0
        for batch in window:
            tokens += backward(batch)
            kept.append(_taken(params))
        if tokens:
            step([torch.stack(grads).sum(0) / tokens for grads in zip(*kept, strict=True)])


def calls_labkits(params: Params, batches: list[Any], k: int, backward: Backward, step: Step) -> None:
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    for micro in accumulate(batches, k, tokens=lambda batch: batch.tokens):
        backward(micro.batch)
        for total, grad in zip(sums, _taken(params), strict=True):
            total += grad * micro.weight
        if micro.last:
            step(sums)
            sums = [torch.zeros_like(total) for total in sums]


def call(fn: Any, case: Case) -> tuple[list[stepped.Step], list[int]]:
    """Steps, and the order of backwards."""
    batches, k, size = SITUATIONS[case.more]
    given = Accumulating(size)
    fn(given.params, [batch._replace(number=n) for n, batch in enumerate(batches)], k, given.backward, given.step)
    return given.steps, given.order


def expected(case: Case) -> list[tuple[list[stepped.Step], list[int]]]:
    batches, k, size = SITUATIONS[case.more]
    steps: list[stepped.Step] = []
    for end in [*range(k, len(batches), k), len(batches)]:
        window = batches[(end - 1) // k * k : end]
        if tokens := sum(b.tokens for b in window):
            means = [sum(b.tokens * b.each for b in of) / tokens for of in (window, [b for b in window if b.touches])]
            steps.append(([[mean] * min(4, n) for mean, n in zip(means, (size, 2), strict=True)], end))
    return [(steps, list(range(len(batches))))]


def differing(case: Case, values: list[Any], wanted: list[Any]) -> list[int]:
    (have, order), (want, right) = values[0], wanted[0]
    return [0] if order != right or len(have) != len(want) or not all(map(_is, have, want)) else []


def _is(have: Any, want: Any) -> bool:
    """Whether a step is the expected one; micro-batches without a token may come before it, or after."""
    return not isinstance(have[0], str) and all(map(near, have[0], want[0])) and have[1] == want[1]


def told(case: Case, values: list[Any], _: list[int]) -> str:
    (have, order), (want, right) = values[0], expected(case)[0]
    for number, (mine, wanted) in enumerate(zip(have, want, strict=False)):
        if not _is(mine, wanted):
            return _astray(number, mine, wanted)
    if order != right:
        return say("accumulate_all.order", want=_numbers(right), have=_numbers(order))
    after = ", ".join(str(end) for _, end in have)
    line = say("accumulate_all.steps", want=len(want), have=len(have))
    return line + (say("accumulate_all.after", after=after) if have else "")


def _astray(number: int, have: Any, want: Any) -> str:
    if have[1] != want[1]:
        return say("accumulate_all.when", number=number, want=want[1], have=have[1])
    if isinstance(have[0], str):
        return say("accumulate_all.returned", number=number, have=have[0])
    which = next(n for n, (a, b) in enumerate(zip(have[0], want[0], strict=True)) if not near(a, b))
    mine, right = have[0][which][0], want[0][which][0]
    line = say("accumulate_all.gradient", number=number, which=which, want=f"{right:.4g}", have=f"{mine:.4g}")
    times = round(mine / right) if right else 0
    return line + say("gradients.ratio", ratio=times) if times > 1 and near([mine], [times * right]) else line


def _numbers(order: list[int]) -> str:
    return " ".join(map(str, order[:12])) or say("accumulate_all.none")


def budget(case: Case) -> list[Cost]:
    """Sums, means and a gradient, made anew or not, and what backward takes: far from k gradients."""
    return [Cost(peak=8 * 4 * SITUATIONS[case.more].size)]


def where(case: Case) -> str:
    batches, k, _ = SITUATIONS[case.more]
    shown = " ".join(str(b.tokens) for b in batches) if len(batches) <= 12 else ""
    tokens = [say("accumulate_all.tokens", tokens=shown)] if shown else []
    return ", ".join([count("accumulate_all.batches", len(batches)), f"k = {k}", *tokens])


EXERCISE = Exercise(
    name="accumulate_all",
    number="8.4",
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=budget,
    solution=accumulate_all,
    hints=lambda: (say("accumulate_all.question"), say("accumulate_all.state"), say("accumulate_all.code")),
    wrong=(
        Wrong(divides_by_k, "wrong", "expected 3.5, got 21"),
        Wrong(takes_the_mean_of_means, "wrong", "expected 3.5, got 2.5"),
        Wrong(forgets_to_divide, "wrong", "expected 3.5, got 42"),
        Wrong(drops_the_rest, "wrong", "backwards: expected 0 1 2, got 0 1"),
        Wrong(forgets_to_step_for_the_rest, "wrong", "calls of step: expected 2, got 1"),
        Wrong(always_steps_at_the_end, "wrong", "calls of step: expected 1, got 2"),
        Wrong(takes_the_rest_into_the_last, "wrong", "micro-batches before it: expected 2, got 3"),
        Wrong(accumulates_in_bf16, "wrong", "expected 32.88, got 32"),
        Wrong(hands_over_bf16, "wrong", "torch.bfloat16"),
        Wrong(forgets_to_forget, "wrong", "expected 3.5, got 3.667"),
        Wrong(keeps_what_a_window_added_up, "wrong", "step 1, gradient 0: expected 7, got 28"),
        Wrong(counts_all_tokens_so_far, "wrong", "step 1, gradient 0: expected 7, got 1"),
        Wrong(steps_after_each, "wrong", "micro-batches before it: expected 2, got 1"),
        Wrong(steps_once, "wrong", "micro-batches before it: expected 2, got 3"),
        Wrong(divides_by_no_tokens, "wrong", "step 1: micro-batches before it: expected 5, got 4"),
        Wrong(steps_with_zeros, "wrong", "step 1: micro-batches before it: expected 5, got 4"),
        Wrong(passes_over_micro_batches_without_tokens, "wrong", "tokens 2 0 0 0 5"),
        Wrong(needs_every_gradient, "crashed", "AttributeError"),
        Wrong(keeps_every_gradient, "wasteful", "held by a rank"),
        Wrong(calls_labkits, "borrowed", "tricks.accumulate."),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=where,
    theirs=frozenset({str(PACKAGE / "tricks" / "accumulate.py")}),
)  # fmt: skip
