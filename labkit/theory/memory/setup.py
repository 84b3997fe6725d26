"""How activations are kept: their widths, who holds which part, what is computed again."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.theory.communication.given import whole
from labkit.theory.memory.shape import one_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a rank keeps activations. The default is the papers' plain case: 16 bits, one-byte masks, one rank.

    Attributes:
        width: Bytes of an activation's element: 2 for bf16 and fp16, 4 for fp32.
        mask_width: Bytes of a dropout mask's element: 1 as `torch.native_dropout` keeps it; `width` for `F.dropout`
            on a CPU.
        statistics_width: Bytes of a LayerNorm's mean or reciprocal deviation; default: `width`, as on a CPU. On CUDA 4.
        tensor_parallel: t, the ranks that share each layer.
        sequence_parallel: Whether the regions around norms and dropout are cut along the sequence, over the same t.
        keep_gathered: With sequence parallelism: whether the gathered input of a column-parallel product is kept for
            backward (no third communication) or gathered again (Korthikanti's way).
        recompute: ``"none"``; ``"selective"``: scores, softmax and its dropout are computed again; ``"full"``: each
            layer keeps its input only.

    Raises:
        TypeError, ValueError: A width or t that is no whole number above 0, an unknown way of recomputing, a part of
            sequence parallelism without the whole.
    """

    width: int = 2
    mask_width: int = 1
    statistics_width: int | None = None
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    keep_gathered: bool = False
    recompute: str = "none"

    def __post_init__(self) -> None:
        for name in ("width", "mask_width", "tensor_parallel"):
            whole(name, getattr(self, name), 1)
        if self.statistics_width is not None:
            whole("statistics_width", self.statistics_width, 1)
        one_of("recompute", self.recompute, ("none", "selective", "full"))
        if self.keep_gathered and not self.sequence_parallel:
            raise ValueError("keep_gathered=True without sequence_parallel: only sequence parallelism gathers an input")
