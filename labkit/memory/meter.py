"""The meter that a learner holds: what is held now, the peak and where it was, the time line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from labkit import device
from labkit.memory.categories import CATEGORIES, GRADIENTS, MASTER, by_name, storages
from labkit.memory.holders import Holders, Source
from labkit.memory.ledger import Ledger, Point
from labkit.memory.made import MadeStorages
from labkit.memory.saved import SavedTensors

MODES = ("light", "full")


@dataclass(frozen=True, slots=True)
class Holding:
    """One storage and who lives in it.

    Attributes:
        category: One of `CATEGORIES`.
        nbytes: Bytes of the whole storage.
        padding: Bytes of it in which none of the tensors lies, as at the end of a bucket.
        names: Whose it is: ``["0.weight"]``; several for tied weights and buckets.
    """

    category: str
    nbytes: int
    padding: int
    names: list[str]


class MemoryMeter:
    """Who holds which bytes of a training step, on the CPU and on CUDA alike.

    Bytes are those of *storages*, each counted once: views and tied weights share one, and a bucket in which gradients
    are views is counted whole, padding included, as gradients. These are *live* bytes. What CUDA's caching allocator
    holds is something else: `allocator`.

    The **light** mode knows modules, optimizers, tracked tensors, and what autograd keeps for backward (saved-tensor
    hooks). It does not see temporaries: ``"other"`` is 0. The **full** mode also sees every storage that an operation
    makes (a dispatch mode), so that its peak is that of all tensors; it costs some microseconds an operation.

    Neither sees memory that a kernel uses inside one operation, or what other threads make. The light mode does not see
    tensors that a function keeps as attributes of ``ctx``, nor what hooks set inside the meter keep: during the
    backward of ``torch.utils.checkpoint(use_reentrant=False)`` the recomputed activations are ``"other"``, in the
    full mode only. Model, optimizers and tensors are referred to weakly: a meter keeps nothing alive.

    Args:
        *modules: Their parameters, gradients and buffers are counted.
        optimizer: An optimizer, or several: objects with ``param_groups`` and ``state`` as in torch. Parameters that no
            module has are master copies.
        master: Further master copies: tensors, or a mapping to tensors.
        mode: ``"light"`` or ``"full"``.

    Raises:
        TypeError: Something that is no module, or no optimizer.
        ValueError: An unknown mode.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.ReLU())
        >>> meter = MemoryMeter(model)
        >>> with meter, meter.phase("forward"):
        ...     loss = model(torch.ones(4, 8)).sum()
        >>> meter.held()["parameters"], meter.held()["activations"]  # 16·8; Linear keeps (4, 8), ReLU (4, 16)
        (512, 384)
        >>> loss.backward()
        >>> meter.held()["gradients"], meter.held()["activations"]
        (512, 0)

    Source: the categories are those of Rajbhandari et al., "ZeRO" (2020), section 3.
    """

    def __init__(
        self,
        *modules: torch.nn.Module,
        optimizer: Any = None,
        master: Source | None = None,
        mode: str = "light",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        for module in modules:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(
                    f"{_kind(module)}: expected a torch.nn.Module; optimizers go to optimizer=, tensors to track()"
                )
        self.mode = mode
        self._holders = Holders(modules, _optimizers(optimizer))
        self._ledger = Ledger()
        self._states = 0
        self._entered = 0
        self._exits = ExitStack()
        if master is not None:
            self._holders.track(MASTER, _tracked(master))

    # Measuring

    def __enter__(self) -> MemoryMeter:
        if self._entered == 0:
            self._count()
            self._ledger.begin(self._ledger.phase)
            with ExitStack() as exits:
                self._watch_optimizers(exits)
                self._watch_gradients(exits)
                if self.mode == "full":
                    self._watch_layers(exits)
                    exits.enter_context(MadeStorages(self._ledger))
                exits.enter_context(SavedTensors(self._ledger))
                self._exits = exits.pop_all()
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered == 0:
            self._exits.close()
            self._count()
            self._ledger.mark(rising=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside: ``"forward"``, ``"backward"``, ``"step"``. The end of a ``"step"`` is the step's.

        >>> meter = MemoryMeter()
        >>> with meter.phase("step"):
        ...     pass
        >>> [(step, phase) for step, phase, held in meter.samples]
        [(0, 'step'), (1, None)]
        """
        before = self._ledger.phase
        self._ledger.begin(name)
        try:
            yield
        finally:
            self._count_if_changed()
            self._ledger.mark(rising=True)
            if name == "step":
                self._ledger.step += 1
            self._ledger.begin(before)

    def track(self, category: str, source: Source) -> None:
        """Count these tensors under `category` from now on: buckets, gathered shards, ``main_grad``.

        Gradients come before, parameters after what is tracked: a bucket tracked as a buffer is one until gradients
        are views into it, and a gathered shard is one though parameters are views into it.

        Args:
            category: One of `CATEGORIES`, such as ``"buffers"``.
            source: A tensor, several, or a function that returns them and is asked at each count (so that it may
                return other tensors each time). Tensors are referred to weakly, a function is kept.

        Raises:
            ValueError: An unknown category.
            TypeError: `source` holds no tensors.

        Example:
            >>> meter, bucket = MemoryMeter(), torch.zeros(1000)
            >>> meter.track("buffers", lambda: [bucket[:10], bucket[10:]])
            >>> meter.held()["buffers"]
            4000
        """
        if category not in CATEGORIES:
            raise ValueError(f"category {category!r}: expected one of {', '.join(CATEGORIES)}")
        self._holders.track(CATEGORIES.index(category), _tracked(source))

    # Reading

    def held(self) -> dict[str, int]:
        """Bytes by category now; all eight are there. Also outside ``with``, but what is saved outside is not seen."""
        self._count()
        return by_name(self._ledger.now)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category at the moment of the highest total; `peak_at` says when."""
        return by_name(self._highest_phase().now)

    @property
    def peak_at(self) -> Point:
        """Where the total was highest: step, phase, operation, layer, labels."""
        point = self._highest_phase().point
        return replace(point, op=point.op and point.op.name())

    @property
    def by_phase(self) -> dict[str, dict[str, int]]:
        """Phase → bytes by category at the moment of that phase's highest total."""
        return {phase: by_name(peak.now) for phase, peak in self._ledger.peaks.items() if phase is not None}

    @property
    def highest(self) -> dict[str, int]:
        """The most that each category held by itself; not all at the same time, so not to be added up."""
        return by_name([max(column) for column in zip(*(p.highest for p in self._ledger.peaks.values()), strict=True)])

    @property
    def samples(self) -> list[tuple[int, str | None, dict[str, int]]]:
        """The time line: (step, phase, bytes by category) wherever the total turned, or a phase began or ended."""
        points = self._ledger.points
        changes = [new for old, new in zip([None, *points], points, strict=False) if new != old]
        return [(step, phase, by_name(held)) for step, phase, held in changes]

    def holdings(self) -> list[Holding]:
        """Storage by storage, who lives in it: parameters, gradients, states, buffers; not activations and others."""
        found: dict[int, Holding] = {}
        parts: dict[int, dict[tuple, int]] = {}
        for category, tensor, name in self._holders.claims():
            for storage in storages(tensor):
                key = storage._cdata
                holding = found.setdefault(key, Holding(CATEGORIES[category], storage.nbytes(), 0, []))
                if holding.category == CATEGORIES[category]:
                    holding.names.append(name)
                    place = (tensor.storage_offset(), tensor.shape) if len(storages(tensor)) == 1 else (0, storage)
                    parts.setdefault(key, {})[place] = tensor.numel() * tensor.element_size()
        return [
            Holding(h.category, h.nbytes, max(0, h.nbytes - sum(parts[key].values())), h.names)
            for key, h in found.items()
        ]

    @property
    def allocator(self) -> dict[str, int]:
        """On CUDA what the allocator of this rank's device says, by its own names; empty on the CPU.

        ``allocated`` rounds live bytes up to blocks and holds kernels' work space too; ``reserved`` is what PyTorch
        took from the device, so that ``reserved − allocated`` is cached or fragmented. nvidia-smi shows more: also
        the CUDA context. Step counters and whatever else lives on the host are not in it.
        """
        return device.memory()

    def __repr__(self) -> str:
        return f"<MemoryMeter {self.mode}: {self._ledger.total} bytes held, peak {max(0, self._highest_phase().total)}>"

    # Inside

    def _highest_phase(self) -> Any:
        return max(self._ledger.peaks.values(), key=lambda peak: (peak.total, peak.point.phase is not None))

    def _count(self) -> None:
        self._states = self._holders.states()
        self._ledger.claim_all((category, tensor) for category, tensor, _ in self._holders.claims())

    def _count_if_changed(self) -> None:
        """Going through all tensors takes longer than a small layer: at the ends of phases only if there is a reason.

        Gradients arrive by a hook, and the ledger hears what dies. A layer replaced while the old one lives on, and
        a gradient assigned by hand, are found by `held` and at the end.
        """
        if self._ledger.moved or self._holders.asks or self._states != self._holders.states():
            self._count()

    def _watch_gradients(self, exits: ExitStack) -> None:
        """A gradient is known as such from the moment it is there, not only when the phase ends."""
        ledger = self._ledger

        def arrived(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                ledger.claim(GRADIENTS, parameter.grad)

        for parameter in self._holders.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                exits.callback(parameter.register_post_accumulate_grad_hook(arrived).remove)

    def _watch_optimizers(self, exits: ExitStack) -> None:
        """Before a step, masters have been given gradients; after the first one, there are moments.

        An optimizer that makes gradients of its own (`labkit.zero`) says so when it does: one may be gone soon.
        """

        def before(*_: object) -> None:
            self._ledger.layer = None
            for gradient in self._holders.master_gradients():
                self._ledger.claim(GRADIENTS, gradient)

        def after(*_: object) -> None:
            self._count_if_changed()

        for optimizer in self._holders.optimizers():
            if hasattr(optimizer, "register_gradient_hook"):
                exits.callback(optimizer.register_gradient_hook(lambda g: self._ledger.claim(GRADIENTS, g)).remove)
            if isinstance(optimizer, torch.optim.Optimizer):
                exits.callback(optimizer.register_step_pre_hook(before).remove)
                exits.callback(optimizer.register_step_post_hook(after).remove)

    def _watch_layers(self, exits: ExitStack) -> None:
        """Which submodule runs. In backward the saved tensors say it: see `Saved.layer`."""
        ledger = self._ledger

        def enter(name: str) -> Any:
            def hook(*_: object) -> None:
                ledger.layer = name

            return hook

        for root in self._holders.modules():
            for name, module in root.named_modules():
                exits.callback(module.register_forward_pre_hook(enter(name)).remove)
                outside = enter(name.rpartition(".")[0])
                exits.callback(module.register_forward_hook(outside, always_call=True).remove)


def _optimizers(given: Any) -> list[Any]:
    found = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    for optimizer in found:
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
            raise TypeError(f"optimizer: {_kind(optimizer)}: expected param_groups and state, as torch.optim has them")
    return found


def _tracked(source: Source) -> Source:
    """
    Raises:
        TypeError: There can be no tensors in it.
    """
    if isinstance(source, torch.nn.Module) or not (callable(source) or isinstance(source, (torch.Tensor, Iterable))):
        raise TypeError(f"{_kind(source)}: expected a tensor, tensors, or a function that returns them")
    return source


def _kind(given: object) -> str:
    """What was given, in a word: a model's or a tensor's repr can be pages long."""
    return repr(given) if isinstance(given, (str, int, float, type(None))) else f"a {type(given).__name__}"
