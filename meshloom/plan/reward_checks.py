"""The reward's components, looked at before any work.

Owns: what can be wrong with components, their weights, the penalty for overlong responses, reward models and judges, and their
lines of the plan. Refuses to know: what a function does, what a model computes, whether a service answers. Always holds:
nothing is fetched, no weight is read, no user's code runs; the key of a service is neither read nor shown.

Codes: W rewards.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.config.environment import is_set
from meshloom.config.errors import UserError
from meshloom.config.reward_settings import (
    OVERLONG,
    ComponentSettings,
    JudgeSettings,
    RewardModelSettings,
    component_names,
)
from meshloom.config.settings import EvalSettings, RewardSettings, TrainSettings
from meshloom.plan.checks import Findings
from meshloom.plan.judge_template import JUDGE_FIELDS, judge_template
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.model_folder import ModelFolder, read_model_folder

_NAME = re.compile(r"[A-Za-z]\w*(-\w+)*")
_KINDS = ("function", "model", "judge")
SCORERS = "ForSequenceClassification"
"""How architectures end that have the head of a reward model."""


@dataclass(frozen=True)
class NamedFunction:
    """A function that the reward's settings name: the setting, and its value."""

    path: str
    name: str


def functions_of(reward: RewardSettings) -> list[NamedFunction]:
    """All functions that are named."""
    named = [("reward.function", reward.function)]
    named += [(f"reward.components.{name}.function", each.function) for name, each in reward.components.items()]
    return [NamedFunction(path, name) for path, name in named if name is not None]


def check_components(found: Findings, settings: TrainSettings | EvalSettings) -> None:
    """Refuse components that cannot work."""
    reward = settings.reward
    for name, component in reward.components.items():
        _check_component(found, name, component)
    if reward.components and reward.function is not None:
        what = "reward.function and reward.components are both given"
        fix = "make the function a component: reward.components.task.function=…, and leave reward.function out"
        found.refuse("W006", "reward.function", what, why="the components alone are the reward", fix=fix)
    if reward.components and reward.kwargs:
        what = "reward.kwargs is not used, as each component has its own"
        found.warn("W007", "reward.kwargs", what, fix="set reward.components.NAME.kwargs")
    if reward.components and reward.form is not None:
        what = "reward.form is not used, as each component has its own"
        found.warn("W007", "reward.form", what, fix="set reward.components.NAME.form")
    if reward.components and not any(component.weight for component in reward.components.values()):
        what = "all components of the reward have the weight 0: every reward would be the same"
        first = f"reward.components.{next(iter(reward.components))}.weight=1.0"
        found.refuse("W008", "reward.components", what, fix=f"set {first}", suggestions=((first,),))
    _check_overlong(found, settings)
    _check_success(found, settings)


def _check_success(found: Findings, settings: TrainSettings | EvalSettings) -> None:
    wanted, names = settings.validation.success_component, component_names(settings.reward)
    if wanted is None or wanted in names:
        return
    path = "validation.success_component"
    has = f"its components are {', '.join(names)}" if names else "it is one function, without components"
    near = difflib.get_close_matches(wanted, names, n=1)
    likely = tuple((f"{path}={name}",) for name in dict.fromkeys([*near, *names]))
    fix = f"did you mean {near[0]}?" if near else f"leave {path} out"
    found.refuse("W020", path, f"the reward has no component {wanted!r}", why=has, fix=fix, suggestions=likely)


def _check_component(found: Findings, name: str, component: ComponentSettings) -> None:
    path = f"reward.components.{name}"
    if not _NAME.fullmatch(name) or name == OVERLONG:
        why = "reward.overlong has this name" if name == OVERLONG else "it is part of metrics' and settings' names"
        found.refuse("W005", path, f"a component cannot be called {name!r}", why=why, fix="letters, digits, _ and -")
    kinds = [kind for kind in _KINDS if getattr(component, kind) is not None]
    if len(kinds) != 1:
        have = f"both {' and '.join(kinds)} are given" if kinds else "none is given"
        fix = f"such as {path}.function=exact_match"
        found.refuse("W009", path, f"{path} needs exactly one of {', '.join(_KINDS)}; {have}", fix=fix)
    if component.kwargs and component.function is None:
        found.warn("W010", f"{path}.kwargs", f"{path}.kwargs is not used, as {name} is no function")
    if component.form is not None and component.function is None:
        found.warn("W010", f"{path}.form", f"{path}.form is not used, as {name} is no function")
    if component.model is not None:
        if component.deadline_s is not None:
            found.warn("W010", f"{path}.deadline_s", f"{path}.deadline_s is not used: a reward model has no deadline")
        _check_model(found, f"{path}.model", component.model)
    if component.judge is not None:
        _check_judge(found, f"{path}.judge", component.judge)
    if component.weight == 0 and component.fallback is not None:
        what = f"{path}.fallback is not used, as {name} has the weight 0"
        found.warn("W010", f"{path}.fallback", what)


