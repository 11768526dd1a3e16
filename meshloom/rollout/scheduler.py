"""Which samples run: admission by memory, sharing of prompts and of what was kept, making room, and the end of a sample.

Owns: the queue, the slots' owners, and every sample's tokens so far. Refuses to know: the model, how tokens are drawn.
Always holds: a prompt is computed once for all samples of its request (again only if memory ran out); samples start in
the order they came; the oldest running sample is set back only when it is alone, so all of them finish.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from meshloom.rollout.kv_cache import BLOCK_TOKENS, Bank, KVCache, Span
from meshloom.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from meshloom.rollout.stopping import StopRule


@dataclass(eq=False, slots=True)
class Sample:
    """One sample on its way. ``turn`` counts admissions: the highest is the youngest; ``era`` the times that the weights had
    changed by then; ``params`` are its own, the request's or greedy."""

    request: Request
    index: int
    stop: StopRule
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    turn: int = -1
    era: int = 0
    params: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        self.params = self.request.params_of(self.index)

    def append(self, token: int, logprob: float, version: int) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.finish = self.stop.reason(self.ids)

    @property
    def computed(self) -> list[int]:
        """Tokens whose keys and values are there, once it has begun: all but the last."""
        return [*self.request.prompt_ids, *self.ids][:-1]

    def goes_on(self, era: int) -> bool:
        """Whether it has ended and requests will follow that begin with it, and its keys and values are all of an era."""
        return self.request.keep and self.finish is FinishReason.STOP and self.era == era

    def completion(self) -> Completion:
        return Completion(
            request_id=self.request.id,
            index=self.index,
            ids=self.ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish=self.finish,
        )


@dataclass(eq=False)
class Pending:
    """Samples that wait for a slot and share the tokens to compute: the prompt, and what a sample that was set back had.

    When only some could start, the rest find the prompt's keys and values in ``parked`` and its last ``logits`` [V].
    """

    ids: list[int]
    samples: deque[Sample]
    parked: Bank | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class Prefill:
    """A prompt to compute in this pass, from token ``start`` on, where its keys and values go, and the samples that start from
    it."""

    pending: Pending
    spans: list[Span]
    samples: list[Sample]
    start: int

    @property
    def new_ids(self) -> list[int]:
        """Tokens to compute."""
        return self.pending.ids[self.start :]


@dataclass(frozen=True)
class Admission:
    """What starts in this pass: prompts to compute, and samples whose prompt was computed before."""

    prefills: list[Prefill] = field(default_factory=list)
    resumed: list[tuple[Pending, list[Sample]]] = field(default_factory=list)


