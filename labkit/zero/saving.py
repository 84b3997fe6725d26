"""Save what is sharded, load it on another number of ranks, put it together for plain torch.

Each rank writes its runs of every tensor (`torch.distributed.checkpoint` keeps the table of who wrote what), into a
folder beside the one that the save is to be. When all is on the disk, one rank renames the folder: a save is there
whole, or not at all, whenever a rank is killed.

    runs/step-00000010/                the last complete save
    runs/.step-00000020.part/          one that was cut short; the next save removes it
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.collectives import check
from labkit.zero.stored import Stored
from labkit.zero.together import plain_errors, together

_COMPLETE, _REST = re.compile(r"step-(\d{8,})"), "rest"


def save(
    directory: str | os.PathLike, step: int, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None, group: dist.ProcessGroup | None = None, part: str = "all",
) -> Path:  # fmt: skip
    """Save a model and its optimizer, whatever the stage. A collective call of all ranks of the world.

    Args:
        directory: Of all saves of one training, on a file system that all ranks see.
        step: Names the save; of saves in a directory, that of the highest step is the `latest`.
        module: Bare (under `ShardedOptimizer`), or wrapped in DistributedDataParallel or FullyShardedDataParallel.
        optimizer: A `ShardedOptimizer`, or torch's own.
        extra: What else is to come back: the learning-rate schedule's state, a generator's. The group's first rank's.
        group: The data-parallel group, over which ranks hold shards or copies; ``None`` is the world.
        part: Names what this group holds, where there are several: ``f"tp{mesh.place(rank)['tp']}"``.

    Returns:
        The folder of the save.

    Raises:
        TypeError, ValueError: An argument cannot be used; the step is saved already; two groups have one `part`.
        RuntimeError: On the ranks that could, where another one cannot.
        OSError: Something cannot be written, such as on a full disk; what there is stays no save. On every rank.

    >>> path = save("runs", step, model, optimizer)                            # doctest: +SKIP

    Source: the folder that is renamed when it is whole is how databases and package managers write.
    """
    import torch.distributed.checkpoint as dcp

    def prepare() -> tuple[Path, Stored]:
        _check(directory, module, optimizer, part)
        check.member(group)
        check.whole_number("step", step, least=0)
        _check_extra(extra)
        return Path(directory) / f"step-{step:08d}", Stored(module, optimizer)

    final, stored = together(prepare)
    _agree(group, part, final)
    unfinished = final.with_name(f".{final.name}.part")
    together(lambda: _begin(unfinished), by_first=True)
    rest = {**_merged({**stored.rest(), "extra": extra}, group), "ranks": dist.get_world_size(group)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with plain_errors():
        writer = dcp.FileSystemWriter(unfinished / part, overwrite=False)  # it syncs each file
        dcp.save({**stored.writes(), _REST: rest}, storage_writer=writer, planner=planner, process_group=group)
    together(lambda: None)
    together(lambda: _complete_save(unfinished, final), by_first=True)
    return final


def _begin(unfinished: Path) -> None:
    for left in unfinished.parent.glob(".step-*.part"):
        shutil.rmtree(left)
    unfinished.mkdir(parents=True)


def _complete_save(unfinished: Path, final: Path) -> None:
    _sync(*(folder for folder in (unfinished, *unfinished.iterdir()) if folder.is_dir()))
    unfinished.rename(final)
    _sync(final.parent)


def latest(directory: str | os.PathLike) -> Path | None:
    """The complete save of the highest step, or ``None``. Needs no ranks."""
    return max(_complete(directory), default=(0, None))[1]


def load(
    path: str | os.PathLike, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None, part: str = "all",
) -> Any:  # fmt: skip
    """Load a save into a model and its optimizer, at any number of ranks and any stage. A collective call.

    Each rank reads what it is to hold and no more. Parameter groups (learning rates) come back too.

    Args:
        path: What `save` or `latest` returned.
        module, optimizer, group, part: As in `save`; the optimizer as it is after it was made.

    Returns:
        `extra`.

    Raises:
        FileNotFoundError: There is no such save.
        TypeError, ValueError: An argument cannot be used; the save is of another model or optimizer, or has none.
        RuntimeError: On the ranks that could, where another one cannot.
    """
    import torch.distributed.checkpoint as dcp

    check.member(group)

    def prepare() -> tuple[Path, Any, Stored]:
        _check(path, module, optimizer, part)
        folder = _folder(path, part)
        return folder, dcp.FileSystemReader(folder).read_metadata().state_dict_metadata, Stored(module, optimizer)

    folder, saved, stored = together(prepare, group)
    rest = _read({}, folder, group)
    together(lambda: stored.expect(rest, saved), group)
    _read(stored.reads(), folder, group)
    stored.finish(rest)
    return rest["extra"]


def consolidate(path: str | os.PathLike, part: str = "all") -> dict[str, Any]:
    """A save as plain torch wants it. Needs no ranks; the whole model must fit into memory.

    Returns:
        ``"model"``: a state dict for the bare module. ``"optimizer"``: one for the optimizer class that was sharded,
        over the module's parameters in their order, or ``None``. ``"masters"``: name → fp32 tensor of 16-bit
        parameters; where there are any, the optimizer's state is that of the masters. ``"extra"``.

    Raises:
        FileNotFoundError: There is no such save.

    >>> plain = consolidate(latest("runs"))                                    # doctest: +SKIP
    >>> model.load_state_dict(plain["model"])                                  # doctest: +SKIP
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    folder = _folder(path, part)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    whole = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)
    }  # fmt: skip
    rest = _read(whole, folder, None, alone=True)
    return {**Stored.put_together(whole, rest), "extra": rest["extra"]}


