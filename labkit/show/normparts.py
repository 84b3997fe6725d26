"""The parts of a norm on the ranks of a mesh: which squares are added up in which groups, and which are counted.

>>> found = read({"W": ([9, 16], ("tp",)), "b": ([4, 4], ())}, {"tp": 2}, ())
>>> [(part.kind, part.groups(), part.counted()) for part in found.parts], found.square
([('S', [(0, 1)], (0, 1)), ('R', [(0,), (1,)], (0,))], 29.0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite, prod
from typing import Any

RANKS, PARTS = 8, 4
STAGES = "pp"  #: the dimension whose ranks hold different layers


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter, or several that are alike.

    Attributes:
        name: As it is called.
        kind: ``"S"`` sharded, ``"R"`` replicated, ``"T"`` tied, ``"W"`` whole, on one rank alone.
        squares: What each rank holds; ``None`` where it has none of it.
        over: Dimensions of the mesh over which it is sharded.
        places: Of each rank, its coordinates by dimension.
    """

    name: str
    kind: str
    squares: tuple[float | None, ...]
    over: tuple[str, ...]
    places: tuple[Mapping[str, int], ...]

    @property
    def holders(self) -> list[int]:
        return [rank for rank, square in enumerate(self.squares) if square is not None]

    def groups(self) -> list[tuple[int, ...]]:
        """The ranks that add up: alike in all dimensions but those that it is sharded over."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.holders:
            key = tuple(at for name, at in self.places[rank].items() if name not in self.over)
            found.setdefault(key, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def counted(self) -> tuple[int, ...]:
        """The ranks whose squares are in the norm: the first group; what others hold are copies."""
        return self.groups()[0]

    @property
    def square(self) -> float:
        return sum(self.squares[rank] or 0.0 for rank in self.counted())


@dataclass(frozen=True, slots=True)
class Norm:
    """All parts, and the mesh.

    Attributes:
        parts: As given.
        mesh: Dimension → ranks along it, the last one fastest.
        places: Of each rank, its coordinates by dimension.
    """

    parts: tuple[Part, ...]
    mesh: Mapping[str, int]
    places: tuple[Mapping[str, int], ...]

    @property
    def square(self) -> float:
        return float(sum(part.square for part in self.parts))

    def stages(self) -> list[tuple[int, ...]]:
        """The ranks of each pipeline stage; all of them where there is no pipeline."""
        number = self.mesh.get(STAGES, 1)
        return [tuple(r for r, at in enumerate(self.places) if at.get(STAGES, 0) == n) for n in range(number)]

    def of_stage(self, ranks: Sequence[int]) -> float:
        """The sum of what counts on some ranks."""
        return float(sum(part.squares[r] or 0.0 for part in self.parts for r in part.counted() if r in ranks))


def read(parts: Any, mesh: Any, tied: Any) -> Norm:
    """What was given, checked.

    Raises:
        TypeError, ValueError: As `show.norm` says.
    """
    sizes = _mesh(mesh)
    places = []
    for rank in range(prod(sizes.values())):
        at, rest = {}, rank
        for name in reversed(sizes):
            rest, at[name] = divmod(rest, sizes[name])
        places.append({name: at[name] for name in sizes})
    if not isinstance(parts, Mapping):
        raise TypeError(
            f"parts is {parts!r:.60}: expected name → (squares of all ranks, dimensions it is sharded over)"
        )
    if not 1 <= len(parts) <= PARTS:
        raise ValueError(f"parts has {len(parts)} entries: expected 1 to {PARTS}; add up those that are alike")
    if odd := [name for name in tied if name not in parts]:
        raise ValueError(f"tied has {odd[0]!r}, but the parts are {', '.join(parts)}")
    found = tuple(_part(str(name), given, name in tied, sizes, tuple(places)) for name, given in parts.items())
    return Norm(found, sizes, tuple(places))


def _mesh(mesh: Any) -> dict[str, int]:
    if not isinstance(mesh, Mapping) or not mesh:
        raise TypeError(f"mesh is {mesh!r}: expected dimension → ranks, the last one fastest, such as {{'tp': 2}}")
    for name, n in mesh.items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"mesh has {n!r} ranks along {name!r}: expected a whole number, 1 or more")
    if prod(mesh.values()) > RANKS:
        raise ValueError(f"mesh has {prod(mesh.values())} ranks: expected at most {RANKS}, so that each has a row")
    return {str(name): n for name, n in mesh.items()}


def _part(name: str, given: Any, tied: bool, mesh: Mapping[str, int], places: tuple[Mapping[str, int], ...]) -> Part:
    if not isinstance(given, (list, tuple)) or len(given) != 2 or not isinstance(given[0], (list, tuple)):
        raise TypeError(f"{name!r} has {given!r:.60}: expected (squares of all ranks, dimensions it is sharded over)")
    squares, over = given[0], (given[1],) if isinstance(given[1], str) else tuple(given[1])
    if odd := [one for one in over if one not in mesh]:
        raise ValueError(f"{name!r} is sharded over {odd[0]!r}, but the mesh has {', '.join(mesh)}")
    if len(squares) != len(places) or all(square is None for square in squares):
        raise ValueError(f"{name!r} has {len(squares)} squares: expected one for each of {len(places)} ranks; None "
                         "where a rank has none of it")  # fmt: skip
    for square in squares:
        if square is not None and (isinstance(square, (bool, str)) or not hasattr(square, "__float__")):
            raise TypeError(f"{name!r} has {square!r}: expected a number, the sum of squares that a rank holds")
        if square is not None and not (isfinite(square) and square >= 0):
            raise ValueError(f"{name!r} has {square!r}: expected a finite sum of squares, 0 or more")
    alone = sum(square is not None for square in squares) == 1
    kind = "T" if tied else "S" if over else "W" if alone else "R"
    part = Part(name, kind, tuple(None if s is None else float(s) for s in squares), over, places)
    _alike(part)
    return part


def _alike(part: Part) -> None:
    """
    Raises:
        ValueError: copies are not equal: then no way of counting is right.
    """
    first, *others = part.groups()
    for group in others:
        for a, b in zip(first, group, strict=False):
            one, other = part.squares[a] or 0.0, part.squares[b] or 0.0
            if not isclose(one, other, rel_tol=1e-6, abs_tol=1e-12):
                raise ValueError(f"{part.name!r} is {one:g} on rank {a} and {other:g} on rank {b}: expected copies to "
                                 "be equal; name the dimension that it is sharded over")  # fmt: skip
