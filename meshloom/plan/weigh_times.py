"""Seconds of an arrangement's phases, each counted once for all arrangements that have it.

Owns: which parts of an arrangement a phase's seconds depend on. Refuses to know: memory, which budget is good (``plan.weigh``).
Always holds: seconds are those that the plan forecasts.
"""

from collections.abc import Iterator, Mapping

from meshloom.config.settings import TrainSettings
from meshloom.plan.arrangement import Arrangement
from meshloom.plan.constants import Cluster
from meshloom.plan.fitting import Case
from meshloom.plan.forecast import (
    Lengths,
    Roles,
    count_roles,
    device_groups,
    phase_times,
    scoring,
    share_devices,
    step_of,
)
from meshloom.plan.placement import Role
from meshloom.plan.residency import EngineRole, ModelRole, Phase
from meshloom.plan.sharded_memory import moves
from meshloom.plan.time import PhaseTime, movement_time, offload_time

NO_MODEL = (Role.ROLLOUT, Role.REWARD)
"""Roles that are no model of training."""


class ArrangementTimes:
    """Seconds of arrangements of one run.

    Args:
        case: the run, with what its devices are.
        cluster: the devices.
        free: its settings with room for every sequence.
    """

    def __init__(self, case: Case, cluster: Cluster, free: TrainSettings) -> None:
        self._case, self._cluster, self._free, self._lengths = case, cluster, free, Lengths.most(case.settings)
        self._times: dict[object, list[PhaseTime]] = {}

    def count(self, arrangement: Arrangement, settings: TrainSettings, recompute: bool) -> Roles:
        """The models and the engine of an arrangement, in numbers."""
        case, layout = self._case, arrangement.layout
        return count_roles(
            settings, case.model, layout, recompute=recompute, adapters=case.adapters, critic=case.critic
        )

    def moved(self, arrangement: Arrangement, settings: TrainSettings) -> float:
        """Seconds that offload takes."""
        groups = device_groups(arrangement.layout, self.count(arrangement, settings, True), None)
        parts = ([*offload_time(moves(group.ledger.holdings), self._cluster, self._case.constants)] for group in groups)
        return max((sum(part.seconds for part in each) for each in parts), default=0.0)

    def models(
        self, arrangement: Arrangement, settings: TrainSettings, recompute: bool, tokens: int
    ) -> list[PhaseTime]:
        """Phases of the models, each counted once for all arrangements that have it."""
        found: list[PhaseTime] = []
        missing: dict[Role, tuple[object, ...]] = {}
        for role, placed in arrangement.roles:
            if role in NO_MODEL:
                continue
            key: tuple[object, ...] = (role, placed, recompute, tokens)
            if key not in self._times:
                missing[role] = key
            else:
                found += self._times[key]
        if missing:
            models = self.count(arrangement, settings, recompute).models
            for role, key in missing.items():
                self._times[key] = list(self._phases(arrangement, {role: models[role]}, None))
                found += self._times[key]
        return found

    def _phases(
        self, arrangement: Arrangement, models: Mapping[Role, ModelRole], engine: EngineRole | None
    ) -> Iterator[PhaseTime]:
        settings, layout = self._case.settings, arrangement.layout
        return phase_times(settings, layout, models, engine, self._lengths, self._cluster, self._case.constants)

    def engine(self, arrangement: Arrangement) -> list[PhaseTime]:
        """Generation with room for every sequence, and the movement of weights."""
        actor, rollout = arrangement.placed[Role.ACTOR], arrangement.placed[Role.ROLLOUT]
        generate, sync = (Phase.GENERATE, rollout), (Phase.SYNC, actor, rollout)
        if generate not in self._times or sync not in self._times:
            roles, layout = self.count(arrangement, self._free, False), arrangement.layout
            if (engine := roles.engine) is None:
                raise AssertionError("an arrangement has an engine")
            self._times[generate] = list(self._phases(arrangement, {}, engine))
            apart = not share_devices(layout.role(Role.ROLLOUT), layout.role(Role.ACTOR))
            source = roles.models[Role.ACTOR]
            self._times[sync] = [movement_time(engine, source, self._cluster, self._case.constants, apart=apart)]
        return self._times[generate] + self._times[sync]

    def rewards(self, arrangement: Arrangement) -> list[PhaseTime]:
        """Scoring by reward models, which the search leaves where they are."""
        key = (Role.REWARD, arrangement.placed.get(Role.REWARD))
        if key not in self._times:
            case = self._case
            found = scoring(case.settings, arrangement.layout, self._lengths, self._cluster, case.constants)
            self._times[key] = list(found)
        return self._times[key]

    def step(self, arrangement: Arrangement, models: list[PhaseTime], moved: float) -> float:
        """Seconds of a step.

        Args:
            arrangement: of the run.
            models: phases of its models.
            moved: seconds that offload takes.
        """
        phases = (*models, *self.engine(arrangement), *self.rewards(arrangement))
        return step_of(self._case.settings, arrangement.layout, phases, moved, self._case.constants)
