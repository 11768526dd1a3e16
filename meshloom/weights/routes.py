"""Who sends which part of which tensor to whom, in which order: the schedule of a movement between two layouts.

Owns: the choice of senders, buckets, messages. Refuses to know: tensors' values, processes. Always holds: every rank makes the
same schedule of the same layouts; each value that a target needs comes to it once, from itself where it is there; what one rank
sends or receives in a bucket is no more than the bucket's bytes, unless a single row is; copies of a part take turns in sending
it.

A bucket takes a piece of every shard of a tensor at once, so that all ranks that hold it send at the same time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """

    tensor: int
    box: Box
    itemsize: int

    @cached_property
    def num_bytes(self) -> int:
        return self.box.numel * self.itemsize


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
class _Open:
    """A bucket that is being filled.

    Args:
        parts: pieces by source and target.
        local: pieces by rank.
        num_bytes: at most received by one rank.
    """

    parts: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)
    local: dict[int, list[Piece]] = field(default_factory=dict)
    num_bytes: int = 0

    def close(self) -> Bucket:
        groups: dict[tuple[int, tuple[Piece, ...]], list[int]] = {}
        for (source, target), pieces in self.parts.items():
            in_order = tuple(sorted(pieces, key=lambda piece: -piece.itemsize))
            groups.setdefault((source, in_order), []).append(target)
        messages = [Message(source, tuple(sorted(targets)), pieces) for (source, pieces), targets in groups.items()]
        messages.sort(key=lambda message: (message.source, message.targets))
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
    for number, tensor in enumerate(tensors):
        shares = _shares(number, tensor, node_of, together)
        boxes = _distinct(tensor.sources.values())
        count = _num_parts(boxes, tensor.itemsize, bucket_bytes)
        chunks = {box: box.chunks(count) for box in boxes}
        for place in range(count):
            size = sum(chunk[place].numel for chunk in chunks.values() if place < len(chunk)) * tensor.itemsize
            if now.num_bytes and now.num_bytes + size > bucket_bytes:
                buckets.append(now.close())
                now = _Open()
            now.num_bytes += size
            for source, held, target, box in shares:
                chunk = chunks[held]
                if place < len(chunk) and (part := box.meet(chunk[place])) is not None:
                    piece = Piece(number, part, tensor.itemsize)
                    if source == target:
                        now.local.setdefault(target, []).append(piece)
                    else:
                        now.parts.setdefault((source, target), []).append(piece)
    if now.parts or now.local:
        buckets.append(now.close())
    return Schedule(tuple(tensors), tuple(buckets))


def _distinct(boxes: Iterator[Box] | Sequence[Box]) -> list[Box]:
    return [box for box in dict.fromkeys(boxes) if box.numel]


def _num_parts(boxes: Sequence[Box], itemsize: int, bucket_bytes: int) -> int:
    """Into how many parts the shards of a tensor are cut, so that one part of each goes into a bucket."""
    rows = [(box.shape[0], box.numel // box.shape[0]) for box in boxes if box.starts]
    total = sum(count * width for count, width in rows) * itemsize
    most = max((count for count, _ in rows), default=1)
    parts = max(1, -(-total // bucket_bytes))
    while parts < most and sum(-(-count // parts) * width for count, width in rows) * itemsize > bucket_bytes:
        parts += 1
    return min(parts, most)


Share = tuple[int, Box, int, Box]
"""Who gives, the box that it holds, who gets, and what of the box."""


def _shares(number: int, tensor: TensorLayout, node_of: Callable[[int], Any], together: bool) -> list[Share]:
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
                source = near[(number if together else number + order) % len(near)]
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
