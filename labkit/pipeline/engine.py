"""A schedule, carried out by real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit import collectives, device
from labkit.collectives import check
from labkit.pipeline.gradients import Kept, add_up_over, add_up_tied, tied_parameters
from labkit.pipeline.messages import Compute, Receive, messages
from labkit.pipeline.schedule import STEP, Action, Message, Schedule
from labkit.pipeline.stage import PipelineStage, Tensors
from labkit.pipeline.wires import BatchedWires, Border, Item, Wires
from labkit.trace import label, span

#: Actions whose messages are asked for before they are needed: while one is computed, they come.
AHEAD = 2


class PipelineEngine:
    """Runs a schedule: each rank its actions in order, and between them the messages that follow from it.

    The gradients are those of Σ sum / Σ count over the whole batch, whatever the number and sizes of micro-batches:
    each backward starts from a *sum*, and the total is divided once, at the end. They are added to what is in ``grad``,
    as backward does.

    Args:
        stages: Number of each stage that this rank hosts → its module, or a `PipelineStage`.
        schedule: Checked here.
        loss_fn: (output of the last stage, targets) of a micro-batch → (sum, count), as `labkit.model.loss`.
        group: The pipeline's ranks, rank r of the schedule being rank r of the group; ``None`` is the world.
        data_parallel_group: Ranks that host the same stages, with other batches; their gradients are added up, in one
            all-reduce a stage and step, begun in the stage's last backward.

    Parameters in several places that are one (``mark(param, tied=name)``) take the values of the first place, and get
    the sum of the gradients of all.

    Raises:
        IllegalSchedule: The schedule cannot run.
        TypeError, ValueError: An argument cannot be used.

    Example:
        >>> def train(tokens, targets):                                  # doctest: +SKIP
        ...     rank = dist.get_rank()
        ...     engine = PipelineEngine({rank: parts[rank]}, one_f_one_b(4, 8), loss)
        ...     return engine.step(tokens, targets)

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    section 2.2.
    """

    def __init__(
        self, stages: Mapping[int, torch.nn.Module | PipelineStage], schedule: Schedule,
        loss_fn: Callable[[Any, Any], tuple[torch.Tensor, Any]], group: dist.ProcessGroup | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        check.member(group)
        schedule.check()
        self.schedule, self.loss_fn = schedule, loss_fn
        self.group, self.data_parallel_group = group, data_parallel_group
        self.rank = dist.get_rank(group)
        self._check(stages)
        self.stages = {n: s if isinstance(s, PipelineStage) else PipelineStage(s) for n, s in sorted(stages.items())}
        self._program = messages(schedule)[self.rank]
        self._layouts: dict[Border, Any] = {}
        self._cut_short = False
        self._tied = tied_parameters(self.parameters(), group)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of all stages here, each once."""
        seen = {id(p): p for stage in self.stages.values() for p in stage.module.parameters()}
        return iter(seen.values())

    @torch.enable_grad()
    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward of one batch.

        Args:
            inputs, targets: The whole batch, (b, …), on every rank; the values are used where the first and the last
                stage are, elsewhere tensors on ``"meta"`` do. They are cut into micro-batches as `torch.tensor_split`
                does.

        Returns:
            The mean loss, a scalar in float64, the same on all ranks.

        Raises:
            TypeError, ValueError: Fewer sequences than micro-batches, or of different numbers, also on different ranks;
                inputs that ask for a gradient; a `loss_fn` that returns something else than two numbers; a stage whose
                output has another shape than before.
            RuntimeError: An earlier step was cut short, so that its messages may still come.
        """
        kept = Kept(list(self.parameters()))
        try:
            totals, reducing = self._run(inputs, targets, self._program)
        except BaseException:
            self._forget(kept)
            self._cut_short = self.schedule.ranks > 1
            raise
        for work in reducing:
            work.wait()
        add_up_tied(self._tied, self.group)
        total, count = self._agree(totals)
        kept.add_back(divided_by=count.item())
        return total / count

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward only: the mean loss, the same on all ranks."""
        forward = [item for item in self._program if _of(item) == "F"]
        totals, _ = self._run(inputs, targets, forward)
        total, count = self._agree(totals)
        return total / count

    def _run(self, inputs: Any, targets: Any, program: list[Any]) -> tuple[torch.Tensor, list[Any]]:
        """The actions and messages of a program: the sums of losses and of counts, and the all-reduces under way."""
        if self._cut_short:
            raise RuntimeError("an earlier step was cut short, and its messages may still come: make a new engine, in "
                               "ranks that begin anew")  # fmt: skip
        flow = _Flow(self, self._split(inputs, targets), program)
        actions = [item.action for item in program if isinstance(item, Compute)]
        last = {action.stage: place for place, action in enumerate(actions)}
        reducing: list[Any] = []
        for place, action in enumerate(actions):
            flow.carry_out(place, action)
            if last[action.stage] == place and torch.is_grad_enabled() and self.data_parallel_group is not None:
                reducing += add_up_over(self.data_parallel_group, self.stages[action.stage].module)
        flow.end()
        return flow.totals, reducing

    def _agree(self, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(Σ sum, Σ count), which the last stage's ranks know, on all ranks."""
        home = self.schedule.rank_of(self.schedule.stages - 1)
        if self.rank == home and self.data_parallel_group is not None:
            collectives.all_reduce(totals, group=self.data_parallel_group)
        root = home if self.group is None else dist.get_global_rank(self.group, home)
        collectives.broadcast(totals, src=root, group=self.group)
        return totals[0], torch.where(totals[1] == 0, 1.0, totals[1])

    def _split(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        m = self.schedule.micro_batches
        for name, value in (("inputs", inputs), ("targets", targets)):
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                raise TypeError(f"{name} is {type(value).__name__}: expected a tensor, (b, …)")
        if inputs.requires_grad:
            raise ValueError(
                "inputs ask for a gradient, and the engine makes those of parameters: pass inputs.detach()"
            )
        if not len(inputs) == len(targets) >= m:
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets in {m} micro-batches: expected as many "
                             f"of both, at least {m}")  # fmt: skip
        return list(zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True))

    def _forget(self, kept: Kept) -> None:
        for stage in self.stages.values():
            stage.forget()
        kept.put_back()

    def _check(self, stages: Mapping[int, Any]) -> None:
        schedule, size = self.schedule, dist.get_world_size(self.group)
        if size != schedule.ranks:
            raise ValueError(f"the schedule is for {schedule.ranks} ranks, and the group has {size}: expected as many")
        mine = [s for s in range(schedule.stages) if self.rank in _hosts(schedule, s)]
        if any(len(_hosts(schedule, s)) > 1 for s in mine):
            raise ValueError(f"{schedule.name} puts a stage on several ranks: the engine runs schedules in which each "
                             "stage has one")  # fmt: skip
        if not isinstance(stages, Mapping) or sorted(stages) != mine:
            given = sorted(stages) if isinstance(stages, Mapping) else type(stages).__name__
            raise ValueError(f"stages is {given} on rank {self.rank}: expected a dictionary with stages {mine}, which "
                             f"{schedule.name} puts here")  # fmt: skip
        if len({id(stage) for stage in stages.values() if isinstance(stage, PipelineStage)}) < sum(
            isinstance(stage, PipelineStage) for stage in stages.values()
        ):
            raise ValueError("one PipelineStage stands for several stages: expected one each; they may share a module")
        for number, stage in stages.items():
            module = stage.module if isinstance(stage, PipelineStage) else stage
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"stage {number} is {type(module).__name__}: expected a module or a PipelineStage")
            if hasattr(module, "no_sync"):
                raise ValueError(f"stage {number} reduces its gradients in every backward: give the module itself, and "
                                 "data_parallel_group")  # fmt: skip


