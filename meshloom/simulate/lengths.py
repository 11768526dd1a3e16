"""How long prompts and responses are, and how long a reward takes.

Owns: distributions by name, those of a run's samples file, the draws. Refuses to know: what is done with them. Always holds:
the samples of a draw follow from the seed and the draw's number alone, so every variant of a comparison has the same ones.

A distribution is written ``NAME:NUMBER[:NUMBER]``: ``fixed:512``, ``geometric:MEAN``, ``lognormal:MEDIAN:SIGMA``,
``uniform:LEAST:MOST``, or a mixture ``0.9*lognormal:300:0.6+0.1*fixed:4096``.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshloom.config.errors import UserError

FORM = "fixed:512, geometric:MEAN, lognormal:MEDIAN:SIGMA, uniform:LEAST:MOST, or 0.9*lognormal:300:0.6+0.1*fixed:4096"

Sample = Callable[[random.Random], float]


@dataclass(frozen=True)
class Distribution:
    """What numbers are drawn from.

    Args:
        text: as it was given.
        parts: (weight, sampler) of each part of a mixture; weights add up to 1.
    """

    text: str
    parts: tuple[tuple[float, Sample], ...]

    def draw(self, chance: random.Random) -> float:
        """A number, not negative."""
        if len(self.parts) == 1:
            return self.parts[0][1](chance)
        at = chance.random()
        for weight, sample in self.parts:
            if at < weight:
                return sample(chance)
            at -= weight
        return self.parts[-1][1](chance)


def _fixed(value: float) -> Sample:
    return lambda chance: value


def _geometric(mean: float) -> Sample:
    if mean <= 1:
        return _fixed(1.0)
    scale = math.log1p(-1 / mean)
    return lambda chance: 1 + math.floor(math.log(1 - chance.random()) / scale)


def _lognormal(median: float, sigma: float) -> Sample:
    mu = math.log(median)
    return lambda chance: chance.lognormvariate(mu, sigma)


def _uniform(least: float, most: float) -> Sample:
    return lambda chance: chance.uniform(least, most)


_KINDS: dict[str, tuple[int, Callable[..., Sample]]] = {
    "fixed": (1, _fixed),
    "geometric": (1, _geometric),
    "lognormal": (2, _lognormal),
    "uniform": (2, _uniform),
}


def parse_distribution(text: str, where: str) -> Distribution:
    """A distribution from its text; a number alone is fixed.

    Args:
        text: as given.
        where: the option it was given to.

    Raises:
        UserError: if it says nothing that is known.
    """
    parts = [_part(part.strip(), text, where) for part in text.split("+")]
    total = sum(weight for weight, _ in parts)
    return Distribution(text, tuple((weight / total, sample) for weight, sample in parts))


def _part(part: str, text: str, where: str) -> tuple[float, Sample]:
    weight, _, rest = part.rpartition("*")
    name, *numbers = rest.split(":")
    if not numbers:
        name, numbers = "fixed", [name]
    try:
        values = [float(number) for number in numbers]
        factor = float(weight) if weight else 1.0
    except ValueError:
        raise UserError(f"{part!r} of {text!r} is no distribution", where=where, fix=FORM) from None
    count, make = _KINDS.get(name, (0, _fixed))
    if count != len(values) or not all(math.isfinite(value) for value in (factor, *values)):
        raise UserError(f"{part!r} of {text!r} is no distribution", where=where, fix=FORM)
    negative = any(value < 0 for value in values) or (name in ("lognormal", "geometric") and values[0] <= 0)
    if factor <= 0 or negative:
        raise UserError(f"{part!r} of {text!r} must be above 0", where=where, fix=FORM)
    return factor, make(*values)


@dataclass(frozen=True)
class Drawn:
    """What a draw's samples come to.

    Args:
        prompt: tokens of the prompt.
        responses: tokens of each sample.
        rewards_s: seconds until each is scored, once it is finished and a worker is free.
        is_greedy: whether the last of them is greedy, and not trained on.
        has_spread: whether their rewards differ.
    """

    prompt: int
    responses: tuple[int, ...]
    rewards_s: tuple[float, ...]
    is_greedy: bool = False
    has_spread: bool = True

    @property
    def trained(self) -> tuple[int, ...]:
        """Tokens of the samples that are trained on."""
        return self.responses[:-1] if self.is_greedy else self.responses


@dataclass(frozen=True)
class Recorded:
    """Groups of a samples file: tokens of the prompt, and of its responses."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]


