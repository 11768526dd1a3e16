"""Putting a run together: the pieces that training, fine-tuning and evaluation share.

Owns: the order of checks at the start. Always holds: everything that can be wrong with a user's input is found before the
run folder is touched.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from meshloom.algorithms.advantages import ADVANTAGES
from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.resume import as_begun, as_decided, require_same
from meshloom.config.reward_settings import component_names, solving_component
from meshloom.config.settings import (
    DataSettings,
    EvalSettings,
    ModelSettings,
    OptimizerSettings,
    RolloutSettings,
    SamplingSettings,
    SftSettings,
    TrainSettings,
)
from meshloom.data.prompts import end_of_turn
from meshloom.data.rows import Prompt
from meshloom.data.tokenizer import require_tokens
from meshloom.loop.begun import BEGINS_ANEW
from meshloom.loop.collect import Collector
from meshloom.loop.environments import RunPrompts, collector_of
from meshloom.loop.episodes import Environments
from meshloom.loop.session import Cut, Session
from meshloom.loop.validate import Validator
from meshloom.loop.vllm import vllm_engine
from meshloom.observe.measured_run import MACHINE_KEY
from meshloom.observe.run_folder import CHECKPOINTS_FOLDER, SETTINGS_FILE, RunFolder, check_free, require_unfinished
from meshloom.plan.build import Plan, build_plan
from meshloom.plan.recompute import RECOMPUTED
from meshloom.plan.report import plan_json, plan_text
from meshloom.rewards.combined import Scorer
from meshloom.rollout.embedded import embedded_engine
from meshloom.rollout.protocol import Engine, SamplingParams
from meshloom.rollout.vllm_build import check_vllm
from meshloom.train.checkpoint_store import latest_checkpoint, read_manifest, require_room, verify
from meshloom.train.head import plain_model
from meshloom.train.load import add_lora, describe_device, end_token_ids, load_model, pick_device, pick_dtype
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.snapshot import MODEL, snapshot_bytes

S = TypeVar("S", TrainSettings, SftSettings)


def find_checkpoint(settings: S) -> tuple[Path | None, S]:
    """The newest complete checkpoint of the run to resume, and the settings with what that run decided.

    There is none if the run was ended before the first. Then nothing is decided yet: the run starts anew, with whatever
    settings are given now.

    Raises:
        UserError: if there is no run, it is in use, it has finished and kept no checkpoint, its settings contradict these, it
            has done more steps than they say, or the checkpoint is damaged.
    """
    run_dir = Path(settings.run_dir)
    check_free(run_dir, resume=True)
    if not (run_dir / SETTINGS_FILE).is_file():
        raise UserError(
            f"there is no run to resume in {run_dir}", where="run_dir", fix="leave --resume out to start it"
        )
    checkpoint = latest_checkpoint(run_dir / CHECKPOINTS_FOLDER)
    if checkpoint is None:
        require_unfinished(run_dir)
        return None, settings
    saved = load_settings(type(settings), run_dir / SETTINGS_FILE)
    require_same(saved, settings)
    done, steps = verify(checkpoint).step, settings.batch.steps
    if steps is not None and steps < done:
        raise UserError(
            f"the run has done {done} steps, more than batch.steps={steps}",
            where=f"batch.steps ({settings.provenance.of('batch.steps')})",
            fix=f"batch.steps={done} or more: it counts from the beginning of the run, not from where it goes on",
        )
    return checkpoint, as_begun(saved, settings)


def open_session(
    settings: TrainSettings | SftSettings,
    plan: Plan,
    model: TrainedModel,
    *more: TrainedModel,
    resume: bool,
    cut: Cut | None,
) -> Session:
    """Take the run folder and begin: the first moment at which anything is written.

    On resume, records that are newer than the checkpoint are dropped; without a checkpoint all of them are, and the run
    starts anew.

    Args:
        settings: of the run.
        plan: of the run.
        model: that checkpoints will hold.
        more: further models that they will hold.
        resume: whether the folder has a run already.
        cut: the checkpoint resumed from.

    Raises:
        UserError: if the disk has no room for a checkpoint, or the folder cannot be taken.
    """
    machine = describe_device(pick_device(settings.device))
    return open_run(settings, plan, sum(map(snapshot_bytes, (model, *more))), machine, resume=resume, cut=cut)


def open_run(
    settings: TrainSettings | SftSettings,
    plan: Plan,
    checkpoint_bytes: int,
    machine: Mapping[str, str | None],
    *,
    resume: bool,
    cut: Cut | None,
) -> Session:
    """As ``open_session``, for a model that is somewhere else.

    Args:
        settings: of the run.
        plan: of the run.
        checkpoint_bytes: about what a checkpoint will take.
        machine: what the run notes of its devices.
        resume: whether the folder has a run already.
        cut: the checkpoint resumed from.

    Raises:
        UserError: as ``open_session``.
    """
    require_room(Path(settings.run_dir), checkpoint_bytes, "a checkpoint")
    first_step = 0 if cut is None else cut.values["step"]
    folder = _open_folder(settings, plan, machine, resume=resume, last_step=-1 if cut is None else first_step)
    session = Session(folder, settings, steps=plan.steps, first_step=first_step)
    if resume and cut is None:
        session.display.notice(BEGINS_ANEW)
    for warning in plan.warnings:
        session.display.notice(f"warning {warning}")
    for line in plan.lines:
        if line.name == RECOMPUTED and plan.recompute:
            session.display.notice(f"layers are recomputed: {line.formula}")
    return session


def _open_folder(
    settings: TrainSettings | SftSettings,
    plan: Plan,
    machine: Mapping[str, str | None],
    *,
    resume: bool,
    last_step: int,
) -> RunFolder:
    written = {**json.loads(plan_json(plan)), MACHINE_KEY: machine}
    described = {"settings": settings, "plan_text": plan_text(plan), "plan": written}
    if not resume:
        return RunFolder.create(settings.run_dir, **described)
    folder = RunFolder.resume(settings.run_dir)
    try:
        _require_untouched(folder, last_step)
        folder.rewind(last_step)
        folder.write_settings(settings)
        folder.write_plan(described["plan_text"], described["plan"])
    except BaseException:
        folder.close()
        raise
    return folder


def _require_untouched(folder: RunFolder, last_step: int) -> None:
    """Refuse a run that another process has gone on with since its checkpoint was read, before the folder was taken."""
    newest = latest_checkpoint(folder.checkpoints)
    if newest is None:
        require_unfinished(folder.path)
    elif (step := read_manifest(newest).step) != last_step:
        raise UserError(
            f"another process has gone on with this run meanwhile, and saved step {step}",
            where=str(folder.path),
            why="its records would be dropped",
            fix="add --resume to go on from there, or use another run_dir",
        )


def finish_plan(settings: S, num_prompts: int, device_memory: int | None) -> tuple[Plan, S]:
    """The plan, now that the prompts are counted and the device was asked, and the settings with what it decided.

    Args:
        settings: of the run.
        num_prompts: prompts of the training data.
        device_memory: bytes free on the GPU; none for the processor.

    Raises:
        UserError: that lists everything that cannot work.
    """
    plan = build_plan(settings, num_prompts, device_memory)
    plan.require()
    return plan, as_decided(settings, plan.recompute)


def build_actor(
    settings: ModelSettings,
    optimizer: OptimizerSettings | None,
    bound: MicrobatchBound,
    *,
    device: str,
    seed: int,
    checkpoint: Path | None,
) -> TrainedModel:
    """The model to train, from its folder or from a checkpoint; adapters and optimizer are restored by the caller."""
    where = pick_device(device)
    path = checkpoint / MODEL if checkpoint is not None and settings.lora is None else settings.path
    plain = load_model(path, pick_dtype(settings.dtype, where), where)
    module = plain if settings.lora is None else add_lora(plain, settings.lora, seed)
    return TrainedModel(module, settings, bound, optimizer)


def set_end_tokens(module: nn.Module, data: DataSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a response: the model's and the tokenizer's own, and the one that ends a turn of the template in use.

    They are put into the model's generation config, so that a model that is saved stops where it did in training.
    """
    plain = plain_model(module)
    ids, turn = end_token_ids(plain, tokenizer), end_of_turn(tokenizer, data)
    ids = ids if turn is None or turn in ids else (*ids, turn)
    if plain.generation_config is not None:
        listed = plain.generation_config.eos_token_id
        if set(ids) != set(listed if isinstance(listed, list) else [listed]):
            plain.generation_config.eos_token_id = list(ids)
    return ids


