"""``meshloom train``: put an RL run together and run it.

Owns: which pieces a run has. Always holds: everything that can be wrong with the input is found before the run folder is
touched or a weight is read.
"""

from contextlib import ExitStack

from meshloom.config.settings import TrainSettings
from meshloom.loop.begun import takes_up
from meshloom.loop.build import (
    build_actor,
    build_collector,
    build_engine,
    build_validator,
    check_engine,
    open_session,
    token_rows,
)
from meshloom.loop.control import ControlLoop
from meshloom.loop.critic_role import build_critic
from meshloom.loop.program import carry_out, control_of
from meshloom.loop.reference_role import build_reference
from meshloom.loop.residents import Residents, check_room, folder_of
from meshloom.loop.reward_models import Models
from meshloom.loop.rewarding import load_reward_models
from meshloom.loop.rl import RLStage
from meshloom.loop.roles import Roles
from meshloom.loop.run_inputs import RunInputs, check_places
from meshloom.loop.session import set_random_states
from meshloom.loop.surroundings import Surroundings, open_surroundings
from meshloom.plan.auto import arranged
from meshloom.plan.carried_out import carried_out
from meshloom.plan.placement import Role
from meshloom.plan.reference import refreshes
from meshloom.plan.residency import Phase
from meshloom.plan.stays import Part, stays
from meshloom.rewards.model import RewardModels
from meshloom.train.ahead import CompileAhead
from meshloom.train.load import free_memory, pick_device
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.reference import Reference
from meshloom.train.snapshot import restore

LocalRoles = Roles[TrainedModel, Reference]
"""Roles that are all in this process."""


def run_training(
    settings: TrainSettings, *, resume: bool, ahead: CompileAhead | None = None, only_rollout: bool = False
) -> int:
    """Train, on one device or over several; the exit code: 0 done, 130 stopped and saved.

    Args:
        settings: of the run.
        resume: go on from the newest checkpoint.
        ahead: compiles meanwhile what the first update needs.
        only_rollout: generate and score the prompts of all steps, and train on nothing.

    Raises:
        UserError: if the input is bad; nothing has been written then.
        RunFault: if the run stops itself.
    """
    settings, _ = arranged(settings)
    carried = carried_out(settings)
    if carried.is_spread:
        from meshloom.loop.many_devices import run_over_devices

        return run_over_devices(carried, resume=resume, only_rollout=only_rollout)
    return _train_here(carried.settings, resume=resume, ahead=ahead, only_rollout=only_rollout)


def _train_here(settings: TrainSettings, *, resume: bool, ahead: CompileAhead | None, only_rollout: bool) -> int:
    """The same on one device, in this process."""
    resume = takes_up(settings, resume=resume)
    check_places(settings, resume=resume)
    device = pick_device(settings.device)
    memory = free_memory(device)
    ahead = ahead if device.type == "cuda" else None
    if ahead is not None and not ahead.after_engine:
        ahead.begin(settings, str(device))
    check_engine(settings.rollout)
    inputs = RunInputs.read(settings, resume=resume)
    plan, inputs = inputs.planned(memory)
    settings = inputs.settings
    with ExitStack() as resources:
        scorers = load_reward_models(settings, device)
        roles, around = _build_roles(resources, inputs, scorers)
        if ahead is not None and ahead.after_engine:
            ahead.begin(settings, str(device), free_memory(device))
        planned, models, folder = stays(settings, plan.layout), _models(roles, scorers), folder_of(settings)
        check_room(folder, planned, models)
        session = resources.enter_context(
            open_session(settings, plan, *_saved(roles, settings), resume=resume, cut=inputs.cut)
        )
        around.tell(session.display.notice, session.folder.path)
        for text in inputs.notices():
            session.display.notice(text)
        log = session.folder.log_memory
        residents = resources.enter_context(Residents(planned, models, folder=folder, log=log))
        stage = RLStage(
            settings,
            session,
            roles,
            inputs.tokenizer,
            plan.updates,
            residents,
            plan.critic_updates,
            critic_rows=None if roles.critic is None else token_rows(roles.critic),
        )
        if ahead is not None:
            stage.await_compiler = ahead.wait
        control = control_of(stage, inputs, plan)
        _give_weights(control, stage, is_resumed=inputs.cut is not None)
        set_random_states(inputs.cut, settings.seed)
        return carry_out(control, stage, only_rollout=only_rollout)


