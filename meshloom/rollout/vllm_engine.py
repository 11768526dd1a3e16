"""vLLM in a process of the run, stepped by us.

Owns: vLLM's steps, what becomes of its outputs, its sleep, and when it gets new weights. Refuses to know: text (but for stop
strings), rewards, losses, how weights are moved. Always holds: nothing is generated with weights that were never moved
here; tokens and log-probs are vLLM's own, never made again from text; when ``generate`` ends or is closed, nothing is left
in vLLM; the random states of this process stay as they are.

Its prefix cache is keyed by the weights' version, so that a prompt computed with older weights is never met again.
"""

import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol

import torch

from meshloom.rollout.endings import Decision, HearsEnds
from meshloom.rollout.feed import RequestFeed, wait_for_requests, with_largest
from meshloom.rollout.protocol import Completion, FinishReason, PromptCount, Request
from meshloom.rollout.requests import check_requests
from meshloom.rollout.stopping import Decode, StopRule
from meshloom.rollout.vllm_build import OpenVllm, VllmReceiver
from meshloom.rollout.vllm_requests import RunningSample, finish_reason, require_possible, token_logprobs, vllm_params
from meshloom.rollout.vllm_samples import SamplesAtWork

_STEPS_PER_LOOK = 8
"""Ranks of one replica agree on what is to end once in so many steps."""

TokenLogprobs = Callable[[Sequence[Sequence[int]]], list[list[float]]]


class WeightsFeed(Protocol):
    """Brings the trainer's weights."""

    def move(self, receiver: VllmReceiver) -> object:
        """Make the engine's weights those of the trainer, and prove that they are."""
        ...

    def prove(self, engine: TokenLogprobs) -> None:
        """Compare log-probabilities that the engine gives with the trainer's."""
        ...


