"""The engine that ``meshloom train`` builds against vLLM alone: tokens a second, and the share of the copy bandwidth.

Usage: python bench/gpu_engine.py --sizes 0.5b 1.5b 7b --peer vllm|none --tokenizer DIR [--peer-path PYTHONPATH]

256 requests of about 34 tokens are in flight, each for exactly 512 tokens at temperature 1, with the log-probability of
every token. The first round is not counted: it compiles and captures. vLLM (``gpu_vllm.py``) answers the same chats with
``logprobs_mode="processed_logprobs"``. Each side is a process of its own.

Share of the copy bandwidth: a step of decoding must read the weights once (the head included, an embedding that is not
the head left out) and the keys and values of every sequence's tokens so far. Those bytes, summed over the steps, over the
seconds of the whole round, over the bytes a second that a large copy on the same device reads and writes.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
from gpu_common import (
    HERE,
    Budget,
    common_arguments,
    console,
    copy_bandwidth,
    has_package,
    print_ratio,
    print_table,
    synchronize,
    tail_of,
    versions_line,
    watch,
)
from gpu_models import chat_ids, prepared, questions
from rich.console import Console
from transformers import PreTrainedModel

from meshloom.config.settings import DataSettings, ModelSettings, RolloutSettings, SourceSettings
from meshloom.data.tokenizer import load_tokenizer
from meshloom.loop.build import build_actor, build_engine
from meshloom.rollout.protocol import Request, SamplingParams
from meshloom.train.head import plain_model
from meshloom.train.model import MicrobatchBound


@dataclass(frozen=True, kw_only=True)
class Load:
    """What an engine is asked for."""

    sequences: int = 256
    tokens: int = 512
    rounds: int = 2


TINY = Load(sequences=4, tokens=16)


def measure_ours(model: Path, load: Load, rollout: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """Seconds of each round of the embedded engine, and what its decoding must read."""
    bound = MicrobatchBound(16384)
    actor = build_actor(ModelSettings(path=str(model)), None, bound, device="auto", seed=0, checkpoint=None)
    tokenizer = load_tokenizer(model)
    settings = RolloutSettings(max_response_tokens=load.tokens, max_sequences=load.sequences, **rollout)
    data = DataSettings(train=SourceSettings(files=("-.jsonl",)))
    engine = build_engine(actor, settings, data, tokenizer)
    params = SamplingParams(max_tokens=load.tokens, ignore_eos=True)
    prompts = [chat_ids(tokenizer, question) for question, _ in questions(load.sequences)]
    seconds = []
    for number in range(load.rounds):
        requests = [
            Request(id=i, prompt_ids=ids, params=params, seeds=[number * load.sequences + i])
            for i, ids in enumerate(prompts)
        ]
        synchronize()
        start = time.perf_counter()
        done = [len(completion.logprobs) for completion in engine.generate(requests, deadline_s=3600)]
        synchronize()
        seconds.append(time.perf_counter() - start)
        assert done == [load.tokens] * load.sequences
        print(f"round {number + 1}: {sum(done) / seconds[-1]:,.0f} tokens/s", flush=True)
    needed = decode_bytes(plain_model(actor.module), sum(map(len, prompts)), load)
    engine.sleep()
    return {"seconds": seconds, "decode_bytes": needed, "copy_bandwidth": copy_bandwidth(tiny)}


def decode_bytes(model: PreTrainedModel, prompt_tokens: int, load: Load) -> float:
    """Bytes that decoding all tokens must read: weights once a step, keys and values of all tokens so far.

    Args:
        model: with its weights in the dtype they are read in.
        prompt_tokens: of all sequences together.
    """
    config, embedding = model.config, model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    weights = sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * embedding.element_size()
    # Step t of tokens 0 … n−1 attends to the prompt and to t + 1 of its own tokens.
    cached = load.tokens * prompt_tokens + load.sequences * load.tokens * (load.tokens + 1) // 2
    return float(load.tokens * weights + cached * token)


def in_process(out: Console, options: argparse.Namespace, side: str, model: Path, left_s: float) -> dict | None:
    """A side's result from a process of its own; none if it failed, whose end is then printed."""
    result = options.work / f"engine-{side}.json"
    result.unlink(missing_ok=True)
    spec = {"model": str(model), "sequences": options.sequences, "tokens": options.tokens, "rounds": options.rounds}
    given = json.dumps({**spec, "result": str(result), "utilization": options.utilization, "rollout": options.rollout})
    script = [HERE / "gpu_engine.py", "--inside"] if side == "ours" else [HERE / "gpu_vllm.py"]
    path = str(HERE.parent) if side == "ours" else options.peer_path
    log = result.with_suffix(".log")
    environment = {"PYTHONPATH": path}
    watch([sys.executable, *script, given], log, done=result.exists, deadline_s=left_s, environment=environment)
    if not result.exists():
        out.print(f"{side} was not measured:\n{tail_of(log)}", markup=False)
        return None
    return json.loads(result.read_text())


