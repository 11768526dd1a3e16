"""``meshloom eval``: sample a model on held-out prompts and count what is solved.

Owns: the evaluation of a folder on disk. The numbers are those of validation during training, made by the same code.
"""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from meshloom.config.errors import UserError
from meshloom.config.settings import EvalSettings
from meshloom.data.rows import RowNames
from meshloom.data.tokenizer import load_tokenizer
from meshloom.loop.build import build_actor, build_engine, build_validator, check_engine, require_vocabulary
from meshloom.loop.environments import run_prompts
from meshloom.loop.invalid_rewards import refuse_invalid
from meshloom.loop.printed import PrintedWatch
from meshloom.loop.reward_models import Models
from meshloom.loop.rewarding import load_reward_models
from meshloom.loop.surroundings import open_surroundings
from meshloom.observe.format import number_text, plural
from meshloom.observe.names import METRICS
from meshloom.observe.report import write_report
from meshloom.observe.run_folder import RunFolder, RunState, check_free
from meshloom.observe.timing import PhaseClock, peak_memory
from meshloom.plan.build import build_plan
from meshloom.plan.report import plan_json, plan_text
from meshloom.train.load import check_model_folder, pick_device
from meshloom.train.model import MicrobatchBound


def run_evaluation(settings: EvalSettings) -> int:
    """Evaluate, print the numbers, leave a run folder with them and every sample; the exit code.

    Raises:
        UserError: if the input is bad; nothing has been written then.
        RunFault: as ``evaluate``.
    """
    evaluate(settings, Console())
    return 0


def result_text(metrics: Mapping[str, float]) -> str:
    """An evaluation in one line: ``accuracy 40.0 % (19.8 – 64.3 %), 15 prompts, reward 0.4, …``."""
    parts: list[str] = []
    if "accuracy" in metrics:
        low, high = 100 * metrics["accuracy_low"], 100 * metrics["accuracy_high"]
        parts.append(f"accuracy {_number('accuracy', metrics)} ({low:.1f} – {high:.1f} %)")
    parts.append(plural(int(metrics["prompts"]), "prompt"))
    if "reward_mean" in metrics:
        parts.append(f"reward {_number('reward_mean', metrics)}")
    if "k" in metrics:
        k = int(metrics["k"])
        parts += [f"{label}@{k} {_number(f'{label}_at_k', metrics)}" for label in ("mean", "pass")]
    if "response_tokens_mean" in metrics:
        parts.append(f"{_number('response_tokens_mean', metrics)} tokens a response")
        parts.append(f"{_number('truncated_share', metrics)} truncated")
    if invalid := int(metrics.get("reward_invalid", 0)):
        parts.append(plural(invalid, "invalid reward"))
    if dropped := int(metrics["prompts_dropped"]):
        parts.append(f"{plural(dropped, 'prompt')} dropped")
    return ", ".join(parts)


def _number(name: str, metrics: Mapping[str, float]) -> str:
    return number_text(metrics.get(name), METRICS[name].unit)


def _check_run_folder(settings: EvalSettings) -> None:
    """As for a run that trains, except that nothing can be resumed."""
    try:
        check_free(settings.run_dir)
    except UserError as error:
        raise UserError(error.what, where=error.where, why=error.why, fix="use another run_dir") from error


def evaluate(settings: EvalSettings, console: Console) -> dict[str, Any]:
    """The metrics of a model, written to the run folder with its samples and a report, and printed.

    Raises:
        UserError: if the input is bad.
        RunFault: if too many rewards are invalid; the samples are in the folder, with the reasons.
    """
    check_model_folder(settings.model.path)
    pick_device(settings.device)
    check_engine(settings.rollout)
    _check_run_folder(settings)
    if settings.source is None:
        build_plan(settings, None).require()
        raise AssertionError("the plan lets an evaluation without prompts pass")
    tokenizer = load_tokenizer(settings.model.path)
    found_prompts = run_prompts(settings, tokenizer)
    rendered = found_prompts.load(settings.source)
    prompts = rendered.prompts
    plan = build_plan(settings, len(prompts))
    plan.require()
    if rendered.dropped:
        console.print(f"{rendered.dropped} prompts longer than data.max_prompt_tokens were dropped", highlight=False)
    with ExitStack() as resources:
        scorers = load_reward_models(settings, pick_device(settings.device))
        asked = None if scorers is None else Models(scorers.scores)
        names = RowNames.of(prompt.row for prompt in prompts)
        around = open_surroundings(resources, settings, found_prompts, names, tokenizer, asked)
        bound = MicrobatchBound(settings.data.max_prompt_tokens + settings.rollout.max_response_tokens)
        model = build_actor(settings.model, None, bound, device=settings.device, seed=settings.seed, checkpoint=None)
        longest = settings.validation.max_response_tokens
        engine = build_engine(model, settings.rollout, settings.data, tokenizer, max_response_tokens=longest)
        validator = build_validator(settings, engine, around.scorer, tokenizer, prompts, around.environments)
        require_vocabulary(model, (prompt.ids for prompt in prompts))
        validator.collector.check()
        described = {"plan_text": plan_text(plan), "plan": json.loads(plan_json(plan))}
        folder = resources.enter_context(RunFolder.create(settings.run_dir, settings=settings, **described))

        def notice(text: str) -> None:
            console.print(text, markup=False, highlight=False)

        around.tell(notice, folder.path)
        folder.set_status(RunState.RUNNING, step=0, steps=0)
        clock = PhaseClock()
        with clock.phase("validate"):
            found = validator.run(0, clock)
        metrics = {**found.metrics, "prompts": len(prompts), "peak_memory_bytes": peak_memory()}
        folder.log_metrics(
            {"step": 0, "kind": "validation", "metrics": metrics, "phases": clock.take(), "time": time.time()}
        )
        folder.log_samples(found.records)
        folder.set_status(RunState.FINISHED, step=0, steps=0)
        write_report(folder.path)
        PrintedWatch(notice).look(record.get("printed", "") for record in found.records)
        for line in (result_text(metrics), f"samples and report: {settings.run_dir}"):
            console.print(line, highlight=False, soft_wrap=True)
        refuse_invalid(found.invalid, settings, "the evaluation")
    return metrics
