"""The algorithms as lists of moves: who sends which elements to whom, in which order.

A phase is a stretch that its members go through in equally many turns. An all-reduce by ring has two of them, the
reduce-scatter and the all-gather:

>>> for phase in phases("all_reduce", "ring", ranks=3, elements=3):
...     print(phase.turns, [(m.turn, m.source, m.target, list(m.part)) for m in phase.moves if m.source == 0])
2 [(1, 0, 1, [2]), (2, 0, 1, [1])]
2 [(1, 0, 1, [0]), (2, 0, 1, [2])]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Move(NamedTuple):
    """A part of the elements goes from one rank to another, in a turn of its phase (from 1)."""

    turn: int
    source: int
    target: int
    part: range
    chunk: int | None = None
    segment: int = 0
    reduces: bool = False


class Phase(NamedTuple):
    """What its members do together. Moves stand in each rank's own order."""

    members: Sequence[int]
    turns: int
    moves: list[Move]


def phases(
    operation: str, algorithm: str, ranks: int, elements: int, segments: int = 1, node_size: int | None = None,
    root: int = 0,
) -> list[Phase]:  # fmt: skip
    """The phases of one call, in order; of parts without elements too, which are not sent. Nothing is checked here."""
    everyone, flat = range(ranks), range(elements)
    if algorithm == "hierarchical":
        return hierarchical(ranks, flat, segments, node_size or ranks)
    if algorithm == "halving_doubling":
        return halving_doubling(ranks, flat)
    if algorithm == "ring":
        chunks = split(flat, ranks)
        both = [ring(everyone, chunks, segments, reduces=reduces) for reduces in (True, False)]
        return {"all_reduce": both, "reduce_scatter": both[:1], "all_gather": both[1:]}[operation]
    if algorithm == "mesh":
        return _mesh(operation, ranks, flat)
    if operation in ("scatter", "gather"):
        return [central_parts(ranks, root, elements, back=operation == "gather")]
    one = {"tree": tree, "central": central}[algorithm]
    both = [one(ranks, root, flat, up=up) for up in (True, False)]
    return {"reduce": both[:1], "broadcast": both[1:]}.get(operation, both)


