"""Is a browser with a kernel looking, or will the page be read without one?"""

from __future__ import annotations

import os
import sys


def is_static() -> bool:
    """Whether ``LABKIT_STATIC`` asks for pictures only: nbval, HTML, PDF, committed notebooks."""
    return os.environ.get("LABKIT_STATIC", "") not in ("", "0")


def is_live() -> bool:
    """Whether a widget can work: not static, and this process is a notebook's kernel."""
    if is_static() or "IPython" not in sys.modules:
        return False
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None
