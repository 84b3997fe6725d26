"""All the parts in one training step: in which order they go together, and why.

Building goes from the layers outwards, since each part works on what those before it have made:

    1  one model from one seed   on every rank, so that the parts that the ranks keep fit together
    2  tensor parallelism        puts other layers, with other parameters, in place of the model's
    3  pipeline                  keeps some of those layers; the tied embedding is then two parameters, marked as one
    4  recomputation             is told of the layers that have come to stay
    5  data parallelism, 16 bits buckets, shards and masters are made of the final parameters
    6  the pipeline's engine     runs the stage bare: what averages in a backward would do so in each micro-batch

A step goes from local sums to a decision of all ranks:

    1  backward, k times         of losses weighted by the tokens of all replicas, so that gradients add up to the mean
    2  sum over tied stages      what is one parameter has one gradient
    3  mean over dp              once a step; ZeRO's stages 2 and 3 once a micro-batch, to hold less
    4  sum over tp               with sequence parallelism, of what each rank has for its own tokens only
    5  unscale                   fp16: a limit is one of true gradients; and all ranks skip this step, or none does
    6  clip                      by one norm, over ZeRO's shards, tp and pp
    7  update                    of shards or masters, and from them of the parameters that compute

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.3; for ZeRO in
a pipeline, Rajbhandari et al. 2020, "ZeRO", section 10.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives, device, pipeline, tensor_parallel
from labkit.collectives import check
from labkit.data_parallel import DistributedDataParallel
from labkit.model import Config, Transformer
from labkit.sequence_parallel import parallelize as parallelize_tokens
from labkit.sequence_parallel import reduce_partial_gradients
from labkit.train.mesh import Mesh
from labkit.tricks import GradScaler, MixedPrecision, accumulate, checkpointed, clip_grad_norm_
from labkit.zero import FullyShardedDataParallel, ShardedOptimizer
from labkit.zero.given import check_element_wise

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Batch = tuple[torch.Tensor, torch.Tensor]


class Trainer:
    """A transformer on a mesh, and its training step. Axes of size 1 are no special case.

    Args:
        mesh: tp · dp · pp ranks.
        config: The model.
        optimizer_class: Of torch; element-wise where ranks hold pieces of parameters.
        dtype: In which is computed, float64 to 16 bits, which have fp32 masters. Gradients of micro-batches are added
            up in it; in fp32 at stage 3, and at stage 0 without a pipeline.
        zero: Stage of ZeRO over dp; 0 is plain data parallelism.
        micro_batches: k, the number in a step. A pipeline runs them in the order 1F1B.
        checkpointing, segments: What is recomputed, as in `labkit.tricks.checkpointed`.
        sequence_parallel: Split along the tokens what tp leaves whole.
        clip: Limit of the gradient's norm; ``math.inf`` is none.
        scaler: Of the loss; by default fp16 has one.
        seed: Of parameters and dropout.
        **defaults: The optimizer's own: ``lr=1e-3``.

    Attributes:
        module: This rank's part of the model.

    Raises:
        TypeError, ValueError: An argument cannot be used, or two of them together.

    Example:
        >>> def train(batches):                                              # doctest: +SKIP
        ...     mesh = Mesh(tp=2, dp=2)
        ...     trainer = Trainer(mesh, preset("tiny_gpt"), zero=1, micro_batches=2, checkpointing="full", lr=1e-3)
        ...     replica = mesh.place(dist.get_rank())["dp"]
        ...     return [trainer.step(*(part.tensor_split(2)[replica] for part in batch)) for batch in batches]
        >>> labkit.run(train, batches, ranks=4).values[0]                    # doctest: +SKIP

    Source: as this file's.
    """

    def __init__(
        self, mesh: Mesh, config: Config, optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
        dtype: torch.dtype = torch.float32, zero: int = 0, micro_batches: int = 1, checkpointing: str = "none",
        segments: int | None = None, sequence_parallel: bool = False, clip: float = 1.0,
        scaler: GradScaler | None = None, seed: int = 0, **defaults: Any,
    ) -> None:  # fmt: skip
        layers = _check(mesh, config, dtype, zero, micro_batches, segments, clip)
        if zero or mesh.sizes["tp"] > 1:
            check_element_wise(optimizer_class, defaults, [{}], device.current())
        self.tp, self.dp, self.pp = (mesh.group(axis) for axis in ("tp", "dp", "pp"))
        self.vocab, self.dtype, self.zero = config.vocab, dtype, zero
        self.micro_batches, self.clip = micro_batches, clip
        self.scaler = scaler if scaler is not None else GradScaler(enabled=dtype == torch.float16)
        stage = dist.get_rank(self.pp)

        torch.manual_seed(seed)
        model = Transformer(config, device.current(), torch.promote_types(dtype, torch.float32))
        model = (parallelize_tokens if sequence_parallel else tensor_parallel.parallelize)(model, self.tp)
        self.module = pipeline.cut(model, layers)[stage] if len(layers) > 1 else model
        checkpointed(self.module, checkpointing, segments)
        self.model, self.optimizer = self._replicated(self.module, optimizer_class, defaults)
        self.engine = self._engine(stage) if len(layers) > 1 else None
        tensor_parallel.seed(seed + 1 + stage, self.tp, self.dp)  # dropout: alike over tp, apart over dp and pp

    def _replicated(self, module: torch.nn.Module, optimizer_class: Any, defaults: dict[str, Any]) -> tuple[Any, Any]:
        """What is called in forward, and what updates; one of the two averages over dp, or the engine."""
        narrow = self.dtype.itemsize == 2
        if self.zero == 3:  # its shards are the masters
            model = FullyShardedDataParallel(module, self.dp, param_dtype=self.dtype if narrow else None)
            return model, optimizer_class(model.parameters(), **defaults)
        if self.zero:  # it makes masters of 16-bit parameters
            return module, ShardedOptimizer(module.to(self.dtype), optimizer_class, self.zero, self.dp, **defaults)
        optimizer = optimizer_class(module.parameters(), **defaults)
        if narrow:  # averages the masters' gradients, in fp32
            return module, MixedPrecision(module, optimizer, self.dtype, self.scaler, self.dp)
        in_pipeline = dist.get_world_size(self.pp) > 1
        return module if in_pipeline else DistributedDataParallel(module, self.dp), optimizer

    def _engine(self, stage: int) -> pipeline.PipelineEngine:
        """It averages over dp where nothing else does. Counts of 1/k: its mean is over replicas, as the others' are."""
        plain = self.zero == 0 and not isinstance(self.optimizer, MixedPrecision)
        return pipeline.PipelineEngine(
            {stage: self.module}, pipeline.one_f_one_b(dist.get_world_size(self.pp), self.micro_batches),
            lambda logits, targets: (self.scaler.scale(self._loss(logits, targets)), 1 / self.micro_batches),
            self.pp, self.dp if plain else None,
        )  # fmt: skip

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """One step on this replica's sequences, the same on all ranks of the replica. A collective call.

        Args:
            tokens, targets: (b, s), cut into k micro-batches as by `torch.tensor_split`; targets of -100 do not count.

        Returns:
            The mean loss over the tokens of all replicas, and the gradient's norm before clipping; alike on all ranks.

        Raises:
            ValueError: Fewer sequences than micro-batches, or not as many targets as tokens.
        """
        cut = 1 if self.engine else self.micro_batches  # the engine cuts them itself
        if tokens.shape != targets.shape or len(tokens) < self.micro_batches:
            raise ValueError(f"tokens is {tuple(tokens.shape)}, targets {tuple(targets.shape)}: expected the same, "
                             f"and a sequence for each of {self.micro_batches} micro-batches")  # fmt: skip
        batches = zip(tokens.tensor_split(cut), targets.tensor_split(cut), strict=True)
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=device.current())
        for micro in accumulate(batches, cut, self, tokens=_counted, group=self.dp):
            self._weight = micro.weight
            with micro:
                loss += self._backward(*micro.batch)
        collectives.all_reduce(loss, op="avg", group=self.dp)
        return loss.item(), self._update().item()

    def no_sync(self) -> AbstractContextManager[None]:
        """For `accumulate`: DDP averages in the last backward only; the others in `_update`, or each time."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """A micro-batch's part of the mean, times the number of replicas, over which the mean is taken next."""
        return tensor_parallel.loss(logits, targets, self.vocab, self.tp)[0] * self._weight

    def _backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.engine:  # gradients must stay until it has summed those of ties, so stage 2 may not take them before
            with self.optimizer.no_sync() if self.zero else nullcontext():
                loss = self.engine.step(tokens, targets) / self.scaler.get_scale()
        else:
            loss = self._loss(self.model(tokens), targets)
            self.scaler.scale(loss).backward()
        if isinstance(self.optimizer, MixedPrecision):
            self.optimizer.collect()
        return loss.detach()

    def _update(self) -> torch.Tensor:
        """Everything after the last backward, in the order above; the norm."""
        optimizer = self.optimizer
        if isinstance(optimizer, MixedPrecision):
            reduce_partial_gradients(optimizer.masters)
            norm = optimizer.clip_grad_norm_(self.clip, pipeline_group=self.pp)  # averages and unscales first
            optimizer.step()  # with the scaler
            return norm
        if self.zero in (1, 2):
            self.scaler.unscale_(optimizer)  # it averages first, and sums what is partial
            norm = optimizer.clip_grad_norm_(self.clip, pipeline_group=self.pp)
        else:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            reduce_partial_gradients(params)
            self.scaler.unscale_(optimizer)
            norm = clip_grad_norm_(params, self.clip, pipeline_group=self.pp)
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm


