"""Where each model's parameters and optimizer are in each phase of a step, as the plan says: what the run moves and checks.

Owns: the translation from settings and a layout to places by phase. Refuses to know: bytes, how anything is moved. Always
holds: the phases are those that the memory ledger counts a role's weights and optimizer in, so the run holds what was planned.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from meshloom.config.cluster_settings import RoleOffloadSettings
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.plan.layout import Layout
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.placement import PHASES, Role
from meshloom.plan.reference import refreshes
from meshloom.plan.residency import EVERY, Phase, Residency, through_values
from meshloom.plan.role_numbers import PLACES, computes_logprobs, engine_owns_weights


class Part(StrEnum):
    """What of a model is moved as one."""

    PARAMETERS = "parameters"
    """Weights, adapters among them."""
    OPTIMIZER = "optimizer"
    """Float32 masters, moments, and gradients where there are any."""


@dataclass(frozen=True, kw_only=True)
class Stay:
    """One part of one role's model over a step.

    Args:
        role: whose.
        part: of its model.
        phases: in which it is on the device; none for an optimizer that passes over it in pieces.
        otherwise: where it is in the others; the device for what is never moved.
    """

    role: str
    part: Part
    phases: tuple[Phase, ...]
    otherwise: Residency

    def at(self, phase: Phase) -> Residency:
        """Where it is in a phase."""
        return Residency.DEVICE if phase in self.phases else self.otherwise

    @property
    def moves(self) -> bool:
        """Whether it is ever moved away."""
        return self.otherwise is not Residency.DEVICE and self.phases != EVERY

    @property
    def is_streamed(self) -> bool:
        """Whether it is on the device in pieces only."""
        return self.moves and not self.phases


def stays(settings: TrainSettings, layout: Layout) -> tuple[Stay, ...]:
    """Every part of every model of a run: two for what is trained, one for what is only asked.

    Args:
        settings: of the run.
        layout: of its roles.
    """
    given = {
        Role.ACTOR: settings.offload.actor,
        Role.REFERENCE: settings.offload.reference,
        Role.CRITIC: settings.offload.critic,
        Role.REWARD: settings.offload.reward,
    }
    found = (_stays(role, offload, settings, layout) for role, offload in given.items() if layout.role(role))
    return tuple(stay for of_role in found for stay in of_role)


def sft_stays(settings: SftSettings) -> tuple[Stay, ...]:
    """The same of a supervised run, which updates all the time: its optimizer is only ever on the device in pieces."""
    place = PLACES[settings.offload.actor.optimizer]
    phases = EVERY if place is Residency.DEVICE else ()
    parameters = _stay(Role.ACTOR, Part.PARAMETERS, EVERY, Residency.DEVICE)
    return parameters, Stay(role=str(Role.ACTOR), part=Part.OPTIMIZER, phases=phases, otherwise=place)


def _stays(role: Role, offload: RoleOffloadSettings, settings: TrainSettings, layout: Layout) -> Iterator[Stay]:
    busy = tuple(Phase(phase) for phase in PHASES[role])
    needed = busy
    if role == Role.ACTOR:
        # A reference that is refreshed takes its weights as it is about to be asked; a file of samples may have no log-probs.
        may_need = computes_logprobs(settings) or refreshes(settings) or settings.rollout.from_samples is not None
        if not may_need:
            needed = tuple(phase for phase in busy if phase is not Phase.LOGPROB)
        if not engine_owns_weights(settings, layout):
            needed = (Phase.GENERATE, *needed)
    yield _stay(role, Part.PARAMETERS, needed, PLACES[offload.parameters])
    if Phase.UPDATE in busy:
        yield _stay(role, Part.OPTIMIZER, (Phase.UPDATE,), PLACES[offload.optimizer])


def _stay(role: Role, part: Part, needed: tuple[Phase, ...], otherwise: Residency) -> Stay:
    phases = EVERY if otherwise is Residency.DEVICE else through_values(needed)
    return Stay(role=str(role), part=part, phases=phases, otherwise=otherwise)


def stay_lines(found: tuple[Stay, ...]) -> Iterator[LedgerLine]:
    """What is moved away, for the plan; nothing where nothing is."""
    for stay in found:
        if stay.moves:
            when = "in pieces, in each update" if stay.is_streamed else f"in {', '.join(stay.phases)}"
            formula = f"on the device {when}; else on the {stay.otherwise}"
            name = f"{stay.role}: {stay.part}"
            yield LedgerLine(section="residency", name=name, value=str(stay.otherwise), formula=formula, source=DERIVED)
