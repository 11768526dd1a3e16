"""What a step takes of each role's devices, by the plan's cost model.

Owns: the seconds of decoding, of training a step's very samples, of moving weights. Refuses to know: when they are spent.
Always holds: formulas and constants are the plan's (``plan.time``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add

from meshloom.config.settings import TrainSettings
from meshloom.plan.arithmetic import Work
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.fitting import Look
from meshloom.plan.forecast import Forecast, Lengths, count_roles, forecast
from meshloom.plan.lag import most_updates
from meshloom.plan.layout import Layout, share_devices
from meshloom.plan.placement import Role
from meshloom.plan.residency import EngineRole, ModelRole, Phase
from meshloom.plan.reward_time import pass_time, scored_work, scores_meanwhile
from meshloom.plan.shards import cached_values
from meshloom.plan.time import decode_step, forward_time, movement_time, update_time
from meshloom.plan.training_time import passes_of_prompt
from meshloom.simulate.engine import Made
from meshloom.simulate.replica import Speed


@dataclass(frozen=True)
class Spent:
    """Seconds of a phase.

    Args:
        seconds: until its slowest devices are done.
        by_role: that each role works.
        among_engines: whether some of it is on devices that generate.
    """

    seconds: float
    by_role: Mapping[str, float]
    among_engines: bool

    def __add__(self, other: "Spent") -> "Spent":
        """One phase after another."""
        roles = {**self.by_role}
        for role, seconds in other.by_role.items():
            roles[role] = roles.get(role, 0.0) + seconds
        return Spent(self.seconds + other.seconds, roles, self.among_engines or other.among_engines)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A run's seconds.

    Args:
        settings: of the run.
        layout: of its roles.
        cluster: its devices.
        constants: of the cost model.
        models: roles that compute with a model.
        engine: a replica of the engine.
        replicas: of it.
        expected: the plan's forecast for the mean lengths.
    """

    settings: TrainSettings
    layout: Layout
    cluster: Cluster
    constants: Constants
    models: Mapping[Role, ModelRole]
    engine: EngineRole
    replicas: int
    expected: Forecast
    _known: dict[tuple[Phase, tuple[tuple[Role, Work], ...]], Spent] = field(default_factory=dict)

    @classmethod
    def of(cls, look: Look, lengths: Lengths) -> "Costs | None":
        """Of a run that is laid out; none where the engine is not, or its devices are not known.

        Args:
            look: the run on its devices.
            lengths: of its samples, on average.
        """
        case, cluster, rollout = look.case, look.cluster, look.layout.role(Role.ROLLOUT)
        if cluster is None or rollout is None:
            return None
        given = {"recompute": look.recompute, "adapters": case.adapters, "critic": case.critic}
        memory = case.memory or cluster.device.memory_bytes
        roles = count_roles(look.settings, case.model, look.layout, **given, memory=memory)
        if roles.engine is None or Role.ACTOR not in roles.models:
            return None
        expected = forecast(
            look.settings,
            case.model,
            look.layout,
            cluster,
            **given,
            lengths=lengths,
            constants=case.constants,
            device_memory=case.memory,
        )
        return cls(
            settings=look.settings,
            layout=look.layout,
            cluster=cluster,
            constants=case.constants,
            models=roles.models,
            engine=roles.engine,
            replicas=rollout.replicas,
            expected=expected,
        )

    @property
    def apart(self) -> bool:
        """Whether generation has devices of its own."""
        return not share_devices(self.layout.role(Role.ROLLOUT), self.layout.role(Role.ACTOR))

    @cached_property
    def speed(self) -> Speed:
        """Of a replica of the engine; as many slots as its cache has room for, of usual length."""
        engine, cluster, constants, mean = self.engine, self.cluster, self.constants, self.expected.lengths
        per_token = cached_values(engine.model, engine.tensor) * engine.width
        slots = engine.sequences
        if engine.cache_bytes is not None:
            slots = max(1, min(slots, int(engine.cache_bytes / ((mean.prompt + mean.response) * per_token))))

        def step_s(rows: int) -> float:
            return sum(part.seconds for part in decode_step(engine, rows, 0, cluster, constants))

        device = cluster.device
        return Speed(
            step_s=step_s,
            token_s=per_token / (device.memory_bandwidth * constants.cache_read_share),
            prompt_s=2 * engine.model.computed / engine.tensor / (device.matrix_flops * constants.prompt_matrix_share),
            start_s=constants.generate_start_s,
            slots=slots,
        )

    def scoring(self, groups: list[Made]) -> Spent:
        """What reward models take: on the engine's devices before anything is learned, on the trainer's as well, and no time
        beside generation where they have devices of their own."""
        reward = self.layout.role(Role.REWARD)
        if reward is None:
            return Spent(0.0, {}, False)
        lengths = [group.drawn.prompt + made for group in groups for made in group.drawn.trained]
        work = scored_work(len(lengths), sum(lengths) / max(1, len(lengths)))
        found = self._known.get((Phase.SCORE, ((Role.REWARD, work),)))
        if found is None:
            seconds = pass_time(self.settings, self.layout, work, self.cluster, self.constants).seconds
            own = not any(share_devices(reward, self.layout.role(role)) for role in (Role.ROLLOUT, Role.ACTOR))
            found = Spent(0.0 if own else seconds, {str(Role.REWARD): seconds}, not scores_meanwhile(self.layout))
            self._known[Phase.SCORE, ((Role.REWARD, work),)] = found
        return found

    def judging(self, groups: list[Made]) -> Spent:
        """Log-probs and values of a step's samples."""
        return self._passes(Phase.LOGPROB, groups) + self._passes(Phase.VALUES, groups)

    def learning(self, groups: list[Made], *, only_critic: bool = False) -> Spent:
        """The updates of a step: of all that learn, or of the critic, which learns alone while it warms up."""
        return self._passes(Phase.UPDATE, groups, (Role.CRITIC,) if only_critic else None)

    @property
    def warmup_steps(self) -> int:
        """Steps of the run's beginning in which the critic alone learns, and no version of the weights is made."""
        return self.settings.critic.warmup_steps if Role.CRITIC in self.models else 0

    @cached_property
    def sync_s(self) -> float:
        """Seconds in which weights move to the engine."""
        actor = self.models[Role.ACTOR]
        return movement_time(self.engine, actor, self.cluster, self.constants, apart=self.apart).seconds

    @property
    def beside_s(self) -> float:
        """Seconds of a step beside its phases: records, packing, what offload moves."""
        return self.constants.beside_phases_s + sum(part.seconds for part in self.expected.offload)

    def _passes(self, phase: Phase, groups: list[Made], only: tuple[Role, ...] | None = None) -> Spent:
        """Of all roles in a phase, or of some; steps of the same lengths are counted once."""
        roles = [role for role in (only or self.models) if phase in self.models[role].computes]
        learns = phase is Phase.UPDATE
        batch = self.settings.batch
        epochs, updates = (batch.epochs_per_step, most_updates(batch)) if learns else (1, 1)
        works = {role: work_of(groups, self.models[role], epochs=epochs, updates=updates) for role in roles}
        key = phase, tuple(works.items())
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._price(phase, works, updates)
        return found

    def _price(self, phase: Phase, works: Mapping[Role, Work], updates: int) -> Spent:
        seconds: dict[str, float] = {}
        for role, work in works.items():
            model = self.models[role]
            if phase is Phase.UPDATE:
                found = update_time(model, work, self.cluster, self.constants, updates=updates)
            else:
                found = forward_time(model, work, self.cluster, self.constants, phase)
            seconds[model.name] = found.seconds
        of_groups = (sum(seconds.get(str(role), 0.0) for role in shared.roles) for shared in self.layout.shared)
        rollout = self.layout.role(Role.ROLLOUT)
        among = any(share_devices(rollout, self.layout.role(role)) for role in works)
        return Spent(max(of_groups, default=0.0), seconds, among)


