"""When rewards say so little that a run must not go on.

Owns: the bound on invalid rewards, and the words about what made them so. Refuses to know: how samples are scored. Always
holds: what is told is the reason that most samples had, with one text of it.
"""

from collections import Counter
from collections.abc import Sequence

from meshloom.config.errors import RunFault
from meshloom.config.settings import EvalSettings, TrainSettings
from meshloom.environments.protocol import FaultReason
from meshloom.loop.baseline import NO_BASELINE
from meshloom.samples import Samples
from meshloom.samples.episodes import joined

_OF_ENVIRONMENTS = tuple(FaultReason)


def check_rewards(batch: Samples, settings: TrainSettings) -> None:
    """Refuse a step most of whose rewards say nothing.

    Raises:
        RunFault: if too many rewards are invalid.
    """
    meta = joined(batch).meta
    refuse_invalid(meta["invalid"], settings, "this step", meta.get("printed", ()))


def refuse_invalid(
    reasons: Sequence[str | None], settings: TrainSettings | EvalSettings, whose: str, printed: Sequence[str] = ()
) -> None:
    """Refuse samples most of whose rewards say nothing.

    Args:
        reasons: why the reward of each sample is invalid; none where it is a number.
        settings: of the run.
        whose: samples these are.
        printed: by the reward function, of each sample; none where the samples are written with it.

    Raises:
        RunFault: if more than ``reward.max_invalid_share`` are invalid.
    """
    found = [reason for reason in reasons if reason is not None]
    if not found or len(found) <= settings.reward.max_invalid_share * len(reasons):
        return
    kind, count = Counter(reason.partition(":")[0] for reason in found).most_common(1)[0]
    reason = Counter(reason for reason in found if reason.partition(":")[0] == kind).most_common(1)[0][0]
    shown = next((text for own, text in zip(reasons, printed, strict=False) if own == reason and text), "")
    place, mended = _place(settings, reason.removeprefix(f"{NO_BASELINE}: "))
    raise RunFault(
        f"{len(found) / len(reasons):.0%} of {whose}'s rewards are invalid",
        where=place,
        why=f"most often ({count} of {len(reasons)}): {reason}" + (f"; it printed: {shown}" if shown else ""),
        fix=f"mend {mended}, or raise reward.max_invalid_share",
    )


def _place(settings: TrainSettings | EvalSettings, cause: str) -> tuple[str, str]:
    """The setting that a cause is in, and what is to be mended."""
    if settings.environment is not None and cause.startswith(FaultReason.REWRITTEN):
        mended = "it by split, or a chat template that leaves earlier turns alone"
        return "environment.rewritten_history", mended
    if settings.environment is not None and cause.startswith(_OF_ENVIRONMENTS):
        return "environment", "the environment"
    if settings.reward.components:
        return "reward.components", "the component that it names"
    return "reward.function", "the reward function"
