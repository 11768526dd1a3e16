"""The samples of one generation: those that are in vLLM, and those that are yet to be.

Owns: which of them may be in vLLM together, and which requests have begun. Refuses to know: vLLM. Always holds: a sample is in
one of the two places until it has ended; a request of which any sample had a token has begun, whatever became of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshloom.rollout.vllm_requests import RunningSample


@dataclass(eq=False)
class SamplesAtWork:
    """Samples that have not ended.

    Args:
        kinds_apart: whether greedy samples and others are never in vLLM at the same time.
        running: in vLLM, by its names of them.
        waiting: not yet.
    """

    kinds_apart: bool
    running: dict[str, RunningSample] = field(default_factory=dict)
    waiting: list[RunningSample] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, samples: Sequence[RunningSample]) -> None:
        """Samples that wait to be in vLLM."""
        self.waiting += samples

    def ready(self) -> list[RunningSample]:
        """Those that may join what runs; they wait no longer. Where kinds are apart and nothing runs, greedy ones come last."""
        if not self.kinds_apart:
            ready, self.waiting = self.waiting, []
            return ready
        of = next(iter(self.running.values()), None)
        kinds = [sample.is_greedy for sample in self.waiting]
        kind = all(kinds) if of is None else of.is_greedy
        ready = [sample for sample, its in zip(self.waiting, kinds, strict=True) if its is kind]
        self.waiting = [sample for sample, its in zip(self.waiting, kinds, strict=True) if its is not kind]
        return ready

    def finished(self, key: str) -> RunningSample:
        """A sample that vLLM has ended."""
        sample = self.running.pop(key)
        self._begun.add(sample.request.id)
        return sample

    def unbegun(self, has_tokens: Callable[[RunningSample], bool]) -> set[int]:
        """Requests none of whose samples has begun.

        Args:
            has_tokens: whether a sample in vLLM has any.
        """
        begun = self._begun | {sample.request.id for sample in self.running.values() if has_tokens(sample)}
        return {sample.request.id for sample in (*self.running.values(), *self.waiting)} - begun

    def take(self, ends: Callable[[RunningSample], bool]) -> tuple[list[str], list[RunningSample]]:
        """Samples that end before they are finished: vLLM's names of those that it has, and all of them."""
        keys = [key for key, sample in self.running.items() if ends(sample)]
        ended = [self.finished(key) for key in keys] + [sample for sample in self.waiting if ends(sample)]
        self.waiting = [sample for sample in self.waiting if not ends(sample)]
        return keys, ended
