"""The embedded engine on a GPU: many decode steps ahead without the host, over pages of keys and values.

Owns: one generation from requests to samples. Refuses to know: text (but for stop strings), rewards, losses, who changes
the weights. Always holds: weights are the trainer's own, never copied; a sample's tokens depend on its prompt, seed and
parameters; the processor works per sample and per round of steps, never per token; the pages are freed when ``generate``
ends or is closed.
"""

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshloom.rollout.decode_stack import DecodeStack, form_of
from meshloom.rollout.embedded_verbs import EmbeddedVerbs, logits_not_finite
from meshloom.rollout.endings import Decision
from meshloom.rollout.feed import RequestFeed, wait_for_requests, with_largest
from meshloom.rollout.kv_cache import CacheShape
from meshloom.rollout.page_memory import settle, spare_bytes, take_pages
from meshloom.rollout.paged_ops import Ops, TorchOps
from meshloom.rollout.paged_prompts import prepare
from meshloom.rollout.paged_scheduler import PagedScheduler, Running
from meshloom.rollout.pages import Pages
from meshloom.rollout.peers import Peers
from meshloom.rollout.protocol import Completion, FinishReason, Request
from meshloom.rollout.requests import check_requests, kv_tokens, require_fit
from meshloom.rollout.scheduler import Sample
from meshloom.rollout.slot_state import Field, Finish
from meshloom.rollout.step_runner import SlotSizes, StepRunner
from meshloom.rollout.stopping import Decode, StopRule
from meshloom.rollout.torch_engine import evaluation, vocabulary_of
from meshloom.train.head import OutputHead, plain_model

_FEWEST_STEPS = 4
_REASONS = {Finish.STOP: FinishReason.STOP, Finish.LENGTH: FinishReason.LENGTH}


