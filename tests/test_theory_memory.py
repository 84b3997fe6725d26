"""Memory on paper: published tables and closed forms of the papers against what a config's terms add up to."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.model import Config, Transformer, preset
from labkit.theory import memory
from labkit.theory.memory import (
    Recipe,
    Setup,
    Terms,
    activations,
    attention_crossover,
    best_segments,
    bytes_per_parameter,
    cheapest_stage,
    closed_form,
    embedding_activations,
    every_layer_limit,
    fits,
    forward_flops,
    gb,
    gib,
    hardware_flops,
    head_activations,
    held,
    korthikanti_hardware_flops,
    layer_activations,
    layers_in_flight,
    logits,
    model_flops,
    model_states,
    parameter_parts,
    parameter_shapes,
    parameters,
    part_of,
    recipe,
    segmented,
    training_days,
    utilization,
)

GB, DAY = 1e9, 86400
PAPER = {"dialect": "gpt", "vocab": 51200, "positions": 2048, "dropout": 0.1}
TINY = Config(dialect="gpt", layers=3, hidden=64, heads=4, vocab=96, positions=32, dropout=0.1)
LLAMA = Config(dialect="llama", layers=3, hidden=64, heads=8, kv_heads=2, ffn=176, vocab=96, positions=32)


def without_statistics(config, s, b, **setup):
    return layer_activations(config, s, b, Setup(**setup)).without_name("statistics").total


# Parameters


def test_published_parameter_counts():
    """Llama 3 as `transformers` counts it; GPT-2 as its checkpoint has it, 148 tensors."""
    assert parameters(preset("llama3_8b")) == 8_030_261_248
    assert parameters(preset("llama3_70b")) == 70_553_706_496
    assert parameters(preset("llama3_405b")) == 405_853_388_800
    assert parameters(preset("gpt2_small")) == 124_439_808
    assert len(parameter_shapes(preset("gpt2_small"))) == 148
    assert len(parameter_shapes(preset("llama3_8b"))) == 291


@pytest.mark.parametrize(
    ("billions", "heads", "hidden", "layers"),
    [
        (1.65, 24, 2304, 24), (7.47, 32, 4096, 36), (39.10, 64, 8192, 48), (145.62, 96, 12288, 80),
        (22, 64, 6144, 48), (174.6, 96, 12288, 96), (529.6, 128, 20480, 105), (1008.0, 160, 25600, 128),
    ],
)  # fmt: skip
def test_models_of_the_papers(billions, heads, hidden, layers):
    """Narayanan 2021, Table 1, and Korthikanti 2022, Table 3; the closed form leaves the final norm out."""
    config = Config(layers=layers, hidden=hidden, heads=heads, **PAPER)
    places = len(str(billions).partition(".")[2])
    assert round(parameters(config) / 1e9, places) == billions
    assert parameters(config) == closed_form(layers, hidden, vocab=51200, s=2048) + 2 * hidden


@given(st.integers(1, 200), st.integers(1, 30000), st.integers(1, 200000), st.integers(1, 9000))
def test_the_closed_form_is_the_printed_one(layers, h, vocab, s):
    printed = 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocab + s) / (12 * layers * h))
    assert closed_form(layers, h, vocab, s) == pytest.approx(printed, rel=1e-12)


def test_parts_and_names():
    config = preset("gpt2_small")
    assert parameter_parts(config) == {
        "embedding": 50257 * 768, "positions": 1024 * 768, "attention": 12 * (4 * 768**2 + 4 * 768),
        "mlp": 12 * (8 * 768**2 + 5 * 768), "norm": 25 * 2 * 768, "head": 0,
    }  # fmt: skip
    assert parameter_parts(replace(config, tied=False))["head"] == 50257 * 768
    assert list(parameter_shapes(config))[:3] == [
        "token_embedding.weight",
        "position_embedding.weight",
        "blocks.0.attention_norm.weight",
    ]
    assert list(parameter_shapes(config))[-1] == "norm.bias"
    assert part_of("head.weight") == "head"
    llama = parameter_shapes(LLAMA)
    assert llama["blocks.2.attention.key.weight"] == (16, 64)
    assert llama["blocks.2.mlp.gate.weight"] == llama["blocks.2.mlp.up.weight"] == (176, 64)
    assert not [name for name in llama if "bias" in name or "position" in name]


@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=False), LLAMA, preset("gpt_22b"), preset("llama3_8b")])
def test_shapes_are_the_models_in_its_order(config):
    model = Transformer(config, device="meta")
    real = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(parameter_shapes(config).items()) == list(real.items())


def test_thirteen_buckets_and_the_last_holds_the_embedding():
    """GPT-2 small in torch's DDP: buckets filled in reverse and closed once full, at 1 MiB the first, then 25."""
    sizes, now = [], 0
    for shape in reversed(parameter_shapes(preset("gpt2_small")).values()):
        now += 4 * prod(shape)
        if now >= (25 if sizes else 1) * 2**20:
            sizes.append(now)
            now = 0
    assert len(sizes) == 13
    assert round(sizes[-1] / 2**20) == 168


