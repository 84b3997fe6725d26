"""What the tests of tensor, sequence and context parallelism run on ranks; the reference is one process."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labkit import collectives, device, sequence_parallel, tensor_parallel
from labkit.collectives import placement
from labkit.data_parallel import DistributedDataParallel
from labkit.model import Transformer, preset
from labkit.model import loss as whole_loss
from labkit.trace import label
from labkit.train import Mesh

VOCAB = 37


def transformer(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    torch.manual_seed(0)
    size = {"layers": 2, "hidden": 16, "heads": 4, "vocab": VOCAB, "positions": 16, **changes}
    return Transformer(preset(name, **size), dtype=dtype, device=device.current())


def shared(model: Transformer, how: str, group: Any = None) -> Transformer:
    if how == "tp":
        return tensor_parallel.parallelize(model, group)
    return sequence_parallel.parallelize(model, group, keep_gathered=how == "sp-keep")


def tokens(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device.current())


def whole_gradient(param: nn.Parameter, name: str, group: Any = None) -> torch.Tensor:
    """The gradient of a whole parameter from the ranks' parts, in the order of the model of one process."""
    grad = param.grad
    if not placement(param).sharded:
        return grad
    parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, grad.contiguous(), group=group)
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
            have = whole_gradient(param, param_name)[: want.shape[0]]
            worst = max(worst, ((have - want).norm() / want.norm().clamp(min=1e-30)).item())
        for optimizer in optimizers:
            optimizer.step()
    return worst


def beside_data_parallelism(how: str, frozen: tuple[str, ...] = ()) -> float:
    """tp 2, dp 2: a step on two sequences, one a replica; the largest relative difference to one process.

    Args:
        how: As in `shared`.
        frozen: Ends of the names of parameters that are not trained.
    """
    mesh, reference = Mesh(tp=2, dp=2), transformer("tiny_gpt")
    for name, param in reference.named_parameters():
        param.requires_grad_(not name.endswith(frozen))
    tp = mesh.group("tp")
    model = shared(copy.deepcopy(reference), how, tp)
    wrapped, batch, mine = DistributedDataParallel(model, mesh.group("dp")), tokens(), mesh.place(dist.get_rank())["dp"]
    total, count = whole_loss(reference(batch[:, :-1]), batch[:, 1:])
    (total / count).backward()
    own = batch[mine : mine + 1]
    ours, count = tensor_parallel.loss(wrapped(own[:, :-1]), own[:, 1:], VOCAB, tp)
    (ours / count).backward()
    sequence_parallel.reduce_partial_gradients(model)
    expected, worst = dict(reference.named_parameters()), 0.0
    for name, param in model.named_parameters():
        want = expected[name].grad
        assert (param.grad is None) == (want is None), name
        if want is not None:
            have = whole_gradient(param, name, tp)[: want.shape[0]]
            worst = max(worst, ((have - want).norm() / want.norm()).item())
    return worst


def gradient_of_what_enters(name: str, how: str) -> float:
    """Of a layer's input, whole or this rank's share of the tokens: the relative difference to one process."""
    reference = transformer(name, layers=1)
    torch.manual_seed(1)
    x = torch.randn(2, 8, 16, dtype=torch.float64, device=device.current())
    weights = torch.randn_like(x)

    def gradient(model: Transformer, mine: slice) -> torch.Tensor:
        given = x[:, mine].clone().requires_grad_()
        y = model.blocks[0](given, model.order(8, None)[0])
        (y * weights[:, mine]).sum().backward()
        return given.grad

    share = 8 // dist.get_world_size()
    mine = slice(None) if how == "tp" else slice(share * dist.get_rank(), share * (dist.get_rank() + 1))
    want = gradient(reference, slice(None))[:, mine]
    return ((gradient(shared(copy.deepcopy(reference), how), mine) - want).norm() / want.norm()).item()


def all_reduce_beside_weight_gradients(how: str, algorithm: str) -> list[bool]:
    """For each product that makes weights' gradients: did what travels for the input's gradient arrive meanwhile?

    The product is held up until it has, for five seconds at most; if the messages only left afterwards, they never do.
    """
    home = tensor_parallel.linear if how == "tp" else sequence_parallel.convert
    call = "all_reduce" if how == "tp" else "reduce_scatter"
    handles, arrived = [], []
    send, product = getattr(collectives, call), home.weight_gradients

    def sent(*args: Any, **more: Any) -> Any:
        handle = send(*args, **more)
        if handle is not None:
            handles.append(handle)
        return handle

    def held_up(*args: Any) -> Any:
        until = time.monotonic() + 5
        while handles and not handles[-1].is_completed() and time.monotonic() < until:
            time.sleep(0.001)
        arrived.append(bool(handles) and handles.pop().is_completed())
        return product(*args)

    setattr(collectives, call, sent)
    home.weight_gradients = held_up
    try:
        layer_events("tiny_gpt", how, algorithm, 1)
    finally:
        setattr(collectives, call, send)
        home.weight_gradients = product
    return arrived


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
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def checkpointed(how: str, reentrant: bool, attention: str) -> float:
    """A layer with dropout everywhere, recomputed in backward: its gradients against those without."""
    from torch.utils.checkpoint import checkpoint

    grads = []
    for recompute in (False, True):
        model = transformer("tiny_gpt", layers=1, dropout=0.2, attention_dropout=0.3, attention=attention)
        block = shared(model, how).blocks[0]
        tensor_parallel.seed(7)
        length = 8 if how == "tp" else 8 // dist.get_world_size()
        x = torch.ones(2, length, 16, dtype=torch.float64, device=device.current(), requires_grad=True)
        y = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
        y.square().sum().backward()
        grads.append(torch.cat([x.grad.flatten(), *(p.grad.flatten() for p in block.parameters())]))
    return ((grads[0] - grads[1]).norm() / grads[0].norm()).item()