def work_of(groups: list[Made], role: ModelRole, *, epochs: int = 1, updates: int = 1) -> Work:
    """What the passes of a role compute of groups, each prompt as often as ``passes_of_prompt`` says.

    Args:
        groups: of a step.
        role: that computes.
        epochs: passes over all of them.
        updates: into which these are cut evenly.
    """
    once = _work(groups, [1.0] * len(groups), epochs)
    each = len(groups) * epochs / updates
    lengths = [[float(group.drawn.prompt + length) for length in group.drawn.trained] for group in groups]
    times = [passes_of_prompt(role, one, once, groups=each, updates=updates) for one in lengths]
    return _work(groups, times, epochs)


def _work(groups: list[Made], times: Sequence[float], epochs: int) -> Work:
    """Of groups, each of whose prompts is computed so often."""
    tokens = pairs = 0.0
    predictions = packed = 0
    for group, often in zip(groups, times, strict=True):
        prompt, responses = group.drawn.prompt, group.drawn.trained
        made = sum(responses)
        tokens += often * prompt + made
        predictions += made
        packed += prompt * len(responses) + made
        pairs += often * prompt * prompt / 2 + made * prompt + sum(length * length for length in responses) / 2
    lengths = {group.drawn.prompt + length for group in groups for length in group.drawn.trained}
    samples = sum(len(group.drawn.trained) for group in groups)
    pass_of = Work(round(tokens), predictions, round(pairs), packed, samples, alike=len(lengths) == 1)
    return reduce(add, [pass_of] * epochs)
