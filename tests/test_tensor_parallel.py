"""Tensor and sequence parallelism against one process, and the papers' counts."""

from __future__ import annotations

import programs_tensor_parallel as programs
import pytest
import torch

import labkit

MODELS = {
    "gpt": ("tiny_gpt", {}),
    "gpt-untied-fused": ("tiny_gpt", {"tied": False, "attention": "fused"}),
    "llama-gqa-tied": ("tiny_llama", {"kv_heads": 2, "tied": True}),
    "llama-mqa": ("tiny_llama", {"kv_heads": 1}),
}


#: Each kind of model on 2 or 4 ranks in each way; the soak has every combination.
@pytest.mark.parametrize(
    ("ranks", "how", "model"),
    [
        (1, "tp", "gpt"), (1, "sp", "llama-mqa"), (2, "tp", "gpt"), (4, "tp", "gpt-untied-fused"),
        (2, "tp", "llama-mqa"), (4, "tp", "llama-gqa-tied"), (4, "sp", "gpt"), (2, "sp", "gpt-untied-fused"),
        (4, "sp", "llama-mqa"),
        (2, "sp", "llama-gqa-tied"), (4, "sp-keep", "llama-gqa-tied"), (2, "sp-keep", "gpt"),
        *(pytest.param(ranks, how, model, marks=pytest.mark.soak)
          for model in MODELS for ranks in (1, 2, 4) for how in ("tp", "sp", "sp-keep")),
    ],
)  # fmt: skip
def test_three_steps_are_those_of_one_process(ranks, how, model):
    name, changes = MODELS[model]
    run = labkit.run(programs.against_one_process, name, changes, how, torch.float64, ranks=ranks)
    assert max(run.values) <= 1e-10


@pytest.mark.parametrize("how", ["tp", "sp"])
def test_three_steps_in_fp32(how):
    assert max(labkit.run(programs.against_one_process, "tiny_gpt", {}, how, torch.float32, ranks=4).values) <= 1e-5


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["tp", "sp", "sp-keep"])
def test_the_gradient_of_what_enters_a_layer(how, ranks):
    for name in ("tiny_gpt", "tiny_llama"):
        assert max(labkit.run(programs.gradient_of_what_enters, name, how, ranks=ranks).values) <= 1e-10


@pytest.mark.parametrize("frozen", [(), ("qkv.weight", "up.bias", "norm.weight"), ("embedding.weight", "down.weight")])
@pytest.mark.parametrize("how", ["tp", "sp"])
def test_in_a_mesh_beside_data_parallelism(how, frozen):
    """Sub-groups on both axes, and parameters that are not trained."""
    assert max(labkit.run(programs.beside_data_parallelism, how, frozen, ranks=4).values) <= 1e-10


@pytest.mark.parametrize(("how", "algorithm"), [("tp", "ring"), ("tp", "native"), ("sp", "ring")])
def test_the_input_gradient_travels_beside_the_weights_product(how, algorithm):
    """Two parts of a layer and the head: whatever they send for the input has arrived before the product is made."""
    for arrived in labkit.run(programs.all_reduce_beside_weight_gradients, how, algorithm, ranks=2).values:
        assert arrived == [True] * 3