def build_engine(
    model: TrainedModel,
    rollout: RolloutSettings,
    data: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_response_tokens: int | None = None,
) -> Engine:
    """The engine that the settings name.

    Args:
        model: whose weights it samples with.
        rollout: settings of generation.
        data: settings of the prompts.
        tokenizer: of the model.
        max_response_tokens: longest response of any use, if it is not ``rollout.max_response_tokens``.

    Raises:
        UserError: if the engine needs a package that is not installed.
    """
    eos_ids = set_end_tokens(model.module, data, tokenizer)
    if rollout.engine == "vllm":
        longest = data.max_prompt_tokens + max(rollout.max_response_tokens, max_response_tokens or 0)
        return vllm_engine(model, rollout, longest=longest, eos_ids=eos_ids, decode=decoder(tokenizer))
    return embedded_engine(
        model.module,
        eos_ids=eos_ids,
        max_sequences=rollout.max_sequences,
        kv_cache_bytes=rollout.kv_cache_bytes,
        prefill_tokens=rollout.prefill_tokens,
        decode=decoder(tokenizer),
    )


def check_engine(rollout: RolloutSettings) -> None:
    """Check that the engine the settings name is there, before anything is loaded.

    Raises:
        UserError: if it needs a package that is not installed, or is given an argument it does not have.
    """
    if rollout.engine == "vllm":
        check_vllm(rollout.vllm.arguments)


