"""The model: bytes kept for backward against the published count, numbers against torch's own and against formulas."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labkit.model import PRESETS, Attention, Block, Config, Transformer, loss, preset
from labkit.model.attention import causal_mask, explicit_attention, fused_attention
from labkit.model.dropout import Dropout
from labkit.model.norm import RMSNorm
from labkit.model.rotary import rotate, rotation

DIALECTS = ("gpt", "llama")


def small(dialect: str, **changes) -> Config:
    given = {"layers": 2, "hidden": 24, "heads": 6, "vocab": 11, "positions": 16}
    return Config(**{"dialect": dialect, **given, **({"kv_heads": 2} if dialect == "llama" else {}), **changes})


def build(config: Config, seed: int = 0) -> Transformer:
    """In float64 with parameters so large that every one of them matters."""
    torch.manual_seed(seed)
    model = Transformer(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def some_tokens(b: int, s: int, vocab: int = 11) -> torch.Tensor:
    return torch.randint(vocab, (b, s), generator=torch.Generator().manual_seed(b + s))


# ── bytes kept for backward ──


def kept(forward, besides=()) -> int:
    """Bytes of all storages that autograd saves while `forward` runs, each once, without those of `besides`."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    assert result is not None
    known = {tensor.untyped_storage().data_ptr() for tensor in besides}
    return sum(t.untyped_storage().nbytes() for place, t in storages.items() if place not in known)


def layer_keeps(s: int, b: int, h: int, a: int, **changes) -> tuple[int, Config]:
    config = Config(layers=1, hidden=h, heads=a, vocab=16, positions=s, **changes)
    block = Block(config, dtype=torch.bfloat16)
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    angles = rotation(torch.arange(s), config.head_size, x.dtype) if config.dialect == "llama" else ()
    return kept(lambda: block(x, angles or None), [*block.parameters(), *angles]), config


SHAPES = [(16, 2, 32, 4), (24, 1, 48, 4), (8, 3, 16, 1), (8, 1, 16, 1), (1, 2, 16, 2), (40, 4, 64, 8)]
#: LayerNorm's mean and 1/σ: two layer norms, 2·s·b elements each, in 16 bits on a CPU.
LAYER_NORM_STATISTICS = 2 * 2 * 2


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_a_gpt_layer_keeps_what_korthikanti_counts(s, b, h, a):
    """Korthikanti et al. 2022, equation 1: attention 11sbh + 5as²b, MLP 19sbh, two layer norms 4sbh."""
    got, _ = layer_keeps(s, b, h, a, dialect="gpt", dropout=0.1)
    assert got == 34 * s * b * h + 5 * a * s * s * b + LAYER_NORM_STATISTICS * s * b


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_a_gpt_layer_without_dropout_has_no_masks(s, b, h, a):
    """Two sbh masks go, and of the s² terms the mask (1 byte) and what it left of the probabilities (2 bytes)."""
    got, _ = layer_keeps(s, b, h, a, dialect="gpt")
    assert got == 32 * s * b * h + 2 * a * s * s * b + LAYER_NORM_STATISTICS * s * b


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_a_gpt_layer_with_fused_attention_keeps_no_square(s, b, h, a):
    got, _ = layer_keeps(s, b, h, a, dialect="gpt", attention="fused", dropout=0.1, attention_dropout=0.0)
    log_of_sums = 4 * a * b * s
    assert got == 34 * s * b * h + log_of_sums + LAYER_NORM_STATISTICS * s * b


@pytest.mark.parametrize("attention", ["explicit", "fused"])
@pytest.mark.parametrize("kv_heads", [1, None])
@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_what_a_llama_layer_keeps(s, b, h, a, kv_heads, attention):
    got, config = layer_keeps(s, b, h, a, dialect="llama", kv_heads=kv_heads, attention=attention)
    f, kv = config.ffn, h // a * config.kv_heads
    norm_inputs, norm_scales = 2 * 2 * s * b * h, 2 * 4 * s * b  # one fp32 number a token and norm
    attention_input = mlp_input = context = 2 * s * b * h
    query, key_and_value = 2 * s * b * h, 2 * 2 * s * b * kv
    square = 2 * a * s * s * b if attention == "explicit" else 0
    log_of_sums = 0 if attention == "explicit" else 4 * a * b * s
    gate, activated, up, product = 4 * [2 * s * b * f]
    assert got == (
        norm_inputs + norm_scales + attention_input + query + key_and_value + square + log_of_sums + context
        + mlp_input + gate + activated + up + product
    )  # fmt: skip


