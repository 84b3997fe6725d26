"""labkit.tricks.checkpoint: gradients as without it, memory as theory says, operations as torch counts them."""

from __future__ import annotations

import copy
import random
import weakref
from collections import Counter

import numpy
import programs_checkpoint as programs
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import labkit
from labkit import pipeline
from labkit.memory import MemoryMeter
from labkit.model import Transformer, loss, preset
from labkit.theory.memory import Setup, layer_activations, segmented, segmented_terms
from labkit.tricks import checkpoint, checkpoint_sequential, checkpointed

H = 8


def leaf(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def net(p=0.5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(H, 16), nn.GELU(), nn.Dropout(p), nn.Linear(16, H))


def transformer(name="tiny_gpt", **changes):
    torch.manual_seed(0)
    return Transformer(preset(name, **{"layers": 3, "hidden": 8, "heads": 2, "vocab": 16, "positions": 8, **changes}))


def step(model, autocast=False):
    """Gradients of all parameters, and what torch draws next."""
    tokens = torch.arange(16).view(2, 8)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total, _ = loss(model(tokens), tokens)
    total.backward()
    return [p.grad for p in model.parameters()], torch.rand(2)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Counted:
    """A function that knows how often it was called."""

    def __init__(self, fn):
        self.fn, self.calls = fn, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.fn(*args, **kwargs)


# Bit-equal gradients

TOLD = [
    {}, {"segments": 2}, {"segments": 1}, {"policy": "selective"}, {"offload": True}, {"early_stop": True},
    {"policy": "selective", "offload": True},
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "attention", "p", "autocast"),
    [
        ("tiny_gpt", "explicit", 0.0, False),
        ("tiny_gpt", "explicit", 0.5, False),
        ("tiny_gpt", "explicit", 0.0, True),
        ("tiny_gpt", "explicit", 0.5, True),
        ("tiny_gpt", "fused", 0.5, False),
        ("tiny_llama", "explicit", 0.5, True),
    ],
)
def test_gradients_are_those_without_bit_for_bit(name, attention, p, autocast):
    """Public fault 51: dropout draws another mask in the recomputation."""
    model = transformer(name, dropout=p, attention_dropout=p, attention=attention)
    grads, after = step(copy.deepcopy(model), autocast)
    for told in TOLD:
        again, after_again = step(checkpointed(copy.deepcopy(model), **told), autocast)
        assert same(grads, again), told
        assert torch.equal(after, after_again), told


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_told_again_and_checkpoints_inside_checkpoints(autocast):
    model = transformer(dropout=0.5, attention_dropout=0.5)
    grads, after = step(copy.deepcopy(model), autocast)
    model = checkpointed(checkpointed(model, segments=2), "selective")

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, tokens):
            x = self.inner.embed(tokens)
            x = checkpoint_sequential([lambda x: checkpoint_sequential(model.blocks, 2, x, None, None)], 1, x)
            return self.inner.head(self.inner.norm(x))

    again, after_again = step(Outer(), autocast)
    assert same(grads, again)
    assert torch.equal(after, after_again)


def test_without_the_random_stream_the_masks_are_others():
    """Impostor of fault 51: what preserve_rng=False would do to dropout."""
    model, x = net(), leaf(4, H)
    results = []
    for preserve in (True, False):
        torch.manual_seed(2)
        y = checkpoint(model, x, preserve_rng=preserve)
        (grad,) = torch.autograd.grad(y.sum(), x)
        results.append(grad)
    assert not torch.equal(*results)


def test_the_streams_of_python_and_numpy_are_not_restored():
    for draw in (random.random, numpy.random.rand):
        drawn = []

        def fn(x, draw=draw, drawn=drawn):
            drawn.append(draw())
            return (x * drawn[-1]).sin()

        checkpoint(fn, leaf(3)).sum().backward()
        assert drawn[0] != drawn[1], "documented"


def test_the_default_type_and_device_are_those_of_forward():
    seen = []
    torch.set_default_dtype(torch.float64)
    try:
        y = checkpoint(lambda x: (seen.append(torch.ones(1).dtype), x.sin())[1], leaf(3))
    finally:
        torch.set_default_dtype(torch.float32)
    y.sum().backward()
    assert seen == [torch.float64, torch.float64]
    assert torch.get_default_dtype() == torch.float32
    seen = []
    with torch.device("meta"):
        y = checkpoint(lambda x: (seen.append(torch.ones(1).device.type), x.sin())[1], leaf(3))
    y.sum().backward()
    assert seen == ["meta", "meta"]


