"""Telling what separates a model's programs from this machine, before the first of them runs.

Owns: when that is found and where it is said. Refuses to know: how. Always holds: a run that runs programs has tried its
isolation first, and its folder says what came of it.
"""

import json
from collections.abc import Callable
from pathlib import Path

from meshloom.config.settings import RewardSettings
from meshloom.observe.atomic import replace_file
from meshloom.rewards.function import code_arguments, code_rewards
from meshloom.rewards.isolation import Found, require_isolation

ISOLATION_FILE = "isolation.json"


def check_isolation(reward: RewardSettings) -> Found | None:
    """What separates programs from this machine; nothing for a run that runs none.

    Raises:
        UserError: if running programs was not asked for, or what is demanded is not there.
    """
    rewards = code_rewards(reward)
    for alone in rewards.values():
        code_arguments(alone)
    return require_isolation(reward.code) if rewards else None


def tell_isolation(found: Found | None, notice: Callable[[str], None], folder: Path) -> None:
    """Say it to the user, and write it into the run folder."""
    if found is not None:
        notice(found.text())
        replace_file(folder / ISOLATION_FILE, [json.dumps(found.record(), indent=2).encode()])