def test_what_a_whole_gpt_keeps():
    """Korthikanti et al. 2022, section 4.3: L layers, the embedding's mask sbh, and 4sbh(1 + V/h) at the end."""
    s, b, h, a, layers, vocab = 16, 2, 32, 4, 3, 80
    config = Config(dialect="gpt", layers=layers, hidden=h, heads=a, vocab=vocab, positions=s, dropout=0.1)
    model = Transformer(config, dtype=torch.bfloat16)
    tokens = some_tokens(b, s, vocab)
    got = kept(lambda: loss(model(tokens), tokens), [*model.parameters(), tokens])
    layer = 34 * s * b * h + 5 * a * s * s * b + LAYER_NORM_STATISTICS * s * b
    embedding = s * b * h + 8 * s  # its mask; int64 positions
    head = 2 * s * b * h + 4 * s * b + 2 * s * b * h  # the last norm's input and statistics, the head's input
    logits = 4 * s * b * vocab + 4  # in fp32; cross entropy's count, which it saves as well
    assert got == layers * layer + embedding + head + logits


def test_given_positions_cost_fused_attention_one_mask_for_all_layers():
    s, b = 16, 2
    model = Transformer(small("gpt", attention="fused", layers=3), dtype=torch.bfloat16)
    tokens, positions = some_tokens(b, s), torch.arange(s)
    besides = [*model.parameters(), tokens, positions]
    more = kept(lambda: model(tokens, positions), besides) - kept(lambda: model(tokens), besides)
    assert more == 2 * s * s - 8 * s  # the mask; our own int64 positions are not counted


def test_a_dropout_mask_is_one_byte_an_element_and_only_while_training():
    x = torch.ones(100, 100, dtype=torch.bfloat16, requires_grad=True)
    assert kept(lambda: Dropout(0.25)(x)) == x.numel()
    assert kept(lambda: Dropout(0.25).eval()(x)) == kept(lambda: Dropout(0.0)(x)) == 0
    torch.manual_seed(0)
    dropped = Dropout(0.25)(x)
    assert set(dropped.flatten().tolist()) == {0.0, float(torch.tensor(1 / 0.75, dtype=torch.bfloat16))}
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(grad, dropped.detach())


# ── numbers ──


def heads(b: int, a: int, kv: int, s: int, d: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(b, n, s, d, dtype=torch.float64, requires_grad=True) for n in (a, kv, kv)]


def by_hand(q, k, v, positions):
    """Vaswani et al. 2017, equation 1, one head and one token at a time."""
    out = torch.empty_like(q)
    for b, a, i in itertools.product(*(range(n) for n in q.shape[:3])):
        group = a // (q.shape[1] // k.shape[1])
        seen = [j for j in range(q.shape[2]) if positions[j] <= positions[i]]
        weights = [math.exp(float(q[b, a, i] @ k[b, group, j]) / math.sqrt(q.shape[3])) for j in seen]
        out[b, a, i] = sum(w * v[b, group, j] for w, j in zip(weights, seen, strict=True)) / sum(weights)
    return out


