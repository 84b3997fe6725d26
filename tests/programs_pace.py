"""Programs for ranks under a pace: a ring and a tree by hand, on torch's own isend and irecv, and smaller ones."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from labkit import pace, trace

rank, size = dist.get_rank, dist.get_world_size


def timed(fn, *args):
    """Seconds that `fn` takes on this rank."""
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def exchange(send, to, receive, source):
    """One step of a ring."""
    for work in (dist.isend(send, to), dist.irecv(receive, source)):
        work.wait()


def prepared(numel, other=0):
    """A tensor full of ones, and another one. With compute={"prepare": …} all ranks go on together, on a busy host too.

    A rank that looks at its watch before the others have begun, or after, measures the host.
    """
    with pace.section("prepare"):
        return torch.ones(numel), torch.zeros(other)


def ring(numel):
    """Ring all-reduce of the ranks' numbers; returns (seconds, first and last element)."""
    x, buffer = prepared(numel, -(-numel // size()))
    x *= rank()
    chunks = x.tensor_split(size())
    right, left = (rank() + 1) % size(), (rank() - 1) % size()

    def run():
        for s in range(1, size()):
            chunk = chunks[(rank() - 1 - s) % size()]
            exchange(chunks[(rank() - s) % size()], right, buffer[: len(chunk)], left)
            chunk += buffer[: len(chunk)]
        for s in range(1, size()):
            exchange(chunks[(rank() - s + 1) % size()], right, chunks[(rank() - s) % size()], left)

    return timed(run), x[0].item(), x[-1].item()


def tree(numel):
    """Binomial tree for four ranks: reduce to 0, then broadcast; returns (seconds, first and last element)."""
    x, other = prepared(numel, numel)
    x *= rank()
    edges = [(1, 0), (3, 2), (2, 0), (0, 2), (0, 1), (2, 3)]

    def run():
        for number, (source, target) in enumerate(edges):
            if rank() == source:
                dist.send(x, target)
            if rank() == target:
                dist.recv(other, source)
                x.add_(other) if number < 3 else x.copy_(other)

    return timed(run), x[0].item(), x[-1].item()


def sections(count):
    for _ in range(count):
        with pace.section("forward"):
            pass


def timed_sections(count):
    prepared(0)
    return timed(sections, count)


def overlap(numel):
    """A message under way while both ranks compute; returns (seconds of all, whether it was complete before, after)."""
    x, _ = prepared(numel)
    seen = []

    def run():
        work = dist.isend(x, 1) if rank() == 0 else dist.irecv(x, 0)
        with pace.section("forward"):
            seen.append(work.is_completed())
        work.wait()
        seen.append(work.is_completed())

    return timed(run), *seen


def looked_at_late(numel):
    """The message is over long before somebody waits for it."""
    x = torch.ones(numel)
    work = dist.isend(x, 1) if rank() == 0 else dist.irecv(x, 0)
    with pace.section("forward"):
        pass
    work.wait()


def into_one(numel):
    """Ranks 0 and 1 send to 2 at once."""
    x, y = prepared(numel, numel)

    def run():
        if rank() < 2:
            dist.send(x, 2)
        else:
            for work in [dist.irecv(x, 0), dist.irecv(y, 1)]:
                work.wait()

    return timed(run)


def both_ways(numel):
    x, y = prepared(numel, numel)
    return timed(exchange, x, 1 - rank(), y, 1 - rank())


def pairs(numel):
    """Rank 0 sends to 1 and then, a message of the same size, 1 to 2; returns the seconds to either's arrival."""
    (x, _), begun = prepared(numel), time.perf_counter()
    if rank() in (1, 2):
        dist.recv(x, rank() - 1)
    arrived = time.perf_counter() - begun
    if rank() < min(2, size() - 1):
        dist.send(x, rank() + 1)
    return arrived


def from_anybody(numel):
    x, y = prepared(numel, numel)
    if rank() == 1:
        return timed(dist.recv, y), y[0].item()
    return timed(dist.send, x, 1), x[0].item()


def empty():
    x, _ = prepared(0)
    return timed(dist.recv, x, 0) if rank() == 1 else timed(dist.send, x, 1)


def held_up(numel):
    """Rank 1 computes before it receives, rank 0 after it has sent; returns the seconds of either."""
    x, _ = prepared(numel)

    def compute():
        with pace.section("forward"):
            pass

    def run():
        if rank() == 1:
            compute()
            dist.recv(x, 0)
        else:
            dist.send(x, 1)
            compute()

    return timed(run)


def is_paced():
    return dist.group.WORLD.paced


class Aside(threading.Thread):
    """Work in a thread that takes this one's clock over, after the one before it."""

    def __init__(self, work, before=None):
        super().__init__()
        self.work, self.before, self.branch = work, before, trace.branch("work")
        self.start()

    def run(self):
        if self.before is not None:
            self.before.join()
        with self.branch:
            self.work()

    def wait(self):
        self.join()
        self.branch.join()


def branches(numel):
    """Two messages, one after another in threads, beside a section; returns the seconds of all."""
    x, _ = prepared(numel)

    def message():
        dist.send(x, 1) if rank() == 0 else dist.recv(x, 0)

    def run():
        first = Aside(message)
        second = Aside(message, first)
        with pace.section("forward"):
            pass
        second.wait()

    return timed(run)


def barriers():
    """Rank 1 works before a barrier of all; then 0 and 1 have one of their own."""
    with pace.section("prepare"):
        pair = dist.new_group([0, 1])

    def run():
        if rank() == 1:
            with pace.section("forward"):
                pass
        dist.barrier()
        if rank() == 0:
            with pace.section("forward"):
                pass
        if rank() < 2:
            dist.barrier(group=pair)

    return timed(run), dist.group.WORLD.paced


def native(name):
    x, parts = torch.ones(2), [torch.ones(2) for _ in range(size())]
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: dist.all_gather(parts, x),
        "reduce_scatter": lambda: dist.reduce_scatter(x, parts),
    }
    calls[name]()


def sleep_outside(seconds, to_end=0.0):
    """Work that no section knows of, between two messages."""
    x = torch.ones(1)
    exchange(x, 1 - rank(), x.clone(), 1 - rank())
    time.sleep(seconds)
    exchange(x, 1 - rank(), x.clone(), 1 - rank())
    time.sleep(to_end)


def sleep_inside(seconds):
    with pace.section("forward"):
        time.sleep(seconds)


def many_messages(count):
    x, y = torch.ones(1 << 16), torch.ones(1 << 16)
    for _ in range(count):
        exchange(x, 1 - rank(), y, 1 - rank())


def what_is_left():
    from labkit.trace import recorder

    clocks = [c for c in recorder.carriers if type(c).__name__ == "VirtualClock"]
    return os.getpid(), pace.running(), len(clocks), threading.active_count()


def killed_while_asleep(numel):
    x = torch.ones(numel)
    if rank() == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    dist.send(x, 1) if rank() == 0 else dist.recv(x, 0)


def fails_on(who, numel):
    x = torch.ones(numel)
    if rank() == who:
        raise ValueError("boom")
    dist.recv(x, who)


def elapsed_at_the_end():
    with pace.section("work"):
        pass
    return pace.elapsed()