def _read(into: dict[str, Any], folder: Path, group: dist.ProcessGroup | None, alone: bool = False) -> dict[str, Any]:
    """Fill the tensors; returns what else was saved."""
    import torch.distributed.checkpoint as dcp

    wanted = {**into, _REST: None}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings(), plain_errors():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant, outside of ranks
        dcp.load(
            wanted, storage_reader=dcp.FileSystemReader(folder), planner=planner, process_group=group, no_dist=alone
        )
    return wanted[_REST]


def _complete(directory: str | os.PathLike) -> list[tuple[int, Path]]:
    found = [(_COMPLETE.fullmatch(path.name), path) for path in Path(directory).glob("step-*")
             if any(path.glob("*/.metadata"))]  # fmt: skip
    return [(int(match[1]), path) for match, path in found if match]


def _folder(path: str | os.PathLike, part: str) -> Path:
    """
    Raises:
        FileNotFoundError: There is no save, or none of this part.
    """
    folder = Path(path) / part
    if not (folder / ".metadata").is_file():
        there = sorted(p.name for p in Path(path).glob("*") if (p / ".metadata").is_file())
        advice = f"but {', '.join(there)}: give part=" if there else "expected what labkit.zero.save or latest returned"
        raise FileNotFoundError(f"{path} holds no part {part!r}, {advice}")
    return folder


def _check(path: Any, module: Any, optimizer: Any, part: Any) -> None:
    """
    Raises:
        TypeError, ValueError: An argument cannot be used.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the folder is {path!r}: expected a path")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is {type(module).__name__}: expected a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {optimizer!r}: expected an optimizer, or None")
    if not isinstance(part, str) or not re.fullmatch(r"\w[\w.-]*", part):
        raise ValueError(f"part={part!r}: expected a name for a folder, such as 'tp0'")


def _check_extra(extra: Any) -> None:
    try:
        pickle.dumps(extra)
    except Exception as error:
        raise TypeError(f"extra cannot be pickled ({error}): expected numbers, text, tensors, or a state_dict of what "
                        "is to come back") from error  # fmt: skip


def _agree(group: dist.ProcessGroup | None, part: str, final: Path) -> None:
    """
    Raises:
        ValueError: On every rank: the step is there already, or the parts are no parts.
    """
    ranks = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (part, ranks, str(final), final.exists()))
    for other, theirs, where, there in told:
        if other == part and theirs != ranks:
            raise ValueError(f"ranks {list(ranks)} and {list(theirs)} are two groups, and both save part {part!r}: "
                             "give each what it holds, such as part=f'tp{place}'")  # fmt: skip
        if where != str(final):
            raise ValueError(f"this rank saves {final}, another {where}: expected one directory and one step")
        if there:
            raise ValueError(f"{final} is there already: remove it first, or give another step")


def _merged(mine: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """What is no run: each rank knows it of the parameters that it has a piece of."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, dict(mine), group=group)
    merged: dict[str, Any] = dict(told[0])
    for other in told[1:]:
        for name, values in other["counters"].items():
            merged["counters"].setdefault(name, values)
    return merged


def _sync(*folders: Path) -> None:
    """Have the names in a folder on the disk, not only the files."""
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