@pytest.mark.parametrize("name", ["tiny_gpt", "tiny_llama"])
def test_collectives_of_a_layer(name):
    """A layer more: TP 4 all-reduces; TP + SP 4 gathers and 4 reduce-scatters, and 2 inputs gathered again."""

    def calls(how: str, layers: int) -> dict[str, int]:
        run = labkit.run(programs.layer_events, name, how, "ring", layers, ranks=2)
        spans = [e.name.split()[0] for e in run.trace.of(0) if e.kind == "span"]
        return {kind: spans.count(kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")}

    def of_a_layer(how: str) -> list[int]:
        one, two = calls(how, 1), calls(how, 2)
        return [two[kind] - one[kind] for kind in one]

    assert of_a_layer("tp") == [4, 0, 0]
    assert of_a_layer("sp") == [0, 6, 4]
    assert of_a_layer("sp-keep") == [0, 4, 4]


@pytest.mark.parametrize(("how", "times"), [("tp", 8), ("sp", 10), ("sp-keep", 8)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_a_layer(how, times, ranks):
    """8·bsh·(t−1)/t elements a rank and layer (Narayanan 2021); a quarter more where the input is gathered again."""

    def sent(layers: int) -> int:
        return labkit.run(programs.layer_events, "tiny_gpt", how, "ring", layers, ranks=ranks).trace.bytes_sent(1)

    b, s, h = 2, 8, 16
    assert (sent(2) - sent(1)) * ranks == times * b * s * h * 4 * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["tp", "sp", "sp-keep"])
def test_activations_of_a_layer(ranks, how):
    """Korthikanti 2022, table 2, bf16, dropout on, explicit attention; and each layer norm's mean and rstd."""
    t, a, h, b, s = ranks, 4, 32, 2, 8
    kept = labkit.run(programs.saved_bytes, how, {"dropout": 0.1}, (b, s), ranks=ranks).values
    statistics = 8 * s * b
    expected = {
        "tp": s * b * h * 10 + s * b * h * 24 // t + 5 * a * s * s * b // t + statistics,
        "sp": (s * b * h * 34 + 5 * a * s * s * b + statistics) // t,
        # the two gathered inputs are whole, 4sbh, and the norms' own outputs need not be kept
        "sp-keep": (s * b * h * 30 + 5 * a * s * s * b + statistics) // t + 4 * s * b * h,
    }[how]
    assert kept == [expected] * ranks


@pytest.mark.parametrize(
    ("how", "ranks"), [("sp", 2), *(pytest.param(how, 4, marks=pytest.mark.soak) for how in ("tp", "sp", "sp-keep"))]
)
def test_what_all_ranks_hold_stays_the_same_bits(how, ranks):
    """Faults 20 and 25: 50 steps with dropout."""
    values = labkit.run(programs.norms_after_training, how, ranks=ranks, timeout=300).values
    for other in values[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values[0], other, strict=True))


@pytest.mark.parametrize(("vocab", "ranks"), [(37, 1), (37, 2), (37, 4), (5, 4), (8, 4)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(vocab, ranks, smoothing):
    """Fault 24, and a scale of 1000 that overflows without the maximum."""
    for scale in (1.0, 1000.0):
        for loss, grad in labkit.run(
            programs.cross_entropy, vocab, scale, smoothing, torch.float64, ranks=ranks
        ).values:
            assert loss <= 1e-12
            assert grad <= 1e-11
    loss, grad = labkit.run(programs.cross_entropy, vocab, 1.0, smoothing, torch.bfloat16, ranks=ranks).values[0]
    assert loss <= 0.02
    assert grad <= 0.1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_row_bias_counts_once(ranks):
    assert labkit.run(programs.row_bias, ranks=ranks).values == [[100.0] * 3] * ranks


def test_the_whole_matrix_does_not_depend_on_the_ranks():
    wholes = [labkit.run(programs.initial_weights, ranks=ranks).values for ranks in (1, 2, 4)]
    for values in wholes[1:]:
        for on_rank in values:
            assert all(torch.equal(a, b) for a, b in zip(on_rank, wholes[0][0], strict=True))
    torch.manual_seed(5)
    assert torch.equal(wholes[0][0][0], torch.nn.Linear(8, 8).weight)


def test_dropout_drops_alike_where_data_is_alike():
    values = labkit.run(programs.masks, ranks=3).values
    assert all(torch.equal(values[0][0], whole) for whole, _ in values)
    assert not any(torch.equal(a, b) for a, b in [(values[0][1], values[1][1]), (values[1][1], values[2][1])])
    assert not any(torch.equal(whole, split) for whole, split in values)


def test_second_derivatives():
    for first, second, said in labkit.run(programs.second_derivative, ranks=2).values:
        assert (first, second) == (12.0, 12.0)
        assert "once_differentiable" in said or "twice" in said


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("heads", "ValueError: heads=2 on 4 ranks"), ("twice", "shared among ranks already"),
        ("type", "TypeError: model is Linear"),
        ("columns", "has 6 elements: expected a multiple of the 4"), ("sequence", "5 tokens on 4 ranks"),
        ("token", "tokens holds 37"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(what, told):
    assert all(told in said for said in labkit.run(programs.refused, what, ranks=4).values)


@pytest.mark.parametrize("attention", ["explicit", "fused"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["tp", "sp"])
def test_recomputing_draws_the_same_masks(how, reentrant, attention):
    """torch's checkpoint puts torch's own stream back; the stream of what is split follows from it."""
    assert max(labkit.run(programs.checkpointed, how, reentrant, attention, ranks=2).values) <= 1e-12


def test_fused_attention_drops_apart():
    first, second = labkit.run(programs.fused_masks, ranks=2).values
    assert 0.3 < first.tril().sum() / (2 * 136) < 0.7
    assert not torch.equal(first, second)


@pytest.mark.parametrize("how", ["tp", "sp"])
def test_autocast_round_the_forward(how):
    for dtype, off in labkit.run(programs.under_autocast, how, ranks=2).values:
        assert dtype == torch.float32
        assert off <= 0.03


def test_streams_belong_to_a_run():
    labkit.run(programs.seed_of_this_run, ranks=2)
    assert all("call seed" in said for said in labkit.run(programs.draws, ranks=2).values)


def test_lost_marks_and_what_is_no_parameter_are_told():
    for copied, *others in labkit.run(programs.lost_marks, ranks=2).values:
        assert "RuntimeError" in copied
        assert "marks were lost" in copied
        assert all("TypeError: params holds" in said for said in others)


def test_bad_input_is_named():
    *_, said = labkit.run(programs.bad_input, ranks=3).values
    told = {
        "a stranger's model": "no member", "a stranger's layer": "no member", "a stranger's f": "no member",
        "a stranger's seed": "no member", "group": "TypeError: group is 'tp'", "seed": "TypeError: number is 'x'",
        "f": "TypeError: x is list", "layer": "TypeError: the whole layer is Conv1d", "padding": "padding_idx=0",
        "tokens": "TypeError: tokens is torch.float32", "logits": "TypeError: logits is list", "vocab": "vocab is 9.5",
        "smoothing": "label_smoothing is 'a'", "sequence": "x has shape (3,)",
        "states": "expected what state_dict gave",
    }  # fmt: skip
    assert {name: words in said[name] for name, words in told.items()} == dict.fromkeys(told, True)
