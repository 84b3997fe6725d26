"""labkit.memory: bytes counted by hand, and torch's own profiler, against what the meter says."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import OrderedDict
from contextlib import nullcontext

import programs_memory as programs
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import labkit
from labkit.memory import CATEGORIES, MemoryMeter, ledger
from labkit.trace import label

both_modes = pytest.mark.parametrize("mode", ["light", "full"])


def small(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)


def kept(fn, *args, mode="light", modules=()):
    """Bytes of activations while the result is alive, then after backward, then after it is gone."""
    meter = MemoryMeter(*modules, mode=mode)
    with meter:
        result = fn(*args)
    alive = meter.held()["activations"]
    result.sum().backward()
    after = meter.held()["activations"]
    del result
    return alive, after, meter.held()["activations"]


# Parameters, gradients, optimizer, to the byte


@both_modes
def test_adamw_in_fp32_is_16_bytes_a_parameter_and_4_a_tensor(mode):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    psi, tensors = 8 * 16 + 16 + 16 + 16 + 16 * 4 + 4, 6
    meter = MemoryMeter(model, optimizer=optimizer, mode=mode)
    with meter:
        for _ in range(2):
            model(torch.ones(3, 8)).sum().backward()
            optimizer.step()
    held = meter.held()
    assert tuple(held) == CATEGORIES
    assert held == dict.fromkeys(CATEGORIES, 0) | {
        "parameters": 4 * psi, "gradients": 4 * psi, "optimizer": 8 * psi, "steps": 4 * tensors
    }  # fmt: skip


@both_modes
@pytest.mark.parametrize("given", [True, False])
def test_bf16_with_fp32_masters(mode, given):
    model = small(torch.bfloat16)
    masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values())
    psi = 244
    meter = MemoryMeter(model, optimizer=None if given else optimizer, master=masters if given else None, mode=mode)
    assert meter.held()["master"] == 4 * psi
    with meter:
        for _ in range(2):
            model(torch.ones(3, 8, dtype=torch.bfloat16)).sum().backward()
            with meter.phase("step"):
                for p, m in zip(model.parameters(), masters.values(), strict=True):
                    m.grad = p.grad.float()
                optimizer.step()
                optimizer.zero_grad()
    held = meter.held()
    assert (held["parameters"], held["master"], held["gradients"]) == (2 * psi, 4 * psi, 2 * psi)
    if not given:  # else the meter does not know the optimizer, nor the masters' gradients
        assert (held["optimizer"], held["steps"]) == (8 * psi, 24)
        assert meter.by_phase["step"]["gradients"] == (2 + 4) * psi


def test_masters_found_by_the_optimizer_are_its_parameters_where_there_is_no_module():
    optimizer = torch.optim.SGD([torch.zeros(10, requires_grad=True)])
    assert MemoryMeter(optimizer=optimizer).held()["parameters"] == 40


def test_several_optimizers_and_one_that_is_not_torchs():
    class Duck:
        def __init__(self, parameter):
            self.param_groups = [{"params": [parameter]}]
            self.state = {parameter: {"moments": [torch.zeros(7), torch.zeros(7)], "step": torch.tensor(0.0), "n": 3}}

    one, two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    optimizers = [Duck(one.weight), Duck(two.weight)]
    held = MemoryMeter(one, two, optimizer=optimizers).held()
    assert (held["parameters"], held["optimizer"], held["steps"]) == (128, 112, 8)


def test_tied_weights_and_views_are_counted_once():
    flat = torch.zeros(100)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:40].view(4, 10)), nn.Parameter(flat[40:80])
    model.c = model.a
    model.register_buffer("view_of_all", flat[90:])
    model.register_buffer("mask", torch.ones(16, dtype=torch.bool))
    meter = MemoryMeter(model)
    assert (meter.held()["parameters"], meter.held()["buffers"]) == (400, 16)
    (whole,) = [h for h in meter.holdings() if h.category == "parameters"]
    assert (whole.nbytes, whole.padding, whole.names) == (400, 80, ["a", "b"])


@both_modes
def test_gradients_that_are_views_into_a_bucket(mode):
    model = nn.Linear(10, 3)
    bucket = torch.zeros(48)  # 33 elements and padding
    meter = MemoryMeter(model, mode=mode)
    meter.track("buffers", bucket)
    assert (meter.held()["buffers"], meter.held()["gradients"]) == (192, 0)
    model.weight.grad, model.bias.grad = bucket[:30].view(3, 10), bucket[30:33]
    with meter:
        model(torch.ones(2, 10)).sum().backward()
    assert (meter.held()["buffers"], meter.held()["gradients"]) == (0, 192)
    (found,) = [h for h in meter.holdings() if h.category == "gradients"]
    assert (found.padding, found.names) == (60, ["weight", "bias"])
    model.zero_grad()
    assert (meter.held()["buffers"], meter.held()["gradients"]) == (192, 0)


def test_what_is_tracked_may_change_and_shards_are_buffers_though_parameters_are_views():
    model, rooms = nn.Linear(10, 10, bias=False), {}
    meter = MemoryMeter(model)
    meter.track("buffers", rooms.values)
    meter.track("gradients", lambda: rooms.get("main_grad"))
    assert meter.held()["buffers"] == 0
    rooms["gathered"] = torch.zeros(100)
    model.weight.data = rooms["gathered"].view(10, 10)
    assert (meter.held()["parameters"], meter.held()["buffers"]) == (0, 400)
    rooms["main_grad"] = torch.zeros(100)
    assert meter.held()["buffers"] == 800, "what is tracked first has it"
    with meter.phase("forward"):
        rooms["more"] = torch.zeros(10)
    assert meter.by_phase["forward"]["buffers"] == 840, "functions are asked at the end of a phase"
    rooms.clear()
    assert (meter.held()["parameters"], meter.held()["buffers"]) == (400, 0)


def test_sparse_gradients_and_a_storage_that_is_resized():
    table = nn.Embedding(50, 4, sparse=True)
    meter = MemoryMeter(table)
    with meter:
        table(torch.tensor([3, 5, 9])).sum().backward()
    assert meter.held()["gradients"] == 3 * 8 + 3 * 4 * 4
    shard = torch.zeros(100)
    meter.track("buffers", shard)
    assert meter.held()["buffers"] == 400
    shard.untyped_storage().resize_(0)
    assert meter.held()["buffers"] == 0


def test_a_model_on_meta_is_measured_as_if_it_were_there():
    from labkit.model import Transformer, preset

    model = Transformer(preset("llama3_8b"), device="meta", dtype=torch.bfloat16)
    assert MemoryMeter(model).held()["parameters"] == 2 * 8_030_261_248


# What autograd keeps, to the byte

B, H = 6, 10


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


SAVED = {
    "linear: its input": (nn.Linear(H, H), 4 * B * H),
    "relu: its output": (nn.ReLU(), 4 * B * H),
    "gelu: its input": (nn.GELU(), 4 * B * H),
    "softmax: its output": (nn.Softmax(-1), 4 * B * H),
    "layer norm: input, mean, rstd": (nn.LayerNorm(H), 4 * B * H + 2 * 4 * B),
    "linear, relu: input, output": (nn.Sequential(nn.Linear(H, 7), nn.ReLU()), 4 * B * H + 4 * B * 7),
    "linear, relu, linear: relu's output is the second one's input": (
        nn.Sequential(nn.Linear(H, 7), nn.ReLU(), nn.Linear(7, H)), 4 * B * H + 4 * B * 7,
    ),
    "two that keep the same input": (lambda x: x.sin() + x.cos(), 4 * B * H),
    "x·x keeps x twice": (lambda x: x * x, 4 * B * H),
    "a view is kept: the whole is held": (lambda x: (x.exp()[:1]).sin(), 4 * B * H),
    "addition keeps nothing": (lambda x: x + 1, 0),
    "dropout: a mask of one byte an element, and no input": (lambda x: torch.native_dropout(x, 0.5, True)[0], B * H),
}  # fmt: skip


@both_modes
@pytest.mark.parametrize("what", SAVED)
def test_saved_activations(what, mode):
    fn, nbytes = SAVED[what]
    modules = [fn] if isinstance(fn, nn.Module) else []
    assert kept(fn, leaf(B, H), mode=mode, modules=modules) == (nbytes, 0, 0)


def test_token_ids_are_kept_and_parameters_are_not_activations():
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4, bias=False))
    assert kept(model, torch.randint(11, (3, 5)), modules=[model])[0] == 3 * 5 * 8 + 3 * 5 * 4 * 4


def test_a_parameter_of_no_module_in_the_meter_is_an_activation():
    model = nn.Linear(4, 4, bias=False)
    assert kept(model, torch.randn(3, 4))[0] == 3 * 4 * 4, "no gradient of the input: the weight is not kept"
    assert kept(model, leaf(3, 4))[0] == 3 * 4 * 4 + 64


@both_modes
def test_a_retained_graph_is_held_until_it_goes(mode):
    meter, x = MemoryMeter(mode=mode), leaf(100)
    with meter:
        loss = x.exp().sin().sum()
    assert meter.held()["activations"] == 400  # exp keeps its output, sin its input: the same
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    assert meter.held()["activations"] == 400
    loss.backward()
    assert meter.held()["activations"] == 0


def test_a_graph_that_is_dropped_without_backward():
    meter, x = MemoryMeter(), leaf(100)
    with meter:
        loss = x.exp().sum()
    gc.disable()  # nothing that only the garbage collector would find: activations would stay for many steps
    try:
        del loss
        assert meter.held()["activations"] == 0
    finally:
        gc.enable()


def test_nothing_is_kept_without_gradients():
    model, meter = small(), MemoryMeter()
    with meter, torch.no_grad():
        out = model(torch.ones(3, 8))
    with meter, torch.inference_mode():
        more = model(torch.ones(3, 8))
    assert (meter.held()["activations"], out.shape, more.shape) == (0, (3, 4), (3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("attention", "dropout"), [("explicit", 0.1), ("explicit", 0.0), ("fused", 0.0)])
def test_a_gpt_layer(dtype, attention, dropout):
    """Korthikanti et al. (2022), equation 2, in elements, and the means and rstds of two layer norms."""
    from labkit.model import Block, preset

    b, s, h, a = 2, 32, 64, 4
    block = Block(preset("tiny_gpt", dropout=dropout, attention=attention), dtype=dtype)
    x = torch.randn(b, s, h, dtype=dtype, requires_grad=True)
    wide, size = s * b * h, dtype.itemsize
    expected = (15 + 1) * wide * size + 2 * 2 * s * b * size  # 32 of 34 sbh in 16 bits; norms keep 2 elements a token
    if attention == "explicit":
        expected += a * s * s * b * size  # softmax's output
    else:
        expected += 4 * a * b * s  # log-sum-exp
    if dropout:
        expected += 2 * wide + a * s * s * b * (1 + size)  # masks; attention's dropout keeps its output too
    assert kept(block, x, modules=[block])[0] == expected


# What must not change


def trained(model, context, steps=3):
    """Parameters after some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    with context:
        for _ in range(steps):
            tokens = torch.randint(256, (2, 16))
            model(tokens).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


