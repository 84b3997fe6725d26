"""What travels between the stages of a pipeline, on real ranks: activations forward, their gradients backward.

The first time that a kind of micro-batch crosses a border, a header goes before it and says what comes: how many
tensors, of which shapes and types, and which of them want a gradient. Both sides keep that. A gradient looks like the
activation that it belongs to, and needs no header.

A message has no name on the way (NCCL knows no tags). What tells messages apart is their order: between two ranks they
are received in the order in which they were sent, which `labkit.pipeline.messages` knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.pipeline.layout import HEADER, Layout, header_of, layout_of, read
from labkit.pipeline.messages import Receive, Send
from labkit.pipeline.outbox import Outbox
from labkit.pipeline.schedule import Message

Tensors = tuple[torch.Tensor, ...]
Item = Send | Receive


class Border(NamedTuple):
    """By what a layout is known: the stage before the border, the micro-batch's shape, whether there is a graph."""

    before: int
    inputs: torch.Size
    targets: torch.Size
    graph: bool

    @property
    def rows(self) -> int:
        return self.inputs[0]


class Wires:
    """The messages of one rank in one step, over a backend whose receives hold up nobody (gloo).

    Args:
        group: The pipeline's ranks; ``None`` is the world.
        device: Where tensors are.
        layouts: What is known of each border, kept from step to step.
        coming: What this step will bring, in each sender's order, and by what the layout of its border is known.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, layouts: dict[Border, Layout],
        coming: Iterable[tuple[Message, Border]],
    ) -> None:  # fmt: skip
        self.group, self.device, self.layouts = group, device, layouts
        self._borders = dict(coming)
        self._coming: dict[int, deque[Message]] = {}  # not asked for yet, by sender
        for message in self._borders:
            self._coming.setdefault(message.source, deque()).append(message)
        self._headers: dict[int, _Arriving] = {}  # under way, by sender
        self._arriving: dict[Message, _Arriving] = {}
        self._outbox = Outbox()

    def advance(self, now: Sequence[Item], soon: Iterable[Message]) -> None:
        """Between two actions: ask for what the next ones need, so that it can come beside the work."""
        for message in soon:
            self._ask(message)

    def _ask(self, message: Message) -> None:
        """Let a message come, and those before it from the same rank, as far as it is known what they look like."""
        queue = self._coming.get(message.source, deque())
        while message not in self._arriving and message.source not in self._headers and queue:
            first = queue[0]
            if (layout := self.layouts.get(self._borders[first])) is None:
                if first.kind == "B":
                    return  # its activation has not left yet
                header = torch.zeros(HEADER, dtype=torch.int64, device=self.device)
                self._headers[message.source] = self._receive([header], message.source)
            else:
                self._arriving[queue.popleft()] = self._receive(rooms(first, layout, self.device), message.source)

    def _receive(self, tensors: list[torch.Tensor], source: int) -> _Arriving:
        rank = global_rank(self.group, source)
        return _Arriving(tensors, [dist.irecv(t, rank, self.group) for t in tensors])

    def take(self, message: Message) -> Tensors:
        """A message's tensors; activations that want a gradient ask for one."""
        self._ask(message)
        while message not in self._arriving:
            (header,) = self._headers.pop(message.source).wait()
            border = self._borders[self._coming[message.source][0]]
            self.layouts[border] = read(header, border.rows)
            self._ask(message)
        tensors = self._arriving.pop(message).wait()
        return ready(message, tensors, self.layouts[self._borders[message]])

    def send(self, message: Message, tensors: Tensors, border: Border) -> None:
        """Send activations or gradients; they are kept until they have left."""
        to = global_rank(self.group, message.target)
        for part in (*self._new(message, tensors, border), *(t.contiguous() for t in tensors)):
            self._outbox.add(dist.isend(part, to, self.group), part)

    def _new(self, message: Message, tensors: Tensors, border: Border) -> list[torch.Tensor]:
        """The header of activations that cross this border for the first time.

        Raises:
            ValueError: They look otherwise than was agreed.
        """
        if message.kind == "B":
            return []
        layout = layout_of(tensors)
        known = self.layouts.setdefault(border, layout)
        if known is layout:
            return [header_of(layout, border.rows, self.device)]
        if known != layout:
            raise ValueError(
                f"stage {message.stage} made {', '.join(map(str, layout))} of micro-batch {message.micro_batch}, but "
                f"agreed on {', '.join(map(str, known))} with the next stage: expected the same from micro-batches of "
                "one shape"
            )
        return []

    def end(self) -> None:
        """Until all that was sent has left."""
        self._outbox.close()

    def abandon(self) -> None:
        """The step was cut short: wait for nothing more."""
        self._outbox.abandon()