class Scheduler:
    """Admits, sets back and ends samples over one cache."""

    def __init__(self, cache: KVCache, *, max_sequences: int, prefill_tokens: int) -> None:
        self.cache = cache
        self._max_sequences, self._prefill_tokens = max_sequences, prefill_tokens
        self._queue: deque[Pending] = deque()
        self._turn, self._era = 0, 0

    def submit(self, ids: list[int], samples: Sequence[Sample]) -> None:
        self._queue.append(Pending(ids, deque(samples)))

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self.cache.num_sequences > 0

    def make_room(self) -> None:
        """See that every running sample has room for one more token; set back the youngest while memory is short."""
        while not self.cache.promote():
            if self.cache.parked:
                self._drop_prompts()
                continue
            youngest = max(self.cache.owners, key=lambda sample: sample.turn)
            self.cache.sweep(lambda sample, youngest=youngest: sample is youngest)
            self._queue.appendleft(Pending([*youngest.request.prompt_ids, *youngest.ids], deque([youngest])))

    def admit(self) -> Admission:
        """Start waiting samples while there are slots, memory and room in the pass."""
        admission, tokens = Admission(), 0
        while self._queue and self.cache.num_sequences < self._max_sequences:
            pending = self._queue[0]
            computed = pending.parked is not None
            found = self.cache.kept.find(() if computed else pending.ids[:-1])
            new_tokens = len(pending.ids) - found.num_tokens
            if not computed and admission.prefills and tokens + new_tokens > self._prefill_tokens:
                self.cache.kept.unpin(found.pinned)
                break
            span = self._place(pending)
            if span is None:
                self.cache.kept.unpin(found.pinned)
                if self.cache.num_sequences or not (computed or found.num_tokens):
                    break
                # Alone it fits the cache: what was parked or found for it is in its way.
                self._drop_parked(pending) if computed else self.cache.kept.clear()
                continue
            samples = span.bank.owners[span.start : span.stop]
            if computed:
                self._resume(pending, span)
                admission.resumed.append((pending, samples))
            else:
                spans = [span, *self._park(pending)]
                for each in spans:
                    self.cache.fill(each, found)
                admission.prefills.append(Prefill(pending, spans, samples, found.num_tokens))
                tokens += new_tokens
            self.cache.kept.unpin(found.pinned)
            if pending.samples:
                break
            self._queue.popleft()
        return admission

    def end(self, applies: Callable[[Sample], bool], reason: FinishReason) -> list[Sample]:
        """End waiting and running samples for which ``applies`` holds."""
        waiting = [sample for pending in self._queue for sample in pending.samples]
        ended = [sample for sample in (*self.cache.owners, *waiting) if applies(sample)]
        for sample in ended:
            sample.finish = reason
        for pending in list(self._queue):
            pending.samples = deque(sample for sample in pending.samples if sample.finish is None)
            if not pending.samples:
                self._drop_parked(pending)
                self._queue.remove(pending)
        self.sweep()
        return ended

    def unbegun(self) -> set[int]:
        """Requests none of whose samples has begun."""
        whole = (p for p in self._queue if len(p.samples) == len(p.samples[0].request.seeds) and not p.samples[0].ids)
        return {pending.samples[0].request.id for pending in whole}

    def forget(self) -> None:
        """Keep nothing that was computed until now, but for the samples that run."""
        self._drop_prompts()
        self.cache.kept.clear()
        self._era += 1

    def keep_prompts(self, prefills: Sequence[Prefill]) -> None:
        """Keep whole blocks of prompts that were computed in this pass, where requests will follow that begin with them."""
        for prefill in prefills:
            ids, span = prefill.pending.ids, prefill.spans[0]
            if prefill.samples[0].request.keep:
                self.cache.keep(ids[: len(ids) // BLOCK_TOKENS * BLOCK_TOKENS], span.bank, span.start)

    def sweep(self) -> None:
        """Free the slots of finished samples, and keep what requests will follow of."""
        for bank in self.cache.banks:
            for slot, sample in enumerate(bank.owners):
                if sample.goes_on(self._era):
                    self.cache.keep(sample.computed, bank, slot)
        self.cache.sweep(lambda sample: sample.finish is not None)

    def _drop_prompts(self) -> None:
        """Drop the prompts that were computed for waiting samples."""
        for pending in self._queue:
            self._drop_parked(pending)

    def _place(self, pending: Pending) -> Span | None:
        """Slots for as many of the waiting samples as there are slots and memory."""
        count = min(len(pending.samples), self._max_sequences - self.cache.num_sequences)
        while count:
            chosen = [pending.samples[i] for i in range(count)]
            span = self.cache.place(chosen, len(pending.ids))
            if span is not None:
                for sample in chosen:
                    pending.samples.popleft()
                    sample.turn, self._turn = self._turn, self._turn + 1
                    sample.era = self._era
                return span
            count //= 2
        return None

    def _park(self, pending: Pending) -> list[Span]:
        """Keep the prompt for the samples that could not start, if memory allows."""
        if not pending.samples:
            return []
        pending.parked = self.cache.park(len(pending.ids))
        return [] if pending.parked is None else [Span(pending.parked, 0, 1)]

    def _resume(self, pending: Pending, span: Span) -> None:
        """Copy the parked prompt into the new slots."""
        slots = range(span.start, span.stop)
        span.bank.copy_from(pending.parked, [0] * len(slots), slots)
        if not pending.samples:
            self.cache.unpark(pending.parked)

    def _drop_parked(self, pending: Pending) -> None:
        if pending.parked is not None:
            self.cache.unpark(pending.parked)
            pending.parked, pending.logits = None, None
