"""Small words for messages: "rank 1", "ranks 0, 2 and 3", "3 messages"."""

from __future__ import annotations


def named_ranks(ranks: list[int]) -> str:
    """
    >>> named_ranks([1]), named_ranks([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "message"), counted(2, "message")
    ('1 message', '2 messages')
    """
    return f"{number:,} {noun}" + ("s" if number != 1 else "")
