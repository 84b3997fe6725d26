"""What may fail on one rank alone, such as a disk: all ranks hear of it, and none waits for one that is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def together(act: Callable[[], T], group: dist.ProcessGroup | None = None, by_first: bool = False) -> T:
    """Every rank calls `act`, and all wait for each other. A collective call.

    Args:
        act: What this rank does; it makes no collective call.
        by_first: The group's first rank acts for all.

    Returns:
        What `act` returned; on the others of `by_first` ``None``.

    Raises:
        Exception: What `act` raised here.
        OSError: `act` raised one on another rank.
        RuntimeError: `act` raised another error there.
    """
    made: Any = None
    error: Exception | None = None
    try:
        if not by_first or dist.get_rank(group) == 0:
            made = act()
    except Exception as raised:
        error = raised
    told: list[Any] = [None] * dist.get_world_size(group)
    mine = None if error is None else (isinstance(error, OSError), f"{type(error).__name__}: {error}")
    dist.all_gather_object(told, mine, group=group)
    if error is not None:
        raise error
    for rank, failure in enumerate(told):
        if failure is not None:
            is_file, text = failure
            raise (OSError if is_file else RuntimeError)(f"rank {rank} of the group could not go on: {text}")
    return made


@contextmanager
def plain_errors() -> Iterator[None]:
    """torch's checkpoints raise on every rank what one of them met, as a `BaseException`; here as an `OSError`."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise OSError(f"rank {rank} of the group could not read or write: {type(cause).__name__}: {cause}") from cause
