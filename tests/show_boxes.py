"""Where the texts and shapes of a drawing lie, for tests that measure pictures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from labkit.show import svg
from labkit.show.figure import Drawing

Box = tuple[float, float, float, float]


def tree(drawing: Drawing) -> ElementTree.Element:
    strip = drawing.strip[2] if drawing.strip else ()
    return ElementTree.fromstring(f"<g>{''.join((*drawing.parts, *strip))}</g>")


def texts(drawing: Drawing) -> Iterator[tuple[Box, str, float]]:
    """The box, the words and the size of every text."""
    for node in tree(drawing).iter("text"):
        size, x, y = (float(node.get(k, "0")) for k in ("font-size", "x", "y"))
        width = svg.text_width(node.text or "", size)
        left = x - {"middle": width / 2, "end": width}.get(node.get("text-anchor", ""), 0)
        yield (left, y - 0.8 * size, left + width, y + 0.22 * size), node.text or "", size


def shapes(drawing: Drawing) -> Iterator[Box]:
    """The extent of everything else."""
    for node in tree(drawing).iter():
        at = {k: float(v) for k, v in node.attrib.items() if re.fullmatch(r"-?[\d.]+", v)}
        if node.tag == "rect":
            yield at["x"], at["y"], at["x"] + at["width"], at["y"] + at["height"]
        elif node.tag == "circle":
            yield at["cx"] - at["r"], at["cy"] - at["r"], at["cx"] + at["r"], at["cy"] + at["r"]
        elif node.tag == "line":
            yield min(at["x1"], at["x2"]), min(at["y1"], at["y2"]), max(at["x1"], at["x2"]), max(at["y1"], at["y2"])
        elif node.tag in ("path", "polygon"):
            xs, ys = zip(*points(node.get("d") or "M" + (node.get("points") or "").replace(" ", "L")), strict=True)
            yield min(xs), min(ys), max(xs), max(ys)


def points(d: str) -> Iterator[tuple[float, float]]:
    """The points that a path goes through."""
    x = y = 0.0
    for command, numbers in re.findall(r"([MLHVhvlz])([^MLHVhvlz]*)", d):
        n = [float(v) for v in re.findall(r"-?[\d.]+", numbers)]
        match command:
            case "M" | "L":
                x, y = n
            case "H":
                (x,) = n
            case "V":
                (y,) = n
            case "h":
                x += n[0]
            case "v":
                y += n[0]
            case "l":
                x, y = x + n[0], y + n[1]
        yield x, y


def outside(drawing: Drawing) -> list[object]:
    """What is cut off at an edge, or written too small."""
    wrong: list[object] = [words for _, words, size in texts(drawing) if size < 12]
    boxes = [(box, words) for box, words, _ in texts(drawing)] + [(box, "shape") for box in shapes(drawing)]
    for (left, top, right, bottom), what in boxes:
        if left < -1 or top < -1 or right > drawing.width + 1 or bottom > drawing.height + 1:
            wrong.append((what, left, top, right, bottom))
    return wrong


def overlapping(drawing: Drawing) -> list[tuple[str, str]]:
    """Pairs of texts that lie on each other."""
    found = list(texts(drawing))
    return [
        (one, other)
        for i, ((l1, t1, r1, b1), one, _) in enumerate(found)
        for (l2, t2, r2, b2), other, _ in found[i + 1 :]
        if not (r1 <= l2 + 1 or r2 <= l1 + 1 or b1 <= t2 + 1 or b2 <= t1 + 1)
    ]
