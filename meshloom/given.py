"""The settings that a command is given: a file or a run folder, and overrides.

Owns: those arguments, and telling one from the other. Refuses to know: what the settings are used for.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from meshloom.config.errors import UserError
from meshloom.config.settings import EvalSettings, RunSettings, SftSettings, TrainSettings

S = TypeVar("S", bound=RunSettings)

_SETTINGS_HELP = """\
RUN.yaml holds the settings; each a.b=c overrides one, its value in YAML:

  optimizer.lr=1e-5   model.lora.rank=8   model.lora=null   data.train.files=[a.jsonl,b.jsonl]

`meshloom schema %(kind)s` prints all settings; `meshloom plan --kind %(kind)s RUN.yaml` shows what they come to."""

KINDS: dict[str, type[TrainSettings] | type[SftSettings] | type[EvalSettings]] = {
    "train": TrainSettings,
    "sft": SftSettings,
    "eval": EvalSettings,
}


def load_given(kind: type[S], given: Sequence[str], *, resume: bool = False) -> S:
    """Settings from a command's arguments. A run folder that is resumed is the run's folder, even if it has moved."""
    from meshloom.config.load import load_settings

    file, overrides = split_given(given)
    try:
        settings = load_settings(kind, file, overrides)
    except UserError as error:
        _say_if_of_another_kind(kind, file, overrides, error)
        raise
    folders = [text for text in given if os.path.isdir(text)]
    moved = any(Path(folder).resolve() != Path(settings.run_dir).resolve() for folder in folders)
    if resume and moved and settings.provenance.of("run_dir").startswith(str(file)):
        settings = load_settings(kind, file, [*overrides, f"run_dir={json.dumps(folders[0])}"])
    return settings


def _say_if_of_another_kind(kind: type[S], file: Path | None, overrides: list[str], error: UserError) -> None:
    """Say so, where a settings file is for another command: each of its keys would be told as unknown."""
    from meshloom.config.kinds import better_kind

    names = {settings_kind: name for name, settings_kind in KINDS.items()}
    other = better_kind(kind, file, overrides) if kind in names and file is not None else None
    if other is not None:
        what = f"{file} has keys of `meshloom {names[other]}`, not of `meshloom {names[kind]}`"
        fix = f"meshloom {names[other]} {file}"
        if kind is EvalSettings:
            fix += (
                "; or copy what an evaluation has to a file of its own: data.validation, reward, rollout, another run_dir, and "
                "model.path, which of a run's checkpoint is RUN_DIR/checkpoints/step-…/model (with adapters: export it first)"
            )
        raise UserError(what, why=str(error), fix=fix) from error


def split_given(given: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The settings file, or that of a run folder, and the overrides."""
    names = [text for text in given if "=" not in text or os.path.exists(text)]
    if len(names) > 1:
        strangers = [name for name in names if not os.path.exists(name) and not name.endswith((".yaml", ".yml"))]
        if len(strangers) == len(names) - 1:
            raise UserError(f"{strangers[0]} has no value", fix=f"{strangers[0]}=VALUE")
        raise UserError(f"more than one settings file: {', '.join(names)}", fix="overrides have the form a.b=c")
    file = Path(names[0]) if names else None
    if file is not None and file.is_dir():
        folder, file = file, file / "settings.yaml"
        if not file.is_file():
            why = "a folder stands for the settings.yaml of a run"
            raise UserError(f"{folder} is no run folder: it has no settings.yaml", why=why, fix="name a YAML file")
    return file, [text for text in given if text not in names]


def settings_arguments(parser: argparse.ArgumentParser, *, kind: str, resume: bool) -> None:
    parser.usage = f"%(prog)s RUN.yaml [a.b=c ...]{' [--resume]' if resume else ''} [options]"
    parser.epilog = _SETTINGS_HELP % {"kind": kind}
    parser.add_argument(
        "settings", nargs="*", metavar="RUN.yaml", help="settings file, or the folder of a run; then overrides a.b=c"
    )
    if resume:
        parser.add_argument("--resume", action="store_true", help="go on from the run's newest checkpoint")


def verl_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verl", action="store_true", help="what stands behind -- is a verl command, or its overrides")
    parser.add_argument("--write", type=Path, metavar="RUN.yaml", help="with --verl: write our settings to this file")