def _check_overlong(found: Findings, settings: TrainSettings | EvalSettings) -> None:
    overlong, path = settings.reward.overlong, "reward.overlong"
    if overlong is None:
        return
    longest = settings.rollout.max_response_tokens
    most = overlong.max_tokens or longest
    if overlong.buffer_tokens > most:
        what = f"{path}.buffer_tokens ({overlong.buffer_tokens}) is more than the longest response ({most})"
        value = f"{path}.buffer_tokens={max(most // 4, 1)}"
        found.refuse(
            "W011",
            f"{path}.buffer_tokens",
            what,
            why=f"every response would be penalised: the penalty would begin at {most - overlong.buffer_tokens} tokens",
            fix=f"set {path}.buffer_tokens to {most} or less, such as {value}",
            suggestions=((value,),),
        )
    if most - overlong.buffer_tokens >= longest:
        what = (
            f"no response is penalised: the penalty begins at {most - overlong.buffer_tokens}, the longest is {longest}"
        )
        fix = f"set {path}.max_tokens={longest}, or leave it out"
        found.warn("W012", f"{path}.max_tokens", what, fix=fix)


def labels_of(config: Mapping[str, Any]) -> int:
    """Outputs of a classifier, by its config.json: two, where that does not say."""
    labels, count = config.get("id2label"), config.get("num_labels")
    return len(labels) if isinstance(labels, Mapping) else count if isinstance(count, int) else 2


def read_reward_folder(path: str, where: str) -> ModelFolder:
    """A reward model's folder, read without its weights.

    Raises:
        UserError: if there is none, it has no weights, or it is no sequence classifier with one output.
    """
    folder = read_model_folder(Path(path))
    architectures = folder.config.get("architectures") or ()
    if not any(str(name).endswith(SCORERS) for name in architectures):
        has = ", ".join(map(str, architectures)) or "nothing that it says"
        raise UserError(
            f"{path} is no reward model: it has no sequence-classification head",
            where=where,
            why=f"its architecture is {has}",
            fix=f"a folder whose config.json names an architecture that ends in {SCORERS}",
        )
    if (count := labels_of(folder.config)) != 1:
        raise UserError(
            f"{path} has {count} outputs, and a reward is one number",
            where=where,
            why="num_labels, or id2label, of its config.json",
            fix="a model with one label",
        )
    return folder


def _check_model(found: Findings, path: str, model: RewardModelSettings) -> None:
    try:
        folder = read_reward_folder(model.path, f"{path}.path")
    except UserError as error:
        found.refuse("W013", f"{path}.path", error.what, why=error.why, fix=error.fix)
        return
    made_for = folder.text_config.get("max_position_embeddings")
    if isinstance(made_for, int) and (model.max_tokens or 0) > made_for:
        what = f"{path}.max_tokens is {model.max_tokens}, the model was made for {made_for} (max_position_embeddings)"
        found.warn("W014", f"{path}.max_tokens", what)


def _check_judge(found: Findings, path: str, judge: JudgeSettings) -> None:
    if not re.match(r"https?://[^/\s]+", judge.url):
        fix = "such as http://localhost:8000/v1"
        found.refuse("W015", f"{path}.url", f"{judge.url!r} is no address of a service", fix=fix)
    if judge.prompt is not None and judge.prompt_file is not None:
        found.refuse("W016", f"{path}.prompt", f"{path}.prompt and {path}.prompt_file are both given", fix="keep one")
    _check_template(found, path, judge)
    try:
        if re.compile(judge.pattern).groups < 1:
            fix = r"such as score: (\d+)"
            found.refuse("W017", f"{path}.pattern", "the pattern needs a group around the number", fix=fix)
    except re.error as error:
        found.refuse("W017", f"{path}.pattern", "the pattern is no regular expression", why=str(error))
    lowest, highest = judge.lowest, judge.highest
    if lowest is not None and highest is not None and not lowest < highest:
        found.refuse("W018", f"{path}.highest", f"no number lies between lowest={lowest:g} and highest={highest:g}")
    variable = judge.api_key_variable
    if variable is not None and not is_set(variable):
        what = f"the environment variable {variable} is not set here"
        found.warn(
            "W019", f"{path}.api_key_variable", what, why="a run without it is refused", fix=f"export {variable}=…"
        )


