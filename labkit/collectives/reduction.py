"""What a reduction does with two values: sum, average, maximum, minimum, product."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

#: The names of `labkit.collectives` → torch's.
NATIVE = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


_NO_ARITHMETIC = (torch.uint16, torch.uint32, torch.uint64)


class Reduction:
    """Combines what two sets of ranks have reduced so far.

    An average of 16-bit floats travels as the mean of the ranks that it covers, never as their sum: two fp16 gradients
    of 40000 add up to infinity, and dividing by N first turns the smallest one, 2⁻²⁴, into 0. Two means are weighed by
    how many ranks each covers, in a wider type, and rounded once. Wider floats are added up and divided at the end
    (`finish`).

    Args:
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"``, ``"product"`` (of bool: sum is "or", product is "and"), or the
            `torch.distributed.ReduceOp` of the same meaning.
        dtype: Of the tensors.

    Raises:
        ValueError: `op` is none of these, or an average of integers is asked for.
        TypeError: torch has no arithmetic for `dtype`.

    >>> mine, theirs = torch.tensor([6.0]).half(), torch.tensor([3.0]).half()
    >>> Reduction("avg", torch.float16)(mine, theirs, parts=(1, 2))
    >>> mine
    tensor([4.], dtype=torch.float16)
    """

    def __init__(self, op: Any, dtype: torch.dtype) -> None:
        self.op = _name(op)
        if dtype in _NO_ARITHMETIC:
            raise TypeError(f"{dtype} cannot be reduced: torch adds none of these; use torch.int64 or torch.uint8")
        if self.op == "avg" and not dtype.is_floating_point:
            raise ValueError(f"op='avg' of {dtype}: the average of integers is no integer; use 'sum' and divide")
        self.is_running_mean = self.op == "avg" and dtype.itemsize == 2

    @property
    def native(self) -> Any:
        """Torch's own name of it."""
        return NATIVE[self.op]

    def __call__(self, mine: torch.Tensor, theirs: torch.Tensor, parts: tuple[int, int] = (1, 1)) -> None:
        """Reduce `theirs` into `mine`; `parts` says how many ranks each of them covers."""
        if self.is_running_mean:
            own, other = parts
            wide = torch.float32 if mine.dtype == torch.float16 else torch.float64  # bfloat16 reaches as far as fp32
            mine.copy_((mine.to(wide) * own + theirs.to(wide) * other) / (own + other))
        elif self.op in ("sum", "avg"):
            mine.add_(theirs)
        elif self.op == "product":
            mine.mul_(theirs)
        elif self.op == "max":
            torch.maximum(mine, theirs, out=mine)
        else:
            torch.minimum(mine, theirs, out=mine)

    def finish(self, reduced: torch.Tensor, ranks: int) -> None:
        """What is left to do, in place, once the values of all ranks have come together."""
        if self.op == "avg" and not self.is_running_mean:
            reduced.div_(ranks)


def _name(op: Any) -> str:
    if isinstance(op, str) and op in NATIVE:
        return op
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):  # which torch also compares with plain numbers
        for name, native in NATIVE.items():
            if op == native:
                return name
    raise ValueError(f"op={op!r}: expected one of {', '.join(map(repr, NATIVE))}")
