"""`labkit bench`: side-by-side measurements, printed as ratios with their spread."""

from __future__ import annotations

import argparse
import importlib

SUBJECTS = ("collectives", "data_parallel", "launch", "memory", "pipeline", "tensor_parallel", "zero")


def main(arguments: list[str]) -> int:
    """Run one benchmark by name, or all; each module of this package has a `main()` that prints its rows."""
    parser = argparse.ArgumentParser(prog="labkit bench", description=__doc__)
    parser.add_argument("subject", choices=SUBJECTS, nargs="?", help="left out: all of them, some ten minutes")
    subject = parser.parse_args(arguments).subject
    for number, name in enumerate([subject] if subject else SUBJECTS):
        print("\n" if number else "", f"{name}: ", sep="", end="", flush=True)
        importlib.import_module(f"labkit.bench.{name}").main()
    return 0
