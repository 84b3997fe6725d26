"""What the tests of ZeRO's stages 1 and 2 run on ranks. A reference is one process with the whole batch, in float64."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit import device
from labkit.memory import MemoryMeter
from labkit.model import Transformer, loss, preset
from labkit.trace import label
from labkit.zero import DistributedOptimizer, ShardedOptimizer

SIZE = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 33, "positions": 16}  # 33 rows: nothing divides by 2 or 4


def model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    torch.manual_seed(7)
    return Transformer(preset(name, **{**SIZE, **changes}), dtype=dtype, device=device.current())


def tokens(batch: int, seed: int = 3) -> torch.Tensor:
    drawn = torch.randint(SIZE["vocab"], (batch, 13), generator=torch.Generator().manual_seed(seed))
    return drawn.to(device.current())


def mean_loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    total, count = loss(net(batch[:, :-1]), batch[:, 1:])
    return total / count


def made(kind: int | str, given: Any, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> ShardedOptimizer:
    """Stage 1, stage 2, or the distributed optimizer."""
    if kind == "distributed":
        options.pop("bucket_cap_mb", None)
        return DistributedOptimizer(given, optimizer_class, **options)
    return ShardedOptimizer(given, optimizer_class, stage=kind, **options)


def distance(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of two modules' parameters, relative to the largest of each parameter."""
    return max(
        ((p - q).abs().max() / q.abs().max().clamp(min=1e-30)).item()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def groups_of(net: nn.Module) -> list[dict]:
    """Matrices decay, vectors do not and learn faster."""
    named = list(net.named_parameters())
    return [{"params": [np for np in named if np[1].dim() > 1], "weight_decay": 0.3},
            {"params": [np for np in named if np[1].dim() <= 1], "weight_decay": 0.0, "lr": 1e-2}]  # fmt: skip


def against_one_process(
    kind: int | str, name: str, changes: dict, cap: float = 0.005, micro_steps: int = 1, grouped: bool = False,
    frozen: str = "", clip: float = 0.0, optimizer: str = "AdamW", steps: int = 10, options: dict | None = None,
    scheduled: bool = False, zeroed: bool = True,
) -> tuple[float, list]:  # fmt: skip
    """How far the parameters are from those of one process, after `steps` steps; and the parameters."""
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
    n, me = dist.get_world_size(), dist.get_rank()
    net = model(name, **changes)
    for key, param in net.named_parameters():
        param.requires_grad_(not (frozen and frozen in key))
    reference = copy.deepcopy(net)
    if me:  # what rank 0 has is what counts
        with torch.no_grad():
            next(net.parameters()).fill_(1)
    optimizer_class, options = getattr(torch.optim, optimizer), {"lr": 3e-3, **(options or {})}
    ours = made(kind, groups_of(net) if grouped else net, optimizer_class, bucket_cap_mb=cap, **options)
    params = groups_of(reference) if grouped else reference.parameters()
    theirs = optimizer_class(params, **options)
    both = [(ours, net, me), (theirs, reference, None)]
    plans = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o, _, _ in both] if scheduled else []
    worst = 0.0
    for step in range(steps):
        batch = tokens(2 * n * micro_steps, seed=step)
        for opt, net_, rank in both:
            if zeroed:
                opt.zero_grad()
            pieces = batch.tensor_split(n)[rank].tensor_split(micro_steps) if rank is not None else [batch]
            for piece in pieces:
                (mean_loss(net_, piece) / len(pieces)).backward()
        if clip:
            norm = ours.clip_grad_norm_(clip).item()
            reference_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip).item()
            worst = max(worst, abs(norm / reference_norm - 1))
        for opt, _, _ in both:
            opt.step()
        for plan in plans:
            plan.step()
    return max(worst, distance(net, reference)), [p.detach().cpu() for p in net.parameters()]


