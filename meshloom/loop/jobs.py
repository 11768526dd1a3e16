"""A call of the engine on many devices, while its replicas are at work on it.

Owns: the records of a replica and of a call, and what a replica's thread tells the caller's. Refuses to know: workers, who does
what. Always holds: a request that is aborted stays so wherever it goes, until all of it was told.
"""

import queue
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from meshloom.loop.shares import Share
from meshloom.loop.turns import Turns
from meshloom.rollout.feed import RequestFeed
from meshloom.rollout.protocol import Completion, Request


@dataclass
class Replica:
    """One replica of the engine.

    Args:
        ranks: of its devices; the first one tells what it generated.
        waiting_tokens: most tokens that were asked of it and are not finished.
    """

    ranks: tuple[int, ...]
    turns: Turns = field(default_factory=Turns)
    waiting_tokens: int = 0


@dataclass(frozen=True)
class End:
    """A replica has told everything; or what went wrong with it."""

    error: Exception | None = None


@dataclass(frozen=True)
class More:
    """More requests have come, or no more will."""


@dataclass(eq=False)
class Job:
    """One call.

    Args:
        deadline_s: of it, from when a replica begins.
        feed: of what comes later; none if nothing does.
        until: when what comes later is over, on the monotonic clock; set as the call begins.
        in_flight: requests that were asked and are not told whole: in a share, or on their way from or to one.
        aborted: those of them that the caller wants ended.
        told: what replicas tell.
        shares: of the replicas, begun and not.
        pending: what each replica, by its first rank, has yet to begin.
        running: what each replica generates, if more may join it.
        made_by: the replica that has told samples of a request.
        at_work: replicas that have a thread.
    """

    deadline_s: float
    feed: RequestFeed | None
    until: float = float("inf")
    in_flight: set[int] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)
    told: "queue.SimpleQueue[list[Completion] | More | End]" = field(default_factory=queue.SimpleQueue)
    shares: list[Share] = field(default_factory=list)
    pending: dict[int, Share] = field(default_factory=dict)
    running: dict[int, Share] = field(default_factory=dict)
    made_by: dict[int, Replica] = field(default_factory=dict)
    at_work: set[int] = field(default_factory=set)

    def takes(self, requests: Sequence[Request]) -> None:
        """Requests are asked."""
        self.in_flight.update(request.id for request in requests)

    def has(self, request_id: int) -> bool:
        """Whether a request is its own and not told whole, or waits in its feed."""
        return request_id in self.in_flight or (self.feed is not None and self.feed.holds(request_id))

    def give(self, share: Share, requests: Sequence[Request]) -> None:
        """Requests are a share's, also what is to become of them."""
        share.add(requests)
        share.aborted.update(request.id for request in requests if request.id in self.aborted)

    def told_whole(self, request_ids: Collection[int]) -> None:
        """All samples of requests were told."""
        self.in_flight.difference_update(request_ids)
        self.aborted.difference_update(request_ids)
