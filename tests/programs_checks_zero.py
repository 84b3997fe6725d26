"""Right solutions of chapter 07's exercises in styles other than labkit's own: none may be wasteful."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit import collectives

# Shards


def into_a_matrix(tensors, ranks):
    """One row a rank."""
    flat = torch.nn.utils.parameters_to_vector(tensors)
    size = (flat.numel() + ranks - 1) // ranks
    buffer = torch.zeros(ranks, size)
    buffer.view(-1)[: flat.numel()] = flat
    return buffer


def number_by_number(tensors, ranks):
    numbers = [number for tensor in tensors for number in tensor.reshape(-1).tolist()]
    while len(numbers) % ranks:
        numbers.append(0.0)
    size = len(numbers) // ranks
    return tuple(torch.tensor(numbers[at : at + size]) for at in range(0, len(numbers), size))


def pads_the_shards(tensors, ranks):
    """Cut first: as in a buffer that is long enough, the last shards may be short, or empty."""
    flat = torch.cat([t.ravel() for t in tensors])
    size = -(-len(flat) // ranks)
    shards = []
    for rank in range(ranks):
        shard = flat[rank * size : (rank + 1) * size]
        shards.append(F.pad(shard, (0, size - len(shard))))
    return shards


# Stage 1


def into_one_tensor(params, grads, update):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = (params.numel() + ranks - 1) // ranks
    buffer = torch.zeros(size * ranks)
    buffer[: len(grads)] = grads / ranks
    grad = torch.empty(size)
    dist.reduce_scatter_tensor(grad, buffer)
    buffer[: len(params)] = params
    shard = buffer[rank * size : (rank + 1) * size]
    update(shard, grad)
    whole = torch.empty_like(buffer)
    dist.all_gather_into_tensor(whole, shard)
    params[:] = whole[: len(params)]


def takes_labkits_rings(params, grads, update):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rest = -len(params) % ranks
    padded = torch.cat([grads, torch.zeros(rest)])
    grad = torch.empty(len(padded) // ranks)
    collectives.reduce_scatter(grad, padded, op="avg", algorithm="ring")
    whole = torch.cat([params, torch.zeros(rest)])
    shard = whole.view(ranks, -1)[rank].clone()
    update(shard, grad)
    collectives.all_gather(whole, shard, algorithm="ring")
    params.copy_(whole[: len(params)])


def messages_to_everyone(params, grads, update):
    """Every rank gets its part from every other, and gives its shard to all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = list(F.pad(grads, (0, -len(grads) % ranks)).chunk(ranks))
    arrived = [torch.empty_like(part) for part in parts]
    dist.all_to_all(arrived, parts)
    flat = F.pad(params, (0, -len(params) % ranks)).chunk(ranks)
    shard = flat[rank].clone()
    update(shard, torch.stack(arrived).mean(0))
    others = [peer for peer in range(ranks) if peer != rank]
    works = [dist.isend(shard, peer) for peer in others] + [dist.irecv(flat[peer], peer) for peer in others]
    for work in works:
        work.wait()
    flat[rank].copy_(shard)
    params.copy_(torch.cat(flat)[: len(params)])


def without_waiting(params, grads, update):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    grads = torch.nn.functional.pad(grads, [0, -grads.shape[0] % ranks])
    grad = torch.zeros_like(grads.chunk(ranks)[0])
    work = dist.reduce_scatter_tensor(grad, grads, async_op=True)
    shard = torch.zeros_like(grad)
    mine = params[rank * len(grad) : (rank + 1) * len(grad)]
    shard[: len(mine)] = mine
    work.wait()
    grad.div_(ranks)
    update(shard, grad)
    pieces = [torch.zeros_like(shard) for _ in range(ranks)]
    dist.all_gather(pieces, shard, async_op=True).wait()
    params.copy_(torch.cat(pieces).narrow(0, 0, len(params)))


# Stage 2


def counts_down(params, shard):
    left = len(params)

    def ready(param):
        nonlocal left
        left -= 1
        if left:
            return
        left = len(params)
        world = dist.get_world_size()
        flat = torch.zeros(world * shard.numel())
        at = 0
        for p in params:
            flat[at : at + p.numel()] = p.grad.view(-1)
            at += p.numel()
            p.grad = None
        mine = torch.empty_like(shard)
        dist.reduce_scatter_tensor(mine, flat.div_(world))
        shard.add_(mine)

    return ready


