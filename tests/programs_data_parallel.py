"""What the tests of data parallelism run on ranks. A reference is one process with the whole batch, in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit import data_parallel, device, pace
from labkit.data_parallel import DistributedDataParallel
from labkit.model import Transformer, loss, preset

SIZE = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 32, "positions": 16}


def model(name: str, **changes: Any) -> nn.Module:
    torch.manual_seed(7)
    return Transformer(preset(name, **{**SIZE, **changes}), dtype=torch.float64, device=device.current())


def tokens(batch: int, seed: int = 3) -> torch.Tensor:
    drawn = torch.randint(SIZE["vocab"], (batch, 13), generator=torch.Generator().manual_seed(seed))
    return drawn.to(device.current())


def mean_loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    total, count = loss(net(batch[:, :-1]), batch[:, 1:])
    return total / count


def distance(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of two modules' gradients, relative to the largest gradient of its parameter."""
    worst = 0.0
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            worst = max(worst, ((p.grad - q.grad).abs().max() / q.grad.abs().max().clamp(min=1e-30)).item())
    return worst


def against_one_process(name: str, changes: dict, cap: float, options: dict, micro_steps: int = 1) -> float:
    """Three steps of SGD; how far the ranks' gradients were from those of the whole batch in one process."""
    n, me = dist.get_world_size(), dist.get_rank()
    net = model(name, **changes)
    reference = copy.deepcopy(net)
    if me:  # what rank 0 has is what counts
        nn.init.ones_(next(net.parameters()))
    wrapped = DistributedDataParallel(net, bucket_cap_mb=cap, **options)
    worst = 0.0
    for step in range(3):
        batch = tokens(2 * n * micro_steps, seed=step)
        for net_ in (net, reference):
            net_.zero_grad(set_to_none=step != 1)
        pieces = batch.tensor_split(n)[me].tensor_split(micro_steps)
        for piece in pieces[:-1]:
            with wrapped.no_sync():
                (mean_loss(wrapped, piece) / micro_steps).backward()
        (mean_loss(wrapped, pieces[-1]) / micro_steps).backward()
        mean_loss(reference, batch).backward()
        worst = max(worst, distance(net, reference))
        with torch.no_grad():
            for p in [*net.parameters(), *reference.parameters()]:
                p -= 0.1 * p.grad
    for p in net.parameters():
        assert any(p.grad.untyped_storage().data_ptr() == b.flat.untyped_storage().data_ptr()
                   for b in wrapped.reducer.buckets)  # fmt: skip
    return worst


def syncs(where: str) -> tuple[int, list]:
    """Three micro-steps, the first two with no_sync around forward, backward or both: the gradients."""
    net = model("tiny_gpt")
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1000)
    for step in range(3):
        batch = tokens(2, seed=10 * step + dist.get_rank())
        quiet = wrapped.no_sync() if step < 2 else None
        if quiet is not None and where != "backward":
            quiet.__enter__()
        out = mean_loss(wrapped, batch) / 3
        if quiet is not None and where == "forward":
            quiet.__exit__(None, None, None)
        if quiet is not None and where == "backward":
            quiet.__enter__()
        out.backward()
        if quiet is not None and where != "forward":
            quiet.__exit__(None, None, None)
    return [p.grad.clone() for p in net.parameters()]