def test_autocast_as_in_forward_whatever_surrounds_backward():
    model, seen = nn.Linear(H, H), []

    def fn(x):
        seen.append(model(x).dtype)
        return x.sin()

    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y = checkpoint(fn, leaf(4, H))
        with torch.autocast("cpu", torch.float16, enabled=not inside):
            y.sum().backward()
            assert torch.is_autocast_enabled("cpu") is not inside
    assert seen == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


# Arguments and results of every kind


def test_kwargs_lists_and_what_is_no_tensor():
    def fn(x, pair, *, scale, also, name=None):
        assert name == "n"
        return {"a": (x * pair[0] * scale).sin(), "b": [also["w"].exp() * pair[1], None, 7]}

    def results(call):
        x, y, w = leaf(3), leaf(3, seed=4), leaf(3, seed=5)
        out = call(fn, x, (y, 2), scale=3.0, also={"w": w}, name="n")
        (out["a"].sum() + out["b"][0].sum()).backward()
        return [x.grad, y.grad, w.grad], out["b"][1:]

    grads, rest = results(lambda fn, *args, **kwargs: fn(*args, **kwargs))
    again, rest_again = results(checkpoint)
    assert same(grads, again)
    assert rest == rest_again == [None, 7]


def test_inputs_without_a_gradient():
    model, x = net(), torch.ones(4, H)
    torch.manual_seed(1)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    checkpoint(model, x).sum().backward()
    assert same(expected, [p.grad for p in model.parameters()])
    tokens = torch.tensor([1, 2])
    table = nn.Embedding(4, 3)
    checkpoint(lambda t: table(t).square(), tokens).sum().backward()
    assert torch.equal(table.weight.grad[1:3], 2 * table.weight.detach()[1:3])


def test_a_parameter_as_an_argument_stays_itself():
    weight = nn.Parameter(torch.eye(3))
    seen = []
    checkpoint(lambda x, w: (seen.append(w), x @ w)[1].exp(), leaf(2, 3), weight).sum().backward()
    assert seen[0] is weight
    assert seen[1] is weight
    assert weight.grad is not None


def test_without_gradients_it_is_a_call():
    counted = Counted(torch.sin)
    with torch.no_grad():
        assert not checkpoint(counted, leaf(3)).requires_grad
    y = checkpoint(counted, torch.ones(3))
    assert not y.requires_grad
    assert counted.calls == 2


def test_grad_of_some_inputs_and_of_gradients():
    x, y = leaf(3), leaf(3, seed=4)

    def fn(x, y):
        return (x * y).sin() * y.exp()

    expected: list = []
    for call in (lambda fn, *args: fn(*args), checkpoint):
        (only,) = torch.autograd.grad(call(fn, x, y).sum(), y)
        (first,) = torch.autograd.grad(call(fn, x, y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), y)
        if call is checkpoint:
            assert same(expected, [only, first, second])
        expected += [only, first, second]


def test_a_gradient_inside_the_function():
    """A gradient penalty, whose own backward asks for saved tensors before the function has ended."""
    model = net(0)

    def fn(x):
        z = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
        return model(x).square().sum() + slope.square().sum()

    def nested(x):
        z = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(checkpoint(model, z).square().sum(), z, create_graph=True)
        return checkpoint(model, x).square().sum() + slope.square().sum()

    results = []
    for total in (fn(leaf(2, H)), checkpoint(fn, leaf(2, H)), checkpoint(nested, leaf(2, H))):
        model.zero_grad()
        total.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert same(results[0], results[1])
    assert same(results[0], results[2])


# Nothing twice


def test_each_output_asks_and_one_recomputation_answers():
    counted = Counted(lambda x: (x.sin(), x.exp(), x.cos()))
    x = leaf(3)
    a, b, c = checkpoint(counted, x)
    (a.sum() + b.sin().sum() + c.exp().sum()).backward()
    assert counted.calls == 2
    a, b, c = checkpoint(counted, x)
    (a.sum() + b.sum()).backward(retain_graph=True)
    assert counted.calls == 4
    (a.sum() + c.sum()).backward()
    assert counted.calls == 5, "once more in another backward: tensors are not kept between them"


