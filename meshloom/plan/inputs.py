"""What a run reads besides its model, looked at before any work: the first row of each file, the reward's file.

Owns: whether rows have the columns that are used, whether there is a reward and its function exists, and the lines of the plan
about both. Refuses to know: tokens, what a reward function does. Always holds: a user's code is parsed and never run; of a
file of rows the first one is read, and the others are counted.

Codes: D data, W rewards.
"""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError
from meshloom.config.names import Verifier
from meshloom.config.settings import SOURCE_KINDS, EvalSettings, SftSettings, SourceSettings, TrainSettings
from meshloom.config.user_file import Lack, lacking
from meshloom.data.columns import to_row
from meshloom.data.files import read_file
from meshloom.data.rows import Row
from meshloom.data.tasks import PREFIX
from meshloom.plan.checks import Findings, check_function_name
from meshloom.plan.count import count_rows
from meshloom.plan.environment_checks import KINDS
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.markers import check_markers
from meshloom.plan.reward_checks import check_components, component_lines, functions_of

AnySettings = TrainSettings | SftSettings | EvalSettings

_CODES = {Lack.FORM: "W002", Lack.FILE: "S006", Lack.SYNTAX: "W003", Lack.NAME: "W004"}
"""Codes of what a reward's file lacks."""


@dataclass(frozen=True)
class _First:
    """The first row of a file, as it stands there and as it is read."""

    record: Mapping[str, Any]
    row: Row


def check_inputs(found: Findings, settings: AnySettings) -> tuple[LedgerLine, ...]:
    """Refuse what ``train`` would refuse about data and reward; the lines of the plan about both."""
    firsts = {path: _first_rows(found, path, source, settings) for path, source in _sources(settings)}
    template = _has_template(Path(settings.model.path))
    every = [first for some in firsts.values() for first in some]
    _check_template(found, settings, every, template)
    check_markers(found, settings)
    lines = _data_lines(settings, every, template)
    if not isinstance(settings, SftSettings):
        _check_reward(found, settings, firsts)
        lines += _reward_lines(settings, every) + _environment_lines(settings)
    return tuple(lines)


def _sources(settings: AnySettings) -> list[tuple[str, SourceSettings]]:
    """The sources that the run reads, by the setting that names them."""
    if isinstance(settings, EvalSettings):
        return [] if settings.source is None else [(settings.source_path, settings.source)]
    train: list[tuple[str, SourceSettings]] = [("data.train", settings.data.train)]
    if settings.data.validation is None:
        return train
    return [*train, ("data.validation", settings.data.validation)]


def _first_rows(found: Findings, path: str, source: SourceSettings, settings: AnySettings) -> list[_First]:
    """The first row of each file that can be read; what is missing altogether is refused elsewhere."""
    if source.dataset is not None and importlib.util.find_spec("datasets") is None:
        what = "a Hugging Face dataset needs the package datasets"
        found.refuse("D003", f"{path}.dataset", what, fix="pip install datasets")
    firsts: list[_First] = []
    for name in source.files:
        file = Path(name)
        if not file.is_file() or file.suffix.lower() not in (".parquet", ".jsonl"):
            continue
        try:
            first = next(read_file(file), None)
            if first is None:
                fix = "fill it, or take it out of files"
                found.refuse("D002", f"{path}.files", f"the data file {name} has no rows", fix=fix)
            else:
                place, record = first
                firsts.append(_First(record, to_row(record, 0, place, settings.data)))
        except UserError as error:
            found.refuse("D001", f"{path}.files", f"{error.where}: {error.what}", why=error.why, fix=error.fix)
    return firsts


def _has_template(folder: Path) -> bool | None:
    """Whether the tokenizer of a model folder has a chat template; none if there is no tokenizer to be asked."""
    try:
        if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
            return True
        values = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return isinstance(values, dict) and bool(values.get("chat_template"))


def _check_template(found: Findings, settings: AnySettings, firsts: Sequence[_First], template: bool | None) -> None:
    """A template that is needed and missing, or needed and forbidden."""
    data = settings.data
    chat = any(isinstance(first.row.prompt, list) for first in firsts)
    if chat and data.chat_template == "never":
        fix = "set data.chat_template=auto, or give prompts as plain strings"
        found.refuse("D004", "data.chat_template", "a chat cannot be rendered without a template", fix=fix)
    elif template is False and (chat or data.chat_template == "always" or data.system_prompt):
        why = "a prompt is a chat" if chat else "data.chat_template or data.system_prompt ask for one"
        fix = "put chat_template.jinja into the model folder, or give prompts as plain strings"
        found.refuse("D005", "data.chat_template", "the tokenizer has no chat template", why=why, fix=fix)


def _check_reward(
    found: Findings, settings: TrainSettings | EvalSettings, firsts: Mapping[str, Sequence[_First]]
) -> None:
    for function in functions_of(settings.reward):
        file, colon, name = function.name.rpartition(":")
        if colon and Path(file).is_file():
            _check_function(found, function.path, Path(file), name)
        if function.path != "reward.function":
            check_function_name(found, function.path, function.name)
    check_components(found, settings)
    if settings.reward.function is not None or settings.reward.components:
        return
    if _environment_judges(settings):
        return
    for path, source in _sources(settings):
        bring_none = [first for first in firsts[path] if not first.row.data_source.startswith(PREFIX)]
        if bring_none and not source.reasoning_gym:
            choices = f"reward.function=rewards.py:score, or one of {', '.join(Verifier)}"
            why = f"only rows from reasoning-gym bring their own verifier; those of {path} do not"
            found.refuse("W001", "reward.function", "a reward function is needed", why=why, fix=f"set {choices}")
            return


