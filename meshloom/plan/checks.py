"""What settings mean together, checked before any work, all at once.

Owns: rules across settings that need no model, each with a stable code. Refuses to know: devices, models, what is in a file.
Always holds: a refusal names the nearest values that work; a warning is about something that runs but is likely not meant.

Codes: S sources, A algorithm, R rollout, B batch, O optimizer, L adapters, H checkpoints; K, running programs, is in
``plan.code``; I, environments, in ``plan.environment_checks``.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from meshloom.config.names import (
    FIXED_REDUCTIONS,
    GROUP_ADVANTAGES,
    Advantage,
    KlEstimator,
    PolicyLoss,
    Verifier,
)
from meshloom.config.near import files_near
from meshloom.config.settings import (
    SOURCE_KINDS,
    AlgorithmSettings,
    EvalSettings,
    KlPlace,
    SamplingSettings,
    SftSettings,
    SourceSettings,
    TrainSettings,
)
from meshloom.plan.algorithm_checks import check_choices
from meshloom.plan.code import check_code
from meshloom.plan.critic_checks import check_critic
from meshloom.plan.environment_checks import check_environment
from meshloom.plan.findings import Findings
from meshloom.plan.lag import LAG, most_updates
from meshloom.plan.ledger import longest_sample_tokens, sft_steps, train_steps
from meshloom.plan.placement import sequence_parts

_NORM = "seq-mean-token-sum-norm"
_ENDINGS = (".parquet", ".jsonl")
_SUGGESTIONS = 3
_WITHOUT_ARGUMENTS = (Verifier.EXACT_MATCH, Verifier.MATH_VERIFY)
"""Verifiers that any rows with an answer can be scored by, as they are."""
_HIGHEST_LR, _SMALL_EPS = 0.02, 1e-3
"""The learning rate above which AdamW changes a weight by its own size; with a larger epsilon an update is smaller."""


def check_settings(settings: TrainSettings | SftSettings | EvalSettings, num_prompts: int | None) -> Findings:
    """All rules that a kind of settings is under.

    Args:
        settings: of the run.
        num_prompts: prompts (or rows) of the training data; none if not known.
    """
    found = Findings(settings)
    for name, source in (("data.train", settings.data.train), ("data.validation", settings.data.validation)):
        if source is not None:
            _check_source(found, name, source)
    if isinstance(settings, EvalSettings) and settings.source is None:
        what, fix = "there are no prompts to evaluate", "set one, such as data.validation.files=[held_out.jsonl]"
        found.refuse("S008", "data", what, why="neither data.validation nor data.train is given", fix=fix)
    if settings.data.chat_template == "never" and settings.data.system_prompt is not None:
        found.warn("S005", "data.system_prompt", "the system prompt is not used, as data.chat_template is never")
    if settings.data.chat_template == "never" and settings.data.chat_template_arguments:
        what = "arguments of the chat template are not used, as data.chat_template is never"
        found.warn("S005", "data.chat_template_arguments", what)
    if isinstance(settings, TrainSettings):
        _check_algorithm(found, settings)
        _check_training_samples(found, settings)
        _check_train_batch(found, settings, num_prompts)
        check_critic(found, settings, num_prompts)
    if not isinstance(settings, SftSettings):
        if settings.reward.function is not None:
            check_function_name(found, "reward.function", settings.reward.function)
        check_code(found, settings.reward)
        _check_validation(found, settings)
        check_environment(found, settings)
    if not isinstance(settings, EvalSettings):
        _check_microbatch(found, settings)
        _check_optimizer(found, settings, num_prompts)
        _check_lora(found, settings)
        _check_checkpoints(found, settings)
    return found


def _check_source(found: Findings, path: str, source: SourceSettings) -> None:
    kinds = [name for name in SOURCE_KINDS if getattr(source, name)]
    if len(kinds) != 1:
        have = f"both {' and '.join(kinds)} are given" if kinds else "none is given"
        what = f"{path} needs exactly one of files, dataset, reasoning_gym and episodes; {have}"
        found.refuse("S001", path, what, fix=f"set one of them, such as {path}.files=[problems.jsonl]")
    for name in source.files:
        file = Path(name)
        if not file.is_file():
            found.refuse("S002", f"{path}.files", f"there is no file {name}", fix=files_near(file))
        elif file.suffix.lower() not in _ENDINGS:
            what = f"{name} is neither Parquet nor JSON Lines by its name"
            found.refuse("S003", f"{path}.files", what, fix=f"files must end in {' or '.join(_ENDINGS)}")
    owners = {
        "split": "dataset",
        "subset": "dataset",
        "task": "reasoning_gym",
        "size": "reasoning_gym",
        "seed": "reasoning_gym",
    }
    for name, owner in owners.items():
        default = SourceSettings.model_fields[name].get_default(call_default_factory=True)
        if getattr(source, name) != default and owner not in kinds and not (name == "seed" and "episodes" in kinds):
            found.warn("S004", f"{path}.{name}", f"{path}.{name} is not used without {path}.{owner}")


def check_function_name(found: Findings, path: str, name: str) -> None:
    """Whether a reward function's file, or the verifier of that name, exists.

    Args:
        found: takes refusals.
        path: the setting.
        name: its value.
    """
    file, colon, _ = name.rpartition(":")
    if colon and not Path(file).is_file():
        found.refuse("S006", path, f"there is no file {file}", fix=files_near(Path(file)))
    if not colon:
        _check_verifier(found, path, name)


def _check_verifier(found: Findings, path: str, name: str) -> None:
    if name in list(Verifier):
        return
    near = difflib.get_close_matches(name, Verifier, n=1)
    why = "a function of your own is named with its file: rewards.py:score"
    fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(Verifier)}"
    likely = tuple((f"{path}={value}",) for value in dict.fromkeys([*near, *_WITHOUT_ARGUMENTS]))[:_SUGGESTIONS]
    found.refuse("S007", path, f"there is no verifier {name!r}", why=why, fix=fix, suggestions=likely)


def _check_name(found: Findings, code: str, setting: str, name: str, known: Iterable[str]) -> None:
    names = [str(entry) for entry in known]
    if name in names or ":" in name:
        return
    near = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    likely = tuple((f"{setting}={value}",) for value in dict.fromkeys([*near, *names]))
    fix = f"{guess}known: {', '.join(names)}"
    found.refuse(code, setting, f"{setting} knows no {name!r}", fix=fix, suggestions=likely[:_SUGGESTIONS])


def _check_algorithm(found: Findings, settings: TrainSettings) -> None:
    algorithm, batch = settings.algorithm, settings.batch
    _check_name(found, "A001", "algorithm.advantage", algorithm.advantage, Advantage)
    _check_name(found, "A003", "algorithm.policy_loss", algorithm.policy_loss, PolicyLoss)
    _check_name(found, "A004", "algorithm.kl_estimator", algorithm.kl_estimator, KlEstimator)
    if algorithm.reduction == _NORM and algorithm.reduction_constant is None:
        what = f"algorithm.reduction {_NORM} needs algorithm.reduction_constant"
        fix = "set algorithm.reduction_constant, for example to rollout.max_response_tokens"
        value = f"algorithm.reduction_constant={settings.rollout.max_response_tokens}"
        found.refuse("A005", "algorithm.reduction_constant", what, fix=fix, suggestions=((value,),))
    if algorithm.reduction != _NORM and algorithm.reduction_constant is not None:
        found.warn("A006", "algorithm.reduction_constant", f"reduction_constant is used by {_NORM} only")
    if batch.samples_per_prompt == 1 and algorithm.advantage in GROUP_ADVANTAGES:
        what = f"{algorithm.advantage} compares the samples of a prompt, but batch.samples_per_prompt is 1"
        why = "a group of one has nothing to compare with"
        found.warn("A007", "batch.samples_per_prompt", what, why=why, fix="set batch.samples_per_prompt to 2 or more")
    if algorithm.kl is not KlPlace.NONE and algorithm.kl_coefficient == 0:
        what = f"algorithm.kl is {algorithm.kl}, but its coefficient is 0: the reference is computed for nothing"
        found.warn("A008", "algorithm.kl_coefficient", what, fix="set algorithm.kl=none, or a coefficient above 0")
    updates = most_updates(batch)
    if 0 < algorithm.max_lag_versions < updates:
        what = f"{LAG}={algorithm.max_lag_versions} lets no rollout run ahead: a step makes {updates} versions"
        why = "a rollout begins ahead only if its samples are sure to be fresh enough when their step comes"
        found.warn("A012", LAG, what, why=why, fix=f"set {LAG}={updates}, or make fewer updates a step")
    _check_unused(found, algorithm)
    check_choices(found, algorithm, samples_per_step=batch.prompts_per_step * batch.samples_per_prompt)


def _check_unused(found: Findings, algorithm: AlgorithmSettings) -> None:
    """Values that are set and have no effect."""
    if algorithm.kl is KlPlace.NONE:
        for name in ("kl_coefficient", "kl_estimator"):
            if getattr(algorithm, name) != AlgorithmSettings.model_fields[name].default:
                fix = "set algorithm.kl=loss or algorithm.kl=reward"
                found.warn(
                    "A009", f"algorithm.{name}", f"algorithm.{name} is not used, as algorithm.kl is none", fix=fix
                )
    own = FIXED_REDUCTIONS.get(algorithm.policy_loss)
    others = algorithm.kl is KlPlace.LOSS or algorithm.entropy_coefficient or algorithm.advantage == "gae"
    if own and not others and algorithm.reduction not in (own, AlgorithmSettings.model_fields["reduction"].default):
        what = f"{algorithm.policy_loss} is defined with {own}; algorithm.reduction is not used"
        found.warn("A010", "algorithm.reduction", what)


def _check_training_samples(found: Findings, settings: TrainSettings) -> None:
    if settings.rollout.sampling.temperature == 0:
        found.refuse(
            "R001",
            "rollout.sampling.temperature",
            "training samples cannot be greedy: rollout.sampling.temperature is 0",
            why="the most likely token has probability 1, whose log-prob has no gradient",
            fix="set it above 0, such as 1.0; validation.sampling.temperature may be 0",
            suggestions=(("rollout.sampling.temperature=1.0",),),
        )
    _check_filters(found, settings)
    if settings.rollout.ignore_eos:
        what = "rollout.ignore_eos is on: the model is trained on what it writes after its end token"
        found.warn("R005", "rollout.ignore_eos", what, why="it is for benchmarks", fix="set rollout.ignore_eos=false")


def _check_filters(found: Findings, settings: TrainSettings) -> None:
    """Filters of the training samples: what they drop has a probability in the trainer, and none in the sampler."""
    sampling = settings.rollout.sampling
    single = {"top_k": sampling.top_k == 1, "min_p": sampling.min_p == 1}
    for name in (name for name, is_single in single.items() if is_single):
        path = f"rollout.sampling.{name}"
        what = f"training samples cannot be greedy: {path} is 1"
        why, off = "all samples of a prompt are the same", f"{path}=0"
        found.refuse("R003", path, what, why=why, fix=f"set {off}", suggestions=((off,),))
    filters = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 1, "min_p": 0 < sampling.min_p < 1}
    for name in (name for name, is_on in filters.items() if is_on):
        path = f"rollout.sampling.{name}"
        what = f"{path} drops tokens from the training samples that the trained distribution has"
        why = "the gradient is then that of another distribution; the metric sampler_gap says how far they are apart"
        found.warn("R004", path, what, why=why, fix="keep filters for validation.sampling")


def _check_validation(found: Findings, settings: TrainSettings | EvalSettings) -> None:
    validation = settings.validation
    if validation.samples_per_prompt > 1 and _is_greedy(validation.sampling):
        found.warn(
            "R002",
            "validation.samples_per_prompt",
            f"the {validation.samples_per_prompt} validation samples of a prompt are all the same, as sampling is greedy",
            fix="set validation.sampling.temperature above 0, or validation.samples_per_prompt=1",
        )


def _is_greedy(sampling: SamplingSettings) -> bool:
    return sampling.temperature == 0 or sampling.top_k == 1


def divisors_around(number: int, near: int) -> list[int]:
    """The nearest divisors of ``number`` below and above ``near``."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [*[d for d in divisors if d <= near][-1:], *[d for d in divisors if d > near][:1]]


