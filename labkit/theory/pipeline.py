"""Pipeline schedules in closed form: bubbles, makespans, what is held and what is sent.

p ranks, m micro-batches, v stages a rank; F, B, W the time of one micro-batch on a rank, all of its stages together:
forward, the gradient of the input, the gradient of the weights.

    schedule      what a rank idles        what rank r holds           in
    gpipe         (p−1)(F+B+W)             m                           stages of L/p layers
    1f1b          (p−1)(F+B+W)             min(m, p−r)                 stages of L/p layers
    interleaved   (p−1)(F+B+W)/v           (v−1)p + 2(p−1−r) + 1       stages of L/(pv) layers
    zb_h1         (p−1)(F+B−W)             min(m, p)                   stages of L/p layers
    zb_h2         (p−1)(F+B−2W)            min(m, 2p−1)                stages of L/p layers
    dual_pipe     (p/2−1)(F&B+B−2W)        p+1                         stages of L/p layers

`labkit.pipeline.simulate` needs no formula, and also knows transfers, slow ranks and uneven stages.

Sources: Huang et al., "GPipe" (2019); Narayanan et al., "Efficient large-scale language model training on GPU
clusters" (2021), section 2.2; Korthikanti et al. (2022), appendix B; Qi et al., "Zero bubble pipeline parallelism"
(2023), section 2; DeepSeek-AI, "DeepSeek-V3 technical report" (2024), table 2, whose B is both gradients.
"""

from __future__ import annotations

from labkit.theory.communication.given import a_rank, number, whole
from labkit.theory.memory.shape import divides, one_of

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "dual_pipe")


