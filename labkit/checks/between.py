"""An MLP between f and g, which an exercise hands to a learner's pair of functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from labkit.checks.alone import strange
from labkit.checks.exercise import Case

One = Callable[[torch.Tensor], torch.Tensor]
WIDTH, INNER = 4, 12
#: Which dimension of a tensor the ranks share.
CUT = {"A": 1, "a": 0, "B": 0}
#: Where f and g may have changed a tensor that is not theirs, in the order in which that is noted.
PLACES = (("f", "forward"), ("g", "forward"), ("f", "backward"), ("g", "backward"))


def same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def block(tensors: dict[str, torch.Tensor], f: One, g: One) -> torch.Tensor:
    """A layer, a norm, an MLP beside a residual connection, and a loss, ()."""
    h = torch.tanh(tensors["x"] @ tensors["earlier"])  # (tokens, WIDTH)
    h = F.layer_norm(h, (WIDTH,)) * tensors["norm"]
    y = F.gelu(f(h) @ tensors["A"] + tensors["a"])
    z = h + g(y @ tensors["B"]) + tensors["b"]  # what f was given is read once more: its gradient has two parts
    return (z - 1).square().mean()


def tensors(case: Case, rank: int | None = None) -> dict[str, torch.Tensor]:
    """Inputs and parameters, leaves: a rank's, or those of one process in float64."""
    generator = torch.Generator().manual_seed(case.elements)
    shapes = {"x": (case.elements, WIDTH), "earlier": (WIDTH, WIDTH), "norm": (WIDTH,), "A": (WIDTH, INNER),
              "a": (INNER,), "B": (INNER, WIDTH), "b": (WIDTH,)}  # fmt: skip
    whole = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return {name: leaf(t, case.ranks, rank, CUT.get(name)) for name, t in whole.items()}


def leaf(whole: torch.Tensor, ranks: int, rank: int | None, dim: int | None) -> torch.Tensor:
    """A rank's part along a dimension, or all of it; of one process, float64."""
    if rank is None:
        return whole.double().requires_grad_()
    part = whole if dim is None else whole.chunk(ranks, dim)[rank]
    return part.contiguous().clone().requires_grad_()


class Astray(Exception):
    """A function that returned something else than was expected, in words."""


class Seen:
    """f and g as the layer calls them, and what they change of what they are given."""

    def __init__(self, f: One, g: One) -> None:
        self.functions = {"f": f, "g": g}
        self.before: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def call(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self._note((name, "forward"), x)
        y = self.functions[name](x)
        if said := strange(y, tuple(x.shape), name):
            raise Astray(said)
        if y.requires_grad:
            y.register_hook(lambda grad: self._note((name, "backward"), grad))
        return y

    def _note(self, place: tuple[str, str], x: torch.Tensor) -> None:
        self.before[place] = x.detach(), x.detach().clone()

    def changed(self) -> list[float]:
        """Of each of `PLACES`, 1 if a tensor that was given there is not what it was."""
        noted = [self.before.get(place) for place in PLACES]
        return [0.0 if each is None or torch.equal(*each) else 1.0 for each in noted]
