"""Random numbers for ranks that share a layer: the same where data is the same, different where it is split.

Dropout on what all ranks hold must drop the same elements on all of them; dropout on what is split must not, or heads
of different ranks would drop in step. So a rank draws from two streams: torch's own, seeded alike in the
tensor-parallel group, and one of its own.

Source: Shoeybi et al. 2019, "Megatron-LM", appendix B.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from labkit import device

Group = dist.ProcessGroup | None


class Streams:
    """Named random streams beside torch's own, each with a state of its own.

    >>> streams = Streams()
    >>> streams.add("split", seed=1)
    >>> before = torch.get_rng_state()
    >>> with streams.use("split"):
    ...     a = torch.rand(2)
    >>> torch.equal(before, torch.get_rng_state())       # torch's own stream has not moved
    True
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """A new stream, or the old one of that name from a new start."""
        own = device.rng_state()
        torch.manual_seed(seed)
        self._states[name] = device.rng_state()
        device.set_rng_state(own)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Inside, torch draws from this stream.

        Raises:
            ValueError: There is none of that name.
        """
        if name not in self._states:
            raise ValueError(
                f"there is no random stream {name!r}: expected one of {sorted(self._states)}; call seed(…) first"
            )
        own = device.rng_state()
        device.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = device.rng_state()
            device.set_rng_state(own)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Where each stream stands, and torch's own, to be saved with a model."""
        return {"": device.rng_state(), **self._states}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Go on from what `state_dict` gave."""
        device.set_rng_state(states[""])
        self._states = {name: state for name, state in states.items() if name}


#: This rank's streams.
streams = Streams()
SPLIT = "tensor_parallel"


def seed(number: int, group: Group = None, data_group: Group | str = "none") -> None:
    """Seed torch's own stream alike in the tensor-parallel group, and the stream of what is split apart.

    Args:
        number: The same on all ranks.
        group: The tensor-parallel group; ``None`` is the world.
        data_group: The data-parallel group, whose ranks draw apart in both streams; ``"none"``: there is none.
    """
    replica = 0 if data_group == "none" else dist.get_rank(data_group)  # type: ignore[arg-type]
    torch.manual_seed(number + 1000003 * replica)
    streams.add(SPLIT, number + 1000003 * replica + 7919 * (1 + dist.get_rank(group)))


class SplitDropout(torch.nn.Module):
    """A dropout on what is split: it draws from this rank's own stream (`seed`)."""

    def __init__(self, dropout: torch.nn.Module) -> None:
        super().__init__()
        self.dropout = dropout
        self.p: float = dropout.p  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        with streams.use(SPLIT):
            return self.dropout(x)
