"""Which algorithm a call uses: the one it names, else what `using` says, else the better one here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

#: Operation → its algorithms; the first one after "native" is taken where torch's own cannot be.
ALGORITHMS = {
    "all_reduce": ("native", "ring", "tree", "central", "mesh", "halving_doubling", "hierarchical"),
    "reduce_scatter": ("native", "ring", "mesh"),
    "all_gather": ("native", "ring", "mesh"),
    "broadcast": ("native", "tree", "central"),
    "reduce": ("native", "tree", "central"),
    "scatter": ("native", "central"),
    "gather": ("native", "central"),
    "all_to_all": ("native", "mesh"),
    "barrier": ("native", "tree"),
}
EVERY = tuple(dict.fromkeys(name for names in ALGORITHMS.values() for name in names))

#: Where messages from Python beat gloo's own, and the bytes up to which a mesh, which needs one round, beats the N−1
#: rounds of a ring. Beyond, the mesh's N−1 buffers cost more than its rounds save; an all-gather needs none. For 64 MiB
#: and 4 ranks both take 0.3 to 0.4 of gloo's time (`labkit bench collectives`).
BEATS_GLOO = {"reduce_scatter": 16 * 2**20, "all_gather": 2**63}
#: What gloo itself can move.
GLOO_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
              torch.uint8, torch.bool)  # fmt: skip
#: What gloo does with tensors on a GPU (PyTorch's documentation, "Backends that come with PyTorch").
GLOO_ON_CUDA = ("all_reduce", "broadcast")

_chosen: ContextVar[str | None] = ContextVar("labkit_algorithm", default=None)


@contextmanager
def using(algorithm: str) -> Iterator[None]:
    """Inside, calls that name no algorithm use this one, where their operation has it. It holds for this thread of this
    rank: use it in the function that the ranks run.

    Raises:
        ValueError: No operation has it.

    >>> with using("ring"):
    ...     choose("all_reduce", None, "gloo"), choose("broadcast", None, "gloo")
    ('ring', 'native')
    """
    if algorithm not in EVERY:
        raise ValueError(f"algorithm={algorithm!r}: expected one of {', '.join(map(repr, EVERY))}")
    token = _chosen.set(algorithm)
    try:
        yield
    finally:
        _chosen.reset(token)


def asked() -> str | None:
    """What `using` says here, to be said `again` in a backward, which runs when `using` is over."""
    return _chosen.get()


def again(algorithm: str | None) -> AbstractContextManager[None]:
    """`using`, or nothing if nothing was asked for."""
    return nullcontext() if algorithm is None else using(algorithm)


def choose(
    operation: str, algorithm: str | None, backend: str, *, nbytes: int = 0, segments: int = 1, cuda: bool = False,
    paced: bool = False, exact_half: bool = False, dtype: torch.dtype = torch.float32,
) -> str:  # fmt: skip
    """The algorithm of one call.

    Args:
        operation: Such as ``"all_reduce"``.
        algorithm: What the call named, or ``None``.
        backend: ``"gloo"`` or ``"nccl"``.
        nbytes: Of the whole tensor.
        segments: Messages a chunk; more than one asks for a ring.
        cuda: Whether the tensors are on a GPU.
        paced: Whether time is stretched (`labkit.pace`), which it can be for messages only.
        exact_half: A running mean is needed: torch's own average of 16-bit floats overflows or underflows.
        dtype: Of the tensors.

    Raises:
        ValueError: The operation has no such algorithm.

    >>> choose("all_reduce", None, "nccl"), choose("reduce_scatter", None, "gloo", nbytes=2**30)
    ('native', 'ring')
    """
    own = ALGORITHMS[operation]
    if algorithm is not None:
        if algorithm not in own:
            raise ValueError(f"{operation} has no algorithm {algorithm!r}: expected one of {', '.join(map(repr, own))}")
        return algorithm
    if _chosen.get() in own:
        return str(_chosen.get())
    if exact_half or (paced and operation != "barrier"):
        return own[1]
    if backend == "nccl":
        return "native"
    if segments == 1 and nbytes <= BEATS_GLOO.get(operation, -1):
        return "mesh"
    if operation in BEATS_GLOO or dtype not in GLOO_TYPES or (cuda and operation not in GLOO_ON_CUDA):
        return own[1]
    return "native"


def backend_of(group: dist.ProcessGroup | None, tensor: torch.Tensor | None = None) -> tuple[str, bool]:
    """Which library moves this tensor, and whether the group is paced."""
    this: Any = group if group is not None else dist.group.WORLD
    on_cuda = tensor is not None and tensor.is_cuda
    backend = "nccl" if on_cuda and "nccl" in dist.get_backend(group) else "gloo"
    return backend, bool(getattr(this, "paced", False))
