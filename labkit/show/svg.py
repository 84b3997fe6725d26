"""SVG as strings: elements, escaping, numbers, and how wide a text is. Plain Python, the same bytes in every run.

>>> el("rect", x=1.25, width=10.0, class_="lk-box")
'<rect x="1.2" width="10" class="lk-box"/>'
>>> el("text", escape("a < b"), x=0)
'<text x="0">a &lt; b</text>'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from unicodedata import combining, east_asian_width

#: Characters that XML cannot hold.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
_SPECIAL = re.compile(f'[&<>"{_FORBIDDEN.pattern[1:]}')
#: Widths in em of a wide common font (DejaVu Sans): a browser with a narrower one leaves room.
_WIDTHS = {**dict.fromkeys("ijl'|!.,:;·", 0.32), **dict.fromkeys(" ()[]ftr/-", 0.41),
           **dict.fromkeys("mMW@%", 0.96), **dict.fromkeys("w→←–×…GOQ+=<>", 0.84)}  # fmt: skip


def escape(text: object) -> str:
    """`text` so that it stands for itself in HTML and SVG, inside an attribute too."""
    safe = str(text)
    if not _SPECIAL.search(safe):
        return safe
    safe = _FORBIDDEN.sub("\ufffd", safe)
    return safe.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def num(x: float) -> str:
    """A coordinate: a tenth of a pixel is enough.

    >>> num(3.0), num(-0.01), num(12.345)
    ('3', '0', '12.3')
    """
    text = f"{x:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")


def el(tag: str, *children: str, **attributes: object) -> str:
    """An element. Children are markup; attributes are escaped; ``class_`` and ``font_size`` become SVG's own names.

    An attribute that is ``None`` is left out; ``True`` stands alone.
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(f" {name}")
        elif isinstance(value, (int, float)):
            parts.append(f' {name}="{num(value)}"')
        else:
            parts.append(f' {name}="{escape(value)}"')
    if not children and tag in ("rect", "path", "line", "circle", "polygon", "input", "br"):
        return "".join(parts) + "/>"
    return f"{''.join(parts)}>{''.join(children)}</{tag}>"


def text(x: float, y: float, content: str, size: float, anchor: str | None = None, cls: str | None = None) -> str:
    """A line of text at its baseline; `anchor` is ``None`` (start), ``"middle"`` or ``"end"``."""
    return el("text", escape(content), x=x, y=y, font_size=size, text_anchor=anchor, class_=cls)


@lru_cache(maxsize=4096)
def text_width(content: str, size: float) -> float:
    """About how many pixels `content` takes: East-Asian wide characters are one em, marks on a letter nothing.

    >>> text_width("环形", 10)
    20.0
    """
    return size * sum(map(_em, content))


def _em(char: str) -> float:
    if char in _WIDTHS:
        return _WIDTHS[char]
    if east_asian_width(char) in "WF":
        return 1.0
    if combining(char):
        return 0.0
    return 0.7 if char.isupper() else 0.62


def wrap(content: str, width: float, size: float) -> list[str]:
    """`content` in lines of at most `width` pixels, broken at spaces, after "_" and at East-Asian characters.

    A word wider than `width` keeps a line of its own.

    >>> wrap("waits for 1", 50, 12)
    ['waits', 'for 1']
    """
    lines = [""]
    for piece in _pieces(content):
        if lines[-1] and text_width((lines[-1] + piece).rstrip(), size) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _pieces(content: str) -> Iterator[str]:
    """Where a line may break: after each of these."""
    piece = ""
    for char in content:
        piece += char
        if char in " _" or east_asian_width(char) in "WF":
            yield piece
            piece = ""
    if piece:
        yield piece


def fit(content: str, width: float, size: float) -> str:
    """`content`, cut with an ellipsis to `width`; at the least its first letter.

    >>> fit("all_reduce", 40, 12), fit("matmul", 8, 12)
    ('all_r…', 'm')
    """
    if text_width(content, size) <= width:
        return content
    for end in range(len(content) - 1, 1, -1):
        if text_width(content[:end] + "…", size) <= width:
            return content[:end] + "…"
    return content[:1]


def size_of(nbytes: float, digits: int = 3) -> str:
    """Bytes for people: exact below 1 KiB, binary units above, as torch counts buckets.

    >>> size_of(32), size_of(1536), size_of(64 * 2**20)
    ('32 B', '1.5 KiB', '64 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes if isinstance(nbytes, int) else round(nbytes, 1)} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.{digits}g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
