"""Sending the messages of a bucket: to one rank, or to all at once that need the same.

Owns: which process groups there are, and the order in which operations are posted. Refuses to know: what is in a message.
Always holds: all ranks post in the same order, so that no two wait for each other; nothing waits for what was posted but
``Posted.wait``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from meshloom.weights.routes import Message, Schedule

_MOST_GROUPS = 16
"""Process groups cost memory on each device."""


@dataclass(frozen=True)
class Posted:
    """What is on its way."""

    works: tuple[dist.Work, ...]

    def wait(self) -> None:
        """Let what is computed from now on see what came, and write over what was sent."""
        for work in self.works:
            work.wait()


class Transport:
    """Posts messages between the ranks of a group.

    What several ranks need is sent to all of them at once where there is a process group of just them: the group itself, and,
    if that is the whole world, groups that are made here, unless they were to be many. Elsewhere it is sent to one after the
    other.

    Args:
        schedule: whose messages they are.
        group: of all ranks that take part.
        rank: this one, among all of the world.

    Made by all ranks of the group at once.
    """

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        everyone = tuple(sorted(dist.get_process_group_ranks(group)))
        self._groups = {everyone: group}
        needed = sorted({_members(m) for bucket in schedule.buckets for m in bucket.messages if len(m.targets) > 1})
        new = [members for members in needed if members != everyone]
        if len(everyone) == dist.get_world_size() and len(new) <= _MOST_GROUPS:
            made = {members: dist.new_group(list(members)) for members in new}
            self._groups |= {members: each for members, each in made.items() if rank in members}

    def post(self, messages: Sequence[tuple[Message, Tensor]]) -> Posted:
        """Send or receive the messages of a bucket that this rank takes part in, in their order.

        Args:
            messages: each with the bytes that are sent, or that are filled by what comes.
        """
        works: list[dist.Work] = []
        pairs: list[dist.P2POp] = []
        for message, buffer in messages:
            group = self._groups.get(_members(message)) if len(message.targets) > 1 else None
            if group is not None:
                works.append(dist.broadcast(buffer, message.source, group=group, async_op=True))
            elif message.source == self._rank:
                pairs += [dist.P2POp(dist.isend, buffer, target, self._group) for target in message.targets]
            else:
                pairs.append(dist.P2POp(dist.irecv, buffer, message.source, self._group))
        if pairs:
            works += dist.batch_isend_irecv(pairs)
        return Posted(tuple(works))


def _members(message: Message) -> tuple[int, ...]:
    return tuple(sorted((message.source, *message.targets)))
