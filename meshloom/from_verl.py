"""Running and planning verl commands.

Owns: the settings that a verl command and overrides of ours come to, with the origin of each, and how the account of its
keys is shown and written. Refuses to know: what verl's keys mean (``config.verl``). Always holds: a command with a refused
key does not run, and says everything that is refused at once.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshloom.config import yaml_text
from meshloom.config.environment import verl_offload
from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.problems import Problem, require_none
from meshloom.config.provenance import Provenance, is_verls_default
from meshloom.config.recipes import DECIDED
from meshloom.config.settings import SftSettings, SourceSettings, TrainSettings
from meshloom.config.verl import Translation, translate
from meshloom.config.verl.sheet import Native
from meshloom.config.verl.turn_rules import ENABLE, FUNCTIONS, INTERACTION, TOOLS, brings_environment
from meshloom.plan.build import Plan
from meshloom.plan.count import count_rows
from meshloom.plan.report import as_text
from meshloom.verl_scores import default_score

_REWARD = "reward.custom_reward_function.path"
_RECIPE = ("algorithm=", "algorithm.recipe=")


def read_verl(words: Sequence[str], native: Sequence[str] = (), *, to_run: bool = False) -> Translation:
    """Translate a verl command, with what its rows say.

    Args:
        words: of the command.
        native: overrides of ours, which win.
        to_run: whether it is run on this machine now; then the embedded engine generates where vLLM is not installed.

    Raises:
        UserError: if it is no command.
    """
    there = importlib.util.find_spec("vllm") is not None
    first = translate(words, environment=verl_offload())
    files = [path for path in first.settings["data.train.files"].value or () if isinstance(path, str)]
    rows = count_rows(SourceSettings(files=tuple(Path(name).expanduser().as_posix() for name in files)))
    vllm_is_there = there or not to_run
    translation = translate(words, environment=verl_offload(), num_prompts=rows, vllm_is_there=vllm_is_there)
    translation = _without_default_validation(_without_default_loggers(translation))
    if translation.kind == "sft":
        return translation
    if not there and translation.settings.get("rollout.engine", Native(value="", origin="")).value == "vllm":
        text = "vLLM is not installed here; without it `meshloom train` generates with the embedded engine"
        translation = _with(translation, warnings={"actor_rollout_ref.rollout.name": text})
    return _with_environment(_with_score(translation, files, native), native)


def _with(translation: Translation, **more: Mapping[str, Any]) -> Translation:
    """A translation with further entries in some of its accounts."""
    merged: dict[str, Any] = {name: {**getattr(translation, name), **entries} for name, entries in more.items()}
    return dataclasses.replace(translation, **merged)


def _with_environment(translation: Translation, native: Sequence[str]) -> Translation:
    """Without refusals that are about what answers a turn, where overrides of ours name that; else without what else is said of
    an environment that is not there."""
    lifted = [key for key in (ENABLE, TOOLS, INTERACTION, FUNCTIONS) if key in translation.refused]
    if not lifted:
        return translation
    if not brings_environment(native):
        kept = {path: value for path, value in translation.settings.items() if not path.startswith("environment.")}
        return dataclasses.replace(translation, settings=kept)
    refused = {key: reason for key, reason in translation.refused.items() if key not in lifted}
    ignored = dict.fromkeys(lifted, "environment, which is given beside it, says what answers a turn")
    return _with(dataclasses.replace(translation, refused=refused), ignored=ignored)


def _without_default_validation(translation: Translation) -> Translation:
    """Without verl's own default of validation files, where no such file is there."""
    path = "data.validation.files"
    files = translation.settings.get(path)
    if (
        files is None
        or not is_verls_default(files.origin)
        or all(Path(name).expanduser().is_file() for name in files.value)
    ):
        return translation
    kept = {name: native for name, native in translation.settings.items() if not name.startswith("data.validation")}
    text = f"verl's default {', '.join(files.value)} is not there, so nothing is validated"
    return _with(dataclasses.replace(translation, settings=kept), warnings={"data.val_files": text})


