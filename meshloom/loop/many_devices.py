"""A run over several devices: the roles on its workers, behind the objects that the loop uses.

Owns: giving each role its ranks. Refuses to know: the algorithm (``loop.rl``), the order of
a run (``loop.control``), how processes are started (``fabric``). Always holds: everything that can be wrong with the input is
found before the run folder is touched; the order of prompts, the buffer and the records are this process's, the models the
workers'.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch

from meshloom.config.settings import KlPlace, TrainSettings
from meshloom.fabric.dispatch import GroupLayout
from meshloom.fabric.groups import WorkerGroup
from meshloom.fabric.workers import Workers
from meshloom.loop.begun import takes_up
from meshloom.loop.build import (
    build_collector,
    build_validator,
    open_run,
)
from meshloom.loop.critic_role import critic_bound, critic_model_settings
from meshloom.loop.facts import least_free_bytes
from meshloom.loop.held import HeldSamples
from meshloom.loop.model_role import RemoteModel, RemoteReference, RoleRanks
from meshloom.loop.program import carry_out, control_of
from meshloom.loop.remote import RankMemory, RemoteResidents, RemoteStage
from meshloom.loop.remote_scores import asked_on_ranks
from meshloom.loop.replicas import RemoteEngine
from meshloom.loop.roles import Roles
from meshloom.loop.run_inputs import RunInputs, check_places
from meshloom.loop.run_workers import closed_by_failure, start_workers, stopping_at_once
from meshloom.loop.session import Session
from meshloom.loop.sharing import Sharing, sharing_of
from meshloom.loop.surroundings import Surroundings, open_surroundings
from meshloom.loop.worker_host import WorkerHost
from meshloom.plan.build import Plan, build_plan
from meshloom.plan.carried_out import Carried
from meshloom.plan.lag import steps_ahead
from meshloom.plan.layout import Layout, RoleLayout, share_devices
from meshloom.plan.placement import Role
from meshloom.plan.reference import refreshes
from meshloom.plan.role_numbers import unread_logprobs
from meshloom.rollout.vllm_build import require_vllm

_HOST = "meshloom.loop.worker_host:WorkerHost"
DATA_AXES = ("replicate", "fsdp")
"""Axes of a model's mesh over which samples are divided."""
BUILD_S, ASK_S = 3600.0, 300.0
_MOVE_S = 1800.0


def run_over_devices(carried: Carried, *, resume: bool, only_rollout: bool = False) -> int:
    """Train; the exit code: 0 done, 130 stopped and saved.

    Args:
        carried: the run.
        resume: go on from the newest checkpoint.
        only_rollout: generate and score the prompts of all steps, and train on nothing.

    Raises:
        UserError: if the input is bad; nothing has been written then.
        WorkerFault: if a worker fails; the run goes on from its newest checkpoint.
        RunFault: if the run stops itself.
    """
    resume = takes_up(carried.settings, resume=resume)
    check_places(carried.settings, resume=resume)
    if carried.settings.rollout.engine == "vllm":
        require_vllm()
    inputs = RunInputs.read(carried.settings, resume=resume)
    build_plan(inputs.settings, len(inputs.prompts)).require()
    with ExitStack() as resources:
        workers = resources.enter_context(start_workers(inputs.settings, carried.layout, _HOST))
        devices = workers.call("device_facts", phase="start", deadline_s=ASK_S)
        plan, inputs = inputs.planned(least_free_bytes(devices))
        settings = inputs.settings
        ranks = _Ranks(settings, plan.layout, workers)
        models = resources.enter_context(asked_on_ranks(workers, ranks.scoring, meanwhile=ranks.scores_meanwhile))
        beside = resources.enter_context(closed_by_failure(workers))
        around = open_surroundings(beside, settings, inputs.rendered, inputs.names, inputs.tokenizer, models)
        checkpoint_bytes = ranks.build(inputs)
        engine = ranks.engine()
        roles = ranks.roles(engine, inputs, around)
        roles.check()
        session = resources.enter_context(
            open_run(settings, plan, checkpoint_bytes, devices[0].described, resume=resume, cut=inputs.cut)
        )
        resources.enter_context(stopping_at_once(workers, session))
        around.tell(session.display.notice, session.folder.path)
        for text in inputs.notices():
            session.display.notice(text)
        session.measure_memory = RankMemory(workers, ranks.free_between_steps, engine.memory).metrics
        stage = _stage(resources, inputs, plan, session, roles, ranks)
        control = control_of(stage, inputs, plan)
        engine.load_weights(control.version)
        torch.manual_seed(settings.seed)
        code = carry_out(control, stage, only_rollout=only_rollout)
        workers.ends_with(code)
        return code