@pytest.mark.parametrize("config", [TINY, LLAMA])
@pytest.mark.parametrize("t", [1, 2])
def test_tensor_parallel_ranks_hold_parts_of_matrices_and_all_of_the_rest(config, t):
    whole, part = parameter_shapes(config), parameter_shapes(config, t)
    replicated = [n for n in whole if "norm" in n or "position" in n or n.endswith(("output.bias", "down.bias"))]
    assert list(whole) == list(part)
    for name in whole:
        assert prod(part[name]) * (1 if name in replicated else t) == prod(whole[name])


# States


@pytest.mark.parametrize(
    ("billions", "ranks", "printed"),
    [
        (7.5, 4, "52.5/41.3/30"), (7.5, 16, "35.6/21.6/7.5"), (7.5, 64, "31.4/16.6/1.88"),
        (128, 4, "896/704/512"), (128, 16, "608/368/128"), (128, 64, "536/284/32"),
        (1000, 4, "7000/5500/4000"), (1000, 16, "4750/2875/1000"), (1000, 64, "4187/2218/250"),
    ],
)  # fmt: skip
def test_zero_table_1(billions, ranks, printed):
    """Rajbhandari 2020, Table 1, which rounds small entries and truncates large ones: within one last unit."""
    for stage, text in enumerate(printed.split("/"), start=1):
        unit = 10.0 ** -len(text.partition(".")[2])
        by_formula = bytes_per_parameter("bf16_mixed", stage, ranks).total * billions
        to_the_byte = model_states(int(billions * GB), "bf16_mixed", stage, ranks).total / GB
        assert abs(by_formula - float(text)) < unit
        assert abs(to_the_byte - float(text)) < unit
    assert bytes_per_parameter("bf16_mixed", 0, ranks).total == 16


@pytest.mark.parametrize("d", [1, 2, 8, 64])
def test_the_distributed_optimizer_of_megatron_is_stage_1(d):
    """Megatron-LM's table: bytes per parameter with d data-parallel ranks."""
    for name, replicated, sharded in (("bf16_fp32_gradients", 6, 12), ("fp16_megatron", 4, 16), ("fp32", 8, 8)):
        assert bytes_per_parameter(name, stage=1, ranks=d).total == pytest.approx(replicated + sharded / d)
        assert recipe(name).total == replicated + sharded


def test_rules_of_thumb():
    assert model_states(70_000_000_000).total == 1120 * GB
    assert model_states(7_000_000_000).total == 112 * GB
    assert model_states(70_000_000_000, "fp16_megatron").total == 1400 * GB
    assert recipe("bf16_fp32_gradients").total * 70 == 1260
    assert [recipe("fp32", optimizer).total for optimizer in ("adam", "momentum", "sgd")] == [16, 12, 8]
    assert [recipe("bf16_mixed", optimizer).total for optimizer in ("adam", "momentum", "sgd")] == [16, 12, 8]
    assert [recipe("bf16", optimizer).total for optimizer in ("adam", "momentum", "sgd")] == [8, 6, 4]


def test_mixed_precision_saves_no_states():
    """2+2+12 against 4+4+8: what halves is activations."""
    assert recipe("fp32").total == recipe("bf16_mixed").total == 16
    assert recipe("fp32").parameters == 2 * recipe("bf16_mixed").parameters


def test_states_to_the_byte():
    """A step counter of 4 bytes for each tensor, as torch's AdamW has; none without Adam."""
    count, tensors = parameters(preset("gpt2_small")), len(parameter_shapes(preset("gpt2_small")))
    assert model_states(count, "bf16_mixed", tensors=tensors) == {
        "parameters": 248_879_616, "gradients": 248_879_616, "master": 497_759_232, "optimizer": 995_518_464,
        "steps": 592,
    }  # fmt: skip
    assert model_states(count, recipe("fp32", "sgd"), tensors=tensors)["steps"] == 0
    assert model_states(count, "fp32")["master"] == 0


