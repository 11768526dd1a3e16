"""Groups of episodes: many environments side by side, and one engine that generates for all of them.

Owns: one step's episodes: requests, seeds, bounds, and what happens between two turns. Refuses to know: how environments run,
how ids are drawn, losses. Always holds: a turn's request is handed to the engine as soon as its environment has answered, while
others generate; a turn's seed follows from the draw, the sample and the turn; an episode that fails costs itself only, and has
a reason.

Two threads: the caller's drives the engine and tells what it finished; another takes these turns and the environments' answers,
one at a time, and makes the next requests.
"""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from jinja2.exceptions import TemplateError

from meshloom.config.episode_settings import EnvironmentSettings, RewrittenHistory
from meshloom.config.errors import RunFault
from meshloom.data.rows import Row
from meshloom.environments.chat import ChatRenderer, Rewritten
from meshloom.environments.pool import EnvironmentPool, Reply
from meshloom.environments.protocol import Fault, FaultReason, Message, Task, Turn
from meshloom.loop.baseline import greedy_episode, with_baseline
from meshloom.loop.collect import UNFINISHED, Collector, sample_seed
from meshloom.loop.episode import FAILED, GREEDY, Episode, reward_request
from meshloom.loop.stage import Attempt, Draw
from meshloom.observe.timing import PhaseClock
from meshloom.plan.residency import Phase
from meshloom.rewards.combined import Scoring
from meshloom.rollout.feed import RequestFeed
from meshloom.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from meshloom.samples import Samples, concat


