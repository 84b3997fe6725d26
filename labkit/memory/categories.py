"""The eight kinds of bytes, and the storages in which a tensor's bytes lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: In this order everywhere: in dictionaries, pictures and tables.
CATEGORIES = ("parameters", "gradients", "master", "optimizer", "steps", "activations", "buffers", "other")
PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, STEPS, ACTIVATIONS, BUFFERS, OTHER = range(8)
#: A ninth, for bytes that the meter knows and does not count.
UNCOUNTED = 8


def by_name(numbers: Sequence[int]) -> dict[str, int]:
    """
    >>> by_name(range(9))["other"]
    7
    """
    return dict(zip(CATEGORIES, numbers, strict=False))


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Where the bytes of a tensor lie: one storage, or those of its parts (sparse tensors, DTensor).

    >>> table = torch.ones(4, 8)
    >>> storages(table[1])[0].nbytes()  # a view lives in the whole table
    128
    """
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is not None:
        parts = [getattr(tensor, name) for name in flatten(tensor)[0]]
    else:
        try:
            return [tensor.untyped_storage()]
        except NotImplementedError:  # a sparse tensor has no storage of its own
            parts = _sparse_parts(tensor)
    return [storage for part in parts for storage in storages(part)]


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
