"""Who runs in the paged engine: admission by pages, sharing of prompts and of what was kept, making room.

Owns: the queue, the pages of every sequence, the columns of the host's state. Refuses to know: models, devices, how tokens
are drawn. Always holds: running sequences are the first slots; a prompt is computed once for all samples of its request
(again only if memory ran out); samples start in the order they came; the oldest running sample is never set back, and
after room was made a step runs, so all of them finish; a page that is kept is written to by nobody, and given to others
before a sample is set back.

A sequence's last known token is not computed when it starts: the first decode step does that, and draws the next one.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from meshloom.rollout.pages import Pages
from meshloom.rollout.prefix_tree import Found, Node, PrefixTree
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
    nodes: list[Node[int]] = field(default_factory=list)
    """Those of the pages that are kept for others too."""


@dataclass(eq=False)
class Running:
    """A sample in a slot.

    Args:
        sample: of a request.
        pages: that it reads, and writes the last of.
        nodes: those of the pages that are kept for others too.
        row: of the output buffers.
        turn: counts admissions.
        rule: number of its set of stop tokens.
        marks: the counts of tokens at which a version of the weights took over.
    """

    sample: Sample
    pages: list[int]
    nodes: list[Node[int]]
    row: int
    turn: int
    rule: int
    marks: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Prompt:
    """A prompt to compute.

    Args:
        ids: all of its tokens.
        pages: that they go to.
        start: the first that is not there yet.
    """

    ids: list[int]
    pages: list[int]
    start: int


@dataclass
class Pass:
    """What is to be done before the next steps: pages copied first, prompts computed, pages copied then."""

    before: list[tuple[int, int]] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
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
        counted: called with each prompt's tokens to compute, and those that are there.
    """

    def __init__(
        self,
        pages: Pages,
        host: HostSlots,
        *,
        max_sequences: int,
        prefill_tokens: int,
        rule_of: Callable[[Sample], int],
        counted: Callable[[int, int], None],
    ) -> None:
        self.running: list[Running] = []
        self.kept: PrefixTree[int] = PrefixTree(pages.size, lambda page: pages.release([page]))
        self._pages, self._host, self._rule_of = pages, host, rule_of
        self._max_sequences, self._prefill_tokens = max_sequences, prefill_tokens
        self._queue: deque[Waiting] = deque()
        self._rows = list(range(max_sequences - 1, -1, -1))
        self._turn, self._era, self._counted = 0, 0, counted

    def submit(self, ids: list[int], samples: Iterable[Sample]) -> None:
        self._queue.append(Waiting(ids, deque(samples)))

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self.running)

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and those that are kept and nobody uses."""
        return self._pages.num_free + self.kept.num_idle

    def admit(self) -> Pass:
        """Start waiting samples while there are slots, pages and room in the pass."""
        todo = Pass()
        self.kept.settle()
        while self._queue and len(self.running) < self._max_sequences:
            waiting = self._queue[0]
            found = self.kept.find(waiting.ids[:-1] if waiting.pages is None else ())
            new_tokens = len(waiting.ids) - 1 - found.num_tokens if waiting.pages is None else 0
            if todo.prompts and todo.num_tokens + new_tokens > self._prefill_tokens:
                self.kept.unpin(found.pinned)
                break
            if not (count := self._how_many(waiting, found)):
                found = self.kept.without_part(found)
                count = self._how_many(waiting, found)
            if not count:
                self.kept.unpin(found.nodes)
                if not self.running and self._drop_prompts():
                    continue
                break
            self._start(waiting, count, found, todo)
            if waiting.samples:
                break
            self._queue.popleft()
        return todo

    def _how_many(self, waiting: Waiting, found: Found[int]) -> int:
        """Samples that can start now; running ones are left a page each to grow into."""
        tokens = len(waiting.ids) - 1
        new = tokens // self._pages.size - len(found.nodes) if waiting.pages is None else 0
        count = min(len(waiting.samples), self._max_sequences - len(self.running))
        while count and new + count + len(self.running) > self.num_available:
            count //= 2
        return count

    def _start(self, waiting: Waiting, count: int, found: Found[int], todo: Pass) -> None:
        """Give samples slots. The first of a new prompt has the pages it is computed in; the others share the whole ones, and
        copy the last, which each writes to."""
        whole, tail = divmod(len(waiting.ids) - 1, self._pages.size)
        computed = waiting.pages
        samples = [waiting.samples.popleft() for _ in range(count)]
        if computed is None:
            first, nodes = self._compute(waiting.ids[:-1], found, todo, keep=samples[0].request.keep)
        else:
            first, nodes = computed, waiting.nodes
        copies = todo.before if computed is not None else todo.after

        def another() -> list[int]:
            self._pages.share(first[:whole])
            self.kept.pin(nodes)
            own = self._take(bool(tail))
            copies.extend((first[whole], page) for page in own)
            return [*first[:whole], *own]

        for number, sample in enumerate(samples):
            self._place(sample, waiting.ids, first if computed is None and number == 0 else another(), nodes)
        if computed is None and waiting.samples and self.num_available > len(self.running):
            waiting.pages, waiting.nodes = another(), nodes
        elif computed is not None and not waiting.samples:
            self._drop(waiting)

    def _compute(
        self, ids: list[int], found: Found[int], todo: Pass, *, keep: bool
    ) -> tuple[list[int], list[Node[int]]]:
        """Have the rest of a prompt computed; all of its pages, and those nodes of them that are kept."""
        shared = [node.block for node in found.nodes]
        self._pages.share(shared)
        pages = [*shared, *self._take(self._pages.needed(len(ids)) - len(shared))]
        if found.part is not None:
            todo.before.append((found.part.block, pages[len(shared)]))
        if found.num_tokens < len(ids):
            todo.prompts.append(Prompt(ids, pages, found.num_tokens))
            todo.num_tokens += len(ids) - found.num_tokens
        self._counted(len(ids) - found.num_tokens, found.num_tokens)
        nodes = self.kept.without_part(found).nodes
        if keep:
            nodes = self._keep(ids[: len(ids) // self._pages.size * self._pages.size], pages, is_ready=False)
            self.kept.unpin(found.nodes)
        return pages, nodes

    def _take(self, count: int) -> list[int]:
        """Free pages; where they are short, those that were used longest ago are given up."""
        while self._pages.num_free < count and self.kept.evict():
            pass
        return self._pages.take(count)

    def _keep(self, ids: Sequence[int], pages: Sequence[int], *, is_ready: bool = True) -> list[Node[int]]:
        """Keep pages for others; their nodes, pinned."""

        def hold(start: int, stop: int) -> int:
            page = pages[start // self._pages.size]
            self._pages.share([page])
            return page

        return self.kept.insert(ids, hold, is_ready=is_ready)

    def _place(self, sample: Sample, ids: list[int], pages: list[int], nodes: list[Node[int]]) -> None:
        """Give a sample the next slot."""
        slot, params = len(self.running), sample.params
        sample.turn, self._turn, sample.era = self._turn, self._turn + 1, self._era
        running = Running(sample, pages, nodes, self._rows.pop(), sample.turn, self._rule_of(sample))
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
        if sum(missing) > self.num_available:
            self._drop_prompts()
        if sum(missing) > self.num_available:
            steps, missing = 1, self._missing(1)
        back: list[Running] = []
        freed, gone = self.num_available, Counter[int]()
        order = sorted(self.running, key=lambda running: -running.turn)
        lacking = {id(running): count for running, count in zip(self.running, missing, strict=True)}
        while sum(lacking.values()) > freed:
            youngest = order[len(back)]
            back.append(youngest)
            freed += self._freed_by(youngest, gone)
            del lacking[id(youngest)]
        if not back:
            self._grow(missing)
        return steps, back

    def _freed_by(self, running: Running, gone: Counter[int]) -> int:
        """Pages that can be had once a sample lets go of its own, after those that have ``gone``; these are then among them."""
        kept = {node.block for node in running.nodes if node.is_kept}
        gone.update(running.pages)
        return sum(self._pages.holders(page) - gone[page] == (page in kept) for page in running.pages)

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
                running.pages += self._take(count)
                self._host.table[slot, at : at + count] = running.pages[at:]

    def set_back(self, back: Sequence[Running]) -> None:
        """Take samples out of their slots and put them first in the queue, the oldest of them first."""
        self.remove(back)
        for running in back:
            sample = running.sample
            self._queue.appendleft(Waiting([*sample.request.prompt_ids, *sample.ids], deque([sample])))

    def remove(self, gone: Iterable[Running]) -> None:
        """Free the slots and pages of samples, but for those that are kept; the last ones move into the holes."""
        for running in gone:
            slot, last = self.running.index(running), len(self.running) - 1
            self._let_go(running)
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

    def forget(self) -> None:
        """Keep nothing that was computed until now, but for the samples that run."""
        self._drop_prompts()
        self.kept.clear()
        self._era += 1

    def _drop_prompts(self) -> bool:
        """Drop the prompts that were computed for waiting samples. Whether there were any."""
        computed = [waiting for waiting in self._queue if waiting.pages is not None]
        for waiting in computed:
            self._drop(waiting)
        return bool(computed)

    def _drop(self, waiting: Waiting) -> None:
        if waiting.pages is not None:
            self._pages.release(waiting.pages)
            self.kept.unpin(waiting.nodes)
            waiting.pages, waiting.nodes = None, []

    def _let_go(self, running: Running) -> None:
        """Release a sample's pages, but for those that requests will follow of."""
        if running.sample.goes_on(self._era):
            self.kept.unpin(self._keep(running.sample.computed, running.pages))
        self._pages.release(running.pages)
        self.kept.unpin(running.nodes)
