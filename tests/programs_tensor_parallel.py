"""What the tests of tensor, sequence and context parallelism run on ranks; the reference is one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labkit import collectives, context_parallel, device, sequence_parallel, tensor_parallel
from labkit.collectives import placement
from labkit.model import Transformer, preset
from labkit.model import loss as whole_loss
from labkit.trace import label

VOCAB = 37


def transformer(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    torch.manual_seed(0)
    size = {"layers": 2, "hidden": 16, "heads": 4, "vocab": VOCAB, "positions": 16, **changes}
    return Transformer(preset(name, **size), dtype=dtype, device=device.current())


def shared(model: Transformer, how: str) -> Transformer:
    if how == "tp":
        return tensor_parallel.parallelize(model)
    return sequence_parallel.parallelize(model, keep_gathered=how == "sp-keep")


def tokens(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device.current())


def whole_gradient(param: nn.Parameter, name: str, model: Transformer) -> torch.Tensor:
    """The gradient of a whole parameter from the ranks' parts, in the order of the model of one process."""
    grad = param.grad
    if not placement(param).sharded:
        return grad
    parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad.contiguous())
    if "qkv" in name:  # each part holds its queries, keys and values
        return torch.cat([torch.cat([p.chunk(3)[third] for p in parts]) for third in range(3)])
    return torch.cat(parts, dim=1 if name.endswith(("output.weight", "down.weight")) else 0)


def against_one_process(name: str, changes: dict, how: str, dtype: torch.dtype) -> float:
    """Three steps of Adam: the largest relative difference of losses and of every whole gradient."""
    reference = transformer(name, dtype, **changes)
    model = shared(copy.deepcopy(reference), how)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (reference, model)]
    batch, worst = tokens(), 0.0
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, count = whole_loss(reference(batch[:, :-1]), batch[:, 1:])
        (total / count).backward()
        with label(training_step=step):
            ours, count = tensor_parallel.loss(model(batch[:, :-1]), batch[:, 1:], VOCAB)
            (ours / count).backward()
            sequence_parallel.reduce_partial_gradients(model)
        worst = max(worst, abs((ours - total) / total).item())
        expected = dict(reference.named_parameters())
        for param_name, param in model.named_parameters():
            want = expected[param_name].grad
            have = whole_gradient(param, param_name, model)[: want.shape[0]]
            worst = max(worst, ((have - want).norm() / want.norm().clamp(min=1e-30)).item())
        for optimizer in optimizers:
            optimizer.step()
    return worst


def layer_events(name: str, how: str, algorithm: str, layers: int) -> None:
    """One step, forward and backward, under ``using(algorithm)``."""
    model = shared(transformer(name, torch.float32, layers=layers), how)
    batch = tokens()
    with collectives.using(algorithm):
        total, _ = tensor_parallel.loss(model(batch[:, :-1]), batch[:, 1:], VOCAB)
        total.backward()


def norms_after_training(how: str, steps: int = 50) -> list:
    """The parameters that all ranks hold, after some steps with dropout."""
    model = shared(transformer("tiny_gpt", torch.float32, layers=1, dropout=0.1), how)
    tensor_parallel.seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        batch = tokens(seed=step)
        optimizer.zero_grad()
        total, count = tensor_parallel.loss(model(batch[:, :-1]), batch[:, 1:], VOCAB)
        (total / count).backward()
        sequence_parallel.reduce_partial_gradients(model)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters() if not placement(p).sharded]


def saved_bytes(how: str, changes: dict, shape: tuple[int, int]) -> int:
    """Bytes that autograd keeps of one more layer, bf16: of two layers less those of one."""
    kept = []
    for layers in (1, 2):
        model = transformer("tiny_gpt", torch.bfloat16, layers=layers, positions=64, hidden=32, **changes)
        tensor_parallel.seed(1)
        if how != "none":
            shared(model, how)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        held: dict[int, int] = {}

        keep: list[torch.Tensor] = []

        def pack(t: torch.Tensor, own: set = own, held: dict = held, keep: list = keep) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage.nbytes()
            keep.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(tokens(shape[0], shape[1]))
        kept.append(sum(held.values()))
    return kept[1] - kept[0]


