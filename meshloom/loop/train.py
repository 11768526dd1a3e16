"""``meshloom train``: put an RL run together and run it.

Owns: which pieces a run has. Always holds: everything that can be wrong with the input is found before the run folder is
touched or a weight is read.
"""

from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from meshloom.algorithms.own_checks import check_own
from meshloom.config.settings import TrainSettings
from meshloom.data.order import PromptOrder
from meshloom.data.rows import Prompt
from meshloom.loop.build import (
    build_actor,
    build_collector,
    build_engine,
    build_validator,
    check_engine,
    find_checkpoint,
    finish_plan,
    load_prompts,
    open_session,
    require_vocabulary,
    texts_decoder,
)
from meshloom.loop.control import ControlLoop
from meshloom.loop.critic_role import build_critic, critic_model_settings
from meshloom.loop.environments import open_environments, open_scorer, run_prompts, unseen_tools
from meshloom.loop.episodes import Environments
from meshloom.loop.groups import standing
from meshloom.loop.isolation import check_isolation, tell_isolation
from meshloom.loop.reference_role import build_reference
from meshloom.loop.replay import dump_samples, saved_jobs, schedule_of
from meshloom.loop.residents import Residents, check_room, folder_of
from meshloom.loop.reward_models import Models
from meshloom.loop.rewarding import load_reward_models
from meshloom.loop.rl import RLStage, Roles
from meshloom.loop.saved_samples import read_saved
from meshloom.loop.session import read_cut, set_random_states
from meshloom.observe.loggers import check_loggers
from meshloom.observe.run_folder import check_free
from meshloom.plan.auto import arranged
from meshloom.plan.carried_out import carried_out
from meshloom.plan.placement import Role, has_critic
from meshloom.plan.reference import refreshes
from meshloom.plan.residency import Phase
from meshloom.plan.stays import Part, stays
from meshloom.rewards.combined import Scorer
from meshloom.train.ahead import CompileAhead
from meshloom.train.head import plain_model
from meshloom.train.load import check_model_folder, free_memory, load_tokenizer, pick_device
from meshloom.train.model import MicrobatchBound
from meshloom.train.snapshot import restore


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
    settings = carried.settings
    check_model_folder(settings.model.path)
    if has_critic(settings):
        check_model_folder(critic_model_settings(settings).path, "critic.model")
    if settings.reference.model is not None:
        check_model_folder(settings.reference.model)
    memory = free_memory(device := pick_device(settings.device))
    check_free(settings.run_dir, resume=resume)
    check_loggers(settings.logging.loggers)
    check_own(settings.algorithm)
    if ahead is not None and device.type == "cuda":
        ahead.begin(settings, str(device))
    check_engine(settings.rollout)
    checkpoint, settings = find_checkpoint(settings) if resume else (None, settings)
    cut = None if checkpoint is None else read_cut(checkpoint)
    tokenizer = load_tokenizer(settings.model.path)
    found = run_prompts(settings, tokenizer)
    prompts, held_out, dropped = load_prompts(settings, found)
    sources = {prompt.row.data_source for prompt in (*prompts, *held_out)}
    saved = read_saved(settings, texts_decoder(tokenizer))
    if saved is not None:
        prompts, settings = saved.prompts, saved.with_steps(settings)
    plan, settings = finish_plan(settings, len(prompts), memory)
    order = PromptOrder(len(prompts), settings.seed, settings.data.shuffle)
    if cut is not None:
        order.load(cut.values["order"])
    with ExitStack() as resources:
        scorers = load_reward_models(settings, device)
        asked = None if scorers is None else Models(scorers.scores)
        isolation = check_isolation(settings.reward)
        pool = open_scorer(resources, settings, sources, tokenizer, asked)
        environments = open_environments(resources, settings, found)
        roles = _build_roles(settings, pool, tokenizer, prompts, held_out, environments, checkpoint)
        require_vocabulary(roles.actor, (prompt.ids for prompt in (*prompts, *held_out)))
        if saved is not None:
            require_vocabulary(roles.actor, saved.ids())
        if roles.critic is not None:
            require_vocabulary(roles.critic, (prompt.ids for prompt in (*prompts, *held_out)), "critic.model")
            if saved is not None:
                require_vocabulary(roles.critic, saved.ids(), "critic.model")
        roles.check()
        if cut is not None and checkpoint is not None:
            restore(roles.actor, checkpoint, updates=cut.values["version"])
            if roles.critic is not None:
                restore(roles.critic, checkpoint, updates=cut.values["algorithm"]["critic_updates"])
        planned, models = stays(settings, plan.layout), roles.models()
        if scorers is not None:
            models |= {str(Role.REWARD): scorers}
        check_room(folder := folder_of(settings), planned, models)
        kept = [roles.actor] if roles.critic is None else [roles.actor, roles.critic]
        if roles.reference is not None and refreshes(settings):
            kept.append(roles.reference.model)
        session = resources.enter_context(open_session(settings, plan, *kept, resume=resume, cut=cut))
        tell_isolation(isolation, session.display.notice, session.folder.path)
        if dropped:
            session.display.notice(f"{dropped} prompts longer than data.max_prompt_tokens were dropped")
        if unseen := unseen_tools(found):
            session.display.notice(unseen)
        log = session.folder.log_memory
        residents = resources.enter_context(Residents(planned, models, folder=folder, log=log))
        stage = RLStage(
            settings, session, roles, tokenizer, plan.updates, residents, plan.critic_updates, critic_rows=_rows(roles)
        )
        if ahead is not None:
            stage.await_compiler = ahead.wait
        if saved is not None:
            stage.replay = saved_jobs(saved, settings, session.display.notice)
        control = ControlLoop(schedule_of(settings, plan.steps), stage, order)
        if cut is not None:
            control.load(*standing(cut, settings))
            stage.load(cut)
            roles.engine.load_weights(control.version)
        if residents.is_away(Role.ACTOR, Part.PARAMETERS, Phase.GENERATE):
            # The engine takes the weights when it first needs them: it must be while they are there.
            residents.enter(Phase.SYNC, step=control.step, why="start")
            roles.engine.load_weights(control.version)
        set_random_states(cut, settings.seed)
        finished = dump_samples(stage, order, plan.steps) if only_rollout else control.run()
        return session.end(step=stage.step, stopped=not finished)


def _rows(roles: Roles) -> int | None:
    """Tokens of the critic, if there is one."""
    return None if roles.critic is None else len(plain_model(roles.critic.module).get_input_embeddings().weight)


def _build_roles(
    settings: TrainSettings,
    pool: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    held_out: list[Prompt],
    environments: Environments | None,
    checkpoint: Path | None,
) -> Roles:
    bound = MicrobatchBound(settings.batch.tokens_per_microbatch, settings.batch.samples_per_microbatch)
    actor = build_actor(
        settings.model, settings.optimizer, bound, device=settings.device, seed=settings.seed, checkpoint=checkpoint
    )
    longest = settings.validation.max_response_tokens
    engine = build_engine(actor, settings.rollout, settings.data, tokenizer, max_response_tokens=longest)
    return Roles(
        actor=actor,
        reference=build_reference(settings, actor, checkpoint),
        critic=build_critic(settings, checkpoint),
        engine=engine,
        collector=build_collector(settings, engine, pool, tokenizer, prompts, environments),
        validator=build_validator(settings, engine, pool, tokenizer, held_out, environments) if held_out else None,
    )
