"""What the memory meter costs: a training step with it over the same step without, in alternating pairs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from labkit.bench.measure import PAIRS, Spread, line, seconds

#: Model, mode, changes to the tiny GPT, (sequences, tokens) of a batch, options of AdamW, steps a measurement, the bar.
#: The full mode's cost goes with the number of operations, 1,185 a step; AdamW on a CPU has 10 for each parameter, as
#: on a GPU (foreach) 10 for all, fused 1.
LARGER = {"hidden": 256, "vocab": 768}
ROWS: tuple[tuple[str, str, dict[str, Any], tuple[int, int], dict[str, Any], int, str], ...] = (
    ("tiny model, light mode", "light", {}, (8, 128), {}, 5, "≤ 1.05"),
    ("3.4 M parameters, light mode", "light", LARGER, (4, 128), {}, 3, ""),
    ("3.4 M parameters, full mode", "full", LARGER, (4, 128), {}, 3, "≤ 1.15"),
    ("the same, AdamW(foreach=True)", "full", LARGER, (4, 128), {"foreach": True}, 3, ""),
    ("the same, AdamW(fused=True)", "full", LARGER, (4, 128), {"fused": True}, 3, ""),
)


def main() -> None:
    import torch

    torch.set_num_threads(1)  # as in a rank among several; on a busy host the threads would wait for each other
    print(f"training step with MemoryMeter ÷ without, AdamW, {PAIRS} alternating pairs: median (quartiles)")
    for what, mode, changes, batch, options, steps, bar in ROWS:
        pairs = in_pairs(mode, changes, batch, options, steps)
        ratio = Spread.of([metered / bare for metered, bare in pairs])
        bare = Spread.of([1e3 * bare / steps for _, bare in pairs])
        line(what, f"{ratio}   step {bare.median:.3g} ms", bar)


def in_pairs(
    mode: str, changes: dict[str, Any], batch: tuple[int, int], options: dict[str, Any], steps: int
) -> list[tuple[float, float]]:
    """(seconds of `steps` steps with a meter, without one), a pair at a time."""
    import torch

    from labkit.memory import MemoryMeter
    from labkit.model import Transformer, loss, preset

    torch.manual_seed(0)
    config = preset("tiny_gpt", **changes)
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    tokens = torch.randint(config.vocab, batch)

    def train(meter: MemoryMeter | None) -> None:
        def phase(name: str) -> Any:
            return nullcontext() if meter is None else meter.phase(name)

        for _ in range(steps):
            with phase("forward"):
                total, count = loss(model(tokens), tokens)
            with phase("backward"):
                (total / count).backward()
            with phase("step"):
                optimizer.step()
                optimizer.zero_grad()

    def metered() -> float:
        with MemoryMeter(model, optimizer=optimizer, mode=mode) as meter:
            return seconds(lambda: train(meter))

    def bare() -> float:
        return seconds(lambda: train(None))

    metered(), bare()
    pairs = []
    for number in range(PAIRS):
        first, second = (metered, bare) if number % 2 else (bare, metered)
        took = {first: first(), second: second()}
        pairs.append((took[metered], took[bare]))
    return pairs
