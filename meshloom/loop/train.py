"""``meshloom train``: put an RL run together and run it.

Owns: which pieces a run has. Always holds: everything that can be wrong with the input is found before the run folder is
touched or a weight is read.
"""

from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from meshloom.config.settings import KlPlace, TrainSettings
from meshloom.data.order import PromptOrder
from meshloom.data.prompts import render_prompts
from meshloom.data.rows import Prompt
from meshloom.data.sources import load_rows
from meshloom.loop.buffer import GroupBuffer
from meshloom.loop.build import (
    build_actor,
    build_engine,
    decoder,
    find_checkpoint,
    finish_plan,
    open_folder,
    sampling_params,
)
from meshloom.loop.collect import Collector
from meshloom.loop.rl import RLProgram
from meshloom.loop.session import Session, read_cut, restore_random_state
from meshloom.loop.validate import Validator
from meshloom.rewards.pool import RewardPool
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.train.load import check_model_folder, load_tokenizer, pick_device
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.reference import Reference
from meshloom.train.snapshot import restore


def run_training(settings: TrainSettings, *, resume: bool) -> int:
    """Train; the exit code: 0 done, 130 stopped and saved.

    Raises:
        UserError: if the input is bad; nothing has been written then.
        RunFault: if the run stops itself.
    """
    check_model_folder(settings.model.path)
    pick_device(settings.device)
    checkpoint = find_checkpoint(settings) if resume else None
    tokenizer = load_tokenizer(settings.model.path)
    prompts, held_out, dropped = _load_prompts(settings, tokenizer)
    plan = finish_plan(settings, len(prompts))
    with ExitStack() as resources:
        sources = {prompt.row.data_source for prompt in (*prompts, *held_out)}
        pool = resources.enter_context(RewardPool(settings.reward, sources))
        folder = open_folder(settings, plan, resume=resume, checkpoint=checkpoint)
        first_step = 0 if checkpoint is None else read_cut(checkpoint).values["step"]
        session = resources.enter_context(Session(folder, settings, steps=plan.steps, first_step=first_step))
        for warning in plan.warnings:
            session.display.notice(f"warning {warning}")
        if dropped:
            session.display.notice(f"{dropped} prompts longer than data.max_prompt_tokens were dropped")
        program = _assemble(settings, session, pool, tokenizer, prompts, held_out, plan.updates, checkpoint)
        return program.run()


def _load_prompts(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], list[Prompt], int]:
    """Prompts of training and validation, and how many were too long and dropped."""
    data = settings.data
    train = render_prompts(load_rows(data.train, data), tokenizer, data)
    if data.validation is None:
        return train.prompts, [], train.dropped
    held_out = render_prompts(load_rows(data.validation, data), tokenizer, data)
    return train.prompts, held_out.prompts, train.dropped + held_out.dropped


def _assemble(
    settings: TrainSettings,
    session: Session,
    pool: RewardPool,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    held_out: list[Prompt],
    total_updates: int,
    checkpoint: Path | None,
) -> RLProgram:
    bound = MicrobatchBound(settings.batch.tokens_per_microbatch, settings.batch.samples_per_microbatch)
    actor = build_actor(
        settings.model, settings.optimizer, bound, device=settings.device, seed=settings.seed, checkpoint=checkpoint
    )
    engine = build_engine(actor, settings.rollout, tokenizer)
    collector = Collector(
        engine=engine,
        scorer=pool,
        prompts=prompts,
        decode=decoder(tokenizer),
        params=sampling_params(settings.rollout.sampling, settings.rollout),
        samples_per_prompt=settings.batch.samples_per_prompt,
        seed=settings.seed,
    )
    program = RLProgram(
        settings=settings,
        session=session,
        actor=actor,
        reference=_reference(settings, actor, bound),
        engine=engine,
        collector=collector,
        order=PromptOrder(len(prompts), settings.seed, settings.data.shuffle),
        buffer=GroupBuffer(settings.algorithm.max_lag_versions),
        validator=_validator(settings, engine, pool, tokenizer, held_out),
        tokenizer=tokenizer,
        total_updates=total_updates,
    )
    if checkpoint is not None:
        cut = read_cut(checkpoint)
        restore(actor, checkpoint, updates=cut.values["version"])
        program.load(cut)
        restore_random_state(cut)
    return program


def _reference(settings: TrainSettings, actor: TrainedModel, bound: MicrobatchBound) -> Reference | None:
    """The model the divergence is measured from, only where a divergence is used."""
    if settings.algorithm.kl is KlPlace.NONE:
        return None
    if settings.model.lora is not None:
        return Reference(actor, adapters=False)
    frozen = build_actor(settings.model, None, bound, device=settings.device, seed=settings.seed, checkpoint=None)
    return Reference(frozen, adapters=True)


def _validator(
    settings: TrainSettings,
    engine: TorchEngine,
    pool: RewardPool,
    tokenizer: PreTrainedTokenizerBase,
    held_out: list[Prompt],
) -> Validator | None:
    if not held_out:
        return None
    validation, rollout = settings.validation, settings.rollout
    collector = Collector(
        engine=engine,
        scorer=pool,
        prompts=held_out,
        decode=decoder(tokenizer),
        params=sampling_params(validation.sampling, rollout, validation.max_response_tokens),
        samples_per_prompt=validation.samples_per_prompt,
        seed=settings.seed,
        purpose="validation",
    )
    return Validator(collector, validation, rollout.deadline_s)
