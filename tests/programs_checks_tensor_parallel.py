"""Right solutions of the exercises of chapter 04 in styles other than labkit's own: none may be wasteful."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit import collectives
from labkit.tensor_parallel import copy_to_group, reduce_from_group

# f and g


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, op=dist.ReduceOp.SUM)
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x).copy_(x)
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


def two_classes():
    return Copy.apply, Reduce.apply


def hooks_and_what_is_missing():
    """Without a Function: a hook, and a sum that autograd does not see."""

    def total(x):
        x = x.detach().clone()
        collectives.all_reduce(x)
        return x

    def f(x):
        y = x.view_as(x)
        y.register_hook(total)
        return y

    return [f, lambda x: x + (total(x) - x.detach())]


def autograd_looks_away():
    """gloo changes the copy behind autograd's back, which takes it for the copy still."""

    def g(x):
        y = x.clone()
        with torch.no_grad():
            collectives.all_reduce(y.detach(), algorithm="ring")
        return y

    return Copy.apply, g


# Column, then row


def narrows(x, A, a, B, b):
    n = A.shape[1] // dist.get_world_size()
    at = n * dist.get_rank()
    y = copy_to_group(x) @ A.narrow(1, at, n)
    y = F.gelu(y + a.narrow(0, at, n))
    z = reduce_from_group(y @ B.narrow(0, at, n))
    return z + b


def linears(x, A, a, B, b):
    rank, t = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * A.size(1) // t, (rank + 1) * A.size(1) // t)
    first, bias, second = A[:, mine].t().contiguous(), a[mine].clone(), B[mine].t().contiguous()
    return reduce_from_group(F.linear(F.gelu(F.linear(copy_to_group(x), first, bias)), second)) + b


def every_tth_column(x, A, a, B, b):
    """Other columns than the contract's, and the matching rows."""
    rank, t = dist.get_rank(), dist.get_world_size()
    y = F.gelu(copy_to_group(x) @ A[:, rank::t] + a[rank::t])
    return reduce_from_group(y @ B[rank::t]) + b


def by_hand(x, A, a, B, b):
    """f and g of one's own."""
    rank, t = dist.get_rank(), dist.get_world_size()
    A, a, B = A.chunk(t, 1)[rank], a.chunk(t)[rank], B.chunk(t)[rank]
    share = F.gelu(Copy.apply(x) @ A + a).mm(B)
    return torch.add(Reduce.apply(share), b)


# A bias, once


def in_one_line_of_torch(x, A, b):
    return reduce_from_group(torch.mm(x, A)).add(b)


def a_part_whose_gradient_is_mended(x, A, b):
    t = dist.get_world_size()
    part = b / t
    part.register_hook(lambda grad: grad * t)
    return reduce_from_group(x @ A + part)


def takes_off_what_is_too_much(x, A, b):
    return reduce_from_group(x @ A + b) - (dist.get_world_size() - 1) * b.detach()


def with_ones_own_g(x, A, b):
    y = Reduce.apply(x @ A)
    y += b
    return y


# A loss without the logits


def two_sums_at_once(logits, target):
    words, rank = logits.size(-1), dist.get_rank()
    m = logits.detach().max(dim=-1).values
    collectives.all_reduce(m, op="max")
    z = logits - m.unsqueeze(-1)
    local = target - rank * words
    theirs = (local < 0) | (local >= words)
    found = z[torch.arange(len(z)), local.masked_fill(theirs, 0)].masked_fill(theirs, 0)
    total, of_target = reduce_from_group(torch.stack([z.exp().sum(-1), found]))
    return torch.log(total) - of_target


def one_hot(logits, target):
    """−∞ is nowhere: a mask of words that are multiplied by 0 or 1."""
    words, rank = logits.shape[-1], dist.get_rank()
    most = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    mine = torch.arange(rank * words, (rank + 1) * words) == target[:, None]
    z = logits - most
    return Reduce.apply(z.exp().sum(-1)).log() - Reduce.apply((z * mine).sum(-1))


def sums_of_logarithms(logits, target):
    """Each rank's own logarithm first; their maximum, and what they add up to."""
    words, rank = logits.shape[1], dist.get_rank()
    own = torch.logsumexp(logits, 1)
    m = own.detach().clone()
    dist.all_reduce(m, op=dist.ReduceOp.MAX)
    local = target - rank * words
    mine = (local >= 0) & (local < words)
    found = torch.where(mine, logits.gather(1, local.clamp(0, words - 1)[:, None])[:, 0] - m, torch.zeros(()))
    return reduce_from_group((own - m).exp()).log() - reduce_from_group(found)


class Loss(torch.autograd.Function):
    """Nothing for autograd: softmax minus target, as it stands in books."""

    @staticmethod
    def forward(ctx, logits, target):
        n, rank = logits.shape[1], dist.get_rank()
        m = logits.amax(1)
        dist.all_reduce(m, op=dist.ReduceOp.MAX)
        e = (logits - m[:, None]).exp()
        Z = e.sum(1)
        of_target = torch.zeros_like(m)
        for i, y in enumerate(target.tolist()):
            if rank * n <= y < (rank + 1) * n:
                of_target[i] = logits[i, y - rank * n] - m[i]
        dist.all_reduce(Z)
        dist.all_reduce(of_target)
        ctx.save_for_backward(e / Z[:, None], target)
        return Z.log() - of_target

    @staticmethod
    def backward(ctx, grad):
        p, target = ctx.saved_tensors
        n = p.shape[1]
        p = p - (torch.arange(n) + dist.get_rank() * n == target[:, None]).float()
        return p * grad[:, None], None


def ones_own_function(logits, target):
    return Loss.apply(logits, target)


RIGHT = {
    "f_and_g": (two_classes, hooks_and_what_is_missing, autograd_looks_away),
    "column_then_row": (narrows, linears, every_tth_column, by_hand),
    "row_bias": (
        in_one_line_of_torch, a_part_whose_gradient_is_mended, takes_off_what_is_too_much, with_ones_own_g,
    ),
    "vocab_cross_entropy": (two_sums_at_once, one_hot, sums_of_logarithms, ones_own_function),
}  # fmt: skip
