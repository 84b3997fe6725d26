"""Closed formulas: how often α, β and γ, and what each rank sends. They know nothing of single messages.

α is the latency of a message in seconds, β seconds per byte on the wire, γ seconds per byte reduced; n bytes, p ranks.

Sources: Hockney, "The communication challenge for MPP" (1994), for α and β; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005), for the tables; Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations" (2009), for the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from labkit.theory.communication.given import check_call, number


@dataclass(frozen=True, slots=True)
class Cost:
    """An operation takes `alpha`·α + `beta`·n·β + `gamma`·n·γ."""

    alpha: int
    beta: Fraction
    gamma: Fraction

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.alpha + other.alpha, self.beta + other.beta, self.gamma + other.gamma)

    def time(self, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Seconds."""
        return self.alpha * alpha + float(self.beta) * nbytes * beta + float(self.gamma) * nbytes * gamma


def cost(operation: str, algorithm: str, ranks: int, node_size: int | None = None) -> Cost:
    """How often α, nβ and nγ, on the way that takes longest.

    ====================  ==============  ==================  ============
    all-reduce            α               nβ                  nγ
    ====================  ==============  ==================  ============
    ring                  2(p−1)          2(p−1)/p            (p−1)/p
    mesh                  2               2(p−1)/p            (p−1)/p
    halving_doubling      2·log₂p         2(p−1)/p            (p−1)/p
    tree                  2·⌈log₂p⌉       2·⌈log₂p⌉           ⌈log₂p⌉
    central               2(p−1)          2(p−1)              p−1
    ====================  ==============  ==================  ============

    Reduce-scatter and all-gather are one half of ring and mesh each, reduce and broadcast of tree and central; the
    γ is the first half's. scatter and gather (n: one rank's part) cost what a central broadcast does; all_to_all (n:
    a rank's whole input) is the mesh's all-gather. halving_doubling with p no power of two folds first: with
    q = 2^⌊log₂p⌋ instead of p, plus 2(α + nβ) + nγ. hierarchical with K nodes of m: a ring's of p = m, plus a ring's
    of p = K with n/m. If the last node has fewer ranks, one of them has most chunks, w of m: then w times as much
    between nodes, and w·n/m at each step inside that node, if that is slower.

    Assumptions: one full-duplex port a rank, links all alike, ranks that begin together. The central root's messages
    follow each other with their latencies, as in Hockney's model; those of a mesh overlap. `paced_time` overlaps both.
    For tree with p no power of two, and hierarchical with a smaller last node, it is an upper bound.

    Raises:
        TypeError, ValueError: As `plan`.

    >>> cost("all_reduce", "ring", 8)
    Cost(alpha=14, beta=Fraction(7, 4), gamma=Fraction(7, 8))
    """
    check_call(operation, algorithm, ranks, node_size=node_size)
    if algorithm == "hierarchical":
        inside, between = _two_levels(ranks, node_size or ranks)
        return inside + between
    return _one_level(operation, algorithm, ranks)


def _one_level(operation: str, algorithm: str, p: int) -> Cost:
    if algorithm == "halving_doubling":
        return _halving_doubling(p)
    log, part, none = (p - 1).bit_length(), Fraction(p - 1, p), Fraction(0)
    first, second = {
        "ring": (Cost(p - 1, part, part), Cost(p - 1, part, none)),
        "mesh": (Cost(min(1, p - 1), part, part), Cost(min(1, p - 1), part, none)),
        "tree": (Cost(log, Fraction(log), Fraction(log)), Cost(log, Fraction(log), none)),
        "central": (Cost(p - 1, Fraction(p - 1), Fraction(p - 1)), Cost(p - 1, Fraction(p - 1), none)),
    }[algorithm]
    if operation in ("all_reduce", "barrier"):
        return first + second
    return first if operation in ("reduce_scatter", "reduce") else second


def _halving_doubling(p: int) -> Cost:
    steps = p.bit_length() - 1
    core = 2**steps
    part = Fraction(core - 1, core)
    inner = Cost(2 * steps, 2 * part, part)
    return inner if p == core else inner + Cost(2, Fraction(2), Fraction(1))


def _two_levels(p: int, node_size: int) -> tuple[Cost, Cost]:
    """Inside a node, and between nodes."""
    nodes, m, last, most = _nodes(p, node_size)
    between = _one_level("all_reduce", "ring", nodes)
    part, share = Fraction(max(m - 1, (last - 1) * most), m), Fraction(most, m)
    return (
        Cost(2 * (m - 1), 2 * part, part),
        Cost(most * between.alpha, share * between.beta, share * between.gamma),
    )


