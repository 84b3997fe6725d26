"""labkit.tricks.accumulate: the gradients of windows against those of one process that sees every token at once."""

from __future__ import annotations

import programs_accumulate as programs
import pytest
import torch

import labkit
from labkit.tricks import MicroBatch, MixedPrecision, accumulate


def test_windows_and_their_weights():
    found = [(m.batch, m.weight, m.last) for m in accumulate("abcde", 2)]
    assert found == [("a", 0.5, False), ("b", 0.5, True), ("c", 0.5, False), ("d", 0.5, True), ("e", 1.0, True)]
    assert list(accumulate([], 3)) == []
    assert [m.last for m in accumulate("ab", 1)] == [True, True]


@pytest.mark.parametrize("weights", ["tokens", "mean"])
def test_micro_batches_of_2_and_10_tokens_and_an_odd_last_window(weights):
    """Public fault 10: means of means; the last window dropped. Three steps, the last one of one micro-batch."""
    sizes = [2, 10, 10, 2, 5] if weights == "tokens" else [4, 4, 4, 4, 4]
    assert programs.windows_against_whole(sizes, weights) <= 1e-15


def test_the_mean_of_means_is_another_gradient():
    """The same windows with 1/k where tokens differ: what fault 10 did."""
    assert programs.windows_against_whole([2, 10, 10, 2, 5], "mean") > 0.1


def test_a_stream_without_end_is_read_a_window_ahead():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield read[-1]

    micros = accumulate(endless(), 3, tokens=lambda batch: batch)
    assert [next(micros).weight for _ in range(4)] == [1 / 3, 1 / 3, 1 / 3, 1 / 12]
    assert len(read) == 6


def test_a_window_without_tokens_weighs_nothing_and_is_no_nan():
    assert [m.weight * 0.0 for m in accumulate([0, 0], 2, tokens=int)] == [0.0, 0.0]


def test_tokens_counted_by_a_tensor():
    rows = [torch.tensor([1, 2, 0]), torch.tensor([3, 0, 0])]
    weights = [m.weight for m in accumulate(rows, 2, tokens=lambda row: (row != 0).sum())]
    assert weights == [1 / 3] * 2
    assert all(isinstance(weight, float) for weight in weights)


def test_one_process_averages_over_itself():
    module = torch.nn.Linear(1, 1)
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 0.1))
    assert [m.weight for m in accumulate([1, 3], 2, mixed, tokens=int)] == [0.25] * 2


def test_ranks_with_other_numbers_of_windows_do_not_hang():
    """Public fault 7: rank 0 has three windows, rank 1 two."""
    for count in (None, len):
        with pytest.raises(labkit.Disagreement, match="rank 1  nothing: its function had returned"):
            labkit.run(programs.other_numbers_of_windows, count, ranks=2)


def test_an_error_inside_leaves_the_model_as_it_was():
    log = []

    class Model:
        def no_sync(self):
            from contextlib import contextmanager

            @contextmanager
            def quiet():
                log.append("in")
                try:
                    yield
                finally:
                    log.append("out")

            return quiet()

    micros = accumulate([1, 2, 3], 3, Model())
    with pytest.raises(KeyError), next(micros):
        raise KeyError
    assert log == ["in", "out"]
    with next(micros):
        pass
    with next(micros) as last:
        assert isinstance(last, MicroBatch)
        assert last.last
    assert log == ["in", "out"] * 2


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: accumulate([], 0), ValueError, "k=0: expected at least 1"),
        (lambda: accumulate([], 2.0), TypeError, "k is 2.0"),
        (lambda: accumulate([], 2, torch.nn.Linear(1, 1)), TypeError, "model is Linear, which has no no_sync"),
        (lambda: accumulate([], 2, tokens=3), TypeError, "tokens is int: expected a function"),
        (lambda: accumulate(3, 2), TypeError, "batches is int: expected a list of micro-batches"),
        (lambda: list(accumulate([1], 2, tokens=lambda b: 2.5)), TypeError, "tokens gave 2.5: expected the number of"),
        (lambda: list(accumulate([1], 2, tokens=lambda b: None)), TypeError, "tokens gave None"),
        (lambda: list(accumulate([1], 2, tokens=lambda b: -1)), ValueError, "tokens gave -1"),
    ],
)
def test_what_cannot_be_used(call, error, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("wrapper", ["labkit", "torch"])
def test_ranks_with_other_tokens_equal_one_process(wrapper):
    """Each rank has its own sizes; gradients are averaged once a window."""
    run = labkit.run(programs.ranks_against_whole, wrapper, ranks=2)
    assert max(off for off, _ in run.values) <= 1e-15
    assert [reduces for _, reduces in run.values] == [[0, 1, 0, 1, 1]] * 2


def test_a_sharded_optimizer_reduces_once_a_window():
    assert max(labkit.run(programs.with_a_sharded_optimizer, ranks=2).values) <= 1e-14
