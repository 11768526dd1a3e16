"""What a run holds and takes on its devices: the ledgers of memory and time of a layout.

Owns: which roles are on a device together, which phases follow each other, what a step comes to. Refuses to know: bytes of a
layer, operations of a token. Always holds: of roles on devices of their own in one phase the slowest counts, of roles that
share devices the sum; with one device it says what ``plan.memory`` says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshloom.config.settings import TrainSettings
from meshloom.plan.arithmetic import Work
from meshloom.plan.constants import Cluster, Constants, assumptions
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.generated import in_rounds, prompts_at_once, samples_each
from meshloom.plan.lag import runs_ahead
from meshloom.plan.layout import Layout, share_devices
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.placement import Role
from meshloom.plan.residency import EngineRole, Holding, ModelRole, Phase
from meshloom.plan.reward_memory import reward_holdings, with_rewards
from meshloom.plan.reward_time import score_time, scores_meanwhile
from meshloom.plan.role_numbers import engine_role, model_role, updates_per_step, with_room_for_cache
from meshloom.plan.sharded_memory import DeviceLedger, device_ledger, moves
from meshloom.plan.shards import ceil_div
from meshloom.plan.time import (
    PhaseTime,
    Requests,
    Seconds,
    forward_time,
    generate_time,
    movement_time,
    offload_time,
    step_seconds,
    update_time,
)
from meshloom.plan.topology import DeviceSet
from meshloom.plan.training_time import passes_of_prompt
from meshloom.plan.turns import later_turns

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of samples, on average and at most."""

    prompt: float
    response: float
    longest: int

    @classmethod
    def most(cls, settings: TrainSettings) -> "Lengths":
        """As if every prompt and response were the longest."""
        longest = settings.rollout.max_response_tokens
        return cls(prompt=settings.data.max_prompt_tokens, response=longest, longest=longest)

    def work(self, samples: int, group: float) -> Work:
        """What a pass computes of samples, each group of which shares its prompt."""
        pairs = samples * (self.prompt**2 / 2 / group + self.response * self.prompt + self.response**2 / 2)
        tokens = samples * (self.response + self.prompt / group)
        packed = samples * (self.prompt + self.response)
        alike = self.response == self.longest
        return Work(round(tokens), round(samples * self.response), round(pairs), round(packed), samples, alike)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that hold the same roles.

    Args:
        devices: all of them.
        roles: on each.
        ledger: of the fullest.
    """

    devices: DeviceSet
    roles: tuple[Role, ...]
    ledger: DeviceLedger


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step of a run on its devices.

    Args:
        groups: devices by what they hold.
        phases: of all roles.
        offload: what it moves in a step, on the devices that move most.
        lengths: of samples that are counted with.
        step_s: seconds of a step.
    """

    groups: tuple[Group, ...]
    phases: tuple[PhaseTime, ...]
    offload: tuple[Seconds, ...]
    lengths: Lengths
    step_s: float

    def seconds(self, role: Role, phase: Phase) -> float:
        """Of a role in a phase; 0 where it has nothing to do."""
        return sum(found.seconds for found in self.phases if found.role == role and found.phase is phase)

    def lines(self, cluster: Cluster, constants: Constants, origins: Mapping[str, str] = _NONE) -> Iterator[LedgerLine]:
        """The time ledger, and what it takes for granted.

        Args:
            cluster: of the forecast.
            constants: of the forecast.
            origins: where constants that were given come from, by name.
        """
        for phase in self.phases:
            yield from phase.lines()
        for moved in self.offload:
            yield _line(f"offload: {moved.name}", moved.seconds, moved.formula)
        yield _line("step", self.step_s, "phases in their order, offload, and what a step costs beside them")
        given = self.lengths
        formula = f"prompts of {given.prompt:g}, responses of {given.response:g} tokens, the longest {given.longest}"
        yield LedgerLine(section="assumptions", name="lengths", value=None, formula=formula, source=DERIVED)
        yield from assumptions(constants, cluster, origins)


def _line(name: str, value: float, formula: str) -> LedgerLine:
    return LedgerLine(section="time", name=name, value=round(value, 6), formula=formula, source=DERIVED, unit="s")


