"""The proof of a movement between ranks: checksums of what was sent and of what is there, compared on all ranks.

Owns: checksums of pieces, their exchange, the verdict. Refuses to know: how pieces travel. Always holds: all ranks come to the
same verdict; a loss names the first tensor that was lost anywhere.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.config.errors import RunFault
from meshloom.weights.agreement import Agreed
from meshloom.weights.checksum import checksums_into
from meshloom.weights.routes import Message, Schedule


class Proof:
    """Checksums of one movement, still on their device until they are compared.

    Args:
        sends, receives: this rank's messages by bucket.
        device: of the tensors.
    """

    def __init__(
        self, sends: Sequence[Sequence[Message]], receives: Sequence[Sequence[Message]], device: torch.device
    ) -> None:
        def count(buckets: Sequence[Sequence[Message]]) -> int:
            return sum(len(message.pieces) for messages in buckets for message in messages)

        self._sent, self._received = (
            torch.zeros(count(buckets), dtype=torch.int64, device=device) for buckets in (sends, receives)
        )
        self._places = [0, 0]
        self._here: list[tuple[tuple[int, ...], Tensor]] = []

    def sent(self, values: Sequence[Tensor]) -> None:
        """Of the next pieces that are sent, in their order."""
        self._places[0] = _add(self._sent, self._places[0], values)

    def received(self, values: Sequence[Tensor]) -> None:
        """Of the next pieces that came, in their order, where they are."""
        self._places[1] = _add(self._received, self._places[1], values)

    def here(self, copied: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Of copies within this rank: which tensor, what was read, and the place where it is."""
        if copied:
            tensors, values, places = zip(*copied, strict=True)
            sums = torch.zeros(2, len(copied), dtype=torch.int64, device=places[0].device)
            checksums_into(sums[0], values)
            checksums_into(sums[1], places)
            self._here.append((tensors, sums))

    def compare(self, agreed: Agreed, schedule: Schedule, group: dist.ProcessGroup, rank: int, version: int) -> str:
        """Compare this rank's with the senders', and agree on the result.

        Returns:
            The checksum of all that was sent.

        Raises:
            RunFault: on all ranks.
        """
        members = sorted(dist.get_process_group_ranks(group))
        counts = {each: 0 for each in members}
        for bucket in schedule.buckets:
            for message in bucket.messages:
                counts[message.source] += len(message.pieces)
        told = _gather(self._sent, max(counts.values(), default=0), len(members), group)
        expected, tensors = _expected(schedule, dict(zip(members, told, strict=True)), rank)
        lost = [tensors[place] for place in (self._received != expected).nonzero()[:, 0].tolist()]
        if self._here:
            copied = [tensor for tensors, _ in self._here for tensor in tensors]
            read, there = torch.cat([sums for _, sums in self._here], 1)
            lost += [copied[place] for place in (read != there).nonzero()[:, 0].tolist()]
        _agree_on_result(min(lost, default=len(agreed.layouts)), agreed, version, group, self._sent.device)
        return f"{sum(int(row[: counts[each]].sum()) for each, row in zip(members, told, strict=True)) % 2**64:016x}"


def _gather(values: Tensor, longest: int, count: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's checksums, padded."""
    padded = torch.zeros(longest, dtype=torch.int64, device=values.device)
    padded[: len(values)] = values
    told = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(told, padded, group=group)
    return told


def _expected(schedule: Schedule, told: dict[int, Tensor], rank: int) -> tuple[Tensor, list[int]]:
    """The senders' checksums of what a rank received, in the order in which it came, and which tensor each is of."""
    places = dict.fromkeys(told, 0)
    parts: list[Tensor] = []
    tensors: list[int] = []
    for bucket in schedule.buckets:
        for message in bucket.messages:
            start, places[message.source] = places[message.source], places[message.source] + len(message.pieces)
            if rank in message.targets:
                parts.append(told[message.source][start : places[message.source]])
                tensors += [piece.tensor for piece in message.pieces]
    device = next(iter(told.values())).device
    return (torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)), tensors


def _agree_on_result(
    first_lost: int, agreed: Agreed, version: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    result = torch.tensor([first_lost, version, -version], dtype=torch.int64, device=device)
    dist.all_reduce(result, dist.ReduceOp.MIN, group=group)
    lost, oldest, newest = result.tolist()
    if oldest != -newest:
        raise RunFault(
            f"ranks move different versions of the weights: {oldest} and {-newest}",
            where="weights",
            why="their steps differ",
        )
    if lost < len(agreed.layouts):
        raise RunFault(
            f"weights did not reach the engine: {agreed.layouts[lost].name}",
            where="weights",
            why="its checksum where it arrived is not the one where it was sent",
            fix="check the link between the devices; the run's checkpoints stand",
        )


def _add(sums: Tensor, start: int, values: Sequence[Tensor]) -> int:
    """Checksums of more values, from a place on; the place after them."""
    checksums_into(sums[start : start + len(values)], values)
    return start + len(values)
