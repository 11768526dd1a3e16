"""What of a plan ``meshloom train`` carries out, and what it only plans.

Owns: the table of what is planned only, and the refusals by name. Refuses to know: how anything is executed. Always holds: a
setting that a run would pass over in silence is refused; whether a run is on one device or on several is said here and nowhere
else.

Codes: N001 planned, not carried out; W021 devices for a reward that has no model.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshloom.config.problems import Problem, require_none
from meshloom.config.reward_settings import reward_models
from meshloom.config.settings import TrainSettings
from meshloom.plan.device_checks import lay_out, problem_of
from meshloom.plan.layout import Layout
from meshloom.plan.placement import Role, devices_of_machine, has_critic

PLANNED = " is planned, not carried out"
"""How what is planned only is told."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A run that train carries out.

    Args:
        settings: with what the device map says.
        layout: of its roles, whatever its model is.
    """

    settings: TrainSettings
    layout: Layout

    @property
    def is_spread(self) -> bool:
        """Whether it is on several devices."""
        return self.layout.topology.num_devices > 1


def carried_out(settings: TrainSettings) -> Carried:
    """The run, if train carries it out.

    Raises:
        UserError: that names everything which is planned only, or why a device map cannot be read.
    """
    laid_out = lay_out(settings, None, devices_of_machine())
    faults = [fault for fault in laid_out.faults if fault.path == "placement.map"]
    require_none([problem_of(laid_out.settings, fault, ()) for fault in faults], settings.placement.map or "")
    carried = Carried(settings=laid_out.settings, layout=laid_out.layout)
    require_none(planned_only(carried.settings, carried.layout), f"train {settings.run_dir}")
    return carried


def planned_only(settings: TrainSettings, layout: Layout) -> tuple[Problem, ...]:
    """What of a run is planned only; nothing where train carries it out."""
    return tuple(_refusals(settings, layout)) if layout.topology.num_devices > 1 else ()


def _refusals(settings: TrainSettings, layout: Layout) -> Iterator[Problem]:
    for found in layout.roles:
        if found.role == Role.CRITIC and not has_critic(settings):
            yield _refusal(
                settings, "placement.critic", "a critic that nothing asks for values", "placement.critic=all"
            )
        elif found.role == Role.REWARD and not reward_models(settings.reward):
            yield _without_model(settings)


def _without_model(settings: TrainSettings) -> Problem:
    path = "placement.reward"
    return Problem(
        code="W021",
        what="placement.reward names devices, and no component of the reward is a model",
        where=f"{path} ({settings.provenance.of(path)})",
        why="functions and judges need no devices",
        fix=f"reward.components.NAME.model.path=FOLDER, or {path}=all",
    )


def _refusal(settings: TrainSettings, path: str, what: str, fix: str) -> Problem:
    return Problem(
        code="N001",
        what=f"{what}{PLANNED}",
        where=f"{path} ({settings.provenance.of(path)})",
        why="`meshloom plan` describes such a run, `meshloom train` of this version does not carry it out",
        fix=fix,
    )