class Odd(nn.Module):
    """Sizes that nothing divides: 13·11 + 11, 11·7 + 7, 7·29."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        on = {"dtype": dtype, "device": device.current()}
        self.layers = nn.Sequential(nn.Linear(13, 11, **on), nn.Linear(11, 7, **on), nn.Linear(7, 29, bias=False, **on))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def odd_input(dtype: torch.dtype, seed: int) -> torch.Tensor:
    drawn = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(device.current(), dtype)


def memory(kind: int | str, cap: float, dtype: torch.dtype, micro_steps: int = 1) -> dict[str, dict]:
    """Bytes by category: before, after backward, after the reduction, after the step; and each phase's most."""
    net = Odd(dtype)
    optimizer = made(kind, net, bucket_cap_mb=cap, lr=1e-3)
    meter = MemoryMeter(net, optimizer=optimizer)
    found = {"before": meter.held()}
    with meter:
        with meter.phase("backward"):
            for micro_step in range(micro_steps):
                net(odd_input(dtype, micro_step)).square().mean().backward()
        found["backward"] = meter.held()
        with meter.phase("reduce"):
            optimizer.reduce_gradients()
        found["reduced"] = meter.held()
        with meter.phase("step"):
            optimizer.step()
        found["stepped"] = meter.held()
        optimizer.zero_grad()
        found["after"] = meter.held()
    most = {
        phase: max(held["gradients"] for _, p, held in meter.samples if p == phase) for phase in ("backward", "reduce")
    }
    return {**found, "most gradients": most}


def volume(kind: int | str, cap: float, micro_steps: int, quiet: bool = False) -> None:
    """A step after `micro_steps` backwards; its messages have the label ``counted``."""
    net = Odd()
    optimizer = made(kind, net, torch.optim.SGD, bucket_cap_mb=cap, lr=1e-3)
    with label(counted=True):
        for micro_step in range(micro_steps):
            with optimizer.no_sync() if quiet and micro_step < micro_steps - 1 else contextlib.nullcontext():
                net(odd_input(torch.float32, micro_step)).square().mean().backward()
        optimizer.reduce_gradients()
        optimizer.reduce_gradients()  # nothing is left
        optimizer.step()


class Branches(nn.Module):
    """Layers of a dictionary, used in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        on = {"dtype": torch.float64, "device": device.current()}
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4, **on) for name in ("a", "b", "c", "never")})

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        for name in use:
            x = self.layers[name](x).tanh()
        return x


def branches(kind: int | str, uses: list[list[str]], cap: float, find_unused: bool, decay: float) -> float:
    """Three steps in which rank r uses ``uses[step][r]``, against the mean of what each rank has, alone."""
    me, n = dist.get_rank(), dist.get_world_size()
    net, reference = Branches(), Branches()
    options = {"lr": 0.1, "weight_decay": decay}
    ours = made(kind, net, bucket_cap_mb=cap, find_unused_parameters=find_unused, **options)
    theirs = torch.optim.AdamW(reference.parameters(), **options)
    for use in uses:
        theirs.zero_grad()
        ours.zero_grad()
        for rank in range(n):
            x = torch.full((2, 4), rank + 1.0, dtype=torch.float64, device=device.current())
            (reference(x, use[rank]).square().sum() / n).backward()
            if rank == me:
                net(x, use[rank]).square().sum().backward()
        if not find_unused:  # then zeros count as gradients
            for param in reference.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        theirs.step()
        ours.step()
    return distance(net, reference)


def half_mean(kind: int | str, value: float) -> list[float]:
    """The mean of an fp16 gradient that is `value` on each rank."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16, device=device.current()))
    optimizer = made(kind, [weight], torch.optim.SGD, lr=1.0)
    (weight * torch.full_like(weight, value)).sum().backward()
    return [element for shard in optimizer.grad_shards() for element in shard.tolist()]