def inside(spec: dict[str, Any]) -> None:
    """The process of our own side."""
    load = Load(sequences=spec["sequences"], tokens=spec["tokens"], rounds=spec["rounds"])
    found = measure_ours(Path(spec["model"]), load, spec["rollout"], tiny=False)
    aside = Path(spec["result"]).with_suffix(".part")
    aside.write_text(json.dumps(found))
    aside.rename(spec["result"])


def compare(out: Console, options: argparse.Namespace, size: str, budget: Budget) -> list[tuple[str, float, str]]:
    """One size: its table, and its ratios."""
    model = prepared(options.work, size, tokenizer=options.tokenizer)
    if options.tiny:
        ours = measure_ours(model, TINY, options.rollout, tiny=True)
    else:
        ours = in_process(out, options, "ours", model, budget.left_s)
    theirs = None
    if options.peer == "vllm":
        if has_package("vllm", options.peer_path):
            theirs = in_process(out, options, "vllm", model, budget.left_s)
        else:
            out.print("vLLM: not measured, vllm is not installed (see --peer-path)")
    load = TINY if options.tiny else Load(sequences=options.sequences, tokens=options.tokens, rounds=options.rounds)
    total, rows, ratios = load.sequences * load.tokens, [], []
    for name, found in (("meshloom", ours), ("vLLM", theirs)):
        if found is not None:
            best = min(found["seconds"][1:])
            row = [name, *(f"{total / took:,.0f}" for took in (found["seconds"][0], best))]
            rows.append([*row, f"{best:.2f}", f"{best / load.tokens * 1e3:.2f}"])
    headings = ["side", "first round tokens/s", "tokens/s", "s", "ms a token of each sequence"]
    print_table(out, f"{size}: {load.sequences} sequences × {load.tokens} tokens, log-probs on", headings, rows)
    if ours is not None:
        best = min(ours["seconds"][1:])
        share = ours["decode_bytes"] / best / ours["copy_bandwidth"]
        out.print(
            f"{size}: decoding must read {ours['decode_bytes'] / 1e9:.1f} GB, {ours['decode_bytes'] / best / 1e12:.3f} TB/s of "
            f"{ours['copy_bandwidth'] / 1e12:.3f} TB/s that a copy reads and writes"
        )
        ratios.append((size, share, "bytes that must be read ÷ seconds ÷ copy bandwidth"))
        if theirs is not None:
            ratios.append((size, min(theirs["seconds"][1:]) / best, "tokens a second, ours ÷ vLLM's"))
    return ratios


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=["0.5b", "1.5b", "3b", "7b"], default=["0.5b"])
    parser.add_argument("--peer", choices=["vllm", "none"], default="none")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2, help="the fastest after the first counts")
    parser.add_argument("--utilization", type=float, default=0.5, help="share of the GPU's memory for vLLM")
    parser.add_argument("--rollout", type=json.loads, default={}, help="further rollout settings of ours, as JSON")
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside)
        return
    out, budget = console(), Budget(options.budget_s)
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    ratios = []
    for size in ["tiny"] if options.tiny else options.sizes:
        ratios += compare(out, options, size, budget)
    out.print(versions_line(options.peer_path))
    for name, ratio, meaning in ratios:
        print_ratio(out, name, ratio, meaning)


if __name__ == "__main__":
    main()