class VllmEngine(HearsEnds):
    """vLLM behind the protocol of engines.

    Args:
        opened: vLLM, which this engine alone may use.
        feed: brings the weights: before the first sample, and at each ``load_weights``.
        eos_ids: tokens that end a sample.
        decode: from token ids to text, for stop strings.

    ``generated_tokens``, ``prompt_tokens`` and ``cached_prompt_tokens`` (those that the prefix cache had) count since the
    start.
    """

    def __init__(
        self, opened: OpenVllm, *, feed: WeightsFeed, eos_ids: tuple[int, ...], decode: Decode | None = None
    ) -> None:
        super().__init__()
        self.version = 0
        self.generated_tokens = self.prompt_tokens = self.cached_prompt_tokens = 0
        self._told = PromptCount()
        self._opened, self._llm, self._receiver, self._feed = opened, opened.llm, VllmReceiver(opened), feed
        self._world, self._looks = opened.options.world, count()
        self._device, self._can_sleep = opened.options.device, opened.options.can_sleep
        self._eos_ids, self._decode = eos_ids, decode
        config = self._llm.vllm_config
        self._vocabulary = config.model_config.get_vocab_size()
        self._longest = config.model_config.max_model_len
        # With asynchronous scheduling one step is under way when another one's tokens arrive.
        self._steps_ahead = int(bool(config.scheduler_config.async_scheduling))
        self._keys = count()
        self._current: SamplesAtWork | None = None
        self._drawn = 0
        self._asleep = False
        self._stale = True
        """Whether the weights in vLLM are not the trainer's: placeholders, or gone in sleep."""

    def generate(
        self, requests: Sequence[Request], *, deadline_s: float, feed: RequestFeed | None = None
    ) -> Iterator[Completion]:
        """Yield each sample as it finishes. After ``deadline_s`` seconds the rest come with ``FinishReason.DEADLINE``.

        Closing the iterator early takes the rest out of vLLM. Before the first sample the weights are moved; the deadline
        waits.

        Raises:
            UserError: if a request can never be answered, or has stop strings and the engine no ``decode``.
            ValueError: if a request is malformed.
            RuntimeError: if the engine sleeps or is generating already.
            RunFault: if the weights do not arrive.
        """
        if self._asleep:
            raise RuntimeError("the engine sleeps; call wake() before generate()")
        self._check(with_largest(requests, feed))
        self._ends.clear()
        return self._generate(requests, time.monotonic() + deadline_s, feed)

    def first_says(self, number: int) -> int:
        """The number of the first of the replica's devices; due on all of them."""
        return number if self._world is None else self._world.first_says(number)

    def load_weights(self, version: int) -> None:
        """Take the trainer's weights; tokens drawn from now on carry ``version``.

        Samples that run go on with the keys and values they have; those yet to start see nothing of the old weights. An
        engine whose memory is given up in sleep takes them when it wakes.

        Raises:
            RunFault: if they do not arrive.
        """
        self.version = version
        if self._asleep and self._can_sleep:
            self._stale = True
            return
        if self._runs:
            self._mark_version(self._current)
        self._take_weights()
        if not self._runs:
            self._feed.prove(self.score)

    def sleep(self) -> None:
        """Give back the memory of weights and cache where vLLM can; refuse to generate until ``wake``.

        Raises:
            RuntimeError: if the engine is generating.
        """
        if self._current is not None:
            raise RuntimeError("the engine is generating; close its iterator before sleep()")
        if self._can_sleep and not self._asleep:
            with self._opened.inside():
                self._llm.sleep(level=2)
            self._stale = True
        self._asleep = True

    def wake(self) -> None:
        """Take the memory back, weights first: they are moved before the cache comes.

        Raises:
            RunFault: if the weights do not arrive.
        """
        if not self._asleep:
            return
        if self._can_sleep:
            torch.cuda.empty_cache()  # vLLM takes memory past torch, which keeps what the trainer has freed
            with self._opened.inside():
                self._llm.wake_up(tags=["weights"])
            self._take_weights()
            with self._opened.inside():
                self._llm.wake_up(tags=["kv_cache"])
        self._asleep = False
        if self._can_sleep:
            self._feed.prove(self.score)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token but the first, given those before it, at temperature 1 and without filters.

        Args:
            sequences: token ids, each at least two.
        """
        from vllm import SamplingParams as VllmParams
        from vllm.inputs import tokens_input

        keys = [f"score-{next(self._keys)}" for _ in sequences]
        params = VllmParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        for key, sequence in zip(keys, sequences, strict=True):
            self._llm.add_request(key, tokens_input(list(sequence), cache_salt=self._salt), params)
        found: dict[str, list[float]] = {}
        with self._inside():
            while self._llm.has_unfinished_requests():
                for output in self._llm.step():
                    if output.finished:
                        ids = output.prompt_token_ids[1:]
                        entries = zip(output.prompt_logprobs[1:], ids, strict=True)
                        found[output.request_id] = [entry[token].logprob for entry, token in entries]
        return [found[key] for key in keys]

    def metrics(self) -> dict[str, int]:
        """What was done since the start."""
        return {
            "generated_tokens": self.generated_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
        }

    def take_prompts(self) -> PromptCount:
        """Tokens of the prompts of samples that have ended since the last call."""
        computed = self.prompt_tokens - self.cached_prompt_tokens
        taken = PromptCount(computed - self._told.computed, self.cached_prompt_tokens - self._told.reused)
        self._told = PromptCount(computed, self.cached_prompt_tokens)
        return taken

    @property
    def _runs(self) -> bool:
        """Whether samples are in vLLM."""
        return self._current is not None and bool(self._current.running)

    @property
    def _salt(self) -> str:
        return f"version {self.version}"

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Where vLLM computes: in its own world, and drawing from this process's generators (besides those of the samples)
        without a trace."""
        devices = [self._device] if self._device.type == "cuda" else []
        with self._opened.inside(), torch.random.fork_rng(devices=devices):
            yield

    def _take_weights(self) -> None:
        with self._inside():
            self._feed.move(self._receiver)
            if not self._runs:
                self._llm.reset_prefix_cache()
        self._stale = False

    def _check(self, requests: Sequence[Request]) -> None:
        check_requests(requests, vocabulary=self._vocabulary, can_decode=self._decode is not None)
        require_possible(requests, longest=self._longest)

    def _generate(self, requests: Sequence[Request], deadline: float, feed: RequestFeed | None) -> Iterator[Completion]:
        if self._current is not None:
            raise RuntimeError("the engine is generating already; finish or close that iterator first")
        if self._stale:
            began = time.monotonic()
            self._take_weights()
            self._feed.prove(self.score)
            deadline += time.monotonic() - began
        # On the processor vLLM forgets the samples' seeds in a step that has greedy ones too.
        samples = SamplesAtWork(kinds_apart=self._device.type == "cpu")
        samples.add(self._samples_of(requests))
        self._current = samples
        try:
            while samples or wait_for_requests(feed, deadline):
                ended = self._advance(samples, deadline, feed)
                if not samples and (feed is None or feed.is_exhausted):
                    self._current = None  # the last samples are handed out by an engine that is free
                yield from [sample.completion(reason) for sample, reason in ended]
        finally:
            self._end(samples)

    def _end(self, samples: SamplesAtWork) -> None:
        """Take what still runs out of vLLM, with the step that is under way, whose memory a sleep would take."""
        self._take_out(list(samples.running))
        with self._opened.inside():
            for _ in range(2 * self._steps_ahead):
                self._llm.step()
        if self._current is samples:
            self._current = None

    def _samples_of(self, requests: Sequence[Request]) -> list[RunningSample]:
        rules = {request.id: StopRule.of(request.params, self._eos_ids, self._decode) for request in requests}
        return [
            RunningSample(request, index, rules[request.id], marks=[(0, self.version)])
            for request in requests
            for index in range(len(request.seeds))
        ]

    def _submit(self, samples: SamplesAtWork, sample: RunningSample) -> None:
        from vllm.inputs import tokens_input

        sample.key, sample.marks = str(next(self._keys)), [(0, self.version)]
        prompt = tokens_input(list(sample.request.prompt_ids), cache_salt=self._salt)
        sample.internal = self._llm.add_request(sample.key, prompt, vllm_params(sample))
        samples.running[sample.key] = sample

    def _advance(
        self, samples: SamplesAtWork, deadline: float, feed: RequestFeed | None
    ) -> list[tuple[RunningSample, FinishReason]]:
        """Step until samples end, which are out of ``samples`` then, or nothing runs."""
        with self._inside():
            while True:
                # Before the feed is looked at: what was put there and then aborted is among what is taken.
                found = self._decided(deadline)
                if feed is not None and feed.has_requests:
                    later = feed.take()
                    self._check(later)
                    samples.add(self._samples_of(later))
                for sample in samples.ready():
                    self._submit(samples, sample)
                if not samples:
                    return []
                ended = self._interrupted(samples, found) or self._step(samples)
                if ended:
                    self.generated_tokens += sum(len(sample.ids) for sample, _ in ended)
                    for sample, _ in ended:
                        self._drawn = zlib.crc32(array("q", sample.ids).tobytes(), self._drawn)
                    return ended

    def _interrupted(self, samples: SamplesAtWork, found: Decision | None) -> list[tuple[RunningSample, FinishReason]]:
        """End what was aborted, what was withdrawn and has not begun, and everything once the deadline is over."""
        if found is None:
            return []
        reason = FinishReason.DEADLINE if found.is_over else FinishReason.ABORTED
        ids = found.aborted
        if found.withdrawn:
            ids = found.ended(samples.unbegun(lambda sample: bool(self._ids_so_far(sample))))
        if not (ids or found.is_over):
            return []
        keys, ended = samples.take(lambda sample: found.is_over or sample.request.id in ids)
        for sample in ended:
            self._read_so_far(sample)
        self._take_out(keys)
        return [(sample, reason) for sample in ended]

    def _decided(self, deadline: float) -> Decision | None:
        """What ends now. Ranks of a replica must end the same samples at the same step: the first one decides, now and then."""
        if self._world is not None and self._world.size > 1 and next(self._looks) % _STEPS_PER_LOOK:
            return None
        found = self._to_end(is_over=time.monotonic() >= deadline)
        return found if self._world is None else self._world.follow(found, self._drawn)

    def _step(self, samples: SamplesAtWork) -> list[tuple[RunningSample, FinishReason]]:
        """One step of vLLM. Returns the samples that it finished."""
        ended = []
        for output in self._llm.step():
            sample, part = samples.running.get(output.request_id), output.outputs[0]
            if sample is None:
                continue
            logprobs = token_logprobs(part.logprobs)
            if sample.streams:
                reason = sample.add(part.token_ids, logprobs)
                if reason is not None and not output.finished:
                    self._take_out([sample.key])
            else:
                sample.ids, sample.logprobs = list(part.token_ids), logprobs
                reason = finish_reason(part.finish_reason)
            if reason is not None:
                self.prompt_tokens += len(sample.request.prompt_ids)
                self.cached_prompt_tokens += output.num_cached_tokens or 0
                ended.append((samples.finished(sample.key), reason))
        return ended

    def _ids_so_far(self, sample: RunningSample) -> Sequence[int]:
        """Tokens of a sample that is not finished."""
        if sample.streams or not sample.key:
            return sample.ids
        return self._llm.output_processor.request_states[sample.internal].detokenizer.output_token_ids

    def _read_so_far(self, sample: RunningSample) -> None:
        """Take the tokens of a sample that is not to be finished."""
        if not sample.streams and sample.key:
            sample.ids = list(self._ids_so_far(sample))
            state = self._llm.output_processor.request_states[sample.internal]
            sample.logprobs = token_logprobs(state.logprobs_processor.logprobs)

    def _mark_version(self, samples: SamplesAtWork) -> None:
        """Samples that have tokens go on and note where the new version begins; those that have none begin anew."""
        for key, sample in list(samples.running.items()):
            self._read_so_far(sample)
            if sample.ids:
                sample.marks.append((len(sample.ids) + self._steps_ahead, self.version))
            else:
                self._take_out([key])
                del samples.running[key]
                self._submit(samples, sample)

    def _take_out(self, keys: list[str]) -> None:
        if keys:
            self._llm.abort_request(keys)
