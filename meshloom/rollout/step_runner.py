"""Many decode steps ahead without the host: the state of the running sequences on the device, and steps captured in graphs.

Owns: device buffers, graphs, the few copies between host and device. Refuses to know: requests, who runs. Always holds: a
step is the same launches for the same number of rows, so it is captured once and replayed; the host hears nothing until
all steps that were asked for are done.

Legend: N rows, B slots, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshloom.rollout.decode_stack import DecodeStack
from meshloom.rollout.paged_ops import Ops, Pool, Slots
from meshloom.rollout.slot_state import Field, Finish, Number
from meshloom.train.head import OutputHead


@dataclass(frozen=True)
class SlotSizes:
    """Sizes of the buffers.

    Args:
        slots: sequences at once.
        pages: pages of the longest sequence.
        response: tokens of the longest response.
        rules: sets of stop tokens.
        stops: tokens of the largest set.
    """

    slots: int
    pages: int
    response: int
    rules: int
    stops: int

    def holds(self, other: "SlotSizes") -> bool:
        return all(mine >= theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))

    def join(self, other: "SlotSizes") -> "SlotSizes":
        return SlotSizes(*(max(a, b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class HostSlots:
    """The state of the running sequences on the host, as it goes to the device and comes back."""

    def __init__(self, sizes: SlotSizes, pinned: bool) -> None:
        self._state = torch.zeros(len(Field), sizes.slots, dtype=torch.int64, pin_memory=pinned)
        self._numbers = torch.zeros(len(Number), sizes.slots, pin_memory=pinned)
        self._table = torch.zeros(sizes.slots, sizes.pages, dtype=torch.int32, pin_memory=pinned)
        self.state: np.ndarray = self._state.numpy()
        self.numbers: np.ndarray = self._numbers.numpy()
        self.table: np.ndarray = self._table.numpy()
        self.clear()

    def clear(self) -> None:
        self.state[:] = 0
        self.state[Field.FINISH] = Finish.EMPTY

    def move(self, source: int, target: int) -> None:
        """Put a slot's column elsewhere and leave it empty."""
        self.state[:, target], self.numbers[:, target] = self.state[:, source], self.numbers[:, source]
        self.table[target] = self.table[source]
        self.state[Field.FINISH, source] = Finish.EMPTY

    def upload(self, slots: Slots) -> None:
        slots.state.copy_(self._state, non_blocking=True)
        slots.numbers.copy_(self._numbers, non_blocking=True)
        slots.table.copy_(self._table, non_blocking=True)

    def download(self, slots: Slots) -> None:
        """Wait for the device and take what the steps changed."""
        self._state.copy_(slots.state)


class StepRunner:
    """Runs decode steps over rows of slots.

    Args:
        stack: the model's layers.
        head: the model's output head.
        ops: the operations.
        device: of the model.
        sizes: of the buffers.
    """

    def __init__(self, stack: DecodeStack, head: OutputHead, ops: Ops, device: torch.device, sizes: SlotSizes) -> None:
        self.sizes, self.stack = sizes, stack
        self._head, self._ops, self._device = head, ops, device
        self._captures = device.type == "cuda"
        self.host = HostSlots(sizes, pinned=self._captures)
        self.slots = Slots(
            state=torch.zeros(len(Field), sizes.slots, dtype=torch.int64, device=device),
            numbers=torch.zeros(len(Number), sizes.slots, device=device),
            table=torch.zeros(sizes.slots, sizes.pages, dtype=torch.int32, device=device),
            seen=torch.zeros(sizes.slots, dtype=torch.int64, device=device),
            places=torch.zeros(sizes.slots, dtype=torch.int64, device=device),
            stops=torch.full((sizes.rules, sizes.stops), -1, dtype=torch.int64, device=device),
            ids=torch.zeros(sizes.slots, sizes.response, dtype=torch.int32, device=device),
            logprobs=torch.zeros(sizes.slots, sizes.response, device=device),
        )
        self.pool = Pool([], torch.zeros(stack.num_layers, dtype=torch.int64, device=device))
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None
        self._sizes_of_rows = row_counts(sizes.slots)

    def use_pool(self, layers: list[Tensor]) -> None:
        """Take pages for the steps to come; an empty list gives them up."""
        self.pool = Pool(layers, self.pool.addresses)
        if layers:
            addresses = torch.tensor([layer.data_ptr() for layer in layers])
            self.pool.addresses.copy_(addresses, non_blocking=True)

    def set_rules(self, rules: Sequence[Sequence[int]]) -> None:
        """Tokens that end a sample, by rule."""
        table = torch.full(self.slots.stops.shape, -1, dtype=torch.int64)
        for row, stops in zip(table, rules, strict=False):
            row[: len(stops)] = torch.tensor(list(stops), dtype=torch.int64)
        self.slots.stops.copy_(table)

    def run(self, rows: int, steps: int, *, filtered: bool) -> None:
        """Run steps over the first ``rows`` slots, from the host's state to the host's state."""
        self.host.upload(self.slots)
        count = next(size for size in self._sizes_of_rows if size >= rows)
        if self._captures:
            graph = self._graphs.get((count, filtered)) or self._capture(count, filtered)
            for _ in range(steps):
                graph.replay()
        else:
            for _ in range(steps):
                self._step(count, filtered)
        self.host.download(self.slots)

    def outputs(self, rows: Sequence[int], first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities ``first`` to ``end`` − 1 of rows of the output buffers, each [rows, end − first]."""
        index = torch.tensor(rows, device=self._device)
        ids = self.slots.ids[index, first:end].cpu().numpy()
        return ids, self.slots.logprobs[index, first:end].cpu().numpy()

    def _capture(self, count: int, filtered: bool) -> torch.cuda.CUDAGraph:
        """Record a step. The state is put back: a step that is run to warm up has advanced it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(count, filtered)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._step(count, filtered)
        self._graphs[count, filtered] = graph
        self.host.upload(self.slots)
        return graph

    def _step(self, count: int, filtered: bool) -> None:
        slots, stack = self.slots, self.stack
        self._ops.prepare(slots, count, stack.shape.page)
        hidden = stack.hidden(
            slots.state[Field.TOKEN, :count],
            slots.state[Field.LENGTH, :count],
            slots.places[:count],
            self.pool,
            lambda layer, qkv: self._ops.attend(
                qkv, stack.shape, slots, self.pool, layer, stack.scale, stack.window_of[layer]
            ),
            keep_key=False,
        )
        self._ops.draw(stack.peers.whole(self._head.logits(hidden)), slots, filtered=filtered)


def row_counts(most: int) -> list[int]:
    """Numbers of rows that a step is captured for: powers of two, then in steps of at most a third."""
    counts = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    while counts[-1] < most:
        counts.append(counts[-1] + max(64, counts[-1] // 4 // 64 * 64))
    return [count for count in counts if count < most] + [most]
