"""A replica of an engine that generates in virtual time.

Owns: its slots, what waits for them, the seconds of its decode steps. Refuses to know: which job is whose, other replicas,
what trains. Always holds: time goes on from one event to the next (a sample ends, weights move, a wait is over), never step by
step; a sample begins and ends between two decode steps.

A step of r sequences that attend to p tokens together takes ``step_s(r) + p × token_s``; n steps without an event in between
add up in closed form, as each sequence attends to one token more after each.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol


class Waiting(Protocol):
    """What is told of a share's samples."""

    def began(self, sample: int, version: int) -> None: ...

    def ended(self, sample: int, at: float) -> None: ...


@dataclass(frozen=True)
class Speed:
    """How fast a replica is.

    Args:
        step_s: seconds of a decode step by its sequences, but for their attention.
        token_s: more for each token that a sequence attends to.
        prompt_s: of a token of a prompt.
        start_s: of a share, before its first step.
        slots: sequences that are generated at once, at most.
    """

    step_s: Callable[[int], float]
    token_s: float
    prompt_s: float
    start_s: float
    slots: int


@dataclass(eq=False)
class Share:
    """What a replica has to do of a job.

    Args:
        owner: is told of its samples.
        samples: (number of the sample, tokens of its prompt, of its response), those of a prompt side by side.
        new_prompt: for each, whether its prompt has to be computed first.
        tokens: that it may come to at most.
        deadline_s: seconds after its begin at which unfinished samples are given up.
    """

    owner: Waiting
    samples: list[tuple[int, int, int]]
    new_prompt: list[bool]
    tokens: int = 0
    deadline_s: float = math.inf
    next: int = 0
    left: int = field(init=False)
    has_begun: bool = False
    until: float = math.inf
    ended_at: float = math.inf

    def __post_init__(self) -> None:
        self.left = len(self.samples)

    def begin(self, now: float) -> None:
        """From now on its deadline runs."""
        self.has_begun, self.until = True, now + self.deadline_s


class Replica:
    """Slots that generate.

    Args:
        speed: of it.
        in_flight: whether weights move in the midst of samples and slots that are free are given to the next share; else shares
            come one after the other, and weights move between them.

    ``now`` is its own time, which is a decode step ahead of others at most; ``busy_s`` its seconds of work, ``slot_s`` the
    seconds of all its slots that were in use.
    """

    def __init__(self, speed: Speed, *, in_flight: bool) -> None:
        self._speed, self._in_flight = speed, in_flight
        self._step_s = cache(speed.step_s)
        self.now = self.busy_s = self.slot_s = 0.0
        self.version = 0
        self._shares: deque[Share] = deque()
        # (decode step after which it ends, share, sample, tokens attended to then), by the first.
        self._rows: list[tuple[int, int, Share, int, int]] = []
        self._steps = self._serial = self._past = 0

    @property
    def waiting_tokens(self) -> int:
        """Most tokens of shares that are not finished."""
        return sum(share.tokens for share in self._shares)

    def submit(self, share: Share, now: float) -> None:
        """Take a share, behind those that it has."""
        if not self._shares:
            self.now = max(self.now, now)
            share.begin(self.now)
        self._shares.append(share)

    def advance(self, until: float) -> None:
        """Go on to a time, or to the step in which it falls."""
        self._go_on(until, None)

    def finish(self, share: Share) -> None:
        """Go on until a share is finished, or given up."""
        self._go_on(math.inf, share)

    def free_between(self, now: float) -> float:
        """When it can be interrupted from ``now`` on: between two decode steps, or between two shares."""
        self.advance(now)
        if not self._in_flight and self._shares and self._shares[0].has_begun:
            self.finish(self._shares[0])
        return max(self.now, now)

    def take_weights(self, at: float, version: int, seconds: float) -> None:
        """Have new weights at ``at``, which took so many seconds to come."""
        self.busy_s += seconds
        self.version = version
        self.wait(at)

    def wait(self, until: float) -> None:
        """Do nothing until a time."""
        self.now = max(self.now, until)

    def cancel(self, share: Share) -> None:
        """Give a share up, with everything of it that is unfinished."""
        share.left, share.next, share.ended_at = 0, len(share.samples), self.now
        gone = [row for row in self._rows if row[2] is share]
        self._past -= sum(end - (step - self._steps) for step, _, _, _, end in gone)
        self._rows = [row for row in self._rows if row[2] is not share]
        heapq.heapify(self._rows)
        if share in self._shares:
            self._shares.remove(share)

    def _go_on(self, until: float, share: Share | None) -> None:
        while self._shares and self.now < until and (share is None or share.left):
            self._admit()
            oldest = self._shares[0]
            if self.now >= oldest.until:
                self.cancel(oldest)
            elif self._rows:
                self._decode(min(until, oldest.until))

    def _admit(self) -> None:
        """Begin samples while there are slots."""
        for share in tuple(self._shares):
            if len(self._rows) >= self._speed.slots:
                return
            if not share.has_begun:
                share.begin(self.now)
            if not share.next:
                self._spend(self._speed.start_s)
            while share.next < len(share.samples) and len(self._rows) < self._speed.slots:
                self._begin(share)
            if not self._in_flight:
                return

    def _begin(self, share: Share) -> None:
        sample, prompt, response = share.samples[share.next]
        if share.new_prompt[share.next]:
            self._spend(prompt * self._speed.prompt_s)
        share.next += 1
        self._serial += 1
        self._past += prompt
        heapq.heappush(self._rows, (self._steps + response, self._serial, share, sample, prompt + response))
        share.owner.began(sample, self.version)

    def _spend(self, seconds: float) -> None:
        self.now += seconds
        self.busy_s += seconds
        self.slot_s += seconds * len(self._rows)

    def _decode(self, until: float) -> None:
        """Steps until the next sample ends, or a time is reached."""
        rows, count = len(self._rows), self._rows[0][0] - self._steps
        linear = self._step_s(rows) + self._speed.token_s * (self._past - rows / 2)
        quadratic = self._speed.token_s * rows / 2
        seconds = count * (linear + count * quadratic)
        if self.now + seconds > until:
            count = min(count, _steps_of(until - self.now, linear, quadratic))
            seconds = count * (linear + count * quadratic)
        self._steps += count
        self._past += count * rows
        self._spend(seconds)
        while self._rows and self._rows[0][0] == self._steps:
            self._end()

    def _end(self) -> None:
        _, _, share, sample, past = heapq.heappop(self._rows)
        self._past -= past
        share.left -= 1
        share.owner.ended(sample, self.now)
        if not share.left:
            share.ended_at = self.now
            self._shares.remove(share)


def _steps_of(seconds: float, linear: float, quadratic: float) -> int:
    """The fewest decode steps, at least one, that take so many seconds."""
    if quadratic * seconds < 1e-12 * linear**2:
        return max(1, math.ceil(seconds / linear))
    return max(1, math.ceil((math.sqrt(linear**2 + 4 * quadratic * seconds) - linear) / (2 * quadratic)))
