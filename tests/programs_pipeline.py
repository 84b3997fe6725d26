"""What the tests of pipeline parallelism run on ranks; the reference is one process."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from labkit import device, pipeline
from labkit.collectives import mark
from labkit.data_parallel import DistributedDataParallel
from labkit.memory import MemoryMeter
from labkit.model import Transformer, preset
from labkit.model import loss as mean_loss
from labkit.pace import section
from labkit.pipeline import engine as engines
from labkit.pipeline.parts import cut
from labkit.pipeline.wires import BatchedWires
from labkit.trace import label
from labkit.train import Mesh

VOCAB = 11


def transformer(name: str, layers: int, **changes: Any) -> Transformer:
    torch.manual_seed(0)
    size = {"layers": layers, "hidden": 8, "heads": 2, "vocab": VOCAB, "positions": 8, **changes}
    return Transformer(preset(name, **size), dtype=torch.float64, device=device.current())


def batch(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, of which every row ignores another number."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, 7), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, : row % 5] = -100
    here = device.current()
    return tokens[:, :-1].to(here), targets.to(here)


def hosted(schedule: pipeline.Schedule, parts: list, rank: int) -> dict[int, Any]:
    return {stage: parts[stage] for stage in schedule.stages_of(rank)}


def worst(pairs: Any) -> float:
    found = 0.0
    for have, want in pairs:
        assert (have is None) == (want is None)
        if want is not None:
            found = max(found, ((have - want).norm() / want.norm().clamp(min=1e-30)).item())
    return found


def by_one_process(model: Transformer, batches: list) -> torch.Tensor:
    sums = [mean_loss(model(tokens), targets) for tokens, targets in batches]
    total = sum(s for s, _ in sums) / sum(c for _, c in sums)
    total.backward()
    return total.detach()


def against_one_process(
    schedule: pipeline.Schedule, layers: int, rows: int, name: str = "tiny_gpt", dp: int = 1, steps: int = 2,
    batched: bool = False,
) -> float:  # fmt: skip
    """Some steps whose gradients add up, then an evaluation: the largest relative difference to one process."""
    with batches_of_messages() if batched else nullcontext():
        return _against_one_process(schedule, layers, rows, name, dp, steps)


@contextmanager
def batches_of_messages() -> Any:
    """Inside, messages travel as they do over NCCL."""
    own, engines.Wires = engines.Wires, BatchedWires
    try:
        yield
    finally:
        engines.Wires = own


def _against_one_process(schedule: pipeline.Schedule, layers: int, rows: int, name: str, dp: int, steps: int) -> float:
    mesh = Mesh(dp=dp, pp=schedule.ranks)
    place = mesh.place(dist.get_rank())
    reference = transformer(name, layers)
    parts = cut(copy.deepcopy(reference), pipeline.partition([1.0] * layers, schedule.stages))
    mine = hosted(schedule, parts, place["pp"])
    replicas = mesh.group("dp") if dp > 1 else None
    engine = pipeline.PipelineEngine(mine, schedule, mean_loss, mesh.group("pp"), replicas)
    off = []
    for step in range(steps):
        batches = [batch(rows, seed=10 * step + replica) for replica in range(dp)]
        want = by_one_process(reference, batches)
        have = engine.step(*batches[place["dp"]])
        off.append(abs(have - want) / want)
    expected = dict(_by_part(reference, schedule, layers))
    for stage, part in mine.items():
        off.append(worst((p.grad, expected[stage, n].grad) for n, p in part.named_parameters()))
    with torch.no_grad():
        sums = [mean_loss(reference(t), y) for t, y in batches]
        want = sum(s for s, _ in sums) / sum(c for _, c in sums)
    off.append(abs(engine.evaluate(*batches[place["dp"]]) - want) / want)
    return max(float(o) for o in off)


def _by_part(model: Transformer, schedule: pipeline.Schedule, layers: int) -> Any:
    """The reference's own parameters by stage and name; a tied head is the embedding."""
    own = {}
    tied = model.head.weight is model.token_embedding.weight
    shared = model.token_embedding.weight
    for stage, part in enumerate(cut(model, pipeline.partition([1.0] * layers, schedule.stages))):
        own |= {(stage, name): param for name, param in part.named_parameters()}
    if tied:
        own = {key: shared if key[1] == "head.weight" else param for key, param in own.items()}
    return own


