"""What a verl command gives, key by key, whatever spelling it uses.

Owns: old and new names of the same key, which of several values wins, mappings taken apart into keys, interpolations.
Refuses to know: what a key means. Always holds: later beats earlier; every key that was typed is remembered, with its value
or with the reason why it has none.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshloom.config import yaml_text
from meshloom.config.verl.command import UNRESOLVED
from meshloom.config.verl.known import KnownKeys
from meshloom.config.verl.values import read_value

_ROLE = r"(actor_rollout_ref\.(?:actor|ref)|critic)"
_OLD_NAMES = (
    (r"(?:reward_model|custom_reward_function)\.overlong_buffer\.(.+)", r"reward.reward_kwargs.overlong_buffer_cfg.\1"),
    (r"custom_reward_function\.reward_kwargs(.*)", r"reward.custom_reward_function.reward_kwargs\1"),
    (r"custom_reward_function\.(.+)", r"reward.custom_reward_function.\1"),
    (r"reward_model\.reward_manager|reward_manager\.name", "reward.reward_manager.name"),
    (r"reward_manager\.(.+)", r"reward.reward_manager.\1"),
    (r"reward_model\.reward_kwargs(.*)", r"reward.reward_kwargs\1"),
    (r"reward_model\.(num_workers|sandbox_fusion\..+)", r"reward.\1"),
    (r"sandbox_fusion\.(.+)", r"reward.sandbox_fusion.\1"),
    (r"reward_model\.(enable|enable_resource_pool|n_gpus_per_node|nnodes)", r"reward.reward_model.\1"),
    (r"reward_model\.(?:rollout|inference)(.*)", r"reward.reward_model.rollout\1"),
    (r"reward_model\.model(?:\.|_)path", "reward.reward_model.model_path"),
    (r"(actor_rollout_ref\.actor|critic)\.(?:optim\.)?grad_clip", r"\1.optim.clip_grad"),
    (r"optim\.grad_clip", "optim.clip_grad"),
    (r"optim\.warmup_steps_ratio", "optim.lr_warmup_steps_ratio"),
    (r"(.*\.)?optim\.(?:warmup_style|lr_scheduler)", r"\1optim.lr_scheduler_type"),
    (r"(actor_rollout_ref\.(?:actor|ref)|critic)\.fsdp\.(.+)", r"\1.fsdp_config.\2"),
    (rf"{_ROLE}\.mindspeed\.llm_kwargs\.(.+)", r"\1.megatron.override_transformer_config.\2"),
    (rf"{_ROLE}\.mindspeed\.(.+)", r"\1.megatron.\2"),
    (r"critic\.model\.fsdp_config\.(.+)", r"critic.fsdp_config.\1"),
    (r"actor_rollout_ref\.actor\.policy_loss\.(tau_pos|tau_neg)", r"actor_rollout_ref.actor.\1"),
    (r"actor_rollout_ref\.model\.lora\.(rank|alpha)", r"actor_rollout_ref.model.lora_\1"),
    (r"model\.lora\.(rank|alpha)", r"model.lora_\1"),
    (r"algorithm\.rollout_is_threshold", "algorithm.rollout_correction.rollout_is_threshold"),
    (r"(.+\.multi_turn)\.max_turns", r"\1.max_assistant_turns"),
    (r"ray_init(.*)", r"ray_kwargs.ray_init\1"),
    (r"model\.partial_pretrain", "model.path"),
    (r"model\.strategy", "engine.strategy"),
    (r"model\.fsdp_config\.(.+)", r"engine.\1"),
    (r"ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"),
    (r"use_remove_padding", "model.use_remove_padding"),
    (r"data\.multiturn\.(.+_key)", r"data.\1"),
    (r"trainer\.checkpoint\.(.+)", r"checkpoint.\1"),
)
"""Names of earlier releases, and of other places for the same thing; the later one of a command wins."""


def one_name(key: str) -> str:
    """The one name that the translation uses for a key."""
    for old, new in _OLD_NAMES:
        if match := re.fullmatch(old, key):
            return match.expand(new)
    return key


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key with its winning value.

    Args:
        key: in the spelling of the translation.
        typed: as the user wrote it, without ``+``.
        value: plain Python value.
        origin: the override, or file and line; and what it replaces.
    """

    key: str
    typed: str
    value: Any
    origin: str


