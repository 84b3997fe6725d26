"""What the tests of stage 3 run on ranks. A reference is one process with the whole model and batch, in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from programs_data_parallel import mean_loss, model, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit import collectives, device, tensor_parallel, tricks
from labkit.data_parallel import DistributedDataParallel
from labkit.memory import MemoryMeter
from labkit.model import Transformer, preset
from labkit.trace import label
from labkit.train import Mesh
from labkit.zero import FullyShardedDataParallel

Values = dict[str, torch.Tensor]


def pieces(sharded: nn.Module, grads: bool = False) -> dict[str, torch.Tensor | None]:
    """This rank's part of each parameter, or of its gradient, by the name it has in the whole module."""
    found = {}
    for name, param in sharded.named_parameters():
        value = param.grad if grads else param
        found[name.replace("module.", "")] = None if value is None else value.detach().clone()
    return found


def whole(net: nn.Module, grads: bool = False) -> dict[str, torch.Tensor | None]:
    return {name: None if (value := p.grad if grads else p) is None else value.detach().clone()
            for name, p in net.named_parameters()}  # fmt: skip


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups: what is a matrix in the whole model decays."""
    named = list(net.named_parameters())
    decays = [p for name, p in named if name.endswith("weight") and "norm" not in name]
    rest = [p for name, p in named if all(p is not d for d in decays)]
    return torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": rest}], 1e-2, eps=1e-6)


def ten_steps(name: str, changes: dict, options: dict, micro_steps: int = 1, clip: float | None = None) -> Any:
    """(losses, pieces) of this rank, and (losses, parameters) of one process."""
    n, me = dist.get_world_size(), dist.get_rank()
    net = model(name, **changes)
    reference = copy.deepcopy(net)
    if me:  # what rank 0 has is what counts
        nn.init.ones_(next(net.parameters()))
    sharded = FullyShardedDataParallel(net, **options)
    ours, theirs = adam(sharded), adam(reference)
    losses: list[tuple[float, float]] = []
    for step in range(10):
        batch = tokens(2 * n * micro_steps, seed=step)
        mine, expected = 0.0, mean_loss(reference, batch)
        for piece in batch.tensor_split(n)[me].tensor_split(micro_steps):
            part = mean_loss(sharded, piece) / micro_steps
            part.backward()
            mine += part.item()
        expected.backward()
        if clip is not None:
            tricks.clip_grad_norm_(sharded.parameters(), clip)
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        losses.append((mine, expected.item()))
    return losses, pieces(sharded), whole(reference)


def distance(values: list[Any]) -> float:
    """Losses, their mean over ranks, and parameters, put together from the ranks' pieces: relative to one process."""
    worst = 0.0
    for step in range(len(values[0][0])):
        ours, theirs = sum(losses[step][0] for losses, _, _ in values) / len(values), values[0][0][step][1]
        worst = max(worst, abs(ours - theirs) / abs(theirs))
    for name, want in values[0][2].items():
        together = torch.cat([pieces[name] for _, pieces, _ in values])
        assert together.numel() == want.numel(), name
        worst = max(worst, ((together - want.view(-1)).abs().max() / want.abs().max()).item())
    return worst


# Modules of all sorts


