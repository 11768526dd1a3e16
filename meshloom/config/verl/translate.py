"""From a verl command to native settings, with an account of every key.

Owns: the order of the rules and the result. Refuses to know: files of rows, devices. Always holds: each key that was typed
is in exactly one of translated, ignored and refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.config.verl import actor_rules, algorithm_rules, critic_rules, data_rules, parallel_rules, rollout_rules
from meshloom.config.verl.command import Command, read_command
from meshloom.config.verl.defaults import CONFIG_NAMES, ENTRIES, OTHER_ENTRIES, RL_DEFAULTS, SFT_DEFAULTS
from meshloom.config.verl.files import groups_of, take_file
from meshloom.config.verl.given import Given
from meshloom.config.verl.harmless import apply_tables
from meshloom.config.verl.known import known_keys
from meshloom.config.verl.optimizer_rules import DEFAULT_SHAPES, optimizer_rules
from meshloom.config.verl.sft_rules import sft_rules
from meshloom.config.verl.sheet import Native, Sheet
from meshloom.config.verl.trainer_rules import known_steps, trainer_rules

OFFLOAD_FOLDER, OFFLOAD_DEVICE = "VERL_OFFLOAD_DIR", "VERL_OFFLOAD_DEVICE"
_NO_COUNTERPART = "there is no counterpart here; leave it out"


@dataclass(frozen=True, kw_only=True)
class Translation:
    """What a verl command becomes.

    Args:
        kind: ``train`` or ``sft``: the command of ours that runs it.
        entry: verl's program.
        settings: native settings by dotted path.
        translated: for each typed key, the native settings it decides.
        ignored: for each typed key, why it does not matter.
        refused: for each typed key, why the command cannot run and what to change.
        warnings: for each key, what runs but is likely not meant, or differs from verl.
        resume: whether a run that is there already goes on.
    """

    kind: str
    entry: str
    settings: Mapping[str, Native]
    translated: Mapping[str, str]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]
    warnings: Mapping[str, str]
    resume: bool

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        settings = {path: {"value": native.value, "from": native.origin} for path, native in self.settings.items()}
        return {
            "entry": self.entry,
            "command": self.kind,
            "translated": dict(self.translated),
            "ignored": dict(self.ignored),
            "refused": dict(self.refused),
            "warnings": dict(self.warnings),
            "settings": settings,
        }


def translate(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    num_prompts: int | None = None,
    vllm_is_there: bool = True,
) -> Translation:
    """Translate a verl command.

    Args:
        words: the command as a shell splits it, or its overrides alone, or one word with its whole text.
        environment: values of ``VERL_OFFLOAD_DIR`` and ``VERL_OFFLOAD_DEVICE``, where they are set.
        num_prompts: rows of the training data; none if not known. A warm-up that is a share of the run needs it.
        vllm_is_there: whether vLLM can generate; otherwise the embedded engine does.

    Raises:
        UserError: if it is no command at all.
    """
    command = read_command(words)
    refused: dict[str, str] = {}
    if "." not in command.module:
        named = [entry for entry in ENTRIES if entry.rpartition(".")[2] == command.module]
        command.module = named[0] if named else command.module
    kind, defaults = _program(command, refused)
    given = Given(known=known_keys(kind), environment=command.environment)
    defaults = {**defaults, **_configuration(command, given, refused, kind)}
    for override in command.overrides:
        if not override.lstrip("+~").startswith("hydra."):
            given.add_override(override)
    given.resolve(defaults)
    sheet = Sheet(given, defaults)
    variables = {**(environment or {}), **command.environment}
    where = _offload_place(sheet, variables)
    if kind == "sft":
        sft_rules(sheet, num_prompts, where)
    else:
        _rl_rules(sheet, where, num_prompts, vllm_is_there)
    apply_tables(sheet)
    _offload_folder(sheet, where)
    for key in sheet.open():
        sheet.refuse(key, _NO_COUNTERPART)
    return _result(command, sheet, refused, kind)


def _rl_rules(sheet: Sheet, where: str, num_prompts: int | None, vllm_is_there: bool) -> None:
    data_rules.data_rules(sheet)
    data_rules.model_rules(sheet)
    actor_rules.batch_rules(sheet, parallel_rules.devices_of_replica(sheet, "actor"))
    actor_rules.loss_rules(sheet)
    actor_rules.divergence_rules(sheet)
    engine = parallel_rules.engine_of(sheet, "actor")
    block = f"{actor_rules.ACTOR}.{parallel_rules.ENGINES[engine].block}"
    actor_rules.precision_rules(sheet, engine, block)
    _optimizer(sheet, engine, num_prompts)
    parallel_rules.cluster_rules(sheet)
    parallel_rules.role_rules(sheet, "actor", where)
    _reference(sheet, where)
    rollout_rules.rollout_rules(sheet, vllm_is_there=vllm_is_there)
    algorithm_rules.algorithm_rules(sheet)
    critic_rules.critic_rules(sheet, where, updates_per_step=_updates(sheet), steps=known_steps(sheet, num_prompts))
    algorithm_rules.distillation_rules(sheet)
    data_rules.reward_rules(sheet)
    trainer_rules(sheet)


def _optimizer(sheet: Sheet, engine: str, num_prompts: int | None) -> None:
    group = f"{actor_rules.ACTOR}.optim"
    if engine in DEFAULT_SHAPES:
        name, shape = DEFAULT_SHAPES[engine]
        sheet.defaults = {**sheet.defaults, f"{group}.{name}": shape}
    steps = known_steps(sheet, num_prompts)
    optimizer_rules(sheet, group, engine, updates_per_step=_updates(sheet), steps=steps)


def _updates(sheet: Sheet) -> int:
    """Optimizer updates of a step."""
    prompts = int(sheet.settings["batch.prompts_per_step"].value or 1)
    update = int(sheet.settings["batch.prompts_per_update"].value or prompts)
    return max(1, prompts // max(1, update)) * int(sheet.settings["batch.epochs_per_step"].value or 1)


def _reference(sheet: Sheet, where: str) -> None:
    if sheet.settings["algorithm.kl"].value != "none":
        parallel_rules.role_rules(sheet, "reference", where)
        return
    why = "there is no reference policy, as neither use_kl_loss nor use_kl_in_reward is true"
    prefix = f"{actor_rules.REFERENCE}."
    sheet.ignore(why, *[key for key in sheet.open() if key.startswith(prefix)])


def _program(command: Command, refused: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Kind of the program, and its defaults; an unknown one is refused and read as reinforcement learning."""
    kind, different = ENTRIES.get(command.module, ("rl", {}))
    if command.module and command.module not in ENTRIES:
        name = command.module.rpartition(".")[2]
        kind = "sft" if "sft" in name else "rl"
        advice = OTHER_ENTRIES.get(name, f"programs that are understood: {', '.join(ENTRIES)}")
        refused[command.module] = f"this program is not understood: {advice}"
    elif not command.module and _looks_like_sft(command):
        kind = "sft"
    return kind, {**(RL_DEFAULTS if kind == "rl" else SFT_DEFAULTS), **different}


