"""Random numbers for ranks that share a layer: the same where data is the same, different where it is split.

Dropout on what all ranks hold must drop the same elements on all of them; dropout on what is split must not, or heads
of different ranks would drop in step. So a rank draws from two streams: torch's own, seeded alike in the
tensor-parallel group, and one of its own.

Source: Shoeybi et al. 2019, "Megatron-LM", appendix B.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from labkit import device
from labkit.collectives import check

Group = dist.ProcessGroup | None
_PRIME = 0x9E3779B97F4A7C15  # spreads small seeds over 64 bits


class Streams:
    """Named random streams beside torch's own.

    What a stream gives follows from its seed and from where torch's own stream stands (on the CPU), which each use
    moves on by one number, on all ranks alike. So whoever puts torch's stream back, as activation checkpointing does
    before it recomputes, puts these back too. They are those of one run.

    >>> streams = Streams()
    >>> streams.add("split", seed=1)
    >>> start = torch.get_rng_state()
    >>> with streams.use("split"):
    ...     a = torch.rand(2)
    >>> torch.set_rng_state(start) and None
    >>> with streams.use("split"):
    ...     torch.equal(a, torch.rand(2))
    True
    """

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}
        self._run = device.runs

    def add(self, name: str, seed: int) -> None:
        """A new stream, or the old one of that name with another seed."""
        if self._run != device.runs:
            self._seeds, self._run = {}, device.runs
        self._seeds[name] = seed

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Inside, torch draws from this stream.

        Raises:
            ValueError: There is none of that name in this run.
        """
        known = self._seeds if self._run == device.runs else {}
        if name not in known:
            raise ValueError(f"there is no random stream {name!r}: expected one of {sorted(known)}; call seed(…) first")
        drawn = int(torch.randint(2**62, (), device="cpu"))
        own = device.rng_state()
        torch.manual_seed((drawn + _PRIME * (1 + known[name])) % 2**63)
        try:
            yield
        finally:
            device.set_rng_state(own)

    def state_dict(self) -> dict[str, Any]:
        """Seeds, and where torch's own stream stands, to be saved with a model."""
        return {"torch": device.rng_state(), "seeds": dict(self._seeds)}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            ValueError: It is something else.
        """
        if not isinstance(states, dict) or states.keys() != {"torch", "seeds"}:
            said = sorted(states) if isinstance(states, dict) else type(states).__name__
            raise ValueError(f"states is {said}: expected what state_dict gave")
        device.set_rng_state(states["torch"])
        self._seeds, self._run = dict(states["seeds"]), device.runs


#: This rank's streams.
streams = Streams()
SPLIT = "tensor_parallel"


def seed(number: int, group: Group = None, data_group: Group | str = "none") -> None:
    """Seed torch's own stream alike in the tensor-parallel group, and the stream of what is split apart.

    Args:
        number: The same on all ranks.
        group: The tensor-parallel group; ``None`` is the world.
        data_group: The data-parallel group, whose ranks draw apart in both streams; ``"none"``: there is none.

    Raises:
        TypeError, ValueError: `number` is no whole number from 0; this rank is no member of a group.
    """
    check.whole_number("number", number, least=0)
    check.member(group)
    replica = 0 if data_group == "none" else dist.get_rank(data_group)  # type: ignore[arg-type]
    torch.manual_seed(number + 1000003 * replica)
    streams.add(SPLIT, number + 1000003 * replica + 7919 * (1 + dist.get_rank(group)))


class SplitDropout(torch.nn.Module):
    """A dropout on what is split: it draws from this rank's own stream (`seed`)."""

    def __init__(self, dropout: torch.nn.Module) -> None:
        super().__init__()
        self.dropout = dropout

    @property
    def p(self) -> Any:
        """Of the dropout inside."""
        return self.dropout.p

    @p.setter
    def p(self, value: float) -> None:
        self.dropout.p = value  # type: ignore[assignment]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, torch draws what this dropout draws."""
        with streams.use(SPLIT):
            yield

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        with self.drawing():
            return self.dropout(x)