def _counted(batch: Batch) -> int:
    return int((batch[1] != -100).sum())


def _check(
    mesh: Any, config: Any, dtype: torch.dtype, zero: int, micro_batches: int, segments: int | None, clip: float
) -> list[range]:
    """The layers of each stage.

    Raises:
        TypeError, ValueError: An argument cannot be used, or two of them together.
    """
    if not isinstance(mesh, Mesh) or not isinstance(config, Config):
        raise TypeError(f"mesh is {type(mesh).__name__}, config {type(config).__name__}: expected labkit.train.Mesh "
                        "and labkit.model.Config, such as preset('tiny_gpt')")  # fmt: skip
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(map(str, DTYPES))}")
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r}: expected a stage, 0, 1, 2 or 3")
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0:
        raise ValueError(f"clip={clip!r}: expected a number above 0; math.inf never clips")
    check.whole_number("micro_batches", micro_batches)
    layers = pipeline.partition([1.0] * config.layers, mesh.sizes["pp"])
    if zero == 3 and len(layers) > 1:
        raise ValueError("zero=3 with a pipeline: each micro-batch would gather the stage anew, and the two copies of "
                         "a tied embedding would be cut differently: expected 0, 1 or 2")  # fmt: skip
    fewest = min(map(len, layers))
    if segments is not None and segments > fewest:  # said by all ranks, not by one stage while others wait for it
        raise ValueError(f"segments={segments}, but a stage has {fewest} layers: expected at most as many")
    return layers
