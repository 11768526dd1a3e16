"""How far the sampler's log-probs are from the trainer's in bfloat16: mean |Δ| over sampled tokens, for each engine.

Usage: python bench/gpu_agreement.py --engines torch vllm --size 0.5b --tokenizer DIR [--model DIR] [--peer-path PYTHONPATH]
[--float32]

Each engine samples 64 prompts × 2 responses at temperature 1; the trainer then computes the same tokens' log-probs
with the same weights in one packed pass, as in a run. On a model of random weights, and on a real one if its folder is
given. Each engine is a process of its own. With ``--float32`` both are compared with the trainer's pass in float32 too, which
says which of the two is further off. The last line is the embedded engine's mean over vLLM's, or over nothing (nan).
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, Literal

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from gpu_common import HERE, Budget, common_arguments, console, print_ratio, print_table, tail_of, versions_line, watch
from gpu_models import chat_ids, prepared, questions
from rich.console import Console
from torch import Tensor

from meshloom.config.settings import DataSettings, ModelSettings, RolloutSettings, SourceSettings
from meshloom.data.tokenizer import load_tokenizer
from meshloom.loop.build import build_actor, build_engine
from meshloom.rollout.protocol import Completion, Request, SamplingParams
from meshloom.samples import Samples
from meshloom.train.model import MicrobatchBound, TrainedModel

SAMPLES_PER_PROMPT = 2
_FIGURES = {
    "mean": "mean |Δ log-prob|",
    "p99": "99th percentile",
    "largest": "largest",
    "ratio": "mean e^Δ",
    "sampler": "sampler, from float32",
    "trainer": "trainer, from float32",
}


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """Mean, 99th percentile and largest |Δ log-prob|, and the mean of e^Δ, of one engine on one model; how far sampler and
    trainer are from float32, if that is asked for."""
    actor = _actor(spec, "bfloat16")
    samples = draw(actor, spec)
    trained, sampled = (x[samples["mask"]].double() for x in (_said(actor, samples), samples["sampler_logprob"]))
    del actor
    gap = trained - sampled
    size = gap.abs()
    found = {
        "tokens": float(len(gap)),
        "mean": float(size.mean()),
        "p99": float(size.sort().values[int(0.99 * (len(size) - 1))]),
        "largest": float(size.max()),
        "ratio": float(gap.exp().mean()),
    }
    if spec["float32"]:
        exact = _said(_actor(spec, "float32"), samples)[samples["mask"]].double()
        found |= {"sampler": float((sampled - exact).abs().mean()), "trainer": float((trained - exact).abs().mean())}
    return found


def draw(actor: TrainedModel, spec: dict[str, Any]) -> Samples:
    """What an engine samples, with what it says of it."""
    tokenizer = load_tokenizer(spec["model"])
    rollout = RolloutSettings.model_validate({"engine": spec["engine"], **spec["rollout"]})
    engine = build_engine(actor, rollout, DataSettings(train=SourceSettings(files=("-.jsonl",))), tokenizer)
    params = SamplingParams(max_tokens=spec["tokens"])
    prompts = [chat_ids(tokenizer, question) for question, _ in questions(spec["prompts"])]
    requests = [
        Request(
            id=i, prompt_ids=ids, params=params, seeds=list(range(i * SAMPLES_PER_PROMPT, (i + 1) * SAMPLES_PER_PROMPT))
        )
        for i, ids in enumerate(prompts)
    ]
    sampled = list(engine.generate(requests, deadline_s=3600))
    engine.sleep()
    return as_samples(prompts, sampled)


def _said(actor: TrainedModel, samples: Samples) -> Tensor:
    """What the trainer says of samples, [T]."""
    return actor.forward(samples, temperature=1.0)[0]


def _actor(spec: dict[str, Any], dtype: Literal["bfloat16", "float32"]) -> TrainedModel:
    model = ModelSettings(path=spec["model"], dtype=dtype)
    return build_actor(model, None, MicrobatchBound(16384), device="auto", seed=0, checkpoint=None)


def as_samples(prompts: list[list[int]], sampled: list[Completion]) -> Samples:
    """Completions behind their prompts, packed."""
    rows = [(prompts[c.request_id], c) for c in sampled]
    return Samples(
        torch.tensor([len(prompt) + len(c.ids) for prompt, c in rows]),
        {
            "ids": torch.tensor([i for prompt, c in rows for i in (*prompt, *c.ids)]),
            "mask": torch.tensor([own for prompt, c in rows for own in [False] * len(prompt) + [True] * len(c.ids)]),
            "sampler_logprob": torch.tensor([x for prompt, c in rows for x in [0.0] * len(prompt) + c.logprobs]),
        },
    )


def in_process(
    out: Console, options: argparse.Namespace, spec: dict[str, Any], left_s: float
) -> dict[str, float] | None:
    """One engine in a process of its own; none if it failed, whose end is then printed."""
    log = options.work / f"agreement-{spec['engine']}.log"
    environment = {
        "PYTHONPATH": ":".join(filter(None, [str(HERE.parent), options.peer_path if spec["engine"] == "vllm" else ""]))
    }
    command = [sys.executable, HERE / "gpu_agreement.py", "--inside", json.dumps(spec)]
    watch(command, log, done=lambda: False, deadline_s=left_s, environment=environment)
    last = tail_of(log, 1)
    if not last.startswith('{"tokens"'):
        out.print(f"engine {spec['engine']} was not measured:\n{tail_of(log)}", markup=False)
        return None
    return json.loads(last)


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["0.5b", "1.5b", "3b", "7b"], default="0.5b")
    parser.add_argument("--model", type=Path, action="append", default=[], help="folder of a real model")
    parser.add_argument("--engines", nargs="+", default=["torch"], choices=["torch", "vllm"])
    parser.add_argument("--prompts", type=int, help="default: 64, or 4 with --tiny")
    parser.add_argument("--tokens", type=int, help="most tokens of a response; default: 256, or 16 with --tiny")
    parser.add_argument("--rollout", type=json.loads, default={}, help="further rollout settings, as JSON")
    parser.add_argument("--float32", action="store_true", help="compare both with a pass in float32 too")
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options.inside)))
        return
    out, budget = console(), Budget(options.budget_s)
    options.work = options.work.resolve()
    size = "tiny" if options.tiny else options.size
    models = {f"{size}, random": prepared(options.work, size, tokenizer=options.tokenizer)}
    models |= {folder.name: folder.resolve() for folder in options.model}
    prompts, tokens = (4, 16) if options.tiny else (64, 256)
    prompts, tokens = options.prompts or prompts, options.tokens or tokens
    rows, means = [], {}
    for name, folder in models.items():
        for engine in options.engines:
            spec = {
                "model": str(folder),
                "engine": engine,
                "prompts": prompts,
                "tokens": tokens,
                "rollout": options.rollout,
                "float32": options.float32,
            }
            inside = options.tiny and engine == "torch"
            found = measure(spec) if inside else in_process(out, options, spec, budget.left_s)
            if found is not None:
                means[name, engine] = found["mean"]
                figures = [f"{found[key]:.5f}" for key in _FIGURES if key in found]
                rows.append([f"{name}, engine {engine}", f"{found['tokens']:,.0f}", *figures])
    headings = ["model, engine", "tokens", *list(_FIGURES.values())[: 6 if options.float32 else 4]]
    print_table(out, "sampler against trainer, bfloat16", headings, rows)
    out.print(versions_line(options.peer_path))
    for name in models:
        ratio = means.get((name, "torch"), math.nan) / means.get((name, "vllm"), math.nan)
        print_ratio(out, name, ratio, "mean |Δ log-prob|, embedded ÷ vLLM")


if __name__ == "__main__":
    main()
