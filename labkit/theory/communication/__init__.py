"""What collective operations send, and how long that takes: bytes and seconds from plain numbers.

Three views of the same algorithms, which tests hold against each other:

- `plan`: every message, to the byte, as `labkit.collectives` sends it.
- `cost`, `time`, `sent_per_rank`: the closed formulas of the literature.
- `paced_time`: a plan played on ranks with one port each, some of which may be slow or late.

And between measurements and formulas: `bus_bandwidth`, `fit`, `crossover`.

>>> plan("all_reduce", "ring", ranks=4, elements=2 * 2**20, itemsize=4).sent(0) / 2**20
12.0
>>> sent_per_rank("all_reduce", "ring", ranks=4, nbytes=8 * 2**20)[0] / 2**20
12.0
"""

from labkit.theory.communication.bandwidth import algorithm_bandwidth, bus_bandwidth, bus_factor
from labkit.theory.communication.fitting import Fit, fit, per_message
from labkit.theory.communication.formulas import Cost, cost, crossover, per_rank_limit, sent_per_rank, time
from labkit.theory.communication.given import ALGORITHMS
from labkit.theory.communication.planning import Load, Message, Plan, plan
from labkit.theory.communication.ports import Straggler, paced_time, straggler

__all__ = [
    "ALGORITHMS", "Cost", "Fit", "Load", "Message", "Plan", "Straggler", "algorithm_bandwidth", "bus_bandwidth",
    "bus_factor", "cost", "crossover", "fit", "paced_time", "per_message", "per_rank_limit", "plan", "sent_per_rank",
    "straggler", "time",
]  # fmt: skip
