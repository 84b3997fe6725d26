"""Bandwidth as nccl-tests prints it: of the algorithm, and of the bus.

Source: NVIDIA, nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from labkit.theory.communication.given import check_operation, number, whole


def bus_factor(operation: str, ranks: int) -> float:
    """What turns the algorithm's bandwidth into the bus's, which can be compared with the hardware's.

    2(p−1)/p for all_reduce; (p−1)/p for reduce_scatter, all_gather and all_to_all; 1 for broadcast and reduce.
    Assumption: the algorithm that loads the ranks least, whichever was really used.

    Raises:
        TypeError: `ranks` is no whole number.
        ValueError: `ranks` is below 1, or nccl-tests states no factor for the operation.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    check_operation(operation)
    whole("ranks", ranks, 1)
    part = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * part, "reduce_scatter": part, "all_gather": part, "all_to_all": part,
               "broadcast": 1.0, "reduce": 1.0}  # fmt: skip
    if operation not in factors:
        raise ValueError(f"operation is {operation!r}, for which there is no factor: expected {', '.join(factors)}")
    return factors[operation]


def algorithm_bandwidth(nbytes: float, seconds: float) -> float:
    """Bytes per second: size by time. For reduce_scatter and all_gather the size is the whole, as `plan` counts it.

    Raises:
        TypeError, ValueError: One of the two is no number, or out of range.

    >>> algorithm_bandwidth(1e9, seconds=0.5)
    2000000000.0
    """
    number("nbytes", nbytes, "bytes")
    number("seconds", seconds, "seconds", above=True)
    return nbytes / seconds


def bus_bandwidth(operation: str, nbytes: float, seconds: float, ranks: int) -> float:
    """Bytes per second: `algorithm_bandwidth` times `bus_factor`.

    Raises:
        TypeError, ValueError: As these two.

    >>> bus_bandwidth("all_reduce", 1e9, seconds=0.5, ranks=4)
    3000000000.0
    """
    return algorithm_bandwidth(nbytes, seconds) * bus_factor(operation, ranks)
