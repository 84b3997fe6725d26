"""What the tests of the norm run on ranks; the reference is `torch.nn.utils.clip_grad_norm_` in one process."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import programs_pipeline
import programs_tensor_parallel as programs
import torch
import torch.distributed as dist
from torch import nn

from labkit import device, pipeline, sequence_parallel, tensor_parallel, zero
from labkit.collectives import Placement, mark
from labkit.data_parallel import DistributedDataParallel
from labkit.model import Transformer
from labkit.model import loss as whole_loss
from labkit.pipeline.parts import cut
from labkit.train import Mesh
from labkit.tricks import clip_grad_norm_, total_norm


def numbers(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device.current())


def with_grad(*values: float, dtype: torch.dtype = torch.float64, **lives: Any) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(len(values), dtype=dtype, device=device.current()))
    param.grad = numbers(*values, dtype=dtype)
    return mark(param, **lives)


def said(fn: Any) -> str:
    """What an error said."""
    try:
        return f"no error: {fn()}"
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


# By hand


def sharded_and_replicated(p: float) -> tuple[float, list[float]]:
    """Squares 9 and 16 on two ranks, 4 on both; the norm, and this rank's gradients once clipped to 1."""
    rank = dist.get_rank()
    params = [with_grad((3.0, 4.0)[rank], sharded=(None,)), with_grad(2.0, replicated=(None,))]
    return clip_grad_norm_(params, 1.0, p).item(), [param.grad.item() for param in params]


def stages(p: float, tied: bool, empty: bool) -> float:
    """3 and 4 on two stages; a tied 2 on both, or a third stage without parameters."""
    rank = dist.get_rank()
    params = [with_grad((3.0, 4.0)[rank])] if rank < 2 else []
    if tied:
        params += [with_grad(2.0, tied="embedding")] if not empty or rank < 2 else []
    return clip_grad_norm_(params, 1.0, p, pipeline_group=dist.group.WORLD).item()


def one_that_is_not_finite(value: float, p: float) -> list[tuple[str, int, float, bool]]:
    """On tp 2 × pp 2 one gradient on one rank is `value`, of each kind in turn: the norm, and whether it is refused."""
    mesh, rank = Mesh(tp=2, pp=2), dist.get_rank()
    tp, pp, found = mesh.group("tp"), mesh.group("pp"), []
    for kind in ("sharded", "replicated", "tied", "partial", "stage"):
        for where in (0, 1) if kind == "stage" else (0, 3):
            params = {
                "sharded": with_grad(1.0, 2.0, sharded=(tp,)),
                "replicated": with_grad(3.0, replicated=(tp,)),
                "tied": with_grad(4.0, sharded=(tp,), tied="embedding"),
                "partial": with_grad(5.0, replicated=(tp,), partial=(tp,)),
            }
            if mesh.place(rank)["pp"] == 0:
                params["stage"] = with_grad(6.0, replicated=(tp,))
            if where == rank:
                params[kind].grad[0] = value
            refused = said(lambda params=params: clip_grad_norm_(params.values(), 1.0, p, True, pp))
            norm = clip_grad_norm_(params.values(), 1.0, p, pipeline_group=pp).item()
            found.append((kind, where, norm, refused.startswith("RuntimeError: the gradients' norm is ")))
    return found


def whoever_has_no_gradient() -> tuple[float, float]:
    """A frozen parameter, an empty shard and a rank that holds nothing of a parameter take part."""
    rank = dist.get_rank()
    frozen = mark(nn.Parameter(torch.zeros(3, device=device.current()), requires_grad=False), sharded=(None,))
    empty = with_grad(sharded=(None,))
    only_here = with_grad(5.0, sharded=(None,)) if rank == 0 else mark(nn.Parameter(empty.data), sharded=(None,))
    norm = clip_grad_norm_([frozen, empty, only_here], 1.0)
    pieces = [(None if rank else numbers(3.0, 4.0), Placement(sharded=(None,)))]
    return norm.item(), total_norm(pieces).item()


def by_narrow_types(dtype: torch.dtype) -> float:
    """On each rank 255 elements of 9984: their norm is above what fp16 holds, and between two numbers of bf16."""
    return total_norm([(torch.full((255,), 9984.0, dtype=dtype, device=device.current()), Placement((None,)))]).item()


