"""3.1 · which gradients travel together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.checks.borrow import PACKAGE
from labkit.checks.exercise import Case, Cost, Exercise, Wrong, nothing
from labkit.data_parallel import assign
from labkit.show.words import say

GPT2_WIDTH = 768
_BLOCK = (1, 1, 3 * GPT2_WIDTH, 3, GPT2_WIDTH, 1, 1, 1, 4 * GPT2_WIDTH, 4, 4 * GPT2_WIDTH, 1)
#: Bytes of GPT-2 small's 148 tensors in fp32: two embeddings, 12 blocks of 12, the last norm.
GPT2_SMALL = [4 * GPT2_WIDTH * rows for rows in (50_257, 1024, *12 * _BLOCK, 1, 1)]
F, B = "float32", "bfloat16"
#: (sizes, kinds, cap); the smallest first.
SITUATIONS: tuple[tuple[list[int], list[str], int], ...] = (
    ([4], [F], 8), ([4, 8], [F] * 2, 8), ([8, 4], [F] * 2, 4), ([4, 4, 4], [F] * 3, 8), ([8, 4, 4, 10, 2], [F] * 5, 8),
    ([4, 2, 4], [F, B, F], 8), ([4, 4, 2, 4, 2, 4], [F, F, B, F, B, F], 8), ([2, 8, 2, 8, 2, 8], [B, F] * 3, 4),
    ([4, 30, 4, 4], [F] * 4, 8), ([4] * 6, [F] * 6, 1), ([4] * 6, [F] * 6, 10**9),
    (GPT2_SMALL, [F] * len(GPT2_SMALL), 25 * 2**20), (GPT2_SMALL, [F, B] * (len(GPT2_SMALL) // 2), 25 * 2**20),
)  # fmt: skip


def bucket_assignment(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    filling: dict[str, list[int]] = {}  # of each kind, the bucket that is open
    for index in reversed(range(len(sizes))):
        if kinds[index] not in filling:
            filling[kinds[index]] = []
            buckets.append(filling[kinds[index]])
        bucket = filling[kinds[index]]
        bucket.append(index)
        if sum(sizes[i] for i in bucket) >= cap:
            del filling[kinds[index]]
    return buckets


def in_order_of_registration(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    last = len(sizes) - 1
    return [[last - i for i in b] for b in bucket_assignment(sizes[::-1], kinds[::-1], cap)]


def reverses_the_buckets_only(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    return in_order_of_registration(sizes, kinds, cap)[::-1]


def never_more_than_the_cap(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    for index in reversed(range(len(sizes))):
        bucket = filling.get(kinds[index])
        if bucket is None or sum(sizes[i] for i in bucket) + sizes[index] > cap:
            bucket = filling[kinds[index]] = []
            buckets.append(bucket)
        bucket.append(index)
    return buckets


def closes_above_the_cap_only(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    return bucket_assignment(sizes, kinds, cap + 1)


def drops_the_last_bucket(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    return [b for b in bucket_assignment(sizes, kinds, cap) if sum(sizes[i] for i in b) >= cap]


def mixes_kinds(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    return bucket_assignment(sizes, [""] * len(sizes), cap)


def closes_when_the_kind_changes(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    for index in reversed(range(len(sizes))):
        last = buckets[-1] if buckets else []
        if not last or kinds[last[0]] != kinds[index] or sum(sizes[i] for i in last) >= cap:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def cuts_a_tensor(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    """A tensor that does not fit whole fills this bucket, and goes on in the next."""
    buckets: list[list[int]] = []
    room: dict[str, tuple[list[int], int]] = {}
    for index in reversed(range(len(sizes))):
        left = sizes[index]
        while left > 0:
            bucket, free = room.get(kinds[index], ([], 0))
            if not free:
                bucket, free = [], cap
                buckets.append(bucket)
            bucket.append(index)
            room[kinds[index]] = (bucket, max(0, free - left))
            left -= free
    return buckets


def one_bucket(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    return bucket_assignment(sizes, kinds, sum(sizes) + 1)


def a_bucket_a_tensor(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    return [[index] for index in reversed(range(len(sizes)))]


def counts_tensors(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    return bucket_assignment([1] * len(sizes), kinds, cap)


def returns_bytes(sizes: list[int], kinds: list[str], cap: int) -> list[int]:
    return [sum(sizes[i] for i in b) for b in bucket_assignment(sizes, kinds, cap)]


def calls_assign(sizes: list[int], kinds: list[str], cap: int) -> list[list[int]]:
    last = len(sizes) - 1
    return [[last - i for i in b] for b in assign(sizes[::-1], cap, kinds[::-1])]


def call(fn: Callable[..., list[list[int]]], case: Case) -> Any:
    """Lists of numbers, or what else was returned."""
    sizes, kinds, cap = SITUATIONS[case.more]
    made: Any = fn(list(sizes), list(kinds), cap)
    try:
        return [[int(i) for i in bucket] for bucket in made]
    except (TypeError, ValueError):
        return repr(made)


def expected(case: Case) -> list[list[list[int]]]:
    sizes, kinds, cap = SITUATIONS[case.more]
    last = len(sizes) - 1
    return [[[last - i for i in bucket] for bucket in assign(sizes[::-1], cap, kinds[::-1])]]


def differing(case: Case, values: list[Any], wanted: list[Any]) -> list[int]:
    """Wrong, unless the buckets of each kind are the expected ones, in their order."""
    kinds = SITUATIONS[case.more][1]
    return [] if not isinstance(values[0], str) and _by_kind(values[0], kinds) == _by_kind(wanted[0], kinds) else [0]


def _by_kind(buckets: list[list[int]], kinds: list[str]) -> dict[str, list[list[int]]] | None:
    """Kind → its buckets; ``None``: an index is none, a bucket is empty or of several kinds."""
    found: dict[str, list[list[int]]] = {}
    for bucket in buckets:
        of = {kinds[i] if 0 <= i < len(kinds) else "" for i in bucket}
        if len(of) != 1 or "" in of:
            return None
        found.setdefault(of.pop(), []).append(bucket)
    return found


def told(case: Case, values: list[Any], bad: list[int]) -> str:
    """The first bucket that is not the expected one."""
    sizes, kinds, _ = SITUATIONS[case.more]
    have, (want,) = values[0], expected(case)
    if isinstance(have, str):
        return say("bucket_assignment.returned", have=have[:60])
    for number, bucket in enumerate(have):
        if strange := [i for i in bucket if not 0 <= i < len(sizes)]:
            return say("bucket_assignment.strange", number=number, index=strange[0], sizes=len(sizes))
        if len(of := sorted({kinds[i] for i in bucket})) > 1:
            return say("bucket_assignment.mixed", number=number, have=_bucket(bucket, sizes), kinds=", ".join(of))
    places = [i for bucket in have for i in bucket]
    if twice := [i for i in range(len(sizes)) if places.count(i) > 1]:
        return say("bucket_assignment.twice", index=twice[0], size=sizes[twice[0]])
    return _first_astray(have, want, sizes, kinds)


def _first_astray(have: list[list[int]], want: list[list[int]], sizes: list[int], kinds: list[str]) -> str:
    for kind in dict.fromkeys(reversed(kinds)):
        mine, theirs = ([b for b in some if not b or kinds[b[0]] == kind] for some in (have, want))
        for number in range(max(len(mine), len(theirs))):
            pair = [_bucket(some[number], sizes) if number < len(some) else say("bucket_assignment.none")
                    for some in (theirs, mine)]  # fmt: skip
            if pair[0] != pair[1]:
                return say("bucket_assignment.astray", number=number, kind=kind, want=pair[0], have=pair[1])
    return say("bucket_assignment.none")


def _bucket(bucket: list[int], sizes: list[int]) -> str:
    shown = str(bucket) if len(bucket) <= 8 else f"[{bucket[0]}, {bucket[1]}, …, {bucket[-1]}]"
    return say("bucket_assignment.bucket", indices=shown, nbytes=f"{sum(sizes[i] for i in bucket):,}")


def where(case: Case) -> str:
    sizes, kinds, cap = SITUATIONS[case.more]
    if sizes is GPT2_SMALL:
        return say("bucket_assignment.gpt2", kinds=", ".join(dict.fromkeys(kinds)), cap=f"{cap:,}")
    shown = " ".join(f"{size}{'' if kind == F else ' (' + kind + ')'}" for size, kind in zip(sizes, kinds, strict=True))
    return say("bucket_assignment.sizes", sizes=shown or "–", cap=f"{cap:,}")


EXERCISE = Exercise(
    name="bucket_assignment",
    number="3.1",
    core=True,
    cases=tuple(Case(1, 1, more=n) for n in range(len(SITUATIONS))),
    call=call,
    expected=expected,
    budget=lambda case: [Cost()],
    solution=bucket_assignment,
    hints=lambda: (say("bucket_assignment.question"), say("bucket_assignment.state"), say("bucket_assignment.code")),
    wrong=(
        Wrong(in_order_of_registration, "wrong", "bucket 0"),
        Wrong(reverses_the_buckets_only, "wrong", "bucket 0"),
        Wrong(never_more_than_the_cap, "wrong", "expected [4, 3], 12 B, got [4], 2 B"),
        Wrong(closes_above_the_cap_only, "wrong", "bucket 0"),
        Wrong(drops_the_last_bucket, "wrong", "got none"),
        Wrong(mixes_kinds, "wrong", "bfloat16, float32"),
        Wrong(closes_when_the_kind_changes, "wrong", "expected [2, 0], 8 B, got [2], 4 B"),
        Wrong(cuts_a_tensor, "wrong", "in more than one place"),
        Wrong(one_bucket, "wrong", "bucket 0"),
        Wrong(a_bucket_a_tensor, "wrong", "bucket 0"),
        Wrong(counts_tensors, "wrong", "bucket 0"),
        Wrong(returns_bytes, "wrong", "expected a list of lists of indices"),
        Wrong(calls_assign, "borrowed", "data_parallel.buckets.assign"),
    ),
    legal=nothing,
    compare=differing,
    tells=told,
    where=where,
    theirs=frozenset({str(PACKAGE / "data_parallel" / "buckets.py")}),
)  # fmt: skip
