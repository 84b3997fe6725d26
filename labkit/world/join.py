"""Make a rank a member of the world: torch's own backends, bound and chosen here, behind the recording group."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from labkit.world.group import BACKEND, RecordingGroup, c10d
from labkit.world.journal import Journal
from labkit.world.table import Signature

#: Torch's own limit on an operation, for when nobody else ends it; `labkit.run`'s `timeout` is far shorter.
TORCH_LIMIT = timedelta(minutes=30)


def join(
    store: dist.Store, rank: int, size: int, plan: str, journal: Journal | None, loopback: bool,
    limit: timedelta = TORCH_LIMIT,
) -> None:  # fmt: skip
    """Initialise the default process group.

    Args:
        store: Where the ranks meet.
        rank, size: This rank and the size of the world.
        plan: `labkit.device.choose`'s answer: ``"cpu"``, ``"nccl"`` or ``"shared"``.
        journal: Whom the groups tell; ``None`` uses torch's bare backends, and nothing is recorded.
        loopback: Bind gloo to 127.0.0.1, so that ranks of one host never depend on its name or network.
        limit: Torch's own limit on an operation.
    """
    if journal is None:
        dist.init_process_group(_bare(plan), store=store, rank=rank, world_size=size, timeout=limit)
        return

    def create(options: Any, _: Any) -> RecordingGroup:
        members = list(options.global_ranks_in_group) or None
        copies = journal.another_group(members)
        entry = None
        if members is not None:  # members meet here, so one that never comes must be seen in the table
            group = f"new {{{','.join(map(str, members))}}}"
            entry = journal.enter("collective", Signature("new_group"), group, members, traced=False)
            journal.waiting(entry)
        transport, backends = _transport(options, plan, loopback)
        if entry is not None:
            journal.finished(entry)
        return RecordingGroup(transport, backends, options.group_rank, options.group_size, members, journal,
                              copies)  # fmt: skip

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda *a: _creator[0](*a), extended_api=True, devices=["cpu", "cuda"])
        _record_every_backend()
    _creator[:] = [create]
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=limit)


_creator: list[Any] = []


def _record_every_backend() -> None:
    """A group made with a backend's name (`new_group(backend="gloo")`) is recorded like any other.

    Torch has no hook for that, so its one maker of groups is given our backend's name instead. The devices are served
    by the same backends either way.
    """
    make = c10d._new_process_group_helper

    def recorded(size: int, rank: int, members: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(size, rank, members, dist.Backend(BACKEND), *args, **kwargs)
        if made[1] is not None and made[0] in c10d._world.pg_map:  # get_backend() tells what serves the group
            c10d._world.pg_map[made[0]] = (made[0].backend_name, c10d._world.pg_map[made[0]][1])
        return made

    c10d._new_process_group_helper = recorded  # type: ignore[assignment]


def _bare(plan: str) -> str:
    return {"cpu": "gloo", "nccl": "cpu:gloo,cuda:nccl", "shared": "gloo"}[plan]


def _transport(options: Any, plan: str, loopback: bool) -> tuple[dist.ProcessGroup, dict[str, tuple[Any, Any]]]:
    """Torch's own group for these members: gloo for the CPU, NCCL (or gloo again) for CUDA."""
    place = (options.store, options.group_rank, options.group_size)
    kinds = dist.ProcessGroup.BackendType
    gloo = (kinds.GLOO, c10d.ProcessGroupGloo(*place, _gloo_options(options, loopback)))
    backends: dict[str, tuple[Any, Any]] = {"cpu": gloo}
    if plan == "shared":
        backends["cuda"] = gloo
    elif plan == "nccl":
        nccl_options = c10d.ProcessGroupNCCL.Options()
        nccl_options._timeout = options.timeout
        nccl_options.global_ranks_in_group = options.global_ranks_in_group
        nccl_options.group_name = options.group_id
        backends["cuda"] = (kinds.NCCL, c10d.ProcessGroupNCCL(*place, nccl_options))
    transport = dist.ProcessGroup(*place)
    for name, (kind, backend) in backends.items():
        transport._register_backend(torch.device(name), kind, backend)
    transport._set_default_backend(next(reversed(backends.values()))[0])
    return transport, backends


def _gloo_options(options: Any, loopback: bool) -> Any:
    gloo = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = options.timeout
    gloo._devices = [_gloo_device(loopback)]
    return gloo


@cache
def _gloo_device(loopback: bool) -> Any:
    """One device a process: each costs a thread."""
    if loopback:
        return c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    return c10d.ProcessGroupGloo.create_default_device()
