"""Every message of a collective operation before it is sent: from whom, to whom, how many bytes, at which step.

>>> broadcast = plan("broadcast", "tree", ranks=4, elements=100, itemsize=4)
>>> for m in broadcast.messages:
...     print(f"step {m.step}: {m.source}→{m.target}, {m.nbytes} bytes")
step 1: 0→2, 400 bytes
step 2: 0→1, 400 bytes
step 2: 2→3, 400 bytes
>>> broadcast.sent(0), broadcast.received(0), broadcast.steps, broadcast.total
(800, 0, 2, 1200)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from labkit.theory.communication.given import a_rank, check_call, whole
from labkit.theory.communication.phases import phases


@dataclass(frozen=True, slots=True)
class Message:
    """Elements that go from one rank to another.

    Attributes:
        step: Step of the source, counted from 1 through the whole call; on the wire, the label ``step``.
        source, target: Ranks.
        nbytes: More than 0: what is empty does not travel.
        chunk: The number of its chunk where it holds just one, or a part of one.
        segment: Which part of the chunk it is, from 0, where chunks are cut into segments.
        phase, turn: Its place in the algorithm, the same for source and target: a phase is a reduce-scatter, an
            all-gather, a reduce or the like; turns count from 1. A rank ends a phase before it begins the next.
        start: The first of its elements, counted in the whole tensor.
        reduces: Whether the target reduces it into its own, or else overwrites that.
    """

    step: int
    source: int
    target: int
    nbytes: int
    chunk: int | None = None
    segment: int = 0
    phase: int = 0
    turn: int = 1
    start: int = 0
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What passes one rank's port, in bytes. It is full-duplex: the larger number is what takes time."""

    rank: int
    sent: int
    received: int


@dataclass(frozen=True)
class Plan:
    """All messages of one call, in each rank's own order; `plan` makes it."""

    operation: str
    algorithm: str
    ranks: int
    messages: tuple[Message, ...]

    def messages_of(self, rank: int) -> list[Message]:
        """What `rank` sends, in its own order."""
        a_rank("rank", rank, self.ranks)
        return [m for m in self.messages if m.source == rank]

    def messages_to(self, rank: int) -> list[Message]:
        """What `rank` receives, in its own order."""
        a_rank("rank", rank, self.ranks)
        return [m for m in self.messages if m.target == rank]

    def sent(self, rank: int) -> int:
        """Bytes that `rank` sends."""
        return sum(m.nbytes for m in self.messages_of(rank))

    def received(self, rank: int) -> int:
        """Bytes that `rank` receives."""
        return sum(m.nbytes for m in self.messages_to(rank))

    @cached_property
    def steps(self) -> int:
        """The largest number of steps of any rank; 0 when nothing is sent."""
        return max((m.step for m in self.messages), default=0)

    @cached_property
    def total(self) -> int:
        """Bytes of all messages."""
        return sum(m.nbytes for m in self.messages)

    @cached_property
    def most_loaded(self) -> Load:
        """The rank whose port has most to do in one direction; the lowest of several.

        >>> plan("all_reduce", "central", ranks=4, elements=100).most_loaded
        Load(rank=0, sent=300, received=300)
        """
        sent, received = [0] * self.ranks, [0] * self.ranks
        for m in self.messages:
            sent[m.source] += m.nbytes
            received[m.target] += m.nbytes
        loads = [Load(*load) for load in zip(range(self.ranks), sent, received, strict=True)]
        return max(loads, key=lambda load: max(load.sent, load.received))


def plan(
    operation: str, algorithm: str, ranks: int, elements: int, itemsize: int = 1, segments: int = 1,
    node_size: int | None = None, root: int = 0,
) -> Plan:  # fmt: skip
    """The messages of one call, to the byte what `labkit.collectives` puts on the wire.

    Args:
        operation: ``"all_reduce"`` and the like; see `ALGORITHMS`.
        algorithm: ``"ring"`` and the like; each operation has its own.
        ranks: 1 or more; one rank sends nothing.
        elements: Of the tensor. For reduce_scatter, all_to_all the whole input of a rank, for all_gather the whole
            output, which the ranks must divide; for scatter and gather one rank's part. A barrier takes 1.
        itemsize: Bytes of an element.
        segments: Messages that each chunk is cut into; ring and hierarchical.
        node_size: Ranks of a node; hierarchical. The last node may have fewer.
        root: Of broadcast, reduce, scatter, gather.

    Raises:
        TypeError: A number is no whole number.
        ValueError: The operation has no such algorithm, or the algorithm no such argument; a number is out of range
            or cannot be divided.

    Assumptions: chunks as `torch.tensor_split` cuts them; chunk r belongs to rank r; empty messages are not sent.

    Source: the ring is that of Patarasuk and Yuan (2009), beginning at chunk r−1 as NCCL does; the binomial tree that
    of Thakur, Rabenseifner and Gropp (2005); halving and doubling is Rabenseifner's (2004); two levels as in Jia et
    al. (2018).

    >>> [plan("all_reduce", "ring", ranks=4, elements=10).sent(rank) for rank in range(4)]
    [14, 15, 16, 15]
    """
    check_call(operation, algorithm, ranks, segments, node_size, root)
    whole("elements", elements, 0)
    whole("itemsize", itemsize, 1)
    if operation in ("reduce_scatter", "all_gather", "all_to_all") and elements % ranks:
        raise ValueError(f"elements is {elements}, which {ranks} ranks do not divide: {operation} needs equal parts")
    if operation == "barrier" and elements * itemsize != 1:
        raise ValueError(f"a barrier sends 1 element of 1 byte, but was given {elements} of {itemsize}: use 1 and 1")
    done = [0] * ranks
    messages = []
    for number, phase in enumerate(phases(operation, algorithm, ranks, elements, segments, node_size, root)):
        messages += [
            Message(done[m.source] + m.turn, m.source, m.target, len(m.part) * itemsize, m.chunk, m.segment,
                    number, m.turn, m.part.start, m.reduces)
            for m in phase.moves if m.part
        ]  # fmt: skip
        for rank in phase.members:
            done[rank] += phase.turns
    return Plan(operation, algorithm, ranks, tuple(messages))
