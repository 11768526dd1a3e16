"""Who runs in the paged engine: admission by pages, sharing of prompts, making room.

Owns: the queue, the pages of every sequence, the columns of the host's state. Refuses to know: models, devices, how tokens
are drawn. Always holds: running sequences are the first slots; a prompt is computed once for all samples of its request
(again only if memory ran out); samples start in the order they came; the oldest running sample is never set back, and
after room was made a step runs, so all of them finish.

A sequence's last known token is not computed when it starts: the first decode step does that, and draws the next one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from meshloom.rollout.pages import Pages
from meshloom.rollout.protocol import FinishReason
from meshloom.rollout.requests import kv_tokens
from meshloom.rollout.sampling import seed_keys
from meshloom.rollout.scheduler import Sample
from meshloom.rollout.slot_state import Field, Finish, Number
from meshloom.rollout.step_runner import HostSlots


@dataclass(eq=False)
class Waiting:
    """Samples that wait for a slot and share the tokens they start from: the prompt, and what one that was set back had.

    When only some could start, the rest find all but the last token in ``pages``.
    """

    ids: list[int]
    samples: deque[Sample]
    pages: list[int] | None = None


@dataclass(eq=False)
class Running:
    """A sample in a slot. ``marks`` are the counts of tokens at which a version of the weights took over."""

    sample: Sample
    pages: list[int]
    row: int
    turn: int
    rule: int
    marks: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Pass:
    """What is to be done before the next steps: pages copied first, prompts computed, pages copied then."""

    before: list[tuple[int, int]] = field(default_factory=list)
    prompts: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Tokens to compute and the pages they go to."""
    after: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.before or self.prompts or self.after)


