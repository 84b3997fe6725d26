"""A mesh: ranks in a grid whose axes are kinds of parallelism, and the groups along each axis.

    axis   its ranks                what they share             what travels between them
    tp     next to each other       one layer                   activations, four times a layer
    dp     tp apart                 nothing: each a replica     gradients, once a step
    pp     tp·dp apart              each has some layers        activations, once a micro-batch and border

Launchers number ranks node by node, so ranks that are next to each other share a node and its fast links. Whoever talks
most often should have them: tp.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 3, takeaway 1.
The order is that of Megatron-LM's `initialize_model_parallel`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit import device

#: From the fastest to the slowest: how a rank's place on each axis changes when ranks are counted.
AXES = ("tp", "dp", "pp")


class Mesh:
    """tp · dp · pp ranks, counted with tp fastest, then dp, then pp.

    Made by ranks, it makes this rank's groups, which is a collective call: all ranks make the same mesh. Made anywhere
    else it only knows who belongs together.

    Args:
        tp, dp, pp: Sizes of the tensor-, data- and pipeline-parallel groups; on ranks their product is the world.

    Attributes:
        sizes: Axis → its size.
        ranks: How many there are.
        device_mesh: On ranks torch's `DeviceMesh` of (pp, dp, tp), for DTensor and FSDP2; else ``None``.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size below 1, or another product than the number of ranks.

    >>> mesh = Mesh(tp=2, dp=2, pp=2)
    >>> mesh.groups_of(5)
    {'tp': (4, 5), 'dp': (5, 7), 'pp': (1, 5)}
    >>> mesh
    Mesh(tp=2, dp=2, pp=2)
    """

    def __init__(self, tp: int = 1, dp: int = 1, pp: int = 1) -> None:
        self.sizes = {"tp": _size("tp", tp), "dp": _size("dp", dp), "pp": _size("pp", pp)}
        self.ranks = tp * dp * pp
        self.device_mesh = self._make() if dist.is_initialized() else None

    def _make(self) -> DeviceMesh:
        if self.ranks != dist.get_world_size():
            product = " · ".join(f"{axis}={size}" for axis, size in self.sizes.items())
            raise ValueError(f"{product} is {self.ranks} ranks, but there are {dist.get_world_size()}: expected sizes "
                             "whose product is the number of ranks")  # fmt: skip
        slowest_first = AXES[::-1]
        shape = tuple(self.sizes[axis] for axis in slowest_first)
        return init_device_mesh(device.current().type, shape, mesh_dim_names=slowest_first)

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's group along `axis`, for the ``group=`` of collectives and layers.

        Raises:
            ValueError: There is no such axis.
            RuntimeError: The mesh was not made by ranks.
        """
        self._check(axis)
        if self.device_mesh is None:
            raise RuntimeError(
                f"{self} was made outside of ranks, where there are no groups: make it in the function that they run"
            )
        return self.device_mesh.get_group(axis)

    def place(self, rank: int) -> dict[str, int]:
        """Axis → where `rank` stands on it, from 0: its rank in that group.

        Raises:
            TypeError, ValueError: There is no such rank.

        >>> Mesh(tp=2, dp=2, pp=2).place(5)
        {'tp': 1, 'dp': 0, 'pp': 1}
        """
        rest = self._rank(rank)
        places = {}
        for axis in AXES:
            rest, places[axis] = divmod(rest, self.sizes[axis])
        return places

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Axis → the ranks of the group to which `rank` belongs. Arithmetic only: it needs no ranks.

        Raises:
            TypeError, ValueError: There is no such rank.
        """
        groups, apart = {}, 1  # apart: from one rank of a group to the next
        for axis, place in self.place(rank).items():
            first, size = rank - place * apart, self.sizes[axis]
            groups[axis] = tuple(range(first, first + size * apart, apart))
            apart *= size
        return groups

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups along `axis`, each once.

        Raises:
            ValueError: There is no such axis.

        >>> Mesh(tp=2, dp=2).groups("dp")
        [(0, 2), (1, 3)]
        """
        self._check(axis)
        return list(dict.fromkeys(self.groups_of(rank)[axis] for rank in range(self.ranks)))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"

    def _check(self, axis: str) -> None:
        if axis not in AXES:
            raise ValueError(f"axis={axis!r}: expected one of {', '.join(map(repr, AXES))}")

    def _rank(self, rank: int) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"rank is {rank!r}: expected a whole number")
        if rank not in range(self.ranks):
            raise ValueError(f"rank={rank}: {self} has ranks 0 to {self.ranks - 1}")
        return rank


def _size(axis: str, size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{axis} is {size!r}: expected a whole number of ranks")
    if size < 1:
        raise ValueError(f"{axis}={size}: expected at least 1 rank")
    return size