def test_uneven_shards_are_padded():
    """Ten elements on four ranks are three each; two units of five are two and two."""
    assert model_states(10, "fp32", stage=3, ranks=4).total == 3 * 16
    assert model_states([5, 5], "fp32", stage=3, ranks=4).total == 4 * 16
    assert model_states([5, 5], "fp32", stage=1, ranks=4) == {
        "parameters": 40, "gradients": 40, "master": 0, "optimizer": 4 * 8, "steps": 0,
    }  # fmt: skip
    assert model_states(10, "fp16_megatron", stage=1, ranks=4)["gradients"] == 10 * 2 + 3 * 4


@given(
    st.integers(0, 10**12), st.integers(0, 3), st.integers(1, 4096), st.sampled_from(sorted(memory.states.PRECISIONS))
)
def test_more_ranks_or_a_higher_stage_never_hold_more(count, stage, ranks, name):
    here = model_states(count, name, stage, ranks)
    assert here.total == sum(here.values())
    assert model_states(count, name, stage, ranks + 1).total <= here.total
    if stage < 3:
        assert model_states(count, name, stage + 1, ranks).total <= here.total
    if count % ranks == 0:
        assert here.total == pytest.approx(count * bytes_per_parameter(name, stage, ranks).total)
    assert model_states(count, name, stage, 1) == model_states(count, name)


# Activations of a layer