@pytest.mark.parametrize("attend", [explicit_attention, fused_attention])
@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("positions", [None, [0, 5, 1, 4, 2, 3]])
def test_attention_is_the_formula(attend, kv, positions):
    q, k, v = heads(1, 4, kv, 6, 4)
    mask = None if positions is None else causal_mask(torch.tensor(positions), torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(attend(q, k, v, mask, Dropout(0.0)), by_hand(q, k, v, positions or range(6)))


@pytest.mark.parametrize("kv", [4, 2, 1])
def test_explicit_attention_is_torchs_own(kv):
    mine, theirs = heads(3, 4, kv, 7, 6), heads(3, 4, kv, 7, 6)
    out = explicit_attention(*mine, None, Dropout(0.0))
    expected = F.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    for total in (out, expected):
        (total * torch.arange(6.0, dtype=torch.float64)).sum().backward()
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("positions", [None, torch.tensor([0, 7, 1, 6, 2, 5, 3, 4])])
def test_explicit_and_fused_attention_make_one_model(dialect, positions):
    tokens = some_tokens(3, 8)
    results = []
    for attention in ("explicit", "fused"):
        model = build(small(dialect, attention=attention))
        total, _ = loss(model(tokens, positions), tokens)
        total.backward()
        results.append([total, *(p.grad for p in model.parameters())])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_attention_dropout_drops_probabilities_in_both_ways():
    """With v = 1 a row's output is what is left of its probabilities: the mean over many draws is 1, each is not."""
    q, k, v = heads(64, 2, 2, 32, 4)
    for attend in (explicit_attention, fused_attention):
        torch.manual_seed(0)
        out = attend(q, k, torch.ones_like(v), None, Dropout(0.5))
        assert float(out.detach().mean()) == pytest.approx(1, abs=0.02)
        assert float(out.detach().std()) > 0.1
        still = attend(q, k, torch.ones_like(v), None, Dropout(0.5).eval())
        torch.testing.assert_close(still, torch.ones_like(still))


def test_a_gpt_is_torchs_own_encoder_layers():
    config = small("gpt")
    model, tokens = build(config), some_tokens(3, 9)
    layer = nn.TransformerEncoderLayer(
        config.hidden, config.heads, config.ffn, dropout=0.0, activation="gelu", batch_first=True, norm_first=True,
        dtype=torch.float64,
    )  # fmt: skip
    x = model.token_embedding.weight[tokens] + model.position_embedding.weight[:9]
    for block in model.blocks:
        names = {
            "self_attn.in_proj_": block.attention.qkv, "self_attn.out_proj.": block.attention.output,
            "linear1.": block.mlp.up, "linear2.": block.mlp.down,
            "norm1.": block.attention_norm, "norm2.": block.mlp_norm,
        }  # fmt: skip
        layer.load_state_dict(
            {f"{theirs}{p}": getattr(m, p) for theirs, m in names.items() for p in ("weight", "bias")}
        )
        x = layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64), is_causal=True)
    x = F.layer_norm(x, (config.hidden,), model.norm.weight, model.norm.bias)
    torch.testing.assert_close(model(tokens), x @ model.token_embedding.weight.T)


