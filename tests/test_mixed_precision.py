"""Loss scaling against torch's own, one verdict on all ranks, fp32 masters and sums; faults 16, 17, 48 and 49."""

from __future__ import annotations

import copy
import math
import random

import programs_mixed_precision as programs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import labkit
from labkit.collectives import mark, placement
from labkit.theory import memory
from labkit.tricks import GradScaler, MixedPrecision, clip_grad_norm_

HALVES = [torch.bfloat16, torch.float16]


def one(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


# The scaler, on one rank


@pytest.mark.parametrize("seed", range(5))
def test_scales_and_steps_are_those_of_torch(seed):
    """Gradients that are inf or nan at random; other factors and intervals."""
    draw = random.Random(seed)
    how = {
        "init_scale": draw.choice([2.0**4, 2.0**16, 2.0**127]), "growth_factor": draw.choice([2.0, 4.0]),
        "backoff_factor": draw.choice([0.5, 0.25]), "growth_interval": draw.choice([1, 2, 3]),
    }  # fmt: skip
    scalers = [GradScaler(**how), torch.amp.GradScaler("cpu", **how)]
    params = [one(), one()]
    optimizers = [torch.optim.Adam([param], 0.1) for param in params]
    for _ in range(40):
        factor, unscales = draw.choice([1.0, -0.5, 3.0, 1.0, math.inf, math.nan]), draw.random() < 0.5
        for scaler, param, optimizer in zip(scalers, params, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(param.sum() * 1e-3).backward()
            param.grad *= factor
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert torch.equal(params[0], params[1])


def test_it_goes_on_from_where_it_was_saved():
    first, second = (GradScaler(8.0, growth_interval=2) for _ in range(2))
    param, optimizer = one(), None
    optimizer = torch.optim.SGD([param], 0.1)

    def step(scaler: GradScaler, grad: float) -> None:
        param.grad = torch.tensor([grad])
        scaler.step(optimizer)
        scaler.update()

    step(first, math.inf)
    step(first, 1.0)
    second.load_state_dict(first.state_dict())
    for scaler in (first, second):
        step(scaler, 1.0)
        assert (scaler.get_scale(), scaler.skipped_steps) == (8.0, 1)


@pytest.mark.parametrize(
    "state",
    [None, {}, torch.amp.GradScaler("cpu").state_dict(), {"scale": math.nan, "good_steps": 0, "skipped_steps": 0},
     {"scale": 1.0, "good_steps": -1, "skipped_steps": 0}],
)  # fmt: skip
def test_what_is_no_state_of_a_scaler(state):
    scaler = GradScaler(8.0)
    with pytest.raises(ValueError, match=r"state is|scale=nan|good_steps=-1"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 8.0


def test_a_shorter_interval_than_when_it_was_saved_grows():
    scaler, param = GradScaler(8.0, growth_interval=2), one()
    scaler.load_state_dict({"scale": 8.0, "good_steps": 5, "skipped_steps": 0})
    param.grad = torch.ones(1)
    scaler.step(torch.optim.SGD([param], 1.0))
    scaler.update()
    assert scaler.get_scale() == 16.0


def test_a_scale_stays_a_number():
    """However many steps overflow."""
    scaler, param = GradScaler(1e-20, backoff_factor=1e-10), one()
    optimizer = torch.optim.SGD([param], 1.0)
    for _ in range(5):
        param.grad = torch.tensor([math.inf])
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == pytest.approx(1e-30)
    assert param.item() == 1.0


def test_sparse_gradients_are_unscaled():
    module = nn.Embedding(5, 2, sparse=True)
    optimizer, scaler = torch.optim.SGD(module.parameters(), 1.0), GradScaler(4.0)
    scaler.scale(module(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.unscale_(optimizer)
    assert module.weight.grad.to_dense()[:, 0].tolist() == [0, 2, 0, 1, 0]


def test_two_optimizers_decide_each_for_itself():
    params = [one(), one()]
    first, second = (torch.optim.SGD([p], 1.0) for p in params)
    scaler = GradScaler(4.0)
    params[0].grad, params[1].grad = torch.tensor([math.inf]), torch.tensor([4.0])
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    assert [p.item() for p in params] == [1.0, 0.0]
    assert (scaler.get_scale(), scaler.skipped_steps) == (2.0, 1)


def test_a_step_returns_what_the_optimizer_does_and_takes_a_closure():
    scaler, param = GradScaler(4.0), one()
    param.grad = torch.tensor([4.0])
    assert scaler.step(torch.optim.SGD([param], 1.0), lambda: 7.0) == 7.0


def test_a_disabled_scaler_does_nothing():
    scaler, param = GradScaler(enabled=False), one()
    optimizer = torch.optim.SGD([param], 1.0)
    loss = param.sum()
    assert scaler.scale(loss) is loss
    param.grad = torch.tensor([0.25])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (param.item(), scaler.get_scale(), scaler.skipped_steps) == (0.75, 1.0, 0)


def test_a_narrow_loss_is_scaled_in_fp32():
    assert GradScaler(2.0**16).scale(torch.ones((), dtype=torch.float16)).item() == 65536.0


# Clip before unscale: fault 49


def test_unscaled_then_clipped_is_as_fp32():
    """Scale 1024, max_norm 1."""
    weights = []
    for scaler in (GradScaler(1024.0), GradScaler(enabled=False)):
        param = nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = torch.optim.SGD([param], 0.5)
        scaler.scale((param * torch.tensor([3.0, 4.0])).sum()).backward()
        scaler.unscale_(optimizer)
        assert clip_grad_norm_(param, 1.0).item() == 5.0
        scaler.step(optimizer)
        scaler.update()
        weights.append(param)
    assert torch.equal(*weights)
    torch.testing.assert_close(weights[0].detach(), torch.tensor([0.7, 1.6]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("by", ["step", "unscale_"])
@pytest.mark.parametrize("max_norm", [1.0, 1e9])
def test_clipped_before_it_is_unscaled(by, max_norm):
    param, scaler = one(), GradScaler(1024.0)
    optimizer = torch.optim.SGD([param], 1.0)
    for _ in range(2):  # also where gradients are zeroed in place, and so stay the same tensors
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(3 * param.sum()).backward()
        clip_grad_norm_([param], max_norm)
        with pytest.raises(RuntimeError, match=r"clipped while they were 1024 times too large.*unscale_\(optimizer\)"):
            getattr(scaler, by)(optimizer)
    optimizer.zero_grad(set_to_none=False)
    scaler.scale(3 * param.sum()).backward()
    scaler.step(optimizer)
    assert param.item() == -2.0


def test_clipped_before_it_is_unscaled_with_zero():
    for message in labkit.run(programs.clipped_too_early, ranks=2).values:
        assert message.startswith("RuntimeError: the gradients were clipped while they were 1024 times")


# One verdict: fault 48


@pytest.mark.parametrize("where", [0, 2])
def test_an_overflow_on_one_rank_is_one_on_all(where):
    for changed, scales, skipped in labkit.run(programs.overflow_on, where, ranks=3).values:
        assert changed == [True, False, True, True]
        assert scales == [1024.0, 512.0, 512.0, 1024.0]
        assert skipped == 1


def test_only_the_ranks_of_the_group_decide():
    runs = labkit.run(programs.overflow_on, 1, 2, ranks=4).values
    assert [skipped for *_, skipped in runs] == [1, 1, 0, 0]


def test_a_rank_without_gradients_takes_part():
    assert labkit.run(programs.a_rank_without_parameters, ranks=3).values == [(2.0**15, 1)] * 3


@pytest.mark.parametrize("where", [0, 1])
def test_an_overflow_on_one_stage_is_one_on_all(where):
    for found in labkit.run(programs.overflow_in_a_pipeline, where, ranks=2).values:
        assert found["stepped"] == [True, False, True]
        assert found["same"] == [False, True, False]
        assert found["scale"] == [1024.0, 512.0, 512.0]
        assert found["skipped"] == 1
        assert found["off"] < 5e-3
        for have, want in found["norm"]:
            assert have == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_beside_zero(stage):
    """A power of two changes no bit; an overflow on rank 1 is one on all."""
    for scaled, plain, skipped, _ in labkit.run(programs.with_zero, stage, None, ranks=2).values:
        assert scaled == plain
        assert skipped == 0
    for *_, skipped, unchanged in labkit.run(programs.with_zero, stage, 1, ranks=2).values:
        assert skipped == 1
        assert unchanged


# Mixed precision


def test_bf16_loses_what_fp32_adds_up():
    """Fault 17: 0.001, a thousand times."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), lr=1.0))
    x = torch.full((1, 1), -1e-3, dtype=torch.bfloat16)
    each = x.item()
    for _ in range(1000):
        mixed.backward(module(x).sum())
    assert mixed.masters[0].grad.item() == pytest.approx(1000 * each, rel=1e-5)
    mixed.step()
    assert mixed.masters[0].item() == pytest.approx(1 - 1000 * each, rel=1e-6)
    in_bf16 = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        in_bf16 += x.item()
    assert in_bf16.item() == -0.5


@pytest.mark.parametrize("dtype", HALVES)
def test_steps_are_those_of_masters_by_hand(dtype):
    """Three steps of three micro-batches: torch.autograd's gradients of a rounded copy, summed and clipped in fp32."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    expected = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
    by_hand = torch.optim.SGD(expected, 0.1, momentum=0.9)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    mixed = MixedPrecision(module, optimizer, dtype, GradScaler(256.0))
    for step in range(3):
        batches = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        mixed.zero_grad()
        by_hand.zero_grad()
        rounded = [p.detach().to(dtype).requires_grad_() for p in expected]
        for x in batches:
            mixed.backward(module(x).float().square().mean() / 3)
            w1, b1, w2, b2 = rounded
            y = F.linear(torch.tanh(F.linear(x, w1, b1)), w2, b2)
            grads = torch.autograd.grad(y.float().square().mean() / 3, rounded)
            for param, grad in zip(expected, grads, strict=True):
                param.grad = grad.float() if param.grad is None else param.grad + grad.float()
        norm = nn.utils.clip_grad_norm_(expected, 0.1)
        torch.testing.assert_close(mixed.clip_grad_norm_(0.1), norm.double(), rtol=1e-5, atol=0)
        by_hand.step()
        assert mixed.step()
        for master, working, want in zip(mixed.masters, module.parameters(), expected, strict=True):
            torch.testing.assert_close(master, want, rtol=1e-5, atol=1e-6)
            assert torch.equal(working, master.to(dtype))


def test_what_fp16_cannot_hold_is_scaled_into_it():
    """A gradient of 1e-8 is 0 in fp16; with a scale it is a step."""
    moved = []
    for scaler in (None, GradScaler(2.0**16)):
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 1e8), torch.float16, scaler)
        mixed.backward(module(torch.ones(1, 1, dtype=torch.float16)).float().sum() * 1e-8)
        mixed.step()
        moved.append(mixed.masters[0].item())
    assert moved[0] == 0.0
    assert moved[1] == pytest.approx(-1.0, rel=1e-3)


def test_an_overflow_leaves_masters_and_working_copies():
    module = nn.Linear(2, 2)
    scaler = GradScaler(2.0**60)
    mixed = MixedPrecision(module, torch.optim.AdamW(module.parameters()), torch.float16, scaler)
    before = [p.detach().clone() for p in (*mixed.masters, *module.parameters())]
    for n in range(3):
        mixed.zero_grad()
        mixed.backward(module(torch.ones(1, 2, dtype=torch.float16)).sum())
        assert not mixed.step()
        assert scaler.get_scale() == 2.0 ** (59 - n)
    assert all(torch.equal(a, b) for a, b in zip(before, (*mixed.masters, *module.parameters()), strict=True))
    assert not mixed.optimizer.state


@pytest.mark.parametrize("how", ["wrapped", "group"])
def test_a_mean_whose_sum_fp16_does_not_hold(how):
    """Fault 16: 40000 on both of two ranks."""
    assert labkit.run(programs.mean_of_40000, how, ranks=2).values == [(40000.0, 40000.0)] * 2


@pytest.mark.parametrize("how", ["wrapped", "no_sync", "group"])
@pytest.mark.parametrize("dtype", HALVES)
def test_windows_beside_data_parallelism(how, dtype):
    """As fp32 in one process, but for what 16 bits round."""
    off = labkit.run(programs.windows, how, 3, dtype, ranks=2).values
    assert off[0] == off[1]
    assert off[0] < {torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize(("users", "mean"), [((0, 1), 1.0), ((1,), 0.5), ((), None)])
def test_a_parameter_that_some_ranks_do_not_use(users, mean):
    assert labkit.run(programs.unused_on_some, users, ranks=2).values == [mean] * 2


def test_masters_live_where_their_parameters_do():
    (norm, whole, by_marks), other = labkit.run(programs.beside_tensor_parallelism, ranks=2).values
    assert (norm, by_marks) == (other[0], other[2])
    assert norm == by_marks == pytest.approx(whole, rel=2e-2)


@pytest.mark.parametrize("dtype", HALVES)
def test_twenty_bytes_a_parameter(dtype):
    """2 + 2 + 4 + 4 + 8, as the meter counts them and as theory has them."""
    made, backward, second, stepped, zeroed = labkit.run(programs.held, dtype, ranks=1).values[0]
    n = 100 * 40 * 2 + 140
    recipe = memory.recipe("fp16_megatron")
    assert all(held["parameters"] == 2 * n and held["master"] == 4 * n for held in (made, backward, second, stepped))
    assert [held["gradients"] / n for held in (made, backward, second, stepped, zeroed)] == [0, 4, 6, 4, 0]
    assert (made["optimizer"], stepped["optimizer"]) == (0, 8 * n)
    assert second["parameters"] + second["gradients"] + second["master"] + stepped["optimizer"] == recipe.total * n


def test_parameters_stay_the_same_objects_with_their_marks():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    module[2].weight = module[0].weight  # tied
    mark(module[0].bias, tied="bias")
    before = list(module.parameters())
    optimizer = torch.optim.AdamW([{"params": [module[0].weight], "lr": 0.5}, {"params": before[1:], "lr": 0.25}])
    mixed = MixedPrecision(module, optimizer)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module[1].num_batches_tracked.dtype == torch.int64
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 4]
    assert len(mixed.masters) == 5
    assert {m.dtype for m in mixed.masters} == {torch.float32}
    assert placement(mixed.masters[1]).tied == "bias"


def test_an_optimizer_that_has_stepped_keeps_its_state():
    module = nn.Linear(2, 1)
    reference = copy.deepcopy(module)
    optimizer, plain = (torch.optim.Adam(m.parameters(), 0.1) for m in (module, reference))
    for model, each in ((module, optimizer), (reference, plain)):
        model(torch.ones(1, 2)).sum().backward()
        each.step()
        each.zero_grad()
    mixed = MixedPrecision(module, optimizer)
    mixed.backward(module(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    mixed.step()
    reference(torch.ones(1, 2)).sum().backward()
    plain.step()
    for master, want in zip(mixed.masters, reference.parameters(), strict=True):
        torch.testing.assert_close(master, want, rtol=1e-6, atol=0)
    assert set(optimizer.state) == set(mixed.masters)


def test_frozen_parameters_stay():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    module[0].requires_grad_(False)
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 0.1))
    before = module[0].weight.clone()
    mixed.backward(module(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    mixed.step()
    assert torch.equal(module[0].weight, before)
    assert module[0].weight.grad is None


# What is refused


def test_calls_in_the_wrong_order():
    param, scaler = one(), GradScaler(4.0)
    optimizer = torch.optim.SGD([param], 1.0)
    param.grad = torch.tensor([4.0])
    with pytest.raises(RuntimeError, match="no gradients were unscaled"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscaled already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="step was called twice"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="unscaled already, or it has stepped"):
        scaler.unscale_(optimizer)
    scaler.update()


def test_a_backward_after_clipping():
    module = nn.Linear(1, 1)
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 1.0))
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    mixed.backward(module(x).sum())
    mixed.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"another backward.* call step\(\) and zero_grad\(\)"):
        mixed.backward(module(x).sum())


@pytest.mark.parametrize("again", ["backward", "step"])
def test_gradients_are_used_in_one_step(again):
    """They are unscaled already: another backward would add scaled ones, another step would unscale them once more."""
    module = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    mixed = MixedPrecision(module, optimizer, scaler=GradScaler(1024.0))
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    for zero_grad in (mixed.zero_grad, optimizer.zero_grad, mixed.zero_grad):
        mixed.backward(module(x).sum())
        mixed.step()
        assert mixed.masters[0].grad.item() == 1.0
        with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
            mixed.backward(module(x).sum()) if again == "backward" else mixed.step()
        module.zero_grad()
        zero_grad()


def test_weights_that_a_master_does_not_know():
    """They would be overwritten in the next step."""
    module = nn.Linear(2, 1)
    mixed = MixedPrecision(module, torch.optim.SGD(module.parameters(), 1.0))
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    module.load_state_dict(module.state_dict())  # the same: nothing to say
    mixed.backward(module(x).sum())
    module.load_state_dict({"weight": torch.full((1, 2), 7.0), "bias": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"shape \(1, 2\) was written to.*before MixedPrecision"):
        mixed.step()


@pytest.mark.parametrize("wrapper", ["labkit", "torch"])
def test_a_wrapper_that_spreads_rank_0s_parameters(wrapper):
    """Rank 1's masters would be others than rank 0's, and replicas drift apart."""
    first, second = labkit.run(programs.wrapped_with_other_parameters, wrapper, ranks=2).values
    assert first.startswith("no error")
    assert second.startswith("RuntimeError: a parameter of shape (8, 4) was written to")


def test_a_parameter_that_is_trained_later_is_averaged():
    assert labkit.run(programs.unfrozen, ranks=2).values == [1.5] * 2


def test_masters_are_saved_and_loaded():
    torch.manual_seed(0)
    x = torch.ones(1, 2, dtype=torch.bfloat16)

    def made() -> MixedPrecision:
        module = nn.Linear(2, 1)
        return MixedPrecision(module, torch.optim.Adam(module.parameters(), 1e-4), scaler=GradScaler(64.0))

    def step(mixed: MixedPrecision) -> None:
        mixed.zero_grad()
        mixed.backward(mixed.module(x).sum())
        mixed.step()

    first, second = made(), made()
    step(first)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(first.module.weight, second.module.weight)
    for mixed in (first, second):
        step(mixed)
    assert all(torch.equal(a, b) for a, b in zip(first.masters, second.masters, strict=True))
    with pytest.raises(ValueError, match="state is None: expected what"):
        second.load_state_dict(None)
    with pytest.raises(ValueError, match="masters of shapes"):
        second.load_state_dict({**first.state_dict(), "masters": first.masters[:1]})


def test_fp16_gradients_cannot_be_unscaled():
    module = nn.Linear(1, 1).half()
    module(torch.ones(1, 1).half()).sum().backward()
    with pytest.raises(ValueError, match=r"gradients are torch\.float16.*MixedPrecision"):
        GradScaler().unscale_(torch.optim.SGD(module.parameters(), 1.0))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"init_scale": 0}, ValueError, "init_scale=0"),
        ({"init_scale": math.inf}, ValueError, "init_scale=inf"),
        ({"init_scale": 1e39}, ValueError, "init_scale=1e"),
        ({"group": "dp"}, TypeError, "group is 'dp': expected a process group"),
        ({"init_scale": "1"}, TypeError, "init_scale is '1'"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor=1.0: expected a number above 1"),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor=1.0: expected a number above 0, and below 1"),
        ({"growth_interval": 0}, ValueError, "growth_interval=0"),
        ({"growth_interval": 1.5}, TypeError, "growth_interval is 1.5"),
    ],
)
def test_numbers_that_cannot_be_used(arguments, error, says):
    with pytest.raises(error, match=says):
        GradScaler(**arguments)


def test_what_cannot_be_mixed():
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    with pytest.raises(ValueError, match=r"dtype=torch\.float32: expected torch\.bfloat16 or"):
        MixedPrecision(module, optimizer, torch.float32)
    with pytest.raises(TypeError, match="module is OrderedDict"):
        MixedPrecision(module.state_dict(), optimizer)
    with pytest.raises(TypeError, match="optimizer is <class"):
        MixedPrecision(module, torch.optim.SGD)
    with pytest.raises(ValueError, match=r"parameter of shape \(1, 1\) that module has not"):
        MixedPrecision(nn.Linear(1, 1), optimizer)
    for scaler in (3, torch.amp.GradScaler("cpu")):
        with pytest.raises(TypeError, match=r"scaler is .*expected labkit"):
            MixedPrecision(module, optimizer, torch.float16, scaler)
    wrapped = type("DDP", (nn.Linear,), {"no_sync": None})(1, 1)
    with pytest.raises(TypeError, match=r"module is DDP.*wrap it after MixedPrecision"):
        MixedPrecision(wrapped, torch.optim.SGD(wrapped.parameters(), 1.0))
    for no_optimizer in (None, 3):
        with pytest.raises(TypeError, match=r"optimizer is .*expected one of torch\.optim"):
            GradScaler().unscale_(no_optimizer)
    with pytest.raises(TypeError, match="the loss is float"):
        GradScaler().scale(1.0)
    assert module.weight.dtype == torch.float32
