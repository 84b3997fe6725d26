"""The words of the pictures: one table a language, looked up by key.

>>> say("trace.rank", rank=3)
'rank 3'
>>> count("trace.messages", 1), count("trace.messages", 5_000)
('1 message', '5,000 messages')
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from string import Formatter

FOLDER = Path(__file__).parent.parent / "words"


def language() -> str:
    """The language of the pictures: `LABKIT_LANG`, else English."""
    return os.environ.get("LABKIT_LANG") or "en"


def say(key: str, **values: object) -> str:
    """The words under `key`, with their placeholders filled in.

    Args:
        key: A dotted key of `labkit/words/<language>.toml`, such as ``"trace.rank"``.
        values: One value for each placeholder, no more and no fewer.

    Raises:
        ValueError: no such language, no such key, or the values are not those that the words ask for.

    >>> say("finding.nothing")
    'Nothing was sent'
    """
    words = table(language())
    if key not in words:
        raise ValueError(f"no words under {key!r} in {language()}.toml; near it: {', '.join(_near(key, words))}")
    wanted = placeholders(words[key])
    if wanted != set(values):
        raise ValueError(f"{key!r} in {language()}.toml asks for {sorted(wanted)}, but was given {sorted(values)}")
    return words[key].format_map(values)


def count(key: str, n: int, **values: object) -> str:
    """`say` for a number of things: ``key.one`` when `n` is 1 and the language has it, else ``key.other``.

    >>> count("trace.collectives", 2)
    '2 collectives'
    """
    one = f"{key}.one"
    form = one if n == 1 and one in table(language()) else f"{key}.other"
    return say(form, n=f"{n:,}", **values)


@cache
def table(lang: str) -> dict[str, str]:
    """All words of a language, keys joined by dots.

    Raises:
        ValueError: there is no table for `lang`.
    """
    import tomllib  # only here: a notebook that draws nothing does not pay for it

    path = FOLDER / f"{lang}.toml"
    known = sorted(p.stem for p in FOLDER.glob("*.toml"))
    if lang not in known:
        raise ValueError(f"LABKIT_LANG is {lang!r}, but the words exist in {', '.join(known)} only")
    return dict(_flat(tomllib.loads(path.read_text(encoding="utf-8")), ""))


@cache
def placeholders(words: str) -> set[str]:
    """The names in braces.

    >>> sorted(placeholders("step {step} of {steps}"))
    ['step', 'steps']
    """
    return {name for _, name, _, _ in Formatter().parse(words) if name is not None}


def _flat(node: dict, prefix: str):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _near(key: str, words: dict[str, str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(key, words, n=3, cutoff=0.0)