def bubble(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time of GPipe, 1F1B and (with `chunks`) interleaved 1F1B, as a share of the ideal time: (p−1)/(vm).

    Args:
        ranks: p.
        micro_batches: m; with chunks above 1 a multiple of p.
        chunks: v, stages a rank.

    Raises:
        TypeError, ValueError: No whole number, or below 1; m no multiple of p where it has to be.

    Assumptions: all stages take the same time, transfers none.

    Source: Narayanan et al. (2021), sections 2.2.1 and 2.2.2.

    >>> bubble(ranks=4, micro_batches=8), bubble(ranks=4, micro_batches=8, chunks=2)
    (0.375, 0.1875)
    """
    _check(ranks, micro_batches, chunks)
    return (ranks - 1) / (chunks * micro_batches)


def bubble_of_total(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """The same idle time as a share of all time: (p−1)/(vm+p−1). Args, Raises, Assumptions, Source: as `bubble`.

    Room for four micro-batches, four ranks: GPipe can only take m = 4, 1F1B any m.

    >>> round(bubble_of_total(4, micro_batches=4), 3), round(bubble_of_total(4, micro_batches=32), 3)
    (0.429, 0.086)
    """
    idle = bubble(ranks, micro_batches, chunks)
    return idle / (1 + idle)


def idle_time(
    schedule: str, ranks: int, forward: float, backward: float, weight: float = 0, *, chunks: int = 1,
    together: float | None = None,
) -> float:  # fmt: skip
    """How long a rank idles between the beginning and the end of a batch; the first column of the table above.

    Args:
        schedule: One of `SCHEDULES`.
        ranks: p; for dual_pipe even.
        forward, backward, weight: F, B and W, in any unit. Where a schedule does not take B and W apart, only their sum
            matters.
        chunks: v, for interleaved.
        together: F&B, for dual_pipe: how long a forward and a whole backward (B and W) take that overlap. Default:
            their sum, no overlap.

    Returns:
        In the same unit. For zb_h2 on the way from a rank's own first action to its own last: between ranks the batch
        is slanted.

    Raises:
        TypeError, ValueError: An unknown schedule; a number out of range; W longer than F or B where they are taken
            apart, or `together` or `chunks` where they mean nothing.

    Assumptions: all stages take the same time, transfers none; enough micro-batches: p for zb_h1, 2p−1 for zb_h2, 2p
    for dual_pipe, a multiple of p for interleaved. dual_pipe: F and B take the same; a forward and a backward
    that overlap are one block, and neither's result leaves before its end.

    >>> [idle_time(s, 4, forward=1, backward=1, weight=1) for s in ("1f1b", "zb_h1", "zb_h2")]
    [9.0, 3.0, 0.0]
    """
    one_of("schedule", schedule, SCHEDULES)
    _check_chunks(schedule, chunks)
    whole("ranks", ranks, 1)
    for name, value in (("forward", forward), ("backward", backward), ("weight", weight)):
        number(name, value, "time")
    if together is not None:
        if schedule != "dual_pipe":
            raise ValueError(f"together is {together}, but {schedule} overlaps no forward and backward: leave it out")
        number("together", together, "time")
    if schedule in ("zb_h1", "zb_h2", "dual_pipe") and weight > min(forward, backward):
        raise ValueError(f"weight is {weight}, longer than forward={forward} or backward={backward}: {schedule} has a "
                         "closed form for W up to F and B only; use labkit.pipeline.simulate")  # fmt: skip
    every = forward + backward + weight
    if schedule == "dual_pipe":
        if ranks % 2:
            raise ValueError(f"ranks is {ranks}: dual_pipe takes an even number, half of them for each direction")
        both = every if together is None else together
        return float((ranks // 2 - 1) * (both + backward - 2 * weight))
    less = {"zb_h1": 2 * weight, "zb_h2": 3 * weight}.get(schedule, 0)
    return (ranks - 1) * (every - less) / chunks


def makespan(
    schedule: str, ranks: int, micro_batches: int, forward: float, backward: float, weight: float = 0, *,
    chunks: int = 1, communication: float = 0,
) -> float:  # fmt: skip
    """From the first forward to the end of a batch: m(F+B+W) and `idle_time`. For zb_h2 that of the longest rank.

    Args, Assumptions: as `idle_time`.
        micro_batches: m.
        communication: How long a transfer takes, no longer than F or the whole backward; GPipe only. It passes p−1
            borders forward and p−1 backward that nothing hides: 2(p−1) transfers more. In 1F1B transfers also stand
            between a rank's forward and its next backward: no closed form, and longer than GPipe.

    Raises:
        TypeError, ValueError: As `idle_time`; too few micro-batches; `communication` for another schedule.

    >>> makespan("gpipe", 4, 8, forward=20, backward=40), makespan("gpipe", 4, 8, 20, 40, communication=5)
    (660.0, 690.0)
    >>> makespan("zb_h1", 4, 8, forward=1, backward=1, weight=1)
    27.0
    """
    idle = idle_time(schedule, ranks, forward, backward, weight, chunks=chunks)
    _check(ranks, micro_batches, chunks)
    least = {"zb_h1": ranks, "zb_h2": 2 * ranks - 1, "dual_pipe": 2 * ranks}.get(schedule, 1)
    if micro_batches < least:
        raise ValueError(f"micro_batches is {micro_batches}: {schedule} has a closed form from {least} on, for {ranks} "
                         "ranks; use labkit.pipeline.simulate")  # fmt: skip
    number("communication", communication, "time")
    if communication and (schedule != "gpipe" or communication > min(forward, backward + weight)):
        raise ValueError(f"communication is {communication}: only gpipe has a closed form with transfers, up to the "
                         "time of a forward or backward; use labkit.pipeline.simulate")  # fmt: skip
    return micro_batches * (forward + backward + weight) + idle + 2 * (ranks - 1) * communication


def in_flight(schedule: str, ranks: int, micro_batches: int, rank: int = 0, chunks: int = 1) -> int:
    """What a rank holds at its peak: pairs (micro-batch, stage), the second column of the table above.

    A pair is held from its F to its B, or to its W where they are apart. Multiply with what one micro-batch leaves in
    one stage; `memory.layers_in_flight` counts layers instead.

    Args:
        rank: r, from 0.

    Raises:
        TypeError, ValueError: An unknown schedule, a number out of range, m no multiple of p for interleaved.

    >>> [in_flight("1f1b", ranks=4, micro_batches=8, rank=rank) for rank in range(4)]
    [4, 3, 2, 1]
    """
    one_of("schedule", schedule, SCHEDULES)
    _check_chunks(schedule, chunks)
    _check(ranks, micro_batches, chunks)
    a_rank("rank", rank, ranks)
    most = {
        "gpipe": micro_batches,
        "1f1b": ranks - rank,
        "interleaved": (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1,
        "zb_h1": ranks,
        "zb_h2": 2 * ranks - 1,
        "dual_pipe": ranks + 1,
    }
    return min(micro_batches * chunks, most[schedule])


def memory_factor(ranks: int, chunks: int) -> float:
    """How much more the first rank holds interleaved than in 1F1B, in bytes: 1 + (p−1)/(pv).

    Raises:
        TypeError, ValueError: No whole number, or below 1.

    Assumption: m is p or more, a multiple of it; layers are alike.

    Source: Korthikanti et al. (2022), appendix B.

    >>> memory_factor(ranks=4, chunks=3)
    1.25
    """
    _check(ranks, ranks, chunks)
    return 1 + (ranks - 1) / (ranks * chunks)


def messages(ranks: int, micro_batches: int, chunks: int = 1) -> int:
    """Messages of all ranks in a batch: each micro-batch crosses each border between stages, forward and back.

    2m(pv−1), with one rank none: (pv−1)/(p−1) times as many with v stages a rank as with one.

    Raises:
        TypeError, ValueError: No whole number, or below 1.

    Assumption: neighbouring stages are on different ranks, as in all but V-shaped placements.

    Source: Narayanan et al. (2021), section 2.2.2, which says v times as many.

    >>> messages(4, 8), messages(4, 8, chunks=2), round(messages(4, 8, 2) / messages(4, 8), 2)
    (48, 112, 2.33)
    """
    return sum(messages_sent(ranks, micro_batches, rank, chunks) for rank in range(ranks))


def messages_sent(ranks: int, micro_batches: int, rank: int, chunks: int = 1) -> int:
    """Messages that one rank sends: 2vm; m fewer on the first rank and on the last. Args, Raises: as `messages`.

    >>> [messages_sent(4, micro_batches=8, rank=rank) for rank in range(4)]
    [8, 16, 16, 8]
    """
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        whole(name, value, 1)
    a_rank("rank", rank, ranks)
    if ranks == 1:
        return 0
    at_an_end = rank in (0, ranks - 1)  # the first stage sends nothing back, the last nothing on
    return micro_batches * (2 * chunks - at_an_end)


def message_bytes(batch: int, sequence: int, hidden: int, width: int = 2) -> int:
    """Bytes of one message between stages: b·s·h elements of `width` bytes, forward and backward alike.

    Args:
        batch: b, samples of a micro-batch.
        sequence: s, tokens of a sample.
        hidden: h.
        width: Bytes of an element.

    Raises:
        TypeError, ValueError: No whole number, or below 1.

    Assumption: a stage hands on the hidden states alone, whole (with sequence parallelism each rank a t-th of it).

    >>> message_bytes(batch=1, sequence=4096, hidden=8192) / 1e6  # MB
    67.108864
    """
    for name, value in (("batch", batch), ("sequence", sequence), ("hidden", hidden), ("width", width)):
        whole(name, value, 1)
    return batch * sequence * hidden * width


def _check(ranks: int, micro_batches: int, chunks: int) -> None:
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        whole(name, value, 1)
    if chunks > 1:
        divides("ranks", ranks, "micro_batches", micro_batches)


def _check_chunks(schedule: str, chunks: int) -> None:
    whole("chunks", chunks, 1)
    if (schedule == "interleaved") != (chunks > 1):
        raise ValueError(f"chunks is {chunks} for {schedule}: expected 2 or more for interleaved, 1 for all others")