class Odd(nn.Module):
    """Layers of odd sizes in a list; some frozen, of another type, tied, called twice, checkpointed, or not used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind = kind
        self.first = nn.Linear(3, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3))
        self.last = nn.Linear(5, 3)
        self.double()
        if kind == "mixed":
            self.layers[1] = nn.Sequential(*self.layers[1][:2], As(torch.float32), self.layers[1][2].float(),
                                           As(torch.float64))  # fmt: skip
        if kind == "frozen":
            for part in (self.layers[0][0], self.layers[1], self.layers[2][2]):
                part.requires_grad_(False)
        if kind == "frozen-first":
            self.first.requires_grad_(False)
            self.layers[0].requires_grad_(False)
        if kind == "tied":  # across blocks, and with the root
            self.layers[2][0].weight = self.layers[0][0].weight
            self.again = nn.Linear(5, 7).double()
            self.again.weight = self.layers[1][0].weight
        if kind == "unused":
            self.layers[1] = Skips(self.layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + self.through(layer, x)
        if self.kind == "twice":
            x = self.layers[0](x) + self.layers[2](x)
        if self.kind == "tied":
            x = x + self.again(x)[..., :5]
        return self.last(x)

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "checkpoint":
            return checkpoint(layer, x, use_reentrant=False)
        if self.kind == "reentrant":
            return checkpoint(layer, x, use_reentrant=True)
        if self.kind == "tricks":
            return tricks.checkpoint(layer, x)
        return layer(x)


class As(nn.Module):
    """A change of type between layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