class Branches(nn.Module):
    """Uses one of two layers, both, or neither; and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.never, self.out = (nn.Linear(4, 4).double() for _ in range(4))

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        for name in use:
            x = getattr(self, name)(x)
        return self.out(x)


def branches(uses: list[str], find_unused: bool, steps: int = 1) -> dict:
    """Gradients by name, beside the mean of what each rank has alone with zeros where it has none."""
    n, me = dist.get_world_size(), dist.get_rank()
    net = Branches()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1e-4, find_unused_parameters=find_unused)
    for _ in range(steps):
        net.zero_grad()
        wrapped(torch.full((2, 4), me + 1.0, dtype=torch.float64), uses[me]).sum().backward()
    mine = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    expected: dict[str, Any] = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    used = set()
    for rank in range(n):
        alone = Branches()
        alone(torch.full((2, 4), rank + 1.0, dtype=torch.float64), uses[rank]).sum().backward()
        for name, p in alone.named_parameters():
            if p.grad is not None:
                used.add(name)
                expected[name] += p.grad / n
    return {name: (mine[name], expected[name] if name in used else None) for name in mine}


def differing_modules(kind: str) -> None:
    torch.manual_seed(0)
    me = dist.get_rank()
    width = 5 if kind == "shape" and me == 1 else 4
    net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    if kind == "dtype" and me == 1:
        net[1].to(torch.bfloat16)
    if kind == "more" and me == 1:
        net.append(nn.Linear(2, 2))
    if kind == "frozen" and me == 1:
        net[0].bias.requires_grad_(False)
    DistributedDataParallel(net)


def changed_after_wrapping(kind: str) -> str:
    """What a forward says once the module was changed."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapped = DistributedDataParallel(net)
    wrapped(torch.ones(1, 4)).sum().backward()
    if kind == "parameter":
        net[0].weight = nn.Parameter(torch.zeros(4, 4))
    elif kind == "module":
        net[1] = nn.Linear(4, 2)
    elif kind == "dtype":
        net.to(torch.float64)
    elif kind == "frozen":
        net[0].bias.requires_grad_(False)
    try:
        wrapped(torch.ones(1, 4, dtype=net[0].weight.dtype))
    except RuntimeError as error:
        return str(error)
    return ""


def batches_of(counts: list[int], how: str) -> tuple[int, list]:
    """Ranks with different numbers of batches: how many each trained on, and its weights in the end."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1e-5)
    mine, trained = range(counts[dist.get_rank()]), 0

    def train(number: int) -> None:
        net.zero_grad()
        wrapped(torch.full((1, 3), number + 1.0, dtype=torch.float64)).sum().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.01 * p.grad

    if how == "join":
        with wrapped.join():
            for number in mine:
                train(number)
                trained += 1
    else:
        for number in data_parallel.stop_together(mine):
            train(number)
            trained += 1
    return trained, [p.detach().clone() for p in net.parameters()]


def token_means(lengths: list[int], losses: list[float]) -> tuple[float, float, float]:
    """The gradient by DDP's own mean, by the mean over tokens, and that mean; of a parameter that scales the loss."""
    me = dist.get_rank()
    found = []
    for weighted in (False, True):
        scale = nn.Linear(1, 1, bias=False).double()
        nn.init.ones_(scale.weight)
        wrapped = DistributedDataParallel(scale)
        total = wrapped(torch.full((lengths[me], 1), losses[me], dtype=torch.float64)).sum()
        value, mean = data_parallel.token_mean(total, lengths[me]) if weighted else (total / max(1, lengths[me]), 0.0)
        value.backward()
        found.append(scale.weight.grad.item())
    return found[0], found[1], mean


def half_average(value: float, dtype: torch.dtype, cap: float = 25) -> float:
    """The gradient of a 16-bit parameter, `value` on each rank."""
    net = nn.Linear(1, 1, bias=False).to(dtype)
    wrapped = DistributedDataParallel(net, bucket_cap_mb=cap)
    wrapped(torch.full((1, 1), value, dtype=dtype)).sum().backward()
    return net.weight.grad.item()


