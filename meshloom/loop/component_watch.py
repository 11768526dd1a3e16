"""The components of a step's rewards: numbers of each, and a word to the user about one that says nothing.

Owns: metrics by component, and when the user is told. Refuses to know: where a component's numbers come from. Always holds: an
invalid component is in no mean; one that always fails, applies to no sample, is the same for all samples, or whose process was
killed is told, not only counted. That a component does not apply to a sample is no failure.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from meshloom.rewards.outcome import InvalidReason
from meshloom.samples import Samples
from meshloom.samples.episodes import joined

ADVISE_AT, REPEAT_EVERY = 5, 50
"""Steps in a row after which the user is told of the same thing again."""
_KILLED = (InvalidReason.DEADLINE, InvalidReason.DIED)


@dataclass(frozen=True, kw_only=True)
class ComponentNumbers:
    """One component over the samples of a step.

    Args:
        name: of the component.
        values: of the samples where it is valid, each with its group.
        failures: why it is invalid elsewhere, with how often.
        num_skipped: samples that it does not apply to.
    """

    name: str
    values: tuple[tuple[int, float], ...]
    failures: Counter[str]
    num_skipped: int = 0

    @property
    def mean(self) -> float | None:
        """Of the valid values."""
        return sum(value for _, value in self.values) / len(self.values) if self.values else None

    @property
    def invalid_share(self) -> float:
        count = self.failures.total()
        return count / max(count + len(self.values), 1)

    @property
    def equal_share(self) -> float | None:
        """Share of the groups with several valid values in which all of them are equal; none without such a group."""
        groups: dict[int, list[float]] = {}
        for group, value in self.values:
            groups.setdefault(group, []).append(value)
        several = [values for values in groups.values() if len(values) > 1]
        return sum(len(set(values)) == 1 for values in several) / len(several) if several else None

    @property
    def is_constant(self) -> bool:
        """Whether several samples have a valid value, and all the same."""
        return len(self.values) > 1 and len({value for _, value in self.values}) == 1

    @property
    def num_killed(self) -> int:
        """Samples whose process was killed or ended."""
        return sum(count for why, count in self.failures.items() if why.partition(":")[0] in _KILLED)

    def metrics(self) -> Iterator[tuple[str, float]]:
        """``reward/NAME`` and what is under it."""
        prefix = f"reward/{self.name}"
        if self.mean is not None:
            yield prefix, self.mean
        yield f"{prefix}/invalid_share", self.invalid_share
        if self.equal_share is not None:
            yield f"{prefix}/equal_share", self.equal_share
        if self.num_killed:
            yield f"{prefix}/killed", float(self.num_killed)
        if self.num_skipped:
            count = self.num_skipped + self.failures.total() + len(self.values)
            yield f"{prefix}/not_applicable_share", self.num_skipped / count


def component_numbers(batch: Samples, names: Sequence[str]) -> list[ComponentNumbers]:
    """Each component over the samples of a step, of which an episode is one; none where samples do not say how their
    components went."""
    if not names or "failed" not in batch.meta:
        return []
    batch = joined(batch)
    groups, parts = batch["group"].tolist(), batch.meta["parts"]
    return [
        ComponentNumbers(
            name=name,
            values=tuple((group, part[name]) for group, part in zip(groups, parts, strict=True) if name in part),
            failures=Counter(
                failed[name] for failed in batch.meta["failed"] if name in failed and not _skips(failed[name])
            ),
            num_skipped=sum(name in failed and _skips(failed[name]) for failed in batch.meta["failed"]),
        )
        for name in names
    ]


def _skips(why: str) -> bool:
    """Whether a reason says that a component does not apply."""
    return why.partition(":")[0] == InvalidReason.NOT_APPLICABLE


def by_component(batch: Samples, name: str | None) -> Samples:
    """The samples with one component for their reward, valid where it is; as they are without a name, or where no sample has
    such a component."""
    if name is None or not any(name in told for kind in ("parts", "failed") for told in batch.meta.get(kind, ())):
        return batch
    parts = batch.meta["parts"]
    return batch.with_rows(
        reward=torch.tensor([part.get(name, 0.0) for part in parts], dtype=torch.float64),
        valid=torch.tensor([name in part for part in parts]),
    )


def component_metrics(batch: Samples, names: Sequence[str]) -> dict[str, float]:
    """Metrics of all components."""
    return {name: value for numbers in component_numbers(batch, names) for name, value in numbers.metrics()}


@dataclass
class ComponentWatch:
    """Tells the user of components that say nothing: at the first such step, at the fifth in a row, and at each fiftieth.

    Args:
        names: of the components.
        notice: called with a sentence for the user.
    """

    names: Sequence[str]
    notice: Callable[[str], None]
    in_a_row: Counter[tuple[str, str]] = field(default_factory=Counter)
    told: set[tuple[str, str]] = field(default_factory=set)

    def look(self, batch: Samples) -> None:
        """Look at the components of a step."""
        for numbers in component_numbers(batch, self.names):
            self._look(numbers.name, "fails", _always_fails(numbers))
            self._look(numbers.name, "skips", _never_applies(numbers))
            self._look(numbers.name, "constant", _constant(numbers))
            self._look(numbers.name, "killed", _killed(numbers))

    def _look(self, name: str, kind: str, text: str) -> None:
        key = (name, kind)
        self.in_a_row[key] = self.in_a_row[key] + 1 if text else 0
        count = self.in_a_row[key]
        if not text:
            return
        if count == ADVISE_AT or count % REPEAT_EVERY == 0:
            self.notice(f"warning: the reward {name} {text}, for {count} steps now")
        elif key not in self.told:
            self.notice(f"warning: the reward {name} {text}")
        self.told.add(key)


def _always_fails(numbers: ComponentNumbers) -> str:
    if numbers.values or not numbers.failures:
        return ""
    reason, _ = numbers.failures.most_common(1)[0]
    return f"is invalid for all {numbers.failures.total()} samples of the step, most often: {reason}"


def _never_applies(numbers: ComponentNumbers) -> str:
    if numbers.values or numbers.failures or not numbers.num_skipped:
        return ""
    return f"applies to none of the {numbers.num_skipped} samples of the step: its function returned None for all"


def _constant(numbers: ComponentNumbers) -> str:
    if not numbers.is_constant:
        return ""
    return (
        f"is the same, {numbers.values[0][1]:g}, for all {len(numbers.values)} samples of the step: it teaches nothing"
    )


def _killed(numbers: ComponentNumbers) -> str:
    count = numbers.num_killed
    if not count:
        return ""
    of_those = Counter({why: n for why, n in numbers.failures.items() if why.partition(":")[0] in _KILLED})
    reason, _ = of_those.most_common(1)[0]
    return f"lost its process at {count} {'sample' if count == 1 else 'samples'} of the step, most often: {reason}"