def _nodes(p: int, node_size: int) -> tuple[int, int, int, int]:
    """Nodes, ranks of a full one (and chunks), ranks of the last one, chunks of its rank with most."""
    nodes, m = -(-p // node_size), min(node_size, p)
    last = p - (nodes - 1) * node_size
    return nodes, m, last, -(-m // last)


def time(
    operation: str, algorithm: str, ranks: int, nbytes: float, alpha: float, beta: float, gamma: float = 0.0,
    segments: int = 1, node_size: int | None = None, alpha_between: float | None = None,
    beta_between: float | None = None,
) -> float:  # fmt: skip
    """Seconds that the operation takes, by the formula that is published for it: `cost` with its α, β and γ.

    A ring that cuts its chunks into S segments passes one on while the next arrives. With H = p−1 hops and
    s = nβ/(pS), the time of a segment, a reduce-scatter or an all-gather takes the longer of two chains:

        H(α + s) + (S−1)s    latency-bound: the first segment goes all the way, the others follow it
        α + H·S·s            port-bound: a port that is never idle, and the latency of the last segment

    and an all-reduce both in turn, since a rank ends the one before it begins the other.

    Args:
        nbytes: n, as `plan` counts `elements`.
        alpha: Seconds a message; beta: seconds a byte, that is 1/bandwidth; gamma: seconds a reduced byte.
        segments: S; ring and hierarchical, without gamma (`paced_time` takes both).
        node_size, alpha_between, beta_between: hierarchical; links between nodes, left out: as inside.

    Raises:
        TypeError, ValueError: As `plan`; a negative number; links between nodes of an algorithm that knows none.

    >>> time("all_reduce", "ring", 4, nbytes=8e6, alpha=10e-6, beta=1e-9)
    0.01206
    """
    check_call(operation, algorithm, ranks, segments, node_size)
    _check_links(nbytes, alpha, beta, gamma)
    if operation == "barrier" and nbytes != 1:
        raise ValueError(f"nbytes is {nbytes}, but a barrier sends 1 byte: use nbytes=1")
    if algorithm != "hierarchical" and (alpha_between, beta_between) != (None, None):
        raise ValueError(f"{algorithm} knows no nodes: leave alpha_between and beta_between out, or use hierarchical")
    if segments > 1 and gamma:
        raise ValueError("the formula for segments has no gamma: leave one of the two out, or use paced_time")
    between = (alpha if alpha_between is None else alpha_between, beta if beta_between is None else beta_between)
    _check_links(nbytes, *between, gamma)
    if segments > 1:
        return _segmented(operation, ranks, nbytes, (alpha, beta), segments, node_size, between)
    if algorithm == "hierarchical":
        inner, outer = _two_levels(ranks, node_size or ranks)
        return inner.time(nbytes, alpha, beta, gamma) + outer.time(nbytes, *between, gamma)
    return _one_level(operation, algorithm, ranks).time(nbytes, alpha, beta, gamma)


def _segmented(
    operation: str, ranks: int, nbytes: float, link: tuple[float, float], segments: int, node_size: int | None,
    between: tuple[float, float],
) -> float:  # fmt: skip
    if node_size is None:
        phase = _ring_phase(ranks - 1, nbytes / ranks, *link, segments)
        return 2 * phase if operation == "all_reduce" else phase
    nodes, m, last, most = _nodes(ranks, node_size)
    full = _ring_phase(m - 1, nbytes / m, *link, segments)
    smaller = _ring_phase(last - 1, most * nbytes / m, *link, segments)
    return 2 * max(full, smaller) + 2 * most * _ring_phase(nodes - 1, nbytes / (m * nodes), *between, segments)


def _ring_phase(hops: int, chunk: float, alpha: float, beta: float, segments: int) -> float:
    """Seconds of a reduce-scatter or all-gather; `chunk` in bytes."""
    s = chunk * beta / segments
    return max(hops * (alpha + s) + (segments - 1) * s, alpha + hops * segments * s) if hops else 0.0


def sent_per_rank(
    operation: str, algorithm: str, ranks: int, nbytes: float, node_size: int | None = None, root: int = 0
) -> list[float]:
    """Bytes that each rank sends, by formula; `plan` says it to the byte where n is not divisible.

    ring, mesh: (p−1)/p·n a phase, all-reduce two phases. tree: a reduce n once, but the root; a broadcast n for each
    child, so the root ⌈log₂p⌉·n. central: the others n, the root (p−1)n. halving_doubling: 2(q−1)/q·n, q = 2^⌊log₂p⌋,
    and n once more for the ranks that are folded and for those that they fold into. hierarchical: 2(m−1)/m·n inside
    and 2(K−1)/K·n/m between.

    Args:
        nbytes: n, as `plan` counts `elements`.

    Raises:
        TypeError, ValueError: As `plan`.

    Source: see the module; for all-reduce these add up to 2(p−1)n whatever the algorithm.

    >>> sent_per_rank("all_reduce", "central", 4, nbytes=100)
    [300.0, 100.0, 100.0, 100.0]
    """
    check_call(operation, algorithm, ranks, 1, node_size, root)
    number("nbytes", nbytes, "bytes")
    if algorithm == "hierarchical":
        shares = _two_level_shares(ranks, node_size or ranks)
    else:
        shares = [_share(operation, algorithm, ranks, (rank - root) % ranks) for rank in range(ranks)]
    return [float(share * nbytes) for share in shares]


def _share(operation: str, algorithm: str, p: int, place: int) -> Fraction:
    """Multiples of n; `place` is the rank counted from the root."""
    if algorithm == "halving_doubling":
        core = 2 ** (p.bit_length() - 1)
        return Fraction(1) if place >= core else Fraction(2 * (core - 1), core) + (place < p - core)
    if algorithm in ("ring", "mesh"):
        return Fraction(p - 1, p) * (2 if operation == "all_reduce" else 1)
    up = min(place, 1)
    if algorithm == "tree":
        low_zeros = (place & -place).bit_length() - 1 if place else p
        down = min(low_zeros, (p - place - 1).bit_length())
    else:
        down = 0 if place else p - 1
    both = {"reduce": up, "gather": up, "all_reduce": up + down, "barrier": up + down}
    return Fraction(both.get(operation, down))


def _two_level_shares(p: int, node_size: int) -> list[Fraction]:
    nodes, m = -(-p // node_size), min(node_size, p)
    shares = []
    for at in range(0, p, node_size):
        members = min(node_size, p - at)
        held = [m // members + (i < m % members) for i in range(members)]  # chunks; one each in a full node
        for i, mine in enumerate(held):
            inside = 2 - Fraction(mine + held[(i + 1) % members], m)
            shares.append(inside + Fraction(mine, m) * Fraction(2 * (nodes - 1), nodes))
    return shares


def crossover(
    operation: str, first: str, second: str, ranks: int, alpha: float, beta: float, node_size: int | None = None
) -> float | None:
    """The size in bytes above which `second` takes less time than `first`; ``None`` if there is none.

    With a₁α + b₁nβ and a₂α + b₂nβ (`cost`): n = (a₂ − a₁)α / ((b₁ − b₂)β), or 0 where `second` is the better one at
    every size. Assumptions: `cost`'s, and no time for reducing.

    Args:
        first, second: Algorithms of the operation; ``node_size`` is for hierarchical.
        alpha: Seconds a message; beta: seconds a byte, more than 0.

    Raises:
        TypeError, ValueError: As `cost`; a negative alpha, a beta of 0.

    >>> crossover("all_reduce", "tree", "ring", 8, alpha=20e-6, beta=1e-9)  # 8α / 4.25β
    37647.05882352941
    """
    number("alpha", alpha, "seconds")
    number("beta", beta, "seconds per byte", above=True)
    a, b = (cost(operation, name, ranks, node_size if name == "hierarchical" else None) for name in (first, second))
    later, flatter = b.alpha - a.alpha, a.beta - b.beta
    if flatter > 0:
        return max(0.0, later * alpha / float(flatter * Fraction(beta)))
    return 0.0 if flatter == 0 and later * alpha < 0 else None


def per_rank_limit(nbytes: float) -> float:
    """What a rank of a ring all-reduce never sends more than, however many ranks there are: 2D bytes.

    Each sends 2(N−1)/N·D, which grows towards 2D. With any algorithm some rank must send as much as that (Patarasuk
    and Yuan, 2009), so others beat the ring in steps, not in bytes.

    Raises:
        TypeError, ValueError: `nbytes` is no number, or negative.

    >>> MiB = 2**20
    >>> [round(sent_per_rank("all_reduce", "ring", n, 8 * MiB)[0] / MiB, 2) for n in (4, 8, 1000)]
    [12.0, 14.0, 15.98]
    >>> per_rank_limit(8 * MiB) / MiB
    16.0
    """
    number("nbytes", nbytes, "bytes")
    return 2 * nbytes


def _check_links(nbytes: float, alpha: float, beta: float, gamma: float) -> None:
    number("nbytes", nbytes, "bytes")
    number("alpha", alpha, "seconds")
    number("beta", beta, "seconds per byte")
    number("gamma", gamma, "seconds per byte")