def _check_train_batch(found: Findings, settings: TrainSettings, num_prompts: int | None) -> None:
    batch = settings.batch
    step, update = batch.prompts_per_step, batch.prompts_per_update
    if update is not None and step % update:
        multiples = [m for m in (step // update * update, -(-step // update) * update) if m]
        values = {"batch.prompts_per_update": divisors_around(step, update), "batch.prompts_per_step": multiples}
        found.refuse(
            "B001",
            "batch.prompts_per_update",
            f"batch.prompts_per_update ({update}) does not divide batch.prompts_per_step ({step})",
            why="each prompt of a step belongs to exactly one update",
            fix=", or ".join(f"{path}={_either(near)}" for path, near in values.items()),
            suggestions=tuple((f"{path}={value}",) for path, near in values.items() for value in near),
        )
    if num_prompts is not None and 0 < num_prompts < step:
        found.warn(
            "B003",
            "batch.prompts_per_step",
            f"a step takes {step} prompts, the data have {num_prompts}: prompts repeat within a step",
            fix=f"set batch.prompts_per_step={num_prompts} or less, or give more data",
        )


def _either(values: Iterable[int]) -> str:
    return " or ".join(map(str, values))


def _check_microbatch(found: Findings, settings: TrainSettings | SftSettings) -> None:
    each, longest, prompt = (
        settings.batch.tokens_per_microbatch,
        longest_sample_tokens(settings),
        settings.data.max_prompt_tokens,
    )
    parts = sequence_parts(settings) if isinstance(settings, TrainSettings) else 1
    budget = each * parts
    if budget >= longest:
        return
    response_path = "data.max_response_tokens" if isinstance(settings, SftSettings) else "rollout.max_response_tokens"
    fixes: Mapping[str, int] = {
        "batch.tokens_per_microbatch": -(-longest // parts),
        response_path: budget - prompt,
        "data.max_prompt_tokens": budget - (longest - prompt),
    }
    bounds = [f"{path}={value}" for path, value in fixes.items() if value > 0]
    found.refuse(
        "B002",
        "batch.tokens_per_microbatch",
        f"a sample may have {longest} tokens, a microbatch holds {budget}{f': {each} on each of {parts}' if parts > 1 else ''}",
        why=f"data.max_prompt_tokens ({prompt}) + {response_path} ({longest - prompt}) = {longest}",
        fix=", or ".join(bounds),
        suggestions=tuple((bound,) for bound in bounds),
    )


def _check_optimizer(found: Findings, settings: TrainSettings | SftSettings, num_prompts: int | None) -> None:
    warmup = settings.optimizer.warmup_updates
    if isinstance(settings, SftSettings):
        total: int | float | None = sft_steps(settings, num_prompts)
    else:
        batch, steps = settings.batch, train_steps(settings, num_prompts)
        per_step = batch.prompts_per_step * batch.epochs_per_step / (batch.prompts_per_update or batch.prompts_per_step)
        total = None if steps is None else steps * per_step
    if total is not None and warmup > total:
        what = f"the learning rate warms up for {warmup} updates, the run has {total:g}: it never reaches its peak"
        fix = f"optimizer.warmup_updates={int(total)} or less, or train longer"
        found.warn("O001", "optimizer.warmup_updates", what, fix=fix)
    if settings.optimizer.lr == 0:
        found.warn("O002", "optimizer.lr", "the learning rate is 0: nothing will be learned")
    if settings.optimizer.lr > _HIGHEST_LR and settings.optimizer.eps < _SMALL_EPS:
        what = f"the learning rate {settings.optimizer.lr:g} moves each weight by about as much in an update (AdamW)"
        why = "weights of language models are around 0.02: such a run forgets all the model knows, or overflows"
        found.warn(
            "O004", "optimizer.lr", what, why=why, fix="1e-6 to 1e-5 for a whole model, 1e-5 to 1e-3 for adapters"
        )
    if settings.optimizer.schedule == "constant" and settings.optimizer.min_lr_ratio != 0:
        found.warn("O003", "optimizer.min_lr_ratio", "min_lr_ratio is not used by the constant schedule")


def _check_lora(found: Findings, settings: TrainSettings | SftSettings) -> None:
    lora = settings.model.lora
    if lora is not None and lora.dropout and isinstance(settings, TrainSettings):
        what = f"dropout of {lora.dropout} in the adapters makes sampler and trainer disagree"
        found.warn("L001", "model.lora.dropout", what, fix="set model.lora.dropout=0")


def _check_checkpoints(found: Findings, settings: TrainSettings | SftSettings) -> None:
    if settings.checkpoint.at_end or settings.checkpoint.every_steps:
        return
    what = "nothing of what is learned is kept: neither steps in between are saved nor the last one"
    why = "there is no model to export afterwards, and no checkpoint to go on from unless the run is stopped"
    fix = "set checkpoint.at_end=true, or checkpoint.every_steps"
    found.warn("H001", "checkpoint.at_end", what, why=why, fix=fix)
