"""Every storage that an operation makes, seen by a dispatch mode: the full mode of the meter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.memory.categories import storages
from labkit.memory.ledger import Ledger


class MadeStorages(TorchDispatchMode):
    """Tells the ledger of each operation's results that live in memory of their own.

    What a kernel allocates and frees inside one operation is not seen, nor what other threads make.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper that keeps torch.compile out: it would cost as much as the rest of the mode."""
        return False

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._allocates: dict[int, bool] = {}  # by the operation's id, since its own hash is slow

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        allocates = self._allocates.get(id(func))
        if allocates is None:
            allocates = self._allocates[id(func)] = _allocates(func)
        if allocates:
            self._ledger.op = func
            if type(result) is torch.Tensor and result.layout is torch.strided:  # nearly always: be quick
                self._ledger.make(result.untyped_storage())
            else:
                self._look(result)
        return result

    def _look(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            for storage in storages(result):
                self._ledger.make(storage)
        elif isinstance(result, (tuple, list)):
            for part in result:
                self._look(part)


def _allocates(func: Any) -> bool:
    """Whether results may lie in memory that was not there before; not so for views and in-place operations.

    >>> aten = torch.ops.aten
    >>> _allocates(aten.mm.default), _allocates(aten.t.default), _allocates(aten.add_.Tensor)
    (True, False, False)
    """
    schema = getattr(func, "_schema", None)
    if schema is None or "resize" in schema.name or schema.name == "aten::lift_fresh" or schema.overload_name == "out":
        return True
    return any(returned.alias_info is None for returned in schema.returns)
