"""What the tests of `show.layer` run on ranks: one step of a small model, with one layer watched."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit import collectives, sequence_parallel, tensor_parallel
from labkit.model import Transformer, preset
from labkit.trace import recorder, span
from labkit.train import watch

VOCAB, BATCH, LENGTH, HIDDEN = 37, 2, 8, 16


def model_of(name: str = "tiny_gpt", seed: int = 0, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    size = {"layers": 2, "hidden": HIDDEN, "heads": 4, "vocab": VOCAB, "positions": 16, **changes}
    return Transformer(preset(name, **size))


def batch() -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def backward(model: Transformer) -> None:
    tokens = batch()
    total, _ = tensor_parallel.loss(model(tokens[:, :-1]), tokens[:, 1:], VOCAB)
    total.backward()


def shared(how: str, name: str = "tiny_gpt", seed: int = 0, **changes: Any) -> Transformer:
    model = model_of(name, seed, **changes)
    if how == "tp":
        return tensor_parallel.parallelize(model)
    return sequence_parallel.parallelize(model, keep_gathered=how == "sp-keep")


def one_step(how: str = "tp", name: str = "tiny_gpt", algorithm: str = "ring", layer: int = 0, **changes: Any) -> dict:
    model = shared(how, name, **changes)
    with collectives.using(algorithm), watch(model.blocks[layer]) as seen:
        backward(model)
    return seen


def wrong_seed() -> dict:
    """Every rank draws its own parameters."""
    model = shared("tp", seed=dist.get_rank())
    with watch(model.blocks[0]) as seen:
        backward(model)
    return seen


def without_f() -> dict:
    """The layers' inputs are used as they are: the ranks' gradients of them are never added up."""

    class Bare(tensor_parallel.convert.Region):
        def split(self, x: torch.Tensor, layers: Any) -> tuple[torch.Tensor, ...]:
            return tuple(F.linear(x, *layer.part()) for layer in layers)

    model = shared("tp")
    block: Any = model.blocks[1]
    block.attention.region = block.mlp.region = Bare(None)
    with watch(block) as seen:
        backward(model)
    return seen


def by_hand() -> dict:
    """g made of messages, outside any collective: rank 0 adds up and sends back."""

    class Messages(tensor_parallel.convert.Region):
        def join(self, x: torch.Tensor) -> torch.Tensor:
            total, me = x.detach().clone(), dist.get_rank()
            other = torch.empty_like(total)
            if me == 0:
                dist.recv(other, 1)
                total += other
                dist.send(total, 1)
            else:
                dist.send(total, 0)
                dist.recv(total, 0)
            return x + (total - x.detach())

    model = shared("tp")
    block: Any = model.blocks[0]
    block.attention.output.region = block.attention.region = Messages(None)
    with watch(block) as seen:
        backward(model)
    return seen


def two_halves() -> dict:
    """g made of two collectives, named as one."""

    class Halves(tensor_parallel.convert.Region):
        def join(self, x: torch.Tensor) -> torch.Tensor:
            total = x.detach().flatten()
            part = total.new_empty(total.numel() // dist.get_world_size())
            with span("all_reduce by hand", nbytes=total.nbytes):
                collectives.reduce_scatter(part, total)
                collectives.all_gather(total, part)
            return x + (total.view_as(x) - x.detach())

    model = shared("tp")
    block: Any = model.blocks[0]
    block.attention.output.region = Halves(None)
    with watch(block) as seen:
        backward(model)
    return seen


def twice() -> str:
    model = shared("tp")
    try:
        with watch(model.blocks[0]):
            backward(model)
            backward(model)
    except RuntimeError as error:
        backward(model)  # nothing is left of the watching
        return str(error)
    return ""


def leaves_no_trace() -> bool:
    """A watched step gives the same gradients, and an unwatched one after it notes nothing."""
    plain, watched = shared("tp"), shared("tp")
    holders = [m for m in watched.blocks[0].modules() if hasattr(m, "region")]
    regions = [m.region for m in holders]
    backward(plain)
    with watch(watched.blocks[0]) as seen:
        backward(watched)
    noted = len(seen["stages"])
    same = all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    backward(watched)
    back = [m.region for m in holders] == regions
    return same and back and len(seen["stages"]) == noted


def norm_digest() -> tuple[str, str]:
    """Digests of what enters the first layer and of its norm, by one process that knows no ranks."""
    model = model_of()
    x = model.embed(batch()[:, :-1])
    block: Any = model.blocks[0]
    bits = [t.detach().numpy().tobytes() for t in (x, block.attention_norm(x))]
    return blake2b(bits[0], digest_size=8).hexdigest(), blake2b(bits[1], digest_size=8).hexdigest()


def refusals() -> list[str]:
    found = []
    for thing in (torch.nn.Linear(1, 1), model_of().blocks[0]):
        try:
            with watch(thing):  # type: ignore[arg-type]
                pass
        except TypeError as error:
            found.append(str(error))
    model = shared("tp")
    recorder.on = False
    try:
        with watch(model.blocks[0]):  # type: ignore[arg-type]
            pass
    except RuntimeError as error:
        found.append(str(error))
    recorder.on = True
    return found
