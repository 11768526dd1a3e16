"""The embedded engine: generation on the trainer's own module, with continuous batching over a key-value cache.

Owns: the passes of the model and what becomes of their logits. Refuses to know: text (but for stop strings), rewards,
losses, who changes the weights. Always holds: weights are never copied; one pass a step computes the next token of every
running sample and the prompts that start; a sample's tokens depend on its prompt, seed and parameters, not on what else
runs; when ``generate`` ends or is closed, the cache is freed and the module is in the mode it was in.

Legend: T tokens of a pass, N rows that get a token, D hidden, V vocabulary.
"""

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from meshloom.rollout.embedded_verbs import EmbeddedVerbs, logits_not_finite
from meshloom.rollout.endings import Decision
from meshloom.rollout.feed import RequestFeed, wait_for_requests, with_largest
from meshloom.rollout.kv_cache import Bank, CacheShape, KVCache, quarter_of_free_bytes, single_sequence_bytes
from meshloom.rollout.layouts import BankDecode, DecodeLayout, MixedLayout, PrefillLayout
from meshloom.rollout.peers import Peers
from meshloom.rollout.protocol import Completion, FinishReason, Request
from meshloom.rollout.requests import check_requests, kv_tokens, require_fit
from meshloom.rollout.sampling import Rows, draw
from meshloom.rollout.scheduler import Admission, Prefill, Sample, Scheduler
from meshloom.rollout.stopping import Decode, StopRule
from meshloom.train.attention import AttentionLayout
from meshloom.train.head import OutputHead, decoder_of, plain_model
from meshloom.train.threads import is_small, one_thread