def compressed() -> tuple[float, int]:
    """How far gradients averaged in bf16 are from those in fp32, relative."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    wrapped = DistributedDataParallel(net)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped(x).square().sum().backward()
    exact = net.weight.grad.clone()
    net.zero_grad()
    wrapped.register_comm_hook(data_parallel.compressed_bf16)
    wrapped(x).square().sum().backward()
    return ((net.weight.grad - exact).norm() / exact.norm()).item()


def one_step(cap: float, algorithm: str, name: str = "tiny_gpt", naive: bool = False, overlap: bool = True) -> list:
    """Two backwards, so that the buckets are final; the second one's events are those under ``training_step=2``."""
    from labkit import collectives
    from labkit.trace import label

    net = model(name).float()
    wrapped = net if naive else DistributedDataParallel(net, bucket_cap_mb=cap, overlap=overlap)
    for step in range(3):
        net.zero_grad()
        out = mean_loss(wrapped, tokens(2))
        with collectives.using(algorithm), label(training_step=step):
            out.backward()
            if naive:
                data_parallel.average_gradients(net)
    return [] if naive else [b.flat.nbytes for b in wrapped.reducer.buckets]


def paced_backward(buckets: int, stretch: float, overlap: bool = True) -> tuple[int, float, float]:
    """150 equal layers: (buckets, seconds of a backward, seconds of it after its last section)."""
    layers, width = 150, 16
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for number, layer in enumerate(net):
        pace.backward_sections(layer, "layer", layer=number)
    cap = layers / buckets * width * width * 4 / 2**20
    with pace.section("set-up"):
        wrapped = DistributedDataParallel(net, bucket_cap_mb=cap * 0.999, overlap=overlap)
    for _ in range(2):
        net.zero_grad()
        with pace.section("forward"):
            out = wrapped(torch.ones(1, width)).sum()
        start = pace.elapsed()
        out.backward()
        end = pace.elapsed()
    return len(wrapped.reducer.buckets), start / stretch, end / stretch


def order_of_arrival() -> tuple[list, list]:
    """A module whose layers are registered against the order of their use: buckets before and after the first step."""
    net = nn.ModuleDict({"last": nn.Linear(2, 2), "first": nn.Linear(2, 2)})
    net.forward = lambda x: net["last"](net["first"](x))
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1e-6)
    before = [b.members for b in wrapped.reducer.buckets]
    wrapped(torch.ones(1, 2)).sum().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    out = wrapped(torch.ones(1, 2)).sum()
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, net.parameters(), strict=True))  # refilling loses nothing
    out.backward()
    return before, [b.members for b in wrapped.reducer.buckets]


def buffers() -> list[float]:
    """A batch norm's running mean on each rank, after two forwards on different data."""
    net = nn.Sequential(nn.BatchNorm1d(2))
    wrapped = DistributedDataParallel(net)
    for step in range(2):
        wrapped(torch.full((4, 2), float(step + 10 * dist.get_rank())) + torch.randn(4, 2)).sum().backward()
    with torch.no_grad():  # no averaging, but it is a forward: the buffers drift apart until the next training step
        wrapped(torch.full((4, 2), float(dist.get_rank())))
    wrapped.eval()
    wrapped(torch.zeros(4, 2)).sum()
    return net[0].running_mean.tolist()


def refused(kind: str) -> str:
    """What a wrong use says."""
    net = nn.Sequential(nn.Embedding(4, 2, sparse=kind == "sparse"), nn.Linear(2, 1))
    x = torch.zeros(1, dtype=torch.int64)
    try:
        wrapped = DistributedDataParallel(net)
        if kind == "twice":
            DistributedDataParallel(nn.Sequential(net))
        if kind == "sparse":
            wrapped(x).sum().backward()
        if kind == "graph":
            wrapped(x).square().sum().backward(create_graph=True)
        if kind == "hook":
            wrapped.register_comm_hook("bf16")
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def seeds() -> tuple[list, list]:
    """Weights made before, dropout drawn after."""
    torch.manual_seed(0)
    weights = torch.randn(3).tolist()
    data_parallel.seed_apart(5)
    return weights, torch.rand(3).tolist()


