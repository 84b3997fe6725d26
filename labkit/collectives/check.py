"""What a collective refuses, before it sends anything: a rank that fails alone leaves the others waiting."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def tensor(name: str, value: Any, written: bool = True) -> torch.Tensor:
    """A dense, real tensor, cut off from autograd; of a `written` one no two elements may share their memory."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {type(value).__name__}: expected a torch.Tensor")
    if value.layout != torch.strided or value.is_complex() or value.is_quantized:
        raise TypeError(f"{name} is {value.dtype}, {value.layout}: expected a dense tensor of real numbers")
    if value.dtype.is_floating_point and value.dtype.itemsize == 1:
        raise TypeError(
            f"{name} is {value.dtype}: send 8-bit floats as {name}.view(torch.uint8), and reduce wider ones"
        )
    if written and any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        raise ValueError(f"{name} was made by expand: its elements share memory and cannot be written; pass a .clone()")
    return value.detach()


def member(group: dist.ProcessGroup | None) -> int:
    """This rank's number in `group`.

    Raises:
        TypeError: It is no process group.
        ValueError: This rank is no member.
    """
    if group is not None and not isinstance(group, (dist.ProcessGroup, type(dist.GroupMember.NON_GROUP_MEMBER))):
        raise TypeError(f"group is {group!r}: expected a process group, or None for the whole world")
    rank = -1 if group is dist.GroupMember.NON_GROUP_MEMBER else dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is no member of this group: only its members may call this")
    return rank


def in_group(name: str, rank: Any, group: dist.ProcessGroup | None) -> int:
    """A rank of the world as its number in `group`."""
    whole_number(name, rank, least=0)
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if rank not in members:
        raise ValueError(f"{name}={rank} is not in this group: expected one of its ranks of the world, {members}")
    return members.index(rank)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: expected a whole number")
    if value < least:
        raise ValueError(f"{name}={value}: expected at least {least}")
    return value


def segments(value: Any, algorithm: str | None) -> None:
    """Refused with an algorithm that would ignore it."""
    whole_number("segments", value)
    if value > 1 and algorithm not in (None, "ring", "hierarchical"):
        raise ValueError(f"segments={value} with algorithm={algorithm!r}: only 'ring' and 'hierarchical' cut chunks up")


def same_kind(**tensors: torch.Tensor) -> None:
    """Two tensors of one type, on one device."""
    (first, a), (second, b) = tensors.items()
    if a.dtype != b.dtype or a.device != b.device:
        raise TypeError(f"{first} is {a.dtype} on {a.device}, {second} {b.dtype} on {b.device}: expected the same")


def whole_and_part(whole: tuple[str, torch.Tensor], part: tuple[str, torch.Tensor], ranks: int) -> None:
    """A whole tensor is exactly one part a rank."""
    (name, w), (of, p) = whole, part
    same_kind(**{name: w, of: p})
    if w.numel() != p.numel() * ranks:
        raise ValueError(
            f"{name} has {w.numel()} elements and {of} {p.numel()}: expected {name} to be {ranks} ranks × {of}, "
            f"{p.numel() * ranks}; pad it to a multiple of {ranks}"
        )


def parts(name: str, value: Any, like: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """A list of tensors, one a rank, each as large as `like`."""
    if not isinstance(value, (list, tuple)) or len(value) != ranks:
        raise ValueError(f"{name} is {type(value).__name__}: expected a list of {ranks} tensors, one a rank")
    for number, part in enumerate(value):
        same_kind(**{f"{name}[{number}]": tensor(f"{name}[{number}]", part), "tensor": like})
        if part.shape != like.shape:
            raise ValueError(f"{name}[{number}] has shape {tuple(part.shape)}: expected {tuple(like.shape)}, as tensor")
    return [part.detach() for part in value]