def split(part: range, parts: int) -> list[range]:
    """Cut as `torch.tensor_split` does: the first ``len(part) % parts`` are one longer.

    >>> split(range(10), 4)
    [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    size, longer = divmod(len(part), parts)
    return [range(*ends) for ends in pairwise(part.start + k * size + min(k, longer) for k in range(parts + 1))]


# One function an algorithm


def ring(members: Sequence[int], chunks: Sequence[range], segments: int, *, reduces: bool) -> Phase:
    """Everyone sends to the right. Member i begins with chunk i−1 to reduce and scatter, with chunk i to gather."""
    p = len(members)
    begin = 1 if reduces else 0
    moves = [
        Move(turn, rank, members[(i + 1) % p], part, chunk, segment, reduces)
        for turn in range(1, p)
        for i, rank in enumerate(members)
        for chunk in [(i - begin - turn + 1) % p]
        for segment, part in enumerate(split(chunks[chunk], segments))
    ]
    return Phase(members, p - 1, moves)


def tree(ranks: int, root: int, flat: range, *, up: bool) -> Phase:
    """Binomial: up, to the root, the near ones first; down, from it, the far ones first."""
    turns = (ranks - 1).bit_length()
    moves = []
    for turn in range(1, turns + 1):
        distance = 2 ** (turn - 1) if up else 2 ** (turns - turn)
        for place in range(0, ranks - distance, 2 * distance):
            near, far = (place + root) % ranks, (place + distance + root) % ranks
            source, target = (far, near) if up else (near, far)
            moves.append(Move(turn, source, target, flat, reduces=up))
    return Phase(range(ranks), turns, moves)


def central(ranks: int, root: int, flat: range, *, up: bool) -> Phase:
    """All to the root, or the root to all, at once."""
    others = [rank for rank in range(ranks) if rank != root]
    moves = [Move(1, *((other, root) if up else (root, other)), flat, reduces=up) for other in others]
    return Phase(range(ranks), 1, moves)


def central_parts(ranks: int, root: int, size: int, *, back: bool) -> Phase:
    """The root gives each rank its own part, or gets it back."""
    parts = {other: range(other * size, (other + 1) * size) for other in range(ranks) if other != root}
    moves = [Move(1, *((other, root) if back else (root, other)), part) for other, part in parts.items()]
    return Phase(range(ranks), 1, moves)


def mesh(ranks: int, chunk_of: Callable[[int, int], int], chunks: Sequence[range], *, reduces: bool) -> Phase:
    """Everyone to everyone at once, each beginning with its right neighbour. `chunk_of` a source and a target."""
    moves = [
        Move(1, rank, target, chunks[chunk], chunk, reduces=reduces)
        for distance in range(1, ranks)
        for rank in range(ranks)
        for target in [(rank + distance) % ranks]
        for chunk in [chunk_of(rank, target)]
    ]
    return Phase(range(ranks), 1, moves)


def _mesh(operation: str, ranks: int, flat: range) -> list[Phase]:
    def to_owner(source: int, target: int) -> int:
        return target

    def own(source: int, target: int) -> int:
        return source

    chunks = split(flat, ranks)
    if operation == "all_to_all":
        return [mesh(ranks, to_owner, chunks, reduces=False)]
    both = [mesh(ranks, to_owner, chunks, reduces=True), mesh(ranks, own, chunks, reduces=False)]
    return {"all_reduce": both, "reduce_scatter": both[:1], "all_gather": both[1:]}[operation]


def halving_doubling(ranks: int, flat: range) -> list[Phase]:
    """Partners exchange halves of halves, and then the same way back. Ranks beyond a power of two fold theirs in."""
    core = 2 ** (ranks.bit_length() - 1)
    folded = range(core, ranks)
    steps = core.bit_length() - 1
    halve, double = _exchanges(core, flat, halve=True), _exchanges(core, flat, halve=False)
    inner = [Phase(range(core), steps, halve), Phase(range(core), steps, double)]
    if not folded:
        return inner
    fold = [Move(1, rank, rank - core, flat, reduces=True) for rank in folded]
    unfold = [Move(1, rank - core, rank, flat) for rank in folded]
    return [Phase(range(ranks), 1, fold), *inner, Phase(range(ranks), 1, unfold)]


def _exchanges(core: int, flat: range, *, halve: bool) -> list[Move]:
    """At distance d a rank gives away the d chunks of its partner's side; on the way back, the d that it has."""
    chunks = split(flat, core)
    distances = [2**k for k in range(core.bit_length() - 1)]
    moves = []
    for turn, d in enumerate(reversed(distances) if halve else distances, start=1):
        for rank in range(core):
            partner = rank ^ d
            side = (partner if halve else rank) // d * d
            moves.append(Move(turn, rank, partner, _span(chunks[side : side + d]), reduces=halve))
    return moves


def hierarchical(ranks: int, flat: range, segments: int, node_size: int) -> list[Phase]:
    """A ring inside each node, one a chunk between nodes, and one inside again."""
    nodes = [range(at, min(at + node_size, ranks)) for at in range(0, ranks, node_size)]
    chunks = split(flat, len(nodes[0]))
    held = [
        split(range(len(chunks)), len(node)) for node in nodes
    ]  # the chunks of each member: several in a small node
    pieces = [[_span([chunks[c] for c in of_member]) for of_member in of_node] for of_node in held]

    def inside(reduces: bool) -> Iterator[Phase]:
        for node, of_node in zip(nodes, pieces, strict=True):
            yield ring(node, of_node, segments, reduces=reduces)

    def between(number: int) -> Iterator[Phase]:
        holders = [node[_index(of_node, number)] for node, of_node in zip(nodes, held, strict=True)]
        parts = split(chunks[number], len(nodes))
        yield ring(holders, parts, segments, reduces=True)
        yield ring(holders, parts, segments, reduces=False)

    return [*inside(True), *(phase for c in range(len(chunks)) for phase in between(c)), *inside(False)]


def _index(held: Sequence[range], chunk: int) -> int:
    return next(member for member, of_member in enumerate(held) if chunk in of_member)


def _span(parts: Sequence[range]) -> range:
    """Neighbouring parts as one."""
    return range(parts[0].start, parts[-1].stop)
