"""What the tests of the collectives run on ranks."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from labkit import collectives
from labkit.trace import label, watch


def values(seed: int, rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings: numbers of both signs whose sums cancel, small integers, or truth values."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        size = torch.rand(length, generator=generator, dtype=torch.float64) + 0.5
        return torch.where(torch.rand(length, generator=generator) < 0.5, size, -size).to(dtype)
    if dtype == torch.bool:
        return torch.rand(length, generator=generator) < 0.5
    return torch.randint(0 if dtype == torch.uint8 else -50, 50, (length,), generator=generator).to(dtype)


def reduce_all(cases: list[dict]) -> list[torch.Tensor]:
    """All-reduce of each case; `members` makes a sub-group, whose members alone call."""
    results, groups = [], {}
    for case in cases:
        case = dict(case)
        seed, length, dtype, members = (
            case.pop("seed"),
            case.pop("length"),
            case.pop("dtype"),
            case.pop("members", None),
        )
        if members is not None and members not in groups:
            groups[members] = dist.new_group(list(members))
        t = values(seed, dist.get_rank(), length, dtype)
        if members is None or dist.get_rank() in members:
            collectives.all_reduce(t, group=groups.get(members), **case)
        results.append(t)
    return results


def same_value(value: float, dtype: torch.dtype, algorithms: tuple, lengths: tuple = (1, 7)) -> list[torch.Tensor]:
    """The average of what is the same on all ranks."""
    results = []
    for algorithm in algorithms:
        for length in lengths:
            t = torch.full((length,), value, dtype=dtype)
            collectives.all_reduce(t, op="avg", algorithm=algorithm, node_size=2)
            results.append(t)
    return results


def every_operation(length: int, dtype: torch.dtype, group_of: list[int] | None = None) -> dict:
    """Each operation by each of its algorithms, beside torch's own: {operation: {algorithm: result}}."""
    group = None if group_of is None else dist.new_group(group_of)
    if group_of is not None and dist.get_rank() not in group_of:
        return {}
    me, p = dist.get_rank(group), dist.get_world_size(group)
    mine = values(1, me, length, dtype)
    whole = values(2, me, length * p, dtype)
    last = dist.get_process_group_ranks(group or dist.group.WORLD)[-1]
    parts = list(whole.split(length)) if length else [whole.clone() for _ in range(p)]

    def reduce_scatter(**how):
        out = torch.empty_like(mine)
        collectives.reduce_scatter(out, whole, **how)
        return out

    def all_gather(**how):
        out = torch.empty_like(whole)
        collectives.all_gather(out, mine, **how)
        return out

    def broadcast(**how):
        t = mine.clone()
        collectives.broadcast(t, src=last, **how)
        return t

    def reduce(**how):
        t = mine.clone()
        collectives.reduce(t, dst=last, **how)
        return t if dist.get_rank() == last else torch.empty(0)

    def scatter(**how):
        t = torch.empty_like(mine)
        collectives.scatter(t, parts if dist.get_rank() == last else None, src=last, **how)
        return t

    def gather(**how):
        out = [torch.empty_like(mine) for _ in range(p)] if dist.get_rank() == last else None
        collectives.gather(mine, out, dst=last, **how)
        return torch.cat(out or [torch.empty(0)])

    def all_to_all(**how):
        out = torch.empty_like(whole)
        collectives.all_to_all(out, whole, **how)
        return out

    calls = (reduce_scatter, all_gather, broadcast, reduce, scatter, gather, all_to_all)
    return {
        call.__name__: {name: call(algorithm=name, group=group) for name in collectives.ALGORITHMS[call.__name__]}
        for call in calls
    }


def uneven_all_to_all() -> list[torch.Tensor]:
    """Rank i sends i + j rows to rank j, by both algorithms."""
    me, p = dist.get_rank(), dist.get_world_size()
    sent, received = [me + j for j in range(p)], [me + j for j in range(p)]
    rows = torch.arange(sum(sent) * 2).view(-1, 2) + 100 * me
    results = []
    for algorithm in ("native", "mesh"):
        out = torch.zeros(sum(received), 2, dtype=torch.int64)
        collectives.all_to_all(out, rows, received, sent, algorithm=algorithm)
        results.append(out)
    return results


