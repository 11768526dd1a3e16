"""The report of a run: one HTML file that needs nothing else.

Owns: what the page is told (``page_data``) and its assembly. Refuses to know: how the page draws it (``page/``). Always
holds: the file loads nothing, from nowhere; what a model wrote reaches the page as data only, never as markup, and the
page's policy lets no script run but its own; its size is bounded, and it says what it left out.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshloom.observe.atomic import replace_file
from meshloom.observe.history import Stage, columns, invalid_totals, milestones, phase_totals, read_stages
from meshloom.observe.markup import assemble, script_safe
from meshloom.observe.names import METRICS, PHASES
from meshloom.observe.sample_choice import choose_samples

REPORT_FILE = "report.html"
MOST_SAMPLES = 2000
MOST_SAMPLE_BYTES = 24 * 2**20
MOST_POINTS = 5000

_SCRIPTS = ("format.js", "elements.js", "chart.js", "phases.js", "samples.js", "page.js")


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    stages: Mapping[str, str | os.PathLike[str]] | None = None,
    title: str | None = None,
) -> Path:
    """Write ``report.html`` into the run folder and return its path. The run may be going on or long gone.

    Args:
        run_dir: folder of the run, or a folder that only holds the stages' folders.
        stages: further run folders by name, in order, before ``run_dir``. Default: sub-folders that hold metrics.
        title: heading of the page. Default: the folder's name.

    Raises:
        UserError: if there are no metrics to show, or a record cannot be read.
    """
    found = read_stages(run_dir, stages)
    path = Path(run_dir) / REPORT_FILE
    heading = title or Path(run_dir).resolve().name
    replace_file(path, [render(page_data(found, heading), heading).encode("utf-8", "replace")])
    return path


def page_data(stages: Sequence[Stage], title: str) -> dict[str, Any]:
    """Everything the page shows, as JSON values."""
    samples, total = choose_samples(stages, limit=MOST_SAMPLES, byte_limit=MOST_SAMPLE_BYTES)
    prompts: dict[str, int] = {}
    return {
        "title": title,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "names": {name: _name(metric) for name, metric in METRICS.items()},
        "phases": {name: {"label": phase.label, "meaning": phase.meaning} for name, phase in PHASES.items()},
        "stages": [_stage(stage) for stage in stages],
        "milestones": [vars(milestone) for milestone in milestones(stages)],
        "samples": [_sample(sample, prompts, stages) for sample in samples],
        # Filled by the line above: the samples of a group share one prompt.
        "prompts": [json.loads(prompt) for prompt in prompts],
        "samples_total": total,
    }


def _name(metric: Any) -> dict[str, str]:
    return {
        "label": metric.label,
        "unit": metric.unit.value,
        "better": metric.better.value,
        "section": metric.section.value,
        "meaning": metric.meaning,
    }


def _stage(stage: Stage) -> dict[str, Any]:
    settings = stage.settings
    return {
        "name": stage.name,
        "state": stage.state,
        "step": max(stage.last_step, int(stage.status["step"])),
        "steps": stage.steps,
        "reason": stage.status["reason"],
        "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(stage.records[0]["time"])),
        "seconds": stage.seconds,
        "facts": _facts(settings),
        "kinds": {kind: columns(stage.of_kind(kind), limit=MOST_POINTS) for kind in stage.kinds},
        "phase_seconds": phase_totals(stage.records),
        "invalid": invalid_totals(stage.records),
        "settings": yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=100) if settings else "",
        "plan": stage.plan,
    }


def _facts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Model, data and algorithm in a few words, as far as the settings tell."""
    facts = {}
    if path := settings.get("model", {}).get("path"):
        facts["Model"] = Path(path).name + (" with LoRA" if settings["model"].get("lora") else "")
    data = settings.get("data", {})
    for label, key in (("Training data", "train"), ("Validation data", "validation")):
        if text := _source(data.get(key) or {}):
            facts[label] = text
    if algorithm := settings.get("algorithm"):
        facts["Algorithm"] = _algorithm(algorithm)
    return facts


def _source(source: Mapping[str, Any]) -> str:
    if source.get("reasoning_gym"):
        return f"{source['reasoning_gym']}, {source['size']:,} problems (reasoning-gym)"
    if source.get("dataset"):
        return f"{source['dataset']} ({source['split']})"
    return ", ".join(Path(file).name for file in source.get("files") or ())


def _algorithm(algorithm: Mapping[str, Any]) -> str:
    parts = [f"{algorithm['advantage']} advantage", f"{algorithm['policy_loss']} loss", algorithm["reduction"]]
    if algorithm["kl"] != "none":
        parts.append(f"KL in {algorithm['kl']} ({algorithm['kl_estimator']}, {algorithm['kl_coefficient']:g})")
    return ", ".join(parts)


def _sample(sample: Mapping[str, Any], prompts: dict[str, int], stages: Sequence[Stage]) -> dict[str, Any]:
    prompt = json.dumps({"text": sample.get("prompt", ""), "ids": sample.get("prompt_ids", [])})
    settings = stages[sample["stage"]].settings
    threshold = settings.get("validation", {}).get("success_threshold", 1.0)
    reward = sample.get("reward")
    kept = {key: value for key, value in sample.items() if key not in ("prompt", "prompt_ids")}
    solved = reward is not None and reward >= threshold
    return {**kept, "prompt": prompts.setdefault(prompt, len(prompts)), "solved": solved}


def render(data: Mapping[str, Any], title: str) -> str:
    """The page with its data inside."""
    return assemble("report.html", title, ("base.css", "report.css"), _SCRIPTS, data=script_safe(data))