def llama_by_formula(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Written anew: rotations as complex numbers, key heads repeated, norms and MLP as published."""
    c, p = model.config, dict(model.named_parameters())
    s, d = tokens.shape[1], c.hidden // c.heads
    theta = 500_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    turn = torch.exp(1j * torch.outer(torch.arange(s, dtype=torch.float64), theta))  # (s, d/2)

    def turned(t):  # (b, heads, s, d)
        return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (d // 2, 2)).contiguous()) * turn).flatten(-2)

    def normed(t, weight):
        return t * weight / (t.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    x = p["token_embedding.weight"][tokens]
    for i in range(c.layers):
        w = {n.removeprefix(f"blocks.{i}."): t for n, t in p.items() if n.startswith(f"blocks.{i}.")}
        y = normed(x, w["attention_norm.weight"])
        q, k, v = (
            (y @ w[f"attention.{n}.weight"].T).unflatten(-1, (-1, d)).transpose(1, 2) for n in ("query", "key", "value")
        )
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, dim=1) for t in (turned(k), v))
        scores = turned(q) @ k.mT / math.sqrt(d)
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["attention.output.weight"].T
        y = normed(x, w["mlp_norm.weight"])
        gate, up = y @ w["mlp.gate.weight"].T, y @ w["mlp.up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down.weight"].T
    return normed(x, p["norm.weight"]) @ p["head.weight"].T


@pytest.mark.parametrize("attention", ["explicit", "fused"])
def test_a_llama_is_its_formulas(attention):
    model, tokens = build(small("llama", attention=attention)), some_tokens(3, 9)
    torch.testing.assert_close(model(tokens), llama_by_formula(model, tokens))


def test_shared_key_heads_are_repeated_ones():
    few, many = (Attention(small("llama", kv_heads=n), dtype=torch.float64) for n in (2, 6))
    state = few.state_dict()
    for name in ("key.weight", "value.weight"):
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(3, dim=0).flatten(0, 1)
    many.load_state_dict(state)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    angles = rotation(torch.arange(7), 4, x.dtype)
    torch.testing.assert_close(few(x, angles), many(x, angles))


def test_a_rotation_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def product(p: int, r: int) -> torch.Tensor:
        turned = [rotate(t[None], rotation(torch.tensor([at]), 8, t.dtype)) for t, at in ((q, p), (k, r))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(3, 1), product(1003, 1001))
    assert abs(float(product(3, 1) - product(3, 2))) > 1e-3


def test_angles_of_a_16_bit_model_are_exact_enough():
    cos, _ = rotation(torch.tensor([2048, 2049]), 8, torch.bfloat16)
    expected, _ = rotation(torch.tensor([2048, 2049]), 8, torch.float64)
    torch.testing.assert_close(cos.double(), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_rms_norm_is_torchs_own(dtype, tolerance):
    torch.manual_seed(0)
    mine, theirs = RMSNorm(16), RMSNorm(16)
    with torch.no_grad():
        theirs.weight.copy_(mine.weight.normal_())
    mine, theirs = mine.to(dtype), theirs.to(dtype)
    x, y = (torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_() for _ in "xy")
    weigh = torch.randn(2, 5, 16).to(dtype)
    out, expected = mine(x), F.rms_norm(y, (16,), theirs.weight, 1e-5)
    for total in (out, expected):
        (total * weigh).sum().backward()
    for a, b in ((out, expected), (x.grad, y.grad), (mine.weight.grad, theirs.weight.grad)):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# ── positions ──


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("attention", ["explicit", "fused"])
def test_tokens_in_another_order_give_the_same_logits_in_that_order(dialect, attention):
    """Zig-zag: chunks 0 and 3 on one rank, 1 and 2 on the other."""
    model, tokens = build(small(dialect, attention=attention)), some_tokens(2, 8)
    expected = model(tokens)
    order = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    torch.testing.assert_close(model(tokens[:, order], order), expected[:, order])
    each = torch.stack([order, torch.arange(8)])  # every sequence in an order of its own
    moved = torch.stack([tokens[0, order], tokens[1]])
    torch.testing.assert_close(model(moved, each), torch.stack([expected[0, order], expected[1]]))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_token_changes_nothing_before_its_position(dialect):
    model, tokens = build(small(dialect)), some_tokens(1, 8)
    order = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
    other = tokens.clone()
    other[0, 4] = (other[0, 4] + 1) % 11  # the one at position 6
    changed = (model(tokens, order) - model(other, order)).abs().sum(-1)[0] > 0
    assert changed.tolist() == [p >= 6 for p in order.tolist()]


def test_gpt_looks_a_position_up_where_it_is_told():
    model, tokens = build(small("gpt")), some_tokens(1, 4)
    with torch.no_grad():
        before = model(tokens, torch.arange(4) + 5)
        model.position_embedding.weight[5:9] = model.position_embedding.weight[:4].clone()
    torch.testing.assert_close(model(tokens, torch.arange(4) + 5), model(tokens))
    assert not torch.allclose(before, model(tokens))


# ── parameters ──


def count(config: Config) -> tuple[int, int]:
    parameters = list(Transformer(config, device="meta").parameters())
    return sum(p.numel() for p in parameters), len(parameters)


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("gpt2_small", 124_439_808, 148),  # the published checkpoint
        ("llama3_8b", 8_030_261_248, 3 + 32 * 9),
        ("llama3_70b", 70_553_706_496, 3 + 80 * 9),
        ("llama3_405b", 405_853_388_800, 3 + 126 * 9),
    ],
)
def test_published_numbers_of_parameters(name, parameters, tensors):
    assert count(preset(name)) == (parameters, tensors)


@pytest.mark.parametrize("name", ["gpt_7_5b", "gpt_22b", "gpt_175b", "gpt_530b", "gpt_1t"])
def test_the_papers_models_have_as_many_as_their_equation_says(name):
    """Narayanan et al. 2021, equation 2, which leaves the last layer norm's 2h out; sizes from its Table 1."""
    c = preset(name)
    layers, h, v, s = c.layers, c.hidden, c.vocab, c.positions
    assert count(c)[0] == 12 * layers * h * h + 13 * layers * h + (v + s) * h + 2 * h
    size = {"gpt_7_5b": 7.5, "gpt_22b": 22, "gpt_175b": 174.6, "gpt_530b": 529.6, "gpt_1t": 1008}[name]
    assert count(c)[0] / 1e9 == pytest.approx(size, rel=0.005)


def test_a_tied_head_is_the_embedding():
    tied, free = (Transformer(small("gpt", tied=t)) for t in (True, False))
    assert tied.head.weight is tied.token_embedding.weight
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == 11 * 24
    assert Transformer(small("llama", tied=True)).head.weight.shape == (11, 24)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_parameters_are_drawn_as_gpt2s(dialect):
    config = Config(dialect=dialect, layers=8, hidden=128, heads=4, vocab=512, positions=64)
    torch.manual_seed(3)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert set(parameter.tolist()) == {1.0 if name.endswith("norm.weight") else 0.0}, name
        else:
            narrow = name.endswith(("attention.output.weight", "mlp.down.weight"))
            assert float(parameter.detach().std()) == pytest.approx(0.005 if narrow else 0.02, rel=0.05), name
    torch.manual_seed(3)
    again = Transformer(config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_model_built_without_numbers_can_be_given_some():
    torch.manual_seed(3)
    model = Transformer(small("gpt"), device="meta").to_empty(device="cpu")
    model.reset_parameters()
    assert float(model.head.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert torch.isfinite(model(some_tokens(2, 4))).all()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_new_model_knows_nothing(dialect):
    model, tokens = Transformer(preset(f"tiny_{dialect}")), some_tokens(4, 64, 256)
    total, n = loss(model(tokens), tokens.flip(0))
    assert float((total / n).detach()) == pytest.approx(math.log(256), abs=0.15)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_sequences_give_no_logits(dialect):
    model = Transformer(small(dialect))
    total, n = loss(model(torch.zeros(0, 4, dtype=torch.int64)), torch.zeros(0, 4, dtype=torch.int64))
    total.backward()
    assert (float(total.detach()), int(n)) == (0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# ── the loss ──


def test_loss_is_a_sum_and_a_count():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[0, 4, -100], [-100, 2, 2]])
    total, n = loss(logits, targets)
    expected = 0.0
    for row, target in zip(logits.flatten(0, 1).tolist(), targets.flatten().tolist(), strict=True):
        expected -= math.log(math.exp(row[target]) / sum(map(math.exp, row))) if target >= 0 else 0.0
    assert (total.dtype, float(total), int(n)) == (torch.float64, pytest.approx(expected, rel=1e-14), 4)
    parts = [loss(logits[i], targets[i]) for i in range(2)]
    torch.testing.assert_close(sum(p[0] for p in parts), total)
    assert int(sum(p[1] for p in parts)) == 4
    assert int(loss(logits, targets.clamp(0), ignore_index=2)[1]) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_16_bit_logits_is_summed_in_32(dtype):
    logits = torch.randn(700, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.arange(700) % 256
    total, _ = loss(logits, targets)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), loss(logits.double(), targets)[0], rtol=1e-6, atol=0)


def test_no_target_that_counts_is_zero_and_not_nan():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    total, n = loss(logits, torch.full((2, 3), -100))
    total.backward()
    assert (float(total.detach()), int(n)) == (0, 0)
    assert torch.equal(logits.grad, torch.zeros(2, 3, 5))


# ── what is refused ──


@pytest.mark.parametrize(
    ("tokens", "positions", "error", "says"),
    [
        (torch.tensor([[0, 11]]), None, ValueError, r"tokens holds 11: expected 0 … 10, below config.vocab=11"),
        (torch.tensor([[0, -1]]), None, ValueError, r"tokens holds -1"),
        (torch.zeros(1, 17, dtype=torch.int64), None, ValueError, r"17 long: expected at most config.positions=16"),
        (torch.zeros(1, 2), None, TypeError, r"tokens is torch.float32: expected a tensor of whole numbers"),
        ([[1, 2]], None, TypeError, r"tokens is list"),
        (torch.zeros(4, dtype=torch.int64), None, ValueError, r"shape \(4,\): expected \(sequences, tokens\)"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.arange(4), ValueError, r"positions has shape \(4,\): .*\(3,\)"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.arange(3.0), TypeError, r"positions is torch.float32"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.tensor([0, 16]), ValueError, r"positions holds 16: .* 0 … 15"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dialect", DIALECTS)
def test_tokens_and_positions_that_are_refused(dialect, tokens, positions, error, says):
    with pytest.raises(error, match=says):
        Transformer(small(dialect))(tokens, positions)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"dialect": "gtp"}, ValueError, "dialect='gtp': expected one of 'gpt', 'llama'; did you mean 'gpt'"),
        ({"dialect": "bert"}, ValueError, "dialect='bert': expected one of 'gpt', 'llama'$"),
        ({"attention": "flash"}, ValueError, "attention='flash': expected one of 'explicit', 'fused'"),
        ({"heads": 5}, ValueError, "heads=5 does not divide hidden=24"),
        ({"dialect": "llama", "kv_heads": 4}, ValueError, "kv_heads=4 does not divide heads=6"),
        ({"kv_heads": 2}, ValueError, "dialect 'gpt' has a key head for every query head"),
        ({"dialect": "llama", "heads": 8}, ValueError, "3 elements a head: expected an even number"),
        ({"layers": 0}, ValueError, "layers=0: expected at least 1"),
        ({"hidden": 24.0}, TypeError, "hidden is 24.0: expected a whole number"),
        ({"ffn": True}, TypeError, "ffn is True"),
        ({"dropout": 1.0}, ValueError, "dropout=1.0: expected a share from 0"),
        ({"attention_dropout": "no"}, TypeError, "attention_dropout is 'no': expected a number"),
    ],
)
def test_configs_that_are_refused(changes, error, says):
    with pytest.raises(error, match=says):
        small(**{"dialect": "gpt", **changes})