def cross_entropy(vocab: int, scale: float, smoothing: float, dtype: torch.dtype) -> tuple[float, float]:
    """Largest relative difference to torch's, of losses and gradients; with ignored targets and padding."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    rows = -(-vocab // ranks)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, vocab, generator=generator, dtype=torch.float64) * scale
    target = torch.tensor([0, vocab - 1, -100, vocab // 2, 1])
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, reduction="none", label_smoothing=smoothing)
    (expected * weights).sum().backward()
    padded = torch.full((5, rows * ranks), 1e3, dtype=torch.float64)  # padding that would win if it counted
    padded[:, :vocab] = logits
    mine = padded[:, me * rows : (me + 1) * rows].to(dtype).requires_grad_()
    ours = tensor_parallel.vocab_parallel_cross_entropy(mine, target, vocab=vocab, label_smoothing=smoothing)
    (ours * weights.to(ours.dtype)).sum().backward()
    real = whole.grad[:, me * rows : (me + 1) * rows]
    padding = mine.grad[:, real.shape[1] :]
    assert not padding.numel() or not padding.any()
    difference = (mine.grad[:, : real.shape[1]] - real).abs().max().item() if real.numel() else 0.0
    return ((ours - expected) / expected.abs().clamp(min=1)).abs().max().item(), difference


def row_bias() -> list[float]:
    """Fault 18: weight 0, bias 100."""
    layer = tensor_parallel.RowParallelLinear(4, 3)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, 100.0)
    return layer(torch.ones(1, 4 // dist.get_world_size())).flatten().tolist()


def initial_weights() -> list[torch.Tensor]:
    """Fault 22: the whole matrices that the parts make, for one seed."""
    torch.manual_seed(5)
    column, row = tensor_parallel.ColumnParallelLinear(8, 8), tensor_parallel.RowParallelLinear(8, 8)
    table = tensor_parallel.VocabParallelEmbedding(10, 4)
    found = []
    for weight, dim in ((column.weight, 0), (row.weight, 1), (table.weight, 0)):
        parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, weight.detach().contiguous())
        found.append(torch.cat(parts, dim)[:10])
    return [*found, row.bias.detach()]


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """What dropout leaves of ones, where data is replicated and where it is split; and again from a saved state."""
    from labkit.model.dropout import Dropout
    from labkit.tensor_parallel.seeds import SplitDropout

    tensor_parallel.seed(4)
    whole, split = Dropout(0.5), SplitDropout(Dropout(0.5))
    state = tensor_parallel.streams.state_dict()
    first = [d(torch.ones(64)) for d in (whole, split)]
    tensor_parallel.streams.load_state_dict(state)
    again = [d(torch.ones(64)) for d in (whole, split)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return first[0], first[1]


def second_derivative() -> tuple[float, float, str]:
    """x³ summed over two parts between f and g: the second derivative by ranks and by hand; and what a layer says."""
    x = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    y = tensor_parallel.reduce_from_group(tensor_parallel.copy_to_group(x) ** 3 / dist.get_world_size())
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    layer = tensor_parallel.ColumnParallelLinear(2, 4)
    z = torch.ones(1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(z).square().sum(), z, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return first.item(), second.item(), str(error)
    return first.item(), second.item(), ""


def refused(what: str) -> str:
    try:
        if what == "heads":
            tensor_parallel.parallelize(transformer("tiny_gpt", heads=2))
        elif what == "twice":
            tensor_parallel.parallelize(tensor_parallel.parallelize(transformer("tiny_gpt")))
        elif what == "type":
            tensor_parallel.parallelize(nn.Linear(2, 2))
        elif what == "columns":
            tensor_parallel.ColumnParallelLinear(4, 6)
        elif what == "sequence":
            sequence_parallel.scatter_to_sequence(torch.zeros(1, 5, 2))
        elif what == "token":
            tensor_parallel.parallelize(transformer("tiny_gpt"))(torch.tensor([[VOCAB]]))
        elif what == "zigzag":
            context_parallel.zigzag(12, 0, 4)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def ring(causal: bool, kv_heads: int, tile: int) -> tuple[float, int]:
    """Ring attention, both directions, against torch's on the whole sequence; and how many tiles this rank computed."""
    torch.manual_seed(0)
    ranks, me = dist.get_world_size(), dist.get_rank()
    s = 16 * ranks
    q = torch.randn(2, 4, s, 8, dtype=torch.float64)
    k, v = (torch.randn(2, kv_heads, s, 8, dtype=torch.float64) for _ in "kv")
    grad = torch.randn_like(q)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    expected.backward(grad)
    mine = context_parallel.zigzag(s, me, ranks)
    parts = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    with context_parallel.count_traffic() as traffic, label(pass_="both"):
        out = context_parallel.ring_attention(*parts, causal=causal, tile=tile)
        out.backward(grad[:, :, mine])
    differences = [(out - expected[:, :, mine]).abs().max()]
    differences += [(a.grad - b.grad[:, :, mine]).abs().max() for a, b in zip(parts, whole, strict=True)]
    return max(d.item() for d in differences), traffic.tiles
