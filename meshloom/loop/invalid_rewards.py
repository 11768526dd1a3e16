"""When rewards say so little that a run must not go on, and a word about the first that are invalid.

Owns: the bound on invalid rewards, and the words about what made them so. Refuses to know: how samples are scored. Always
holds: what is told is the reason that most samples had, with one text of it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshloom.config.errors import RunFault
from meshloom.config.settings import EvalSettings, TrainSettings
from meshloom.environments.protocol import FaultReason
from meshloom.loop.baseline import NO_BASELINE
from meshloom.samples import Samples
from meshloom.samples.episodes import joined

_OF_ENVIRONMENTS = tuple(FaultReason)
_MOST_CHARACTERS = 300
"""Of a reason that is told beside a run that goes on."""


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
    kind, count = Counter(_kind(reason) for reason in found).most_common(1)[0]
    reason = _usual(found, kind)
    shown = next((text for own, text in zip(reasons, printed, strict=False) if own == reason and text), "")
    place, mended = _place(settings, reason.removeprefix(f"{NO_BASELINE}: "))
    raise RunFault(
        f"{len(found) / len(reasons):.0%} of {whose}'s rewards are invalid",
        where=place,
        why=f"most often ({count} of {len(reasons)}): {reason}" + (f"; it printed: {shown}" if shown else ""),
        fix=f"mend {mended}, or raise reward.max_invalid_share",
    )


def _kind(reason: str) -> str:
    return reason.partition(":")[0]


def _usual(reasons: Sequence[str], kind: str) -> str:
    """The text that most reasons of a kind have."""
    return Counter(reason for reason in reasons if _kind(reason) == kind).most_common(1)[0][0]


def _in_a_line(reason: str) -> str:
    """A reason as a terminal can show it: an exception's text may hold the whole response, with any characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in reason).split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"


@dataclass
class InvalidWatch:
    """Tells the user why rewards are invalid: of each kind of reason once, when it is met first.

    Args:
        notice: called with a sentence for the user.
    """

    notice: Callable[[str], None]
    told: set[str] = field(default_factory=set)

    def look(self, reasons: Sequence[str | None]) -> None:
        """Look at the samples of a step or a validation.

        Args:
            reasons: why the reward of each sample is invalid; none where it is a number.
        """
        found = [reason for reason in reasons if reason is not None]
        for kind, count in Counter(map(_kind, found)).items():
            if kind not in self.told:
                self.told.add(kind)
                usual = _in_a_line(_usual(found, kind))
                self.notice(f"warning: {count} of {len(reasons)} rewards are invalid, most often: {usual}")


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
