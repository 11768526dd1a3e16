"""YAML files of verl's settings, with the files that they begin with.

Owns: Hydra's list ``defaults``: what stands in it, and in which order. Refuses to know: what keys mean. Always holds: an entry
that cannot be found is refused, never dropped.
"""

from pathlib import Path
from typing import Any

from meshloom.config import yaml_text
from meshloom.config.verl.defaults import CONFIG_NAMES
from meshloom.config.verl.given import Given

_CHOICES = ("model_engine", "engine", "optim")
"""Groups that are keys of verl's, too."""
_ACTOR = "actor_rollout_ref.actor"
_ENGINES = ("megatron", "veomni", "torchtitan")


def take_file(file: Path, given: Given, *, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Take the keys of a file, and of those that it begins with.

    Args:
        file: YAML.
        given: what the command gives so far.
        above: the files that have named this one.

    Returns:
        Defaults of verl's that differ by what the file begins with.

    Raises:
        OSError: if it cannot be read.
    """
    document = yaml_text.read(file.read_text(encoding="utf-8"))
    entries = document.data.get("defaults") if isinstance(document.data, dict) else None
    entries = list(entries) if isinstance(entries, list) else []
    different: dict[str, Any] = {}
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            given.add_file(file)
        elif isinstance(entry, str):
            different |= _begun_with(entry, file, given, (*above, file))
        elif isinstance(entry, dict):
            for group, choice in entry.items():
                different |= _chosen(str(group), str(choice), file, given)
    return different


def groups_of(file: Path) -> list[str]:
    """The groups at the top of a file; none if it cannot be read."""
    try:
        document = yaml_text.read(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return []
    return [f"{name}." for name in document.data] if isinstance(document.data, dict) else []


def _begun_with(name: str, file: Path, given: Given, above: tuple[Path, ...]) -> dict[str, Any]:
    name = name.removesuffix(".yaml")
    if name in CONFIG_NAMES:
        return dict(CONFIG_NAMES[name])
    other = file.parent / f"{name}.yaml"
    if other in above:
        given.broken[f"{file}: {name}"] = "it begins with itself; take it out of the list defaults"
        return {}
    if not other.is_file():
        given.broken[f"{file}: {name}"] = f"there is no file {other}; take it out of the list defaults, or put it there"
        return {}
    return take_file(other, given, above=above)


def _chosen(group: str, choice: str, file: Path, given: Given) -> dict[str, Any]:
    """An entry ``group: choice``. Groups of verl's own hold its defaults; of these the engine alone decides something."""
    group = group.removeprefix("optional ").removeprefix("override ").strip().lstrip("/")
    name, _, place = group.partition("@")
    if name in _CHOICES:
        given.add(name, choice, f"{file}: defaults")
    elif name == "actor" and place == _ACTOR and choice.partition("_")[0] in _ENGINES:
        return {f"{_ACTOR}.strategy": choice.partition("_")[0]}
    return {}
