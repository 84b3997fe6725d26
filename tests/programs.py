"""Small programs that run on ranks: right ones, and ones that fail in every way that people fail."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

rank, size = dist.get_rank, dist.get_world_size


def nothing():
    pass


def total():
    t = torch.tensor([rank() + 1.0])
    dist.all_reduce(t)
    return t.item()


def pid():
    return os.getpid()


def pass_round():
    """Each rank sends its number to the right and returns what came from the left."""
    mine, other = torch.tensor([rank()]), torch.zeros(1, dtype=torch.int64)
    send = dist.isend(mine, (rank() + 1) % size())
    dist.recv(other, (rank() - 1) % size())
    send.wait()
    return other.item()


# Failures


def raise_on(who):
    if rank() == who:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(3))


def raise_from_library():
    torch.ones(2) @ torch.ones(3)


def raise_everywhere():
    return 1 / 0


def killed(who, sig=signal.SIGKILL):
    if rank() == who:
        time.sleep(0.05)
        os.kill(os.getpid(), sig)
    dist.all_reduce(torch.ones(3))


def exit_process(who):
    if rank() == who:
        os._exit(7)
    dist.all_reduce(torch.ones(3))


def call_exit():
    sys.exit(3)


def different_sizes(who):
    t = torch.ones(11 if rank() == who else 10)
    dist.all_reduce(t)
    return t[0].item()


def different_types():
    t = torch.ones(4, dtype=torch.float32 if rank() else torch.int32)
    dist.all_reduce(t)
    return t[0].item()


def different_roots():
    dist.broadcast(torch.ones(4), rank())


def different_order():
    first, second = (dist.all_reduce, dist.barrier) if rank() else (dist.barrier, dist.all_reduce)
    for operation in (first, second):
        operation(*([torch.ones(3)] if operation is dist.all_reduce else []))


def skip_one(who):
    dist.all_reduce(torch.ones(3))
    if rank() != who:
        dist.all_reduce(torch.ones(3))


def skip_a_broadcast():
    """The root of a small broadcast does not wait, so nobody hangs and nobody would notice."""
    if rank() == 0:
        dist.broadcast(torch.ones(3), 0)


def skip_new_group():
    if rank() == 0:
        dist.new_group([0, 1])


def wrong_in_a_group():
    """Ranks 0 and 2 share a group and disagree in it; the others are not concerned."""
    group = dist.new_group([0, 2])
    if rank() in (0, 2):
        dist.all_reduce(torch.ones(1 + rank()), group=group)


def both_receive():
    t = torch.ones(4)
    dist.recv(t, src=1 - rank())
    dist.send(t, dst=1 - rank())


def both_send(elements):
    t = torch.ones(elements)
    dist.send(t, dst=1 - rank())
    dist.recv(t, src=1 - rank())
    return t[0].item()


def all_receive():
    dist.recv(torch.ones(1), src=(rank() + 1) % size())


def loop_for_ever(who):
    while rank() == who:
        pass


def hang_in_collective():
    """All ranks inside gloo, none of them reachable: rank 0 waits for a message, the others for rank 0."""
    if rank() == 0:
        dist.recv(torch.ones(1), src=1)
    else:
        dist.all_reduce(torch.ones(1))


def receive_as_float():
    t = torch.ones(4, dtype=torch.int32 if rank() == 0 else torch.float32)
    dist.send(t, 1) if rank() == 0 else dist.recv(t, 0)


# What is left over


def lonely_isend():
    if rank() == 0:
        dist.isend(torch.ones(4), 1)


def lonely_irecv():
    if rank() == 0:
        dist.irecv(torch.ones(4), 1)


def lonely_irecv_from_anybody():
    if rank() == 0:
        dist.irecv(torch.ones(4))


def forgotten_all_reduce():
    dist.all_reduce(torch.ones(4), async_op=True)


def lonely_async_all_reduce():
    if rank() == 0:
        dist.all_reduce(torch.ones(4), async_op=True)


# Buffers


def overwrite_after_isend(wait_first):
    t = torch.full((1000,), 7.0)
    if rank() == 0:
        send = dist.isend(t, 1)
        if wait_first:
            send.wait()
        t.zero_()
        send.wait()
        return None
    got = torch.zeros(1000)
    dist.recv(got, 0)
    return got.unique().tolist()


def change_another_chunk_while_sending():
    """What a ring does: one chunk of a tensor travels while another is added to. Nothing is wrong with it."""
    whole = torch.arange(8.0)
    chunks, other = whole.split(4), torch.zeros(4)
    send = dist.isend(chunks[rank()], 1 - rank())
    dist.recv(other, 1 - rank())
    chunks[1 - rank()].add_(other)
    send.wait()
    return whole.tolist()


# State that a careless program leaves behind


def leave_a_mess():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.set_num_threads(7)
    os.environ["LABKIT_TEST_MESS"] = "1"
    os.chdir("/")
    for _ in range(3):
        dist.new_group([0, 1])
    return dist.distributed_c10d._world.group_count


def state():
    return {
        "dtype": torch.get_default_dtype(), "grad": torch.is_grad_enabled(), "device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(), "mess": os.environ.get("LABKIT_TEST_MESS"), "folder": os.getcwd(),
        "groups": len(dist.distributed_c10d._world.pg_map), "random": torch.rand(2).tolist(),
    }  # fmt: skip


def destroy_the_world():
    dist.destroy_process_group()


# Torch's own


def torch_ddp():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.full((2, 4), float(rank()))).sum().backward()
    return model.module.weight.grad[0, 0].item()


def torch_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x = torch.ones(2, 4)
    expected = whole(x).detach()
    mesh = init_device_mesh("cpu", (size(),), mesh_dim_names=("tp",))
    split = parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return torch.allclose(split(x), expected, atol=1e-6)


def torch_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    t = torch.tensor([rank()])
    dist.all_reduce(t, group=mesh.get_group("tp"))
    return t.item()


def torch_fsdp2():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x = torch.ones(2, 4)
    expected = model(x).detach()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    y = model(x)
    y.sum().backward()
    return torch.allclose(y, expected, atol=1e-6)


def torch_pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(rank())
    stage = PipelineStage(torch.nn.Linear(4, 4), rank(), size(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, t: (y - t).pow(2).mean())
    losses = []
    first, last = rank() == 0, rank() == size() - 1
    x = torch.ones(8, 4)
    schedule.step(*([x] if first else []), **({"target": x, "losses": losses} if last else {}))
    return len(losses)


def both_receive_in_pairs():
    """All receive first, in a circle."""
    dist.recv(torch.ones(1), src=(rank() + 1) % size())


def state_of_world():
    return [rank(), size(), len(dist.distributed_c10d._world.pg_map)]


def hello():
    print("hello from", rank())


def monitored_barrier():
    dist.monitored_barrier()


def send_beyond():
    dist.send(torch.ones(2), rank() + 1)


def recv_below():
    dist.recv(torch.ones(2), rank() - 1)