def _looks_like_sft(command: Command) -> bool:
    """Whether settings without a program are those of fine-tuning: they name its groups and none of ``main_ppo``'s."""
    names = [override.lstrip("+~").partition("=")[0] for override in command.overrides]
    names += [group for file in command.files for group in groups_of(Path(file))]
    rl = ("actor_rollout_ref.", "algorithm.", "reward.", "critic.", "custom_reward_function.", "reward_model.")
    return any(name.startswith(("optim.", "model.", "engine.")) for name in names) and not any(
        name.startswith(rl) for name in names
    )


def _configuration(command: Command, given: Given, refused: dict[str, str], kind: str) -> dict[str, Any]:
    """Take ``--config-name``, files and the launcher's numbers; defaults that differ."""
    files = [Path(name) for name in command.files]
    name = command.options.get("name", "").removesuffix(".yaml")
    different: dict[str, Any] = dict(CONFIG_NAMES.get(name, {}))
    if name and name not in CONFIG_NAMES:
        folder = command.options.get("path") or command.options.get("dir") or "."
        files.insert(0, Path(folder) / f"{name}.yaml")
    for file in files:
        try:
            different |= take_file(file, given)
        except (OSError, UnicodeDecodeError) as error:
            refused[str(file)] = f"the file of settings cannot be read: {error}; name it by its path"
    for word in command.other:
        script = word.endswith(".sh")
        fix = f'give the text of a script: --verl -- "$(cat {word})"' if script else "leave it out"
        refused[word] = f"this is neither an override a.b=value nor an option of verl; {fix}"
    for word in command.lost:
        text = "it stands behind the line that ends the command, so a shell does not pass it on"
        refused[word.partition("=")[0].lstrip("+~")] = f"{text}; end the line before it with \\, or leave it out"
    return different | (_launched(command, refused) if kind == "sft" else {})


