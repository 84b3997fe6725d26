"""What autograd keeps for backward, seen by its saved-tensor hooks.

A hook that is asked to pack a tensor hands back a `Saved`: autograd holds it where it would have held the tensor, and
lets it go when it would have let the tensor go. Its birth and its death are what the ledger counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from labkit.memory.categories import storages
from labkit.memory.ledger import Entry, Ledger

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Saved:
    """What autograd holds in place of a saved tensor.

    Attributes:
        kept: The tensor (a detached one, which shares its version counter), or what the hooks below made of it.
        version: The tensor's when it was saved.
        layer: The submodule that saved it, so that its backward is told from others'.
    """

    __slots__ = ("entries", "kept", "layer", "ledger", "version")

    def __init__(self, kept: Any, version: int, entries: Iterable[Entry], ledger: Ledger) -> None:
        self.kept = kept
        self.version = version
        self.entries = entries
        self.ledger = ledger
        self.layer = ledger.layer

    def __del__(self) -> None:
        for entry in self.entries:
            self.ledger.release(entry)


class SavedTensors:
    """Hooks for one ledger. Only the topmost hooks of a thread are called, so these call those they cover."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        below = torch._C._autograd._top_saved_tensors_default_hooks(False)
        torch._C._autograd._push_saved_tensors_default_hooks(*(self._over(*below) if below else (self._pack, _unpack)))

    def __exit__(self, *_: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: torch.Tensor) -> Saved:
        ledger = self._ledger
        if tensor.requires_grad:  # the result of an operation, which must not hold the graph that is to hold it
            tensor = tensor.detach()
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:  # nearly always: be quick
            return Saved(tensor, tensor._version, (ledger.save(tensor.untyped_storage()),), ledger)
        return Saved(tensor, tensor._version, [ledger.save(s) for s in storages(tensor)], ledger)

    def _over(self, pack_below: Callable[[torch.Tensor], Any], unpack_below: Callable[[Any], torch.Tensor]) -> Hooks:
        """Hooks that leave to those below what is kept: another meter, a checkpoint (nothing), an offload (a copy)."""
        ledger = self._ledger

        def pack(tensor: torch.Tensor) -> Saved:
            kept = pack_below(tensor)
            return Saved(kept, 0, [ledger.save(s) for t in _tensors(kept) for s in storages(t)], ledger)

        def unpack(saved: Saved) -> torch.Tensor:
            ledger.layer = saved.layer
            return unpack_below(saved.kept)

        return pack, unpack


def _unpack(saved: Saved) -> torch.Tensor:
    """The tensor again, if nobody wrote to it: with hooks, autograd leaves this check to them."""
    saved.ledger.layer = saved.layer
    tensor = saved.kept
    if tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
            f"{saved.version} instead. Hint: enable anomaly detection to find the operation that failed to compute "
            "its gradient, with torch.autograd.set_detect_anomaly(True)."
        )
    return tensor


def _tensors(kept: Any) -> list[torch.Tensor]:
    """The tensors in what other hooks packed."""
    if isinstance(kept, torch.Tensor):
        return [kept]
    if isinstance(kept, Saved):
        return _tensors(kept.kept)
    if isinstance(kept, (tuple, list)):
        return [t for part in kept for t in _tensors(part)]
    return []
