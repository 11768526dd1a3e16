"""Moving weights between ranks that hold them in different layouts, with the proof that they arrived.

Owns: the buffers, packing and unpacking. Refuses to know: how a side came to its layout, who sends what to whom (``routes``),
schedules of training. Always holds: no rank holds more than its part and four buckets (two that are sent, two that are
received); what is sent has the dtype of the place where it goes; buffers are allocated once; after a movement each part's
checksum at the receiver equals the sender's on all ranks, or all of them stop and name the tensor (``proof``).

Every rank of the group makes a ``Resharder`` and calls ``move`` at the same time, those that only give or only take too. Two
buckets are in flight: while one travels, the next is packed and the one before is put in its places.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.weights.agreement import Agreed, agree
from meshloom.weights.layouts import Box
from meshloom.weights.proof import Proof
from meshloom.weights.routes import ALIGNMENT, Bucket, Message, Piece, make_schedule
from meshloom.weights.shards import Giver, Taker
from meshloom.weights.transport import Posted, Transport

BUCKET_BYTES = 1 << 27
"""Four of them are what the plan counts for a movement."""
_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class Resharded:
    """A movement that is done, as this rank saw it.

    Args:
        version: of the weights.
        num_tensors: of all ranks together.
        sent_bytes, received_bytes, local_bytes: of this rank; what is sent to several ranks counts for each.
        seconds: of the whole movement, checksums included.
        checksum: of all that was sent, in hexadecimal; the same on all ranks.
    """

    version: int
    num_tensors: int
    sent_bytes: int
    received_bytes: int
    local_bytes: int
    seconds: float
    checksum: str


class Resharder:
    """One rank's end of the movements between two layouts.

    Args:
        giver: what this rank has of the weights; none if it has nothing.
        taker: what it needs; none if it needs nothing.
        group: of all ranks that give or take; none for the whole world.
        device: of this rank.
        bucket_bytes: bound on what is sent or received at once.
        together: send what several ranks need to all of them at once, from one sender.
        nodes: machine of each rank of the world, if they are on several.
        keep_buffers: between movements; false gives their memory back after each.

    Raises:
        RunFault: on all ranks, if the two sides do not agree; it names the tensor.
    """

    def __init__(
        self,
        giver: Giver | None,
        taker: Taker | None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
        together: bool = True,
        nodes: Sequence[int] | None = None,
        keep_buffers: bool = True,
    ) -> None:
        self._group = dist.group.WORLD if group is None else group
        self._rank, self._device = dist.get_rank(), device
        self._giver, self._taker = giver, taker
        self.agreed: Agreed = agree(giver, taker, self._group)
        self.schedule = make_schedule(
            self.agreed.layouts,
            bucket_bytes=bucket_bytes,
            node_of=lambda rank: 0 if nodes is None else nodes[rank],
            together=together,
        )
        self._transport = Transport(self.schedule, self._group, self._rank)
        self._sends = [bucket.sent(self._rank) for bucket in self.schedule.buckets]
        self._receives = [bucket.received(self._rank) for bucket in self.schedule.buckets]
        self._keep_buffers, self._bucket_bytes = keep_buffers, bucket_bytes
        self._sizes = self.schedule.buffer_bytes(self._rank)
        self._out: list[Tensor] = []
        self._in: list[Tensor] = []

    @property
    def buffer_bytes(self) -> int:
        """Of this rank, in a movement."""
        return _SLOTS * sum(self._sizes)

    def move(self, version: int) -> Resharded:
        """Move everything once; due on all ranks of the group.

        Args:
            version: of the weights, the same on all ranks.

        Raises:
            RunFault: on all ranks, if a part did not arrive as it was sent, or ranks move different versions.
        """
        moving = self.moving(version)
        while True:
            try:
                next(moving)
            except StopIteration as end:
                return end.value

    @torch.no_grad()
    def moving(self, version: int) -> Generator[None, None, Resharded]:
        """The same, step by step: what a bucket brought is in its places whenever this yields. Arguments and errors as of
        ``move``; it must be run to its end, which returns what ``move`` returns."""
        began = time.monotonic()
        for side in (self._giver, self._taker):
            if side is not None:
                side.begin()
        self._take_buffers()
        proof = Proof(self._sends, self._receives, self._device)
        flying: Posted | None = None
        for number, bucket in enumerate(self.schedule.buckets):
            self._pack(number, proof)
            posted = self._transport.post(self._with_buffers(number))
            self._copy_own(bucket, proof)
            if flying is not None:
                self._land(flying, number - 1, proof)
            flying = posted
            yield
        if flying is not None:
            self._land(flying, len(self.schedule.buckets) - 1, proof)
            yield
        if not self._keep_buffers:
            self._out, self._in = [], []
        checksum = proof.compare(self.agreed, self.schedule, self._group, self._rank, version)
        sent, received, local = self.schedule.moved_bytes(self._rank)
        return Resharded(
            version=version,
            num_tensors=len(self.agreed.layouts),
            sent_bytes=sent,
            received_bytes=received,
            local_bytes=local,
            seconds=time.monotonic() - began,
            checksum=checksum,
        )

    def _take_buffers(self) -> None:
        if not self._out:
            self._out, self._in = (
                [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_SLOTS)]
                for size in self._sizes
            )

    def _with_buffers(self, number: int) -> list[tuple[Message, Tensor]]:
        """The messages of a bucket that this rank sends or receives, in their order, with their bytes."""
        slot = number % _SLOTS
        sent, received = (
            iter(_cut(self._out[slot], self._sends[number])),
            iter(_cut(self._in[slot], self._receives[number])),
        )
        return [
            (message, next(sent if message.source == self._rank else received))
            for message in self.schedule.buckets[number].messages
            if message.source == self._rank or self._rank in message.targets
        ]

    def _pack(self, number: int, proof: Proof) -> None:
        messages = self._sends[number]
        packed: list[Tensor] = []
        for message, buffer in zip(messages, _cut(self._out[number % _SLOTS], messages), strict=True):
            for piece, view in self._views(message.pieces, buffer):
                view.copy_(self._read(piece))
                packed.append(view)
        proof.sent(packed)

    def _land(self, posted: Posted, number: int, proof: Proof) -> None:
        """Put what came in its places. Its checksums are of what is there; of what came, if it is spread over several places,
        each of which is compared with its part."""
        posted.wait()
        messages = self._receives[number]
        arrived: list[Tensor] = []
        for message, buffer in zip(messages, _cut(self._in[number % _SLOTS], messages), strict=True):
            for piece, values in self._views(message.pieces, buffer):
                places = self._put(piece, values)
                whole = len(places) == 1 and places[0][0] == piece.box
                arrived.append(places[0][1] if whole else values)
                if not whole:
                    proof.here([(piece.tensor, box.of(values, piece.box), place) for box, place in places])
        proof.received(arrived)

    def _copy_own(self, bucket: Bucket, proof: Proof) -> None:
        """Copy what this rank needs of its own; what is rounded for the proof is alive for no more than a bucket's bytes."""
        copied: list[tuple[int, Tensor, Tensor]] = []
        size = 0
        for piece in bucket.local.get(self._rank, ()):
            values = self._read(piece)
            places = self._put(piece, values)
            copied += [(piece.tensor, box.of(values, piece.box).to(place.dtype), place) for box, place in places]
            size += piece.num_bytes
            if size >= self._bucket_bytes:
                proof.here(copied)
                copied, size = [], 0
        proof.here(copied)

    def _put(self, piece: Piece, values: Tensor) -> list[tuple[Box, Tensor]]:
        places = list(self._taker.views(self.agreed.layouts[piece.tensor].name, piece.box))
        for box, place in places:
            place.copy_(box.of(values, piece.box))
        return places

    def _read(self, piece: Piece) -> Tensor:
        return self._giver.read(self.agreed.layouts[piece.tensor].name, piece.box)

    def _views(self, pieces: Sequence[Piece], buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece of a message, as a tensor in its buffer."""
        start = 0
        for piece in pieces:
            flat = buffer[start : start + piece.num_bytes].view(self.agreed.dtypes[piece.tensor])
            yield piece, flat.view(piece.box.shape)
            start += piece.num_bytes


def _cut(buffer: Tensor, messages: Sequence[Message]) -> list[Tensor]:
    """The part of a buffer for each message."""
    found, start = [], 0
    for message in messages:
        found.append(buffer[start : start + message.num_bytes])
        start += -(-message.num_bytes // ALIGNMENT) * ALIGNMENT
    return found