def checkpointed() -> float:
    """A module used twice in a forward, and once inside a checkpoint: against the same without DDP."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(2)
    net = nn.Linear(3, 3).double()
    reference = copy.deepcopy(net)
    wrapped = DistributedDataParallel(net)
    for _ in range(2):
        for m in (net, reference):
            m.zero_grad()
        for m, inner in ((wrapped, net), (reference, reference)):
            x = torch.ones(2, 3, dtype=torch.float64)
            out = m(x).tanh()
            out = checkpoint(lambda y, m=m: m(y).tanh(), out, use_reentrant=False)
            (out.square().sum() + inner.weight.sum() * 0).backward()
    return distance(net, reference)


def fused_channels_last() -> float:
    """A fused optimizer goes through parameter and gradient as they lie in memory: against the unwrapped module."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    alone = copy.deepcopy(net)
    wrapped = DistributedDataParallel(net)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for called, own in ((wrapped, net), (alone, alone)):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            called(x).square().mean().backward()
            optimizer.step()
    return (net.weight - alone.weight).abs().max().item()


def after_an_error() -> float:
    """A backward is cut short on every rank when buckets have left; the next step, where a rank is late."""
    import time

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).double()
    reference = copy.deepcopy(net)
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1e-6)
    failing = [True]

    def fail(grad: torch.Tensor) -> None:
        if failing[0]:
            raise RuntimeError("on purpose")

    net[0].weight.register_hook(fail)
    net[2].bias.register_hook(lambda grad: time.sleep(0.2) if dist.get_rank() else None)
    x = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    try:
        wrapped(x).square().sum().backward()
    except RuntimeError:
        failing[0] = False
    net.zero_grad()
    wrapped(x).square().sum().backward()
    for rank in range(dist.get_world_size()):
        other = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        (reference(other).square().sum() / dist.get_world_size()).backward()
    return distance(net, reference)


def forwards_in_between() -> tuple[bool, bool]:
    """Whether ranks have the same gradient: a no_sync forward after the forward whose backward runs; and before it."""
    found = []
    for quiet_first in (False, True):
        net = nn.Linear(3, 1).double()
        wrapped = DistributedDataParallel(net)
        x = torch.full((1, 3), 1.0 + dist.get_rank(), dtype=torch.float64)
        if quiet_first:
            with wrapped.no_sync():
                out = wrapped(x)
            wrapped(x)
        else:
            out = wrapped(x)
            with wrapped.no_sync():
                wrapped(x)
        out.square().sum().backward()
        grads = [torch.empty_like(net.weight) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, net.weight.grad)
        found.append(torch.equal(grads[0], grads[1]))
    return found[0], found[1]


def clipped_by_assignment() -> bool:
    """Gradients replaced between a no_sync step and one that does not use the layer."""
    net = Branches()
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    x = torch.full((2, 4), dist.get_rank() + 1.0, dtype=torch.float64)
    with wrapped.no_sync():
        wrapped(x, "a").sum().backward()
    for p in net.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5
    wrapped(x, "b").sum().backward()
    grads = [torch.empty_like(net.a.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(grads, net.a.weight.grad)
    return torch.equal(grads[0], grads[1])


def ordinary_code() -> list[str]:
    """What works with a bare module works with a wrapped one: what did not."""
    import io
    from dataclasses import dataclass

    @dataclass
    class Out:
        value: torch.Tensor

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.scale = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> Out:
            return Out(self.norm(self.linear(x)) * self.scale)

    wrong = []

    def attempt(name: str, work: Any) -> None:
        try:
            work()
        except Exception as error:
            wrong.append(f"{name}: {error}")

    net = Net()
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    x = torch.randn(4, 3, requires_grad=True)
    attempt("a dataclass", lambda: wrapped(x).value.sum().backward())
    attempt("save", lambda: torch.save(DistributedDataParallel(nn.Linear(2, 2)).module, io.BytesIO()))
    attempt("a copy", lambda: DistributedDataParallel(copy.deepcopy(net)))
    attempt("inputs", lambda: torch.autograd.grad(wrapped(x).value.square().sum(), x))
    attempt("two forwards", lambda: (wrapped(x).value.sum() + wrapped(x).value.sum()).backward())
    return wrong