def _without_default_loggers(translation: Translation) -> Translation:
    """Without the loggers of verl's own default whose package is not installed; those that are asked for stay."""
    path = "logging.loggers"
    native = translation.settings[path]
    missing = [name for name in native.value if importlib.util.find_spec(name) is None]
    if not is_verls_default(native.origin) or not missing:
        return translation
    kept = Native(value=[name for name in native.value if name not in missing], origin=native.origin)
    text = f"{', '.join(missing)} of verl's default is not installed; metrics are in the run's folder"
    return _with(translation, settings={path: kept}, warnings={"trainer.logger": text})


def _with_score(translation: Translation, files: Sequence[str], native: Sequence[str]) -> Translation:
    """With the verifier that verl's default scorer stands for."""
    score = default_score([Path(name).expanduser().as_posix() for name in files])
    if score.pictures:
        text = f"the rows have pictures (column {score.pictures}), which are not read: this trains on text alone"
        translation = _with(translation, refused={"data.train_files": text})
    own = any(override.startswith(("reward.function=", "reward.components.")) for override in native)
    scored = any(name == "reward.function" or name.startswith("reward.components.") for name in translation.settings)
    if own:  # how the command's function is called says nothing of another one
        kept = {path: value for path, value in translation.settings.items() if path != "reward.form"}
        return dataclasses.replace(translation, settings=kept)
    if scored:
        return translation
    if score.refusal:
        return _with(translation, refused={_REWARD: score.refusal})
    if score.function is None:
        return translation
    origin = f"verl's default scorer of {', '.join(score.sources)}"
    settings = {"reward.function": Native(value=score.function, origin=origin)}
    settings |= {f"reward.kwargs.{name}": Native(value=value, origin=origin) for name, value in score.kwargs.items()}
    return _with(translation, settings=settings, warnings={_REWARD: score.warning})


def settings_of(translation: Translation, native: Sequence[str] = ()) -> TrainSettings | SftSettings:
    """The settings that a translation and overrides of ours come to; each value knows the verl key it is from.

    A recipe among our overrides takes the place of what the command says of the algorithm.

    Raises:
        UserError: if a value is out of range, or an override of ours is wrong.
    """
    kind: type[TrainSettings] | type[SftSettings] = TrainSettings if translation.kind == "train" else SftSettings
    given = translation.settings
    if any(override.startswith(_RECIPE) for override in native):
        given = {path: value for path, value in given.items() if path not in DECIDED}
    overrides = [f"{path}={json.dumps(value.value)}" for path, value in _ordered(given)]
    settings = load_settings(kind, None, [*overrides, *native])
    origins = {path: _origin(path, origin, given) for path, origin in settings.provenance.origins.items()}
    settings._provenance = Provenance(origins)
    return settings


def _ordered(settings: Mapping[str, Native]) -> list[tuple[str, Native]]:
    """Groups that are none before the keys in them."""
    return sorted(settings.items(), key=lambda item: item[0].count("."))


def _origin(path: str, origin: str, given: Mapping[str, Native]) -> str:
    if not origin.startswith("override "):
        return origin
    name = origin.removeprefix("override ").partition("=")[0]
    native = given.get(name)
    return native.origin if native is not None and origin == f"override {name}={json.dumps(native.value)}" else origin


def require_runnable(translation: Translation) -> None:
    """Refuse a command with refused keys.

    Raises:
        UserError: that names every one of them, why, and what to do.
    """
    require_none(problems_of(translation), "the verl command")


def problems_of(translation: Translation) -> list[Problem]:
    """The refused keys as problems of a plan."""
    return [
        Problem(code="V001", what=f"{key} cannot be used", where=f"verl {key}", why=_why(reason), fix=_fix(reason))
        for key, reason in translation.refused.items()
    ]


def _why(reason: str) -> str:
    return reason.rpartition("; ")[0] or reason


def _fix(reason: str) -> str:
    return reason.rpartition("; ")[2] if "; " in reason else ""


def warnings_of(translation: Translation) -> list[Problem]:
    """The warnings as warnings of a plan."""
    return [
        Problem(code="V002", what=f"{key}: {text}", where=f"verl {key}") for key, text in translation.warnings.items()
    ]


def judged(plan: Plan, translation: Translation) -> Plan:
    """The plan with what the translation found."""
    return dataclasses.replace(
        plan,
        problems=(*problems_of(translation), *plan.problems),
        warnings=(*warnings_of(translation), *plan.warnings),
    )