def tied_after_training(steps: int) -> tuple[Any, Any]:
    """The embedding and the head of a tied model on the first and last of the ranks, after some steps."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    schedule = pipeline.one_f_one_b(ranks, 3)
    part = cut(transformer("tiny_gpt", ranks), pipeline.partition([1.0] * ranks, ranks))[me]
    engine = pipeline.PipelineEngine({me: part}, schedule, mean_loss)
    optimizer = torch.optim.AdamW(part.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        engine.step(*batch(5, seed=step))
        optimizer.step()
    return (part.token_embedding.weight.detach() if me == 0 else None,
            part.head.weight.detach() if me == ranks - 1 else None)  # fmt: skip


def peak_activations(schedule: pipeline.Schedule, rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """The most bytes that autograd held on this rank in a step, and those of one micro-batch in its stage.

    Tokens are not counted: those of all micro-batches are parts of one tensor, which is there anyway.
    """
    me, here = dist.get_rank(), device.current()
    torch.manual_seed(0)
    config = preset("tiny_gpt", layers=schedule.stages + 2, hidden=16, heads=2, vocab=VOCAB, positions=8, tied=False)
    model = Transformer(config, dtype=dtype, device=here)
    layers = pipeline.partition([1.0] * config.layers, schedule.stages)
    part = cut(model, layers)[me]
    x = torch.randn(rows // schedule.micro_batches, 8, 16, dtype=dtype, device=here, requires_grad=True)
    meter = MemoryMeter(part)
    tokens = torch.zeros(rows, 8, dtype=torch.int64, device=here)
    with meter:
        y = part(tokens[: len(x)] if me == 0 else x)
        total = mean_loss(y, tokens[: len(x)])[0] if part.is_last else y.sum()
    one = meter.highest["activations"]
    total.backward()
    engine = pipeline.PipelineEngine({me: part}, schedule, mean_loss)
    meter = MemoryMeter(part)
    with meter:
        engine.step(tokens, tokens)
    whole = tokens.nbytes if part.is_first or part.is_last else 0
    return meter.highest["activations"] - whole, one - whole


def traffic(schedule: pipeline.Schedule, rows: int) -> None:
    """Two steps; headers travel in the first."""
    layers = schedule.stages
    parts = cut(transformer("tiny_llama", layers), pipeline.partition([1.0] * layers, layers))
    engine = pipeline.PipelineEngine(hosted(schedule, parts, dist.get_rank()), schedule, mean_loss)
    for step in range(2):
        with label(training_step=step):
            engine.step(*batch(rows))


class Paced(pipeline.PipelineStage):
    """A stage whose F, B and W take the time of the pace's sections of these names."""

    def forward(self, *args: Any, **more: Any) -> Any:
        with section("F"):
            return super().forward(*args, **more)

    def backward(self, *args: Any) -> Any:
        with section("B"):
            return super().backward(*args)

    def weight(self, *args: Any) -> None:
        with section("W"):
            super().weight(*args)


def paced(schedule: pipeline.Schedule) -> None:
    me = dist.get_rank()
    with section("set-up"):
        stages = {s: Paced(nn.Linear(4, 4)) for s in schedule.stages_of(me)}
        engine = pipeline.PipelineEngine(stages, schedule, lambda y, t: (y.sum(), len(t)))
        rows = torch.ones(schedule.micro_batches, 4)
    engine.step(rows, rows)  # headers, and what torch does at its first use
    dist.barrier()
    with label(training_step=1):
        engine.step(rows, rows)


def cut_short() -> tuple[str, float]:
    """A stage whose second step fails in a backward's place: the error, and the next step against a fresh start."""
    layer = nn.Linear(4, 4, dtype=torch.float64)
    layer.weight.grad = torch.ones_like(layer.weight)
    engine = pipeline.PipelineEngine({0: layer}, pipeline.one_f_one_b(1, 2), _angry)
    rows = torch.ones(4, 4, dtype=torch.float64)
    try:
        engine.step(rows, torch.tensor([0, 0, 1, 0]))
    except ArithmeticError as error:
        said = str(error)
    kept = layer.weight.grad.clone()
    engine.step(rows, torch.zeros(4))
    alone = torch.autograd.grad(layer(rows).sum() / 4, layer.weight)[0]
    return said, (kept - 1).abs().max().item() + (layer.weight.grad - 1 - alone).abs().max().item()