def at_random(seeds: range) -> float:
    """Gradients split at random over dp, tp and pp, each rank with its parts: the largest relative difference."""
    mesh, off = Mesh(tp=2, dp=1, pp=2), 0.0
    place, tp, pp = mesh.place(dist.get_rank()), mesh.group("tp"), mesh.group("pp")
    for seed in seeds:
        draw, mine, whole = random.Random(seed), [], []
        p = draw.choice((1.0, 2.0, 3.0, 2.5, math.inf))
        for n in range(draw.randint(1, 6)):
            values = [draw.gauss(0, 10 ** draw.randint(-3, 3)) for _ in range(draw.randint(1, 9))]
            kind, at = draw.choice(("sharded", "replicated", "alone")), draw.choice((0, 1, "both"))
            border = draw.randint(0, len(values))
            whole += values
            if at not in ("both", place["pp"]):
                continue
            name = f"tied {n}" if at == "both" else None
            if kind == "sharded":
                own = values[:border] if place["tp"] == 0 else values[border:]
                mine.append(with_grad(*own, sharded=(tp,), tied=name))
            else:
                mine.append(with_grad(*values, replicated=(tp,) if kind == "replicated" else (), tied=name))
        have = clip_grad_norm_(mine, 1.0, p, pipeline_group=pp).item()
        want = torch.linalg.vector_norm(torch.tensor(whole, dtype=torch.float64), p).item()
        off = max(off, abs(have - want) / want)
    return off


# Whole models


def clipped_reference(model: nn.Module, p: float) -> tuple[float, float]:
    """(norm, what to clip to): half of the norm, so that clipping changes something."""
    grads = [param.grad for param in model.parameters()]
    norm = nn.utils.get_total_norm(grads, p)
    nn.utils.clip_grad_norm_(model.parameters(), norm.item() / 2, p)
    return norm.item(), norm.item() / 2


def beside_data_parallelism(name: str, changes: dict, how: str, p: float) -> tuple[float, float]:
    """dp 2 × tp 2: this rank's norm, and how far norm and clipped gradients are from one process."""
    mesh, reference = Mesh(tp=2, dp=2), programs.transformer(name, **changes)
    tp, batch, mine = mesh.group("tp"), programs.tokens(), mesh.place(dist.get_rank())["dp"]
    model = programs.shared(copy.deepcopy(reference), how, tp)
    wrapped = DistributedDataParallel(model, mesh.group("dp"))
    own = batch[mine : mine + 1]
    ours, count = tensor_parallel.loss(wrapped(own[:, :-1]), own[:, 1:], programs.VOCAB, tp)
    (ours / count).backward()
    sequence_parallel.reduce_partial_gradients(model)
    total, count = whole_loss(reference(batch[:, :-1]), batch[:, 1:])
    (total / count).backward()
    want, limit = clipped_reference(reference, p)
    norm = clip_grad_norm_(model.parameters(), limit, p).item()
    expected = dict(reference.named_parameters())
    pairs = [(programs.whole_gradient(param, n, tp)[: expected[n].shape[0]], expected[n].grad)
             for n, param in model.named_parameters()]  # fmt: skip
    return norm, max(abs(norm - want) / want, programs_pipeline.worst(pairs))


def in_three_dimensions(p: float, tied: bool = True) -> tuple[float, float]:
    """dp 2 × tp 2 × pp 2, tied embeddings: as `beside_data_parallelism`."""
    mesh, reference = Mesh(tp=2, dp=2, pp=2), programs.transformer("tiny_gpt", tied=tied)
    place, tp, pp = mesh.place(dist.get_rank()), mesh.group("tp"), mesh.group("pp")
    parts = cut(tensor_parallel.parallelize(copy.deepcopy(reference), tp), [range(1), range(1, 2)])
    engine = pipeline.PipelineEngine(
        {place["pp"]: parts[place["pp"]]}, pipeline.one_f_one_b(2, 2),
        lambda logits, targets: tensor_parallel.loss(logits, targets, programs.VOCAB, tp), pp, mesh.group("dp"),
    )  # fmt: skip
    batch = programs.tokens(batch=4)
    own = batch[2 * place["dp"] :][:2]
    engine.step(own[:, :-1], own[:, 1:])
    total, count = whole_loss(reference(batch[:, :-1]), batch[:, 1:])
    (total / count).backward()
    want, limit = clipped_reference(reference, p)
    norm = clip_grad_norm_(engine.parameters(), limit, p, pipeline_group=pp).item()
    expected = dict(reference.named_parameters())
    pairs = []
    for n, param in parts[place["pp"]].named_parameters():
        n = n.replace("blocks.0", f"blocks.{place['pp']}")
        grad = expected["token_embedding.weight" if tied and n == "head.weight" else n].grad
        pairs.append((programs.whole_gradient(param, n, tp)[: grad.shape[0]], grad))
    return norm, max(abs(norm - want) / want, programs_pipeline.worst(pairs))


