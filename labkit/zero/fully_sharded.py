"""`FullyShardedDataParallel`, stage 3: no rank holds the model; each block is put together when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from labkit import device
from labkit.collectives import check
from labkit.data_parallel import agreement
from labkit.zero.conductor import Conductor, watch
from labkit.zero.given import (
    MODULE,
    float_type,
    refuse_averaged,
    refuse_sharded,
    refuse_shared_memory,
    refuse_unmade,
    refuse_wrapped,
    same_options,
    yes_or_no,
)
from labkit.zero.materialise import materialise, refuse_init
from labkit.zero.unit import Member, Unit


class FullyShardedDataParallel(torch.nn.Module):
    """Stage 3 of ZeRO: each rank holds an Nth of parameters, gradients and optimizer state, and trains its own batches.

    The model is cut into *units*: each block is one, what is left is the *root*. Of a unit's Ψᵤ parameters, laid flat,
    a rank holds the r-th of N equal shards, ⌈Ψᵤ/N⌉ elements.

    1. *Forward*: before a unit runs, its parameters are gathered from all ranks; after it, they are freed.
    2. *Backward*: they are gathered again, since the gradient needs them. When the unit's gradients are complete its
       parameters are freed, and the gradients are reduce-scattered: their mean, of which each rank keeps its shard, is
       added to what is there. The full gradient is freed at once.
    3. *Step*: an ordinary element-wise optimizer steps on `parameters()`, which are this rank's pieces, 1-D, some of
       them empty. They are marked as sharded over the group, so that `labkit.tricks.clip_grad_norm_` takes the whole
       norm.

    k micro-steps move 3kΨ(N−1)/N elements per rank, Ψ with the padding of each unit. A rank holds its shards; in a
    forward or backward also the root, and the running unit; in backward that unit's full gradients, and one parameter's
    before it is among them; with ``prefetch=1`` the next unit, and the gradients of the one before while they are
    reduced. Activations are not sharded.

    The root runs round all the others: it stays gathered from the first of its layers to the last, in forward and in
    backward, and as its weights are tied or spread over both ends that is the least with two gathers. (Torch's FSDP2
    keeps its root also between forward and backward, and so gathers it once.) ``blocks=[model.token_embedding,
    *model.blocks, model.norm, model.head]`` makes units of untied ends, and the root is empty.

    All ranks must run the same units in the same order, forward and backward. A parameter that the loss of some rank
    does not depend on brings zeros, also where no rank uses it: unlike in one process, an optimizer then decays it.
    There is no ``no_sync()``: to hold full gradients over micro-steps is what stage 3 avoids. Call the wrapper, or its
    blocks, not functions of the module that use parameters outside a forward. Two forwards may come before a backward;
    a second backward through the same graph gathers again; a backward of gradients (``create_graph=True``) is refused.
    Register hooks on parameters before they are sharded: backward does not know the pieces.

    Args:
        module: Any module; the ranks' must be alike, and all take over the values of the group's rank 0. It is changed
            in place. A module built on the meta device is initialised a parameter at a time, so that no rank ever holds
            it whole. Parts that are wrapped already keep their units and their own options.
        group: The data-parallel group; ``None`` is the world. Tensor parallelism, over another group, comes first.
        blocks: Modules that become units; ``None``: the elements of the outermost `ModuleList`s.
        keep_after_forward: Units stay gathered until their backward: 2kΨ, and a rank holds the whole model in between.
        prefetch: How many units are gathered ahead, beside the computation; 0: none, and each reduction is waited for.
        param_dtype: Compute in this type, such as ``torch.bfloat16``: parameters are gathered, and gradients reduced,
            in it, inputs are cast. Shards, their gradients and the optimizer keep the module's own type.
        init: For a module on the meta device: called with it to initialise it. ``None``: `reset_parameters` of its
            outermost modules that have one. Values are those that the same call gives to a whole module from the same
            seed; a module's constructor may draw other ones before that, so to compare, seed and call it once more.

    Raises:
        TypeError, ValueError: An argument cannot be used, the ranks' modules differ, or a part is averaged already.

    Example:
        >>> def step():                                               # doctest: +SKIP
        ...     model = FullyShardedDataParallel(Transformer(preset("tiny_gpt")))
        ...     optimizer = torch.optim.AdamW(model.parameters())     # after wrapping: it is to hold the pieces
        ...     model(tokens).sum().backward()
        ...     optimizer.step()

    Source: Rajbhandari et al. 2020, "ZeRO", sections 5.3 and 7.2.2; Zhao et al. 2023, "PyTorch FSDP", sections 3 and 4.
    """

    def __init__(
        self, module: torch.nn.Module, group: dist.ProcessGroup | None = None,
        blocks: Sequence[torch.nn.Module] | None = None, keep_after_forward: bool = False, prefetch: int = 1,
        param_dtype: torch.dtype | None = None, init: Callable[[torch.nn.Module], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check.member(group)
        check.whole_number("prefetch", prefetch, least=0)
        yes_or_no(keep_after_forward=keep_after_forward)
        if param_dtype is not None:
            float_type("param_dtype", param_dtype, "torch.bfloat16")
        inner = _inner_units(module)
        parts = [module, *(_blocks(module) if blocks is None else _checked(module, blocks))]
        members = _members(parts, inner)
        _refuse(module, [m for mine in members for m in mine], group, init)
        _agree(module, inner, [m.param for mine in members for m in mine], group)
        same_options(
            group, device.current(), keep_after_forward=keep_after_forward, prefetch=prefetch, param_dtype=param_dtype,
            blocks=[name for part in parts for name, other in module.named_modules() if other is part],
        )  # fmt: skip
        self.module, self.group, self.param_dtype = module, group, param_dtype
        on = _device(members)
        units = [Unit(part, mine, group, on, param_dtype, keep_after_forward)
                 for part, mine in zip(parts, members, strict=True) if mine or part is module]  # fmt: skip
        for unit in units:
            watch(unit)
        place = {part: n for n, part in enumerate(module.modules())}
        self.conductor = Conductor(sorted([*units, *inner], key=lambda unit: place[unit.module]), prefetch)
        materialise(module, units, init, group, on)
        agreement.spread([buffer for _, buffer in agreement.saved_buffers(module)], group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a module in FullyShardedDataParallel cannot be copied or pickled, since ranks share it: copy "
                        "the bare module before; labkit.zero.save and consolidate give the whole; an average over "
                        "steps needs copies of parameters() only, this rank's pieces")  # fmt: skip

    @property
    def units(self) -> list[Unit]:
        """The root first, then blocks in their order."""
        return self.conductor.units

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward.

        Raises:
            RuntimeError: A parameter was added, replaced, moved, frozen or unfrozen since the module was sharded.
        """
        if self.param_dtype is not None:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        return self.module(*args, **kwargs)

    def _cast(self, given: Any) -> Any:
        return given.to(self.param_dtype) if isinstance(given, torch.Tensor) and given.is_floating_point() else given

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also after a backward that an error has cut short."""
        self.conductor.rest()
        super().zero_grad(set_to_none)

    def gathered(self) -> list[torch.Tensor]:
        """The memory of full parameters, a flat buffer a unit and element type, empty while it is freed.

        >>> meter.track("buffers", model.gathered)                    # doctest: +SKIP
        """
        return [flat.gathered.flat for unit in self.units for flat in unit.flats]

    def full_gradients(self) -> list[torch.Tensor]:
        """The memory of full gradients on their way to be reduced, as `gathered`.

        >>> meter.track("gradients", model.full_gradients)            # doctest: +SKIP
        """
        return [flat.gradients.flat for unit in self.units for flat in unit.flats]


def _inner_units(module: torch.nn.Module) -> list[Unit]:
    """Of parts that are wrapped already.

    Raises:
        TypeError, ValueError: `module` is none, or is wrapped already itself.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is {type(module).__name__}: expected a torch.nn.Module")
    wrappers = [part for part in module.modules() if isinstance(part, FullyShardedDataParallel)]
    if module in wrappers:
        raise ValueError("the module is wrapped in FullyShardedDataParallel already: wrap it once")
    return list(dict.fromkeys(unit for wrapper in wrappers for unit in wrapper.units))


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The elements of the outermost `ModuleList`s: a transformer's blocks."""
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
    for child in module.children():
        if is_list and not isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield child
        else:
            yield from _blocks(child)