def _stage(
    resources: ExitStack,
    inputs: RunInputs,
    plan: Plan,
    session: Session,
    roles: Roles[RemoteModel, RemoteReference],
    ranks: "_Ranks",
) -> RemoteStage:
    """What the control drives; with threads of rollouts, and of a critic that learns beside the actor, where devices allow."""
    settings = inputs.settings
    return RemoteStage(
        settings,
        session,
        roles,
        inputs.tokenizer,
        plan.updates,
        RemoteResidents(ranks.models, session.folder.log_memory),
        plan.critic_updates,
        critic_rows=ranks.critic_rows,
        trained_group=ranks.trained,
        held=ranks.held,
        background=None if ranks.takes_turns else resources.enter_context(_background(settings)),
        beside=resources.enter_context(_background(settings)) if ranks.critic_is_apart else None,
    )


@contextmanager
def _background(settings: TrainSettings) -> Iterator[ThreadPoolExecutor]:
    """Threads for the rollouts that may be in flight; what is in flight at the end is left to its workers' end."""
    threads = ThreadPoolExecutor(steps_ahead(settings) + 2, thread_name_prefix="rollout")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


class _Ranks:
    """The roles of a run on its workers.

    Args:
        settings: of the run.
        layout: of its roles; a device's number is its worker's rank.
        workers: of the run.
    """

    def __init__(self, settings: TrainSettings, layout: Layout, workers: Workers) -> None:
        self._settings, self._layout, self._workers = settings, layout, workers
        self._actor, self._rollout = layout.role(Role.ACTOR), layout.role(Role.ROLLOUT)
        self._reference = layout.role(Role.REFERENCE)
        critic = layout.role(Role.CRITIC)
        trained = {rank for found in (self._actor, critic) if found is not None for rank in found.devices}
        self.held = HeldSamples(
            trained, self._tell_to_let_go, _layout(self._actor), _knowing(self._actor), unread_logprobs(settings)
        )
        self.takes_turns = share_devices(self._actor, self._rollout)
        self.actor = RemoteModel(self._ranks(self._actor, sharing_of(settings, self._actor, backward=True)))
        reward = layout.role(Role.REWARD)
        self.scoring = () if reward is None else tuple(reward.ranks)
        self.scores_meanwhile = not share_devices(reward, self._rollout)
        self.critic = None if critic is None else self._remote_critic(critic)
        self.critic_rows: int | None = None
        self.critic_is_apart = critic is not None and not share_devices(critic, self._actor)
        self.models, self.trained = (
            self._all(self._actor, self._reference, critic, reward),
            self._all(self._actor, critic),
        )
        self._vocabulary = 0

    @property
    def free_between_steps(self) -> list[int]:
        """Ranks that do nothing between two steps: engines with devices of their own may generate then."""
        generating = set() if self.takes_turns else set(self._rollout.devices)
        return [seat.rank for seat in self._workers.seats if seat.rank not in generating]

    def build(self, inputs: RunInputs) -> int:
        """Build all models; about what a checkpoint takes, in bytes.

        Args:
            inputs: of the run.

        Raises:
            UserError: if a model cannot be loaded, or lacks tokens.
        """
        arguments = {
            "settings": self._settings,
            "layout": self._layout,
            "checkpoint": None if inputs.checkpoint is None else inputs.checkpoint.absolute(),
            "updates": inputs.updates,
            "critic_updates": inputs.critic_updates,
        }
        self._workers.call("build", arguments, phase="start", deadline_s=BUILD_S)
        told = self.actor.group.call("facts", {"role": Role.ACTOR}, phase="start", deadline_s=ASK_S)
        self._vocabulary = max(facts.vocabulary for facts in told)
        inputs.require_tokens(self._vocabulary)
        if self.critic is not None:
            of_critic = self.critic.group.call("facts", {"role": Role.CRITIC}, phase="start", deadline_s=ASK_S)
            self.critic_rows = max(facts.vocabulary for facts in of_critic)
            inputs.require_tokens(self.critic_rows, "critic.model")
            told = [*told, *of_critic]
        if self._reference is not None and refreshes(self._settings):
            group = self._group(self._reference)
            told = [*told, *group.call("facts", {"role": Role.REFERENCE}, phase="start", deadline_s=ASK_S)]
        return sum(facts.checkpoint_bytes for facts in told)

    def engine(self) -> RemoteEngine:
        """All replicas of the engine."""
        tensor = self._rollout.mesh.size("tp")
        ranks = self._rollout.ranks
        movers = sorted({*self._actor.devices, *ranks})

        def move_weights(version: int) -> None:
            self._workers.call("move_weights", {"version": version}, ranks=movers, phase="sync", deadline_s=_MOVE_S)

        return RemoteEngine(
            self._workers,
            [ranks[at : at + tensor] for at in range(0, len(ranks), tensor)],
            vocabulary=self._vocabulary,
            move_weights=move_weights,
            takes_turns=self.takes_turns,
            slots=self._settings.rollout.max_sequences,
        )

    def roles(
        self, engine: RemoteEngine, inputs: RunInputs, around: Surroundings
    ) -> Roles[RemoteModel, RemoteReference]:
        """The roles, once they are built.

        Args:
            engine: of the run.
            inputs: of the run.
            around: what its samples meet.
        """
        settings, judges = self._settings, (around.scorer, inputs.tokenizer)
        return Roles(
            actor=self.actor,
            reference=self._frozen(),
            critic=self.critic,
            engine=engine,
            collector=build_collector(settings, engine, *judges, inputs.prompts, around.environments),
            validator=None
            if not inputs.held_out
            else build_validator(settings, engine, *judges, inputs.held_out, around.environments),
        )

    def _frozen(self) -> RemoteReference | None:
        """What the divergence is measured from, where one is used: a frozen model, or the base under the actor's adapters."""
        if self._settings.algorithm.kl is KlPlace.NONE:
            return None
        if self._reference is None:
            return RemoteReference(self.actor.ranks, Role.ACTOR)
        ranks = self._ranks(self._reference, sharing_of(self._settings, self._reference, backward=False))
        both = None
        if refreshes(self._settings):
            both = self._all(self._actor, self._reference)
        return RemoteReference(ranks, Role.REFERENCE, both)

    def _remote_critic(self, found: RoleLayout) -> RemoteModel:
        settings = self._settings
        tokens = critic_bound(settings).tokens
        path = critic_model_settings(settings).path
        sharing = sharing_of(settings, found, backward=True, tokens=tokens, path=path)
        return RemoteModel(self._ranks(found, sharing), Role.CRITIC)

    def _all(self, *roles: RoleLayout | None) -> WorkerGroup:
        """All ranks of roles, each by itself."""
        ranks = {rank for found in roles if found is not None for rank in found.devices}
        return WorkerGroup(self._workers, GroupLayout.data_parallel(sorted(ranks)), WorkerHost)

    def _group(self, found: RoleLayout) -> WorkerGroup:
        return WorkerGroup(self._workers, _layout(found), WorkerHost)

    def _ranks(self, found: RoleLayout, sharing: Sharing) -> RoleRanks:
        """A model's ranks."""
        return RoleRanks(self._group(found), sharing, _knowing(found), self.held)

    def _tell_to_let_go(self, ranks: Sequence[int]) -> None:
        """Ranks give up what they keep once they have done what they were called for before; nobody waits for it."""
        self._workers.submit("let_go", ranks=ranks, phase="update", deadline_s=ASK_S)


def _layout(found: RoleLayout) -> GroupLayout:
    """A role's replicas."""
    return GroupLayout.of_mesh(found.ranks, found.mesh.axes, DATA_AXES)


def _knowing(found: RoleLayout) -> frozenset[int]:
    """Ranks that know what a model's head says, those of the last stage: stages are the outermost axis."""
    return frozenset(found.ranks[-(len(found.ranks) // found.mesh.size("pp")) :])
