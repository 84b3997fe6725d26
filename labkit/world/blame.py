"""Who is to blame for a failed run, in the order that `labkit.world.failure` gives."""

from __future__ import annotations

from typing import Any

from labkit.world.compare import find_disagreement, find_wrong_message
from labkit.world.failure import RunFailed, died, raised_error
from labkit.world.table import Operation


def blame(
    operations: list[list[Operation]], returned: set[int], raised: dict[int, Any], exits: dict[int, int]
) -> RunFailed | None:
    """The first failure.

    Args:
        operations: The operation table, a list a rank.
        returned: Ranks whose function has returned.
        raised: Rank → its exception, a `labkit.world.report.Raised`.
        exits: Rank → the wait status of its process, where that ended.

    Returns:
        The failure to raise, or ``None`` when nothing has failed.
    """
    disagreement = find_disagreement(operations, returned, len(operations)) or find_wrong_message(operations)
    if disagreement is not None:
        return disagreement
    if exits:
        rank, status = min(exits.items(), key=lambda e: (e[1] & 0x7F == 0, e[0]))  # signals before exit codes
        return died(rank, status, operations[rank])
    return raised_error(raised) if raised else None
