"""What one replica of an engine generates of a call, and what of it another one may take over.

Owns: which requests of a share have begun, came back, or were aborted. Refuses to know: turns, workers. Always holds: every
completion of a request is told to the caller once, by the replica that made it; a request that comes back whole, or was
brought to a replica that had ended, is nobody's until it is given to someone.
"""

import queue
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshloom.rollout.protocol import Completion, FinishReason, Request


def most_tokens(request: Request) -> int:
    """Most tokens that a request may take: its prompt once, and every sample to its end."""
    return len(request.prompt_ids) + len(request.seeds) * request.params.max_tokens


@dataclass(eq=False)
class Share:
    """Requests that a replica generates in one generation.

    Args:
        ranks: of the replica.
        until: when its time is over, on the monotonic clock; none before it begins.
        number: of the generation; none before it begins.
        requests: by id, in the order in which they begin; those that came back, or were told whole, are taken out.
        tokens: most that those may take.
        aborted: requests that the caller wants ended.
        asked_back: requests that were asked back.
        has_helper: whether somebody waits for what comes back.
        returned: what came back, batch by batch; none when the share has ended.
    """

    ranks: tuple[int, ...]
    until: float | None = None
    number: int | None = None
    requests: dict[int, Request] = field(default_factory=dict)
    tokens: int = 0
    aborted: set[int] = field(default_factory=set)
    asked_back: set[int] = field(default_factory=set)
    has_helper: bool = False
    returned: "queue.SimpleQueue[list[Request] | None]" = field(default_factory=queue.SimpleQueue)
    _begun: set[int] = field(default_factory=set)
    _told: Counter[int] = field(default_factory=Counter)
    _back: Counter[int] = field(default_factory=Counter)

    def add(self, requests: Sequence[Request]) -> None:
        """Requests that are this replica's too."""
        self.requests.update((request.id, request) for request in requests)
        self.tokens += sum(map(most_tokens, requests))

    @property
    def num_samples(self) -> int:
        """Samples of its requests."""
        return sum(len(request.seeds) for request in self.requests.values())

    def spare(self) -> list[Request]:
        """Requests that may not have begun, and were not asked back."""
        if self.number is None:
            return []
        gone = self._begun | self.asked_back | self.aborted
        return [request for request in self.requests.values() if request.id not in gone]

    def take(self, told: Sequence[Completion]) -> tuple[list[Completion], list[Request]]:
        """Sort what the replica told: the caller's completions, and requests that came back."""
        kept: list[Completion] = []
        back: list[Request] = []
        for completion in told:
            number = completion.request_id
            is_back = completion.finish is FinishReason.ABORTED and not len(completion.ids)
            # One of which a sample is back comes back whole: it is aborted where it goes.
            is_lost = number in self.aborted and number not in self._back
            if not is_back or is_lost or number not in self.asked_back:
                self._begun.add(number)
                kept.append(completion)
                self._count(self._told, number)
            elif (request := self._count(self._back, number)) is not None:
                back.append(request)
        return kept, back

    def left_over(self) -> list[Request]:
        """Take out what the replica has told nothing of, now that it has ended: it came too late."""
        return [self._out(number) for number in list(self.requests) if number not in self._begun]

    def _count(self, counter: Counter[int], number: int) -> Request | None:
        """Count a sample; the request, taken out, with its last one."""
        counter[number] += 1
        return self._out(number) if counter[number] == len(self.requests[number].seeds) else None

    def _out(self, number: int) -> Request:
        request = self.requests.pop(number)
        self.tokens -= most_tokens(request)
        return request