def forecast(
    settings: TrainSettings,
    model: DecoderNumbers,
    layout: Layout,
    cluster: Cluster,
    *,
    recompute: bool,
    adapters: int | None = None,
    critic: DecoderNumbers | None = None,
    lengths: Lengths | None = None,
    constants: Constants | None = None,
    device_memory: int | None = None,
) -> Forecast:
    """What a run holds and takes.

    Args:
        settings: of the run.
        model: in numbers.
        layout: where its roles are.
        cluster: what its devices are.
        recompute: whether layers are recomputed in the backward pass.
        adapters: parameters of adapters; none where all are trained.
        critic: the critic's model in numbers, as a language model; none for the actor's.
        lengths: of samples; none for the most that settings allow.
        constants: of the cost model; none for those that were fitted.
        device_memory: bytes of a device; none for what its kind has.
    """
    constants, lengths = constants or Constants(), lengths or Lengths.most(settings)
    memory = device_memory or cluster.device.memory_bytes
    roles = count_roles(settings, model, layout, recompute=recompute, adapters=adapters, critic=critic, memory=memory)
    groups = device_groups(layout, roles, memory)
    phases = tuple(phase_times(settings, layout, roles.models, roles.engine, lengths, cluster, constants))
    phases += scoring(settings, layout, lengths, cluster, constants)
    offload = max((tuple(_offload(group, cluster, constants)) for group in groups), key=_total, default=())
    return Forecast(
        groups=groups,
        phases=phases,
        offload=offload,
        lengths=lengths,
        step_s=step_of(settings, layout, phases, _total(offload), constants),
    )


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of a run in numbers.

    Args:
        models: that compute log-probs, values, or are trained.
        engine: a replica of the rollout engine; none if it could not be laid out.
    """

    models: Mapping[Role, ModelRole]
    engine: EngineRole | None
    rewards: tuple[Holding, ...] = ()
    """What reward models hold."""


def count_roles(
    settings: TrainSettings,
    model: DecoderNumbers,
    layout: Layout,
    *,
    recompute: bool,
    adapters: int | None = None,
    critic: DecoderNumbers | None = None,
    memory: int | None = None,
) -> Roles:
    """The roles of a run; of reward models what they hold.

    Args:
        settings: of the run.
        model: in numbers.
        layout: where its roles are.
        recompute: whether layers are recomputed in the backward pass.
        adapters: parameters of adapters; none where all are trained.
        critic: the critic's model in numbers, as a language model; none for the actor's.
        memory: bytes of a device, which bound the engine's cache; none if that is not known.
    """
    engine, rewards = engine_role(settings, layout, model), reward_holdings(settings)
    lent = engine is not None and not engine.own_weights
    apart = engine is not None and engine.apart
    models: dict[Role, ModelRole] = {
        found.role: model_role(
            settings,
            found,
            critic if critic is not None and found.role == Role.CRITIC else model,
            recompute=recompute,
            adapters=adapters,
            lends_to_engine=lent and found.role == Role.ACTOR,
            over_ranks=layout.topology.num_devices > 1,
            apart=apart,
        )
        for found in layout.roles
        if found.role not in (Role.ROLLOUT, Role.REWARD)
    }
    if engine is not None and memory is not None:
        empty = Roles(models=models, engine=replace(engine, cache_bytes=0), rewards=rewards)
        others = [group for group in device_groups(layout, empty, None) if Role.ROLLOUT in group.roles]
        needs = [group.ledger.needed(Phase.GENERATE) for group in others]
        needs += [group.ledger.needed(Phase.SCORE) for group in others if Role.REWARD in group.roles]
        taken = max(needs, default=0)
        engine = with_room_for_cache(settings, engine, taken, memory)
    return Roles(models=models, engine=engine, rewards=rewards)


def _total(parts: tuple[Seconds, ...]) -> float:
    return sum(part.seconds for part in parts)


def device_groups(layout: Layout, roles: Roles, memory: int | None) -> tuple[Group, ...]:
    """Devices by what they hold, with the ledger of the fullest of each group.

    Args:
        layout: where the roles are.
        roles: in numbers.
        memory: bytes of a device; none if that is not known.
    """
    groups: list[Group] = []
    for shared in layout.shared:
        if shared.roles:
            here = [roles.models[role] for role in shared.roles if role in roles.models]
            engines = [roles.engine] if roles.engine is not None and Role.ROLLOUT in shared.roles else []
            ledger = device_ledger(here, engines, memory_bytes=memory)
            if Role.REWARD in shared.roles:
                ledger = with_rewards(ledger, roles.rewards)
            groups.append(Group(devices=shared.devices, roles=shared.roles, ledger=ledger))
    return tuple(groups)


def _offload(group: Group, cluster: Cluster, constants: Constants) -> Iterator[Seconds]:
    yield from offload_time(moves(group.ledger.holdings), cluster, constants)


def phase_times(
    settings: TrainSettings,
    layout: Layout,
    models: Mapping[Role, ModelRole],
    engine: EngineRole | None,
    lengths: Lengths,
    cluster: Cluster,
    constants: Constants,
) -> Iterator[PhaseTime]:
    """What each role does in a step, in the order of the phases."""
    batch = settings.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt
    updates = updates_per_step(settings) or 1
    rollout = layout.role(Role.ROLLOUT)
    if engine is not None and rollout is not None and settings.rollout.from_samples is None:
        prompts = ceil_div(prompts_at_once(settings), rollout.replicas)
        requests = Requests(
            samples=prompts * samples_each(settings),
            prompts=prompts,
            prompt_tokens=lengths.prompt,
            response_tokens=lengths.response,
            longest=lengths.longest,
            later_turns=later_turns(settings),
        )
        yield in_rounds(generate_time(engine, requests, cluster, constants), settings)
    for phase in (Phase.LOGPROB, Phase.VALUES):
        for role in models.values():
            if phase in role.computes:
                yield forward_time(role, work_of_role(role, lengths, samples), cluster, constants, phase)
    for role in models.values():
        if role.is_trained:
            work = work_of_role(role, lengths, samples * batch.epochs_per_step, updates=updates)
            yield update_time(role, work, cluster, constants, updates=updates)
    if engine is not None and rollout is not None and Role.ACTOR in models:
        apart = not share_devices(rollout, layout.role(Role.ACTOR))
        yield movement_time(engine, models[Role.ACTOR], cluster, constants, apart=apart)


def work_of_role(role: ModelRole, lengths: Lengths, samples: int, *, updates: int = 1) -> Work:
    """What a role's passes compute of samples, each prompt as often as ``passes_of_prompt`` says.

    Args:
        role: whose microbatches they are in.
        lengths: of the samples.
        samples: of all passes.
        updates: into which they are cut evenly.
    """
    work = lengths.work(samples, role.group)
    group = [lengths.prompt + lengths.response] * role.group
    times = passes_of_prompt(role, group, work, groups=samples / role.group / updates, updates=updates)
    return work if times == 1 else lengths.work(samples, role.group / times)


def scoring(
    settings: TrainSettings, layout: Layout, lengths: Lengths, cluster: Cluster, constants: Constants
) -> tuple[PhaseTime, ...]:
    """Scoring by reward models; nothing where there are none."""
    tokens = {"prompt_tokens": lengths.prompt, "response_tokens": lengths.response}
    found = score_time(settings, layout, cluster, constants, **tokens)
    return () if found is None else (found,)


def step_of(
    settings: TrainSettings, layout: Layout, phases: tuple[PhaseTime, ...], offload: float, constants: Constants
) -> float:
    """Phases in their order; in each, the devices that are busy longest. Scoring by reward models follows generation on its
    devices, and goes on beside it on others."""
    longest: list[PhaseTime] = []
    for phase in Phase:
        of_groups = [
            [found for found in phases if found.phase is phase and found.role in shared.roles]
            for shared in layout.shared
        ]
        longest += max(of_groups, key=lambda found: sum(each.seconds for each in found), default=[])
    rollout = [found for found in longest if found.phase is Phase.GENERATE]
    scored = [found for found in longest if found.phase is Phase.SCORE]
    others = [found for found in longest if found.phase not in (Phase.GENERATE, Phase.SCORE)]
    apart = runs_ahead(settings, layout)
    if not scores_meanwhile(layout):
        rollout += scored
    elif apart and share_devices(layout.role(Role.REWARD), layout.role(Role.ACTOR)):
        others += scored
    else:
        rollout = max(rollout, scored, key=lambda found: sum(each.seconds for each in found))
    return step_seconds(rollout, others, constants, offload=offload, apart=apart)
