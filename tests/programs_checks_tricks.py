"""Right solutions of chapter 08's exercises in styles other than labkit's own: none may be wasteful."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist

from labkit import collectives

# The norm


def counts_replicated_on_the_groups_first(grads, group):
    """What is replicated is brought by one rank of the group."""
    first = dist.get_rank(group) == 0
    mine = [grad.double().pow(2).sum() for grad, sharded in grads if sharded or first]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *mine]).sum()
    dist.all_reduce(total, group=group)
    return total.sqrt()


def brings_a_share_of_what_is_replicated(grads, group):
    world = dist.get_world_size(group)
    total = torch.zeros((), dtype=torch.float64)
    for grad, sharded in grads:
        total += grad.double().norm() ** 2 / (1 if sharded else world)
    collectives.all_reduce(total, group=group)
    return math.sqrt(total.item())


def gathers_one_number_each(grads, group):
    mine = torch.zeros(1)
    for grad, sharded in grads:
        if sharded:
            mine += torch.linalg.vector_norm(grad, dtype=torch.float32).square()
    every = [torch.empty(1) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    replicated = sum(grad.float().square().sum().item() for grad, sharded in grads if not sharded)
    return (sum(each.item() for each in every) + replicated) ** 0.5


def reduces_both_at_once(grads, group):
    """Two numbers in one all-reduce; the second was counted t times."""
    pair = torch.zeros(2, dtype=torch.float32)
    for grad, sharded in grads:
        pair[0 if sharded else 1] += (grad.to(torch.float32) * grad.to(torch.float32)).sum()
    dist.all_reduce(pair, op=dist.ReduceOp.SUM, group=group)
    return torch.sqrt(pair[0] + pair[1] / dist.get_world_size(group))


def flattens(grads, group):
    def flat(which):
        return torch.cat([torch.zeros(1), *(grad.float().flatten() for grad, sharded in grads if sharded is which)])

    squares = flat(True).dot(flat(True))
    work = dist.all_reduce(squares, group=group, async_op=True)
    whole = flat(False).dot(flat(False))
    work.wait()
    return float(torch.sqrt(squares + whole))


# Segments


def all_that_fit(layers, kept, inside, budget):
    if budget >= layers * inside:
        return 0
    fitting = [c for c in range(1, layers + 1) if c * kept + math.ceil(layers / c) * inside <= budget]
    return min(fitting) if fitting else None


def by_what_is_left(layers, kept, inside, budget):
    """How long a segment may be, if c inputs are kept."""
    c = 0
    while c < layers:
        longest = (budget - c * kept) // inside if c else budget // inside
        if longest * (c or 1) >= layers and longest > 0:
            return c
        c += 1
    longest = (budget - layers * kept) // inside
    return layers if longest >= 1 else None


def with_next(layers, kept, inside, budget):
    def held(c):
        return layers * inside if c == 0 else c * kept + (layers + c - 1) // c * inside

    return next((c for c in range(layers + 1) if held(c) <= budget), None)


def by_tensor_split(layers, kept, inside, budget):
    if sum([inside] * layers) <= budget:
        return 0
    for c in range(1, layers + 1):
        sizes = [len(part) for part in torch.arange(layers).tensor_split(c)]
        if c * kept + max(sizes) * inside <= budget:
            return c
    return None


# The scaler


def sums_the_verdicts(grads, scale, streak, interval, step):
    bad = torch.zeros(())
    for grad in grads:
        bad += (~torch.isfinite(grad)).sum()
    dist.all_reduce(bad)
    if bad > 0:
        return scale * 0.5, 0
    for grad in grads:
        grad.div_(scale)
    step()
    if streak + 1 >= interval:
        return scale * 2, 0
    return scale, streak + 1


def smallest_of_what_is_well(grads, scale, streak, interval, step):
    """Unscales first: inf stays inf."""
    for grad in grads:
        grad.mul_(1.0 / scale)
    well = torch.tensor(int(all(bool(grad.isfinite().all()) for grad in grads)))
    collectives.all_reduce(well, op="min")
    if well.item() == 1:
        step()
        streak += 1
        if streak == interval:
            scale, streak = 2.0 * scale, 0
    else:
        scale, streak = scale / 2, 0
    return scale, streak


def sums_the_gradients(grads, scale, streak, interval, step):
    """Inf and nan pass through a sum; 0 times them is nan."""
    probe = sum((grad.double().mul(0).sum() for grad in grads), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(probe)
    if torch.isnan(probe):
        return [scale / 2, 0]
    for grad in grads:
        grad.copy_(grad / scale)
    step()
    return [scale * 2, 0] if (streak + 1) % interval == 0 else [scale, streak + 1]


def gathers_the_verdicts(grads, scale, streak, interval, step):
    mine = torch.tensor([any(not math.isfinite(x) for grad in grads for x in grad.flatten().tolist())]).float()
    every = torch.zeros(dist.get_world_size())
    dist.all_gather_into_tensor(every, mine)
    if every.any():
        return torch.tensor(scale / 2), torch.tensor(0)
    torch._foreach_div_(grads, scale) if grads else None
    step()
    full = streak + 1 == interval
    return scale * (2 if full else 1), 0 if full else streak + 1


def as_torch_does(grads, scale, streak, interval, step):
    """torch's own operations behind `torch.amp.GradScaler`, and the verdict shared between them."""
    found = torch.zeros(1)
    if grads:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(1.0 / scale))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if not found.item():
        step()
    new, tracker = torch.tensor([float(scale)]), torch.tensor([streak], dtype=torch.int32)
    torch._amp_update_scale_(new, tracker, found, 2.0, 0.5, interval)
    return new.item(), tracker.item()


