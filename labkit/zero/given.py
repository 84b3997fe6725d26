"""What a sharded optimizer is given: parameters with names, in groups; and what it cannot work with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from labkit.collectives import placement
from labkit.data_parallel import DistributedDataParallel, agreement, is_averaged

#: A parameter group as torch.optim knows it: ``"params"``, and options of its own.
Group = dict[str, Any]


#: What averages gradients here, in errors.
OPTIMIZER, MODULE = "this optimizer", "FullyShardedDataParallel"


def groups_and_names(given: Any, over: dist.ProcessGroup | None) -> tuple[list[Group], dict[torch.nn.Parameter, str]]:
    """Parameter groups, and what each parameter is called.

    Args:
        given: A module, parameters, (name, parameter) pairs, or dictionaries with either under ``"params"``.
        over: The group over which they are to be sharded.

    Raises:
        TypeError, ValueError: There is no parameter to train, or one that cannot be sharded.
    """
    if isinstance(given, torch.nn.Module):
        refuse_wrapped(given, OPTIMIZER)
        given = list(given.named_parameters())
    elif isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise TypeError(f"module_or_params is {type(given).__name__}: expected a module, or its parameters in a list")
    found = list(given)
    if any(isinstance(each, Mapping) != isinstance(found[0], Mapping) for each in found):
        raise TypeError("module_or_params holds parameters beside dictionaries: expected either")
    named: list[Any] = [dict(g) for g in found] if found and isinstance(found[0], Mapping) else [{"params": found}]
    names: dict[torch.nn.Parameter, str] = {}
    for group in named:
        params = group.get("params", ())
        if not isinstance(params, Iterable):
            raise TypeError(f"a group's 'params' is {type(params).__name__}: expected parameters in a list")
        group["params"] = [_named(p, names) for p in ([params] if isinstance(params, torch.Tensor) else params)]
    _check(names, over)
    return named, names


def _named(given: Any, names: dict[torch.nn.Parameter, str]) -> torch.nn.Parameter:
    name, param = given if isinstance(given, tuple) and len(given) == 2 else (str(len(names)), given)
    if not isinstance(param, torch.nn.Parameter):
        raise TypeError(f"module_or_params holds {type(param).__name__}: expected parameters")
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no name: expected (name, parameter) pairs, as of module.named_parameters()")
    if param not in names and name in names.values():
        raise ValueError(f"two parameters have the name {name!r}, under which state is saved: give each its own")
    names.setdefault(param, name)
    return param


def _check(names: Mapping[torch.nn.Parameter, str], over: dist.ProcessGroup | None) -> None:
    refuse_averaged(names, OPTIMIZER)
    trained = [param for param in names if param.requires_grad]
    if not trained:
        raise ValueError("there is no trained parameter: expected at least one with requires_grad")
    for param, name in names.items():
        refuse_unmade(name, param)
        refuse_sharded(name, param, over)
        if param.is_meta:
            raise ValueError(f"{name} is on the meta device and holds no values: give the module memory first "
                             "(module.to_empty(device=…), then initialise it)")  # fmt: skip
        if type(param) is not torch.nn.Parameter or hasattr(param, "__tensor_flatten__"):
            raise TypeError(f"{name} is a {type(param).__name__}: expected a plain parameter, not one that another "
                            "library has sharded already")  # fmt: skip
        if param.requires_grad and not param.dtype.is_floating_point:
            raise TypeError(f"{name} is {param.dtype}: expected floats, whose gradients have a mean")
    refuse_shared_memory(names)


def refuse_unmade(name: str, param: torch.nn.Parameter) -> None:
    """
    Raises:
        ValueError: A lazy layer has not seen its first input.
    """
    if isinstance(param, torch.nn.UninitializedParameter):
        raise ValueError(f"{name} has no shape yet: call the module once, so that its lazy layers are made")


def refuse_sharded(name: str, param: torch.nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """
    Raises:
        ValueError: The parameter is a shard already, of a tensor that lies on the ranks of this group.
    """
    ranks = _ranks(group)
    if len(ranks) > 1 and any(_ranks(other) == ranks for other in placement(param).sharded):
        raise ValueError(
            f"{name} is sharded over this group already: give the data-parallel group as group=, not the "
            "tensor-parallel one; what FullyShardedDataParallel has sharded takes torch's own optimizer"
        )


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def refuse_shared_memory(names: Mapping[torch.nn.Parameter, str]) -> None:
    """
    Raises:
        ValueError: Two parameters lie in one memory.
    """
    seen: dict[int, list[tuple[int, int, str]]] = {}
    for param, name in names.items():
        if param.is_meta:
            continue
        begin = param.data_ptr()
        seen.setdefault(param.untyped_storage().data_ptr(), []).append((begin, begin + param.nbytes, name))
    for places in seen.values():
        places.sort()
        for (_, end, name), (begin, _, other) in pairwise(places):
            if begin < end:
                raise ValueError(f"{name} and {other} are two parameters in one memory, which sharding would untie: "
                                 "make them one (head.weight = embedding.weight)")  # fmt: skip


def refuse_wrapped(module: torch.nn.Module, by: str) -> None:
    """
    Raises:
        ValueError: The module averages its gradients itself, and so would `by`.
    """
    if any(isinstance(part, DistributedDataParallel | torch.nn.parallel.DistributedDataParallel)
           for part in module.modules()):  # fmt: skip
        raise ValueError("the module is wrapped in DistributedDataParallel, which averages gradients, and so does "
                         f"{by}: give it the bare module")  # fmt: skip


def refuse_averaged(params: Iterable[torch.nn.Parameter], by: str) -> None:
    """
    Raises:
        ValueError: labkit's DistributedDataParallel has hooks on a parameter, which `by` would average too.
    """
    if is_averaged(params):
        raise ValueError("the parameters are those of a module under DistributedDataParallel, which averages "
                         f"gradients, and so does {by}: do not wrap the module")  # fmt: skip


def same_options(group: dist.ProcessGroup | None, on: torch.device, **options: Any) -> None:
    """Ranks with other options would cut other buckets, and send what nobody receives.

    Raises:
        ValueError: On every rank: what was given to one is not what was given to rank 0 of the group.
    """
    told = agreement.gather_text(json.dumps({name: str(value) for name, value in options.items()}), group, on)
    first = json.loads(told[0])
    for rank, other in enumerate(map(json.loads, told)):
        for name, value in other.items():
            if value != first[name]:
                raise ValueError(f"{name} is {first[name]} on rank 0 of the group, {value} on rank {rank}: give all "
                                 "ranks the same")  # fmt: skip


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of an optimizer's options those that are comparable as text."""
    return {key: value for key, value in options.items() if isinstance(value, str | int | float | tuple | None)}


