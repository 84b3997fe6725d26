"""What ZeRO's stages hold, what they send, and how long a step of stage 3 takes.

- `passes`, `sent`: how often Ψ moves in a step (2, 2, 3 times, k + 1, 3k), and the bytes that a rank sends.
- `padding`: what is sent and held besides, since N has to divide what is cut into N shards.
- `held`: bytes between steps and at the worst moment; buckets, gathered units, padding and step counters named.
- `step_time`: a step of stage 3, gathers before or beside the computation.

>>> [passes(stage, micro_batches=8).total for stage in (1, 2, 3)]
[2, 9, 24]
"""

from labkit.theory.zero.holding import Held, held
from labkit.theory.zero.overlap import Step, Timed, Unit, step_time
from labkit.theory.zero.volume import padding, passes, sent

__all__ = ["Held", "Step", "Timed", "Unit", "held", "padding", "passes", "sent", "step_time"]