# Accumulation


def counts_and_flushes(params, batches, k, backward, step):
    """One loop over micro-batches, and a flush at the end of each window."""
    sums, tokens = None, 0
    for number, batch in enumerate(batches, 1):
        tokens += backward(batch)
        grads = [torch.zeros(p.shape) if p.grad is None else p.grad.float() for p in params]
        for p in params:
            p.grad = None
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
        if number % k == 0 or number == len(batches):
            if tokens > 0:
                step([total.div_(tokens) for total in sums])
            sums, tokens = None, 0


def windows_by_islice(params, batches, k, backward, step):
    stream = iter(batches)
    while window := list(itertools.islice(stream, k)):
        sums = {p: torch.zeros_like(p, dtype=torch.float64) for p in params}
        count = 0
        for batch in window:
            count += backward(batch)
            for p in params:
                if p.grad is not None:
                    sums[p].add_(p.grad)
                    p.grad = None
        if count:
            step(tuple(sums[p].div(count).float() for p in params))


def sets_grads_to_zero(params, batches, k, backward, step):
    """Keeps the grads' memory; a grad of zeros is not taken twice."""
    for at in range((len(batches) + k - 1) // k):
        window = batches[at * k : at * k + k]
        main = [torch.zeros(p.numel()) for p in params]
        tokens = 0
        for batch in window:
            tokens += backward(batch)
            for total, p in zip(main, params, strict=True):
                if p.grad is not None:
                    total += p.grad.flatten()
                    p.grad.zero_()
        if tokens != 0:
            step([total.view_as(p) / tokens for total, p in zip(main, params, strict=True)])


def a_flat_sum(params, batches, k, backward, step):
    sizes = [p.numel() for p in params]
    flat, tokens, held = torch.zeros(sum(sizes)), 0, 0

    def flush():
        nonlocal tokens, held
        if tokens:
            step([piece.reshape(p.shape) for piece, p in zip((flat / tokens).split(sizes), params, strict=True)])
        flat.zero_()
        tokens = held = 0

    for batch in batches:
        tokens, held = tokens + backward(batch), held + 1
        for piece, p in zip(flat.split(sizes), params, strict=True):
            if p.grad is not None:
                piece += p.grad.flatten()
            p.grad = None
        if held == k:
            flush()
    flush()


RIGHT = {
    "global_norm": [counts_replicated_on_the_groups_first, brings_a_share_of_what_is_replicated,
                    gathers_one_number_each, reduces_both_at_once, flattens],
    "choose_segments": [all_that_fit, by_what_is_left, with_next, by_tensor_split],
    "loss_scaler": [sums_the_verdicts, smallest_of_what_is_well, sums_the_gradients, gathers_the_verdicts,
                    as_torch_does],
    "accumulate_all": [counts_and_flushes, windows_by_islice, sets_grads_to_zero, a_flat_sum],
}  # fmt: skip
