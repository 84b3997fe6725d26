"""labkit's tensor and sequence parallelism beside torch's: layers forward and backward, in alternating pairs.

torch's side is `parallelize_module` with the plan that production code uses: the input of attention and MLP is prepared
once, not once a matrix; under sequence parallelism norms are `SequenceParallel`, and DTensor reduces their gradients.
"""

from __future__ import annotations

from typing import Any

import labkit
from labkit.bench.measure import PAIRS, Spread, line, seconds

#: Ranks, what is split, the bar. torch keeps the gathered input for backward, as "keep" does.
ROWS = (
    (2, "TP", ""), (4, "TP", "≤ 0.7"), (2, "TP + SP, keep", ""), (4, "TP + SP, keep", "≤ 0.7"),
    (4, "TP + SP, gather again", "≤ 0.7"),
)  # fmt: skip
LENGTH = 128


def main() -> None:
    print(f"time of forward and backward ÷ torch's parallelize_module, {PAIRS} alternating pairs: median (quartiles)")
    for ranks, what, bar in ROWS:
        pairs, off = labkit.run(in_pairs, what, ranks=ranks, timeout=300).values[0]
        ratio = Spread.of([ours / theirs for ours, theirs in pairs])
        theirs = Spread.of([1e3 * theirs for _, theirs in pairs])
        line(f"{what}, {ranks} ranks, 4 Llama layers", f"{ratio}   torch {theirs.median:.3g} ms", bar)
        line("  output and gradients apart by, relative", f"{off:.1g}")


def in_pairs(what: str, steps: int = 2) -> tuple[list[tuple[float, float]], float]:
    """On a rank: (seconds of labkit's, of torch's) for some steps, and how far apart their results are."""
    import torch
    import torch.distributed as dist

    from labkit import sequence_parallel, tensor_parallel
    from labkit.model import Transformer, preset

    sequence = "SP" in what
    config = preset("tiny_llama", hidden=256, heads=8, kv_heads=8, layers=4, positions=LENGTH, attention="fused")
    models: dict[str, Any] = {}
    for name in ("ours", "theirs"):
        torch.manual_seed(0)
        models[name] = Transformer(config)
    angles, _ = models["ours"].order(LENGTH, None)
    if sequence:
        sequence_parallel.parallelize(models["ours"], keep_gathered="keep" in what)
    else:
        tensor_parallel.parallelize(models["ours"])
    _by_torch(models["theirs"], sequence)
    torch.manual_seed(1)
    x = torch.randn(4, LENGTH, config.hidden)
    if sequence:
        x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()

    def step(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        given = x.clone().requires_grad_()
        y = given
        for block in models[name].blocks:
            y = block(y, angles)
        y.square().mean().backward()
        if sequence and name == "ours":
            sequence_parallel.reduce_partial_gradients(models[name])
        assert given.grad is not None
        return y.detach(), given.grad

    def timed(name: str) -> float:
        dist.barrier()
        return seconds(lambda: [step(name) for _ in range(steps)])

    off = max(((a - b).norm() / b.norm()).item() for a, b in zip(step("ours"), step("theirs"), strict=True))
    pairs = []
    for number in range(PAIRS):
        took = {name: timed(name) for name in (("ours", "theirs") if number % 2 else ("theirs", "ours"))}
        pairs.append((took["ours"], took["theirs"]))
    return pairs, off


def _by_torch(model: Any, sequence: bool) -> None:
    """Share the layers by DTensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    from labkit.train import Mesh

    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value",
                                                                  "mlp.gate", "mlp.up")}  # fmt: skip
    plan |= {name: RowwiseParallel(output_layouts=between) for name in ("attention.output", "mlp.down")}
    plan["attention"] = PrepareModuleInput(
        input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan["mlp"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    mesh = Mesh(tp=dist.get_world_size()).device_mesh
    assert mesh is not None
    for block in model.blocks:
        size = block.mlp_norm.weight.numel()
        block.attention_norm, block.mlp_norm = (torch.nn.RMSNorm(size, eps=1e-5) for _ in range(2))
        norms = {name: SequenceParallel(use_local_output=True) for name in ("attention_norm", "mlp_norm")}
        parallelize_module(block, mesh["tp"], plan | norms if sequence else plan)
