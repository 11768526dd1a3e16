"""Who sends which part of which tensor to whom, in which order: the schedule of a movement between two layouts.

Owns: the choice of senders, buckets, messages. Refuses to know: tensors' values, processes. Always holds: every rank makes the
same schedule of the same layouts; each value that a target needs comes to it once, from itself where it is there; what one rank
sends or receives in a bucket is no more than the bucket's bytes, unless a single row is; copies of a part take turns in sending
it.

A bucket takes a piece of every shard of a tensor at once, so that all ranks that hold it send at the same time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshloom.config.errors import RunFault
from meshloom.weights.layouts import Box

ALIGNMENT = 16
"""Bytes that a message's place in a buffer is a multiple of."""


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """One tensor on both sides.

    Args:
        name: of the tensor.
        shape: of all of it.
        itemsize: bytes of a value on its way.
        sources: what each rank has of it that gives it.
        targets: what each rank needs of it, in one part or several.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    sources: Mapping[int, Box]
    targets: Mapping[int, tuple[Box, ...]]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor on its way.

    Args:
        tensor: which, by its place among all.
        box: the part.
        itemsize: bytes of a value.
        num_bytes: of all its values.
    """

    tensor: int
    box: Box
    itemsize: int
    num_bytes: int


@dataclass(frozen=True)
class Message:
    """What one rank sends to others, the same to each.

    Args:
        source: who sends.
        targets: who receive, ascending.
        pieces: widest values first, so that each lies at a multiple of its width.
    """

    source: int
    targets: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True)
class Bucket:
    """What is on its way at once.

    Args:
        messages: ascending by source and targets.
        local: what each rank copies of its own.
    """

    messages: tuple[Message, ...]
    local: Mapping[int, tuple[Piece, ...]]

    def sent(self, rank: int) -> list[Message]:
        return [message for message in self.messages if message.source == rank]

    def received(self, rank: int) -> list[Message]:
        return [message for message in self.messages if rank in message.targets]


@dataclass(frozen=True)
class Schedule:
    """A whole movement.

    Args:
        tensors: all of them, in the order of the sources.
        buckets: in their order.
    """

    tensors: tuple[TensorLayout, ...]
    buckets: tuple[Bucket, ...]

    def buffer_bytes(self, rank: int) -> tuple[int, int]:
        """Most bytes that a rank sends, and that it receives, in one bucket."""
        sent = max((packed_bytes(bucket.sent(rank)) for bucket in self.buckets), default=0)
        received = max((packed_bytes(bucket.received(rank)) for bucket in self.buckets), default=0)
        return sent, received

    def moved_bytes(self, rank: int) -> tuple[int, int, int]:
        """Bytes that a rank sends (once for each target), receives, and copies of its own."""
        messages = [message for bucket in self.buckets for message in bucket.messages]
        sent = sum(m.num_bytes * len(m.targets) for m in messages if m.source == rank)
        received = sum(m.num_bytes for m in messages if rank in m.targets)
        local = sum(piece.num_bytes for bucket in self.buckets for piece in bucket.local.get(rank, ()))
        return sent, received, local


