"""Samples of a file, in place of samples that are generated.

Owns: reading and checking such a file (``samples.jsonl``, as runs and ``meshloom rollout`` write it), and which groups are of
which step. Refuses to know: models, losses. Always holds: a line that cannot be trained on is told with its number before
anything else happens; the tokens that are read are the tokens that are trained on.

Groups of a step: where ``batch.prompts_per_step`` is the most groups that a step of the file has, its steps are repeated as
they are; otherwise groups are taken in their order, so many a step.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshloom.config.errors import UserError
from meshloom.config.names import GREEDY_ADVANTAGES
from meshloom.config.settings import TrainSettings
from meshloom.data.rows import Prompt, Row
from meshloom.loop.baseline import GreedySample, with_baseline
from meshloom.observe.records import SAMPLES_FILE
from meshloom.samples import Samples

WHERE = "rollout.from_samples"
_TEXTS_CHECKED = 256
_OF_EPISODES = ("episode", "turns", "tool_calls", "tool_errors")
_OF_GREEDY_EPISODES = ("prompt", "prompt_ids", "messages", "own", *_OF_EPISODES)


class SavedRecord(BaseModel):
    """A line of the file, as far as training reads it. What has a default may be left out."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    step: int
    kind: Literal["train", "greedy"]
    group: int
    prompt_ids: list[int] = Field(min_length=1)
    response_ids: list[int] = Field(min_length=1)
    reward: float | None
    row: int = 0
    prompt: str = ""
    response: str | None = None
    answer: Any = None
    data_source: str = ""
    invalid: str | None = None
    finish: str = "stop"
    versions: list[int] = Field(default=[0, 0], min_length=2, max_length=2)
    parts: dict[str, float] = {}
    failed: dict[str, str] = {}
    remark: str = ""
    printed: str = ""
    logprobs: list[float] | None = None
    token_versions: list[int] | None = None
    own: list[tuple[int, int]] | None = None
    episode: int | None = None
    turn_rewards: list[float] | None = None
    messages: list[dict[str, Any]] = []
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0


@dataclass(frozen=True)
class Line:
    """A record and where it stands."""

    number: int
    record: SavedRecord


@dataclass(frozen=True)
class SavedSamples:
    """What a file holds.

    Args:
        file: its name.
        steps: groups of each step.
        prompts: of all groups; ``prompt`` of a sample counts in it.
    """

    file: Path
    steps: tuple[tuple[Samples, ...], ...]
    prompts: list[Prompt]

    @property
    def has_logprobs(self) -> bool:
        """Whether the sampler's log-probs are known."""
        return "sampler_logprob" in self.steps[0][0].tokens

    def ids(self) -> Iterator[list[int]]:
        """Token ids of each sample."""
        return (ids.tolist() for groups in self.steps for group in groups for ids in group.column("ids"))

    def with_steps(self, settings: TrainSettings) -> TrainSettings:
        """Settings of a run over all steps of the file, where they do not say how many.

        Raises:
            UserError: if they say more than there are.
        """
        wanted, there = settings.batch.steps, len(self.steps)
        if wanted is None:
            return settings.model_copy(update={"batch": settings.batch.model_copy(update={"steps": there})})
        if wanted > there:
            groups = sum(map(len, self.steps))
            raise UserError(
                f"{self.file} has samples for {there} {'step' if there == 1 else 'steps'}, the run is over {wanted}",
                where="batch.steps",
                why=f"{groups} groups, batch.prompts_per_step={settings.batch.prompts_per_step}",
                fix=f"batch.steps={there}, or leave it out",
            )
        return settings


def read_saved(settings: TrainSettings, decode: Callable[[Sequence[Sequence[int]]], list[str]]) -> SavedSamples | None:
    """The samples that a run trains on instead of generating; none if it generates.

    Args:
        settings: of the run.
        decode: texts of several samples' token ids.

    Raises:
        UserError: if the file cannot be read, a line cannot be trained on, or samples are not those of these settings.
    """
    if settings.rollout.from_samples is None:
        return None
    path = Path(settings.rollout.from_samples)
    file = path / SAMPLES_FILE if path.is_dir() else path
    groups = _groups(file)
    if not groups:
        raise UserError(f"{file} has no training samples", where=WHERE, fix=_another_file(1))
    _check_groups(file, groups, settings)
    _check_texts(file, groups, decode)
    unique = len({number for _, number in groups}) == len(groups)
    prompts = [_prompt(lines[0].record) for lines in groups.values()]
    with_logprobs = all(each.record.logprobs is not None for lines in groups.values() for each in _trained(lines))
    played = all(line.record.episode is not None for lines in groups.values() for line in lines)
    made = [
        (step, _samples(lines, place, number if unique else place, with_logprobs=with_logprobs, played=played))
        for place, ((step, number), lines) in enumerate(groups.items())
    ]
    return SavedSamples(file, _steps(made, settings.batch.prompts_per_step), prompts)


