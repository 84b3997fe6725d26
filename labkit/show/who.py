"""Who sends to whom in a step: ranks in a circle, or as a tree from its root down."""

from __future__ import annotations

from collections.abc import Iterator
from math import cos, hypot, pi, sin

from labkit.show.lanes import arrow, runs
from labkit.show.steps import Move, Steps
from labkit.show.svg import el, text, text_width
from labkit.show.words import say

NODE = 15  #: radius of a rank


def circle(ranks: int, width: float, height: float) -> list[tuple[float, float]]:
    """Where the ranks stand: rank 0 on top, the others clockwise."""
    radius = min(width, height) / 2 - NODE - 12
    turns = [2 * pi * rank / ranks - pi / 2 for rank in range(ranks)]
    return [(width / 2 + radius * cos(t), height / 2 + radius * sin(t)) for t in turns]


def tree(steps: Steps, width: float, height: float) -> list[tuple[float, float]] | None:
    """Where the ranks stand when the messages make up a tree: the root on top; ``None`` without tree or room."""
    parents = family(steps)
    if parents is None:
        return None
    below: dict[int | None, list[int]] = {}
    for rank in range(steps.ranks):
        below.setdefault(parents[rank], []).append(rank)
    depth, column, leaves = {}, {}, 0

    def place(rank: int, level: int) -> None:
        nonlocal leaves
        depth[rank] = level
        children = below.get(rank, [])
        for child in children:
            place(child, level + 1)
        if not children:
            column[rank] = float(leaves)
            leaves += 1
        else:
            column[rank] = (column[children[0]] + column[children[-1]]) / 2

    place(below[None][0], 0)
    across, down = (width - 2 * NODE - 8) / max(1, leaves - 1), (height - 2 * NODE - 8) / max(1, max(depth.values()))
    if leaves > 1 and across < 2 * NODE + 2:
        return None
    down = min(down, 84)
    left = NODE + 4 if leaves > 1 else width / 2
    return [(left + across * column[r], NODE + 4 + down * depth[r]) for r in range(steps.ranks)]


def family(steps: Steps) -> list[int | None] | None:
    """The parent of each rank, ``None`` for the root; ``None`` for all when the messages make up no tree.

    In a broadcast the root is the one to whom nobody sends first; in a reduce, the one who sends to nobody first.
    """
    first: dict[frozenset[int], tuple[int, int]] = {}
    for move in steps.moves:
        first.setdefault(frozenset((move.src, move.dst)), (move.src, move.dst))
    if len(first) != steps.ranks - 1 or steps.ranks < 2:
        return None
    sources, targets = ({way[end] for way in first.values()} for end in (0, 1))
    roots = [r for group in (targets, sources) if len(o := set(range(steps.ranks)) - group) == 1 for r in o]
    if not roots:
        return None
    parents: list[int | None] = [None] * steps.ranks
    reached = [min(roots)]
    for rank in reached:
        for edge in first:
            if rank in edge and (others := edge - {rank}) and not others & set(reached):
                (child,) = others
                parents[child] = rank
                reached.append(child)
    return parents if len(reached) == steps.ranks else None


def draw(steps: Steps, step: int, places: list[tuple[float, float]], dx: float, dy: float) -> Iterator[str]:
    """The ranks, and an arrow a send with its chunk on it; who does nothing in this step is dotted."""
    places = [(x + dx, y + dy) for x, y in places]
    moves = steps.at(step)
    yield el("g", *(_edge(places, edge) for edge in _edges(steps)), class_="lk-edges")
    both = {(m.dst, m.src) for m in moves}
    lines = [_line(places, m, (m.src, m.dst) in both) for m in moves]
    told = len(moves) <= 2 * steps.ranks  # more words than that hide the arrows
    for move, (a, b) in zip(moves, lines, strict=True):
        yield el("g", *arrow(a, b, True, 0), class_="lk-now lk-send")
        yield _label(steps, move, a, b, _share(move, moves)) if told else ""
    idle = set(steps.idle(step)) if step else set()
    for rank, (x, y) in enumerate(places):
        cls = "lk-node lk-idle" if rank in idle else "lk-node"
        yield el("g", el("circle", cx=x, cy=y, r=NODE), text(x, y + 5, str(rank), 14, "middle", "lk-in"), class_=cls)


def _edges(steps: Steps) -> list[tuple[int, int]]:
    """All pairs that ever exchange something."""
    return sorted({(min(m.src, m.dst), max(m.src, m.dst)) for m in steps.moves})


def _edge(places: list[tuple[float, float]], edge: tuple[int, int]) -> str:
    (x, y), (x2, y2) = places[edge[0]], places[edge[1]]
    return el("line", x1=x, y1=y, x2=x2, y2=y2)


def _line(places, move: Move, both: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """From the edge of one rank to that of the other; two that exchange lie side by side."""
    (x, y), (x2, y2) = places[move.src], places[move.dst]
    length = hypot(x2 - x, y2 - y) or 1.0
    ux, uy = (x2 - x) / length, (y2 - y) / length
    aside = 7 if both else 0
    ox, oy, gap = -uy * aside, ux * aside, NODE + 3
    return (x + ux * gap + ox, y + uy * gap + oy), (x2 - ux * gap + ox, y2 - uy * gap + oy)


def _share(move: Move, moves: list[Move]) -> float:
    """How far along its arrow a label stands: away from where arrows meet."""
    if any(m.src == move.src and m is not move for m in moves):
        return 0.7
    meets = any(m.dst == move.dst and m is not move for m in moves)
    returns = any((m.src, m.dst) == (move.dst, move.src) for m in moves)
    return 0.3 if meets or returns else 0.46


def _label(steps: Steps, move: Move, a: tuple[float, float], b: tuple[float, float], share: float) -> str:
    words = chunk_list(steps, move.chunks)
    if not words:
        return ""
    x, y = a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share
    half = max(9.0, text_width(words, 13) / 2 + 4)
    box = el("rect", x=x - half, y=y - 9, width=2 * half, height=18, rx=9)
    return el("g", box, text(x, y + 4.7, words, 13, "middle", "lk-in"), class_="lk-load",
              data_chunk=" ".join(map(str, move.chunks)))  # fmt: skip


def chunk_list(steps: Steps, chunks: tuple[int, ...]) -> str:
    """Chunks as an arrow bears them: ``"2"``, ``"0–3"``, or all; nothing when the tensor is one piece."""
    if steps.whole:
        return ""
    if len(chunks) == steps.chunks > 1:
        return say("steps.every")
    return ",".join(str(a) if a == b else f"{a}–{b}" for a, b in runs(chunks))