@both_modes
def test_numbers_are_the_same_with_and_without(mode):
    from labkit.model import Transformer, preset

    model = Transformer(preset("tiny_gpt", layers=1, dropout=0.1))
    other = copy.deepcopy(model)
    metered, bare = trained(model, MemoryMeter(model, mode=mode)), trained(other, nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(metered, bare, strict=True))


@both_modes
@pytest.mark.parametrize("fn", [torch.exp, torch.sin, lambda x: x * x, lambda x: (x * 1).sigmoid()])
def test_a_saved_tensor_that_was_written_to_is_refused(fn, mode):
    def go():
        y = leaf(3) * 1
        z = fn(y)
        y.mul_(2)
        z.mul_(2)
        z.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        go()
    with MemoryMeter(mode=mode), pytest.raises(RuntimeError, match="modified by an inplace operation") as metered:
        go()
    versions = [str(e.value).partition("is at version")[2].partition(". Hint")[0] for e in (plain, metered)]
    assert versions[0] == versions[1]


def test_a_weight_that_was_written_to_is_refused():
    model = nn.Linear(3, 3)
    with MemoryMeter(model):
        loss = model(leaf(2, 3)).sum()
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"FloatTensor \[3, 3\]\] is at version 2; expected version 1 instead"):
            loss.backward()


