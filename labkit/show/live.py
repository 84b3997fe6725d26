"""Is a browser with a kernel looking, or will the page be read without one?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def is_static() -> bool:
    """Whether ``LABKIT_STATIC`` asks for pictures only: nbval, HTML, PDF, committed notebooks."""
    return os.environ.get("LABKIT_STATIC", "") not in ("", "0")


def is_live() -> bool:
    """Whether a widget can work: not static, and this process is a notebook's kernel."""
    if is_static() or "IPython" not in sys.modules:
        return False
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None


def bundle(html: str, plain: str, make_widget: Callable[[], Any] | None) -> dict[str, Any]:
    """What a notebook stores for an output: HTML and text always, a live widget before them where one works."""
    data: dict[str, Any] = {"text/html": html, "text/plain": plain}
    if make_widget is None or not is_live():
        return data
    try:
        shown = make_widget()._repr_mimebundle_()
    except ImportError:  # anywidget or ipywidgets is not installed: the picture stands all the same
        return data
    shown = shown[0] if isinstance(shown, tuple) else shown
    return {**(shown or {}), **data}