@dataclass
class Given:
    """Everything a command gives.

    Args:
        known: the keys that verl has.
        environment: variables that interpolations may use.
    """

    known: KnownKeys
    environment: Mapping[str, str] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    """Typed keys whose value cannot be used, with the reason and what to do."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Typed keys of another spelling that a later one replaces."""
    inside: dict[str, list[str]] = field(default_factory=dict)
    """Typed keys that gave a whole mapping, with the typed keys in it."""

    def add_override(self, override: str) -> None:
        """Take ``a.b=value``, ``+a.b=value``, ``++a.b=value``, ``~a.b`` or ``~a.b=value``."""
        name, equals, text = override.partition("=")
        key = name.lstrip("+~")
        if "@" in key or "/" in key:
            advice = "set model_engine, or the strategy of the role"
            self.broken[key] = f"parts of verl's configuration are not chosen one by one; {advice}"
            return
        if name.startswith("~"):
            self.add(key, None, f"{override} (removed)")
            return
        if found := UNRESOLVED.search(text):
            self.broken[key] = f"{found[0]} has no value here; give it one, or write the value itself"
            return
        try:
            value = read_value(text)
        except ValueError as error:
            self.broken[key] = f"the value {text!r} cannot be read: {error}"
            return
        self.add(key, value, override)

    def add_file(self, file: Path) -> None:
        """Take the keys of a YAML file of verl's.

        Raises:
            OSError: if it cannot be read.
        """
        document = yaml_text.read(file.read_text(encoding="utf-8"))
        for line, what in document.faults:
            self.broken[f"{file}:{line}"] = what
        for path, value in _leaves(document.data if isinstance(document.data, dict) else {}, (), self.known):
            if path[0] not in ("defaults", "hydra") and path[-1] != "_target_":
                self.add(".".join(path), value, f"{file}:{document.lines.get(path, 1)}")

    def add(self, typed: str, value: Any, origin: str) -> None:
        """Take a key with its value; a mapping is the keys in it."""
        if isinstance(value, dict) and not (value and any("." in name for name in value)):
            self._add_mapping(typed, value, origin)
            return
        if typed not in self.known:
            self.broken[typed] = self._unknown(typed)
            return
        key = one_name(typed)
        before = self.entries.get(key)
        if before is not None and before.typed != typed:
            self.replaced[before.typed] = f"{typed} means the same and comes later: {origin}"
        self.replaced.pop(typed, None)
        self.broken.pop(typed, None)
        origin = origin if before is None else f"{origin}, which replaces {before.origin.partition(', which')[0]}"
        self.entries[key] = Entry(key=key, typed=typed, value=value, origin=origin)

    def _add_mapping(self, typed: str, value: dict[str, Any], origin: str) -> None:
        if typed not in self.known and typed not in self.known.groups:
            self.broken[typed] = self._unknown(typed)
            return
        self.inside[typed] = []
        for name, child in value.items():
            self.inside[typed].append(f"{typed}.{name}")
            self.add(f"{typed}.{name}", child, f"{origin} ({name})")

    def _unknown(self, typed: str) -> str:
        if typed in self.known.groups:
            return "this is a group of keys, not a key: give the keys in it"
        near = self.known.nearest(typed)
        advice = f"did you mean {' or '.join(near)}?" if near else "leave it out"
        return f"verl has no such key in its releases 0.4 to 0.9; {advice}"

    def resolve(self, defaults: Mapping[str, Any]) -> None:
        """Put values in for ``${a.b}`` and ``${oc.env:NAME}``."""
        for key, entry in list(self.entries.items()):
            try:
                value = self._resolved(entry.value, defaults, 0)
            except LookupError as error:
                del self.entries[key]
                self.broken[entry.typed] = f"{error.args[0]} has no value here; write the value itself"
            else:
                self.entries[key] = Entry(key=key, typed=entry.typed, value=value, origin=entry.origin)

    def _resolved(self, value: Any, defaults: Mapping[str, Any], depth: int) -> Any:
        if isinstance(value, list):
            return [self._resolved(one, defaults, depth) for one in value]
        if not isinstance(value, str) or "${" not in value or depth > 8:
            return value
        whole = re.fullmatch(r"\$\{([^{}]*)\}", value)
        if whole:
            return self._resolved(self._look_up(whole[1], defaults), defaults, depth + 1)
        text = re.sub(r"\$\{([^{}]*)\}", lambda match: str(self._look_up(match[1], defaults)), value)
        return value if text == value else self._resolved(text, defaults, depth + 1)

    def _look_up(self, name: str, defaults: Mapping[str, Any]) -> Any:
        resolver, colon, arguments = name.partition(":")
        wanted, comma, default = arguments.partition(",")
        if resolver == "oc.env" and wanted.strip() in self.environment:
            return self.environment[wanted.strip()]
        key = one_name((wanted if resolver == "oc.select" else name).strip())
        if key in self.entries:
            return self.entries[key].value
        if key in defaults:
            return defaults[key]
        if comma and colon:
            return read_value(default)
        raise LookupError(f"${{{name}}}")


def _leaves(data: Mapping[str, Any], path: tuple[str, ...], known: KnownKeys) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Keys of a nested mapping that are values; empty mappings are values too."""
    for name, value in data.items():
        inside = (*path, str(name))
        if isinstance(value, dict) and value and not any("." in str(child) for child in value):
            yield from _leaves(value, inside, known)
        else:
            yield inside, value


def shown(value: Any) -> str:
    """A value as it is written in an override."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