def _groups(file: Path) -> dict[tuple[int, int], list[Line]]:
    """Lines of each group, by step and number, in the order of the file."""
    found: dict[tuple[int, int], list[Line]] = {}
    try:
        with file.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                line = _line(file, number, text)
                if line is not None:
                    found.setdefault((line.record.step, line.record.group), []).append(line)
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{file} cannot be read", where=WHERE, why=why, fix=_another_file(1)) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text in UTF-8", where=WHERE, why=str(error), fix=_another_file(1)) from error
    return found


def _line(file: Path, number: int, text: str) -> Line | None:
    """A line that is trained on; none for one of validation, and for an empty one."""
    if not text.strip():
        return None
    try:
        values = json.loads(text)
        if isinstance(values, dict) and values.get("kind") == "validation":
            return None
        record = SavedRecord.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the line"
        raise UserError(
            f"{file}:{number} is no sample to train on",
            where=WHERE,
            why=f"it has no {field}" if first["type"] == "missing" else f"{field}: {first['msg']}",
            fix=_another_file(number),
        ) from error
    except ValueError as error:
        raise UserError(
            f"{file}:{number} is no JSON", where=WHERE, why=str(error), fix=_another_file(number)
        ) from error
    for name in ("logprobs", "token_versions", "turn_rewards"):
        values = getattr(record, name)
        if values is not None and len(values) != len(record.response_ids):
            why = f"{name} has {len(values)} numbers, response_ids {len(record.response_ids)}"
            fix = f"give {name} a number for each response token, or remove the line"
            raise UserError(f"{file}:{number} is no sample to train on", where=WHERE, why=why, fix=fix)
    return Line(number, record)


def _another_file(number: int) -> str:
    """What to change about a line that is no sample: a file that begins with one is another kind of file."""
    name = f"name a run folder, or a {SAMPLES_FILE} that a run or `meshloom rollout` wrote"
    return name if number == 1 else f"mend or remove the line, or {name}"


def _trained(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.record.kind == "train"]


def _check_groups(file: Path, groups: dict[tuple[int, int], list[Line]], settings: TrainSettings) -> None:
    """Refuse groups that are not whole, and samples that are longer than the settings allow."""
    wanted, data, rollout = settings.batch.samples_per_prompt, settings.data, settings.rollout
    for (step, number), lines in groups.items():
        trained = _trained(lines)
        episodes = {line.record.episode for line in trained}
        there = len(trained) if None in episodes else len(episodes)
        if there != wanted:
            raise UserError(
                f"group {number} of step {step} has {there} samples, batch.samples_per_prompt is {wanted}",
                where=f"{file}:{lines[0].number}",
                why="a group is trained on whole; logging.samples_per_step may have left samples out",
                fix=f"batch.samples_per_prompt={there} if all groups are of that size, or a whole file",
            )
        if settings.algorithm.advantage in GREEDY_ADVANTAGES and len(lines) == len(trained):
            what = f"group {number} of step {step} has no greedy sample, which {settings.algorithm.advantage} needs"
            fix = "an estimator without a greedy baseline, or samples that were made with this one"
            raise UserError(what, where=f"{file}:{lines[0].number}", fix=fix)
        for line in lines:
            # Episodes of a draw may begin differently, and go on after what no longer fits their prompt.
            if line.record.episode is None and line.record.prompt_ids != lines[0].record.prompt_ids:
                what = f"two samples of group {number} of step {step} have different prompts"
                raise UserError(what, where=f"{file}:{line.number}", fix="a group is of one prompt")
            sizes = (len(line.record.prompt_ids), len(line.record.response_ids))
            bounds = (data.max_prompt_tokens, rollout.max_response_tokens)
            if line.record.episode is not None and sum(sizes) <= sum(bounds):
                continue
            for name, size, bound in zip(("prompt", "response"), sizes, bounds, strict=True):
                if size > bound:
                    path = "data.max_prompt_tokens" if name == "prompt" else "rollout.max_response_tokens"
                    what = f"a {name} has {size} tokens, {path} is {bound}"
                    raise UserError(what, where=f"{file}:{line.number}", fix=f"{path}={size} or more")


