"""What settings of groups mean together: dynamic sampling, and what an estimator needs beside the samples.

Owns: these rules. Refuses to know: devices, models.

Codes: A030 dynamic sampling of groups of one, A031 an estimator that learns from groups without spread too, A032 settings of
dynamic sampling that nothing uses, A033 no file of samples.
"""

from pathlib import Path

from meshloom.config.group_settings import FilterGroupsSettings
from meshloom.config.names import GROUP_ADVANTAGES
from meshloom.config.settings import TrainSettings
from meshloom.plan.checks import Findings

_PATH, _SAVED = "algorithm.filter_groups", "rollout.from_samples"


def check_groups(found: Findings, settings: TrainSettings) -> None:
    """Refuse what cannot work, warn of what is likely not meant."""
    saved = settings.rollout.from_samples
    if saved is not None and not Path(saved).exists():
        found.refuse("A033", _SAVED, f"there is no file {saved}", fix="the samples.jsonl of a run, or its folder")
    given, advantage = settings.algorithm.filter_groups, settings.algorithm.advantage
    if not given.enabled:
        for name, field in FilterGroupsSettings.model_fields.items():
            if getattr(given, name) != field.default:
                what = f"{_PATH}.{name} is not used, as groups are not filtered"
                found.warn("A032", f"{_PATH}.{name}", what, fix=f"set {_PATH}.enabled=true")
        return
    if settings.batch.samples_per_prompt == 1:
        found.refuse(
            "A030",
            f"{_PATH}.enabled",
            "groups of one sample have no spread of rewards: every group would be replaced",
            why="batch.samples_per_prompt is 1",
            fix=f"batch.samples_per_prompt=2 or more, or {_PATH}.enabled=false",
            suggestions=(("batch.samples_per_prompt=8",), (f"{_PATH}.enabled=false",)),
        )
    elif advantage not in GROUP_ADVANTAGES and ":" not in advantage:
        what = f"{advantage} does not compare the samples of a prompt, so groups without spread teach it something too"
        found.warn("A031", f"{_PATH}.enabled", what, fix=f"set {_PATH}.enabled=false, or algorithm.advantage=grpo")