def test_a_misspelt_preset_is_named():
    with pytest.raises(ValueError, match=r"preset='lama3_8b': expected one of .*; did you mean 'llama3_8b'"):
        preset("lama3_8b")


@pytest.mark.parametrize(
    ("logits", "targets", "error", "says"),
    [
        (torch.zeros(2, 3, 5), torch.zeros(2, 5, dtype=torch.int64), ValueError, r"targets has shape \(2, 5\)"),
        (torch.zeros(2, 5), torch.zeros(2), TypeError, "targets is torch.float32: expected torch.int64"),
        (torch.zeros(2, 5), torch.tensor([1, 5]), ValueError, "Target 5 is out of bounds. Expected 0 … 4"),
    ],
)
def test_losses_that_are_refused(logits, targets, error, says):
    with pytest.raises(error, match=says):
        loss(logits, targets)


# ── the config ──


def test_a_config_has_no_holes_and_cannot_be_changed():
    config = Config(dialect="llama", layers=1, hidden=100, heads=2, vocab=7, positions=5)
    assert (config.kv_heads, config.ffn, config.tied, config.attention_dropout) == (2, 272, False, 0.0)
    assert preset("tiny_gpt", dropout=0.3).attention_dropout == 0.3
    assert preset("tiny_gpt", hidden=128, heads=8) == dataclasses.replace(
        PRESETS["tiny_gpt"], hidden=128, heads=8, kv_heads=8, ffn=512
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layers = 2


def test_the_config_needs_no_torch():
    code = "import sys, labkit.model; labkit.model.preset('gpt_1t'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("attention", ["explicit", "fused"])
def test_on_cuda_as_on_the_cpu(dialect, attention):
    model, tokens = build(small(dialect, attention=attention)), some_tokens(2, 8)
    order = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    expected = [model(tokens), model(tokens, order)]
    model, tokens, order = model.cuda(), tokens.cuda(), order.cuda()
    for got, wanted in zip([model(tokens), model(tokens, order)], expected, strict=True):
        torch.testing.assert_close(got.cpu(), wanted)