def _check_texts(
    file: Path, groups: dict[tuple[int, int], list[Line]], decode: Callable[[Sequence[Sequence[int]]], list[str]]
) -> None:
    """Refuse tokens of another tokenizer: some of the responses must be the text that stands beside them."""
    told = [(line, ids) for lines in groups.values() for line, ids in _told(lines)]
    some = told[:: max(1, len(told) // _TEXTS_CHECKED)]
    try:
        texts = decode([ids for _, ids in some])
    except OverflowError as error:
        raise UserError("a token id is out of range", where=str(file), why=str(error)) from error
    for (line, _), text in zip(some, texts, strict=True):
        if text != line.record.response:
            raise UserError(
                "the tokens of a sample are not its text with the tokenizer of model.path",
                where=f"{file}:{line.number}",
                why=f"they read {text[:40]!r}, the line says {(line.record.response or '')[:40]!r}",
                fix="use the model whose tokenizer made the file",
            )


def _told(lines: Sequence[Line]) -> Iterator[tuple[Line, list[int]]]:
    """Lines of a group that say what some tokens read, with these: the whole response, or an episode's last turn, which is in
    its last sample."""
    last = {line.record.episode: line for line in lines if line.record.own}
    for line in lines:
        record = line.record
        if record.response is None:
            continue
        if record.own is None:
            yield line, record.response_ids
        elif record.episode is not None and last.get(record.episode) is line:
            start, stop = record.own[-1]
            yield line, record.response_ids[start:stop]


def _prompt(record: SavedRecord) -> Prompt:
    row = Row(index=record.row, prompt=record.prompt, answer=record.answer, data_source=record.data_source, extra={})
    return Prompt(row=row, ids=record.prompt_ids, text=record.prompt)


def _samples(lines: Sequence[Line], place: int, number: int, *, with_logprobs: bool, played: bool) -> Samples:
    """A group, as the collector would have made it; ``played``: of episodes."""
    records = [line.record for line in _trained(lines)]
    count = len(records)
    tokens = {
        "ids": torch.tensor([token for r in records for token in (*r.prompt_ids, *r.response_ids)]),
        "mask": _column(records, [_mask(r) for r in records], torch.bool),
        "version": _column(records, [_versions(r) for r in records], torch.int32),
    }
    rows = {
        "group": torch.full((count,), number),
        "prompt": torch.full((count,), place),
        "reward": torch.tensor([r.reward or 0.0 for r in records], dtype=torch.float64),
        "valid": torch.tensor([r.reward is not None for r in records]),
    }
    meta: dict[str, list[Any]] = {
        "response": [r.response or "" for r in records],
        "finish": [r.finish for r in records],
        "invalid": [r.invalid or (None if r.reward is not None else "unknown") for r in records],
        "parts": [r.parts for r in records],
        "failed": [r.failed for r in records],
        "remark": [r.remark for r in records],
        "printed": [r.printed for r in records],
    }
    if with_logprobs:
        tokens["sampler_logprob"] = _column(records, [r.logprobs or () for r in records], torch.float32)
    if played:
        rewards = [r.turn_rewards or [0.0] * len(r.response_ids) for r in records]
        tokens["turn_reward"] = _column(records, rewards, torch.float64)
        rows |= {name: torch.tensor([getattr(r, name) for r in records]) for name in _OF_EPISODES}
        meta |= {"messages": [r.messages for r in records], "shown": [r.prompt for r in records]}
    group = Samples(torch.tensor([len(r.prompt_ids) + len(r.response_ids) for r in records]), tokens, rows, meta)
    greedy = next((line.record for line in lines if line.record.kind == "greedy"), None)
    return group if greedy is None else with_baseline(group, _greedy(greedy))


def _column(records: Sequence[SavedRecord], values: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """Values of each response end to end; zero at prompts."""
    pairs = zip(records, values, strict=True)
    return torch.tensor([value for r, of in pairs for value in (*[0] * len(r.prompt_ids), *of)], dtype=dtype)


def _mask(record: SavedRecord) -> list[bool]:
    if record.own is None:
        return [True] * len(record.response_ids)
    mask = [False] * len(record.response_ids)
    for start, stop in record.own:
        mask[start:stop] = [True] * (min(stop, len(mask)) - start)
    return mask


def _versions(record: SavedRecord) -> list[int]:
    return record.token_versions or [record.versions[0]] * len(record.response_ids)


def _greedy(record: SavedRecord) -> GreedySample:
    return GreedySample(
        response=record.response or "",
        ids=tuple(record.response_ids),
        finish=record.finish,
        reward=record.reward,
        invalid=record.invalid,
        parts=record.parts,
        printed=record.printed,
        versions=(record.versions[0], record.versions[1]),
        episode={} if record.episode is None else {name: vars(record)[name] for name in _OF_GREEDY_EPISODES},
    )


def _steps(made: Sequence[tuple[int, Samples]], prompts_per_step: int) -> tuple[tuple[Samples, ...], ...]:
    """Groups of each step; a last step that would be short is left out unless it is one of the file's own."""
    of_file: dict[int, list[Samples]] = {}
    for step, group in made:
        of_file.setdefault(step, []).append(group)
    if max(map(len, of_file.values())) == prompts_per_step:
        return tuple(tuple(groups) for groups in of_file.values())
    whole = len(made) // prompts_per_step
    groups = [group for _, group in made]
    return tuple(tuple(groups[i * prompts_per_step : (i + 1) * prompts_per_step]) for i in range(whole))