@dataclass(frozen=True, kw_only=True)
class Environments:
    """What a run's episodes need.

    Args:
        settings: bounds of an episode.
        pool: where environments and tools run.
        renderer: of conversations.
        system_prompt: put before what a reset gives, if that has none.
        max_prompt_tokens: longest prompt.
        judge_alone: episodes have no reward but what the environments give.
    """

    settings: EnvironmentSettings
    pool: EnvironmentPool
    renderer: ChatRenderer
    system_prompt: str | None
    max_prompt_tokens: int
    judge_alone: bool

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of a prompt with the system prompt before them."""
        if not self.system_prompt or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]


@dataclass(kw_only=True)
class EpisodeCollector(Collector):
    """Makes scored groups of episodes.

    Args: as ``Collector``; besides
        environments: of the run.
    """

    environments: Environments

    def check(self) -> None:
        """Let the engine refuse episodes that it could never hold; nothing is generated."""
        self.engine.generate([self.largest(1)], deadline_s=0.0)

    def largest(self, samples: int) -> Request:
        """As long as any request can be."""
        longest = self.environments.max_prompt_tokens + self.params.max_tokens
        params = self.turn_params(self.params.max_tokens)
        prompt_ids, keep = [0] * (longest - params.max_tokens), self.goes_on_after(0)
        return Request(id=0, prompt_ids=prompt_ids, params=params, seeds=range(samples), keep=keep)

    def goes_on_after(self, turns: int) -> bool:
        """Whether a turn may follow on one that comes after so many: what the engine has computed is then worth keeping."""
        settings = self.environments.settings
        return not settings.reasoning_gym and turns + 1 < settings.max_turns

    def turn_params(self, left: int) -> SamplingParams:
        """Parameters of a turn with so many tokens left."""
        bound = self.environments.settings.max_turn_tokens
        return replace(self.params, max_tokens=left if bound is None else min(left, bound))

    def attempt(self, draws: Sequence[Draw], *, deadline_s: float, clock: PhaseClock) -> Attempt[Samples]:
        """Play the episodes of each draw, once."""
        run = _Run(self, draws)
        run.start()
        try:
            for completion in self.engine.generate([], deadline_s=deadline_s, feed=run.feed):
                run.hear(completion)
        finally:
            run.stop()
        with clock.phase("score"):
            self.enter(Phase.SCORE)
            rewards = {key: scoring.result() for key, scoring in run.scorings.items()}
        groups, unfinished = {}, []
        for draw in draws:
            episodes = run.of(draw)
            if not all(episode.is_over for episode in episodes):
                unfinished.append(draw)
                continue
            parts = {
                each.index: each.samples(
                    rewards.get((draw.number, each.index), FAILED), self.engine.version, run.fallback
                )
                for each in episodes
            }
            greedy = parts.pop(GREEDY, None)
            group = concat(list(parts.values()))
            groups[draw.number] = group if greedy is None else with_baseline(group, greedy_episode(greedy))
        return Attempt(groups, unfinished)


_Event = Completion | tuple[Episode, Reply] | None
"""A finished turn; an environment's answer; or the engine's end."""


class _Run:
    """The episodes of one attempt.

    Args:
        collector: whose they are.
        draws: a group for each.
    """

    def __init__(self, collector: EpisodeCollector, draws: Sequence[Draw]) -> None:
        self._own, self._limits = collector, collector.environments.settings
        self._renderer, self._pool = collector.environments.renderer, collector.environments.pool
        places = [*range(collector.samples_per_prompt), *([GREEDY] if collector.greedy else [])]
        self.feed = RequestFeed(collector.largest(len(places) * len(draws)))
        self.scorings: dict[tuple[int, int], Scoring] = {}
        self._groups = {draw.number: [self._episode(draw, k) for k in places] for draw in draws}
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._asked: dict[int, Sequence[Episode]] = {}
        """Whose turn each sample of a request is."""
        self._ready: list[tuple[int, int, Request]] = []
        self._num_ready = 0
        self._num_open = sum(map(len, self._groups.values()))
        self._numbers = count()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name="episodes", daemon=True)
        self.fallback = self._renderer.begin([{"role": "user", "content": ""}]).ids

    def of(self, draw: Draw) -> list[Episode]:
        """The episodes of a draw."""
        return self._groups[draw.number]

    def start(self) -> None:
        """Begin all episodes."""
        self._thread.start()

    def hear(self, completion: Completion) -> None:
        """A turn is finished."""
        self._events.put(completion)

    def stop(self) -> None:
        """The engine has ended: what is not over stays so.

        Raises:
            UserError: what went wrong between two turns, if anything did.
        """
        self._events.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _episode(self, draw: Draw, index: int) -> Episode:
        row: Row = self._own.prompts[draw.prompt].row
        seed = sample_seed(self._own.seed, draw.number, 0, f"{self._own.purpose}/environment")
        task = Task(seed=seed, prompt=row.prompt, answer=row.answer, data_source=row.data_source, extra=row.extra)
        return Episode(draw, index, task, self._pool.open())

    def _drive(self) -> None:
        try:
            self._begin()
            self._hand_over()
            while self._num_open and self._take(self._wait_s()):
                self._hand_over()
        except BaseException as error:  # told to the caller's thread, which raises it
            self._error = error
        finally:
            self.feed.close()
            for episode in self._open():
                self._pool.end(episode.place)

    def _open(self) -> list[Episode]:
        return [episode for group in self._groups.values() for episode in group if not episode.is_over]

    def _wait_s(self) -> float | None:
        """Seconds until the next episode is late; none if there is no such bound."""
        if self._limits.episode_deadline_s is None:
            return None
        return max(0.0, min(episode.deadline for episode in self._open()) - time.monotonic())

    def _take(self, wait_s: float | None) -> bool:
        """Deal with the next event; false after the last one."""
        try:
            event = self._events.get(timeout=wait_s)
        except queue.Empty:
            self._end_late()
            return True
        if event is None:
            return False
        if isinstance(event, Completion):
            self._on_turn(self._asked[event.request_id][event.index], event)
        else:
            self._on_reply(*event)
        return True

    def _end_late(self) -> None:
        now, bound = time.monotonic(), self._limits.episode_deadline_s
        for episode in self._open():
            if episode.deadline <= now:
                self._fail(episode, Fault(FaultReason.LATE, f"not over after {bound:g} s"))
                if episode.conversation is None:
                    self._ask_first(self._groups[episode.draw.number])

    def _begin(self) -> None:
        """Reset the environments, or ask the first turn at once where the row is the prompt."""
        bound = self._limits.episode_deadline_s
        now = time.monotonic()
        for group in self._groups.values():
            for episode in group:
                episode.deadline = float("inf") if bound is None else now + bound
            if self._pool.is_tools:
                prompt = group[0].task.prompt
                chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                for episode in group:
                    self._open_with(episode, chat)
                self._ask_first(group)
                continue
            for episode in group:
                self._call(episode, self._pool.reset(episode.place, episode.task))

    def _call(self, episode: Episode, future: Any) -> None:
        future.add_done_callback(lambda done: self._events.put((episode, done.result())))

    def _ask_first(self, group: Sequence[Episode]) -> None:
        """The first turns of a group, once all its environments have begun: those with the same prompt share a request, in
        which a greedy one is the last."""
        if not all(episode.is_over or episode.conversation for episode in group):
            return
        same: dict[tuple[int, ...], list[Episode]] = {}
        for episode in group:
            if not episode.is_over:
                same.setdefault(tuple(episode.conversation.ids), []).append(episode)
        for episodes in same.values():
            self._ask(episodes)

    def _open_with(self, episode: Episode, messages: Sequence[Message]) -> None:
        """The prompt of an episode.

        Raises:
            RunFault: if it is too long, or the template refuses it.
        """
        found = self._own.environments
        try:
            conversation = self._renderer.begin(found.opening(messages))
        except (TemplateError, TypeError) as error:
            raise RunFault(
                "the chat template refuses what the environment says", where="environment", why=str(error)
            ) from error
        if len(conversation.ids) > found.max_prompt_tokens:
            raise RunFault(
                f"the prompt of an environment has {len(conversation.ids)} tokens",
                where="data.max_prompt_tokens",
                why=f"more than {found.max_prompt_tokens}: {conversation.text[:200]!r}",
                fix=f"at least {len(conversation.ids)}, or a shorter first observation",
            )
        episode.began(conversation)

    def _ask(self, episodes: Sequence[Episode]) -> None:
        """Make a request for the next turn of episodes that have the same conversation so far."""
        own, first = self._own, episodes[0]
        number = next(self._numbers)
        self._asked[number] = episodes
        purpose = own.purpose if first.num_turns == 0 else f"{own.purpose}/turn{first.num_turns}"
        request = Request(
            id=number,
            prompt_ids=first.conversation.ids,
            params=own.turn_params(self._left(first)),
            seeds=[sample_seed(own.seed, one.draw.number, one.index, purpose) for one in episodes],
            num_greedy=sum(one.index == GREEDY for one in episodes),
            keep=own.goes_on_after(first.num_turns),
            after=first.asked,
        )
        for episode in episodes:
            episode.asked = number
        self._ready.append((first.draw.number, first.index, request))
        self._num_ready += len(episodes)

    def _hand_over(self) -> None:
        """Let the engine have what is ready; in lockstep, once every open episode is."""
        if not self._ready or (self._limits.lockstep and self._num_ready < self._num_open):
            return
        requests = [request for _, _, request in sorted(self._ready, key=lambda each: each[:2])]
        self._ready, self._num_ready = [], 0
        self.feed.put(requests)

    def _left(self, episode: Episode) -> int:
        """Tokens that the next turn may have."""
        behind_prompt = self._own.params.max_tokens - episode.num_tokens
        longest = self._own.environments.max_prompt_tokens + self._own.params.max_tokens
        return min(behind_prompt, longest - len(episode.conversation.ids))

    def _on_turn(self, episode: Episode, completion: Completion) -> None:
        """The model has spoken: its environment is asked."""
        if episode.is_over or completion.finish in UNFINISHED:
            return
        (response,) = self._own.decode([completion.ids])
        episode.took_turn(completion, self._renderer.said(completion.ids), response)
        was_cut = completion.finish is FinishReason.LENGTH
        episode.finish = "length" if was_cut else ""
        if not self._pool.is_tools:
            turn = Turn(text=response, ids=tuple(completion.ids), finish=completion.finish.value)
            self._call(episode, self._pool.step(episode.place, turn))
        elif was_cut:
            self._end(episode, "length")
        else:
            text = episode.messages[-1]["content"]
            self._call(episode, self._pool.use_tools(episode.place, text, episode.num_calls))

    def _on_reply(self, episode: Episode, reply: Reply) -> None:
        """The environment has answered: the next turn, or the end."""
        if episode.is_over:
            return
        if isinstance(reply, Fault):
            self._fail(episode, reply)
            if episode.conversation is None:
                self._ask_first(self._groups[episode.draw.number])
            return
        if episode.num_turns == 0:
            self._open_with(episode, reply.messages)
            episode.numbers |= reply.numbers
            self._ask_first(self._groups[episode.draw.number])
            return
        episode.was_answered(reply)
        if reply.done or episode.finish:
            self._end(episode, episode.finish or "stop")
        elif episode.num_turns >= self._limits.max_turns:
            self._end(episode, "turns")
        else:
            self._go_on(episode, reply.messages)

    def _go_on(self, episode: Episode, messages: Sequence[Message]) -> None:
        """Ask for the next turn, if there is room for one and the template lets the history stand."""
        try:
            found = self._renderer.extend(episode.conversation, episode.turn_ids, messages)
        except (TemplateError, TypeError) as error:
            self._fail(episode, Fault(FaultReason.RAISED, f"the chat template refuses its messages: {error}"))
            return
        if not isinstance(found, Rewritten):
            episode.pieces[-1].add_shown(found.ids)
        elif self._limits.rewritten_history is RewrittenHistory.REFUSE:
            self._fail(episode, Fault(FaultReason.REWRITTEN, found.why))
            return
        else:
            episode.rewritten(found.fresh)
        if self._left(episode) < 1:
            self._end(episode, "length")
        else:
            self._ask([episode])

    def _fail(self, episode: Episode, fault: Fault) -> None:
        episode.fault = fault
        self._end(episode, episode.finish or "failed")

    def _end(self, episode: Episode, finish: str) -> None:
        """The episode is over; its reward is on its way, if it is judged."""
        episode.finish, episode.is_over = finish, True
        if episode.fault is None and self._own.environments.judge_alone and not episode.rewards:
            turns = f"{episode.num_turns} {'turn' if episode.num_turns == 1 else 'turns'}, ended by {finish}"
            why = f"no reward in {turns}; a turn that is worth nothing has the reward 0.0, or set reward.function"
            episode.fault = Fault(FaultReason.NO_REWARD, why)
        self._num_open -= 1
        self._pool.end(episode.place)
        group, scorings = self._groups[episode.draw.number], self.scorings
        if episode.fault is None:
            request = reward_request(self._own.prompts[episode.draw.prompt], episode)
            scorings[episode.draw.number, episode.index] = self._own.scorer.submit(request)
        if all(each.is_over for each in group):
            keys = [(each.draw.number, each.index) for each in group]
            self._own.scorer.begin([scorings[key] for key in keys if key in scorings])
