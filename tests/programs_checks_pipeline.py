"""Right solutions of chapter 06's exercises in styles other than labkit's own: none may be wasteful."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from labkit.pipeline import Action, Schedule

# Orders


def by_pairs(rank, ranks, micro_batches):
    """Forwards and backwards as two rows, drawn from in turn."""
    forwards = deque(f"F{i}" for i in range(micro_batches))
    backwards = deque(f"B{i}" for i in range(micro_batches))
    order = [forwards.popleft() for _ in range(min(micro_batches, ranks - rank))]
    while backwards:
        order.append(backwards.popleft())
        if forwards:
            order.append(forwards.popleft())
    return tuple(order)


def by_what_is_held(rank, ranks, micro_batches):
    order, f, b = [], 0, 0
    while b < micro_batches:
        if f < micro_batches and f - b < ranks - rank:
            order.append(f"F{f}")
            f += 1
        else:
            order.append(f"B{b}")
            b += 1
    return order


def as_in_the_paper(rank, ranks, micro_batches):
    """Backwards from the last micro-batch to the first."""
    numbers = list(range(micro_batches))
    return ["F" + str(n) for n in numbers] + ["B" + str(n) for n in reversed(numbers)]


def counted(rank, ranks, micro_batches, chunks):
    """By doing it: forwards until the first backward could be back."""
    steps = [(group, chunk, m) for group in range(0, micro_batches, ranks) for chunk in range(chunks)
             for m in range(group, min(group + ranks, micro_batches))]  # fmt: skip
    wanted = (chunks - 1) * ranks + (2 if chunks > 1 else 1) * (ranks - 1 - rank)
    return len(steps[: wanted + 1])


def as_a_set(words):
    held, sizes = set(), [0]
    freed_by = "BW"[any(word.startswith("W") for word in words)]
    for word in words:
        kind, number = word[0], int(word[1:])
        if kind == "F":
            held.add(number)
        sizes.append(len(held))
        if kind == freed_by:
            held.remove(number)
    return max(sizes)


# A schedule


def turned_round(schedule):
    """The rows, the other way round."""
    rows = [line.split(":")[1] for line in schedule.strip().splitlines()]
    return "\n".join(f"r{rank}:{row}" for rank, row in enumerate(reversed(rows)))


def by_a_list(schedule):
    """Each rank does the first of its actions that can run, a backward before a forward, and holds 3 at most."""
    broken = Schedule.parse(schedule)
    left, done, rows = [list(row) for row in broken.actions], set(), [[] for _ in broken.actions]
    while any(left):
        now = []
        for rank, actions in enumerate(left):
            held = sum(a.kind == "F" for a in rows[rank]) - sum(a.kind == "B" for a in rows[rank])
            for action in sorted(actions):
                kind, m, s = action
                before = [Action("F", m, s - 1)] if kind == "F" else [Action("F", m, s), Action("B", m, s + 1)]
                if all(a in done or a.stage not in range(3) for a in before) and (kind == "B" or held < 3 - rank):
                    now.append((rank, action))
                    break
        for rank, action in now:
            left[rank].remove(action)
            rows[rank].append(action)
            done.add(action)
    return Schedule(name="", ranks=3, micro_batches=4, stages=3, actions=tuple(map(tuple, rows)))


def weights_at_once(ranks, micro_batches):
    """Each W behind its B: a third less of the bubble already, and 1F1B's stash."""
    lines = []
    for rank in range(ranks):
        words = by_what_is_held(rank, ranks, micro_batches)
        lines.append(f"r{rank}: " + " ".join(w if w[0] == "F" else f"{w} W{w[1:]}" for w in words))
    return "\n".join(lines)


# The loop


def in_batches(micro_batches, forward, backward, shape):
    """As on NCCL: what goes and what comes at one moment is one batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1 if rank else None), (rank + 1 if rank + 1 < world else None)

    def swap(sends, receives):
        rooms = [torch.zeros(shape) if peer is not None else None for peer in receives]
        ops = [dist.P2POp(dist.isend, x, peer) for x, peer in sends if peer is not None]
        ops += [dist.P2POp(dist.irecv, x, peer) for x, peer in zip(rooms, receives, strict=True) if peer is not None]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return rooms

    warm_up = min(world - 1 - rank, micro_batches)
    for i in range(warm_up):
        (x,) = swap([], [before])
        swap([(forward(i, x), after)], [])
    if warm_up < micro_batches:
        (x,) = swap([], [before])
    for i in range(micro_batches - warm_up):
        y = forward(warm_up + i, x)
        (grad,) = swap([(y, after)], [after])
        grad = backward(i, grad)
        last = i == micro_batches - warm_up - 1
        (x,) = swap([(grad, before)], [None if last else before])
    for i in range(micro_batches - warm_up, micro_batches):
        (grad,) = swap([], [after])
        swap([(backward(i, grad), before)], [])


def with_receives_posted_early(micro_batches, forward, backward, shape):
    rank, world = dist.get_rank(), dist.get_world_size()

    def post(peer):
        if not 0 <= peer < world:
            return deque()
        rooms = [torch.empty(*shape) for _ in range(micro_batches)]
        return deque((room, dist.irecv(room, src=peer)) for room in rooms)

    def take(row):
        if not row:
            return None
        room, work = row.popleft()
        work.wait()
        return room

    xs, grads, sent = post(rank - 1), post(rank + 1), []
    for word in by_what_is_held(rank, world, micro_batches):
        i, ahead = int(word[1:]), word[0] == "F"
        made = forward(i, take(xs)) if ahead else backward(i, take(grads))
        peer = rank + 1 if ahead else rank - 1
        if peer in range(world):
            sent.append(dist.isend(made, dst=peer))
    for work in sent:
        work.wait()


RIGHT = {
    "one_f_one_b_order": [by_pairs, by_what_is_held],
    "gpipe_order": [as_in_the_paper],
    "warm_up": [counted],
    "peak_stash": [as_a_set],
    "repair": [turned_round, by_a_list],
    "one_f_one_b_loop": [in_batches, with_receives_posted_early],
    "beat_1f1b": [weights_at_once],
}
