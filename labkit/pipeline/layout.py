"""What a message between stages looks like, and the header that tells the other side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

#: Element types by number, as a header names them.
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
         torch.int8, torch.uint8, torch.bool)  # fmt: skip
#: Whole numbers in a header.
HEADER = 64


class Spec(NamedTuple):
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool

    def room(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}" + ("" if self.wants_gradient else ", without gradient")


Layout = tuple[Spec, ...]


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout:
    return tuple(Spec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def header_of(layout: Layout, rows: int, device: torch.device) -> torch.Tensor:
    """A layout as whole numbers, with the sequences of its micro-batch.

    Raises:
        ValueError: More tensors or dimensions than a header can say.
        TypeError: A type of elements that it cannot name.

    >>> layout = (Spec((2, 3), torch.float32, True),)
    >>> read(header_of(layout, 2, torch.device("cpu")), rows=2) == layout
    True
    """
    numbers = [rows, len(layout)]
    for spec in layout:
        if spec.dtype not in TYPES:
            raise TypeError(f"a stage made {spec.dtype}: expected one of {', '.join(map(str, TYPES))}")
        numbers += [TYPES.index(spec.dtype), int(spec.wants_gradient), len(spec.shape), *spec.shape]
    if len(numbers) > HEADER:
        raise ValueError(f"a stage made {len(layout)} tensors, whose shapes take {len(numbers)} numbers: expected at "
                         f"most {HEADER}")  # fmt: skip
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64, device=device)


def read(header: torch.Tensor, rows: int) -> Layout:
    """
    Raises:
        ValueError: The other side cut its batch otherwise.
    """
    numbers = iter(header.tolist())
    if (theirs := next(numbers)) != rows:
        raise ValueError(f"a micro-batch has {rows} sequences on this rank and {theirs} on the one before: every rank "
                         "is to call step with batches of one size")  # fmt: skip
    layout = []
    for _ in range(next(numbers)):
        dtype, wants, dims = next(numbers), next(numbers), next(numbers)
        layout.append(Spec(tuple(next(numbers) for _ in range(dims)), TYPES[dtype], bool(wants)))
    return tuple(layout)
