"""What the tests of `labkit.train` run on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from labkit import device
from labkit.train import AXES, Mesh


def real_groups(sizes: dict[str, int]) -> tuple[dict, dict, tuple]:
    """Axis → the sum of 2^rank over this rank's group; axis → its members; the tp group as torch's mesh has it."""
    mesh, sums = Mesh(**sizes), {}
    for axis in AXES:
        t = torch.tensor([2.0 ** dist.get_rank()], device=device.current())
        dist.all_reduce(t, group=mesh.group(axis))
        sums[axis] = int(t.item())
    members = {axis: tuple(dist.get_process_group_ranks(mesh.group(axis))) for axis in AXES}
    assert mesh.device_mesh is not None
    return sums, members, tuple(mesh.device_mesh["tp"].mesh.tolist())


def wrong_product() -> str:
    try:
        Mesh(tp=2, dp=3)
    except ValueError as error:
        return str(error)
    return ""