def by_zero(stage: int, tp_size: int, p: float) -> tuple[float, float]:
    """ZeRO over dp 2, beside tp: this rank's norm, and how far norm and parameters after a clipped step are off."""
    mesh, reference = Mesh(tp=tp_size, dp=2), programs.transformer("tiny_gpt", tied=tp_size == 1)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    batch, mine = programs.tokens(), mesh.place(dist.get_rank())["dp"]
    total, count = whole_loss(reference(batch[:, :-1]), batch[:, 1:])
    (total / count).backward()
    want, limit = clipped_reference(reference, p)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    model = programs.transformer("tiny_gpt", tied=tp_size == 1)
    if tp_size > 1:
        tensor_parallel.parallelize(model, tp)
    own = batch[mine : mine + 1]
    if stage == 3:
        model = zero.FullyShardedDataParallel(model, dp)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = zero.ShardedOptimizer(model, torch.optim.SGD, stage=stage, group=dp, lr=0.1)
    loss_of = whole_loss if tp_size == 1 else lambda y, t: tensor_parallel.loss(y, t, programs.VOCAB, tp)
    ours, count = loss_of(model(own[:, :-1]), own[:, 1:])
    (ours / count).backward()
    clip = clip_grad_norm_ if stage == 3 else lambda _, limit, p: optimizer.clip_grad_norm_(limit, p)
    norm = clip(model.parameters(), limit, p).item()
    optimizer.step()
    off = abs(norm - want) / want
    if stage < 3 and tp_size == 1:
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        off = max(off, programs_pipeline.worst((a.detach(), b.detach()) for a, b in pairs))
    return norm, off


def by_zero_in_a_pipeline(stage: int) -> tuple[float, float]:
    """ZeRO over dp 2 in each of two stages, tied embeddings: as `by_zero`, without the step."""
    mesh, reference = Mesh(dp=2, pp=2), programs.transformer("tiny_gpt")
    place, pp, dp = mesh.place(dist.get_rank()), mesh.group("pp"), mesh.group("dp")
    part = cut(copy.deepcopy(reference), [range(1), range(1, 2)])[place["pp"]]
    engine = pipeline.PipelineEngine({place["pp"]: part}, pipeline.one_f_one_b(2, 2), whole_loss, pp)
    optimizer = zero.ShardedOptimizer(part, torch.optim.SGD, stage=stage, group=dp, lr=0.1)
    batch = programs.tokens(batch=4)
    own = batch[2 * place["dp"] :][:2]
    with optimizer.no_sync():  # the engine divides gradients once all of them are there
        engine.step(own[:, :-1], own[:, 1:])
    total, count = whole_loss(reference(batch[:, :-1]), batch[:, 1:])
    (total / count).backward()
    want, limit = clipped_reference(reference, 2.0)
    norm = optimizer.clip_grad_norm_(limit, pipeline_group=pp).item()
    return norm, abs(norm - want) / want


# What is refused, and what travels


def partial_that_nobody_summed(p: float) -> tuple[str, str]:
    """A model split along the sequence, clipped before and after its partial gradients were summed."""
    model: Transformer = programs.shared(programs.transformer("tiny_gpt"), "sp")
    batch = programs.tokens()
    total, count = tensor_parallel.loss(model(batch[:, :-1]), batch[:, 1:], programs.VOCAB)
    (total / count).backward()
    before = said(lambda: clip_grad_norm_(model.parameters(), 1.0, p))
    sequence_parallel.reduce_partial_gradients(model)
    return before, said(lambda: clip_grad_norm_(model.parameters(), 1.0, p))


def a_tie_without_its_other_stage() -> str:
    return said(lambda: clip_grad_norm_([with_grad(2.0, tied="embedding")], 1.0))


def what_travels(kinds: int) -> None:
    """Many parameters on tp 2 × dp 2: of `kinds` of placements."""
    mesh = Mesh(tp=2, dp=2)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    lives = [Placement(sharded=(tp,)), Placement(sharded=(dp,), replicated=(tp,)), Placement(sharded=(tp, dp))][:kinds]
    total_norm([(numbers(1.0, 2.0), where) for where in [*lives, Placement()] * 5])
