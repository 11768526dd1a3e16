"""``meshloom eval``: sample a model on held-out prompts and count what is solved.

Owns: the evaluation of a folder on disk. The numbers are those of validation during training, made by the same code.
"""

import json
import time
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from meshloom.config.settings import EvalSettings
from meshloom.data.prompts import render_prompts
from meshloom.data.sources import load_rows
from meshloom.loop.build import build_actor, build_engine, build_validator, require_vocabulary
from meshloom.observe.report import write_report
from meshloom.observe.run_folder import RunFolder, RunState, check_free
from meshloom.observe.timing import PhaseClock, peak_memory
from meshloom.plan.build import build_plan
from meshloom.plan.report import plan_json, plan_text
from meshloom.rewards.pool import RewardPool
from meshloom.train.load import check_model_folder, load_tokenizer, pick_device
from meshloom.train.model import MicrobatchBound


def run_evaluation(settings: EvalSettings) -> int:
    """Evaluate, print the numbers, leave a run folder with them and every sample; the exit code.

    Raises:
        UserError: if the input is bad; nothing has been written then.
    """
    console = Console()
    metrics = evaluate(settings, console)
    for name, value in metrics.items():
        console.print(f"{name:24} {value:.6g}", highlight=False)
    console.print(f"samples and report: {settings.run_dir}", highlight=False)
    return 0


def evaluate(settings: EvalSettings, console: Console) -> dict[str, Any]:
    """The metrics of a model, written to the run folder with its samples and a report."""
    check_model_folder(settings.model.path)
    pick_device(settings.device)
    check_free(settings.run_dir)
    tokenizer = load_tokenizer(settings.model.path)
    source = settings.data.validation or settings.data.train
    rendered = render_prompts(load_rows(source, settings.data), tokenizer, settings.data)
    prompts = rendered.prompts
    plan = build_plan(settings, len(prompts))
    plan.require()
    if rendered.dropped:
        console.print(f"{rendered.dropped} prompts longer than data.max_prompt_tokens were dropped", highlight=False)
    with ExitStack() as resources:
        pool = resources.enter_context(RewardPool(settings.reward, {prompt.row.data_source for prompt in prompts}))
        bound = MicrobatchBound(settings.data.max_prompt_tokens + settings.rollout.max_response_tokens)
        model = build_actor(settings.model, None, bound, device=settings.device, seed=settings.seed, checkpoint=None)
        engine = build_engine(model, settings.rollout, settings.data, tokenizer)
        validator = build_validator(settings, engine, pool, tokenizer, prompts)
        require_vocabulary(model, (prompt.ids for prompt in prompts))
        validator.collector.check()
        described = {"plan_text": plan_text(plan), "plan": json.loads(plan_json(plan))}
        folder = resources.enter_context(RunFolder.create(settings.run_dir, settings=settings, **described))
        folder.set_status(RunState.RUNNING, step=0, steps=0)
        clock = PhaseClock()
        with clock.phase("validate"):
            found = validator.run(0, clock)
        metrics = {**found.metrics, "peak_memory_bytes": peak_memory()}
        folder.log_metrics(
            {"step": 0, "kind": "validation", "metrics": metrics, "phases": clock.take(), "time": time.time()}
        )
        folder.log_samples(found.records)
        folder.set_status(RunState.FINISHED, step=0, steps=0)
        write_report(folder.path)
    return metrics