class TorchEngine(EmbeddedVerbs):
    """An engine on a transformers model that attends through layouts (``meshloom.train.attention.use_layouts``).

    Args:
        model: the causal language model, or one in a peft wrapper. It may be trained between calls of ``generate``.
        eos_ids: tokens that end a sample.
        max_sequences: sequences decoded at once.
        kv_cache_bytes: hard bound on the bytes of keys and values; default: a quarter of the memory free now.
        prefill_tokens: prompt tokens computed in one pass; a longer prompt is alone in its pass.
        decode: from token ids to text, for stop strings.
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
        peers: Peers | None = None,
    ) -> None:
        super().__init__(peers)
        self._model, self._decoder, self._head = model, decoder_of(model), OutputHead(model)
        self._shape = CacheShape.of(plain_model(model), self._peers.count)
        self._small = self._shape.device.type == "cpu" and is_small(model)
        self._vocabulary = vocabulary_of(model, self._peers)
        self._eos_ids, self._decode = eos_ids, decode
        self._max_sequences, self._prefill_tokens = max_sequences, prefill_tokens
        self.kv_cache_bytes = kv_cache_bytes or self._peers.least(quarter_of_free_bytes(self._shape.device))
        self._drawn = 0
        self._scheduler: Scheduler | None = None
        self._sampled: list[Sample] = []
        self._rows: Rows | None = None

    def generate(
        self, requests: Sequence[Request], *, deadline_s: float, feed: RequestFeed | None = None
    ) -> Iterator[Completion]:
        """Yield each sample as it finishes. After ``deadline_s`` seconds the rest come with ``FinishReason.DEADLINE``.

        Closing the iterator early frees everything. Between two samples the module is in its own mode.

        Raises:
            UserError: if a request can never fit the cache, or has stop strings and the engine no ``decode``.
            ValueError: if a request is malformed.
            RuntimeError: if the engine sleeps or is generating already.
            RunFault: if the model gives logits that are not finite.
        """
        self._require_awake()
        self._check(with_largest(requests, feed))
        self._ends.clear()
        return self._generate(requests, time.monotonic() + deadline_s, feed)

    @property
    def _current(self) -> Scheduler | None:
        return self._scheduler

    def _generate(self, requests: Sequence[Request], deadline: float, feed: RequestFeed | None) -> Iterator[Completion]:
        if self._scheduler is not None:
            raise RuntimeError("the engine is generating already; finish or close that iterator first")
        sized = with_largest(requests, feed)
        longest = max((kv_tokens(request) for request in sized), default=1)
        count = min(self._max_sequences, sum(len(request.seeds) for request in sized))
        cache = KVCache(self._shape, budget_bytes=self.kv_cache_bytes, longest=longest, max_sequences=count)
        scheduler = Scheduler(cache, max_sequences=self._max_sequences, prefill_tokens=self._prefill_tokens)
        self._scheduler = scheduler
        try:
            self._submit(scheduler, requests)
            while scheduler.has_work or wait_for_requests(feed, deadline):
                finished = self._advance(scheduler, deadline, feed)
                if not scheduler.has_work and (feed is None or feed.is_exhausted):
                    self._release(scheduler)
                yield from [sample.completion() for sample in finished]
        finally:
            self._release(scheduler)

    def _submit(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        for request in requests:
            rule = StopRule.of(request.params, self._eos_ids, self._decode)
            samples = [Sample(request, index, rule) for index in range(len(request.seeds))]
            scheduler.submit(list(request.prompt_ids), samples)

    def _release(self, scheduler: Scheduler) -> None:
        """Forget a generation's state, before its last samples are handed out or when its iterator is closed."""
        if self._scheduler is scheduler:
            scheduler.cache.kept.clear()
            self._scheduler, self._sampled, self._rows = None, [], None

    def _advance(self, scheduler: Scheduler, deadline: float, feed: RequestFeed | None) -> list[Sample]:
        """Run passes until samples finish, or nothing runs."""
        with evaluation(self._model), torch.inference_mode(), one_thread(self._small):
            while True:
                # Before the feed is looked at: what was put there and then aborted is among what is taken.
                found = self._peers.follow(self._to_end(is_over=time.monotonic() >= deadline), self._drawn)
                if feed is not None and feed.has_requests:
                    later = feed.take()
                    self._check(later)
                    self._submit(scheduler, later)
                if not scheduler.has_work:
                    return []
                ended = self._interrupted(scheduler, found) or self._step(scheduler)
                if ended:
                    return ended

    def _interrupted(self, scheduler: Scheduler, found: Decision) -> list[Sample]:
        """End what was aborted, and everything once the deadline is over."""
        ended: list[Sample] = []
        if aborted := found.ended(scheduler.unbegun()):
            ended += scheduler.end(lambda sample: sample.request.id in aborted, FinishReason.ABORTED)
        if found.is_over:
            ended += scheduler.end(lambda sample: True, FinishReason.DEADLINE)
        return ended

    def _step(self, scheduler: Scheduler) -> list[Sample]:
        """One pass: a token for every running sample and for those that start. Returns the samples that it finished."""
        scheduler.make_room()
        running = [(bank, len(bank.owners)) for bank in scheduler.cache.banks if bank.owners]
        samples = [sample for bank, count in running for sample in bank.owners[:count]]
        admission = scheduler.admit()
        if not samples and not admission.prefills and not admission.resumed:
            raise RuntimeError("no sample can run, although each was checked to fit the cache alone")
        logits_NV = self._logits(samples, running, admission.prefills)
        scheduler.keep_prompts(admission.prefills)
        for prefill in admission.prefills:
            self.count_prompt(len(prefill.new_ids), prefill.start)
        logits_NV, samples = _join(logits_NV, samples, admission)
        for bank, count in running:
            bank.lengths[:count] += 1
        finished = self._draw(logits_NV, samples)
        if finished:
            scheduler.sweep()
        return finished

    def _logits(self, samples: list[Sample], running: list[tuple[Bank, int]], prefills: list[Prefill]) -> Tensor | None:
        """Logits of the running samples and then of the prompts' last tokens; none if there is nothing to compute."""
        if not samples and not prefills:
            return None
        prompts = [prefill.new_ids for prefill in prefills]
        ids = [sample.ids[-1] for sample in samples]
        ids.extend(chain.from_iterable(prompts))
        places = [bank.lengths[:count] for bank, count in running]
        places += [np.arange(prefill.start, len(prefill.pending.ids)) for prefill in prefills]
        device = self._shape.device
        hidden_TD = self._decoder(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.from_numpy(np.concatenate(places)).to(device)[None],
            layout=_layout(running, prefills, len(samples)),
            use_cache=False,
        ).last_hidden_state[0]
        if prompts:
            ends = np.cumsum([len(prompt) for prompt in prompts]) + (len(samples) - 1)
            rows = np.concatenate([np.arange(len(samples)), ends])
            hidden_TD = hidden_TD[torch.from_numpy(rows).to(device)]
        return self._peers.whole(self._head.logits(hidden_TD))

    def _draw(self, logits_NV: Tensor, samples: list[Sample]) -> list[Sample]:
        """Draw a token for every sample and hand it on; the one place that waits for the device."""
        if samples != self._sampled:
            params = [sample.params for sample in samples]
            seeds = [sample.request.seeds[sample.index] for sample in samples]
            self._sampled, self._rows = samples, Rows.of(params, seeds, self._shape.device)
        positions = np.array([len(sample.ids) for sample in samples])
        tokens, logprobs = torch.stack([x.double() for x in draw(logits_NV, self._rows, positions)]).tolist()
        if not np.isfinite(logprobs).all():
            raise logits_not_finite(self.version)
        version, self._drawn = self.version, zlib.crc32(np.array(tokens, dtype=np.int64).tobytes())
        for sample, token, logprob in zip(samples, tokens, logprobs, strict=True):
            sample.append(int(token), logprob, version)
        return [sample for sample in samples if sample.finish is not None]

    def _check(self, requests: Sequence[Request]) -> None:
        check_requests(requests, vocabulary=self._vocabulary, can_decode=self._decode is not None)
        if requests:
            require_fit(
                requests,
                needed_bytes=single_sequence_bytes(self._shape, max(map(kv_tokens, requests))),
                cache_bytes=self.kv_cache_bytes,
                bytes_per_token=self._shape.bytes_per_token,
            )


