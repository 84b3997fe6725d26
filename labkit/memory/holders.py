"""Who claims which storage: the tensors of modules and optimizers, and those that a caller names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from labkit.memory.categories import BUFFERS, CATEGORIES, GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, STEPS

#: What a caller may name: tensors, now or whenever they are asked for.
Source = torch.Tensor | Iterable[Any] | Mapping[Any, Any] | Callable[[], Any]
Claim = tuple[int, torch.Tensor, str]


class Holders:
    """Modules, optimizers and tensors, all of them weakly: the meter keeps nothing alive.

    Args:
        modules: Their parameters, gradients and buffers are counted.
        optimizers: Objects with ``param_groups`` and ``state`` in torch's form. A parameter that no module has is a
            master copy, unless there is no module at all. One with a method ``held()``, as `labkit.zero`'s have, yields
            (category, tensor) of further masters and gradients.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._tracked: list[tuple[int, Callable[[], Any]]] = []
        self._masters: list[weakref.ref] = []
        #: Whether there is a function to ask at each count.
        self.asks = False

    def modules(self) -> list[torch.nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    def optimizers(self) -> list[Any]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def track(self, category: int, source: Source) -> None:
        """Claim these tensors from now on; what a function returns is asked for at each count."""
        if callable(source) and not isinstance(source, torch.Tensor):
            self._tracked.append((category, source))
            self.asks = True
        else:
            refs = [weakref.ref(tensor) for tensor in tensors_in(source)]
            self._tracked.append((category, lambda: [ref() for ref in refs]))

    def states(self) -> int:
        """How many parameters the optimizers keep a state of."""
        return sum(len(optimizer.state) for optimizer in self.optimizers())

    def master_gradients(self) -> list[torch.Tensor]:
        """Gradients of the master copies found at the last count, which no hook of autograd announces."""
        return [m.grad for ref in self._masters if (m := ref()) is not None and m.grad is not None]

    def parameters(self) -> dict[torch.nn.Parameter, tuple[int, str]]:
        """Each parameter with its category (the model's or a master copy) and its name."""
        found: dict[torch.nn.Parameter, tuple[int, str]] = {}
        for module in self.modules():
            for name, parameter in module.named_parameters():
                found.setdefault(parameter, (PARAMETERS, name))
        category = MASTER if self._modules else PARAMETERS
        for optimizer in self.optimizers():
            for parameter in _of_groups(optimizer):
                found.setdefault(parameter, (category, f"{CATEGORIES[category]} {len(found)}"))
        self._masters = [weakref.ref(parameter) for parameter, (c, _) in found.items() if c == MASTER]
        return found

    def claims(self) -> Iterator[Claim]:
        """(category, tensor, name) of all; where two lie in one storage, the first has it.

        Gradients come first: a bucket that holds them is memory of gradients. Then what the caller named, since a
        gathered shard is a buffer also while parameters are views into it.
        """
        parameters = self.parameters()
        for parameter, (_, name) in parameters.items():
            if parameter.grad is not None:
                yield GRADIENTS, parameter.grad, name
        for optimizer in self.optimizers():
            for category, tensor in getattr(optimizer, "held", tuple)():
                yield CATEGORIES.index(category), tensor, f"{category} of a shard"
        for category, source in self._tracked:
            for tensor in tensors_in(source()):
                yield category, tensor, "tracked"
        for parameter, (category, name) in parameters.items():
            yield category, parameter, name
        for optimizer in self.optimizers():
            yield from _of_state(optimizer, parameters)
        for module in self.modules():
            for name, buffer in module.named_buffers():
                yield BUFFERS, buffer, name


def _of_groups(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _of_state(optimizer: Any, parameters: Mapping[torch.nn.Parameter, tuple[int, str]]) -> Iterator[Claim]:
    """Moments, and the step counters apart: torch keeps one 0-dimensional tensor a parameter."""
    for parameter, state in list(optimizer.state.items()):
        name = parameters[parameter][1] if parameter in parameters else "a parameter"
        for key, value in state.items() if isinstance(state, Mapping) else ():
            for tensor in tensors_in(value):
                counter = key == "step" and tensor.dim() == 0
                yield STEPS if counter else OPTIMIZER, tensor, f"{key} of {name}"


def tensors_in(source: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tensor, a mapping's values, or anything that can be gone through; others are passed over.

    >>> [t.numel() for t in tensors_in({"a": torch.ones(2), "b": [torch.ones(3), None, 7]})]
    [2, 3]
    """
    if isinstance(source, torch.Tensor):
        yield source
    elif isinstance(source, Mapping):
        for value in source.values():
            yield from tensors_in(value)
    elif isinstance(source, Iterable) and not isinstance(source, (str, bytes)):
        for value in source:
            yield from tensors_in(value)
