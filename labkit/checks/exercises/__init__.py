"""The exercises, one a file. `get` finds one by name."""

from __future__ import annotations

import importlib
from difflib import get_close_matches

from labkit.checks.exercise import Exercise

#: Name → chapter, in the order of the book.
NAMES = {
    "model_bytes": "01",
    "ring_reduce_scatter": "02",
    "ring_all_gather": "02",
    "ring_all_reduce": "02",
    "tree_broadcast": "02",
    "barrier": "02",
    "exchange": "02",
    "bucket_assignment": "03",
    "gradient_hook": "03",
    "bucketed_ddp": "03",
    "accumulation": "03",
    "f_and_g": "04",
    "column_then_row": "04",
    "row_bias": "04",
    "vocab_cross_entropy": "04",
    "sequence_pair": "05",
    "norm_gradients": "05",
    "online_softmax": "05",
    "ring_combine": "05",
    "one_f_one_b_order": "06",
    "gpipe_order": "06",
    "warm_up": "06",
    "peak_stash": "06",
    "repair": "06",
    "one_f_one_b_loop": "06",
    "beat_1f1b": "06",
    "flat_shards": "07",
    "stage_one_step": "07",
    "stage_two_hook": "07",
    "stage_three_block": "07",
    "global_norm": "08",
    "choose_segments": "08",
    "loss_scaler": "08",
    "accumulate_all": "08",
}


def get(name: str) -> Exercise:
    """
    Raises:
        TypeError: `name` is no text.
        ValueError: There is no such exercise.
    """
    if not isinstance(name, str):
        raise TypeError(f"an exercise's name is text, not {name!r}: for example 'ring_reduce_scatter'")
    if name not in NAMES:
        near = get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(NAMES)}"
        raise ValueError(f"there is no exercise {name!r}: {hint}")
    return importlib.import_module(f"labkit.checks.exercises.{name}").EXERCISE