def test_a_saved_tensor_may_be_read_twice():
    """torch's own checkpoint refuses it."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x + 1)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad * (ctx.saved_tensors[0] + ctx.saved_tensors[1] - 1)

    counted = Counted(lambda x: Twice.apply(x.sin()))
    x = leaf(3)
    (expected,) = torch.autograd.grad(counted(x).sum(), x)
    (grad,) = torch.autograd.grad(checkpoint(counted, x).sum(), x)
    assert torch.equal(grad, expected)
    assert counted.calls == 3


def test_nested_each_runs_its_own_function_once_more():
    """As in torch's: an inner function runs in forward, in the outer recomputation, and in its own."""
    counts = Counter()

    def inner(x):
        counts["inner"] += 1
        return x.sin().exp()

    def outer(x):
        counts["outer"] += 1
        return checkpoint(inner, checkpoint(inner, x))

    x = leaf(3)
    (expected,) = torch.autograd.grad(inner(inner(x)).sum(), x)
    counts.clear()
    (grad,) = torch.autograd.grad(checkpoint(outer, x).sum(), x)
    assert torch.equal(grad, expected)
    assert counts == {"outer": 2, "inner": 6}


@pytest.mark.parametrize("told", [{}, {"segments": 1}, {"segments": 2}])
def test_recomputing_costs_one_forward_of_the_layers(told):
    """Counted by torch: the operations of backward are more by those of the layers' forward, and each ran twice."""
    model = transformer(dropout=0.1)
    x = leaf(2, 8, 8)

    def flops(call):
        with FlopCounterMode(display=False) as forward:
            y = call(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    def layers(x):
        for block in model.blocks:
            x = block(x)
        return x

    forward, backward = flops(layers)
    runs = Counter()
    for block in [model.blocks[n] for n in range(3)]:
        block.register_forward_hook(lambda module, *_: runs.update([module]))
    checkpointed(model, **told)
    again, with_checkpoint = flops(layers)
    assert backward == 2 * forward
    assert (again, with_checkpoint - backward) == (forward, forward)  # 4/3 of what a step takes without
    assert set(runs.values()) == {2}


def test_stopping_early_spares_what_comes_after_the_last_saved_tensor():
    model, x = nn.Linear(H, H, bias=False), leaf(4, H)
    counted = []
    for early in (False, True):
        y = checkpoint(lambda x: model(x.sin()), x, early_stop=early)
        with FlopCounterMode(display=False) as flops:
            y.sum().backward()
        counted.append(flops.get_total_flops())
    product = 2 * 4 * H * H
    assert counted == [3 * product, 2 * product], "the product's inputs are kept, its result nobody needs"


def test_selective_recomputes_the_two_products_of_the_core():
    model, x = transformer(), leaf(2, 8, 8)
    counted = []
    for policy in ("none", "selective"):
        y = checkpointed(model, policy).blocks[0](x)
        with FlopCounterMode(display=False) as flops:
            y.sum().backward()
        counted.append(flops.get_total_flops())
    assert counted[1] - counted[0] == 2 * 2 * (2 * 8 * 8 * 8), "2 products of b·s·s·h multiplications, 2 each"


# Memory


class Small(nn.Module):
    """A layer of which it is plain what it keeps: its input, and what goes into the GELU."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(H, 3 * H)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x))[..., :H] + 1.0


def held_in_segments(layers, segments, x, mode="light", **options):
    meter = MemoryMeter(*layers, mode=mode)
    with meter:
        y = checkpoint_sequential(layers, segments, x, **options)
        forward = meter.held()["activations"]
        y.sum().backward()
    assert meter.held()["activations"] == 0
    return forward, meter.highest["activations"]


@pytest.mark.parametrize(
    ("layers", "cs"),
    [
        (16, [1, 3, 4, 5, 16]),
        (64, [8, 33, 40]),
        pytest.param(16, range(1, 17), marks=pytest.mark.soak),
        pytest.param(64, range(1, 65), marks=pytest.mark.soak),
    ],
)
def test_memory_at_every_number_of_segments(layers, cs):
    """c·A_in + ⌈L/c⌉·A_int, less one input, which the formula counts twice."""
    model, a_in, a_int = [Small() for _ in range(layers)], 4 * 5 * H, 4 * 5 * (H + 3 * H)
    for c in cs:
        forward, peak = held_in_segments(model, c, leaf(5, H))
        assert forward == c * a_in
        assert peak == segmented_terms(layers, c, a_in, a_int).total, c
        assert segmented(layers, c, a_in, a_int) - peak == a_in, c


@pytest.mark.parametrize(
    ("layers", "mode", "cs"),
    [
        (16, "light", [1, 5, 16]),
        (16, "full", [5]),
        (64, "light", [40]),
        pytest.param(16, "light", [4], marks=pytest.mark.soak),
        pytest.param(64, "light", [8, 32, 33, 64], marks=pytest.mark.soak),
    ],
)
def test_memory_of_transformer_layers_is_theorys(layers, mode, cs):
    config = preset("tiny_gpt", layers=layers, hidden=8, heads=2, vocab=4, dropout=0.1, attention_dropout=0.1)
    blocks = list(Transformer(config).blocks)
    a_in, a_int = 4 * 2 * 4 * 8, layer_activations(config, s=4, b=2, setup=Setup(width=4)).total
    for c in cs:
        forward, peak = held_in_segments(blocks, c, leaf(2, 4, 8), mode)
        assert (forward, peak) == (c * a_in, segmented_terms(layers, c, a_in, a_int).total), c


@pytest.mark.parametrize("s", [6, 48])
def test_memory_of_the_selective_policy_is_theorys(s):
    """Three layers without their cores. A core comes back when its layer's MLP is gone: the peak, if s is large.

    With it are copies of queries, keys and values, which the products want in another order than they are kept in.
    """
    config = preset("tiny_gpt", layers=3, hidden=8, heads=2, dropout=0.1, attention_dropout=0.1)
    blocks = checkpointed(Transformer(config), "selective").blocks
    kept, whole = (
        layer_activations(config, s=s, b=2, setup=Setup(width=4, recompute=way)) for way in ("selective", "none")
    )
    meter = MemoryMeter(blocks)
    with meter:
        x = leaf(2, s, 8)
        for block in blocks:
            x = block(x)
        assert meter.held()["activations"] == 3 * kept.total
        x.sum().backward()
    left = whole.without_name("MLP", "up ", "GELU", "attention output", "projection").total
    copies = whole.with_name("queries", "keys", "values").total
    assert meter.highest["activations"] == max(3 * kept.total, 2 * kept.total + left + copies)


def test_offloaded_inputs_are_not_on_the_device():
    """The hooks that move them lie over the meter's, which sees what comes back."""
    layers, a_int = [Small() for _ in range(8)], 4 * 5 * (H + 3 * H)
    assert held_in_segments(layers, 8, leaf(5, H), offload=True) == (0, a_int)
    assert held_in_segments(layers, 2, leaf(5, H), offload=True) == (0, 4 * a_int)


def test_nested_memory_is_less_than_that_of_the_outer_one():
    """16 layers, 4 segments of 4, each layer a checkpoint: 4 inputs, then 4 inside one segment, one layer's inside."""
    layers, a_in, inside = [Small() for _ in range(16)], 4 * 5 * H, 4 * 5 * 3 * H
    each = [lambda x, layer=layer: checkpoint(layer, x) for layer in layers]
    meter = MemoryMeter(*layers)
    with meter:
        checkpoint_sequential(each, 4, leaf(5, H)).sum().backward()
    assert meter.highest["activations"] == (4 + 3) * a_in + inside


@pytest.mark.parametrize("mode", ["light", "full"])
def test_what_is_recomputed_is_an_activation_and_goes_as_backward_goes(mode):
    model = [Small() for _ in range(4)]
    meter = MemoryMeter(*model, mode=mode)
    held = []

    def look(grad):
        held.append(meter.held()["activations"])

    def fn(x):
        for layer in model:
            x = layer(x)
            x.register_hook(look)
        return x

    with meter:
        y = checkpoint(fn, leaf(5, H))
        look(None)
        y.sum().backward()
    layer = 4 * 5 * (H + 3 * H)
    assert held == [4 * 5 * H, *([4 * 5 * H] * 1), 3 * layer, 2 * layer, layer]


def test_other_hooks_that_are_there_in_backward_keep_what_is_recomputed():
    moved = []
    x = leaf(3)
    y = checkpoint(lambda x: x.sin().exp(), x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (moved.append(t.shape), t.clone())[1], lambda t: t):
        y.sum().backward()
    assert len(moved) == 2


def test_nothing_outlives_the_graph():
    model, x = net(), leaf(4, H)
    inputs = x * 2
    seen = weakref.ref(inputs)
    y = checkpoint(model, inputs)
    del inputs
    assert seen() is not None
    y.sum().backward()
    assert seen() is None, "gone with the backward, though y is there"
    meter = MemoryMeter(model)
    with meter:
        y = checkpoint(model, x).sum()
        y.backward(retain_graph=True)
        assert meter.held()["activations"] == 4 * 4 * H, "between two backwards, the input"
        y.backward()
        assert meter.held()["activations"] == 0
        y = checkpoint(model, x).sum()
        del y
        assert meter.held()["activations"] == 0


# What goes wrong


def test_an_input_changed_in_place_is_refused():
    x = leaf(3) * 2
    y = checkpoint(torch.sin, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    x = leaf(3) * 2
    y = checkpoint(torch.sin, x, offload=True)
    (expected,) = torch.autograd.grad(x.sin().sum(), x, retain_graph=True)
    before = x.detach().clone()
    x.data.add_(1)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, before.cos()), "a copy on the host is what it was"
    assert torch.equal(grad, expected)


def test_a_copy_on_the_host_is_not_the_functions_to_write_to():
    x, count = leaf(3), torch.zeros(3)

    def fn(x, count):
        return (x * count.add_(1)).sin().exp()

    y = checkpoint(fn, x, count, offload=True)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, x.detach().sin().exp() * x.detach().cos())
    assert torch.equal(first, second)
    y = checkpoint(fn, x, count)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_step_between_forward_and_backward_is_refused():
    """torch's checkpoint gives the gradient of another function, silently."""
    model, x = net(0), leaf(4, H)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).sum().backward()
    y = checkpoint(model, x)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"saved inside a checkpoint, is at version \d+; expected version \d+"):
        y.sum().backward()