class PagedScheduler:
    """Admits, sets back and removes samples.

    Args:
        pages: of the cache.
        host: columns of the running samples.
        max_sequences: samples at once.
        prefill_tokens: prompt tokens computed in one pass; a longer prompt is alone in its pass.
        rule_of: number of a sample's set of stop tokens.
    """

    def __init__(
        self,
        pages: Pages,
        host: HostSlots,
        *,
        max_sequences: int,
        prefill_tokens: int,
        rule_of: Callable[[Sample], int],
    ) -> None:
        self.running: list[Running] = []
        self._pages, self._host, self._rule_of = pages, host, rule_of
        self._max_sequences, self._prefill_tokens = max_sequences, prefill_tokens
        self._queue: deque[Waiting] = deque()
        self._rows = list(range(max_sequences - 1, -1, -1))
        self._turn = 0

    def submit(self, ids: list[int], samples: Iterable[Sample]) -> None:
        self._queue.append(Waiting(ids, deque(samples)))

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self.running)

    def admit(self) -> Pass:
        """Start waiting samples while there are slots, pages and room in the pass."""
        todo = Pass()
        while self._queue and len(self.running) < self._max_sequences:
            waiting = self._queue[0]
            new_tokens = len(waiting.ids) - 1 if waiting.pages is None else 0
            if todo.prompts and todo.num_tokens + new_tokens > self._prefill_tokens:
                break
            count = self._how_many(waiting)
            if not count:
                if not self.running and self.forget_prompts():
                    continue
                break
            self._start(waiting, count, todo)
            todo.num_tokens += new_tokens
            if waiting.samples:
                break
            self._queue.popleft()
        return todo

    def _how_many(self, waiting: Waiting) -> int:
        """Samples that can start now; running ones are left a page each to grow into."""
        tokens = len(waiting.ids) - 1
        shared = tokens // self._pages.size if waiting.pages is None else 0
        count = min(len(waiting.samples), self._max_sequences - len(self.running))
        while count and shared + count + len(self.running) > self._pages.num_free:
            count //= 2
        return count

    def _start(self, waiting: Waiting, count: int, todo: Pass) -> None:
        """Give samples slots. The first of a new prompt has the pages it is computed in; the others share the whole ones, and
        copy the last, which each writes to."""
        whole, tail = divmod(len(waiting.ids) - 1, self._pages.size)
        computed = waiting.pages
        samples = [waiting.samples.popleft() for _ in range(count)]
        first = computed if computed is not None else self._pages.take(whole + bool(tail))
        copies = todo.before if computed is not None else todo.after
        if computed is None and first:
            todo.prompts.append((waiting.ids[:-1], first))

        def another() -> list[int]:
            self._pages.share(first[:whole])
            own = self._pages.take(bool(tail))
            copies.extend((first[whole], page) for page in own)
            return [*first[:whole], *own]

        for number, sample in enumerate(samples):
            self._place(sample, waiting.ids, first if computed is None and number == 0 else another())
        if computed is None and waiting.samples and self._pages.num_free > len(self.running):
            waiting.pages = another()
        elif computed is not None and not waiting.samples:
            self._drop(waiting)

    def _place(self, sample: Sample, ids: list[int], pages: list[int]) -> None:
        """Give a sample the next slot."""
        slot, params = len(self.running), sample.request.params
        sample.turn, self._turn = self._turn, self._turn + 1
        running = Running(sample, pages, self._rows.pop(), sample.turn, self._rule_of(sample))
        self.running.append(running)
        state, numbers = self._host.state[:, slot], self._host.numbers[:, slot]
        state[Field.TOKEN], state[Field.LENGTH] = ids[-1], len(ids) - 1
        state[Field.COUNT], state[Field.LIMIT] = len(sample.ids), params.max_tokens
        state[Field.FINISH], state[Field.ROW], state[Field.RULE] = Finish.RUNNING, running.row, running.rule
        state[Field.KEY] = seed_keys([sample.request.seeds[sample.index]]).view("int64")[0]
        state[Field.TOP_K] = min(params.top_k, 2**31 - 1)
        numbers[Number.TEMPERATURE], numbers[Number.TOP_P] = params.temperature, params.top_p
        numbers[Number.MIN_P] = params.min_p
        self._host.table[slot, : len(pages)] = pages

    def reserve(self, steps: int) -> tuple[int, list[Running]]:
        """Pages for so many steps of all running samples.

        Returns:
            Steps that there is room for, at least one; and samples to set back first, the youngest, whose outputs the
            caller collects before ``set_back``.
        """
        missing = self._missing(steps)
        if sum(missing) > self._pages.num_free:
            self.forget_prompts()
        if sum(missing) > self._pages.num_free:
            steps, missing = 1, self._missing(1)
        back: list[Running] = []
        freed = self._pages.num_free
        order = sorted(self.running, key=lambda running: -running.turn)
        lacking = {id(running): count for running, count in zip(self.running, missing, strict=True)}
        while sum(lacking.values()) > freed:
            youngest = order[len(back)]
            back.append(youngest)
            freed += self._pages.num_freed_by(youngest.pages)
            del lacking[id(youngest)]
        if not back:
            self._grow(missing)
        return steps, back

    def _missing(self, steps: int) -> list[int]:
        lengths = self._host.state[Field.LENGTH, : len(self.running)].tolist()
        return [
            max(0, self._pages.needed(min(length + steps, kv_tokens(running.sample.request))) - len(running.pages))
            for running, length in zip(self.running, lengths, strict=True)
        ]

    def _grow(self, missing: Sequence[int]) -> None:
        for slot, (running, count) in enumerate(zip(self.running, missing, strict=True)):
            if count:
                at = len(running.pages)
                running.pages += self._pages.take(count)
                self._host.table[slot, at : at + count] = running.pages[at:]

    def set_back(self, back: Sequence[Running]) -> None:
        """Take samples out of their slots and put them first in the queue, the oldest of them first."""
        self.remove(back)
        for running in back:
            sample = running.sample
            self._queue.appendleft(Waiting([*sample.request.prompt_ids, *sample.ids], deque([sample])))

    def remove(self, gone: Iterable[Running]) -> None:
        """Free the slots and pages of samples; the last ones move into the holes."""
        for running in gone:
            slot, last = self.running.index(running), len(self.running) - 1
            self._pages.release(running.pages)
            self._rows.append(running.row)
            self._host.state[Field.FINISH, slot] = Finish.EMPTY
            if slot != last:
                self._host.move(last, slot)
                self.running[slot] = self.running[last]
            self.running.pop()

    def end_waiting(self, applies: Callable[[Sample], bool], reason: FinishReason) -> list[Sample]:
        """End waiting samples for which ``applies`` holds."""
        ended = [sample for waiting in self._queue for sample in waiting.samples if applies(sample)]
        for sample in ended:
            sample.finish = reason
        for waiting in list(self._queue):
            waiting.samples = deque(sample for sample in waiting.samples if sample.finish is None)
            if not waiting.samples:
                self._drop(waiting)
                self._queue.remove(waiting)
        return ended

    def unbegun(self) -> set[int]:
        """Requests none of whose samples has begun."""
        whole = (w for w in self._queue if len(w.samples) == len(w.samples[0].request.seeds) and not w.samples[0].ids)
        return {waiting.samples[0].request.id for waiting in whole}

    def forget_prompts(self) -> bool:
        """Drop the prompts that were computed for waiting samples. Whether there were any."""
        kept = [waiting for waiting in self._queue if waiting.pages is not None]
        for waiting in kept:
            self._drop(waiting)
        return bool(kept)

    def _drop(self, waiting: Waiting) -> None:
        if waiting.pages is not None:
            self._pages.release(waiting.pages)
            waiting.pages = None
