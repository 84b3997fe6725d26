"""The collectives by name: check, choose an algorithm, lay the tensor out flat, run.

Conventions are `torch.distributed`'s: tensors are changed in place, `group=None` is the whole world, roots are ranks of
the world, and every member of the group makes the same calls in the same order. A tensor may have any strides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.collectives import central, check, halving_doubling, hierarchical, mesh, native, ring, tree
from labkit.collectives.choose import backend_of, choose
from labkit.collectives.peers import Peers, tag_of
from labkit.collectives.progress import start
from labkit.collectives.reduction import Reduction
from labkit.trace import span

Group = dist.ProcessGroup | None


def all_reduce(
    tensor: torch.Tensor, op: Any = "sum", group: Group = None, algorithm: str | None = None, async_op: bool = False,
    segments: int = 1, node_size: int | None = None,
) -> Any:  # fmt: skip
    """Reduce `tensor` over all ranks, in place; every rank ends with the same bits.

    Args:
        tensor: Any shape, the same number of elements on every rank.
        op: ``"sum"``, ``"avg"`` (of floats), ``"max"``, ``"min"``, ``"product"``.
        group: Members; ``None`` is the world.
        algorithm: ``"native"`` (torch's own), ``"ring"``, ``"tree"``, ``"central"``, ``"mesh"``,
            ``"halving_doubling"``, ``"hierarchical"``; ``None``: see `using`.
        async_op: Return at once, with a handle whose ``wait()`` ends the call.
        segments: Messages per chunk, of ring and hierarchical: sending, receiving and adding overlap.
        node_size: Ranks a node, of hierarchical; ``None``: LOCAL_WORLD_SIZE, as `labkit.run(nodes=…)` and torchrun
            set it.

    Returns:
        A handle with `async_op`, else ``None``.

    Raises:
        TypeError, ValueError: An argument cannot be used; nothing was sent.

    Example:
        >>> def total():
        ...     t = torch.full((5,), float(dist.get_rank()))
        ...     collectives.all_reduce(t, algorithm="ring")
        ...     return t.tolist()
        >>> labkit.run(total, ranks=3).values[0]        # doctest: +SKIP
        [3.0, 3.0, 3.0, 3.0, 3.0]
    """
    check.member(group)
    t = check.tensor("tensor", tensor)
    reduction = Reduction(op, t.dtype)
    check.segments(segments, algorithm)
    node_size = _node_size(group, node_size)
    chosen = _choose("all_reduce", algorithm, group, t, reduction)
    if chosen == "native":
        return native.on_contiguous([t], lambda c: dist.all_reduce(c, reduction.native, group, async_op))
    run: Callable[[Peers, torch.Tensor], None] = {
        "ring": lambda peers, flat: ring.all_reduce(peers, flat, reduction, segments),
        "tree": lambda peers, flat: tree.all_reduce(peers, flat, reduction),
        "central": lambda peers, flat: central.all_reduce(peers, flat, reduction),
        "mesh": lambda peers, flat: mesh.all_reduce(peers, flat, reduction),
        "halving_doubling": lambda peers, flat: halving_doubling.all_reduce(peers, flat, reduction),
        "hierarchical": lambda peers, flat: hierarchical.all_reduce(peers, flat, reduction, node_size, segments),
    }[chosen]

    def work(peers: Peers, flat: torch.Tensor) -> None:
        run(peers, flat)
        reduction.finish(flat, len(peers))

    return _start(f"all_reduce {chosen}", t, group, async_op, lambda peers: _in_place(t, lambda f: work(peers, f)),
                  reduction.op)  # fmt: skip


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Any = "sum", group: Group = None, algorithm: str | None = None,
    async_op: bool = False, segments: int = 1,
) -> Any:  # fmt: skip
    """Reduce `input` over all ranks and leave part r of it on rank r.

    Args:
        output: (elements / N), this rank's part; any shape with so many elements. It may be a part of `input`.
        input: (elements), not changed. Its parts are consecutive, one a rank.
        op, group, async_op, segments: As in `all_reduce`.
        algorithm: ``"native"``, ``"ring"``, ``"mesh"`` or ``None``.

    Raises:
        TypeError, ValueError: An argument cannot be used; `input` is not N times `output`.
    """
    check.member(group)
    whole, part = check.tensor("input", input, written=False), check.tensor("output", output)
    check.whole_and_part(("input", whole), ("output", part), dist.get_world_size(group))
    check.segments(segments, algorithm)
    reduction = Reduction(op, whole.dtype)
    chosen = _choose("reduce_scatter", algorithm, group, whole, reduction, segments)
    if chosen == "native":
        flat = _flat(whole)
        return native.on_contiguous(
            [part], lambda p: native.reduce_scatter(p.view(-1), flat, reduction.native, group, async_op)
        )

    def fill(peers: Peers, flat: torch.Tensor) -> None:
        chunks = _flat(_apart(whole, part)).tensor_split(len(peers))  # the output is filled before the end
        if chosen == "ring":
            ring.reduce_scatter(peers, chunks, reduction, segments, output=flat)
        else:
            mesh.reduce_scatter(peers, chunks, reduction, output=flat)
        reduction.finish(flat, len(peers))

    return _start(f"reduce_scatter {chosen}", whole, group, async_op,
                  lambda peers: _in_place(part, lambda f: fill(peers, f)), reduction.op)  # fmt: skip


def all_gather(
    output: torch.Tensor, input: torch.Tensor, group: Group = None, algorithm: str | None = None,
    async_op: bool = False, segments: int = 1,
) -> Any:  # fmt: skip
    """Put the parts of all ranks side by side, on every rank.

    Args:
        output: (N × elements), any shape with so many; may hold `input` in its own place.
        input: (elements), this rank's part.
        algorithm: ``"native"``, ``"ring"``, ``"mesh"`` or ``None``.
        group, async_op, segments: As in `all_reduce`.

    Raises:
        TypeError, ValueError: An argument cannot be used; `output` is not N times `input`.
    """
    check.member(group)
    whole, part = check.tensor("output", output), check.tensor("input", input, written=False)
    check.whole_and_part(("output", whole), ("input", part), dist.get_world_size(group))
    check.segments(segments, algorithm)
    chosen = _choose("all_gather", algorithm, group, whole, segments=segments)
    if chosen == "native":
        mine = _flat(part)
        return native.on_contiguous([whole], lambda w: native.all_gather(w.view(-1), mine, group, async_op))

    def fill(peers: Peers, flat: torch.Tensor) -> None:
        chunks = flat.tensor_split(len(peers))
        if part.data_ptr() != chunks[peers.me].data_ptr():  # else it is in its place already
            chunks[peers.me].view(part.shape).copy_(_apart(part, whole))
        if chosen == "ring":
            ring.all_gather(peers, chunks, segments)
        else:
            mesh.all_gather(peers, chunks)

    return _start(
        f"all_gather {chosen}", whole, group, async_op, lambda peers: _in_place(whole, lambda f: fill(peers, f))
    )


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: Group = None, algorithm: str | None = None, async_op: bool = False
) -> Any:
    """Copy rank `src`'s tensor to all ranks.

    Args:
        tensor: Any shape; read on `src`, filled on the others.
        src: A rank of the world.
        algorithm: ``"native"``, ``"tree"``, ``"central"`` or ``None``.
        group, async_op: As in `all_reduce`.
    """
    check.member(group)
    t, root = check.tensor("tensor", tensor), check.in_group("src", src, group)
    chosen = _choose("broadcast", algorithm, group, t)
    if chosen == "native":
        return native.on_contiguous([t], lambda c: dist.broadcast(c, src, group, async_op))
    run = tree.broadcast if chosen == "tree" else central.broadcast
    return _start(f"broadcast {chosen}", t, group, async_op,
                  lambda peers: _in_place(t, lambda flat: run(peers, flat, root)))  # fmt: skip


def reduce(
    tensor: torch.Tensor, dst: int = 0, op: Any = "sum", group: Group = None, algorithm: str | None = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """Reduce `tensor` over all ranks into rank `dst`'s; labkit's algorithms leave the others' unchanged.

    Args:
        tensor: Any shape, the same number of elements on every rank.
        dst: A rank of the world.
        algorithm: ``"native"``, ``"tree"``, ``"central"`` or ``None``.
        op, group, async_op: As in `all_reduce`.
    """
    me = check.member(group)
    t, root = check.tensor("tensor", tensor), check.in_group("dst", dst, group)
    reduction = Reduction(op, t.dtype)
    chosen = _choose("reduce", algorithm, group, t, reduction)
    if chosen == "native":
        return native.on_contiguous([t], lambda c: dist.reduce(c, dst, reduction.native, group, async_op))
    run = tree.reduce if chosen == "tree" else central.reduce

    def work(peers: Peers) -> None:
        flat = _flat(t, copy=True)  # a tree uses it up
        run(peers, flat, root, reduction)
        if me == root:
            reduction.finish(flat, len(peers))
            t.copy_(flat.view(t.shape))

    return _start(f"reduce {chosen}", t, group, async_op, work, reduction.op)


def scatter(
    tensor: torch.Tensor, scatter_list: Sequence[torch.Tensor] | None = None, src: int = 0, group: Group = None,
    algorithm: str | None = None, async_op: bool = False,
) -> Any:  # fmt: skip
    """Rank `src` gives every rank its own part.

    Args:
        tensor: Filled with this rank's part.
        scatter_list: On `src` a list of N tensors of that shape, else ``None``.
        src: A rank of the world.
        algorithm: ``"native"``, ``"central"`` or ``None``.
        group, async_op: As in `all_reduce`.
    """
    me = check.member(group)
    t, root = check.tensor("tensor", tensor), check.in_group("src", src, group)
    given = _parts_of_root("scatter_list", scatter_list, t, me == root, group)
    chosen = _choose("scatter", algorithm, group, t)
    if chosen == "native":
        parts = None if given is None else [_apart(p, t).contiguous() for p in given]
        return native.on_contiguous([t], lambda c: dist.scatter(c, parts, src, group, async_op))
    return _start(f"scatter {chosen}", t, group, async_op, lambda peers: _in_place(
        t, lambda flat: central.scatter(peers, flat, given and [_flat(p) for p in given], root)))  # fmt: skip


def gather(
    tensor: torch.Tensor, gather_list: Sequence[torch.Tensor] | None = None, dst: int = 0, group: Group = None,
    algorithm: str | None = None, async_op: bool = False,
) -> Any:  # fmt: skip
    """Rank `dst` gets the parts of all ranks.

    Args:
        tensor: This rank's part.
        gather_list: On `dst` a list of N tensors of that shape to fill, else ``None``.
        dst: A rank of the world.
        algorithm: ``"native"``, ``"central"`` or ``None``.
        group, async_op: As in `all_reduce`.
    """
    me = check.member(group)
    t, root = check.tensor("tensor", tensor, written=False), check.in_group("dst", dst, group)
    given = _parts_of_root("gather_list", gather_list, t, me == root, group)
    chosen = _choose("gather", algorithm, group, t)
    if chosen == "native":
        mine = t.contiguous()
        return native.on_contiguous(given or [], lambda *c: dist.gather(mine, list(c) or None, dst, group, async_op))

    def work(peers: Peers) -> None:
        flat = given and [_flat(p) for p in given]
        central.gather(peers, _flat(t), flat, root)
        for part, filled in zip(given or (), flat or (), strict=True):
            if not part.is_contiguous():
                part.copy_(filled.view(part.shape))

    return _start(f"gather {chosen}", t, group, async_op, work)


def all_to_all(
    output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None, group: Group = None, algorithm: str | None = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """Part j of rank i's input becomes part i of rank j's output: a transpose of the ranks.

    Args:
        output, input: Cut along dimension 0, into N equal parts or as the splits say.
        output_splits, input_splits: Sizes along dimension 0, one a rank.
        algorithm: ``"native"``, ``"mesh"`` or ``None``.
        group, async_op: As in `all_reduce`.

    Raises:
        TypeError, ValueError: An argument cannot be used; a size does not divide and no splits are given.
    """
    check.member(group)
    out, given = check.tensor("output", output), check.tensor("input", input, written=False)
    check.same_kind(output=out, input=given)
    ranks = dist.get_world_size(group)
    received = _splits("output", out, output_splits, ranks)
    sent = _splits("input", given, input_splits, ranks)
    chosen = _choose("all_to_all", algorithm, group, out)
    if chosen == "native":
        flat = _apart(given, out).contiguous()
        return native.on_contiguous(
            [out], lambda o: dist.all_to_all_single(o, flat, received, sent, group=group, async_op=async_op)
        )

    def work(peers: Peers) -> None:
        filled = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        mesh.all_to_all(peers, filled.split(received), _apart(given, out).contiguous().split(sent))
        if filled is not out:
            out.copy_(filled)

    return _start(f"all_to_all {chosen}", given, group, async_op, work)


def barrier(group: Group = None, algorithm: str | None = None, async_op: bool = False) -> Any:
    """No rank leaves before every rank has come.

    Args:
        algorithm: ``"native"``, ``"tree"`` or ``None``.
        group, async_op: As in `all_reduce`.
    """
    check.member(group)
    token = torch.zeros(1, dtype=torch.uint8, device=torch.device("cpu"))
    chosen = _choose("barrier", algorithm, group, token)
    if chosen == "native":
        return dist.barrier(group, async_op)
    return _start(f"barrier {chosen}", token, group, async_op, lambda peers: tree.barrier(peers, token.device))


# What they share


def _choose(
    operation: str, algorithm: str | None, group: Group, tensor: torch.Tensor, reduction: Reduction | None = None,
    segments: int = 1,
) -> str:  # fmt: skip
    backend, paced = backend_of(group, tensor)
    exact_half = reduction is not None and reduction.is_running_mean
    return choose(operation, algorithm, backend, nbytes=tensor.nbytes, segments=segments, cuda=tensor.is_cuda,
                  paced=paced, exact_half=exact_half, dtype=tensor.dtype)  # fmt: skip


def _start(
    name: str, tensor: torch.Tensor, group: Group, async_op: bool, work: Callable[[Peers], None], op: str = ""
) -> Any:
    """Run `work` with the group's ranks, inside a span of the trace."""
    peers = Peers(group, tag=tag_of(f"{name} {op}"))

    def call() -> None:
        with torch.no_grad(), span(name, nbytes=tensor.nbytes):
            work(peers)

    return start(call, name, group, tensor.device, backend_of(group, tensor)[0] == "nccl", async_op)


def _in_place(tensor: torch.Tensor, work: Callable[[torch.Tensor], None]) -> None:
    """`work` changes a flat view of `tensor`, or, if its elements do not lie side by side, a copy that goes back."""
    flat = _flat(tensor)
    work(flat)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _flat(tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """The elements side by side: a view where they lie so already, unless a copy is wanted."""
    flat = tensor.contiguous().view(-1)
    return flat.clone() if copy and flat.data_ptr() == tensor.data_ptr() else flat


def _apart(read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """`read`, or a copy of it if it shares memory with what is written meanwhile."""
    shared = read.untyped_storage().data_ptr() == written.untyped_storage().data_ptr() and read.numel()
    return read.clone() if shared else read


def _node_size(group: Group, given: int | None) -> int:
    if given is not None:
        return check.whole_number("node_size", given)
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size(group)))


def _parts_of_root(
    name: str, given: Sequence[torch.Tensor] | None, like: torch.Tensor, is_root: bool, group: Group
) -> list[torch.Tensor] | None:
    if is_root:
        return check.parts(name, given, like, dist.get_world_size(group))
    if given is not None:
        raise ValueError(f"{name} is given on a rank that is not the root: expected None there")
    return None


def _splits(name: str, tensor: torch.Tensor, given: Sequence[int] | None, ranks: int) -> list[int]:
    """Sizes along dimension 0, one a rank."""
    length = tensor.shape[0] if tensor.dim() else 0
    if given is None:
        if not tensor.dim() or length % ranks:
            raise ValueError(f"{name} has {length} rows: expected a multiple of {ranks} ranks, or {name}_splits")
        return [length // ranks] * ranks
    sizes = [check.whole_number(f"{name}_splits[{n}]", size, least=0) for n, size in enumerate(given)]
    if len(sizes) != ranks or sum(sizes) != length:
        raise ValueError(f"{name}_splits={sizes}: expected {ranks} sizes that add up to {length}, the rows of {name}")
    return sizes
