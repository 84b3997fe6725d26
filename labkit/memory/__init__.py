"""Who holds which bytes: parameters, gradients, optimizer state, activations kept for backward, and the rest.

    from labkit.memory import MemoryMeter

    meter = MemoryMeter(model, optimizer=optimizer)
    with meter:
        with meter.phase("forward"):
            loss = model(tokens).sum()
        with meter.phase("backward"):
            loss.backward()
        with meter.phase("step"):
            optimizer.step()
    meter.held(), meter.peak, meter.peak_at

Every byte is counted where it lies: in a *storage*, the memory that a tensor and its views share. Read `meter` first,
then `ledger` (storages and their categories), `holders` (who claims a storage), `saved` (what autograd keeps) and
`made` (every storage that an operation makes).
"""

from labkit.memory.categories import CATEGORIES
from labkit.memory.ledger import Point
from labkit.memory.meter import Holding, MemoryMeter

__all__ = ["CATEGORIES", "Holding", "MemoryMeter", "Point"]