class _Flow:
    """What flows through one rank in one step: inputs and losses, activations and gradients."""

    def __init__(self, engine: PipelineEngine, batches: list[tuple[torch.Tensor, torch.Tensor]], program: list[Any]):
        self._engine, self._batches = engine, batches
        self._schedule, self._last = engine.schedule, engine.schedule.stages - 1
        self._actions, self._before = _between_actions(program)
        here = device.current()
        self.totals = torch.zeros(2, dtype=torch.float64, device=here)
        self._local: dict[Action, Tensors] = {}  # between stages that are both here
        coming = [item.message for item in program if isinstance(item, Receive)]
        kind = BatchedWires if here.type == "cuda" and "nccl" in dist.get_backend(engine.group) else Wires
        self._wires = kind(engine.group, here, engine._layouts, [(m, self._border(m)) for m in coming])

    def carry_out(self, place: int, action: Action) -> None:
        """An action and the messages around it. Nothing of it is held here afterwards."""
        try:
            self.advance(place)
            given = self.given(action)
            with label(stage=action.stage, micro_batch=action.micro_batch), span(action.kind):
                made = self.compute(action, given)
            self.hand_on(action, made)
        except BaseException:
            self._wires.abandon()
            raise

    def advance(self, place: int) -> None:
        soon = (self._message_for(action) for action in self._actions[place : place + 1 + AHEAD])
        self._wires.advance(self._before[place], [m for m in soon if m is not None])

    def given(self, action: Action) -> Any:
        """What an action needs from elsewhere: inputs, or its outputs' gradients."""
        message = self._message_for(action)
        if message is not None:
            return self._wires.take(message)
        if action.kind == "F" and action.stage == 0:
            return (self._batches[action.micro_batch][0],)
        return self._local.pop(action, None)

    def compute(self, action: Action, given: Any) -> Tensors:
        stage, number = self._engine.stages[action.stage], action.micro_batch
        if action.kind == "F":
            finish = self._loss(number) if action.stage == self._last else None
            return stage.forward(number, given, finish, split=(number, action.stage) in self._schedule.taken_apart)
        if action.kind == "B":
            return stage.backward(number, given)
        stage.weight(number)
        return ()

    def _loss(self, micro_batch: int) -> Callable[[Any], torch.Tensor]:
        def loss(output: Any) -> torch.Tensor:
            total, count = _two_numbers(self._engine.loss_fn(output, self._batches[micro_batch][1]))
            self.totals += torch.stack([x.detach().to(self.totals) for x in (total, count)])
            return total

        return loss

    def hand_on(self, action: Action, made: Tensors) -> None:
        """To the next stage, or the gradients to the one before."""
        kind, number, stage = action
        if kind == "F" and stage == self._last:
            self._local[Action("B", number, stage)] = tuple(torch.ones_like(y) for y in made if y.requires_grad)
        elif message := self._schedule.message(action):
            self._wires.send(message, made, self._border(message))
        else:
            self._local[Action(kind, number, stage + STEP[kind])] = made

    def end(self) -> None:
        self._wires.advance(self._before[-1], [])
        self._wires.end()

    def _message_for(self, action: Action) -> Message | None:
        """The message that an action waits for, if what it needs is made on another rank."""
        maker = action._replace(stage=action.stage - STEP[action.kind])
        return self._schedule.message(maker) if 0 <= maker.stage <= self._last else None

    def _border(self, message: Message) -> Border:
        before = message.stage if message.kind == "F" else message.stage - 1
        inputs, targets = self._batches[message.micro_batch]
        return Border(before, inputs.shape, targets.shape, torch.is_grad_enabled())


def _two_numbers(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What `loss_fn` returned, each of shape ()."""
    found = (
        [x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64) for x in made]
        if isinstance(made, tuple) and len(made) == 2
        else []
    )
    if not isinstance(made, tuple) or [x.numel() for x in found] != [1, 1] or not isinstance(made[0], torch.Tensor):
        said = type(made).__name__ if not found else f"({', '.join(str(tuple(x.shape)) for x in found)})"
        raise TypeError(f"loss_fn returned {said}: expected (sum, count), the sum of losses as a tensor of one number, "
                        "and how many they are")  # fmt: skip
    return found[0].reshape(()), found[1].reshape(())


def _between_actions(program: list[Any]) -> tuple[list[Action], list[list[Item]]]:
    """The actions, and the messages before each of them and after the last."""
    actions: list[Action] = []
    before: list[list[Item]] = [[]]
    for item in program:
        if isinstance(item, Compute):
            actions.append(item.action)
            before.append([])
        else:
            before[-1].append(item)
    return actions, before


def _of(item: Any) -> str:
    return item.action.kind if isinstance(item, Compute) else item.message.kind


def _hosts(schedule: Schedule, stage: int) -> set[int]:
    return {schedule.rank_of(stage, m) for m in range(schedule.micro_batches)}
