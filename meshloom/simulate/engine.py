"""All replicas of a virtual engine, and the workers that score what they make.

Owns: which replica makes which group, when a rollout is finished and scored, which versions made it. Refuses to know:
training, the control loop. Always holds: replicas are never ahead of the time of a question by more than a decode step; samples
are scored in the order in which they end.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshloom.loop.stage import Attempt, Draw, Group, Spread
from meshloom.simulate.lengths import Drawn, LengthSource
from meshloom.simulate.replica import Replica, Share, Speed


@dataclass(frozen=True)
class Made:
    """A group: its samples, and for each that is trained on the version of the weights that made its first token."""

    drawn: Drawn
    versions: tuple[int, ...]


@dataclass(eq=False)
class Rollout:
    """A job of the virtual engine. Samples are numbered through all of its draws.

    Args:
        draws: of it.
        drawn: samples of each.
        to_score: takes samples as they end.
    """

    draws: Sequence[Draw]
    drawn: Sequence[Drawn]
    to_score: list[tuple[float, int, "Rollout", int]]
    versions: list[int] = field(init=False)
    scored: list[float] = field(init=False)
    shares: list[tuple[Replica, Share]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = sum(len(each.responses) for each in self.drawn)
        self.versions, self.scored = [-1] * count, [math.inf] * count

    def began(self, sample: int, version: int) -> None:
        self.versions[sample] = version

    def ended(self, sample: int, at: float) -> None:
        self.to_score.append((at, self.draws[0].number, self, sample))

    def reward_s(self, sample: int) -> float:
        """Seconds that scoring a sample takes."""
        count = len(self.drawn[0].responses)
        return self.drawn[sample // count].rewards_s[sample % count]


class VirtualEngine:
    """Replicas in virtual time.

    Args:
        speed: of each replica.
        replicas: how many.
        lengths: of all samples.
        deadline_s: of a rollout on a replica, from its begin.
        workers: that score side by side.
        in_flight: whether weights move in the midst of samples.
    """

    def __init__(
        self,
        speed: Speed,
        replicas: int,
        lengths: LengthSource,
        *,
        deadline_s: float,
        workers: int,
        in_flight: bool,
    ) -> None:
        self.replicas = [Replica(speed, in_flight=in_flight) for _ in range(replicas)]
        self._lengths, self._deadline_s = lengths, deadline_s
        self._free_workers = [0.0] * workers
        self._to_score: list[tuple[float, int, Rollout, int]] = []

    def begin(self, draws: Sequence[Draw], now: float) -> Rollout:
        """Give each draw to the replica that has least to do, by the most tokens that it may make."""
        self.advance(now)
        rollout = Rollout(draws, [self._lengths.of(draw.number) for draw in draws], self._to_score)
        load = [(replica.waiting_tokens, number) for number, replica in enumerate(self.replicas)]
        heapq.heapify(load)
        shares: dict[int, list[int]] = {}
        for place, drawn in enumerate(rollout.drawn):
            tokens, number = load[0]
            shares.setdefault(number, []).append(place)
            heapq.heapreplace(load, (tokens + self._most_tokens(drawn), number))
        for number, places in sorted(shares.items()):
            share = self._share(rollout, places)
            rollout.shares.append((self.replicas[number], share))
            self.replicas[number].submit(share, now)
        return rollout

    def _most_tokens(self, drawn: Drawn) -> int:
        return drawn.prompt + len(drawn.responses) * self._lengths.longest

    def _share(self, rollout: Rollout, places: Sequence[int]) -> Share:
        """What a replica has to do of some draws."""
        samples: list[tuple[int, int, int]] = []
        new_prompt: list[bool] = []
        for place in places:
            drawn = rollout.drawn[place]
            count = len(drawn.responses)
            samples += [(place * count + k, drawn.prompt, drawn.responses[k]) for k in range(count)]
            new_prompt += [True] + [False] * (count - 1)
        tokens = sum(self._most_tokens(rollout.drawn[place]) for place in places)
        return Share(rollout, samples, new_prompt, tokens, self._deadline_s)

    def collect(self, rollout: Rollout, now: float) -> tuple[float, Attempt[Group[Made]]]:
        """When a rollout is finished and scored, and what it gave."""
        at = now
        for replica, share in rollout.shares:
            replica.finish(share)
            at = max(at, share.ended_at)
        self.advance(at)
        self._score(at)
        groups, unfinished, count = {}, [], len(rollout.drawn[0].responses)
        for place, draw in enumerate(rollout.draws):
            samples = slice(place * count, place * count + count)
            scored = max(rollout.scored[samples])
            if math.isinf(scored):
                unfinished.append(draw)
                continue
            at = max(at, scored)
            drawn = rollout.drawn[place]
            versions = tuple(rollout.versions[samples])[: len(drawn.trained)]
            spread = Spread.SOME if drawn.has_spread else Spread.ALL_WRONG
            groups[draw.number] = Group(draw.number, min(versions), Made(drawn, versions), spread)
        return at, Attempt(groups, unfinished)

    def advance(self, now: float) -> None:
        """Bring all replicas to a time."""
        for replica in self.replicas:
            replica.advance(now)

    def take_weights(self, version: int, now: float, seconds: float) -> float:
        """Move weights to all replicas at once, as soon as the last of them is free; when they are there."""
        free = self._free(now)
        for replica in self.replicas:
            replica.take_weights(free + seconds, version, seconds)
        return free + seconds

    def lend(self, now: float, seconds: float) -> float:
        """Let other roles work on the replicas' devices, as soon as the last of them is free; when they are done."""
        back = self._free(now) + seconds
        for replica in self.replicas:
            replica.wait(back)
        return back

    def _free(self, now: float) -> float:
        return max(replica.free_between(now) for replica in self.replicas)

    def _score(self, until: float) -> None:
        """Score what ended until a time, in this order, by the workers that are free first."""
        ended = sorted((each for each in self._to_score if each[0] <= until), key=lambda each: each[:2])
        self._to_score[:] = [each for each in self._to_score if each[0] > until]
        for at, _, rollout, sample in ended:
            seconds = rollout.reward_s(sample)
            begun = max(at, self._free_workers[0]) if seconds else at
            rollout.scored[sample] = begun + seconds
            if seconds:
                heapq.heapreplace(self._free_workers, begun + seconds)
