"""`labkit bench`: side-by-side measurements, printed as ratios with their spread."""

from __future__ import annotations

import argparse
import importlib

SUBJECTS = ("collectives", "data_parallel", "launch", "memory", "pipeline", "tensor_parallel", "zero")


def main(arguments: list[str]) -> int:
    """Run one benchmark by name; each module of this package has a `main()` that prints its table."""
    parser = argparse.ArgumentParser(prog="labkit bench", description=__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    subject = parser.parse_args(arguments).subject
    importlib.import_module(f"labkit.bench.{subject}").main()
    return 0
