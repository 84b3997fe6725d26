"""What one layer does in one step, as plain data for `labkit.show.layer`.

A rank notes what it holds at each place of the layer (shape, and a digest of the bits), in forward and as a gradient in
backward, and which collectives ran at f and g in between. Only what happened is noted: a layer without f has no
collective there, and its gradients differ between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import torch
import torch.distributed as dist

from labkit.collectives.choose import ALGORITHMS
from labkit.model.transformer import Block
from labkit.tensor_parallel.convert import Region, SharedAttention, SharedMLP
from labkit.trace import Open, recorder

#: The places of a layer, and how the ranks hold what is there: (in forward, as a gradient). "whole" is whole on every
#: rank; "columns" are split along the last dimension; "share" is each rank's part of a sum. Where sequence parallelism
#: splits the tokens, "whole" becomes "tokens".
_KINDS = {
    "X": ("whole", "whole"),
    "LN": ("whole", "whole"),
    "QKV": ("columns", "columns"),
    "attn": ("columns", "columns"),
    "proj": ("share", "whole"),
    "W₁": ("columns", "columns"),
    "GeLU": ("columns", "columns"),
    "W₂": ("share", "whole"),
    "Y": ("whole", "whole"),
}
#: What Llama calls them.
_LLAMA = {"LN": "RMS", "GeLU": "SiLU"}
#: Gradients that come out of f or g.
_AFTER = {"LN": "f", "proj": "g", "W₂": "g"}


@contextmanager
def watch(block: Block) -> Iterator[dict[str, Any]]:
    """Note what a layer does in the forward and backward that run inside.

    Args:
        block: A layer of a model that `parallelize` (of tensor or sequence parallelism) has shared among the ranks.

    Yields:
        ``{"rank": …, "stages": […]}``, filled in as things happen. A stage has `part` ("attention", "mlp"), `name` and
        `phase`; where a tensor is held also `kind`, `shape`, `digest`; at f and g `collective` (or ``None``), `nbytes`
        (of the whole tensor that it makes or takes) and `sent` (what this rank put on the wire; ``None`` where torch's
        own collective hides it).

    Raises:
        TypeError: `block` is no layer of a shared model.
        RuntimeError: Nobody records collectives here, as `labkit.run` does; or the layer runs twice inside.

    Example:
        >>> def one_step():
        ...     model = tensor_parallel.parallelize(build())
        ...     with watch(model.blocks[0]) as seen:
        ...         total, _ = tensor_parallel.loss(model(tokens), targets, vocab=256)
        ...         total.backward()
        ...     return seen
        >>> labkit.show.layer(labkit.run(one_step, ranks=4).values)       # doctest: +SKIP

    Source: Shoeybi et al. 2019, "Megatron-LM", figure 3; with sequence parallelism Korthikanti et al. 2022, figure 5.
    """
    _check(block)
    seen: dict[str, Any] = {"rank": dist.get_rank(), "stages": []}
    diary = _Diary(seen["stages"], gpt=block.attention.one_projection)
    with diary.hooks(block), _regions(block, diary):
        yield seen


class _Diary:
    """The stages of a layer, in the order in which they happen."""

    def __init__(self, stages: list[dict[str, Any]], gpt: bool) -> None:
        self._stages, self._gpt = stages, gpt
        self._taken = len(recorder.begun())
        self._handles: list[Any] = []

    @contextmanager
    def hooks(self, block: Any) -> Iterator[None]:
        """Look at what enters and leaves the layer's parts."""
        self._handles = [
            block.register_forward_pre_hook(lambda _, given: self._enter(given[0])),
            block.attention.output.register_forward_pre_hook(lambda _, given: self.held("attention", "attn", given)),
            block.mlp_norm.register_forward_pre_hook(lambda _, given: self.held("mlp", "X", given)),
            block.mlp.down.register_forward_pre_hook(lambda _, given: self.held("mlp", "GeLU", given)),
            block.register_forward_hook(lambda _, given, made: self.held("mlp", "Y", (made,))),
        ]
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._split_tokens()

    def _enter(self, x: torch.Tensor) -> None:
        if self._stages:
            raise RuntimeError("the layer runs a second time under watch: expected one forward and one backward inside")
        self._calls()  # what ran before the layer
        self.held("attention", "X", (x,))

    def held(self, part: str, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Note a tensor, or several side by side, and later their gradients."""
        self._box(part, name, "forward", tensors)
        found: dict[int, torch.Tensor] = {}

        def arrived(n: int, grad: torch.Tensor) -> None:
            found[n] = grad
            if len(found) == len(tensors):
                self._gradient(part, name, [found[k] for k in range(len(tensors))])

        for n, tensor in enumerate(tensors):
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(partial(arrived, n)))

    def _gradient(self, part: str, name: str, grads: Sequence[torch.Tensor]) -> None:
        if name == "Y":
            self._calls()  # what ran behind the layer
        if name in _AFTER:
            self.between(part, _AFTER[name], "backward")
        self._box(part, name, "backward", grads)

    def _box(self, part: str, name: str, phase: str, tensors: Sequence[torch.Tensor]) -> None:
        shape = (*tensors[0].shape[:-1], sum(t.shape[-1] for t in tensors))
        called = name if self._gpt else _LLAMA.get(name, name)
        self._stages.append({"part": part, "name": called, "phase": phase, "kind": _KINDS[name][phase == "backward"],
                             "shape": shape, "digest": _digest(tensors)})  # fmt: skip

    def between(self, part: str, name: str, phase: str) -> None:
        """Note f or g: the collectives that have run since the last one, or that there was none."""
        for call in self._calls() or [{"collective": None, "nbytes": 0, "sent": 0}]:
            self._stages.append({"part": part, "name": name, "phase": phase, **call})

    def _calls(self) -> list[dict[str, Any]]:
        """The collectives since the last look, each with what was sent inside; messages outside them as one."""
        events = recorder.begun(self._taken)
        self._taken += len(events)
        within: dict[int, int | None] = {}  # event → the outermost collective around it
        for e in events:
            around = within.get(e.fields["parent"])
            within[e.index] = e.index if around is None and _is_collective(e) else around
        calls = {e.index: e for e in events if within[e.index] == e.index}
        sends = [e for e in events if e.fields["kind"] == "send"]
        found = []
        for index, call in calls.items():
            inside = [e for e in events if within[e.index] == index]
            seen = not any(e.fields["kind"] == "collective" for e in inside)
            sent = sum(e.fields["nbytes"] for e in sends if within[e.index] == index)
            found.append({"collective": call.fields["name"].split()[0], "nbytes": call.fields["nbytes"],
                          "sent": sent if seen else None})  # fmt: skip
        if loose := sum(e.fields["nbytes"] for e in sends if within[e.index] is None):
            found.append({"collective": "send", "nbytes": loose, "sent": loose})
        return found

    def _split_tokens(self) -> None:
        """Outside the split parts a rank may have fewer tokens than inside: then they are split along the sequence."""
        inside = [s["shape"][1] for s in self._stages if s.get("kind") == "columns"]
        for stage in self._stages:
            if stage.get("kind") == "whole" and stage["shape"][1] < max(inside, default=0):
                stage["kind"] = "tokens"


class _Watched(Region):
    """f and g of one part of the layer, noted."""

    def __init__(self, region: Region, diary: _Diary, part: str, first: str, last: str) -> None:
        super().__init__(region.group)
        self.region, self._diary = region, diary
        self._part, self._first, self._last = part, first, last

    def split(self, x: torch.Tensor, layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        self._diary.held(self._part, "LN", (x,))
        made = self.region.split(x, layers)
        self._diary.between(self._part, "f", "forward")
        self._diary.held(self._part, self._first, made)
        return made

    def join(self, x: torch.Tensor) -> torch.Tensor:
        self._diary.held(self._part, self._last, (x,))
        made = self.region.join(x)
        self._diary.between(self._part, "g", "forward")
        return made


@contextmanager
def _regions(block: Any, diary: _Diary) -> Iterator[None]:
    """Inside, the regions of a layer are watched."""
    attention, mlp = ("attention", "QKV", "proj"), ("mlp", "W₁", "W₂")
    places = {block.attention: attention, block.attention.output: attention, block.mlp: mlp, block.mlp.down: mlp}
    own = {module: module.region for module in places}
    for module, names in places.items():
        module.region = _Watched(own[module], diary, *names)
    try:
        yield
    finally:
        for module, region in own.items():
            module.region = region


def _is_collective(event: Open) -> bool:
    kind, name = event.fields["kind"], event.fields["name"]
    return kind == "collective" or (kind == "span" and name.split()[0] in ALGORITHMS)


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    """The same for the same bits."""
    found = blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _check(block: Any) -> None:
    if not isinstance(block, Block):
        raise TypeError(f"watch was given {type(block).__name__}: expected a layer, such as model.blocks[0]")
    attention, mlp = block.attention, cast(Any, block.mlp)
    if not isinstance(attention, SharedAttention) or not isinstance(mlp, SharedMLP):
        raise TypeError("watch was given a layer that no ranks share: call tensor_parallel.parallelize(model) first")
    if not recorder.on:
        raise RuntimeError("nobody records this process's collectives: call watch in a function that labkit.run runs")