def _build_roles(
    resources: ExitStack, inputs: RunInputs, scorers: RewardModels | None
) -> tuple[LocalRoles, Surroundings]:
    """The roles, as a checkpoint has them, and what their samples meet.

    Raises:
        UserError: if a role cannot be built, or lacks tokens of the run.
    """
    settings, tokenizer = inputs.settings, inputs.tokenizer
    models = None if scorers is None else Models(scorers.scores)
    around = open_surroundings(resources, settings, inputs.rendered, inputs.names, tokenizer, models)
    bound = MicrobatchBound(settings.batch.tokens_per_microbatch, settings.batch.samples_per_microbatch)
    actor = build_actor(
        settings.model,
        settings.optimizer,
        bound,
        device=settings.device,
        seed=settings.seed,
        checkpoint=inputs.checkpoint,
    )
    longest = settings.validation.max_response_tokens
    engine = build_engine(actor, settings.rollout, settings.data, tokenizer, max_response_tokens=longest)
    roles = Roles(
        actor=actor,
        reference=build_reference(settings, actor, inputs.checkpoint),
        critic=build_critic(settings, inputs.checkpoint),
        engine=engine,
        collector=build_collector(settings, engine, around.scorer, tokenizer, inputs.prompts, around.environments),
        validator=None
        if not inputs.held_out
        else build_validator(settings, engine, around.scorer, tokenizer, inputs.held_out, around.environments),
    )
    _restore(roles, inputs)
    return roles, around


def _restore(roles: LocalRoles, inputs: RunInputs) -> None:
    """Check the roles against the run's tokens, and bring what is trained to where a checkpoint has it.

    Raises:
        UserError: if a model lacks tokens, or the engine could never answer a prompt.
    """
    inputs.require_tokens(token_rows(roles.actor))
    if roles.critic is not None:
        inputs.require_tokens(token_rows(roles.critic), "critic.model")
    roles.check()
    if inputs.checkpoint is None:
        return
    restore(roles.actor, inputs.checkpoint, updates=inputs.updates)
    if roles.critic is not None:
        restore(roles.critic, inputs.checkpoint, updates=inputs.critic_updates)


def _models(roles: LocalRoles, scorers: RewardModels | None) -> dict[str, TrainedModel | RewardModels]:
    """Models with weights of their own, by role."""
    found: dict[str, TrainedModel | RewardModels] = {str(Role.ACTOR): roles.actor}
    if roles.reference is not None and roles.reference.model is not roles.actor:
        found[str(Role.REFERENCE)] = roles.reference.model
    if roles.critic is not None:
        found[str(Role.CRITIC)] = roles.critic
    return found if scorers is None else {**found, str(Role.REWARD): scorers}


def _saved(roles: LocalRoles, settings: TrainSettings) -> list[TrainedModel]:
    """Models that a checkpoint holds."""
    saved = [roles.actor] if roles.critic is None else [roles.actor, roles.critic]
    if roles.reference is not None and refreshes(settings):
        saved.append(roles.reference.model)
    return saved


def _give_weights(control: ControlLoop, stage: RLStage, *, is_resumed: bool) -> None:
    """Let the engine have the weights that the run begins with, where it has not: those of a checkpoint, and those that are not
    there when it first needs them."""
    engine = stage.roles.engine
    if is_resumed:
        engine.load_weights(control.version)
    if stage.residents.is_away(Role.ACTOR, Part.PARAMETERS, Phase.GENERATE):
        # The engine takes the weights when it first needs them: it must be while they are there.
        stage.residents.enter(Phase.SYNC, step=control.step, why="start")
        engine.load_weights(control.version)
