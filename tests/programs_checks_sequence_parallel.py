"""Right solutions of chapter 05's exercises in styles other than labkit's own: none may be wasteful."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from labkit import collectives

# The pair


def into_one_tensor():
    """The ranks' parts lie one after the other, and move beside the batch."""
    world = dist.get_world_size()

    def gather(x):
        b, s, h = x.shape
        parts = x.new_empty(world * b, s, h)
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.view(world, b, s, h).transpose(0, 1).reshape(b, world * s, h)

    def scatter(x):
        b, s, h = x.shape
        parts = x.reshape(b, world, s // world, h).transpose(0, 1).contiguous()
        share = x.new_empty(b, s // world, h)
        dist.reduce_scatter_tensor(share, parts.flatten(0, 1))
        return share

    class Gather(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: gather(x))
        backward = staticmethod(lambda ctx, grad: scatter(grad))

    class Scatter(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: scatter(x))
        backward = staticmethod(lambda ctx, grad: gather(grad))

    return Gather.apply, Scatter.apply


def one_class_for_both():
    """A context that is filled after forward, and a ring of labkit's."""

    def run(x, gathers):
        world = dist.get_world_size()
        if gathers:
            parts = x.new_empty(world, *x.shape)
            collectives.all_gather(parts, x, algorithm="ring")
            return torch.cat(list(parts), 1)
        parts = torch.stack(x.chunk(world, 1))
        share = torch.empty_like(parts[0])
        collectives.reduce_scatter(share, parts, algorithm="ring")
        return share

    class Move(torch.autograd.Function):
        @staticmethod
        def forward(x, gathers):
            return run(x, gathers)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.gathers = inputs[1]

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return run(grad, not ctx.gathers), None

    return [lambda x: Move.apply(x, True), lambda y: Move.apply(y, False)]


def messages_to_everyone():
    """No collective: every rank sends every other its part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(world) if peer != rank]

    def swapped(outgoing, like):
        arriving = {peer: torch.empty_like(like) for peer in others}
        works = [dist.isend(outgoing[peer], peer) for peer in others]
        works += [dist.irecv(arriving[peer], peer) for peer in others]
        for work in works:
            work.wait()
        return arriving

    def gather(x):
        x = x.contiguous()
        arrived = swapped(dict.fromkeys(others, x), x) | {rank: x}
        return torch.cat([arrived[peer] for peer in range(world)], dim=1)

    def scatter(x):
        parts = [part.contiguous() for part in x.split(x.shape[1] // world, dim=1)]
        return sum(swapped(parts, parts[0]).values(), parts[rank])

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return gather(x)

        @staticmethod
        def backward(ctx, grad):
            return scatter(grad)

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return scatter(x)

        @staticmethod
        def backward(ctx, grad):
            return gather(grad)

    return Gather.apply, Scatter.apply


class Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        work = dist.all_gather(parts, x, async_op=True)
        work.wait()
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        return Scattering.apply(grad)


class Scattering(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        """Each rank's part goes to it, and is added up there."""
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), 1)]
        arrived = [torch.empty_like(part) for part in parts]
        dist.all_to_all(arrived, parts)
        return torch.stack(arrived).sum(0)

    @staticmethod
    def backward(ctx, grad):
        return Gathering.apply(grad.contiguous())


def classes_outside():
    return Gathering.apply, Scattering.apply


def modules():
    class Call(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function.apply(x)

    return Call(Gathering), Call(Scattering)


# Partial gradients


def views_into_one(params):
    """Each gradient becomes a view into the sum."""
    partial = [p for p, is_partial in params if is_partial]
    flat = torch.zeros(sum(p.numel() for p in partial))
    at = 0
    for p in partial:
        piece = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
        if p.grad is not None:
            piece.copy_(p.grad)
        p.grad = piece
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)


def copies_back(params):
    partial = [p for p, is_partial in params if is_partial]
    for p in partial:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch._utils._flatten_dense_tensors([p.grad for p in partial])
    dist.all_reduce(flat, async_op=True).wait()
    for p, grad in zip(partial, torch._utils._unflatten_dense_tensors(flat, [p.grad for p in partial]), strict=True):
        p.grad.copy_(grad)


def takes_labkits_all_reduce(params):
    sizes = [p.numel() for p, is_partial in params if is_partial]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).view(-1) for p, partial in params if partial])
    collectives.all_reduce(flat, algorithm="ring")
    pieces = iter(flat.split(sizes))
    for p, is_partial in params:
        if is_partial:
            p.grad = next(pieces).clone().view_as(p)


# Softmax in pieces


