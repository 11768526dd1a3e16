"""Rules for running a model's programs, checked before any work.

Owns: what settings of code rewards mean together. Refuses to know: sandboxes; what this machine can isolate is tried when a run
starts.
"""

from typing import TYPE_CHECKING

from meshloom.config.code_settings import CodeSettings
from meshloom.config.settings import RewardSettings
from meshloom.rewards.function import CODE_SHARE, code_rewards

if TYPE_CHECKING:
    from meshloom.plan.checks import Findings


def check_code(found: "Findings", reward: RewardSettings) -> None:
    """Codes K001 to K004."""
    rewards = code_rewards(reward)
    for path, alone in rewards.items():
        _check_one(found, path, alone)
    code, default = reward.code, CodeSettings()
    changed = [name for name in CodeSettings.model_fields if getattr(code, name) != getattr(default, name)]
    if changed and not rewards:
        path = f"reward.code.{changed[0]}"
        found.warn("K004", path, f"{path} is not used, as no reward has the function code")
    if rewards and not code.enabled:
        found.refuse(
            "K001",
            "reward.code.enabled",
            "the verifier code runs programs that the model wrote, and that was not asked for",
            why="such programs may try anything; what separates them from this machine is in docs/code-rewards.md",
            fix="set reward.code.enabled=true",
            suggestions=(("reward.code.enabled=true",),),
        )


def _check_one(found: "Findings", path: str, alone: RewardSettings) -> None:
    if alone.kwargs:
        what, fix = "the verifier code has settings of its own", "set them as reward.code.…"
        found.refuse("K002", f"{path}.kwargs", what, fix=fix)
    code, most_s = alone.code, CODE_SHARE * alone.deadline_s
    if code.wall_s > most_s:
        needed_s = code.wall_s / CODE_SHARE
        found.refuse(
            "K003",
            "reward.code.wall_s",
            f"one test may take {code.wall_s:g} s, and all tests of a sample together only {most_s:g} s",
            why=f"that is {CODE_SHARE:g} of {path}.deadline_s",
            fix=f"set {path}.deadline_s to at least {needed_s:g}, or reward.code.wall_s to at most {most_s:g}",
            suggestions=((f"{path}.deadline_s={needed_s:g}",), (f"reward.code.wall_s={most_s:g}",)),
        )