def test_a_saved_tensor_that_the_function_writes_to_is_refused():
    def fn(x):
        y = x.exp()
        z = y.sin()
        y.add_(1)
        return z

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fn(leaf(3)).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        checkpoint(fn, leaf(3)).sum().backward()


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda x: x.sin().exp().sin(), "fn saved 3 tensors, but 2 in forward"),
        (lambda x: x.sin(), "fn saved 1 tensors, but 2 in forward"),
        (lambda x: x.double().sin().exp(), r"saved \[3\] torch.float64 on cpu where it had saved \[3\] torch.float32"),
        (lambda x: x[:2].sin().exp(), r"saved \[2\] torch.float32 on cpu where it had saved \[3\] torch.float32"),
    ],
)
def test_a_function_that_does_something_else_is_refused(second, said):
    ways = iter([lambda x: x.sin().exp(), second, lambda x: x.sin().exp()])
    x = leaf(3)
    y = checkpoint(lambda x: next(ways)(x), x)
    with pytest.raises(RuntimeError, match=said):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_an_error_in_the_recomputation_is_told_and_leaves_all_as_it_was():
    model, x, broken = net(), leaf(4, H), [False, True, False]

    def fn(x):
        y = model(x)
        if broken.pop(0):
            raise KeyError("mine")
        return y.sin()

    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(model(x).sin().sum(), x)
    torch.manual_seed(1)
    y = checkpoint(fn, x)
    after = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        y.sum().backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.is_autocast_enabled("cpu")
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, expected)
    with pytest.raises(KeyError):
        checkpoint({}.__getitem__, "a")
    assert x.sin().grad_fn._saved_self is x, "no hooks are left behind"


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: checkpoint(leaf(3), torch.sin), TypeError, "fn is Tensor: expected a module or a function"),
        (lambda: checkpoint_sequential([torch.sin], 2, leaf(3)), ValueError, "segments=2: expected 1 to 1"),
        (lambda: checkpoint_sequential([torch.sin], 0, leaf(3)), ValueError, "segments=0: expected 1 to 1"),
        (lambda: checkpoint_sequential([torch.sin], 1.0, leaf(3)), TypeError, "segments is 1.0"),
        (lambda: checkpoint_sequential([], 1, leaf(3)), ValueError, "there are no layers"),
        (lambda: checkpoint_sequential([torch.sin, 3], 1, leaf(3)), TypeError, "layers holds int"),
        (lambda: checkpoint_sequential(nn.Linear(3, 3), 1, leaf(3)), TypeError, "layers is Linear"),
        (lambda: checkpoint_sequential([torch.sin], 1, leaf(3), offlaod=True), TypeError, "offlaod is no option"),
        (
            lambda: checkpointed(transformer(), offlaod=True),
            TypeError,
            "offlaod is no option of checkpoint: expected off",
        ),
        (lambda: checkpointed(transformer(), "selective", early_stop=1), TypeError, "early_stop is 1: expected True"),
        (lambda: checkpoint(torch.sin, leaf(3), offload="no"), TypeError, "offload is 'no': expected True or False"),
        (lambda: checkpoint(next, iter([leaf(3), leaf(3)])), TypeError, "an argument is a list_iterator, from which"),
        (lambda: checkpoint(list, (x for x in [leaf(3)])), TypeError, "an argument is a generator, from which"),
        (lambda: checkpoint(torch.sin, {"from": torch.Generator()}), TypeError, "an argument is a Generator"),
        (lambda: next(iter(checkpointed(transformer()).blocks)).attention, AttributeError, "has no 'attention': share"),
        (lambda: checkpointed(torch.sin), TypeError, "expected a torch.nn.Module"),
        (lambda: checkpointed(net(), "all"), ValueError, "policy='all': expected one of 'none', 'selective', 'full'"),
        (lambda: checkpointed(net()), ValueError, "no layers in model.blocks"),
        (lambda: checkpointed(net(), "selective"), ValueError, "no module in the model has a run_core"),
        (lambda: checkpointed(transformer(), "selective", 2), ValueError, "segments=2 with policy='selective'"),
        (lambda: checkpointed(transformer(), segments=4), ValueError, "segments=4: expected 1 to 3"),
    ],
)
def test_what_cannot_be_used(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_a_model_that_was_told_is_the_same_model():
    model = transformer()
    names, blocks = [n for n, _ in model.named_parameters()], list(model.blocks)
    checkpointed(model, segments=2)
    assert [n for n, _ in model.named_parameters()] == names
    assert model.blocks[2] is blocks[2]
    assert [len(segment.layers) for segment in model.blocks] == [1, 2]
    assert list(model.blocks[1:]) == blocks[1:]
    twin = copy.deepcopy(model)
    step(twin)
    assert all(p.grad is None for p in model.parameters()), "a copy trains its own layers"
    checkpointed(model, "selective")
    assert list(model.blocks) == blocks
    checkpointed(model, "none")
    assert "run_core" not in vars(model.blocks[0].attention)


# On ranks


def test_inside_data_parallelism():
    assert labkit.run(programs.in_ddp, ranks=2).values == [[True] * len(programs.TOLD)] * 2
    assert labkit.run(programs.a_checkpoint_round_ddp, ranks=2).values == [True] * 2


@pytest.mark.parametrize("kind", ["segments", "early stop", "selective"])
@pytest.mark.parametrize(("how", "attention"), [("tp", "explicit"), ("tp", "fused"), ("sp", "explicit")])
def test_shared_layers_draw_the_same_masks_again(how, attention, kind):
    assert labkit.run(programs.shared, how, attention, kind, ranks=2).values == [True] * 2


def test_a_layer_has_six_all_reduces_where_it_is_recomputed():
    """Four without (Rajbhandari et al. 2020, section 8, counts the two of the second forward)."""

    def reduces(kind):
        trace = labkit.run(programs.a_step, kind, ranks=2).trace
        return len([e for e in trace.events if e.rank == 0 and "all_reduce" in e.name and e.parent is None])

    plain = reduces("")
    assert reduces("full") - plain == 2 * 2
    assert reduces("early stop") - plain == 2 * 1
    assert reduces("selective") == plain


@pytest.mark.parametrize("kind", ["full", "early stop", "offload"])
def test_inside_a_pipelines_stages(kind):
    for schedule in (pipeline.one_f_one_b(2, 4), pipeline.zero_bubble_h1(2, 4)):
        assert labkit.run(programs.in_a_pipeline, schedule, kind, ranks=2).values == [True] * 2