class Skips(nn.Module):
    """Has a layer that its forward does not use."""

    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used, self.never = used, nn.Linear(2, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Inner(nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: self.b(self.a(t).tanh()), x, use_reentrant=False)


def odd(kind: str) -> Odd:
    net = Odd(kind).to(device.current())
    if kind == "inner-checkpoint":
        net.layers = nn.ModuleList(Inner().double().to(device.current()) for _ in range(3))
    return net


def drawn(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(device.current())


def wrapped(net: Odd, options: dict) -> FullyShardedDataParallel:
    if net.kind == "nested":
        net.layers[1] = FullyShardedDataParallel(net.layers[1], keep_after_forward=True)
    if net.kind == "units":
        return FullyShardedDataParallel(net, blocks=[net.first, *net.layers, net.layers[1][0], net.last], **options)
    return FullyShardedDataParallel(net, **options)


def of_all_sorts(kind: str, options: dict) -> Any:
    """Three steps of two backwards each: (losses, pieces) of this rank, (losses, parameters) of one process."""
    n, me = dist.get_world_size(), dist.get_rank()
    net = odd(kind)
    reference = copy.deepcopy(net)
    sharded = wrapped(net, options)
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (sharded, reference)]
    ours, theirs = (torch.optim.SGD(params, 0.05, momentum=0.9) for params in trained)
    losses: list[tuple[float, float]] = []
    for step in range(3):
        batches = [drawn(2 * step + k, 2 * n) for k in range(2)]
        parts = [batch.tensor_split(n)[me] for batch in batches]
        if kind == "two-forwards":
            outs = [sharded(part) for part in parts]
            mine = sum(out.square().mean() for out in outs)
            mine.backward()
        else:
            mine = torch.zeros((), dtype=torch.float64, device=device.current())
            for part in parts:
                loss = sharded(part).square().mean()
                loss.backward()
                mine = mine + loss.detach()
        expected = sum(reference(batch).square().mean() for batch in batches)
        expected.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        losses.append((mine.item(), expected.item()))
    assert not any(t.numel() for t in (*sharded.gathered(), *sharded.full_gradients()))
    return losses, pieces(sharded), whole(reference)


# Bytes


def bytes_held(name: str, changes: dict, options: dict) -> dict[str, Any]:
    """The second step under a meter: bytes of each category at its highest, and between phases; elements of units."""
    sharded = FullyShardedDataParallel(model(name, **changes), **options)
    optimizer = torch.optim.AdamW(sharded.parameters())
    meter = MemoryMeter(sharded, optimizer=optimizer, mode="full")
    meter.track("buffers", sharded.gathered)
    meter.track("gradients", sharded.full_gradients)
    found: dict[str, Any] = {}
    for _ in range(2):
        with meter:
            with meter.phase("forward"):
                loss = mean_loss(sharded, tokens(2))
            found["between"] = meter.held()
            with meter.phase("backward"):
                loss.backward()
            found["highest"] = meter.highest
            with meter.phase("step"):
                optimizer.step()
        optimizer.zero_grad()
        found["after"] = meter.held()
    found["units"] = [sum(full.numel() for flat in unit.flats for full in flat.fulls) for unit in sharded.units]
    return found | {"pieces": [p.numel() for p in sharded.parameters()]}


class Chain(nn.Module):
    """Square matrices of h² elements one after another: each is a block, and the root has nothing."""

    def __init__(self, layers: int, h: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(h, h, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain_under_a_meter(layers: int, h: int, options: dict) -> tuple[dict, dict]:
    """Bytes at the peak of a backward, and afterwards."""
    sharded = FullyShardedDataParallel(Chain(layers, h).to(device.current()), **options)
    meter = MemoryMeter(sharded, mode="full")
    meter.track("buffers", sharded.gathered)
    meter.track("gradients", sharded.full_gradients)
    loss = sharded(torch.ones(1, h, device=device.current())).sum()
    with meter, meter.phase("backward"):
        loss.backward()
    return meter.by_phase["backward"], meter.held()


def bytes_sent(name: str, changes: dict, options: dict, micro_steps: int) -> list[int]:
    """Elements of each unit, the root's first; the events of the second step have ``counted=1``."""
    sharded = FullyShardedDataParallel(model(name, **changes), **options)
    optimizer = torch.optim.AdamW(sharded.parameters())
    for step in range(2):
        with label(counted=step):
            for k in range(micro_steps):
                mean_loss(sharded, tokens(2, seed=k)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [sum(full.numel() for flat in unit.flats for full in flat.fulls) for unit in sharded.units]


# Other


def beside_torch() -> float:
    """Three steps of Adam under torch's FSDP2 and under ours: the largest difference of the losses."""
    from torch.distributed.fsdp import fully_shard

    net = model("tiny_llama", layers=3)
    theirs = copy.deepcopy(net)
    for part in (*theirs.blocks, theirs):
        fully_shard(part)
    ours, worst = FullyShardedDataParallel(net), 0.0
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (ours, theirs)]
    for step in range(3):
        batch = tokens(2, seed=10 * step + dist.get_rank())
        losses = [mean_loss(m, batch) for m in (ours, theirs)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, abs(losses[0] / losses[1] - 1).item())
    return worst


def beside_tensor_parallelism(name: str) -> Any:
    """tp 2, dp 2, three steps, clipped: the largest difference to this rank's part of the model of one process."""
    mesh = Mesh(tp=2, dp=2)
    reference = model(name)
    net = tensor_parallel.parallelize(copy.deepcopy(reference), mesh.group("tp"))
    sharded = FullyShardedDataParallel(net, group=mesh.group("dp"))
    ours, theirs = (torch.optim.Adam(m.parameters(), 1e-2, eps=1e-6) for m in (sharded, reference))
    for step in range(3):
        batch = tokens(4, seed=step)
        mine = batch.tensor_split(2)[mesh.place(dist.get_rank())["dp"]]
        total, count = tensor_parallel.loss(sharded(mine[:, :-1]), mine[:, 1:], reference.config.vocab,
                                            group=mesh.group("tp"))  # fmt: skip
        (total / count).backward()
        mean_loss(reference, batch).backward()
        clips = (tricks.clip_grad_norm_, sharded), (nn.utils.clip_grad_norm_, reference)
        norms = [clip(m.parameters(), 0.1) for clip, m in clips]
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert abs(norms[0] - norms[1]) <= 1e-12 * norms[1]
    worst, expected = 0.0, tensor_parallel.parallelize(reference, mesh.group("tp"))
    for piece, want in zip(sharded.parameters(), expected.parameters(), strict=True):
        assert mesh.group("dp") in collectives.placement(piece).sharded
        other = [torch.empty(0, dtype=torch.float64)] * 2
        dist.all_gather_object(other, piece.detach(), group=mesh.group("dp"))
        worst = max(worst, ((torch.cat(other) - want.detach().view(-1)).abs().max() / want.abs().max()).item())
    return worst


def from_meta(name: str, changes: dict, init: Any) -> Any:
    """The most bytes held meanwhile, elements of the model and its largest unit, pieces; and what one process draws."""
    with torch.device("meta"):
        net = Transformer(preset(name, **changes), dtype=torch.float64)
    elements = [p.numel() for p in net.parameters()]
    torch.manual_seed(3 + 100 * dist.get_rank())  # the values are rank 0's
    meter = MemoryMeter(mode="full")
    with meter:
        sharded = FullyShardedDataParallel(net, init=init)
    whole_net = Transformer(preset(name, **changes), dtype=torch.float64, device=device.current())
    torch.manual_seed(3)
    (init or (lambda m: m.reset_parameters()))(whole_net)
    units = [sum(full.numel() for flat in unit.flats for full in flat.fulls) for unit in sharded.units]
    return meter.peak["other"], sum(elements), max(units), pieces(sharded), whole(whole_net)


class Table(nn.Module):
    """A parameter in two steps, one of them later, and a buffer."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, device=device, dtype=torch.float64) for _ in range(3))
        self.register_buffer("scale", torch.empty(3, device=device, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


def in_two_passes(net: Table) -> None:
    for layer in net.layers:
        nn.init.kaiming_normal_(layer.weight)
        nn.init.uniform_(layer.bias)
    for layer in net.layers:
        layer.weight.mul_(0.5)
        layer.weight[1].copy_(layer.bias)
    net.scale.fill_(2.0)


def table_from_meta() -> Any:
    torch.manual_seed(0)
    net = FullyShardedDataParallel(Table(device="meta"), init=in_two_passes)
    reference = Table()
    torch.manual_seed(0)
    with torch.no_grad():
        in_two_passes(reference)
    x = torch.ones(2, 3, dtype=torch.float64)
    return (net(x) - reference(x)).abs().max().item()


def on_nothing(net: Table) -> None:
    nn.init.orthogonal_(net.layers[0].weight)
    net.layers[0].weight.mul_(0.5)


def left_out_on_meta(init: Any) -> None:
    FullyShardedDataParallel(Table(device="meta"), init=init)


def half_precision() -> tuple[list[float], list[str]]:
    """Steps in bf16 with fp32 shards, beside a loop by hand on one rank; types of what is sent."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device.current())
    masters = copy.deepcopy(net)
    sharded = FullyShardedDataParallel(net, blocks=[net[0]], param_dtype=torch.bfloat16)
    ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (sharded, masters))
    off = []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device.current())
        low = copy.deepcopy(masters).bfloat16()
        loss = low(x.bfloat16()).float().square().mean()
        loss.backward()
        for master, p in zip(masters.parameters(), low.parameters(), strict=True):
            master.grad = p.grad.float()
        mine = sharded(x).float().square().mean()
        mine.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        off.append(abs(mine.item() - loss.item()))
    assert all(p.dtype is torch.float32 for p in sharded.parameters())
    return off


class Fails(Odd):
    """Raises in the middle of a forward or a backward, once."""

    broken: str | None = None

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if layer is self.layers[1] and self.broken == "forward":
            raise ArithmeticError("in the middle of a forward")
        x = layer(x)
        if layer is self.layers[1] and self.broken == "backward":
            x.register_hook(self._fail)
        return x

    def _fail(self, _: torch.Tensor) -> None:
        raise ArithmeticError("in the middle of a backward")


def after_an_error(where: str, options: dict) -> Any:
    """Gradients of a step after one that failed; the same from one process; what a forward says in between."""
    n, me = dist.get_world_size(), dist.get_rank()
    net = Fails("plain").to(device.current())
    reference = copy.deepcopy(net)
    sharded = FullyShardedDataParallel(net, **options)
    batch = drawn(1, 2 * n)
    mine = batch.tensor_split(n)[me]
    net.broken, told = where, ""
    try:
        sharded(mine).square().mean().backward()
    except ArithmeticError:
        net.broken = None
    if where == "backward":
        try:
            sharded(mine)
        except RuntimeError as error:
            told = str(error)
    sharded.zero_grad()
    assert not any(t.numel() for t in (*sharded.gathered(), *sharded.full_gradients()))
    with torch.no_grad():
        sharded(mine)
    sharded(mine).square().mean().backward()
    reference(batch).square().mean().backward()
    return told, pieces(sharded, grads=True), whole(reference, grads=True)


def inputs_only() -> bool:
    """`torch.autograd.grad` of the input: parameters get no gradient, and nothing stays gathered."""
    sharded = FullyShardedDataParallel(odd("plain"))
    x = drawn(0, 2).requires_grad_()
    (grad,) = torch.autograd.grad(sharded(x).sum(), x)
    (want,) = torch.autograd.grad(odd("plain")(x).sum(), x)
    torch.testing.assert_close(grad, want)
    return all(p.grad is None for p in sharded.parameters()) and not any(t.numel() for t in sharded.gathered())


def refused(kind: str) -> str:
    """What is said of a module that cannot be sharded, or was changed afterwards."""
    net: Any = odd("plain")
    try:
        if kind == "wrapped":
            FullyShardedDataParallel(FullyShardedDataParallel(net))
        elif kind == "averaged":
            other = DistributedDataParallel(net)
            FullyShardedDataParallel(other.module)
        elif kind == "no part":
            FullyShardedDataParallel(net, blocks=[nn.Linear(1, 1)])
        elif kind == "tensor-parallel":
            collectives.mark(net.first.weight, sharded=(None,))
            FullyShardedDataParallel(net)
        elif kind == "another":
            if dist.get_rank():
                net.last = nn.Linear(5, 4).double()
            FullyShardedDataParallel(net)
        else:
            sharded = FullyShardedDataParallel(net)
            loss = sharded(drawn(0, 2)).sum()
            if kind == "replaced":
                net.last.bias = nn.Parameter(torch.zeros(3))
            elif kind == "cast":
                net.float()
            elif kind == "frozen":
                net.layers[1][0].weight.requires_grad_(False)
            elif kind == "stepped":
                with torch.no_grad():
                    next(sharded.parameters()).zero_()
                loss.backward()
            sharded(drawn(0, 2))
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


# On CUDA


def allocated(layers: int, h: int, ahead: int) -> tuple[int, int, int]:
    """The allocator's bytes before a forward, its peak in it, and the bytes of a block."""
    sharded = FullyShardedDataParallel(Chain(layers, h).to(device.current()), prefetch=ahead)
    x = torch.ones(1, h, device=device.current())
    with torch.no_grad():
        sharded(x)  # cuBLAS takes its work space
        device.synchronize()
        before = device.memory()["allocated"]
        torch.cuda.reset_peak_memory_stats()
        sharded(x)
    device.synchronize()
    return before, device.memory()["allocated_peak"], 4 * h * h


def kernels_of_a_step() -> tuple[list, list]:
    """(start, end) of NCCL's all-gathers and of matrix products."""
    from torch.profiler import ProfilerActivity, profile

    sharded = FullyShardedDataParallel(Chain(8, 4096).to(device.current()))
    x = torch.ones(4096, 4096, device=device.current())
    sharded(x).sum().backward()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        sharded(x).sum().backward()
        device.synchronize()
    kernels = [(e.name.lower(), e.time_range.start, e.time_range.end) for e in profiled.events()]
    gathers = [k[1:] for k in kernels if "nccl" in k[0] and "allgather" in k[0]]
    products = [k[1:] for k in kernels if "gemm" in k[0] or "nvjet" in k[0] or "cutlass" in k[0]]
    return gathers, products


def blocks_only() -> None:
    """All parameters lie in blocks: the root has none."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sharded = FullyShardedDataParallel(net, blocks=list(net))
    sharded(torch.ones(2, 3, device=device.current())).sum().backward()