_COUNTED = {"--nnodes": "trainer.nnodes", "--nproc-per-node": "trainer.n_gpus_per_node"}


def _launched(command: Command, refused: dict[str, str]) -> dict[str, int]:
    """The numbers of torchrun, which decide how many processes fine-tuning has; main_ppo starts its own."""
    found: dict[str, int] = {}
    for option, key in _COUNTED.items():
        value = command.launcher.get(option)
        if value is not None and value.isdecimal():
            found[key] = int(value)
        elif value is not None:
            refused[option] = f"how many {value or 'nothing'} is, is not known here; write the number"
    return found


def _offload_place(sheet: Sheet, variables: Mapping[str, str]) -> str:
    """Folder for what is offloaded; empty: into the host's memory."""
    folder, device = variables.get(OFFLOAD_FOLDER, ""), variables.get(OFFLOAD_DEVICE, "").lower()
    if device in ("", "disk", "nvme", "ssd"):
        if device and not folder:
            sheet.refuse(OFFLOAD_DEVICE, f"{device} needs a folder; set {OFFLOAD_FOLDER}")
        return folder
    if device not in ("cpu", "host", "none"):
        sheet.refuse(OFFLOAD_DEVICE, f"{device!r} is neither cpu nor disk")
    return ""


def _offload_folder(sheet: Sheet, where: str) -> None:
    if where and any(native.value == "disk" for native in sheet.settings.values()):
        sheet.settings["offload.folder"] = Native(value=where, origin=f"environment {OFFLOAD_FOLDER}={where}")


def _result(command: Command, sheet: Sheet, refused: dict[str, str], kind: str) -> Translation:
    given = sheet.given
    refused |= {sheet.typed(key): reason for key, reason in sheet.refused.items()} | given.broken
    translated = {sheet.typed(key): ", ".join(paths) for key, paths in sheet.translated.items()}
    ignored = {sheet.typed(key): reason for key, reason in sheet.ignored.items()} | given.replaced
    ignored |= {
        override.lstrip("+~").partition("=")[0]: "Hydra's own folders and logs are not written"
        for override in command.overrides
        if override.lstrip("+~").startswith("hydra.")
    }
    in_front = [name for name in command.in_front if name not in (OFFLOAD_FOLDER, OFFLOAD_DEVICE)]
    ignored |= dict.fromkeys(
        in_front, "a command's environment is not set; where it matters, write it in front of meshloom"
    )
    for typed, children in reversed(given.inside.items()):
        _account_for_mapping(typed, children, translated, ignored, refused)
    translated = {key: value for key, value in translated.items() if key not in refused}
    return Translation(
        kind="sft" if kind == "sft" else "train",
        entry=command.module or ("verl.trainer.sft_trainer" if kind == "sft" else "verl.trainer.main_ppo"),
        settings=sheet.settings,
        translated=translated,
        ignored={key: value for key, value in ignored.items() if key not in refused and key not in translated},
        refused=refused,
        warnings=sheet.warnings,
        resume=sheet.text("trainer.resume_mode") == "auto",
    )


def _account_for_mapping(
    typed: str,
    children: Sequence[str],
    translated: dict[str, str],
    ignored: dict[str, str],
    refused: dict[str, str],
) -> None:
    """A key that gave a whole mapping is what the keys in it are."""
    for account in (refused, translated, ignored):
        reasons = [account[child] for child in children if child in account]
        if reasons:
            account[typed] = "; ".join(dict.fromkeys(reasons))
            return
    ignored[typed] = "it is empty"