class Bucket:
    """Copies each gradient as it comes; the buffer is there only while the bucket fills."""

    def __init__(self, params, shard):
        self.params, self.shard, self.buffer, self.arrived = params, shard, None, set()

    def __call__(self, param):
        ranks = dist.get_world_size()
        if self.buffer is None:
            self.buffer = torch.zeros(ranks, len(self.shard))
        start = 0
        for p in self.params:
            if p is param:
                self.buffer.view(-1)[start : start + p.numel()].copy_(p.grad.flatten())
            start += p.numel()
        param.grad = None
        self.arrived.add(param)
        if len(self.arrived) == len(self.params):
            mine = torch.empty_like(self.shard)
            collectives.reduce_scatter(mine, self.buffer, op="avg")
            self.shard += mine
            self.buffer = None
            self.arrived.clear()


def looks_for_missing_ones(params, shard):
    def ready(param):
        if any(p.grad is None for p in params):
            return
        grads = [p.grad for p in params]
        for p in params:
            p.grad = None
        ranks = dist.get_world_size()
        flat = torch._utils._flatten_dense_tensors(grads)
        parts = list(F.pad(flat, (0, ranks * len(shard) - len(flat))).split(len(shard)))
        del grads, flat
        mine = torch.zeros_like(shard)
        dist.reduce_scatter(mine, parts, async_op=True).wait()
        shard.add_(mine, alpha=1 / ranks)

    return ready


# Stage 3


def with_one_tensor(block, shard):
    world = dist.get_world_size()

    def whole():
        flat = torch.empty(world * len(shard))
        dist.all_gather_into_tensor(flat, shard)
        return flat

    def forward(x):
        flat = whole()
        y = block.forward(flat, x)
        del flat
        return y

    def backward(x, grad):
        flat = whole()
        grad_x, grad_flat = block.backward(flat, x, grad)
        mine = torch.empty(len(shard))
        dist.reduce_scatter_tensor(mine, grad_flat.div_(world))
        return grad_x, mine

    return forward, backward


class Sharded:
    """Frees by resizing, as torch's FSDP does."""

    def __init__(self, block, shard):
        self.block, self.shard = block, shard
        self.whole = torch.empty(dist.get_world_size() * shard.numel())
        self.free()

    def gather(self):
        self.whole.untyped_storage().resize_(4 * dist.get_world_size() * self.shard.numel())
        dist.all_gather_into_tensor(self.whole, self.shard)

    def free(self):
        self.whole.untyped_storage().resize_(0)

    def forward(self, x):
        self.gather()
        y = self.block.forward(self.whole, x)
        self.free()
        return y

    def backward(self, x, grad):
        self.gather()
        grad_x, grad_flat = self.block.backward(self.whole, x, grad)
        self.free()
        mine = torch.empty_like(self.shard)
        collectives.reduce_scatter(mine, grad_flat, op="avg", algorithm="ring")
        return grad_x, mine


def resizes(block, shard):
    sharded = Sharded(block, shard)
    return sharded.forward, sharded.backward


def by_autograd(block, shard):
    """The block's forward once more, under autograd."""
    ranks = dist.get_world_size()

    def gather():
        parts = [torch.empty_like(shard) for _ in range(ranks)]
        work = dist.all_gather(parts, shard, async_op=True)
        work.wait()
        return torch.cat(parts)

    def backward(x, grad):
        flat = gather().requires_grad_()
        x = x.detach().clone().requires_grad_()
        (block.forward(flat, x) * grad).sum().backward()
        parts = list(flat.grad.chunk(ranks))
        mine = torch.empty_like(shard)
        dist.reduce_scatter(mine, parts)
        return [x.grad, mine.div_(ranks)]

    return [lambda x: block.forward(gather(), x), backward]


RIGHT = {
    "flat_shards": (into_a_matrix, number_by_number, pads_the_shards),
    "stage_one_step": (into_one_tensor, takes_labkits_rings, messages_to_everyone, without_waiting),
    "stage_two_hook": (counts_down, Bucket, looks_for_missing_ones),
    "stage_three_block": (with_one_tensor, resizes, by_autograd),
}