def strided() -> list[bool]:
    """Transposed and stepped tensors, through every algorithm of the all-reduce, in place."""
    right = []
    for algorithm in collectives.ALGORITHMS["all_reduce"]:
        for async_op in (False, True):
            base = torch.zeros(6, 4, dtype=torch.int64)
            t = base[::2].t()
            t += torch.arange(12).view(4, 3) + dist.get_rank()
            handle = collectives.all_reduce(t, algorithm=algorithm, async_op=async_op, node_size=2)
            if async_op:
                handle.wait()
            p = dist.get_world_size()
            expected = p * torch.arange(12).view(4, 3) + p * (p - 1) // 2
            right.append(torch.equal(t, expected) and not base[1::2].any())
    return right


def strided_others() -> list[bool]:
    """Every other operation into and out of tensors with gaps, against the same on contiguous ones."""
    me, p = dist.get_rank(), dist.get_world_size()
    right = []

    def gaps(t: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*t.shape, 2, dtype=t.dtype)[..., 0].copy_(t)

    mine, whole = torch.arange(6).view(2, 3) + 10 * me, torch.arange(2 * p * 3).view(2 * p, 3) + 10 * me
    calls = {
        "reduce_scatter": lambda wrap, **how: _filled(wrap(mine), collectives.reduce_scatter, wrap(whole), **how),
        "all_gather": lambda wrap, **how: _filled(wrap(whole), collectives.all_gather, wrap(mine), **how),
        "broadcast": lambda wrap, **how: _filled(wrap(mine), collectives.broadcast, 1, **how),
        "reduce": lambda wrap, **how: _filled(wrap(mine), collectives.reduce, 1, **how),
        "scatter": lambda wrap, **how: _filled(
            wrap(mine), collectives.scatter, [wrap(w) for w in whole.split(2)] if me == 1 else None, 1, **how
        ),
        "gather": lambda wrap, **how: _gathered(wrap, mine, **how),
        "all_to_all": lambda wrap, **how: _filled(wrap(whole), collectives.all_to_all, wrap(whole), **how),
    }
    for name, call in calls.items():
        for algorithm in (None, *collectives.ALGORITHMS[name]):
            expected, got = call(torch.clone, algorithm=algorithm), call(gaps, algorithm=algorithm)
            right.append(torch.equal(expected, got) or (name == "reduce" and me != 1))
    return right


def _filled(out: torch.Tensor, call, *args, **how) -> torch.Tensor:
    call(out, *args, **how)
    return out


def _gathered(wrap, mine: torch.Tensor, **how) -> torch.Tensor:
    out = [wrap(torch.zeros_like(mine)) for _ in range(dist.get_world_size())] if dist.get_rank() == 1 else None
    collectives.gather(wrap(mine), out, 1, **how)
    return torch.stack(out) if out else torch.zeros(1)