def _check_template(found: Findings, path: str, judge: JudgeSettings) -> None:
    from jinja2 import TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import SandboxedEnvironment

    try:
        unknown = find_undeclared_variables(SandboxedEnvironment().parse(judge_template(judge))) - JUDGE_FIELDS
    except OSError as error:
        what = f"the judge's template {judge.prompt_file} cannot be read"
        found.refuse("W016", f"{path}.prompt_file", what, why=error.strerror or str(error))
        return
    except (TemplateSyntaxError, UnicodeDecodeError) as error:
        found.refuse("W016", f"{path}.prompt", "the judge's template is no Jinja template", why=str(error))
        return
    if unknown:
        what = f"the judge's template uses {', '.join(sorted(unknown))}, which no sample has"
        found.refuse("W016", f"{path}.prompt", what, fix=f"it may use {', '.join(sorted(JUDGE_FIELDS))}")


def component_lines(settings: TrainSettings | EvalSettings) -> Iterator[LedgerLine]:
    """Lines of the plan about components."""
    reward = settings.reward
    for name, component in reward.components.items():
        path = f"reward.components.{name}"
        if component.function is not None:
            yield _line(settings, f"{name}: function", component.function, f"{path}.function")
        if component.model is not None:
            yield from _model_lines(settings, name, path, component.model)
        if component.judge is not None:
            yield from _judge_lines(settings, name, path, component)
        yield _line(settings, f"{name}: weight", component.weight, f"{path}.weight")
    if (overlong := reward.overlong) is not None:
        most, buffer = overlong.max_tokens or settings.rollout.max_response_tokens, overlong.buffer_tokens
        formula = f"min(−(len − ({most} − {buffer})) ÷ {buffer} × {overlong.factor:g}, 0)"
        if buffer <= most:
            yield _derived("overlong: penalty begins at", most - buffer, formula, "tokens")
    if names := component_names(reward):
        yield _derived("components", len(names), "their weighted sum is the reward: " + ", ".join(names), "")


def _model_lines(
    settings: TrainSettings | EvalSettings, name: str, path: str, model: RewardModelSettings
) -> Iterator[LedgerLine]:
    yield _line(settings, f"{name}: reward model", model.path, f"{path}.model.path")
    try:
        folder = read_reward_folder(model.path, path)
    except UserError:
        return
    yield _derived(f"{name}: parameters", folder.num_parameters, "of the reward model's files", "parameters")


def _judge_lines(
    settings: TrainSettings | EvalSettings, name: str, path: str, component: ComponentSettings
) -> Iterator[LedgerLine]:
    judge = component.judge
    if judge is None:
        return
    yield _line(settings, f"{name}: judge", f"{judge.model} at {judge.url}", f"{path}.judge")
    most = judge.max_concurrent * 60 / judge.request_deadline_s
    formula = (
        f"at least {judge.max_concurrent} at once × 60 ÷ {judge.request_deadline_s:g} s, unless the service is late"
    )
    if judge.requests_per_minute is not None:
        yield _derived(f"{name}: requests a minute, at most", judge.requests_per_minute, "requests_per_minute", "")
        most, formula = min(most, judge.requests_per_minute), f"{formula}, within requests_per_minute"
    yield _derived(f"{name}: requests a minute, slowest", most, formula, "")
    if isinstance(settings, TrainSettings):
        samples = settings.batch.prompts_per_step * settings.batch.samples_per_prompt
        yield _derived(f"{name}: requests a step", samples, "samples of a step, without those in the cache", "")
        if judge.requests_per_minute is not None:
            seconds = math.ceil(samples * 60 / judge.requests_per_minute)
            yield _derived(
                f"{name}: seconds a step, at least", seconds, "requests a step × 60 ÷ requests a minute", "s"
            )


def _line(settings: TrainSettings | EvalSettings, name: str, value: float | str, path: str) -> LedgerLine:
    origin = settings.provenance.of(path)
    return LedgerLine(section="reward", name=name, value=value, formula=path, source=origin)


def _derived(name: str, value: float, formula: str, unit: str) -> LedgerLine:
    return LedgerLine(section="reward", name=name, value=value, formula=formula, source=DERIVED, unit=unit)