def test_a_second_backward_is_refused_as_always():
    with MemoryMeter():
        loss = leaf(3).exp().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@both_modes
def test_double_backward(mode):
    x, meter = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True), MemoryMeter(mode=mode)
    with meter:
        (first,) = torch.autograd.grad((x**3).exp().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, ((6 * x + 9 * x**4) * (x**3).exp()).detach())
    del first
    assert meter.held()["activations"] == 0


@both_modes
def test_gradients_are_taken_over_and_not_copied(mode):
    """The meter itself must not make autograd copy: the allocator's peak is the same with it and without."""
    model = nn.Linear(500, 500, bias=False)
    x = torch.randn(2, 500)

    def go():
        model(x).sum().backward()

    def metered():
        with MemoryMeter(model, mode=mode):
            go()

    bare = allocator_peak(go)
    model.zero_grad()
    assert bare == allocator_peak(metered) < 1.1 * model.weight.nbytes


def allocator_peak(fn):
    """The most bytes that torch's CPU allocator handed out at once during `fn`, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    found = []

    def walk(events):
        for event in events:
            if event.tag == torch._C._profiler._EventType.Allocation:
                found.append((event.start_time_ns, event.typed[1].alloc_size))
            walk(event.children)

    walk(profile.profiler.kineto_results.experimental_event_tree())
    total = peak = 0
    for _, nbytes in sorted(found, key=lambda f: f[0]):
        total += nbytes
        peak = max(peak, total)
    return peak


# Checkpoints, other hooks, other meters


@both_modes
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_its_input_only(mode, reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, 40), nn.GELU(), nn.Linear(40, H))
    x = leaf(B, H)
    model(x).sin().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    meter = MemoryMeter(model, mode=mode)
    with meter:
        loss = checkpoint(model, x, use_reentrant=reentrant).sin().sum()
        assert meter.held()["activations"] == 4 * B * H * 2  # the checkpoint's input, sin's input
        loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    del loss
    assert meter.held()["activations"] == 0
    if mode == "full":
        assert meter.peak["activations"] + meter.peak["other"] >= 4 * B * (40 + 40)  # recomputed: both of GELU's sides


@both_modes
def test_a_meter_inside_a_checkpoint_leaves_it_to_drop_what_it_drops(mode):
    model, outer = nn.Sequential(nn.Linear(H, 40), nn.GELU(), nn.Linear(40, H)), MemoryMeter(mode=mode)
    inner = MemoryMeter(model, mode=mode)

    def measured(x):
        with inner:
            return model(x)

    x = leaf(B, H)
    model(x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    with outer:
        loss = checkpoint(measured, x, use_reentrant=False).sum()
        assert (inner.held()["activations"], outer.held()["activations"]) == (0, 4 * B * H)
        loss.backward()
    torch.testing.assert_close(x.grad, expected)
    del loss
    assert inner.held()["activations"] == outer.held()["activations"] == 0


@both_modes
def test_two_meters_see_the_same(mode):
    model = small()
    one, two = MemoryMeter(model, mode=mode), MemoryMeter(model, mode="light")
    with one, two, one:
        loss = model(leaf(3, 8)).sum()
    assert one.held()["activations"] == two.held()["activations"] > 0
    with two:
        loss.backward()
    assert one.held()["activations"] == two.held()["activations"] == 0


def test_what_the_hooks_below_keep_is_counted():
    meter, x = MemoryMeter(), leaf(10)
    with save_on_cpu(), meter:
        y = (x * 1).exp()
        assert meter.held()["activations"] == 40
        y.sum().backward()
    assert meter.held()["activations"] == 0
    assert torch.equal(x.grad, x.exp())


# Coming and going


@both_modes
def test_an_exception_leaves_nothing_behind(mode):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    meter = MemoryMeter(model, optimizer=optimizer, mode=mode)
    with pytest.raises(RuntimeError, match="shapes"), meter, meter.phase("forward"):
        model(torch.ones(3, 9))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    with meter, meter.phase("backward"):
        pass
    assert meter.samples[-1][1] is None


@both_modes
def test_a_meter_keeps_nothing_alive(mode):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    bucket = torch.zeros(10)
    meter = MemoryMeter(model, optimizer=optimizer, mode=mode)
    meter.track("buffers", bucket)
    with meter:
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
    refs = [weakref.ref(x) for x in (model, optimizer, bucket, *model.parameters())]
    del model, optimizer, bucket
    gc.collect()
    assert not any(ref() for ref in refs)
    assert set(meter.held().values()) == {0}


def test_a_meter_goes_without_the_garbage_collector_and_a_graph_outlives_it():
    gc.collect()
    gc.disable()
    try:
        x = leaf(10)
        with MemoryMeter() as meter:
            loss = x.exp().sum()
        ref = weakref.ref(meter)
        del meter
        assert ref() is None
        loss.backward()
    finally:
        gc.enable()
    assert torch.equal(x.grad, x.exp())


def test_parameters_moved_and_layers_replaced_in_between():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    meter = MemoryMeter(model, optimizer=optimizer)
    with meter:
        with meter.phase("forward"):
            model(torch.ones(3, 8))
        with meter.phase("move"):
            model.to(torch.bfloat16)
        assert meter.samples[-1][2]["parameters"] == 2 * 244
        x = torch.ones(3, 8, dtype=torch.bfloat16)
        with meter.phase("forward"):
            loss = model(x).sum()
        assert meter.held()["activations"] == 2 * 3 * (8 + 16 + 16 + 2), "weights are not activations, also moved ones"
        del loss
        model[3] = nn.Linear(16, 100, bias=False, dtype=torch.bfloat16)
    held = meter.held()
    assert held["parameters"] == 2 * (176 + 1600)
    assert held["master"] == 2 * 68, "what the optimizer alone still holds"


def test_an_address_used_again_is_another_storage():
    """Freed gradients leave addresses that the next forward's activations get."""
    model = nn.Linear(64, 64)
    meter, x = MemoryMeter(model), torch.randn(64, 64)
    with meter:
        for _ in range(20):
            loss = model(x).exp().sum()
            assert meter._ledger.now[CATEGORIES.index("activations")] == 2 * 4 * 64 * 64
            loss.backward()
            del loss
            model.zero_grad()