class PagedEngine(EmbeddedVerbs):
    """An engine on a model that ``decode_stack.reason_against`` has nothing against.

    Args:
        model: the causal language model, or one in a peft wrapper. It may be trained between calls of ``generate``. Its
            matrices that read the same input are laid side by side; they stay the same parameters.
        eos_ids: tokens that end a sample.
        max_sequences: sequences decoded at once.
        kv_cache_bytes: hard bound on the bytes of keys and values; default: nine tenths of what is free when it generates.
        prefill_tokens: prompt tokens computed in one pass; a longer prompt is alone in its pass.
        decode: from token ids to text, for stop strings.
        page: tokens of a page, a power of two of at least 16.
        steps_ahead: decode steps between two looks at what has finished.
        peers: devices that hold the model together; all of them are called alike.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_ids: tuple[int, ...],
        max_sequences: int = 512,
        kv_cache_bytes: int | None = None,
        prefill_tokens: int = 8192,
        decode: Decode | None = None,
        page: int = 64,
        steps_ahead: int = 16,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(peers)
        self._model, self._head = model, OutputHead(model)
        self._shape = CacheShape.of(plain_model(model), self._peers.count)
        self._vocabulary = vocabulary_of(model, self._peers)
        self._eos_ids, self._decode = eos_ids, decode
        self._max_sequences, self._prefill_tokens = max_sequences, prefill_tokens
        self._kv_cache_bytes, self._page, self._steps_ahead = kv_cache_bytes, page, steps_ahead
        self._ops = _ops(self._shape.device)
        self._runner: StepRunner | None = None
        self._form: tuple[Any, ...] = ()
        self._generation: _Generation | None = None
        self._has_generated = False

    def generate(
        self, requests: Sequence[Request], *, deadline_s: float, feed: RequestFeed | None = None
    ) -> Iterator[Completion]:
        """Yield each sample as it finishes. After ``deadline_s`` seconds the rest come with ``FinishReason.DEADLINE``.

        Closing the iterator early frees everything.

        Raises:
            UserError: if a request can never fit the cache, or has stop strings and the engine no ``decode``.
            ValueError: if a request is malformed.
            RuntimeError: if the engine sleeps or is generating already.
            RunFault: if the model gives logits that are not finite.
        """
        self._require_awake()
        self._ends.clear()
        sized = with_largest(requests, feed)
        self.check(sized)
        if sized:
            require_fit(
                sized,
                needed_bytes=-(-max(map(kv_tokens, sized)) // self._page) * self._page_bytes,
                cache_bytes=self._cache_bytes(sized),
                bytes_per_token=self._shape.bytes_per_token,
            )
        return self._generate(requests, time.monotonic() + deadline_s, feed)

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse malformed requests."""
        check_requests(requests, vocabulary=self._vocabulary, can_decode=self._decode is not None)

    @property
    def _current(self) -> PagedScheduler | None:
        return None if self._generation is None else self._generation.scheduler

    @property
    def _page_bytes(self) -> int:
        return self._page * self._shape.bytes_per_token

    def _cache_bytes(self, requests: Sequence[Request]) -> int:
        """Bytes the cache may take now, beside the logits of a step."""
        if self._kv_cache_bytes is not None:
            return self._kv_cache_bytes
        logits = (2 if self._peers.part is None else 4) * self._num_slots(requests) * self._vocabulary * 4
        return self._peers.least(spare_bytes(self._shape.device, beside=logits))

    def _num_slots(self, requests: Sequence[Request]) -> int:
        return min(self._max_sequences, sum(len(request.seeds) for request in requests))

    def _generate(self, requests: Sequence[Request], deadline: float, feed: RequestFeed | None) -> Iterator[Completion]:
        if self._generation is not None:
            raise RuntimeError("the engine is generating already; finish or close that iterator first")
        if not requests and feed is None:
            return
        with torch.no_grad():
            generation = _Generation(self, requests, deadline, feed)
        self._generation = generation
        try:
            while generation.scheduler.has_work or wait_for_requests(feed, deadline):
                finished = generation.advance()
                if not generation.scheduler.has_work and (feed is None or feed.is_exhausted):
                    self._release(generation)
                yield from [sample.completion() for sample in finished]
        finally:
            self._release(generation)

    def _release(self, generation: "_Generation") -> None:
        """Give up the pages, before the last samples are handed out or when the iterator is closed."""
        if self._generation is generation:
            self._generation = None
            generation.runner.use_pool([])
            if not self._has_generated:
                self._has_generated = True
                settle(self._shape.device)

    def runner(self, requests: Sequence[Request], rules: Sequence[Sequence[int]]) -> StepRunner:
        """Buffers and graphs large enough for some requests: those there are, or new ones if the weights have moved."""
        longest = max(map(kv_tokens, requests))
        needed = SlotSizes(
            slots=self._num_slots(requests),
            pages=-(-longest // self._page) + 1,
            response=max(request.params.max_tokens for request in requests),
            rules=len(rules),
            stops=_power_of_two(max(map(len, rules))),
        )
        runner = self._runner
        stays = runner is not None and runner.sizes.holds(needed) and form_of(self._model) == self._form
        # A graph that is recorded runs a step, which all peers must do.
        if not self._peers.least(stays):
            sizes = needed if runner is None else needed.join(runner.sizes)
            self._runner = runner = None  # what the old one holds makes room for the new one
            stack = DecodeStack(self._model, self._ops, self._page, self._peers)
            stack.bind(sizes.pages * self._page)
            self._form = form_of(self._model)
            self._runner = runner = StepRunner(stack, self._head, self._ops, self._shape.device, sizes)
        runner.host.clear()
        runner.set_rules(rules)
        return runner

    def new_pages(self, requests: Sequence[Request]) -> tuple[Pages, list[Tensor]]:
        """Pages for some requests, as many as they can use and the memory allows."""
        longest = -(-max(map(kv_tokens, requests)) // self._page)
        # Samples that wait for what comes behind them have pages as well, where these are kept.
        samples = sum(len(request.seeds) for request in requests)
        sequences = samples if any(request.keep for request in requests) else self._num_slots(requests)
        useful = (sequences + 2) * (longest + 1)
        wanted = min(self._cache_bytes(requests) // self._page_bytes, useful)
        layers = take_pages(self._shape, self._page, wanted=wanted, fewest=longest)
        return Pages(self._peers.least(len(layers[0])), self._page), layers

    def decided(self, *, is_over: bool, drawn: int) -> Decision:
        """What ends now: all of it, or requests that were aborted since the last time. Arguments as ``Peers.follow``."""
        return self._peers.follow(self._to_end(is_over=is_over), drawn)

    @property
    def options(self) -> tuple[int, int, int]:
        """Sequences at once, prompt tokens in a pass, steps ahead."""
        return self._max_sequences, self._prefill_tokens, self._steps_ahead

    def rule(self, request: Request) -> StopRule:
        return StopRule.of(request.params, self._eos_ids, self._decode)

    def evaluating(self, stack: DecodeStack):
        """The module's own layers are called only where there are adapters; their dropout must be off."""
        return evaluation(self._model) if stack.calls_modules else nullcontext()


class _Generation:
    """One call of ``generate``."""

    def __init__(
        self, engine: PagedEngine, requests: Sequence[Request], deadline: float, feed: RequestFeed | None
    ) -> None:
        self._engine, self._deadline, self._feed = engine, deadline, feed
        sized = with_largest(requests, feed)
        stops = dict.fromkeys(engine.rule(request).ids for request in sized)
        places = {ids: place for place, ids in enumerate(stops)}
        self.runner = engine.runner(sized, [sorted(ids) for ids in stops])
        max_sequences, prefill_tokens, self._steps_ahead = engine.options
        pages, layers = engine.new_pages(sized)
        self.runner.use_pool(layers)
        self.scheduler = PagedScheduler(
            pages,
            self.runner.host,
            max_sequences=min(max_sequences, self.runner.sizes.slots),
            prefill_tokens=prefill_tokens,
            rule_of=lambda sample: places[sample.stop.ids],
            counted=engine.count_prompt,
        )
        self._submit(requests)

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            rule = self._engine.rule(request)
            samples = [Sample(request, index, rule) for index in range(len(request.seeds))]
            self.scheduler.submit(list(request.prompt_ids), samples)

    def advance(self) -> list[Sample]:
        """Run steps until samples finish, or nothing runs."""
        with torch.no_grad(), self._engine.evaluating(self.runner.stack):
            while True:
                # Before the feed is looked at: what was put there and then aborted is among what is taken.
                found = self._decided()
                if self._feed is not None and self._feed.has_requests:
                    later = self._feed.take()
                    self._engine.check(later)
                    self._submit(later)
                if not self.scheduler.has_work:
                    return []
                if ended := self._interrupted(found) or self._round():
                    return ended

    def _decided(self) -> Decision:
        """What ends now."""
        now = self.runner.host.state[:, : len(self.scheduler.running)]
        return self._engine.decided(is_over=time.monotonic() >= self._deadline, drawn=zlib.crc32(now.tobytes()))

    def _interrupted(self, found: Decision) -> list[Sample]:
        """End what was aborted, and everything once the deadline is over."""
        ended: list[Sample] = []
        if aborted := found.ended(self.scheduler.unbegun()):
            ended += self._end(aborted, FinishReason.ABORTED)
        if found.is_over:
            ended += self._end(None, FinishReason.DEADLINE)
        return ended

    def _end(self, request_ids: frozenset[int] | None, reason: FinishReason) -> list[Sample]:
        def applies(sample: Sample) -> bool:
            return request_ids is None or sample.request.id in request_ids

        running = [running for running in self.scheduler.running if applies(running.sample)]
        self._collect(running)
        for one in running:
            one.sample.finish = reason
        self.scheduler.remove(running)
        return [one.sample for one in running] + self.scheduler.end_waiting(applies, reason)

    def _round(self) -> list[Sample]:
        """Start what can start, run steps ahead, and see which samples they finished."""
        scheduler, host = self.scheduler, self.runner.host
        while todo := scheduler.admit():
            prepare(self.runner, todo)
        running = scheduler.running
        if not running:
            raise RuntimeError("no sample can run, although each was checked to fit the cache alone")
        steps, back = scheduler.reserve(self._steps())
        if back:
            self._collect(back)
            scheduler.set_back(back)
            return []
        self._mark(running)
        self.runner.run(len(running), steps, filtered=any(_filters(one.sample) for one in running))
        finish = host.state[Field.FINISH, : len(running)]
        watched = [one for one, code in zip(running, finish, strict=True) if code or one.sample.stop.strings]
        self._collect(watched, codes={id(one): Finish(code) for one, code in zip(running, finish, strict=True) if code})
        done = [one for one in watched if one.sample.finish is not None]
        scheduler.remove(done)
        return [one.sample for one in done]

    def _steps(self) -> int:
        """Steps ahead; fewer if a sample is known to end before, for then its slot is wanted."""
        state = self.runner.host.state[:, : len(self.scheduler.running)]
        left = int((state[Field.LIMIT] - state[Field.COUNT]).min())
        return min(self._steps_ahead, max(left, _FEWEST_STEPS), int((state[Field.LIMIT] - state[Field.COUNT]).max()))

    def _mark(self, running: Sequence[Running]) -> None:
        version, counts = self._engine.version, self.runner.host.state[Field.COUNT]
        for one, count in zip(running, counts, strict=False):
            if not one.marks or one.marks[-1][1] != version:
                one.marks.append((int(count), version))

    def _collect(self, chosen: Sequence[Running], codes: dict[int, Finish] | None = None) -> None:
        """Take what samples have drawn since they were last looked at."""
        codes = codes or {}
        slot_of = {id(one): slot for slot, one in enumerate(self.scheduler.running)}
        counts = [int(self.runner.host.state[Field.COUNT, slot_of[id(one)]]) for one in chosen]
        first, end = min((len(one.sample.ids) for one in chosen), default=0), max(counts, default=0)
        if end == first:
            return
        ids, logprobs = self.runner.outputs([one.row for one in chosen], first, end)
        for one, count, row_ids, row_logprobs in zip(chosen, counts, ids, logprobs, strict=True):
            sample = one.sample
            start = len(sample.ids)
            drawn, new = row_ids[start - first : count - first].tolist(), row_logprobs[start - first : count - first]
            if not np.isfinite(new).all():
                raise logits_not_finite(self._engine.version)
            versions = _versions(one.marks, start, count)
            if sample.stop.strings:
                for token, logprob, version in zip(drawn, new.tolist(), versions, strict=True):
                    sample.append(token, logprob, version)
                    if sample.finish is not None:
                        break
            else:
                sample.ids += drawn
                sample.logprobs += new.tolist()
                sample.versions += versions
                if (code := codes.get(id(one))) is not None:
                    sample.finish = _REASONS[code]


def _ops(device: torch.device) -> Ops:
    if device.type != "cuda":
        return TorchOps()
    from meshloom.rollout.triton_ops import TritonOps  # Triton comes with torch where there is a GPU

    return TritonOps(device)


def _filters(sample: Sample) -> bool:
    params = sample.params
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _versions(marks: Sequence[tuple[int, int]], start: int, stop: int) -> list[int]:
    """Version of each token from ``start`` to ``stop`` − 1."""
    ends = [count for count, _ in marks[1:]] + [stop]
    versions = []
    for (begin, version), end in zip(marks, ends, strict=True):
        versions += [version] * (min(end, stop) - max(begin, start))
    return versions


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