def fused_masks() -> torch.Tensor:
    """Which keys fused attention dropped: this rank's."""
    from labkit.model.attention import fused_attention

    model = transformer("tiny_gpt", layers=1, attention_dropout=0.5, attention="fused")
    dropout = tensor_parallel.parallelize(model).blocks[0].attention.dropout
    tensor_parallel.seed(0)
    here = device.current()
    q, v = torch.zeros(1, 2, 16, 16, device=here), torch.eye(16, device=here).expand(1, 2, 16, 16)
    return fused_attention(q, q, v, None, dropout) != 0


def under_autocast(how: str) -> tuple[torch.dtype, float]:
    """A step with autocast round the forward alone: the type of the weights' gradients, and how far they are off."""
    reference, batch = transformer("tiny_gpt", torch.float32), tokens()
    model = shared(copy.deepcopy(reference), how)
    here = device.current().type
    with torch.autocast(here, dtype=torch.bfloat16):
        ours, _ = tensor_parallel.loss(model(batch[:, :-1]), batch[:, 1:], VOCAB)
        theirs, _ = whole_loss(reference(batch[:, :-1]), batch[:, 1:])
    ours.backward()
    theirs.backward()
    sequence_parallel.reduce_partial_gradients(model)
    expected = dict(reference.named_parameters())
    off = 0.0
    for name, param in model.named_parameters():
        want = expected[name].grad
        have = whole_gradient(param, name)[: want.shape[0]]
        off = max(off, ((have - want).norm() / want.norm()).item())
    return next(model.parameters()).grad.dtype, off


def seed_of_this_run() -> None:
    tensor_parallel.seed(5)


def draws() -> str:
    try:
        with tensor_parallel.streams.use("tensor_parallel"):
            torch.rand(1)
    except ValueError as error:
        return str(error)
    return ""


def lost_marks() -> list[str]:
    """What a copy of a model says, and what is no parameter."""
    model = sequence_parallel.parallelize(transformer("tiny_gpt"))
    said = []
    for given in (copy.deepcopy(model), model.named_parameters(), model.state_dict(), model.norm.weight, [1]):
        try:
            sequence_parallel.reduce_partial_gradients(given)
            said.append("")
        except (RuntimeError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def bad_input() -> dict[str, str]:
    """Each call on all ranks; rank 2 of 3 is no member of the group."""
    group, me = dist.new_group([0, 1]), dist.get_rank()
    logits, target, x = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4)
    entropy = tensor_parallel.vocab_parallel_cross_entropy
    calls = {
        "a stranger's model": lambda: me < 2 or tensor_parallel.parallelize(transformer("tiny_gpt"), group),
        "a stranger's layer": lambda: me < 2 or tensor_parallel.ColumnParallelLinear(4, 6, group=group),
        "a stranger's f": lambda: me < 2 or tensor_parallel.copy_to_group(x, group),
        "a stranger's seed": lambda: me < 2 or tensor_parallel.seed(1, group),
        "group": lambda: tensor_parallel.RowParallelLinear(6, 3, group="tp"),
        "seed": lambda: tensor_parallel.seed("x"),
        "f": lambda: tensor_parallel.copy_to_group([1.0]),
        "layer": lambda: tensor_parallel.ColumnParallelLinear.of(nn.Conv1d(1, 1, 1)),
        "padding": lambda: tensor_parallel.VocabParallelEmbedding.of(nn.Embedding(9, 3, padding_idx=0)),
        "tokens": lambda: tensor_parallel.VocabParallelEmbedding(9, 3)(x),
        "logits": lambda: entropy([1.0], target),
        "vocab": lambda: entropy(logits, target, vocab=9.5),
        "smoothing": lambda: entropy(logits, target, label_smoothing="a"),
        "sequence": lambda: sequence_parallel.scatter_to_sequence(torch.zeros(3)),
        "states": lambda: tensor_parallel.streams.load_state_dict({}),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = ""
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said