def by_log_sums(tiles):
    """Pieces that are whole attentions, weighted by their log-sums."""
    out, log_sum = None, None
    for scores, values in tiles:
        log_more = scores.logsumexp(-1, keepdim=True)
        more = torch.softmax(scores, -1).nan_to_num(0.0) @ values
        if out is None:
            out, log_sum = more, log_more
            continue
        both = torch.logaddexp(log_sum, log_more)
        out = out * (log_sum - both).exp().nan_to_num(0.0) + more * (log_more - both).exp().nan_to_num(0.0)
        log_sum = both
    return out


def a_finite_start(tiles):
    out = total = highest = None
    for scores, values in tiles:
        scores = scores.clamp(min=-1e30)
        if highest is None:
            highest = torch.full((scores.shape[0], 1), -1e30)
            total, out = torch.zeros(scores.shape[0], 1), torch.zeros(scores.shape[0], values.shape[1])
        higher = torch.maximum(highest, scores.max(dim=-1, keepdim=True).values)
        shrink = torch.exp(highest - higher)
        weights = torch.exp(scores - higher)
        total.mul_(shrink).add_(weights.sum(dim=-1, keepdim=True))
        out.mul_(shrink).add_(weights @ values)
        highest = higher
    return out / total


def row_by_row(tiles):
    """In plain Python, where the rows are few."""
    rows = None
    for scores, values in tiles:
        if len(scores) > 8:
            return a_finite_start(_again(scores, values, tiles))
        rows = rows or [(-math.inf, 0.0, torch.zeros(values.shape[1])) for _ in scores]
        for r, row in enumerate(scores):
            for score, value in zip(row.tolist(), values, strict=True):
                if score == -math.inf:
                    continue
                highest, total, out = rows[r]
                higher = max(highest, score)
                shrink, weight = math.exp(highest - higher), math.exp(score - higher)
                rows[r] = (higher, total * shrink + weight, out * shrink + weight * value)
    return torch.stack([out / total for _, total, out in rows])


def _again(scores, values, tiles):
    yield scores, values
    yield from tiles


# Ring attention


def all_pieces_in_the_end(q, k, v, attend):
    """Keys and values in messages of their own, posted together; the pieces are weighted at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pieces = [attend(q, k, v)]
    for _ in range(world - 1):
        new_k, new_v = torch.empty_like(k), torch.empty_like(v)
        ops = [dist.P2POp(dist.isend, t, (rank + 1) % world) for t in (k, v)]
        ops += [dist.P2POp(dist.irecv, t, (rank - 1) % world) for t in (new_k, new_v)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        k, v = new_k, new_v
        pieces.append(attend(q, k, v))
    outs, log_sums = (torch.stack(each) for each in zip(*pieces, strict=True))
    return (torch.softmax(log_sums, 0) * outs).sum(0)


def sends_while_it_looks(q, k, v, attend):
    rank, world = dist.get_rank(), dist.get_world_size()
    held = torch.cat([k, v])
    out, total, highest = 0, 0, torch.tensor(float("-inf"))
    for step in range(world):
        works = []
        if step < world - 1:
            arriving = torch.empty_like(held)
            works = [dist.isend(held, (rank + 1) % world), dist.irecv(arriving, (rank - 1) % world)]
        more, log_more = attend(q, *held.chunk(2))
        higher = torch.maximum(highest, log_more)
        out = out * (highest - higher).exp() + more * (log_more - higher).exp()
        total = total * (highest - higher).exp() + (log_more - higher).exp()
        highest = higher
        for work in works:
            work.wait()
        if works:
            held = arriving
    return out / total


def blocking_in_turns(q, k, v, attend):
    """Rank 0 sends first and the others receive first, so nobody waits in a circle."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out, log_sum = attend(q, k, v)
    held = torch.stack([k, v])
    for _ in range(world - 1):
        arriving = torch.empty_like(held)
        if rank == 0:
            dist.send(held, 1)
            dist.recv(arriving, world - 1)
        else:
            dist.recv(arriving, rank - 1)
            dist.send(held, (rank + 1) % world)
        held = arriving
        more, log_more = attend(q, held[0], held[1])
        mine = torch.sigmoid(log_sum - log_more)
        out = mine * out + (1 - mine) * more
        log_sum = torch.maximum(log_sum, log_more) + torch.log1p((-(log_sum - log_more).abs()).exp())
    return out


RIGHT = {
    "sequence_pair": (into_one_tensor, one_class_for_both, messages_to_everyone, classes_outside, modules),
    "norm_gradients": (views_into_one, copies_back, takes_labkits_all_reduce),
    "online_softmax": (by_log_sums, a_finite_start, row_by_row),
    "ring_combine": (all_pieces_in_the_end, sends_while_it_looks, blocking_in_turns),
}