@pytest.mark.parametrize(("s", "b", "h", "a", "t"), [(16, 1, 64, 4, 2), (32, 3, 96, 8, 4), (2048, 4, 6144, 64, 8)])
def test_korthikanti_table_2(s, b, h, a, t):
    """All rows, in bytes; and the two of sequence parallelism that keeps the gathered inputs."""
    config = Config(layers=2, hidden=h, heads=a, **PAPER)
    sbh, square = s * b * h, 5 * a * s * s * b
    parallel = {"tensor_parallel": t}
    sequence = {**parallel, "sequence_parallel": True}
    table = [
        ({}, sbh * 34 + square),
        (parallel, sbh * 10 + (24 * sbh + square) // t),
        (sequence, (34 * sbh + square) // t),
        ({**parallel, "recompute": "selective"}, sbh * 10 + 24 * sbh // t),
        ({**sequence, "recompute": "selective"}, 34 * sbh // t),
        ({"recompute": "full"}, 2 * sbh),
        ({**parallel, "recompute": "full"}, 2 * sbh),
        ({**sequence, "keep_gathered": True}, 4 * sbh + (30 * sbh + square) // t),
    ]
    for setup, expected in table:
        assert without_statistics(config, s, b, **setup) == expected, setup


def test_eleven_nineteen_four():
    """Attention 11sbh + 5as²b, MLP 19sbh, norms 4sbh: which tensors they are."""
    config, s, b = replace(preset("gpt_22b"), layers=1), 64, 3
    sbh, ass = s * b * 6144, 64 * s * s * b
    terms = layer_activations(config, s, b)
    assert terms == {
        "attention norm input": 2 * sbh, "attention norm statistics": 4 * s * b, "attention norm output": 2 * sbh,
        "queries": 2 * sbh, "keys": 2 * sbh, "values": 2 * sbh, "softmax output": 2 * ass,
        "attention dropout mask": ass, "attention dropout output": 2 * ass, "attention output": 2 * sbh,
        "projection dropout mask": sbh, "MLP norm input": 2 * sbh, "MLP norm statistics": 4 * s * b,
        "MLP norm output": 2 * sbh, "up output": 8 * sbh, "GELU output": 8 * sbh, "MLP dropout mask": sbh,
    }  # fmt: skip
    mlp = terms["MLP norm output"] + terms["up output"] + terms["GELU output"] + terms["MLP dropout mask"]
    assert mlp == 19 * sbh
    assert terms.with_name("input").total == 4 * sbh
    assert terms.total - mlp - 4 * sbh - 8 * s * b == 11 * sbh + 5 * ass


@pytest.mark.parametrize(
    ("changes", "setup", "linear", "square"),
    [
        ({}, {"mask_width": 2}, 36, 6),  # F.dropout on a CPU keeps its mask at the activation's width
        ({"dropout": 0.0, "attention_dropout": 0.0}, {}, 32, 2),
        ({"attention_dropout": 0.0}, {}, 34, 2),
        ({"dropout": 0.0, "attention_dropout": 0.1}, {}, 32, 5),
        ({"attention": "fused"}, {}, 34, 0),
        ({"ffn": 192}, {}, 18 + 4 * 192 / 96, 5),  # 18 + 4·d_ff/h
        ({"dropout": 0.0, "attention_dropout": 0.0}, {"width": 4}, 64, 4),
    ],
)
def test_variants_of_the_layer(changes, setup, linear, square):
    config = replace(Config(layers=2, hidden=96, heads=8, **PAPER), **changes)
    s, b, h, a = 32, 3, 96, 8
    fused = 4 * a * b * s if config.attention == "fused" else 0  # the log-sum-exp
    assert without_statistics(config, s, b, **setup) == linear * s * b * h + square * a * s * s * b + fused


def test_norm_statistics():
    """Two numbers a token of LayerNorm, at the activation's width on a CPU; one of RMSNorm, in fp32 at least."""
    s, b = 16, 3
    cases = [
        (TINY, {}, 2 * 2), (TINY, {"width": 4}, 2 * 4), (TINY, {"statistics_width": 4}, 2 * 4),
        (LLAMA, {}, 4), (LLAMA, {"width": 4}, 4), (LLAMA, {"width": 8}, 8),
        (TINY, {"tensor_parallel": 2}, 2 * 2), (TINY, {"tensor_parallel": 2, "sequence_parallel": True}, 2),
    ]  # fmt: skip
    for config, setup, each in cases:
        statistics = layer_activations(config, s, b, Setup(**setup)).with_name("statistics")
        assert list(statistics.values()) == 2 * [each * s * b], setup


def test_llama_layer():
    """Fewer keys and values; four tensors of the MLP's inner width; no masks."""
    s, b, h, a, g, f = 16, 3, 64, 8, 2, 176
    expected = 2 * s * b * (6 * h + 2 * h * g // a + 4 * f) + 2 * a * s * s * b
    assert without_statistics(LLAMA, s, b) == expected
    assert without_statistics(LLAMA, s, b, recompute="selective") == expected - 2 * a * s * s * b
    fused = replace(LLAMA, attention="fused")
    assert without_statistics(fused, s, b) == expected - 2 * a * s * s * b + 4 * a * s * b


def test_five_as_over_h():
    """Korthikanti 2022: 5as/h for 22B and 175B, and what it is of the layer."""
    for name, expected in (("gpt_22b", 106.7), ("gpt_175b", 80), ("gpt_530b", 64), ("gpt_1t", 64)):
        config = preset(name)
        core = layer_activations(config, 2048, 1).with_name("softmax", "attention dropout").total
        assert round(core / (2048 * config.hidden), 1) == expected


def test_sequence_parallelism_of_chapter_05():
    """t = 4, fused: 16 sbh with TP, 11.5 when gathered inputs are kept, 8.5 when they are gathered again."""
    config = replace(preset("gpt_7_5b"), attention="fused")
    sbh = 2048 * 4096
    setups = {"tensor_parallel": 4}, {"tensor_parallel": 4, "sequence_parallel": True, "keep_gathered": True}
    setups = *setups, {"tensor_parallel": 4, "sequence_parallel": True}
    held_sbh = [
        layer_activations(config, 2048, 1, Setup(**setup)).without_name("statistics", "log-sum-exp").total / sbh
        for setup in setups
    ]
    assert held_sbh == [16, 11.5, 8.5]


def test_crossover():
    """34h/5a: heads of 128 elements, 870 tokens."""
    assert attention_crossover(preset("gpt_7_5b")) == pytest.approx(870.4)
    assert attention_crossover(preset("gpt_22b")) == pytest.approx(34 * 6144 / (5 * 64))
    cut = Setup(tensor_parallel=4, sequence_parallel=True)
    assert attention_crossover(preset("gpt_7_5b"), cut) == pytest.approx(870.4)
    at = layer_activations(replace(preset("gpt_7_5b"), layers=1), 870, 1).without_name("statistics")
    core = at.with_name("softmax", "attention dropout").total
    assert core == pytest.approx(at.total - core, rel=1e-3)
    for config, setup in ((replace(TINY, attention="fused"), Setup()), (TINY, Setup(recompute="selective"))):
        with pytest.raises(ValueError, match="no s² term"):
            attention_crossover(config, setup)


CONFIGS = st.builds(
    lambda llama, a, d, g, f, layers, dropout, attention_dropout, attention: Config(
        dialect="llama" if llama else "gpt", layers=layers, hidden=4 * a * 2 * d, heads=4 * a,
        kv_heads=4 * a if g or not llama else 4, ffn=4 * f, vocab=128, positions=64, dropout=dropout,
        attention_dropout=attention_dropout, attention=attention),
    st.booleans(), st.integers(1, 4), st.integers(1, 8), st.booleans(), st.integers(1, 50), st.integers(1, 5),
    st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.1]), st.sampled_from(["explicit", "fused"]),
)  # fmt: skip
LENGTHS, BATCHES = st.integers(1, 20).map(lambda k: 4 * k), st.integers(1, 4)


@settings(max_examples=60)
@given(CONFIGS, LENGTHS, BATCHES)
def test_parallelism_and_recomputation_never_hold_more(config, s, b):
    def total(**setup):
        return layer_activations(config, s, b, Setup(**setup)).total

    plain = total()
    for t in (2, 4):
        tensor = total(tensor_parallel=t)
        kept = total(tensor_parallel=t, sequence_parallel=True, keep_gathered=True)
        sequence = total(tensor_parallel=t, sequence_parallel=True)
        assert sequence <= kept <= tensor <= plain
        assert sequence * t == plain
    assert total(sequence_parallel=True) == plain
    assert total(recompute="full") <= total(recompute="selective") <= plain
    assert layer_activations(config, s, 2 * b, Setup()).total == 2 * layer_activations(config, s, b, Setup()).total


# A whole model


def test_first_and_last_layers():
    """Korthikanti 2022, section 4.3: embedding dropout sbh, and 4sbh(1 + V/h) behind the last layer, all over t."""
    config, s, b, h = preset("gpt_22b"), 2048, 4, 6144
    for t in (1, 8):
        setup = Setup(tensor_parallel=t, sequence_parallel=True)
        assert embedding_activations(config, s, b, setup)["embedding dropout mask"] == s * b * h // t
        head = head_activations(config, s, b, setup).without_name("statistics", "indices", "loss weight")
        assert head.total == 4 * s * b * (h + 51200) // t
    assert embedding_activations(TINY, 16, 3) == {
        "token indices": 8 * 48, "position indices": 8 * 16, "embedding dropout mask": 48 * 64,
    }  # fmt: skip
    assert embedding_activations(LLAMA, 16, 3) == {"token indices": 8 * 48, "rotary angles": 4 * 16 * 8}
    for width, wide in ((2, 4), (4, 4), (8, 8)):
        found = logits(TINY, 16, 3, Setup(width=width))
        assert found == {"gradient of the log-softmax": wide * 48 * 96, "gradient of the logits": wide * 48 * 96}
    assert head_activations(TINY, 16, 3, Setup(width=8))["log-softmax"] == 8 * 48 * 96


def test_a_model_is_its_layers_and_its_ends():
    for setup in (Setup(), Setup(recompute="selective"), Setup(recompute="full")):
        terms = activations(TINY, 16, 3, setup)
        one = layer_activations(TINY, 16, 3, setup).total
        everything = layer_activations(TINY, 16, 3).total
        assert terms["layers"] == 3 * one
        ends = embedding_activations(TINY, 16, 3, setup).total + head_activations(TINY, 16, 3, setup).total
        again = {"none": 0, "selective": everything - one, "full": everything}[setup.recompute]
        assert terms.total == 3 * one + ends + again
    assert activations(TINY, 16, 3, layers=5)["layers"] == 5 * layer_activations(TINY, 16, 3).total


def test_segments_of_chapter_08():
    """64 layers: c = 8, 32, 64 hold 288, 132, 162 sbh; √(17L) is best; √L loses up to 289 layers."""
    assert [segmented(64, c, kept=2, inside=34) for c in (8, 32, 64)] == [288, 132, 162]
    assert round(best_segments(64, kept=2, inside=34)) == 33
    assert min(range(1, 65), key=lambda c: segmented(64, c, 2, 34)) == 32
    assert every_layer_limit(kept=2, inside=34) == 289
    for layers, every_layer_wins in ((256, True), (289, None), (324, False)):
        root = round(layers**0.5)
        difference = segmented(layers, root, 2, 34) - segmented(layers, layers, 2, 34)
        assert (difference > 0) is every_layer_wins or (difference == 0 and every_layer_wins is None)


@given(st.integers(1, 300), st.floats(0.5, 10), st.floats(0.5, 500))
def test_no_number_of_segments_beats_the_best(layers, kept, inside):
    """Without the rounding up of L/c, the sum at the best c is the least."""

    def smooth(c):
        return c * kept + layers / c * inside

    best = best_segments(layers, kept, inside)
    assert 1 <= best <= layers
    assert all(smooth(best) <= smooth(c) * (1 + 1e-9) for c in range(1, layers + 1))


def test_pipelines_hold():
    """1F1B: L layers' worth on the first stage whatever p is; GPipe m; interleaved 1 + (p−1)/(pv) as much."""
    for p in (2, 4, 8):
        assert layers_in_flight(48, p, micro_batches=16) == 48
        assert layers_in_flight(48, p, 16, "gpipe") == 48 // p * 16
        for v in (2, 3):
            got = layers_in_flight(48 * p * v, p, 16, "interleaved", chunks=v)
            assert got == pytest.approx(48 * p * v * (1 + (p - 1) / (p * v)))
    assert [layers_in_flight(4, 4, 6, rank=r) for r in range(4)] == [4, 3, 2, 1]
    assert [layers_in_flight(4, 4, 3, rank=r) for r in range(4)] == [3, 3, 2, 1]
    assert [layers_in_flight(4, 4, 6, "gpipe", r) for r in range(4)] == [6, 6, 6, 6]
    assert [layers_in_flight(30, 4, 1, rank=r) for r in range(4)] == [8, 8, 7, 7]
    assert layers_in_flight(16, 4, 4, "interleaved", chunks=2) == 2 * min(8, 11)  # all that there are


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (8, 2, 16)])
def test_interleaved_warm_up_by_playing_the_order(p, v, m):
    """Megatron's order: 2(p−r−1) + (v−1)p forwards ahead, then a forward and a backward in turn."""
    for rank in range(p):
        warm_up = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
        order = [1] * warm_up + [1, -1] * (m * v - warm_up)
        peak = max(sum(order[:i]) for i in range(len(order) + 1))
        assert layers_in_flight(p * v * 3, p, m, "interleaved", rank, v) == 3 * peak


# Operations


@pytest.mark.parametrize(
    ("name", "devices", "batch", "seconds", "mfu", "hfu"),
    [
        ("gpt_22b", 8, 4, 1.10, 41.7, 43.8),  # printed 41.5 and 43.7, from the time before it was rounded
        ("gpt_175b", 64, 64, 13.75, 51.4, 52.8),
        ("gpt_530b", 280, 280, 37.83, 56.0, 57.0),
        ("gpt_1t", 512, 512, 71.49, 56.3, 57.0),
    ],
)
def test_korthikanti_table_5(name, devices, batch, seconds, mfu, hfu):
    """MFU and HFU in per cent of 312 TFLOP/s."""
    config = preset(name)
    share = [
        round(100 * utilization(flops, seconds, devices, peak=312e12), 1)
        for flops in (model_flops(config, 2048, batch), korthikanti_hardware_flops(config, 2048, batch))
    ]
    assert share == [mfu, hfu]


@pytest.mark.parametrize("name", ["gpt_7_5b", "gpt_22b", "gpt_175b"])
def test_closed_forms_of_operations(name):
    config, s, batch = preset(name), 2048, 6
    h, layers, vocab = config.hidden, config.layers, config.vocab
    unit = batch * layers * s * h * h
    model = 72 * unit * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert model_flops(config, s, batch) == pytest.approx(model, rel=1e-12)
    printed = 72 * unit * (1 + s / (3 * h) + vocab / (12 * h * layers))
    assert korthikanti_hardware_flops(config, s, batch) == pytest.approx(printed, rel=1e-12)
    full = 96 * unit * (1 + s / (6 * h) + vocab / (16 * layers * h))  # Narayanan 2021
    assert hardware_flops(config, s, batch, "full") == pytest.approx(full, rel=1e-12)
    again = hardware_flops(config, s, batch, "selective") - model_flops(config, s, batch)
    assert again == 4 * batch * layers * s * s * h
    assert hardware_flops(config, s, batch) == model_flops(config, s, batch)


def test_operations_are_two_for_each_weight_and_token_and_the_s_squared_products():
    """Any config: weights of matrices, the head among them, and nothing for embeddings, norms or biases."""
    for config in (TINY, LLAMA, replace(LLAMA, kv_heads=8), preset("llama3_8b")):
        matrices = [v for n, v in parameter_shapes(replace(config, tied=False)).items() if len(v) == 2]
        weights = sum(map(prod, matrices)) - config.vocab * config.hidden
        weights -= config.positions * config.hidden if config.dialect == "gpt" else 0
        forward = forward_flops(config, s=32, b=2)
        assert forward.total - forward["attention"] == 2 * weights * 32 * 2
        assert forward["attention"] == 2 * (2 * 2 * 32 * 32 * config.hidden) * config.layers
        assert forward_flops(config, 32, 2, causal=True)["attention"] * 2 == forward["attention"]
        halved = model_flops(config, 32, 2) - model_flops(config, 32, 2, causal=True)
        assert halved == 3 * forward["attention"] // 2


def test_days():
    """175B on 300B tokens, 1024 GPUs at 140 TFLOP/s: 34 days (Narayanan 2021)."""
    assert round(training_days(175e9, 300e9, devices=1024, flops_per_second=140e12)) == 34
    assert training_days(1e9, 1e9, 1, 1e12, recompute=False) == pytest.approx(6e6 / DAY)
    for teraflops, percent in ((137, 44), (142, 46), (138, 44), (148, 47)):
        assert round(100 * utilization(teraflops * 1e12, 1, 1, 312e12)) == percent


# What fits


def test_the_cheapest_stage_for_70b_on_64_cards():
    """Stage 2 holds 156.5 GB of states, stage 3 17.6: only that one fits 80 GB."""
    config, setup = preset("llama3_70b"), Setup(recompute="full")
    assert cheapest_stage(80 * GB, config, 4096, 1, ranks=64, setup=setup) == 3
    states = [held(config, 4096, 1, stage=stage, ranks=64, setup=setup).states.total / GB for stage in range(4)]
    assert [round(x, 1) for x in states] == [1128.9, 295.4, 156.5, 17.6]
    assert cheapest_stage(1e6, config, 4096, 1, ranks=64) is None
    assert cheapest_stage(1e13, config, 4096, 1) == 0


def test_what_is_held_adds_up_in_every_view():
    for stage in range(4):
        answer = held(LLAMA, 16, 3, "bf16_fp32_gradients", stage, ranks=4, setup=Setup(tensor_parallel=2))
        assert answer.total == answer.categories.total == answer.groups.total
        assert list(answer.categories) == [
            "parameters", "gradients", "master", "optimizer", "steps", "activations", "buffers", "other",
        ]  # fmt: skip
    unit = 2 * 64 * 64 + 2 * 16 * 64 + 3 * 176 * 64 + 2 * 64  # a layer is more than the embedding here
    buffers = held(LLAMA, 16, 3, "bf16_fp32_gradients", stage=3, ranks=4).buffers
    assert buffers["gathered parameters"] == 2 * unit
    assert buffers["gradients before reduction"] == 4 * unit
    extra = [len(held(LLAMA, 16, 3, stage=stage, ranks=4).buffers) - len(logits(LLAMA, 16, 3)) for stage in range(4)]
    assert extra == [0, 0, 1, 2]
    assert held(LLAMA, 16, 3, stage=3, ranks=1).buffers == logits(LLAMA, 16, 3)
    fp32 = held(LLAMA, 16, 3, "fp32")
    assert fp32.activations == activations(LLAMA, 16, 3, Setup(width=4))


def test_an_answer_can_be_said():
    """A 7.5B model: the optimizer fills the card."""
    config = preset("gpt_7_5b")
    answer = fits(80 * GB, config, 2048, 1, setup=Setup(recompute="full"))
    assert not answer
    assert answer.largest == ("optimizer", 12 * parameters(config) + 4 * len(parameter_shapes(config)))
    assert answer.spare == 80 * GB - answer.held.total
    assert fits(answer.held.total, config, 2048, 1, setup=Setup(recompute="full"))
    assert fits(1e15, config, 2**16, 1).largest[0] == "activations"


# Text, and what is refused


@pytest.mark.parametrize(
    ("nbytes", "decimal", "binary"),
    [
        (0, "0 GB", "0 GiB"), (1.88e9, "1.88 GB", "1.75 GiB"), (9.999e9, "10.0 GB", "9.31 GiB"),
        (99.96e9, "100 GB", "93.1 GiB"), (1_128_854_618_112, "1,129 GB", "1,051 GiB"), (2**30, "1.07 GB", "1.00 GiB"),
        (5e6, "0.00500 GB", "0.00466 GiB"), (999.7e9, "1,000 GB", "931 GiB"),
    ],
)  # fmt: skip
def test_gb_and_gib(nbytes, decimal, binary):
    assert (gb(nbytes), gib(nbytes)) == (decimal, binary)


def test_terms():
    terms = Terms({"a input": 1, "b": 2})
    assert (terms.total, terms.with_name("input"), terms.without_name("input")) == (3, {"a input": 1}, {"b": 2})
    assert Terms().total == 0


BAD = [
    (lambda: parameters(preset("gpt2_small"), tensor_parallel=2), ValueError, "vocab=50257: pad it.*50258"),
    (lambda: parameters(LLAMA, tensor_parallel=4), ValueError, "tensor_parallel=4 does not divide kv_heads=2"),
    (lambda: parameters(TINY, tensor_parallel=0), ValueError, "tensor_parallel is 0"),
    (lambda: parameters(7e9), TypeError, "without layers: expected a labkit.model.Config"),
    (lambda: layer_activations(TINY, 0, 1), ValueError, "s .* is 0"),
    (lambda: layer_activations(TINY, 16, -1), ValueError, "b .* is -1"),
    (lambda: layer_activations(TINY, 16.0, 1), TypeError, "16.0: expected a whole number"),
    (lambda: layer_activations(TINY, 15, 1, Setup(tensor_parallel=2, sequence_parallel=True)), ValueError, "s=15"),
    (lambda: logits(TINY, 0, 1), ValueError, "s .* is 0"),
    (lambda: Setup(recompute="some"), ValueError, "'none', 'selective', 'full'"),
    (lambda: Setup(keep_gathered=True), ValueError, "without sequence_parallel"),
    (lambda: Setup(width=0), ValueError, "width is 0"),
    (lambda: Setup(statistics_width=0), ValueError, "statistics_width is 0"),
    (lambda: recipe("bf32"), ValueError, "precision is 'bf32': expected one of 'fp32'"),
    (lambda: recipe("fp32", "lion"), ValueError, "optimizer is 'lion'"),
    (lambda: Recipe(2, 2, 0, 4, -8, 4), ValueError, "optimizer is -8"),
    (lambda: bytes_per_parameter("fp32", stage=4), ValueError, "stage is 4: ZeRO has 1, 2 and 3"),
    (lambda: bytes_per_parameter(16), TypeError, "the recipe is 16"),
    (lambda: model_states(-1), ValueError, "parameters is -1"),
    (lambda: model_states(7.5e9), TypeError, "expected a whole number"),
    (lambda: model_states(10, ranks=0), ValueError, "ranks is 0"),
    (lambda: model_states(10, tensors=-1), ValueError, "tensors is -1"),
    (lambda: segmented(4, 5, 2, 34), ValueError, "segments is 5, but there are 4 layers"),
    (lambda: best_segments(4, 0, 34), ValueError, "kept is 0"),
    (lambda: every_layer_limit(2, 0), ValueError, "inside is 0"),
    (lambda: layers_in_flight(4, 8, 8), ValueError, "stages is 8, but there are 4 layers"),
    (lambda: layers_in_flight(8, 4, 8, rank=4), ValueError, "rank is 4"),
    (lambda: layers_in_flight(8, 4, 8, chunks=2), ValueError, "use 'interleaved'"),
    (lambda: layers_in_flight(8, 4, 8, "interleaved"), ValueError, "chunks=2 or more"),
    (lambda: layers_in_flight(8, 4, 6, "interleaved", chunks=2), ValueError, "stages=4 does not divide micro_batches"),
    (lambda: layers_in_flight(12, 4, 8, "interleaved", chunks=2), ValueError, "does not divide layers=12"),
    (lambda: layers_in_flight(8, 4, 8, "dualpipe"), ValueError, "schedule is 'dualpipe'"),
    (lambda: hardware_flops(TINY, 16, 1, "half"), ValueError, "recompute is 'half'"),
    (lambda: utilization(1e12, 0, 1, 312e12), ValueError, "seconds is 0"),
    (lambda: training_days(1e9, 1e9, 0, 1e12), ValueError, "devices is 0"),
    (lambda: closed_form(0, 1, 1, 1), ValueError, "layers is 0"),
    (lambda: fits(0, TINY, 16, 1), ValueError, "capacity is 0"),
    (lambda: gb(-1), ValueError, "nbytes is -1"),
    (lambda: gib("80"), TypeError, "nbytes is '80'"),
    (lambda: activations(TINY, 16, 1, layers=-1), ValueError, "layers is -1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_bad_input_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"dialect": "bert"}, ValueError, "dialect is 'bert'"),
        ({"attention": "flash"}, ValueError, "attention is 'flash'"),
        ({"heads": 5}, ValueError, "heads=5 does not divide hidden=64"),
        ({"kv_heads": 3}, ValueError, "kv_heads=3 does not divide heads=4"),
        ({"layers": 0}, ValueError, "layers is 0"),
        ({"hidden": 64.0}, TypeError, "hidden is 64.0"),
    ],
)
def test_any_object_with_the_attributes_will_do_if_they_fit(change, error, text):
    names = (*memory.shape.SIZES, *memory.shape.OTHERS)
    own = SimpleNamespace(**{name: getattr(TINY, name) for name in names})
    assert parameters(own) == parameters(TINY)
    with pytest.raises(error, match=text):
        parameters(SimpleNamespace(**{**vars(own), **change}))