def _environment_judges(settings: TrainSettings | EvalSettings) -> bool:
    return settings.environment is not None and settings.environment.gives_rewards


def _check_function(found: Findings, path: str, file: Path, name: str) -> None:
    """Whether a file has a name at its top level, without running it."""
    if (fault := lacking(file, name)) is not None:
        found.refuse(_CODES[fault.lack], path, fault.what, why=fault.why, fix=fault.fix)


def _data_lines(settings: AnySettings, firsts: Sequence[_First], template: bool | None) -> list[LedgerLine]:
    lines: list[LedgerLine] = []
    for path, source in _sources(settings):
        kind = "training" if path == "data.train" else "validation"
        key = next((name for name in SOURCE_KINDS if getattr(source, name)), "files")
        value = _shortened(source.files) if key == "files" else str(getattr(source, key))
        lines.append(_given(settings, "data", f"{kind} data", value or None, f"{path}.{key}"))
        how = "as many as are generated" if key in ("reasoning_gym", "episodes") else "counted"
        lines.append(_derived("data", f"{kind} rows", count_rows(source), how, "rows"))
    lines += _column_lines(settings, firsts)
    choice = settings.data.chat_template
    if choice == "never":
        used = "none"
    elif template is None:
        used = "not known"
    else:
        used = "the tokenizer's" if template else "none, the tokenizer has none"
    lines.append(_given(settings, "data", "chat template", used, "data.chat_template", more=f"={choice}"))
    return lines


def _shortened(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


def _column_lines(settings: AnySettings, firsts: Sequence[_First]) -> list[LedgerLine]:
    """Columns of files and datasets; what is generated has none."""
    data = settings.data
    if all(source.reasoning_gym or source.episodes for _, source in _sources(settings)):
        return []
    columns = {column for first in firsts for column in first.record}
    prompt, answer = data.prompt_column, data.answer_column
    if isinstance(settings, SftSettings):
        chat = "messages" if prompt.partition(".")[0] not in columns and "messages" in columns else prompt
        given = settings.data.response_column
        response = given if given.partition(".")[0] in columns or not firsts else f"last message of {chat}"
        return [
            _given(settings, "data", "prompt column", chat, "data.prompt_column"),
            _given(settings, "data", "response column", response, "data.response_column"),
        ]
    if any(first.row.answer is not None and answer not in first.record for first in firsts):
        answer = "reward_model.ground_truth"
    return [
        _given(settings, "data", "prompt column", prompt, "data.prompt_column"),
        _given(settings, "data", "answer column", answer or "none", "data.answer_column"),
    ]


def _reward_lines(settings: TrainSettings | EvalSettings, firsts: Sequence[_First]) -> list[LedgerLine]:
    reward, sources = settings.reward, _sources(settings)
    if _environment_judges(settings) and reward.function is None and not reward.components:
        return [_given(settings, "reward", "reward function", "none: the environment gives rewards", "reward.function")]
    brings_one = all(source.reasoning_gym for _, source in sources) or (
        bool(firsts) and all(first.row.data_source.startswith(PREFIX) for first in firsts)
    )
    function = reward.function or (str(Verifier.REASONING_GYM) if brings_one else None)
    of_one = [] if reward.components else [_given(settings, "reward", "reward function", function, "reward.function")]
    lines = [
        *of_one,
        *component_lines(settings),
        _given(settings, "reward", "deadline of a call", reward.deadline_s, "reward.deadline_s", unit="s"),
    ]
    name, unit = "reward workers", "processes"
    if reward.workers is not None:
        return [*lines, _given(settings, "reward", name, reward.workers, "reward.workers", unit=unit)]
    return [*lines, _derived("reward", name, len(os.sched_getaffinity(0)), "processors this process may use", unit)]


def _environment_lines(settings: TrainSettings | EvalSettings) -> list[LedgerLine]:
    """What answers a turn, and the bounds of an episode."""
    environment = settings.environment
    if environment is None:
        return []
    kind = next((kind for kind in KINDS if vars(environment)[kind]), None)
    value = vars(environment)[kind] if kind is not None else None
    shown = ", ".join(value) if isinstance(value, tuple) else "reasoning-gym" if value is True else value
    given = {} if environment.reasoning_gym else {"turns of an episode": ("max_turns", "")}
    given |= {"deadline of a step": ("step_deadline_s", "s")}
    lines = [_given(settings, "environment", "environment", shown, f"environment.{kind}")]
    lines += [
        _given(settings, "environment", name, vars(environment)[field], f"environment.{field}", unit=unit)
        for name, (field, unit) in given.items()
    ]
    longest = settings.rollout.max_response_tokens
    bound = longest if environment.max_turn_tokens is None else min(environment.max_turn_tokens, longest)
    formula = "environment.max_turn_tokens, or rollout.max_response_tokens, which bounds all turns and what stands between them"
    lines.append(_derived("environment", "longest turn", bound, formula, "tokens"))
    name, unit = "environment workers", "processes"
    if environment.workers is not None:
        return [*lines, _given(settings, "environment", name, environment.workers, "environment.workers", unit=unit)]
    return [
        *lines,
        _derived("environment", name, len(os.sched_getaffinity(0)), "processors this process may use", unit),
    ]


def _given(
    settings: AnySettings,
    section: str,
    name: str,
    value: int | float | str | None,
    path: str,
    *,
    unit: str = "",
    more: str = "",
) -> LedgerLine:
    origin = settings.provenance.of(path)
    return LedgerLine(section=section, name=name, value=value, formula=f"{path}{more}", source=origin, unit=unit)


def _derived(section: str, name: str, value: int | None, formula: str, unit: str) -> LedgerLine:
    return LedgerLine(section=section, name=name, value=value, formula=formula, source=DERIVED, unit=unit)
