"""Right solutions of the exercises of chapters 01 and 03 in styles other than labkit's own: none may be wasteful."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist

from labkit import collectives

# Bytes of a model


def looks_up(params, cards, stage):
    """Floats, of whole values."""
    shard = math.ceil(params / cards)
    whole, cut = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
    return float(whole * params + cut * shard)


def pads_first(params, cards, stage):
    padded = params + (-params) % cards
    held = 0
    for number, each in ((1, 4), (1, 4), (1, 4), (2, 2), (3, 2)):
        held += each * (padded // cards if stage >= number else params)
    return held


# Buckets


def kind_by_kind(sizes, kinds, cap):
    """All buckets of a kind, then those of the next, as tuples."""
    result = []
    for kind in set(kinds):
        bucket, held = [], 0
        for i in range(len(sizes) - 1, -1, -1):
            if kinds[i] != kind:
                continue
            bucket.append(i)
            held += sizes[i]
            if held >= cap:
                result.append(tuple(bucket))
                bucket, held = [], 0
        if bucket:
            result.append(tuple(bucket))
    return tuple(result)


def appends_when_closed(sizes, kinds, cap):
    done, filling = [], {}
    for i, (size, kind) in reversed(list(enumerate(zip(sizes, kinds, strict=True)))):
        bucket, held = filling.pop(kind, ([], 0))
        bucket, held = [*bucket, i], held + size
        if held >= cap:
            done.append(bucket)
        else:
            filling[kind] = (bucket, held)
    return done + [bucket for bucket, _ in filling.values()]


# A hook


def returns_the_mean(param):
    def average(grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    param.register_hook(average)


def changes_the_gradient(param):
    def average(grad):
        grad /= dist.get_world_size()
        dist.all_reduce(grad)

    param.register_hook(average)


def starts_and_waits(param):
    def average(param):
        work = dist.all_reduce(param.grad, op=dist.ReduceOp.SUM, async_op=True)
        work.wait()
        param.grad = param.grad / dist.get_world_size()

    param.register_post_accumulate_grad_hook(average)


def takes_labkits_collective(param):
    param.register_post_accumulate_grad_hook(lambda p: collectives.all_reduce(p.grad, op="avg"))


def takes_the_ring(param):
    param.register_post_accumulate_grad_hook(lambda p: collectives.all_reduce(p.grad, op="avg", algorithm="ring"))


# Buckets that overlap


def views_into_flat_buckets(module, cap):
    """Flat tensors that stay; each gradient becomes a view into one."""
    dist.broadcast(next(module.parameters()).detach(), 0)  # before the first backward nothing is counted
    buckets = []
    for param in reversed(list(module.parameters())):
        if not buckets or buckets[-1]["held"] >= cap:
            buckets.append({"params": [], "held": 0})
        buckets[-1]["params"].append(param)
        buckets[-1]["held"] += param.nbytes
    home = {}
    for bucket in buckets:
        bucket["flat"] = torch.zeros(sum(p.numel() for p in bucket["params"]))
        at = 0
        for param in bucket["params"]:
            home[param] = (bucket, bucket["flat"][at : at + param.numel()].view(param.shape))
            at += param.numel()
        bucket["left"] = len(bucket["params"])
    works = []

    def hook(param):
        bucket, view = home[param]
        view.copy_(param.grad)
        param.grad = view
        bucket["left"] -= 1
        while len(works) < len(buckets) and buckets[len(works)]["left"] == 0:
            flat = buckets[len(works)]["flat"]
            flat /= dist.get_world_size()
            works.append(dist.all_reduce(flat, async_op=True))

    for param in home:
        param.register_post_accumulate_grad_hook(hook)

    def finish():
        for work in works:
            work.wait()
        works.clear()
        for bucket in buckets:
            bucket["left"] = len(bucket["params"])

    return finish


class Reducer:
    """A class, hooks on tensors, labkit's collective."""

    def __init__(self, module, cap):
        self.buckets, held = [[]], 0
        for p in list(module.parameters())[::-1]:
            if held >= cap:
                self.buckets.append([])
                held = 0
            self.buckets[-1].append(p)
            held += p.numel() * 4
        self.start()
        for p in module.parameters():
            p.register_hook(lambda grad, p=p: self.came(p, grad))

    def start(self):
        self.grads, self.works = {}, []

    def came(self, param, grad):
        self.grads[param] = grad
        for bucket in self.buckets[len(self.works) :]:
            if not all(p in self.grads for p in bucket):
                return
            flat = torch.cat([self.grads[p].reshape(-1) for p in bucket])
            self.works.append((flat, collectives.all_reduce(flat, op="avg", async_op=True)))

    def finish(self):
        for bucket, (flat, work) in zip(self.buckets, self.works, strict=True):
            work.wait()
            at = 0
            for p in bucket:
                p.grad = flat[at : at + p.numel()].view_as(p)
                at += p.numel()
        self.start()


def makes_a_reducer(module, cap):
    return Reducer(module, cap).finish


# Accumulation


def one_loop(model, batches):
    for number, batch in enumerate(batches):
        with model.no_sync() if number < len(batches) - 1 else nullcontext():
            loss = model(batch) / len(batches)
            loss.backward()


def divides_in_the_end(model, batches):
    with model.no_sync():
        for batch in batches[:-1]:
            model(batch).backward()
    model(batches[-1]).backward()
    for param in model.parameters():
        param.grad /= len(batches)


def averages_by_hand(model, batches):
    """Nothing through the wrapper; one flat all-reduce in the end."""
    with model.no_sync():
        for batch in batches:
            (model(batch) / len(batches)).backward()
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for grad, piece in zip(grads, (flat / dist.get_world_size()).split([g.numel() for g in grads]), strict=True):
        grad.copy_(piece.view_as(grad))


RIGHT = {
    "model_bytes": (looks_up, pads_first),
    "bucket_assignment": (kind_by_kind, appends_when_closed),
    "gradient_hook": (
        returns_the_mean, changes_the_gradient, starts_and_waits, takes_labkits_collective, takes_the_ring,
    ),
    "bucketed_ddp": (views_into_flat_buckets, makes_a_reducer),
    "accumulation": (one_loop, divides_in_the_end, averages_by_hand),
}  # fmt: skip
