"""Let an interrupt come only where it does no harm: between starting a pool and giving it back, while ranks run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """Holds back Ctrl-C, or the stop button, inside `with Interrupts() as gate`, but for where the gate is open.

    One that was held back is raised as soon as it may. Only the main thread gets interrupts; elsewhere nothing happens.
    """

    def __enter__(self) -> Interrupts:
        self.pending, self.open = False, False
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._come)
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self.pending and failure[0] is None:
            raise KeyboardInterrupt

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.open = True
        try:
            if self.pending:
                self.pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self.open = False

    def _come(self, *_: Any) -> None:
        if self.open:
            raise KeyboardInterrupt
        self.pending = True