class BatchedWires(Wires):
    """The same over NCCL, where a send and a receive wait for each other, in the order in which a rank asked for them.

    So all that a rank sends and receives between two actions is one `batch_isend_irecv`, and the order of batches is
    that of `labkit.pipeline.messages`, in which no rank waits for one that waits for it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._leaving: dict[Message, tuple[Tensors, Border]] = {}
        self._works: list[Any] = []

    def send(self, message: Message, tensors: Tensors, border: Border) -> None:
        self._leaving[message] = tensors, border

    def advance(self, now: Sequence[Item], soon: Iterable[Message]) -> None:
        """Between two actions: one batch; before what crosses a border for the first time its header."""
        for work in self._works:  # what was sent before the last action: by now its tensors may go
            work.wait()
        self._works = []
        batch: list[Item] = []
        for item in now:
            if header := self._header(item):
                self._exchange(batch)
                self._exchange_header(item, header)
                batch = []
            batch.append(item)
        self._exchange(batch)

    def _header(self, item: Item) -> list[torch.Tensor]:
        """To be sent or filled; none where the border is known."""
        if isinstance(item, Send):
            return self._new(item.message, *self._leaving[item.message])
        if item.message.kind == "B" or self._borders[item.message] in self.layouts:
            return []
        return [torch.zeros(HEADER, dtype=torch.int64, device=self.device)]

    def _exchange_header(self, item: Item, header: list[torch.Tensor]) -> None:
        for work in self._batch([(item, header)]):
            work.wait()
        if isinstance(item, Receive):
            border = self._borders[item.message]
            self.layouts[border] = read(header[0], border.rows)

    def _exchange(self, batch: list[Item]) -> None:
        filled: list[tuple[Item, list[torch.Tensor]]] = []
        for item in batch:
            message = item.message
            if isinstance(item, Send):
                made, _ = self._leaving.pop(message)
                filled.append((item, [t.contiguous() for t in made]))
            else:
                filled.append((item, rooms(message, self.layouts[self._borders[message]], self.device)))
        works = self._batch(filled)
        self._works += works
        for item, tensors in filled:
            if isinstance(item, Receive):
                self._arriving[item.message] = _Arriving(tensors, works)

    def _batch(self, items: list[tuple[Item, list[torch.Tensor]]]) -> list[Any]:
        operations = []
        for item, tensors in items:
            call, peer = (
                (dist.isend, item.message.target) if isinstance(item, Send) else (dist.irecv, item.message.source)
            )
            to = global_rank(self.group, peer)
            operations += [dist.P2POp(call, t, to, self.group) for t in tensors]
        return dist.batch_isend_irecv(operations) if operations else []

    def take(self, message: Message) -> Tensors:
        tensors = self._arriving.pop(message).wait()
        return ready(message, tensors, self.layouts[self._borders[message]])

    def end(self) -> None:
        for work in self._works:
            work.wait()


class _Arriving:
    """Tensors on their way."""

    def __init__(self, tensors: list[torch.Tensor], works: list[Any]) -> None:
        self._tensors, self._works = tensors, works

    def wait(self) -> Tensors:
        for work in self._works:
            work.wait()
        return tuple(self._tensors)


def rooms(message: Message, layout: Layout, device: torch.device) -> list[torch.Tensor]:
    """Where a message can be received; of gradients only those that were asked for come."""
    return [spec.room(device) for spec in layout if message.kind == "F" or spec.wants_gradient]


def ready(message: Message, tensors: Tensors, layout: Layout) -> Tensors:
    if message.kind == "F":
        for tensor, spec in zip(tensors, layout, strict=True):
            tensor.requires_grad_(spec.wants_gradient)
    return tensors


def global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
