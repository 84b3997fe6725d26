"""Right solutions of the exercises in styles other than labkit's own: none of them may be called wasteful."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist


def exchanged(outgoing, incoming):
    """Send to the right and receive from the left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(outgoing, (rank + 1) % world)
    dist.recv(incoming, (rank - 1) % world)
    sending.wait()


# Reduce-scatter


def passes_a_sum_on(tensor):
    """A list for the tuple of views; what travels is a tensor of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.tensor_split(world))
    sent = chunks[(rank - 1) % world].clone()
    for step in range(1, world):
        incoming = chunks[(rank - step - 1) % world]
        came = torch.zeros_like(incoming)
        exchanged(sent, came)
        sent = incoming + came
    chunks[rank].copy_(sent)


def cuts_by_hand(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    size, larger = divmod(tensor.numel(), world)
    edges = [n * size + min(n, larger) for n in range(world + 1)]
    for step in range(1, world):
        out, into = (rank - step) % world, (rank - step - 1) % world
        came = torch.empty(edges[into + 1] - edges[into], dtype=tensor.dtype)
        exchanged(tensor[edges[out] : edges[out + 1]], came)
        tensor[edges[into] : edges[into + 1]] += came


def takes_turns_between_two_buffers(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    rooms = [torch.empty_like(chunks[0]) for _ in range(2)]
    for step in range(1, world):
        incoming = chunks[(rank - step - 1) % world]
        came = rooms[step % 2][: incoming.numel()]
        exchanged(chunks[(rank - step) % world], came)
        incoming.copy_(incoming + came)


def starts_all_receives_first(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    order = [(rank - step - 1) % world for step in range(1, world)]
    rooms = [torch.empty_like(chunks[number]) for number in order]
    works = [dist.irecv(room, (rank - 1) % world) for room in rooms]
    for number, room, work in zip(order, rooms, works, strict=True):
        sending = dist.isend(chunks[(number + 1) % world], (rank + 1) % world)
        work.wait()
        sending.wait()
        chunks[number].add_(room)


def even_ranks_send_first(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        outgoing, incoming = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        came = torch.empty_like(incoming)
        if rank % 2 == 0:
            dist.send(outgoing, (rank + 1) % world)
            dist.recv(came, (rank - 1) % world)
        else:
            dist.recv(came, (rank - 1) % world)
            dist.send(outgoing, (rank + 1) % world)
        incoming[:] = incoming + came


def adds_with_numpy(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        incoming = chunks[(rank - step - 1) % world].numpy()
        came = torch.from_numpy(np.empty_like(incoming))
        exchanged(chunks[(rank - step) % world].clone(), came)
        incoming += came.numpy()


# All-gather


def passes_a_copy_on(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    mine = chunks[rank].clone()
    for step in range(1, world):
        into = chunks[(rank - step) % world]
        came = torch.empty_like(into)
        exchanged(mine, came)
        into.copy_(came)
        mine = came


def even_ranks_pass_on_first(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(1, world):
        outgoing, incoming = chunks[(rank - step + 1) % world], chunks[(rank - step) % world]
        if rank % 2 == 0:
            dist.send(outgoing, (rank + 1) % world)
            dist.recv(incoming, (rank - 1) % world)
        else:
            dist.recv(incoming, (rank - 1) % world)
            dist.send(outgoing, (rank + 1) % world)


# All-reduce


def one_half_after_the_other(tensor):
    """The reduce-scatter leaves chunk r + 1 on rank r, and the all-gather begins there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(world - 1):
        came = torch.empty_like(chunks[(rank - step - 1) % world])
        exchanged(chunks[(rank - step) % world].clone(), came)
        chunks[(rank - step - 1) % world].add_(came)
    for step in range(world - 1):
        exchanged(chunks[(rank + 1 - step) % world], chunks[(rank - step) % world])


def takes_turns_in_both_halves(tensor):
    even_ranks_send_first(tensor)
    even_ranks_pass_on_first(tensor)


def starts_the_receives_of_a_half_at_once(tensor):
    starts_all_receives_first(tensor)
    passes_a_copy_on(tensor)


# Broadcast


def halves_the_distance(tensor, root):
    rank, world = dist.get_rank(), dist.get_world_size()
    place, distance = (rank - root) % world, 1 << (world - 1).bit_length() >> 1
    while distance:
        if place % (2 * distance) == 0 and place + distance < world:
            dist.send(tensor, (rank + distance) % world)
        elif place % (2 * distance) == distance:
            dist.recv(tensor, (rank - distance) % world)
        distance //= 2


def halves_the_ranks(tensor, root):
    rank, world = dist.get_rank(), dist.get_world_size()
    place, low, high = (rank - root) % world, 0, world
    while high - low > 1:
        middle = (low + high + 1) // 2
        if place == low:
            dist.send(tensor, (root + middle) % world)
        elif place == middle:
            dist.recv(tensor, (root + low) % world)
        low, high = (low, middle) if place < middle else (middle, high)


def starts_to_send_and_waits_at_the_end(tensor, root):
    rank, world = dist.get_rank(), dist.get_world_size()
    place, works, distance = (rank - root) % world, [], 1
    if place:
        dist.recv(tensor)
        distance = 1 << place.bit_length()
    while place + distance < world:
        works.append(dist.isend(tensor, (rank + distance) % world))
        distance *= 2
    for work in works:
        work.wait()


# Barrier


def up_and_down_a_tree():
    rank, world = dist.get_rank(), dist.get_world_size()
    token, distance = torch.zeros(1), 1
    while distance < world and rank % (2 * distance) == 0:
        if rank + distance < world:
            dist.recv(token, rank + distance)
        distance *= 2
    if rank:
        dist.send(token, rank - distance)
        dist.recv(token, rank - distance)
    while distance > 1:
        distance //= 2
        if rank + distance < world:
            dist.send(token, rank + distance)


# Exchange


def the_lower_rank_sends_first(tensor):
    partner, theirs = dist.get_rank() ^ 1, torch.empty_like(tensor)
    if dist.get_rank() < partner:
        dist.send(tensor, partner)
        dist.recv(theirs, partner)
    else:
        dist.recv(theirs, partner)
        dist.send(tensor, partner)
    return theirs


def receives_into_a_clone(tensor):
    partner, theirs = dist.get_rank() ^ 1, tensor.clone()
    receiving = dist.irecv(theirs, partner)
    dist.send(tensor, partner)
    receiving.wait()
    return theirs


RIGHT = {
    "ring_reduce_scatter": (
        passes_a_sum_on, cuts_by_hand, takes_turns_between_two_buffers, starts_all_receives_first,
        even_ranks_send_first, adds_with_numpy,
    ),
    "ring_all_gather": (passes_a_copy_on, even_ranks_pass_on_first),
    "ring_all_reduce": (
        one_half_after_the_other, takes_turns_in_both_halves, starts_the_receives_of_a_half_at_once,
    ),
    "tree_broadcast": (halves_the_distance, halves_the_ranks, starts_to_send_and_waits_at_the_end),
    "barrier": (up_and_down_a_tree,),
    "exchange": (the_lower_rank_sends_first, receives_into_a_clone),
}  # fmt: skip