def read_recorded(path: Path) -> Recorded:
    """Lengths of a run's training samples, group by group.

    Raises:
        UserError: if the file cannot be read, or has no samples.
    """
    file = path / "samples.jsonl" if path.is_dir() else path
    found: dict[tuple[int, int], tuple[int, list[int]]] = {}
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                    if record["kind"] == "train":
                        key = (record["step"], record["group"])
                        group = found.setdefault(key, (len(record["prompt_ids"]), []))
                        group[1].append(len(record["response_ids"]))
                except (ValueError, KeyError, TypeError) as error:
                    what = f"line {number} of {file} is no sample of a run"
                    raise UserError(what, where="--lengths-from", why=repr(error)) from error
    except OSError as error:
        raise UserError(f"{file} cannot be read", where="--lengths-from", why=str(error)) from error
    if not found:
        fix = "name the samples.jsonl of a run that trained, or its folder"
        raise UserError(f"{file} has no training samples", where="--lengths-from", fix=fix)
    return Recorded(tuple((prompt, tuple(lengths)) for prompt, lengths in found.values()))


@dataclass
class LengthSource:
    """The samples of all draws.

    Args:
        seed: of the simulation.
        samples_per_prompt: of a draw; its greedy one among them.
        longest: response; longer ones are cut.
        prompt: tokens of a prompt.
        responses: distribution of their tokens, or groups of a file; those bring their prompts.
        reward_s: distribution of the seconds that scoring takes.
        is_greedy: whether the last sample of a draw is greedy.
        spread: share of draws whose rewards differ.
    """

    seed: int
    samples_per_prompt: int
    longest: int
    prompt: int
    responses: Distribution | Recorded
    reward_s: Distribution
    is_greedy: bool = False
    spread: float = 1.0
    _drawn: dict[int, Drawn] = field(default_factory=dict)

    def of(self, number: int) -> Drawn:
        """The samples of a draw."""
        found = self._drawn.get(number)
        if found is None:
            has_spread = random.Random(f"spread/{self.seed}/{number}").random() < self.spread
            drawn = self._draw(random.Random(f"{self.seed}/{number}"))
            found = self._drawn[number] = replace(drawn, is_greedy=self.is_greedy, has_spread=has_spread)
        return found

    def _draw(self, chance: random.Random) -> Drawn:
        count, source, prompt = self.samples_per_prompt, self.responses, self.prompt
        lengths: Sequence[float]
        if isinstance(source, Recorded):
            prompt, known = chance.choice(source.groups)
            # Samples of a prompt resemble each other, so they come from one group; each once while there are enough.
            lengths = chance.sample(known, count) if count <= len(known) else chance.choices(known, k=count)
        else:
            lengths = [source.draw(chance) for _ in range(count)]
        responses = tuple(max(1, min(self.longest, round(length))) for length in lengths)
        return Drawn(prompt, responses, tuple(self.reward_s.draw(chance) for _ in range(count)))

    def means(self, draws: int = 512) -> tuple[float, float, int]:
        """Mean tokens of a prompt and of a response, and the longest response, of the first draws."""
        drawn = [self.of(number) for number in range(draws)]
        prompt = sum(each.prompt for each in drawn) / draws
        lengths = [length for each in drawn for length in each.responses]
        return prompt, sum(lengths) / len(lengths), max(lengths)