def check_element_wise(
    optimizer_class: Any, defaults: Mapping[str, Any], groups: Sequence[Group], on: torch.device
) -> None:
    """Try the optimizer: a matrix must move as its two halves do, each laid flat, for that is how it will be used.

    Raises:
        TypeError: `optimizer_class` is no optimizer class.
        ValueError: It is not element-wise: a step of one element depends on others, or on the tensor's shape.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class is {optimizer_class!r}: expected a class of optimizers, such as "
                        "torch.optim.AdamW, not one that is made already")  # fmt: skip
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        start = torch.linspace(-1, 2, 12, dtype=torch.float64, device=on)
        whole = [start.clone().view(3, 4)]
        halves = [start[:5].clone(), start[5:].clone()]
        first = optimizer_class([{**options, "params": whole}], **defaults)  # may refuse its options itself
        try:
            _walk(whole, first)
            _walk(halves, optimizer_class([{**options, "params": halves}], **defaults))
            same = torch.allclose(whole[0].view(-1), torch.cat(halves), rtol=1e-9, atol=1e-12)
        except Exception as error:
            raise ValueError(_refusal(optimizer_class, f"it cannot step on flat pieces ({error})")) from error
        if not same:
            raise ValueError(_refusal(optimizer_class, "a step on two halves of a matrix is not that on the whole"))


def _walk(tensors: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Two steps of a fixed gradient."""
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = 0.1  # a rate of 0, as at the start of a warm-up, would show nothing
    for scale in (1.0, -0.5):
        flat = scale * torch.linspace(0.3, 5, 12, dtype=torch.float64, device=tensors[0].device)
        parts = flat.split([t.numel() for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = part.reshape(tensor.shape)
        optimizer.step()


def _refusal(optimizer_class: type, why: str) -> str:
    return (f"{optimizer_class.__name__} is not element-wise: {why}; a rank holds pieces of parameters, cut anywhere: "
            "use AdamW, Adam, SGD, RMSprop, Adagrad or another that treats each element alone")  # fmt: skip


def yes_or_no(**options: Any) -> None:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}: expected True or False")


def float_type(name: str, value: Any, such_as: str) -> None:
    if not isinstance(value, torch.dtype) or not value.is_floating_point or value.itemsize < 2:
        raise TypeError(f"{name} is {value!r}: expected a floating-point type of 16 bits or more, such as {such_as}")


def bucket_bytes(mib: float) -> int:
    if isinstance(mib, bool) or not isinstance(mib, int | float) or not mib > 0:
        raise ValueError(f"bucket_cap_mb={mib!r}: expected a number of MiB above 0; 1e-6 is a bucket a parameter")
    return max(1, min(int(mib * 2**20), 2**62)) if mib < math.inf else 2**62


def take_over(given: Any, params: list[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """The ranks compare what they were given; then all have the values of rank 0."""
    module = given if isinstance(given, torch.nn.Module) else torch.nn.ParameterList(params)
    agreement.compare(module, group, params[0].device)
    agreement.spread([*params, *(buffer for _, buffer in agreement.saved_buffers(module))], group)
