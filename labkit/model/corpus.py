"""Something to read that is there wherever Python is: the source of its own standard library, byte by byte.

A byte is a token (V = 256). The text is cut into windows; every epoch shuffles them in an order that depends on nothing
but the seed and the epoch, and each step deals the next windows to the ranks.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from labkit.model.config import one_of

SPLITS = ("train", "valid")


class Corpus:
    """Batches of text for one of several ranks.

    A step takes ranks·batch windows: the first `batch` go to rank 0, the next to rank 1, and so on. So no window goes
    to two ranks, and all ranks' batches, one below the other, are the batch of a single rank that takes ranks·batch.
    All ranks take equally many steps; windows that do not fill the last step are left out of that epoch
    (`left_over` says how many), and the next epoch leaves out others.

    Args:
        split: ``"train"``, or ``"valid"``: every tenth file.
        rank: Whose windows.
        ranks: Among how many they are dealt.
        batch: b, windows a rank and step.
        length: s, tokens a window.
        seed: Of the order.
        device: Where the batches go; default: torch's default device.

    Raises:
        TypeError: A size is no whole number.
        ValueError: An unknown split, no such rank, or less text than one step takes.

    Example:
        >>> corpus = Corpus(batch=2, length=16)
        >>> tokens, targets = corpus.next()
        >>> tokens.shape, bool((tokens[:, 1:] == targets[:, :-1]).all())
        (torch.Size([2, 16]), True)
    """

    def __init__(
        self, split: str = "train", rank: int = 0, ranks: int = 1, batch: int = 8, length: int = 64, seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        one_of("split", split, SPLITS)
        _whole_numbers(0, rank=rank, seed=seed)
        _whole_numbers(1, ranks=ranks, batch=batch, length=length)
        if rank >= ranks:
            raise ValueError(f"rank={rank}: expected 0 … {ranks - 1}, since ranks={ranks}")
        self.split, self.rank, self.ranks, self.batch, self.length, self.seed = split, rank, ranks, batch, length, seed
        self.device = device
        self.text, self.crc32 = _text(split)
        if len(self.text) <= ranks * batch * length:
            raise ValueError(
                f"ranks={ranks} · batch={batch} windows of length={length} are {ranks * batch * length:,} bytes: "
                f"expected less than the {len(self.text):,} of the {split} split"
            )
        # (windows, length + 1), a view: the last target of a window is the first token of the next
        self._windows = self.text.unfold(0, length + 1, length)
        self.epoch = self.taken = 0
        self._order = self._shuffled()

    @property
    def windows(self) -> int:
        """Windows of the split, for all ranks."""
        return len(self._windows)

    @property
    def steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return self.windows // (self.ranks * self.batch)

    @property
    def left_over(self) -> int:
        """Windows of an epoch that no rank reads, since they fill no step."""
        return self.windows % (self.ranks * self.batch)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next step's tokens and targets, (batch, length) int64 each; after an epoch comes another."""
        if self._at_the_end():
            self._open(self.epoch + 1, 0)
        mine = self._order[self.taken + self.rank * self.batch :][: self.batch]  # (b,)
        self.taken += self.ranks * self.batch
        read = self._windows[mine].to(torch.int64).to(self._device())  # (b, s + 1)
        return read[:, :-1].contiguous(), read[:, 1:].contiguous()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is left of this epoch, or if nothing is, the whole of the next."""
        yield self.next()
        while not self._at_the_end():
            yield self.next()

    def state_dict(self) -> dict[str, Any]:
        """The position, in windows: it can be continued with another `batch`, or on another number of ranks."""
        return {"epoch": self.epoch, "taken": self.taken, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was called.

        Raises:
            ValueError: It was saved with another split, length or seed, or under a Python with another library.
        """
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise ValueError(
                    f"the saved position has {name}={state[name]!r}, this corpus {mine!r}: expected the same, or the "
                    "windows are others"
                )
        self._open(state["epoch"], state["taken"])

    def __repr__(self) -> str:
        return (
            f"Corpus({self.split}, rank {self.rank} of {self.ranks}: {self.steps:,} steps of {self.batch} windows of "
            f"{self.length} bytes; {self.left_over} of {self.windows:,} windows left over)"
        )

    def _identity(self) -> dict[str, Any]:
        return {"split": self.split, "length": self.length, "seed": self.seed, "crc32": self.crc32}

    def _at_the_end(self) -> bool:
        return self.taken + self.ranks * self.batch > self.windows

    def _open(self, epoch: int, taken: int) -> None:
        self.epoch, self.taken = epoch, taken
        self._order = self._shuffled()

    def _shuffled(self) -> torch.Tensor:
        """All windows in this epoch's order, by a generator of its own: torch's stays as it is."""
        generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{self.seed} {self.epoch}".encode()))
        return torch.randperm(self.windows, generator=generator, device="cpu")

    def _device(self) -> torch.device:
        return torch.get_default_device() if self.device is None else torch.device(self.device)


@cache
def _text(split: str) -> tuple[torch.Tensor, int]:
    """All bytes of a split, one file after the other, uint8 on the CPU; and their checksum.

    Files directly in the library's folder, by name, without what says how this Python was built.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    if len(files) < 10:
        raise RuntimeError(f"Python's own source is not in {folder}: expected its *.py files there, found {len(files)}")
    chosen = [path for number, path in enumerate(files) if (number % 10 == 9) == (split == "valid")]
    text = b"".join(path.read_bytes() for path in chosen)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), zlib.crc32(text)


def _whole_numbers(least: int, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}: expected a whole number")
        if value < least:
            raise ValueError(f"{name}={value}: expected at least {least}")