def require_vocabulary(model: TrainedModel, samples: Iterable[Sequence[int]], setting: str = "model.path") -> None:
    """Check that the model, which a setting names, has every token of the data.

    Raises:
        UserError: if the tokenizer gives tokens that the model does not have.
    """
    require_tokens(token_rows(model), samples, setting)


def token_rows(model: TrainedModel) -> int:
    """Tokens that a model has."""
    return len(plain_model(model.module).get_input_embeddings().weight)


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Text of token ids, special tokens removed."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return decode


def texts_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Sequence[int]]], list[str]]:
    """Texts of several samples, special tokens removed; side by side where the tokenizer can."""
    one = decoder(tokenizer)
    fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    if not fast or type(tokenizer)._decode is not PreTrainedTokenizerFast._decode:
        return lambda samples: [one(ids) for ids in samples]
    return lambda samples: tokenizer.backend_tokenizer.decode_batch([*map(list, samples)], skip_special_tokens=True)


def sampling_params(
    sampling: SamplingSettings, rollout: RolloutSettings, max_tokens: int | None = None
) -> SamplingParams:
    """The engine's record of what the settings say."""
    return SamplingParams(
        max_tokens=max_tokens or rollout.max_response_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_strings=rollout.stop,
        ignore_eos=rollout.ignore_eos,
    )


def load_prompts(settings: TrainSettings, found: RunPrompts) -> tuple[list[Prompt], list[Prompt], int]:
    """Prompts of training and validation, and how many were too long and dropped."""
    train = found.load(settings.data.train)
    if settings.data.validation is None:
        return train.prompts, [], train.dropped
    held_out = found.load(settings.data.validation)
    return train.prompts, held_out.prompts, train.dropped + held_out.dropped


def build_collector(
    settings: TrainSettings,
    engine: Engine,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    environments: Environments | None,
) -> Collector:
    """What makes the groups that are trained on."""
    return collector_of(
        environments,
        engine=engine,
        scorer=scorer,
        prompts=prompts,
        decode=texts_decoder(tokenizer),
        params=sampling_params(settings.rollout.sampling, settings.rollout),
        samples_per_prompt=settings.batch.samples_per_prompt,
        seed=settings.seed,
        system_prompt=settings.data.system_prompt,
        greedy=ADVANTAGES.find(settings.algorithm.advantage).needs_greedy,
    )


def build_validator(
    settings: TrainSettings | EvalSettings,
    engine: Engine,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    environments: Environments | None,
) -> Validator:
    """What samples and counts held-out prompts, with seeds of its own."""
    validation, rollout = settings.validation, settings.rollout
    collector = collector_of(
        environments,
        engine=engine,
        scorer=scorer,
        prompts=prompts,
        decode=texts_decoder(tokenizer),
        params=sampling_params(validation.sampling, rollout, validation.max_response_tokens),
        samples_per_prompt=validation.samples_per_prompt,
        seed=settings.seed,
        purpose="validation",
        system_prompt=settings.data.system_prompt,
    )
    solving = solving_component(settings.reward, validation.success_component)
    return Validator(collector, validation, rollout.deadline_s, component_names(settings.reward), solving)