def test_a_gradient_set_by_hand():
    model = nn.Linear(4, 4, bias=False)
    meter = MemoryMeter(model)
    with meter:
        model.weight.grad = torch.ones(4, 4)
    assert meter.held()["gradients"] == 64


def test_backward_and_release_in_other_threads():
    meter, x = MemoryMeter(), leaf(100)
    with meter:
        losses = [x.exp().sum() for _ in range(40)]
    assert meter.held()["activations"] == 40 * 400
    threads = [threading.Thread(target=lambda part: [loss.backward() for loss in part], args=(losses[i::4],))
               for i in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.held()["activations"] == 0


# Peaks, phases, the time line


def test_peak_and_phases_by_hand():
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.ReLU(), nn.Linear(10, 10, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    meter, x = MemoryMeter(model, optimizer=optimizer), torch.randn(50, 10)
    with meter:
        for _ in range(2):
            with meter.phase("forward"):
                loss = model(x).sum()
            with meter.phase("backward"):
                loss.backward()
            with meter.phase("step"):
                optimizer.step()
                optimizer.zero_grad()
    zero = dict.fromkeys(CATEGORIES, 0)
    forward = zero | {"parameters": 800, "optimizer": 800, "activations": 4000}
    assert meter.by_phase["forward"] == forward
    assert meter.peak == meter.by_phase["backward"] == forward | {"gradients": 400}, "ReLU's output is still kept"
    assert (meter.peak_at.step, meter.peak_at.phase) == (1, "backward")
    assert meter.by_phase["step"] == zero | {"parameters": 800, "gradients": 800, "optimizer": 800}
    assert meter.highest == forward | {"gradients": 800}
    ends = {(step, phase): held for step, phase, held in meter.samples}
    assert ends[0, "forward"] == zero | {"parameters": 800, "activations": 4000}
    assert ends[0, "backward"] == zero | {"parameters": 800, "gradients": 800}
    assert ends[1, "backward"]["gradients"] == 800
    assert ends[2, None] == zero | {"parameters": 800, "optimizer": 800}


def test_the_peak_of_the_full_mode_is_the_allocators():
    """Against torch's profiler, which hears of every allocation; here no kernel needs room of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters())
    meters = []

    def step():
        model(torch.randn(100, 64)).square().mean().backward()
        optimizer.step()

    def metered():
        with MemoryMeter(model, mode="full") as meter:
            step()
        meters.append(meter)

    before = sum(p.nbytes for p in model.parameters())
    allocated = allocator_peak(metered)
    found = sum(meters[0].peak.values()) - before
    assert abs(found - allocated) <= 64, "scalars inside kernels"


def test_the_point_of_the_peak_names_operation_layer_and_labels():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 1000)

        def forward(self, x):
            with label(layer=7):
                return self.large(self.small(x)) if self.training else self.small(x).repeat(1, 300)

    model = Model()
    with MemoryMeter(model.eval(), mode="full") as meter:
        model(torch.randn(50, 4))
    assert (meter.peak_at.op, meter.peak_at.layer) == ("aten::repeat", ""), "in the model itself, in no submodule"
    model.train()
    with MemoryMeter(model, mode="full") as meter, meter.phase("forward"):
        model(torch.randn(50, 4))
    assert meter.peak_at == ledger.Point(0, "forward", "aten::addmm", "large", {"layer": 7})
    with MemoryMeter(model, mode="full") as meter:
        loss = model(torch.randn(50, 4)).square().sum()
        with meter.phase("backward"):
            loss.backward()
    assert (meter.peak_at.phase, meter.peak_at.op) == ("backward", "aten::mul.Tensor")


def test_other_is_what_lives_and_is_nothing_else():
    with MemoryMeter(mode="full") as meter:
        x = torch.zeros(100)
        view, y = x[10:], x.add(1)
        x.add_(1)
    assert (meter.held()["other"], view.shape) == (800, (90,))
    del x, y
    assert meter.held()["other"] == 400, "the view holds it"
    del view
    assert meter.held()["other"] == 0


def test_moments_are_moments_in_the_peak_of_the_first_step():
    model = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones(100, 100)
    with MemoryMeter(model, optimizer=optimizer, mode="full") as meter, meter.phase("step"):
        optimizer.step()
    assert (meter.peak["optimizer"], meter.peak["steps"]) == (80_000, 4)
    assert 40_000 <= meter.peak["other"] <= 80_016, "denominators"


def test_the_time_line_is_bounded_and_keeps_the_peak(monkeypatch):
    monkeypatch.setattr(ledger, "LIMIT", 64)
    with MemoryMeter(mode="full") as meter:
        for i in range(500):
            torch.zeros(1000 if i == 250 else 10)
    totals = [sum(held.values()) for _, _, held in meter.samples]
    assert len(totals) <= 64
    assert max(totals) == sum(meter.peak.values()) == 4000


def test_the_allocators_figures_are_not_mixed_with_live_bytes():
    meter = MemoryMeter(small())
    assert meter.allocator == {}, "on the CPU there is none"
    assert not {"allocated", "reserved"} & meter.held().keys()


def test_repr_says_what_is_held():
    assert repr(MemoryMeter(small())) == "<MemoryMeter light: 0 bytes held, peak 0>"


# In ranks


@both_modes
def test_each_rank_has_a_meter_of_its_own(mode):
    values = labkit.run(programs.metered_step, mode, ranks=2).values
    for rank, (held, peak_activations) in enumerate(values):
        width = 10 * (rank + 1)
        assert held["parameters"] == held["gradients"] == 4 * 10 * width
        assert held["buffers"] == 4 * 1000
        assert peak_activations == 4 * 8 * 10


# Mistakes


class OfShards(torch.optim.SGD):
    """Keeps a master and gradients of its own, as sharded optimizers do."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.own = {"master": torch.zeros(10), "gradients": torch.zeros(3)}
        self.hooks = OrderedDict()

    def held(self):
        yield from self.own.items()

    def register_gradient_hook(self, hook):
        handle = torch.utils.hooks.RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle


@both_modes
def test_an_optimizer_says_what_else_it_holds(mode):
    model = small()
    optimizer = OfShards(model.parameters())
    meter = MemoryMeter(model, optimizer=optimizer, mode=mode)
    with meter:
        gone = torch.zeros(100)
        for hook in optimizer.hooks.values():
            hook(gone)
        del gone
    assert meter.held()["master"] == 40
    assert meter.held()["gradients"] == 12
    assert meter.highest["gradients"] == 12 + 400
    assert not optimizer.hooks


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: MemoryMeter(mode="heavy"), ValueError, "mode='heavy': expected one of 'light', 'full'"),
        (lambda: MemoryMeter(torch.optim.SGD([leaf(1)])), TypeError, "expected a torch.nn.Module"),
        (lambda: MemoryMeter(optimizer=nn.Linear(1, 1)), TypeError, "expected param_groups and state"),
        (lambda: MemoryMeter(optimizer=[3]), TypeError, "optimizer: 3: expected param_groups"),
        (lambda: MemoryMeter(master=nn.Linear(1, 1)), TypeError, "expected a tensor"),
        (lambda: MemoryMeter().track("grads", torch.ones(1)), ValueError, "category 'grads': expected one of param"),
        (lambda: MemoryMeter().track("buffers", 3), TypeError, "expected a tensor, tensors, or a function"),
    ],
)
def test_mistakes_are_named(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.gpu
@both_modes
def test_on_cuda(mode):
    held, allocator, activations = labkit.run(programs.on_cuda, mode, ranks=1, device="cuda").values[0]
    assert activations == 4 * 64 * 256 * 2
    assert held["activations"] == 0, "backward ran in a thread of autograd's"
    assert held["parameters"] == held["gradients"] == 4 * 2 * 256 * 256
    assert allocator["allocated"] >= held["parameters"] + held["gradients"]
    assert allocator["reserved"] >= allocator["allocated"]