def in_the_same_memory() -> bool:
    """The output is a part of the input, as FSDP has it."""
    me, p, right = dist.get_rank(), dist.get_world_size(), True
    for algorithm in collectives.ALGORITHMS["reduce_scatter"]:
        whole = torch.arange(3 * p) * 10**me
        collectives.reduce_scatter(whole[3 * me : 3 * me + 3], whole, algorithm=algorithm)
        right &= torch.equal(whole[3 * me : 3 * me + 3], torch.arange(3 * me, 3 * me + 3) * (10**p // 9))
    for algorithm in collectives.ALGORITHMS["all_gather"]:
        whole = torch.full((2 * p,), me)
        collectives.all_gather(whole, whole[2 * me : 2 * me + 2], algorithm=algorithm)
        right &= torch.equal(whole, torch.arange(p).repeat_interleave(2))
    whole = torch.arange(p) + 10 * me
    collectives.all_to_all(whole, whole, algorithm="mesh")
    return right and torch.equal(whole, 10 * torch.arange(p) + me)


def overlapping(times: int, algorithm: str = "ring") -> int:
    """Two asynchronous all-reduces at once, then a blocking one; how many times all three were right."""
    rank, p, right = dist.get_rank(), dist.get_world_size(), 0
    for k in range(times):
        a, b, c = torch.full((997,), rank + k), torch.full((1003,), 10 * rank + k), torch.full((5,), rank)
        first = collectives.all_reduce(a, algorithm=algorithm, async_op=True)
        second = collectives.all_reduce(b, algorithm=algorithm, async_op=True)
        if k % 2:
            collectives.all_reduce(c, algorithm=algorithm)
        second.wait()
        first.wait()
        total = p * (p - 1) // 2
        right += bool(
            (a == total + p * k).all() and (b == 10 * total + p * k).all() and (c == (total if k % 2 else rank)).all()
        )
    return right


def beside_messages() -> bool:
    """A ring under way, while the rank's own messages pass on the same group."""
    rank, p, right = dist.get_rank(), dist.get_world_size(), True
    for _ in range(20):
        t, got = torch.full((5000,), rank), torch.zeros(1, dtype=torch.int64)
        handle = collectives.all_reduce(t, algorithm="ring", async_op=True)
        mine = torch.tensor([rank])
        send = collectives.isend(mine, (rank + 1) % p)
        collectives.recv(got, (rank - 1) % p)
        send.wait()
        handle.wait()
        right &= got.item() == (rank - 1) % p and bool((t == p * (p - 1) // 2).all())
    return right


def leaves_no_thread() -> int:
    handle = collectives.all_reduce(torch.ones(9), algorithm="tree", async_op=True)
    handle.wait()
    return threading.active_count()


def async_error() -> str:
    """The rank's own mistake comes out of `wait`, with the other rank's messages answered."""
    import labkit.collectives.ring as ring

    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("in the thread")

    before, ring.all_reduce = ring.all_reduce, broken
    try:
        handle = collectives.all_reduce(torch.ones(3), algorithm="ring", async_op=True)
        try:
            handle.wait()
        except ZeroDivisionError as error:
            return str(error)
        return "no error"
    finally:
        ring.all_reduce = before


def labelled_async() -> None:
    with label(bucket=3):
        handle = collectives.all_reduce(torch.ones(8), algorithm="ring", async_op=True)
    handle.wait()


def batch() -> list[int]:
    """All pairs at once; the batch's own `wait` alone must be enough for every tensor."""
    rank, p = dist.get_rank(), dist.get_world_size()
    mine, got = torch.full((200_000,), rank), [torch.full((200_000,), -1) for _ in range(p)]
    operations = []
    for peer in range(p):
        if peer != rank:
            operations.append(dist.P2POp(dist.irecv, got[peer], peer))
            operations.append(dist.P2POp(dist.isend, mine, peer))
    if rank == p - 1:
        time.sleep(0.1)
    works = collectives.batch_isend_irecv(operations)
    works.wait()
    return [int(t.min()) for peer, t in enumerate(got) if peer != rank]


def hex_ring(ranks_of: int, length: int | None = None, algorithm: str = "ring", segments: int = 1) -> list[int]:
    """16^rank, reduced: hex digit j of a value counts what rank j has put in."""
    t = torch.full((length or ranks_of,), 16 ** dist.get_rank())
    with watch(t, parts=ranks_of):
        collectives.all_reduce(t, algorithm=algorithm, segments=segments)
    return t.tolist()


def each_call(cases: list[tuple]) -> None:
    """Each of (operation, algorithm, elements, dtype, more) once, its events labelled with its number."""
    for number, (operation, algorithm, elements, dtype, more) in enumerate(cases):
        with label(case=number):
            one_call(operation, algorithm, elements, dtype, **more)


def one_call(operation: str, algorithm: str, elements: int, dtype: torch.dtype, root: int = 0, **more) -> None:
    p, whole = dist.get_world_size(), torch.ones(elements, dtype=dtype)
    part = torch.ones(elements // p, dtype=dtype)
    parts = [torch.ones_like(whole) for _ in range(p)] if dist.get_rank() == root else None
    tensors = {
        "all_reduce": (whole,), "broadcast": (whole, root), "reduce": (whole, root), "reduce_scatter": (part, whole),
        "all_gather": (whole, part), "all_to_all": (torch.empty_like(whole), whole), "scatter": (whole, parts, root),
        "gather": (whole, parts, root), "barrier": (),
    }[operation]  # fmt: skip
    getattr(collectives, operation)(*tensors, algorithm=algorithm, **more)


def refusals() -> dict[str, str]:
    """What each wrong call says, on every rank, with nothing sent."""
    t = torch.ones(4)
    group = dist.new_group([0, 1])
    calls = {
        "op": lambda: collectives.all_reduce(t, op="mean"),
        "avg of integers": lambda: collectives.all_reduce(torch.ones(2, dtype=torch.int64), op="avg"),
        "algorithm": lambda: collectives.all_reduce(t, algorithm="rings"),
        "no such here": lambda: collectives.broadcast(t, algorithm="ring"),
        "not a tensor": lambda: collectives.all_reduce([1.0]),
        "complex": lambda: collectives.all_reduce(torch.ones(2, dtype=torch.complex64)),
        "sparse": lambda: collectives.all_reduce(torch.eye(2).to_sparse()),
        "expanded": lambda: collectives.all_reduce(torch.ones(1).expand(4)),
        "segments": lambda: collectives.all_reduce(t, segments=0),
        "segments type": lambda: collectives.all_reduce(t, segments=2.0),
        "node_size": lambda: collectives.all_reduce(t, node_size=0),
        "does not divide": lambda: collectives.reduce_scatter(torch.ones(1), torch.ones(4)),
        "gather size": lambda: collectives.all_gather(torch.ones(4), torch.ones(1)),
        "dtype": lambda: collectives.reduce_scatter(torch.ones(2), torch.ones(6, dtype=torch.float64)),
        "root": lambda: collectives.broadcast(t, src=7),
        "root type": lambda: collectives.broadcast(t, src="0"),
        "root outside": lambda: collectives.broadcast(t, src=2, group=group) if dist.get_rank() < 2 else _raise(),
        "not a member": lambda: collectives.all_reduce(t, group=group) if dist.get_rank() == 2 else _raise(),
        "scatter_list": lambda: collectives.scatter(t, [t], src=dist.get_rank()),
        "scatter_list elsewhere": lambda: collectives.scatter(t, [t], src=(dist.get_rank() + 1) % 3),
        "gather shape": lambda: collectives.gather(t, [torch.ones(3)] * 3, dst=dist.get_rank()),
        "all_to_all": lambda: collectives.all_to_all(torch.ones(4), torch.ones(4)),
        "splits": lambda: collectives.all_to_all(torch.ones(4), torch.ones(4), [1, 1, 1], [1, 1, 2]),
        "irecv": lambda: collectives.irecv(torch.ones(4, 4).t()[:, :2], 0 if dist.get_rank() else 1),
        "batch": lambda: collectives.batch_isend_irecv([]),
        "using": lambda: collectives.using("rings").__enter__(),
        "segments of a tree": lambda: collectives.all_reduce(t, algorithm="tree", segments=2),
        "op as a number": lambda: collectives.all_reduce(t, op=0),
        "unsigned": lambda: collectives.all_reduce(torch.ones(2, dtype=torch.uint16)),
        "recv from nobody": lambda: collectives.recv(t, 7),
        "8-bit": lambda: collectives.all_reduce(t.to(torch.float8_e4m3fn)),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except (TypeError, ValueError) as error:
            said[name] = str(error)
    return said


def _raise() -> None:
    raise ValueError("(another rank)")


def unwaited() -> None:
    collectives.all_reduce(torch.ones(3), algorithm="ring", async_op=True)
    collectives.barrier(algorithm="tree")  # which waits for it


def error_nobody_waits_for() -> None:
    """The thread fails before it sends anything."""
    import labkit.collectives.ring as ring

    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("in the thread")

    before, ring.all_reduce = ring.all_reduce, broken
    collectives.all_reduce(torch.ones(3), algorithm="ring", async_op=True)
    collectives.barrier(algorithm="tree")
    ring.all_reduce = before


def different_ops() -> float:
    t = torch.full((3,), 2.0)
    collectives.all_reduce(t, op="sum" if dist.get_rank() else "product", algorithm="ring")
    return t[0].item()


def chain_of_groups() -> float:
    """Rank 0 is in an all-reduce with 1, which comes only after one with 2, which comes only after one with 0."""
    rank, t = dist.get_rank(), torch.ones(2)
    groups = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (0, 2), (1, 2))}
    if rank == 0:
        handle = collectives.all_reduce(t, group=groups[0, 1], algorithm="ring", async_op=True)
        other = torch.ones(2)
        collectives.all_reduce(other, group=groups[0, 2], algorithm="ring")
        handle.wait()
    if rank == 2:
        collectives.all_reduce(t, group=groups[0, 2], algorithm="ring")
        collectives.all_reduce(t, group=groups[1, 2], algorithm="ring")
    if rank == 1:
        collectives.all_reduce(t, group=groups[1, 2], algorithm="ring")
        collectives.all_reduce(t, group=groups[0, 1], algorithm="ring")
    return t[0].item()


def two_threads(times: int) -> int:
    """A blocking ring in one thread while an asynchronous one of the other is under way."""
    p, right = dist.get_world_size(), 0
    for _ in range(times):
        a, b = torch.ones(4000), torch.full((4000,), 2.0)
        handle = collectives.all_reduce(a, algorithm="ring", async_op=True)
        other = threading.Thread(target=lambda b=b: collectives.all_reduce(b, algorithm="ring"))
        other.start()
        other.join()
        handle.wait()
        right += bool((a == p).all() and (b == 2 * p).all())
    return right


def in_inference_mode() -> list[float]:
    with torch.inference_mode():
        t = torch.ones(3)
        collectives.all_reduce(t, algorithm="ring", async_op=True).wait()
        return t.tolist()


def large_bfloat16() -> list[float]:
    t = torch.full((2,), 3e38, dtype=torch.bfloat16)
    collectives.all_reduce(t, op="avg")
    return [t[0].item(), torch.tensor(3e38, dtype=torch.bfloat16).item()]


def small_integers() -> list[list[int]]:
    results = []
    for dtype in (torch.int8, torch.int16):
        t = torch.full((3,), dist.get_rank(), dtype=dtype)
        collectives.all_reduce(t)
        collectives.broadcast(t, src=1)
        results.append(t.tolist())
    return results


def aliased_scatter() -> list[int]:
    whole = torch.arange(2 * dist.get_world_size())
    parts = list(whole.split(2)) if dist.get_rank() == 0 else None
    mine = parts[1] if parts else torch.zeros(2, dtype=torch.int64)  # the root's lies in another rank's part
    collectives.scatter(mine, parts, algorithm="central")
    return mine.tolist()


def waits_twice() -> list[float]:
    t = torch.ones(4, 2).t()
    handle = collectives.all_reduce(t, algorithm="native", async_op=True)
    handle.wait()
    t.zero_()
    handle.wait()
    return t.flatten().tolist()


def stuck_in_thread() -> None:
    """Rank 1 never comes; the others wait for a ring under way."""
    if dist.get_rank() != 1:
        handle = collectives.all_reduce(torch.ones(300), algorithm="ring", async_op=True)
        handle.wait()


def who_counts(x: float) -> list:
    """What `None` chooses here: the kinds of the events."""
    collectives.all_reduce(torch.full((4,), x))
    collectives.all_reduce(torch.full((4,), x, dtype=torch.float16), op="avg")
    with collectives.using("tree"):
        collectives.all_reduce(torch.full((4,), x))
        collectives.reduce_scatter(torch.ones(1), torch.ones(dist.get_world_size()))
    return []


def gradient_inside() -> list[float]:
    """In place on a leaf that wants a gradient, as torch's own does it, and outside of autograd."""
    w = torch.nn.Parameter(torch.ones(3))
    collectives.all_reduce(w, algorithm="ring")
    (2 * w).sum().backward()
    return [*w.tolist(), *w.grad.tolist()]