def vocabulary_of(model: nn.Module, peers: Peers) -> int:
    """Tokens of a model that peers hold together."""
    rows = len(plain_model(model).get_input_embeddings().weight)
    return rows if peers.part is None else rows * peers.count


def _layout(running: list[tuple[Bank, int]], prefills: list[Prefill], num_running: int) -> AttentionLayout:
    decode = DecodeLayout([BankDecode(bank, count) for bank, count in running])
    if not prefills:
        return decode
    lengths, starts = [len(p.pending.ids) for p in prefills], [p.start for p in prefills]
    prefill = PrefillLayout(lengths, starts, [p.spans for p in prefills])
    return MixedLayout(decode, prefill, num_running) if running else prefill


def _join(logits_NV: Tensor | None, running: list[Sample], admission: Admission) -> tuple[Tensor, list[Sample]]:
    """One row of logits a sample: running ones, those of new prompts (a prompt's row for each), those resumed."""
    samples = list(running)
    rows = list(range(len(running)))
    for place, prefill in enumerate(admission.prefills, start=len(running)):
        if prefill.pending.parked is not None:
            prefill.pending.logits = logits_NV[place].clone()
        rows += [place] * len(prefill.samples)
        samples += prefill.samples
    if len(rows) != len(running):
        logits_NV = logits_NV[torch.tensor(rows, device=logits_NV.device)]
    parts = [] if logits_NV is None else [logits_NV]
    for pending, resumed in admission.resumed:
        parts.append(pending.logits.expand(len(resumed), -1))
        samples += resumed
    return torch.cat(parts) if admission.resumed else logits_NV, samples


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """The module without dropout and checkpointing, and each part back in its own mode after."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