def masters(kind: int | str) -> list[tuple[str, int, torch.Tensor]]:
    """bf16 and fp64 parameters in one module, four steps: (name, offset, master or values) of this rank's runs."""
    net = mixed_module()
    optimizer = made(kind, net, lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        mixed_loss(net, 10 * step + dist.get_rank()).backward()
        optimizer.step()
        for bucket in optimizer.buckets:
            if bucket.master is not None:
                assert torch.equal(bucket.shard, bucket.master.to(bucket.dtype))
    return [(s.name, s.offset, s.tensor.clone()) for s in optimizer.shards()]


def mixed_module() -> nn.ParameterDict:
    torch.manual_seed(11)
    return nn.ParameterDict({
        "narrow": torch.randn(5, 3, device=device.current()).bfloat16(),
        "wide": torch.randn(7, dtype=torch.float64, device=device.current()),
        "more": torch.randn(4, device=device.current()).bfloat16(),
    })  # fmt: skip


def mixed_loss(net: nn.ParameterDict, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64, device=device.current())
    for param in net.values():
        factor = torch.randn(param.shape, generator=generator).to(param)
        total = total + (param * factor).square().sum()
    return total


def on_a_mesh(kind: int | str) -> dict[str, Any]:
    """Two tensor-parallel and two data-parallel ranks; gradients by their marks: norm, and the stepped parameters."""
    from labkit.collectives import mark
    from labkit.train import Mesh

    mesh = Mesh(tp=2, dp=2)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    where = {axis: dist.get_rank(mesh.group(axis)) for axis in ("tp", "dp")}
    net = nn.ParameterDict({name: torch.zeros(5, dtype=torch.float64) for name in MARKS})
    mark(net["sharded"], sharded=(tp,))
    mark(net["replicated"], replicated=(tp,))
    mark(net["partial"], partial=(tp,))
    optimizer = made(kind, net, torch.optim.SGD, group=dp, bucket_cap_mb=TINY, lr=1.0)
    for _ in range(2):  # micro-steps
        sum((net[name] * factor(name, where["tp"], where["dp"])).sum() for name in MARKS).backward()
    norm = optimizer.clip_grad_norm_(1.0).item()
    optimizer.step()
    return {"norm": norm, "tp": where["tp"], **{name: param.detach().clone() for name, param in net.items()}}


def equal_parts(kind: int | str, by_hand: bool) -> torch.Tensor:
    """A partial gradient whose parts are the same bits on both tensor-parallel ranks: 1 each, so 2 in all."""
    from labkit.collectives import mark
    from labkit.sequence_parallel import reduce_partial_gradients
    from labkit.train import Mesh

    mesh = Mesh(tp=2, dp=2)
    net = nn.ParameterDict({"partial": torch.zeros(5, dtype=torch.float64)})
    mark(net["partial"], partial=(mesh.group("tp"),))
    optimizer = made(kind, net, torch.optim.SGD, group=mesh.group("dp"), lr=1.0)
    net["partial"].sum().backward()
    if by_hand:
        reduce_partial_gradients(net)
    optimizer.step()
    return net["partial"].detach().clone()


MARKS = ("sharded", "replicated", "partial")
TINY = 1e-6


def factor(name: str, tp: int, dp: int) -> torch.Tensor:
    """The gradient on one rank; of a replicated parameter the same on all of the tensor-parallel group."""
    seed = 100 * MARKS.index(name) + 10 * dp + (0 if name == "replicated" else tp)
    return torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def no_garbage(kind: int | str) -> float:
    """Fresh memory is nan, so that padding would show: the norm, against torch's of the mean."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what `torch.empty` makes
    try:
        net, reference = Odd(torch.float64), Odd(torch.float64)
        optimizer = made(kind, net, torch.optim.SGD, bucket_cap_mb=TINY, lr=0.1)
        for rank in range(dist.get_world_size()):
            (reference(odd_input(torch.float64, rank)).square().mean() / dist.get_world_size()).backward()
        net(odd_input(torch.float64, dist.get_rank())).square().mean().backward()
        norm = optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        assert all(p.isfinite().all() for p in net.parameters())
        return (norm / nn.utils.get_total_norm([p.grad for p in reference.parameters()]) - 1).abs().item()
    finally:
        torch.use_deterministic_algorithms(False)


def loaded(kind: int | str) -> tuple[bool, str, dict]:
    """Whether a step after a load is that after no load; what loading another rank's state says; runs by name."""

    def train(net: nn.Module, optimizer: ShardedOptimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            net(odd_input(torch.bfloat16, step)).square().mean().backward()
            optimizer.step()

    net = Odd(torch.bfloat16)
    optimizer = made(kind, net, lr=0.1)
    train(net, optimizer, range(2))
    saved = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    optimizer.param_groups[0]["lr"] = 0.5
    fresh = Odd(torch.bfloat16)
    fresh.load_state_dict(saved[0])
    again = made(kind, fresh, lr=0.3)
    again.load_state_dict(saved[1])
    optimizer.param_groups[0]["lr"] = 0.1
    train(net, optimizer, range(2, 4))
    train(fresh, again, range(2, 4))
    same = all(torch.equal(p, q) for p, q in zip(net.parameters(), fresh.parameters(), strict=True))
    told = ""
    saved[1]["runs"]["layers.0.weight"] = (1, 2)
    try:
        again.load_state_dict(saved[1])
    except ValueError as error:
        told = str(error)
    return same, told, {s.name: (s.offset, s.length, s.shape, sorted(s.state)) for s in optimizer.shards()}


def refused(kind: str) -> str:
    """What a wrong use says."""
    from labkit.data_parallel import DistributedDataParallel

    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    given: Any = net
    optimizer_class: Any = torch.optim.AdamW
    options: dict[str, Any] = {"lr": 0.1}
    if kind == "torch's DDP":
        given = nn.parallel.DistributedDataParallel(net)
    if kind in ("DDP", "under DDP", "parameters under DDP"):
        wrapped = DistributedDataParallel(net)
        given = {"DDP": wrapped, "under DDP": net}.get(kind, list(net.parameters()))
    if kind in ("Adafactor", "LBFGS", "Muon", "SparseAdam"):
        optimizer_class, options = getattr(torch.optim, kind), {}
    if kind == "two in one memory":
        net[1].weight.data = net[0].weight.data
    if kind == "made already":
        optimizer_class = torch.optim.SGD(net.parameters())
    if kind == "frozen":
        net.requires_grad_(False)
    if kind == "stage":
        options["stage"] = 3
    if kind == "cap":
        options["bucket_cap_mb"] = 0
    if kind == "tensor":
        given = torch.zeros(3)
    if kind == "meta":
        given = nn.Linear(2, 2, device="meta")
    try:
        ShardedOptimizer(given, optimizer_class, **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def changed(kind: str, stage: int) -> str:
    """What a step says once the module was changed, or a backward went wrong."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].bias.requires_grad_(False)
    optimizer = made(stage, net, lr=0.1, bucket_cap_mb=TINY)
    try:
        if kind == "cast":
            net.double()
        if kind == "unfrozen":
            net[0].bias.requires_grad_(True)
        if kind == "group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        if kind == "error":
            net[0].weight.register_hook(fail)
            with contextlib.suppress(ZeroDivisionError):
                net(torch.ones(1, 3)).sum().backward()
            net[0].weight._backward_hooks.clear()
        net(torch.ones(1, 3, dtype=net[0].weight.dtype)).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        optimizer.zero_grad()
        if kind == "error":
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return str(error)
    return ""


def fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


def closure_and_warning() -> tuple[float, list[str]]:
    """A step with a closure, of a module with a layer that is not used."""
    net = Branches()
    optimizer = made(1, net, lr=0.1)

    def closure() -> torch.Tensor:
        total = net(torch.ones(1, 4, dtype=torch.float64, device=device.current()), "abc").sum()
        total.backward()
        return total

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first = optimizer.step(closure)
        optimizer.step()
    return first.item(), [str(w.message) for w in told]