def packed_bytes(messages: Sequence[Message]) -> int:
    """Bytes of messages one after the other, each aligned."""
    return sum(-(-message.num_bytes // ALIGNMENT) * ALIGNMENT for message in messages)


@dataclass
class _Load:
    """Bytes of every rank.

    Args:
        sent: what it packs, once for all who get the same.
        received: what comes to it.
        local: what it copies of its own, which is not on its way with the rest.
    """

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    local: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, routed: Sequence["Routed"], itemsize: int) -> "_Load":
        found = cls()
        packed: set[tuple[int, Box]] = set()
        for source, target, box in routed:
            size = box.numel * itemsize
            if source == target:
                found.local[target] = found.local.get(target, 0) + size
                continue
            found.received[target] = found.received.get(target, 0) + size
            if (source, box) not in packed:
                packed.add((source, box))
                found.sent[source] = found.sent.get(source, 0) + size
        return found

    @property
    def on_its_way(self) -> int:
        """Most bytes that a rank sends or receives."""
        return max((*self.sent.values(), *self.received.values()), default=0)

    @property
    def largest(self) -> int:
        return max((self.on_its_way, *self.local.values()), default=0)

    def joined(self, other: "_Load") -> "_Load":
        return _Load(_added(self.sent, other.sent), _added(self.received, other.received))


def _added(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    found = dict(one)
    for rank, count in other.items():
        found[rank] = found.get(rank, 0) + count
    return found


@dataclass
class _Open:
    """A bucket that is being filled.

    Args:
        sent: who gets each piece, by who sends it.
        local: pieces by rank.
        load: of what is sent.
    """

    sent: dict[tuple[int, Piece], list[int]] = field(default_factory=dict)
    local: dict[int, list[Piece]] = field(default_factory=dict)
    load: _Load = field(default_factory=_Load)

    @property
    def is_empty(self) -> bool:
        return not self.sent and not self.local

    def add(self, tensor: int, itemsize: int, part: "_TensorPart") -> None:
        for (source, box), targets in part.targets.items():
            self.sent[source, Piece(tensor, box, itemsize, box.numel * itemsize)] = targets
        for rank, box in part.own:
            self.local.setdefault(rank, []).append(Piece(tensor, box, itemsize, box.numel * itemsize))
        self.load = self.load.joined(part.load)

    def close(self) -> Bucket:
        groups: dict[tuple[int, tuple[int, ...]], list[Piece]] = {}
        for (source, piece), targets in self.sent.items():
            groups.setdefault((source, tuple(sorted(targets))), []).append(piece)
        messages = [
            Message(source, targets, tuple(sorted(pieces, key=lambda piece: -piece.itemsize)))
            for (source, targets), pieces in sorted(groups.items())
        ]
        return Bucket(tuple(messages), {rank: tuple(pieces) for rank, pieces in self.local.items()})


def make_schedule(
    tensors: Sequence[TensorLayout],
    *,
    bucket_bytes: int,
    node_of: Callable[[int], Any] = lambda rank: 0,
    together: bool = True,
) -> Schedule:
    """The schedule of a movement.

    Args:
        tensors: on both sides.
        bucket_bytes: bound on what one rank receives in a bucket, and on what it packs to send.
        node_of: the machine of a rank; a sender on the target's own is preferred.
        together: ranks that need the same get it from one sender, so that it can be sent to all of them at once; false: each
            from another, as far as there are copies.

    Raises:
        RunFault: if no rank has what another one needs; it names the tensor and the part.
    """
    buckets: list[Bucket] = []
    now = _Open()
    alike: dict[Any, list[_TensorPart]] = {}
    for number, tensor in enumerate(tensors):
        turn = number % max(Counter(tensor.sources.values()).values(), default=1)
        sides = tuple(sorted(tensor.sources.items())), tuple(sorted(tensor.targets.items()))
        key = tensor.shape, tensor.itemsize, *sides, turn
        if key not in alike:  # a model's layers are cut alike
            alike[key] = _in_parts(tensor, _shares(tensor, turn, node_of, together), bucket_bytes)
        for part in alike[key]:
            if now.load.joined(part.load).on_its_way > bucket_bytes and not now.is_empty:
                buckets.append(now.close())
                now = _Open()
            now.add(number, tensor.itemsize, part)
    if not now.is_empty:
        buckets.append(now.close())
    return Schedule(tuple(tensors), tuple(buckets))


Share = tuple[int, Box, int, Box]
"""Who gives, the box that it holds, who gets, and what of the box."""
Routed = tuple[int, int, Box]
"""Who gives, who gets, and what."""


@dataclass(frozen=True)
class _TensorPart:
    """What of a tensor goes into one bucket.

    Args:
        targets: who gets each box, by who gives it.
        own: boxes that a rank has itself.
        load: of it.
    """

    targets: dict[tuple[int, Box], list[int]]
    own: list[tuple[int, Box]]
    load: _Load

    @classmethod
    def of(cls, routed: Sequence[Routed], itemsize: int) -> "_TensorPart":
        targets: dict[tuple[int, Box], list[int]] = {}
        for source, target, box in routed:
            if source != target:
                targets.setdefault((source, box), []).append(target)
        own = [(source, box) for source, target, box in routed if source == target]
        return cls(targets, own, _Load.of(routed, itemsize))


def _in_parts(tensor: TensorLayout, shares: Sequence[Share], bucket_bytes: int) -> list[_TensorPart]:
    """A tensor in as few parts as it takes for each to fit a bucket, or in rows."""
    boxes = _distinct(tensor.sources.values())
    most = max((box.shape[0] for box in boxes if box.starts), default=1)
    whole = _Load.of([(source, target, box) for source, _, target, box in shares], tensor.itemsize)
    count = max(1, min(most, -(-whole.largest // bucket_bytes)))
    while True:
        routed: list[list[Routed]] = [[] for _ in range(count)]
        chunks = {box: box.chunks(count) for box in boxes}
        for source, held, target, box in shares:
            for part, chunk in zip(routed, chunks[held], strict=False):
                if (common := box.meet(chunk)) is not None:
                    part.append((source, target, common))
        parts = [_TensorPart.of(part, tensor.itemsize) for part in routed if part]
        if count == most or all(part.load.largest <= bucket_bytes for part in parts):
            return parts
        count = min(most, count + max(1, count // 8))


def _distinct(boxes: Iterable[Box]) -> list[Box]:
    return [box for box in dict.fromkeys(boxes) if box.numel]


def _shares(tensor: TensorLayout, turn: int, node_of: Callable[[int], Any], together: bool) -> list[Share]:
    holders: dict[Box, list[int]] = {}
    for rank, box in sorted(tensor.sources.items()):
        if box.numel:
            holders.setdefault(box, []).append(rank)
    shares: list[Share] = []
    for order, (target, needed) in enumerate(sorted(tensor.targets.items())):
        missing = _apart(needed)
        own = tensor.sources.get(target)
        if own is not None:
            shares += [(target, own, target, part) for box in missing if (part := box.meet(own)) is not None]
            missing = [rest for box in missing for rest in box.minus(own)]
        for held, ranks in holders.items():
            found = [part for box in missing if (part := box.meet(held)) is not None]
            if found:
                near = [rank for rank in ranks if node_of(rank) == node_of(target)] or ranks
                source = near[(turn if together else turn + order) % len(near)]
                shares += [(source, held, target, part) for part in found]
                missing = [rest for box in missing for rest in box.minus(held)]
        if missing:
            raise RunFault(
                f"no rank has {missing[0]} of {tensor.name}",
                where="weights",
                why=f"rank {target} needs it; the tensor is {list(tensor.shape)}",
            )
    return shares


def _apart(boxes: Sequence[Box]) -> list[Box]:
    """The same values in disjoint boxes."""
    found: list[Box] = []
    for box in boxes:
        rest = [box] if box.numel else []
        for other in found:
            rest = [part for each in rest for part in each.minus(other)]
        found += rest
    return found