def _checked(module: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
    """
    Raises:
        TypeError, ValueError: These are no parts of the module.
    """
    if not isinstance(blocks, Iterable):
        raise TypeError(f"blocks is {type(blocks).__name__}: expected modules in a list, such as [*model.blocks]")
    blocks, parts = list(blocks), set(module.modules()) - {module}
    for number, block in enumerate(blocks):
        if not isinstance(block, torch.nn.Module):
            raise TypeError(f"blocks[{number}] is {type(block).__name__}: expected a torch.nn.Module")
        if block not in parts:
            raise ValueError(f"blocks[{number}], a {type(block).__name__}, is no part of the module: expected some of "
                             "its submodules, such as [*model.blocks, model.head]")  # fmt: skip
        parts.discard(block)
    return blocks


def _members(parts: Sequence[torch.nn.Module], inner: list[Unit]) -> list[list[Member]]:
    """Of each part, the parameters that lie in no smaller part; one that lies in two goes to what holds both."""
    inside = [set(part.modules()) for part in parts]
    taken = {piece for unit in inner for flat in unit.flats for piece in flat.pieces}
    found: dict[torch.nn.Parameter, Member] = {}
    for path, holder in parts[0].named_modules():
        for name, param in holder._parameters.items():
            if param is not None and param not in taken:
                member = found.setdefault(param, Member(f"{path}.{name}".lstrip("."), param, []))
                member.slots.append((holder, name))
    of: list[list[Member]] = [[] for _ in parts]
    for member in found.values():
        around = [n for n in range(len(parts)) if all(holder in inside[n] for holder, _ in member.slots)]
        of[min(around, key=lambda n: len(inside[n]))].append(member)
    return of


def _refuse(module: torch.nn.Module, members: list[Member], group: dist.ProcessGroup | None, init: Any) -> None:
    """
    Raises:
        TypeError, ValueError: The module's parameters cannot be sharded.
    """
    refuse_wrapped(module, MODULE)
    refuse_averaged([member.param for member in members], MODULE)
    refuse_init(module, init)
    for member in members:
        refuse_unmade(member.name, member.param)
        refuse_sharded(member.name, member.param, group)
        if member.param.is_complex():
            raise TypeError(f"{member.name} is {member.param.dtype}: expected real numbers")
        if hasattr(member.param, "__tensor_flatten__"):
            raise TypeError(f"{member.name} is a {type(member.param).__name__}: expected a plain parameter, not one "
                            "that another library has sharded already")  # fmt: skip
    refuse_shared_memory({member.param: member.name for member in members})


def _agree(
    module: torch.nn.Module, inner: list[Unit], params: list[torch.nn.Parameter], group: dist.ProcessGroup | None
) -> None:
    """All ranks have the same parameters, and the values of the group's rank 0.

    Raises:
        ValueError: The ranks' modules differ.
    """
    for unit in inner:
        unit.show_full()  # pieces differ from rank to rank
    agreement.compare(module, group, device.current())
    for unit in inner:
        unit.show_pieces()
    agreement.spread([p for p in params if not p.is_meta], group)


def _device(members: list[list[Member]]) -> torch.device:
    """Where the shards are to be."""
    return next((m.param.device for mine in members for m in mine if not m.param.is_meta), device.current())
