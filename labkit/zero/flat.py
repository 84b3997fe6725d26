"""Flat buffers: parameters laid one after the other, and the equal shards into which a buffer is cut.

A shard ends where the count says, also in the middle of a parameter. So all ranks hold the same number of elements
whatever the sizes are, and only the end of the buffer is padded.

    parameters   aaaaa bbb cccc           sizes 5, 3, 4
    4 shards     aaa|aab|bbc|ccc          12 elements, 3 a rank, no padding
    5 shards     aaa|aab|bbc|ccc|...      15 elements, 3 a rank, 3 of padding

Source: Rajbhandari et al. 2020, "ZeRO", section 5.1; Megatron-LM's documentation of its distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Piece:
    """What one shard holds of one parameter: a run of its elements, the parameter laid flat.

    Attributes:
        index: Which parameter, counted in the buffer.
        offset: Elements of the parameter before this piece.
        length: Elements, at least 1.
        at: Elements of the shard before this piece.
    """

    index: int
    offset: int
    length: int
    at: int


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each parameter begins in the buffer.

    Args:
        sizes: Elements of each parameter.

    >>> starts([5, 3, 4])
    [0, 5, 8]
    """
    return list(accumulate(sizes, initial=0))[:-1]


def shard_size(elements: int, ranks: int) -> int:
    """Elements of each of `ranks` shards: rounded up, so that one size fits all.

    Raises:
        ValueError: There are no ranks, or fewer elements than none.

    >>> shard_size(12, 4), shard_size(13, 4)
    (3, 4)
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: expected at least 1, the size of the group")
    if elements < 0:
        raise ValueError(f"elements={elements}: expected 0 or more")
    return -(-elements // ranks)


def padded(elements: int, ranks: int) -> int:
    """Elements of the buffer: the next multiple of `ranks`.

    >>> padded(12, 4), padded(13, 4)
    (12, 16)
    """
    return shard_size(elements, ranks) * ranks


def cut(sizes: Sequence[int], ranks: int, rank: int) -> list[Piece]:
    """The pieces of which shard `rank` consists, in the order of the buffer.

    A parameter of which the shard holds nothing is left out, and so is padding.

    Args:
        sizes: Elements of each parameter, in the order of the buffer.
        ranks: Shards.
        rank: Which one, from 0.

    Raises:
        ValueError: There is no such shard, or a size is negative.

    >>> for piece in cut([5, 3, 4], ranks=4, rank=1):
    ...     print(piece)
    Piece(index=0, offset=3, length=2, at=0)
    Piece(index=1, offset=0, length=1, at=2)
    >>> cut([5, 3, 4], ranks=5, rank=4)  # padding only
    []
    """
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes={list(sizes)}: expected 0 or more elements each")
    length = shard_size(sum(sizes), ranks)
    if rank not in range(ranks):
        raise ValueError(f"rank={rank}: expected 0 to {ranks - 1}, there are {ranks} shards")
    first, last = rank * length, (rank + 1) * length
    pieces = []
    for index, (start, size) in enumerate(zip(starts(sizes), sizes, strict=True)):
        begin, end = max(first, start), min(last, start + size)
        if begin < end:
            pieces.append(Piece(index, begin - start, end - begin, begin - first))
    return pieces