def print_translation(translation: Translation, console: Console) -> None:
    """The account of the command's keys, on a terminal."""
    console.print(Text(f"verl command: {translation.entry}", style="bold"))
    console.print(_settings_table(translation))
    ignored = _table("ignored, as it does not matter", ("verl", "why"))
    for key, reason in translation.ignored.items():
        ignored.add_row(Text(key), Text(reason))
    if translation.ignored:
        console.print("", ignored)
    console.print()


def _settings_table(translation: Translation) -> Table:
    table = _table("settings that it comes to", ("setting", "value", "from"))
    for path, native in sorted(translation.settings.items()):
        style = "dim" if is_verls_default(native.origin) else ""
        value = json.dumps(native.value, ensure_ascii=False)
        table.add_row(*(Text(cell, style=style) for cell in (path, value, native.origin)))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("setting", "verl"))
    return table


def written(settings: TrainSettings | SftSettings) -> str:
    """The settings that were given as YAML, each with the verl key it is from behind it, for ``--write``."""
    return "\n".join([*_yaml_lines(settings.model_dump(mode="json"), settings.provenance, ""), ""])


def _yaml_lines(group: Mapping[str, Any], provenance: Provenance, prefix: str) -> Iterator[str]:
    """Lines of the given values of a group, in the order of its fields."""
    indent = "  " * prefix.count(".")
    for name, value in group.items():
        path = f"{prefix}{name}"
        if path not in provenance.origins and not any(one.startswith(f"{path}.") for one in provenance.origins):
            continue
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, provenance, f"{path}.")
            continue
        lines = _flow(value).splitlines()
        comment = f"  # {' '.join(provenance.of(path).split())}" if len(lines) == 1 else ""
        yield f"{indent}{name}: {lines[0]}{comment}"
        yield from (f"{indent}  {line}" for line in lines[1:])


def _flow(value: Any) -> str:
    """A value as YAML that may stand behind its key."""
    text = yaml_text.write(value if isinstance(value, list) else [value]).rstrip("\n")
    return text if isinstance(value, list) else text[1:-1]


def write_settings(file: Path, settings: TrainSettings | SftSettings) -> None:
    """Write settings as YAML to a file that is not there yet.

    Raises:
        UserError: if there is one, or it cannot be written.
    """
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(written(settings))
    except FileExistsError as error:
        raise UserError(f"there is a file {file} already", where="--write", fix="name another, or remove it") from error
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}", where="--write") from error


def goes_on(translation: Translation, run_dir: str) -> bool:
    """Whether a run in that folder goes on: verl's ``resume_mode=auto``, and there is one."""
    return translation.resume and (Path(run_dir) / "settings.yaml").is_file()


def settings_to_run(
    words: Sequence[str], native: Sequence[str], file: Path | None = None
) -> tuple[TrainSettings | SftSettings, bool]:
    """Settings of a verl command that is run now, and whether a run that is there goes on; the account is printed.

    Args:
        words: of the command.
        native: overrides of ours, which win.
        file: where to write the settings, if anywhere.

    Raises:
        UserError: that names every key that is refused.
    """
    translation = read_verl(words, native, to_run=True)
    require_runnable(translation)
    settings = settings_of(translation, native)
    if file is not None:
        write_settings(file, settings)
    print(as_text(lambda console: print_translation(translation, console)), end="")
    for key, text in translation.warnings.items():
        print(f"warning: {key}: {text}")
    return settings, goes_on(translation, settings.run_dir)


def tell_without_plan(translation: Translation, error: UserError, *, as_json: bool) -> None:
    """Print what can be said where the settings themselves are refused.

    Args:
        error: why the settings are refused.
        as_json: with the account of the keys in ``verl``, as with a plan.

    Raises:
        UserError: with everything that is refused, unless it is printed as JSON.
    """
    found = [*problems_of(translation), Problem(code="V003", what=error.what, where=error.where, fix=error.fix)]
    if as_json:
        problems = [dataclasses.asdict(problem) for problem in found]
        print(json.dumps({"problems": problems, "verl": translation.as_json()}, indent=2, ensure_ascii=False))
        return
    print(as_text(lambda console: print_translation(translation, console)), end="")
    require_none(found, "the verl command")