def _angry(y: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    if targets.any():
        raise ArithmeticError("no loss")
    return y.sum(), len(y)


class _Odd(nn.Module):
    """What a backward in two halves must not get wrong, one kind a module: (x) or (x, w) → (x, w)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4, dtype=torch.float64)
        if kind == "hook":
            self.layer.weight.register_hook(lambda grad: grad * 2)

    def forward(self, x: torch.Tensor, w: torch.Tensor | None = None) -> Any:
        if w is not None:  # another stage's tensor as a weight
            return F.linear(self.layer(x), w)
        if self.kind == "weight":
            return torch.tanh(self.layer(x)), self.layer.weight * 2
        if self.kind == "gradient":
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.layer(z).square().sum(), z)
            return torch.tanh(self.layer(x)) + slope
        if self.kind.startswith("checkpoint"):
            return torch.tanh(checkpoint(self.layer, x, use_reentrant=self.kind.endswith("reentrant")))
        if self.kind == "narrow":
            with torch.autocast(x.device.type, torch.bfloat16):
                return self.layer.float()(x.float()).double()
        return torch.tanh(self.layer(x))


def in_two_halves(kind: str) -> float:
    """ZB-H1 against 1F1B, on two ranks."""
    me, rows = dist.get_rank(), torch.linspace(-1, 1, 28, dtype=torch.float64).view(7, 4)
    grads = []
    for schedule in (pipeline.one_f_one_b(2, 3), pipeline.zero_bubble_h1(2, 3)):
        torch.manual_seed(me)
        stage = _Odd(kind if me == 0 or kind != "weight" else "")
        engine = pipeline.PipelineEngine({me: stage}, schedule, lambda y, t: ((y - 1).square().sum(), len(t)))
        engine.step(rows, rows)
        grads.append([p.grad for p in stage.parameters()])
    return worst(zip(*grads, strict=True))


def small_counts(count: float, dtype: str, rows: int) -> tuple[float, float]:
    """A loss whose count is not 1 a row: the loss, and how far the gradient is from that of one process."""
    layer = nn.Linear(1, 1, bias=False, dtype=getattr(torch, dtype))
    x = torch.full((rows, 1), 2.0**-6, dtype=layer.weight.dtype)

    def weighted(y: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, float]:
        return count * y.sum(), count * len(t)

    engine = pipeline.PipelineEngine({0: layer}, pipeline.one_f_one_b(1, rows // 500 + 1), weighted)
    loss = engine.step(x, x).item()
    return loss - layer.weight.item() * 2.0**-6, abs(layer.weight.grad.item() * 2**6 - 1)


def frozen_tie() -> list[bool]:
    """Embedding and head are one, and not trained."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    model = transformer("tiny_gpt", ranks)
    model.token_embedding.weight.requires_grad_(False)
    part = cut(model, pipeline.partition([1.0] * ranks, ranks))[me]
    pipeline.PipelineEngine({me: part}, pipeline.one_f_one_b(ranks, 2), mean_loss).step(*batch(4))
    return [p.grad is None for n, p in part.named_parameters() if "token_embedding" in n or "head" in n]


def parts_without_layers() -> float:
    model = transformer("tiny_gpt", 2, vocab=8)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    expected, x = model(tokens), tokens
    for part in cut(model, [range(0), range(2), range(2, 2)]):
        x = part(x)
    return (x - expected).abs().max().item()


def after_a_step_cut_short() -> list[str]:
    """Both ranks fail and go on: what the step and the next one say."""
    me = dist.get_rank()
    engine = pipeline.PipelineEngine({me: _Failing()}, pipeline.gpipe(2, 3), lambda y, t: (y.sum(), len(t)))
    said = []
    for _ in range(2):
        try:
            engine.step(torch.ones(6, 4), torch.ones(6, 4))
        except (ArithmeticError, RuntimeError) as error:
            said.append(str(error))
    return said


class _Failing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.left = 1 - dist.get_rank()  # rank 0 sends once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.left:
            raise ArithmeticError("no")
        self.left -= 1
        return super().forward(x)


def refused(what: str) -> str:
    me, linear = dist.get_rank(), nn.Linear(4, 4)
    schedule, loss = pipeline.one_f_one_b(2, 2), lambda y, t: (y.sum(), len(t))
    rows = torch.ones(4, 4)
    try:
        if what == "ranks":
            pipeline.PipelineEngine({me: linear}, pipeline.gpipe(3, 2), loss)
        elif what == "stages":
            pipeline.PipelineEngine({1 - me: linear}, schedule, loss)
        elif what == "module":
            pipeline.PipelineEngine({me: "layer"}, schedule, loss)
        elif what == "wrapped":
            pipeline.PipelineEngine({me: DistributedDataParallel(linear)}, schedule, loss)
        elif what == "illegal":
            wrong = pipeline.Schedule.parse("r0: F0 B0 F1 B1\nr1: F1 B1 F0 B0")
            pipeline.PipelineEngine({me: linear}, wrong, loss)
        elif what == "dual":
            dual = pipeline.dual_pipe(2, 4)
            pipeline.PipelineEngine(dict.fromkeys(dual.stages_of(me), linear), dual, loss)
        elif what == "few":
            pipeline.PipelineEngine({me: linear}, schedule, loss).step(rows[:1], rows[:1])
        elif what == "targets":
            pipeline.PipelineEngine({me: linear}, schedule, loss).step(rows, rows[:3])
        elif what == "gradient":
            pipeline.PipelineEngine({me: linear}, schedule, loss).step(rows.requires_grad_(), rows)
        elif what == "loss":
            pipeline.PipelineEngine({0: linear}, pipeline.gpipe(1, 2), lambda y, t: y.sum(), _alone()).step(rows, rows)
        elif what == "shared stage":
            stage = pipeline.PipelineStage(linear)
            pipeline.PipelineEngine({0: stage, 1: stage}, pipeline.interleaved(1, 2, 2), loss, _alone())
        elif what == "tied":
            mark(linear.weight, tied="one")
            mark(linear.bias, tied="one")
            pipeline.PipelineEngine({me: linear}, schedule, loss)
        elif what == "type":
            pipeline.PipelineEngine({me: linear}, schedule, loss).step([1, 2], rows)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def grows() -> None:
    me = dist.get_rank()
    stage = _Growing() if me == 0 else nn.Linear(4, 4)
    engine = pipeline.PipelineEngine({me: stage}, pipeline.gpipe(2, 2), lambda y, t: (y.sum(), len(t)))
    engine.step(torch.ones(4, 4), torch.ones(4, 4))


def _alone() -> Any:
    """A group of this rank."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def other_batches() -> None:
    me, rows = dist.get_rank(), torch.ones(4 + 2 * dist.get_rank(), 4)
    engine = pipeline.PipelineEngine({me: nn.Linear(4, 4)}, pipeline.gpipe(2, 2), lambda y, t: (y.sum(), len(t)))
    engine.step(rows, rows)


class _Growing(nn.Module):
    """Its output has one more row every time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.scale = 0, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += 1
        return x.repeat(self.rows, 1) * self.scale


def several_tensors() -> float:
    """A stage that hands on two tensors and a whole number, of which one needs no gradient."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    parts = [_Two(nn.Linear(4, 4, dtype=torch.float64), n == ranks - 1) for n in range(ranks)]
    rows = torch.randn(6, 4, dtype=torch.float64)
    reference = copy.deepcopy(parts)
    x: Any = (rows,)
    for part in reference:
        x = part(*x)
        x = x if isinstance(x, tuple) else (x,)
    (x[0].sum() / 6).backward()
    engine = pipeline.PipelineEngine({me: parts[me]}, pipeline.zero_bubble_h1(ranks, 3), lambda y, t: (y.sum(), len(t)))
    engine.step(rows, rows)
    return worst((a.grad, b.grad) for a, b in zip(parts[me].parameters(), reference[me].parameters(), strict=True))


class _Two(nn.Module):
    def __init__(self, layer: nn.Linear, last: bool) -> None:
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, n: torch.Tensor | None = None) -> Any:
        y = x if y is None else y
        n = torch.arange(4) if n is None else n + 1
        x = torch.tanh(self.layer(x)) + y * n
        return x + y if self.last else (x, torch.cos(y) * x.detach(), n)


def each_of(schedules: list[pipeline.Schedule]) -> list[float]:
    """One step of each schedule, on small layers: how far gradients are from one process's."""
    off = []
    for number, schedule in enumerate(schedules):
        torch.manual_seed(number)
        layers = [nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh()) for _ in range(schedule.stages)]
        rows = torch.randn(schedule.micro_batches + 1, 4, dtype=torch.float64)
        reference = copy.deepcopy(nn.Sequential(*layers))
        (reference(rows).sum() / len(rows)).backward()
        mine = hosted(schedule, layers, dist.get_rank())
        pipeline.PipelineEngine(mine, schedule, lambda y, t: (y.sum(), len(t))).step(rows, rows)
        for stage, layer in mine.items():
            expected = reference[stage].parameters()
            off.append(worst((a.grad, b.grad) for a, b in zip(layer.parameters(), expected, strict=True)))
    return off
